"""Models with experts over real processes: the numbers of one process; and what is said where a rank is
killed, hangs or fails inside an exchange of rows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.gloo.struck import RANK, assert_killed, assert_named_without_launcher, inside_exchanges, kill
from tests.gloo.test_contract import by_words
from tests.harness import Ranks, assert_contract, collect, tiny
from threed.features.travel.run import TravelRun
from threed.schema import Config

SMALL = ["model.family=moe", "model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8",
         "model.vocab=30", "model.vocab_multiple=16", "model.experts=8", "model.shared_expert_ffn=20",
         "parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true",
         "train.global_batch_size=8"]
BIAS = ["model.balance=bias", "model.router_score=sigmoid", "optimizer.balance_rate=0.05"]
CASES = {
    "zero3": ["parallel.ep=2", "zero.stage=3", *BIAS],
    "folded-zero3-zb-v-full": ["parallel.ep=4", "zero.stage=3", "parallel.schedule=zb-v",
                               "activation.policy=full", "model.balance=sequence", "train.seed=1"],
    "groups-cpu-interleaved": ["parallel.dp=4", "parallel.tp=1", "parallel.sequence_parallel=false",
                               "parallel.ep=2", "zero.stage=3", "zero.shard_size=2", "offload.optimizer=cpu",
                               "parallel.schedule=interleaved", "parallel.virtual_stages=2"],
    "pairs-dualpipe-v": ["parallel.ep=2", "parallel.schedule=dualpipe-v", "parallel.pair=true",
                         "zero.stage=2", "model.layers=4", "model.expert_ffn_hidden=96",
                         "train.global_batch_size=16"],
    "one-rank-of-experts": ["parallel.ep=1", "zero.stage=2", *BIAS],
}


@pytest.mark.parametrize("name", CASES)
def test_contract(name, workers, references):
    """8 processes. Rows of uneven counts travel beside gathers and sums of other groups."""
    words = [*SMALL, *CASES[name]]

    def run(config: Config, steps: int) -> Ranks:
        return collect(config, workers.run(by_words, config.world_size, words, steps))

    config = tiny(*words)
    assert config.world_size == 8
    assert_contract(config, references, run)


# ---------------------------------------------------------------- a rank that is lost in an exchange

TOY = ["train", "configs/toy-moe.yaml", "model.layers=2", "model.hidden=32", "model.heads=4",
       "model.seq_len=16", "model.vocab=300", "model.expert_ffn_hidden=16", "train.global_batch_size=8",
       "train.micro_batch_size=1", "train.eval_every=0", "monitor.wandb=disabled", "train.steps=100000",
       "checkpoint.every=0", "parallel.pp=1", "run.timeout_s=60"]
STEP = 3  # of dp 2 x tp 2 x ep 2: rank 0 is the peer of rank 1


@pytest.fixture
def start(begin):
    return partial(begin, TOY)


@pytest.fixture
def strike(monkeypatch):
    """strike(kind, do, inside): on RANK, in the first exchange of these slots in a step, before its call, or
    inside: when its own call is under way."""
    taken = TravelRun._taken

    def set_up(kind: str, do: Callable[[], None], inside: bool = False) -> None:
        struck: list[str] = []

        def take(self, move, *others):
            turn = move.source.kind, move.source.microbatch
            if self.comm.rank == RANK and turn == (kind, 0):
                struck.append(kind)
                if len(struck) == 2 * STEP and not inside:  # there are two blocks
                    do()
            return taken(self, move, *others)

        monkeypatch.setattr(TravelRun, "_taken", take)
        if inside:
            inside_exchanges(monkeypatch, lambda: len(struck) == 2 * STEP, do)

    return set_up


@pytest.mark.parametrize("kind, inside", [("counts", False), ("routed", True), ("garrived", True)])
def test_a_rank_that_is_killed(kind, inside, start, strike):
    strike(kind, kill, inside)
    assert_killed(start())


def test_nobody_says_who_was_killed(start, strike):
    strike("routed", kill, inside=True)
    assert_named_without_launcher(start, r"'(EXCHANGE routed u4 m0 \(ep\)|REDUCE .*)', with rank [01]: ")


WAITS = {
    "counts": "FORWARD u5 m0', which needs 'EXCHANGE routed u4 m0 (ep)', behind 'EXCHANGE counts u4 m0 (ep)'",
    "answers": "FORWARD u6 m0', which needs 'EXCHANGE answers u5 m0 (ep)'",
    "garrived": "BACKWARD u1 m0', which needs 'EXCHANGE garrived u1 m0 (ep)'",
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_rank_that_hangs(kind, start, strike):
    """It and its peer name op, tensor, unit, micro-batch and ranks of the exchange."""
    strike(kind, partial(time.sleep, 600))
    run = start("run.timeout_s=6")
    assert run.wait(60) == 1, run.output
    for rank, other in ((0, RANK), (RANK, 0)):
        said = re.search(rf"rank {rank} \(pp0 dp0 tp{rank}\) for [\d.]+ s at '(.*), with rank {other}\n",
                         run.output)
        assert said and said[1] == WAITS[kind], run.output
    assert len(re.findall(r"rank [23] \(.* behind 'REDUCE .*, with rank [01]\n", run.output)) == 2, run.output


def fail() -> None:
    raise RuntimeError("the seventh seal")


def test_a_rank_that_fails(start, strike):
    strike("routed", fail)
    run = start()
    assert run.wait(60) == 1, run.output
    assert re.search(r"threed: rank 1 \(pp0 dp0 tp1\) for [\d.]+ s at 'FORWARD u5 m0', which needs 'EXCHANGE "
                     r"routed u4 m0 \(ep\)', with rank 0\n", run.output), run.output
    assert run.output.count("  RuntimeError: the seventh seal (") == 1, run.output
