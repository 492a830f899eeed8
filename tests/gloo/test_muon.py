"""Muon over real processes: what is said where a rank is killed or hangs inside an exchange of matrices."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.gloo.struck import RANK, assert_killed, assert_named_without_launcher, inside_exchanges, kill
from threed.features.zero.turns import MatrixRun

TOY = ["train", "configs/toy.yaml", "optimizer.name=muon", "model.layers=2", "model.hidden=32",
       "model.heads=4", "model.seq_len=16", "model.vocab=300", "train.global_batch_size=8",
       "train.micro_batch_size=1", "train.eval_every=0", "monitor.wandb=disabled", "train.steps=100000",
       "checkpoint.every=0", "parallel.pp=1", "run.timeout_s=60"]
STEP = 3  # of dp 2 x tp 2
UNITS = 2  # whose matrices are turned


@pytest.fixture
def start(begin):
    return partial(begin, TOY)


@pytest.fixture
def strike(monkeypatch):
    """strike(kind, do, inside): on RANK, in the first exchange of this kind in a step, before its call, or
    inside: when its own call is under way."""
    exchange = MatrixRun.exchange

    def set_up(kind: str, do: Callable[[], None], inside: bool = False) -> None:
        struck: list[str] = []

        def due() -> bool:  # (a lane may make the call after the next one is issued)
            return len(struck) > UNITS * (STEP - 1)

        def issued(self, instruction, slots):
            if self.comm.rank == RANK and instruction.kind == kind:
                struck.append(kind)
                if due() and not inside:
                    do()
            return exchange(self, instruction, slots)

        monkeypatch.setattr(MatrixRun, "exchange", issued)
        if inside:
            inside_exchanges(monkeypatch, due, do)

    return set_up


@pytest.mark.parametrize("kind, inside", [("update", False), ("update", True), ("turned", True)])
def test_a_rank_that_is_killed(kind, inside, start, strike):
    strike(kind, kill, inside)
    assert_killed(start())


def test_nobody_says_who_was_killed(start, strike):
    strike("update", kill, inside=True)
    assert_named_without_launcher(start, r"'EXCHANGE update p\d \(owners\)', with ranks [0-3], [0-3]")


@pytest.mark.parametrize("kind, part", [("update", "turn"), ("turned", "end")])
def test_a_rank_that_hangs(kind, part, start, strike):
    """All name op, unit and ranks of the exchange."""
    strike(kind, partial(time.sleep, 600))
    run = start("run.timeout_s=6")
    assert run.wait(60) == 1, run.output
    for rank in range(4):
        others = ", ".join(str(other) for other in range(4) if other != rank)
        said = re.search(rf"rank {rank} \(pp0 dp\d tp\d\) for [\d.]+ s at '(.*), with ranks {others}\n",
                         run.output)
        needs = f"EXCHANGE {kind} p1 (owners)'"
        assert said and said[1] == (needs if rank == RANK else f"STEP p1 {part}', which needs '{needs}"), (
            run.output)
