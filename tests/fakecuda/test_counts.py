"""How often a step makes the host wait, what it copies, and how many bytes of the host are pinned: golden,
because each is time, or memory, that no test of numbers notices.
`python -m tests.fakecuda.test_counts` writes them anew.
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
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import analyse, make_mesh
from threed.program.instruction import Tier
from threed.schema import Config

GOLDEN = Path(__file__).parents[1] / "golden" / "device_counts.json"
CONFIGS = {
    "one rank": [],
    "one rank, bf16": ["precision.dtype=bf16"],
    "one rank, fp16 with clipping": ["precision.dtype=fp16", "optimizer.clip_grad=1"],
    "one rank, bf16, CUDA graphs": ["precision.dtype=bf16", "run.cuda_graphs=true"],
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
    copies = {name: counts[1][name] - counts[0].get(name, 0) for name in sorted(counts[1])
              if name not in ("launches", "races") and counts[1][name] != counts[0].get(name, 0)}
    pinned = {f"pinned bytes of {what}": size for what, size in pinned_bytes(config).items() if size}
    return {**copies, **pinned}


def pinned_bytes(config: Config) -> dict[str, int]:
    """All ranks' bytes of the host that are pinned: of what crosses the link to the device, and of optimizer
    state, which does not."""
    analysis = analyse(config)

    def work(comm: Comm) -> dict[str, int]:
        engine = Engine(analysis, comm)
        states = [*engine.zero.states.values()]
        pools = states[0].optimizer_state.storage.host_states.first.values()
        rows = [each.snapshot.rows for each in states
                if each.snapshot is not None and each.part.unit.state_home != Tier.DEVICE]
        state = [*(buffer for each in states for buffer in each.optimizer_state.buffers.values()),
                 *(each.optimizer_state.master for each in states if each.optimizer_state.separate),
                 *pools, *rows]
        storage = engine.storage
        crossing = [storage.adding, *(each.gradient.host for each in states),
                    *(buffer for pool in (storage.host_grads, storage.host_weights)
                      for free in pool._free.values() for buffer in free)]
        crossing += [each.weights.at_home for each in states if each.part.unit.weight_home == Tier.HOST]
        found = {what: sum(tensor.nbytes for tensor in some if tensor.device.type == "cpu"
                           and tensor.is_pinned())
                 for what, some in (("state", state), ("gradients and weights", crossing))}
        engine.close()
        return found

    ranks = run_loopback(analysis.plan, make_mesh(config), work)
    return {what: sum(each[what] for each in ranks) for what in ranks[0]}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step(name, fake_gpus):
    assert fake_gpus.run(of_a_step, tiny(*SMALL, *CONFIGS[name])) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_state_is_not_pinned(name):
    """It never crosses the link, and is most of what is on the host."""
    assert "pinned bytes of state" not in json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", [name for name, more in CONFIGS.items()
                                  if not any("offload.o" in each or "fp16" in each for each in more)])
def test_the_host_waits_for_nothing(name):
    """Results are read when somebody asks, and updates have their numbers on the device. (For a dynamic loss
    scale the host waits, behind the updates; the host's own updates wait for gradients.)"""
    assert not [what for what in json.loads(GOLDEN.read_text())[name] if "synchron" in what or "able" in what]


def write() -> None:
    server = Server()
    counts = {name: server.run(of_a_step, tiny(*SMALL, *overrides)) for name, overrides in CONFIGS.items()}
    GOLDEN.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    from tests.fakecuda import test_counts  # (the server imports functions by the name of their module)

    test_counts.write()
