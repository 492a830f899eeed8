"""What a step asks of a GPU: kernels of each unit, copies to the device, and numbers that the host waits for.

On the device `meta`, which computes nothing. tests/golden/kernels.json has the counts, so that a new kernel
or a new wait is seen in review. If it is right, write the file anew: python -m tests.loopback.test_host_reads
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import batches, tiny
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction
from threed.schema import Config

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels.json"
META = torch.device("meta")
SMALL = ["model.layers=1", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=2", "precision.dtype=bf16", "model.fused=off"]
LLAMA = ["model.family=llama", "model.activation=swiglu", "model.norm=rmsnorm", "model.bias=false",
         "model.kv_heads=2"]
CONFIGS: dict[str, list[str]] = {
    "gpt": ["model.position=learned"],
    "gpt, dropout": ["model.position=learned", "model.dropout=0.1"],
    "gpt, recomputed": ["activation.policy=full"],
    "llama": LLAMA,
    "llama, fused": [*LLAMA, "model.fused=auto"],
    "llama, loss in chunks": [*LLAMA, "model.loss_chunk=4"],
}


class Watching(TorchDispatchMode):
    """Counts kernels, copies to and from the device, and reads by the host. A number that the host reads is
    what a good step has."""

    def __init__(self, config: Config):
        super().__init__()
        self.counts: Counter[str] = Counter()
        # a loss, a norm, a scale, that it is finite, tokens; no counts and no penalties
        self._read = [1.0, 1.0, 1.0, 1.0, float(config.tokens_per_step), *[0.0] * 4]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        target = kwargs.get("device") or (given[0].device if given else None)
        if str(func).split(".")[1] in ("pin_memory", "_pin_memory"):  # there is nothing to pin it for
            return args[0]
        if func is torch.ops.aten._local_scalar_dense.default and given[0].is_meta:
            self.counts["host reads"] += 1
            return 1.0
        if func is torch.ops.aten._to_copy.default and given[0].is_meta and target == torch.device("cpu"):
            self.counts["host reads"] += 1
            return torch.tensor(self._read, dtype=given[0].dtype)[:given[0].numel()].view(given[0].shape)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            other = given[0] if func is torch.ops.aten._to_copy.default else given[1]
            if target == META and not other.is_meta and other.numel():
                self.counts["copies to the device"] += 1
        if target == META and not func.is_view and not str(func).startswith("aten.empty"):
            self.counts["kernels"] += 1
        return func(*args, **kwargs)


def counted(config: Config) -> dict[str, dict[str, int]]:
    """Counts of the first instruction of each op on each unit, and of the rest of a step: the second."""
    plan = make_plan(config)

    def work(comm) -> dict[str, dict[str, int]]:
        comm.device = META
        engine = Engine(Analysis(plan), comm)
        rows: dict[str, dict[str, int]] = {}
        rest: Counter[str] = Counter()
        with Watching(config) as watching:
            def look(instruction: Instruction, _) -> None:
                counts, watching.counts = watching.counts, Counter()
                if instruction.op not in COMPUTE:
                    rest.update(counts)
                    return
                name = f"{instruction.op} {plan.table.units[instruction.unit].name}"
                rest.update(counts - Counter({"kernels": counts["kernels"]}))
                rows.setdefault(name, dict(counts))

            engine.train_step(batches(config, comm, 0))  # some things are made once
            watching.counts.clear()
            engine.after = look
            engine.train_step(batches(config, comm, 1))
        return {**rows, "copies and reads of a step": dict(rest)}

    (counts,) = run_loopback(plan, make_mesh(config), work)
    return counts


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_copies_and_reads(name):
    golden = json.loads(GOLDEN.read_text())
    if golden["torch"] != torch.__version__.split("+")[0]:
        pytest.skip(f"torch {golden['torch']} was counted: another has other kernels")
    assert counted(tiny(*SMALL, *CONFIGS[name])) == golden[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_host_reads_once_a_step(name):
    """CLIP's result, and nothing else: each read waits for all work before it. (Where the host and the device
    are two, that read comes later: tests/fakecuda/test_late_results.py.)"""
    counts = counted(tiny(*SMALL, *CONFIGS[name]))
    assert sum(each.get("host reads", 0) for each in counts.values()) == 1


def test_a_new_read_is_seen(monkeypatch):
    """A loss that is printed in forward, say."""
    from threed.features.pipeline.run import PipelineRun

    forward = PipelineRun.forward

    def prints(self, instruction, slots) -> None:
        forward(self, instruction, slots)
        for state in slots.alive():
            if state.kind == "loss":
                slots.get(state)[0].item()

    monkeypatch.setattr(PipelineRun, "forward", prints)
    counts = counted(tiny(*SMALL, *CONFIGS["gpt"]))
    assert sum(each.get("host reads", 0) for each in counts.values()) > 1


if __name__ == "__main__":
    counts = {name: counted(tiny(*SMALL, *others)) for name, others in CONFIGS.items()}
    GOLDEN.write_text(json.dumps({"torch": torch.__version__.split("+")[0], **counts}, indent=1) + "\n")
