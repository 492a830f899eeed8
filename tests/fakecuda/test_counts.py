"""How often a step makes the host wait, and what it copies: golden, because each is time that no test of
numbers notices. `python -m tests.fakecuda.test_counts` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakecuda import shim
from tests.fakecuda.server import Server
from tests.fakecuda.test_mutants import (
    ADDED_ON_HOST,
    KEPT_ON_HOST,
    ON_DISK,
    ON_HOST,
    SMALL,
    STEP_ON_HOST,
    ZERO3,
)
from tests.harness import loopback, tiny
from threed.schema import Config

GOLDEN = Path(__file__).parents[1] / "golden" / "device_counts.json"
CONFIGS = {
    "one rank": [],
    "one rank, bf16": ["precision.dtype=bf16"],
    "one rank, fp16 with clipping": ["precision.dtype=fp16", "optimizer.clip_grad=1"],
    "dp 2, ZeRO-1": ["parallel.dp=2", "zero.stage=1"],
    "dp 2, ZeRO-3": ZERO3,
    "tp 2, sequence parallelism": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "pp 2, zb-h1": ["parallel.pp=2", "parallel.schedule=zb-h1"],
    "documents": ["data.document_mask=true"],
    "kept inputs on the host": KEPT_ON_HOST,
    "the optimizer on the host": STEP_ON_HOST,
    "the optimizer on the host, no overlap": [*STEP_ON_HOST, "offload.overlap=none"],
    "gradients on the host": ADDED_ON_HOST,
    "parameters on the host": ON_HOST,
    "all on disk": ON_DISK,
}
STEPS = 4  # of which the last is counted


def of_a_step(config: Config) -> dict[str, int]:
    """All ranks' counts in the last of some steps."""
    counts = []
    loopback(config, 1)  # what is tried once in a process is tried here
    for steps in (STEPS - 1, STEPS):
        shim.installed.reset()
        loopback(config, steps)
        counts.append(shim.installed.counts())
    return {name: counts[1][name] - counts[0].get(name, 0) for name in sorted(counts[1])
            if name not in ("launches", "races") and counts[1][name] != counts[0].get(name, 0)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step(name, fake_gpus):
    assert fake_gpus.run(of_a_step, tiny(*SMALL, *CONFIGS[name])) == json.loads(GOLDEN.read_text())[name]


def write() -> None:
    server = Server()
    counts = {name: server.run(of_a_step, tiny(*SMALL, *overrides)) for name, overrides in CONFIGS.items()}
    GOLDEN.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    from tests.fakecuda import test_counts  # (the server imports functions by the name of their module)

    test_counts.write()
