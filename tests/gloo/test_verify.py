"""Whole runs that compute some steps twice: the same numbers; and one message where a machine computes
wrongly."""

from __future__ import annotations

import socket

import pytest
import torch

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, losses, metrics
from threed.features.pipeline.run import PipelineRun
from threed.models.layers.experts import Routes
from threed.program.instruction import Slot

TOY = ["train", "configs/toy.yaml", "model.layers=4", "model.hidden=32", "model.seq_len=32",
       "model.vocab=300",
       "train.global_batch_size=4", "train.micro_batch_size=1", "train.eval_every=3",
       "monitor.wandb=disabled", "parallel.dp=1",
       "train.steps=5", "checkpoint.every=2", "zero.stage=2"]


@pytest.fixture
def start(tmp_path, cache):
    """start(*overrides) -> a run in tmp_path/name; what still runs at the end is killed."""
    runs = []

    def begin(name: str, *overrides: str) -> Run:
        runs.append(Run(tmp_path, *TOY, *cache, f"run.dir={tmp_path / name}", *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def test_the_same_numbers(start, tmp_path):
    """Losses and traffic of steps that were computed twice; the first time is told apart, and counted."""
    for name, overrides in (("once", []), ("twice", ["run.verify_every=2", "checkpoint.every=1"])):
        run = start(name, *overrides)
        assert run.wait() == 0, run.output
    assert losses(tmp_path / "once") == losses(tmp_path / "twice")
    once, twice = metrics(tmp_path / "once"), metrics(tmp_path / "twice")
    assert [row["integrity/verified_steps"] for row in twice] == [0, 1, 1, 2, 2]
    assert [row.get("integrity/rehearsal_s", 0) > 0 for row in twice] == [False, True, False, True, False]
    for axis in ("dp", "tp", "pp"):  # neither a rehearsal's nor an evaluation's bytes are a step's
        assert len({row[f"comm/bytes_{axis}"] for row in (*once, *twice)}) == 1
    assert not any(key.startswith("integrity/") for row in once for key in row)


def test_a_rank_that_computes_wrongly(start, tmp_path, monkeypatch):
    """One bit in one output of one rank, in step 4: the run ends with one message, and does not start again;
    its checkpoint stands."""
    def wrong(self, instruction, slots):
        original(self, instruction, slots)
        self.ran = getattr(self, "ran", 0) + (instruction[1:3] == (4, 2) and instruction.keep != "none")
        if self.comm.rank == 3 and self.ran == 6 and instruction[1:3] == (4, 2):  # 1, 2 twice, 3, 4 twice
            slots.get(Slot("act", 4, 2)).view(-1).view(torch.int32)[7] ^= 1

    original = PipelineRun.forward
    monkeypatch.setattr(PipelineRun, "forward", wrong)
    run = start("run", "run.verify_every=2", "parallel.stage_units=[3,3]", "run.restarts=2")
    assert run.wait() == 3, run.output
    reason = "the newest checkpoint may hold wrong results of a machine"
    assert f"not started again: {reason}" in run.output, run.output
    assert run.output.count("was computed twice") == 1 and "Traceback" not in run.output, run.output
    assert ("step 4 was computed twice, with two results: first in the output of u4 (blocks.3), micro-batch "
            f"2, FORWARD, on rank 3 (pp1 dp0 tp1) on host {socket.gethostname()}: at least 1 of 1024 "
            "elements differ") in run.output, run.output
    assert ("The last step that was verified is 2: do not trust later checkpoints; resume "
            "from one") in run.output
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().startswith("step-00000002")
    monkeypatch.undo()
    again = start("run", "run.verify_every=2", "parallel.stage_units=[3,3]")
    assert again.wait() == 0 and "after step 2" in again.output, again.output


def test_a_rank_that_routes_wrongly(start, monkeypatch):
    """One token's experts, on one rank, in step 4: other ranks get other numbers of rows, and it is named."""
    def wrong(self, scores, batch):
        picks = original(self, scores, batch)
        self.chose = getattr(self, "chose", 0) + batch.train
        first = self.chose == 4 * (1 + 2 + 1 + 1) + 1  # of 4 micro-batches; steps 2 and 4 run twice
        if self.context.groups["ep"].rank() == 1 and self.name == "blocks.2" and first:
            picks[0] = (picks[0] + 2) % 4
        return picks

    original = Routes._choice
    monkeypatch.setattr(Routes, "_choice", wrong)
    run = start("run", "run.verify_every=2", "model.family=moe", "model.activation=swiglu", "model.experts=4",
                "model.expert_ffn_hidden=16", "parallel.sequence_parallel=true", "parallel.ep=2")
    assert run.wait() == 3, run.output
    assert ("step 4 was computed twice, with two results: first in the output of u7 (blocks.2), micro-batch "
            "0, FORWARD, on rank 1 (pp0 dp0 tp1)") in run.output, run.output
