"""A cell in threed: a model of transformers is imported, all ranks train as threads, and the last weights are
exported. What the ranks have read and chosen is written down on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.config.load import load
from threed.data.mix import open_splits
from threed.data.tokens import prepare
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.interop.hf.exporting import export_model
from threed.interop.hf.importing import import_model
from threed.models.layers.base import Out
from threed.models.layers.experts import Routes
from threed.planner import analyse, make_mesh
from threed.program.analysis import Analysis
from threed.program.summary import stages
from threed.schema import Config
from threed.tensor.context import Batch
from threed.training.trainer import batches_of


class Plan(NamedTuple):
    config: Config
    analysis: Analysis


@dataclass
class Ran:
    """What a run has done. `rows`: sample -> its tokens [S]. `chosen`: (block, sample) -> the place in the
    sequence of a rank's first token -> experts [tokens of the rank, k]."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    chosen: dict[tuple[int, int], dict[int, torch.Tensor]] = field(default_factory=dict)

    def batch(self, step: int, size: int) -> torch.Tensor:
        """The rows of a step, [G, S]."""
        samples = range(step * size, (step + 1) * size)
        missing = [each for each in samples if each not in self.rows]
        assert not missing, f"no rank has read the samples {missing} of step {step}"
        return torch.stack([self.rows[each] for each in samples])

    def choices(self, step: int, size: int) -> dict[int, torch.Tensor]:
        """Block -> the experts of each token in a step, [G, S, k]."""
        blocks = sorted({block for block, _ in self.chosen})
        return {block: torch.stack([
            torch.cat([part for _, part in sorted(self.chosen[block, sample].items())])
            for sample in range(step * size, (step + 1) * size)]) for block in blocks}


def planned(folder: Path, overrides: list[str]) -> Plan:
    """The config of an import, and its plan. ThreedError where threed refuses it. A budget of activations
    becomes a third more than the least that there can be."""
    if "activation.policy=budget" in overrides:
        least = analyse(load(folder / "config.yaml", [*overrides, "activation.policy=full"]))
        most = max(row.activation_peak_bytes for row in stages(least))
        overrides = [*overrides, f"activation.budget={most * 4 // 3}"]
    config = load(folder / "config.yaml", overrides)
    return Plan(config, analyse(config))


def bring(model: Path, folder: Path, overrides: list[str]) -> None:
    """Import a folder of transformers into the folder of a run, with what `overrides` say of the model."""
    import_model(model, folder, [each for each in overrides if each.startswith("model.")])


def run(plans: list[Plan], export: Path) -> Ran:
    """Train `train.steps`, and export the weights. Of two plans the first takes one step, and the other goes
    on from its checkpoint."""
    ran, config = Ran(), plans[0].config
    split = open_splits(config, prepare(config.data, config.model))[0]
    torch.set_num_threads(1)
    with listening(ran):
        for plan in plans:
            last = 1 if plan is not plans[-1] else config.train.steps
            work = partial(_work, plan, split, ran, last)
            numbers = run_loopback(plan.analysis.plan, make_mesh(plan.config), work)
            assert all(each == numbers[0] for each in numbers), "ranks differ in loss or norm"
            ran.losses, ran.norms = ran.losses + numbers[0][0], ran.norms + numbers[0][1]
    export_model(Path(config.run.dir), export)
    return ran


def _work(plan: Plan, split: Any, ran: Ran, last: int, comm: Comm) -> tuple[list[float], list[float]]:
    """Of a rank: from the checkpoint to step `last`; losses and norms."""
    config = plan.config
    size = config.train.global_batch_size
    engine = Engine(plan.analysis, comm)
    resumed = resume(config, engine.zero)
    clipped = []
    for step in range(engine.zero.step_number, last):
        read = batches_of(engine, split, step * size)

        def batch(microbatch: int, read: Callable[[int], Batch] = read) -> Batch:
            got = read(microbatch)
            if len(got.tokens_BS):  # a stage that sees tokens
                for sample, row in zip(got.samples_B.tolist(), got.tokens_BS, strict=True):
                    assert torch.equal(ran.rows.setdefault(sample, row), row)
            return got

        clipped.append(engine.train_step(batch)[0])
    saver = Saver(engine, resumed.lineage, lambda: None)
    saver.begin({"samples": last * size, "skipped": 0, "wandb_id": None})
    outcome = saver.drain()
    assert outcome is not None and outcome.problem is None, outcome
    engine.close()
    return [each.loss for each in clipped], [each.grad_norm for each in clipped]


@contextmanager
def listening(ran: Ran) -> Iterator[None]:
    """Within the context, the choices of routers are written down."""
    original = Routes.forward

    def forward(self: Routes, x_sBD: torch.Tensor, batch: Batch, picks: torch.Tensor | None = None,
                counts: torch.Tensor | None = None) -> Out:
        out = original(self, x_sBD, batch, picks, counts)
        first = self.context.places(batch.documents).runs[0][0].start
        made = out.makes["picks"].unflatten(0, (-1, len(batch.samples_B)))
        for at, sample in enumerate(batch.samples_B.tolist()):
            key = int(self.name.rpartition(".")[2]), sample
            before = ran.chosen.setdefault(key, {}).setdefault(first, made[:, at].clone())
            assert torch.equal(before, made[:, at]), "a choice that was computed again is another one"
        return out

    with patch.object(Routes, "forward", forward):
        yield
