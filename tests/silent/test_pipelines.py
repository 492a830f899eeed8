"""Rows 23 to 29 of docs/silent-faults.md: pipelines and communicators, what grows, what disturbs a step,
bytes of uneven stages, prompts of uneven lengths, and the divisor of a loss of one's own."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threed
from tests import own
from tests.harness import SETTINGS, batches, collect, drive, loopback, same_bits, tiny
from tests.late import be_late
from tests.loopback import test_generation, test_saved
from tests.loopback.test_checkpoint import COUNTERS, named
from tests.loopback.test_memory import reach, tensors
from tests.silent.test_gradients import SMALL, schedule
from threed.base.errors import InputError, RunError
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.comm.process import ProcessComm, file_store
from threed.data.sampling import Sampling
from threed.engine.engine import Engine
from threed.engine.loopback import ThreadChannel, ThreadGroup, channel_pairs, run_loopback
from threed.planner import make_mesh, make_plan
from threed.prediction.hardware import Hardware
from threed.prediction.peak import communicators
from threed.program.analysis import Analysis
from threed.program.summary import stages
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.training.generation import TextWriter
from threed.training.trainer import mean_loss

pytestmark = pytest.mark.usefixtures("one_core")

# ---------------------------------------------------------------- 23, 24: messages between two ranks


def ranks_are_late(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Each rank sleeps at random before instructions: now one is far ahead of the others, now another."""
    init, draws = Engine.__init__, {rank: random.Random(100 * seed + rank) for rank in range(16)}

    def delayed(self: Engine, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        draw = draws[self.comm.rank]

        def late(handler: Any) -> Any:
            def handle(instruction: Any, slots: Any) -> Any:
                if draw.random() < 0.2:
                    time.sleep(draw.choice((0.0005, 0.002, 0.008)))
                return handler(instruction, slots)
            return handle

        self.handlers = {op: late(handler) for op, handler in self.handlers.items()}

    monkeypatch.setattr(Engine, "__init__", delayed)


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_that_are_late(name, monkeypatch):
    """Whichever rank is ahead, each message reaches the receive that waits for it, and no rank waits for
    good: the numbers are those of ranks that keep step, to the bit."""
    config = tiny(*SMALL, "model.layers=8", "parallel.pp=4", *schedule(name), "zero.stage=2",
                  "parallel.dp=2", f"train.global_batch_size={2 * max(6, SCHEDULES[name].least(4))}")
    plan = make_plan(config)
    runs = [loopback(config, 2, plan)]
    for seed in (1, 2):
        with monkeypatch.context() as patch:
            ranks_are_late(patch, seed)
            if seed == 2:
                be_late(patch, seed)  # and what its lanes do
            runs.append(loopback(config, 2, plan))
    same_bits(runs)


def connected(rank: int, path: str, config: Config) -> tuple[int, int]:
    """Pipeline position, and the communicators that a rank has."""
    plan = make_plan(config)
    store = file_store(path, config.world_size)
    comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), 30.0, store)
    try:
        comm.open_channels(channel_pairs(plan))
        made = len({name for name, group in comm.groups.items() if group.size() > 1}) + len(comm.channels)
        comm.all_gather(None)
        return comm.here.position, made
    finally:
        comm.close()


@pytest.mark.parametrize("others", [
    ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2"], ["parallel.dp=4", "parallel.pp=2",
                                                          "zero.shard_size=2", "zero.stage=3"],
    ["parallel.pp=8", "parallel.schedule=zb-v"], ["parallel.pp=4", "parallel.schedule=interleaved",
                                                  "parallel.virtual_stages=2", "parallel.tp=2"],
    ["parallel.pp=4", "parallel.schedule=dualpipe-v", "train.eval_every=1", "model.tie_embeddings=false"],
    ["parallel.pp=4", "parallel.schedule=1f1b", "train.eval_every=1", "train.sample_every=1",
     "train.sample_prompts=[a]"]], ids=" ".join)
def test_the_plan_counts_communicators(others, workers):
    """As many as a rank really opens, at every position, and their memory is in what a device has taken: an
    estimate without them is low by as much."""
    config = tiny("model.layers=16", "train.global_batch_size=16", *others)
    plan = make_plan(config)
    planned = [communicators(plan, position) for position in range(config.parallel.pp)]
    for position, made in workers.run(connected, config.world_size, config):
        assert made == planned[position], position
    machine = Hardware.parse("h100-sxm")
    assert machine.communicator_gb > 0
    assert machine.taken_bytes(5) - machine.taken_bytes(4) == round(1e9 * machine.communicator_gb)


# ---------------------------------------------------------------- 25: what lives on


@pytest.mark.parametrize("others", [
    ["parallel.pp=2", "parallel.schedule=zb-v", "zero.stage=3"],
    ["parallel.pp=2", "activation.policy=full", "activation.offload=cpu", "offload.optimizer=cpu"]],
    ids=" ".join)
def test_nothing_grows_over_200_steps(others):
    """Objects that Python knows, tensors, hooks on them, and resident memory, after 40 steps and after 200:
    one more a step would be 160. (Threads of lanes may still end a job.)"""
    config = tiny(*SMALL, "train.global_batch_size=6", *others)
    plan, seen = make_plan(config), []

    def look() -> tuple[int, int, int, int]:
        gc.collect()
        everything = gc.get_objects()
        found = tensors(everything)
        hooks = sum(len(each._backward_hooks or ()) for each in found)
        return len(everything), len(found), hooks, psutil.Process().memory_info().rss

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        for number in range(1, 201):
            engine.train_step(batches(config, comm, number % 5))
            if number in (40, 200):
                comm.all_gather(None)  # all are here, and wait while rank 0 looks
                if comm.rank == 0:
                    seen.append(look())
                comm.all_gather(None)
        engine.close()

    run_loopback(plan, make_mesh(config), work)
    early, late = seen
    assert late[0] - early[0] < 80 and late[1] - early[1] < 20 and late[2] == early[2], (early, late)
    assert late[3] - early[3] < 4 << 20, (early, late)


# ---------------------------------------------------------------- 26: other programs between two steps

BETWEEN = {
    "1f1b": ["parallel.pp=2"], "zb-v": ["parallel.pp=2", "parallel.schedule=zb-v", "zero.stage=1"],
    "sums": ["parallel.dp=2", "zero.stage=2", "zero.reduce_every=step"],
    "zero-3": ["parallel.dp=2", "parallel.pp=2", "zero.stage=3", "zero.residency=2"],
    "overlap": ["parallel.dp=2", "offload.optimizer=cpu"],
    "gradients": ["parallel.dp=2", "zero.stage=2", "offload.optimizer=cpu", "offload.gradients=host"],
    "parameters": ["parallel.dp=2", "parallel.pp=2", "zero.stage=3", "offload.optimizer=cpu",
                   "offload.parameters=cpu"],
    "nvme": ["parallel.dp=2", "zero.stage=3", *SETTINGS["offload"]["nvme+parameters"]],
    "bf16": ["parallel.dp=2", "precision.dtype=bf16", "zero.stage=2"],
    "dropout": ["parallel.pp=2", "model.dropout=0.1", "activation.policy=full"],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_steps_with_others_between_them(name):
    """An evaluation, and texts of other lengths than the model's windows, after every step: steps, gradients
    and weights are those of a run without them, to the bit."""
    config = tiny(*SMALL, "train.eval_every=1", "train.sample_every=1", "train.sample_prompts=[a]",
                  *BETWEEN[name])
    plan, mesh = make_plan(config), make_mesh(config)

    def work(comm: Comm, others: bool) -> Any:
        engine = Engine(Analysis(plan), comm)

        def disturbed(batch: Any) -> Any:
            result, after = engine.train_step(batch), engine.after
            if others:
                engine.after = None
                engine.run("evaluate", batches(config, comm, 7, train=False))
                for lengths in ((1, 2, 3), (13,)):
                    TextWriter(engine, config.model.vocab).write([list(range(1, n + 1)) for n in lengths],
                                                                 Sampling(3, 0.0))
                engine.after = after
            return result

        return drive(config, engine, comm, 4, disturbed)

    runs = [collect(config, run_loopback(plan, mesh, lambda comm, on=on: work(comm, on)))
            for on in (False, True)]
    same_bits(runs)


# ---------------------------------------------------------------- 27: bytes of uneven stages

UNEVEN = {
    "many-first": [*test_saved.PP, "parallel.stage_units=[5,1]"],
    "many-last": [*test_saved.PP, "parallel.stage_units=[1,5]", "zero.stage=3", "parallel.dp=2"],
    "four": ["parallel.pp=4", "parallel.stage_units=[1,1,3,1]", "parallel.schedule=gpipe"],
    "recomputed": [*test_saved.PP, "parallel.stage_units=[4,2]", "activation.policy=full"],
    "two-each": [*test_saved.PP, "parallel.schedule=interleaved", "parallel.virtual_stages=2",
                 "parallel.stage_units=[1,1,3,1]"],
}


@pytest.mark.parametrize("name", UNEVEN)
def test_bytes_of_uneven_stages(name, monkeypatch):
    """On every rank: parameters, gradients and optimizer state to the byte, and the peak of activations, less
    what the test of even stages leaves out, too."""
    for kind, call in ((ThreadGroup, "_call"), (ThreadChannel, "_send")):
        monkeypatch.setattr(kind, call, test_saved._unseen(getattr(kind, call)))
    config = tiny(*test_saved.SIZES, "model.layers=4", *UNEVEN[name])
    plan, mesh = make_plan(config), make_mesh(config)
    rows, table = stages(Analysis(plan)), plan.table
    assert len({row.parameters for row in rows}) > 1

    def held(comm: Comm) -> int:
        engine = Engine(Analysis(plan), comm)
        engine.train_step(batches(config, comm, 0))
        size = sum(reach([engine.states, engine.zero._staging]).values())
        engine.close()
        return size

    for rank, (size, seen) in enumerate(zip(run_loopback(plan, mesh, held), test_saved.watch(config, plan),
                                            strict=True)):
        position = mesh.coordinate(rank).position
        row = rows[position]
        planned = row.fixed_bytes
        assert size == pytest.approx(planned, rel=1e-3), (rank, size, planned)
        data = 2 * 8 * config.train.global_batch_size // config.dp * config.model.seq_len
        peak, most = row.activation_peak_bytes, max(*seen.before, *seen.after)
        assert peak - table.act_bytes - data <= most <= 1.02 * peak, (rank, peak, most)


# ---------------------------------------------------------------- 28: prompts that end at different times


@pytest.mark.parametrize("prompts", [
    [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8], [2, 7]], [[1]], [[4], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]],
    [[n + 1] * (1 + 3 * n) for n in range(7)]], ids=lambda prompts: "-".join(str(len(p)) for p in prompts))
@pytest.mark.parametrize("mesh", [["parallel.dp=2"], ["parallel.dp=4"],
                                  ["parallel.dp=2", "parallel.pp=2", "parallel.tp=2"]], ids=" ".join)
def test_prompts_of_uneven_lengths(mesh, prompts, monkeypatch):
    """Under ZeRO-3 all ranks of dp gather each layer, also those whose texts have ended, or that have none:
    the texts are those of one process, and end where its texts end."""
    monkeypatch.setattr(test_generation, "PROMPTS", prompts)
    small = [*test_generation.SMALL, f"train.sample_prompts=[{','.join('a' for _ in prompts)}]"]  # how many
    alone, how = tiny(*small, "train.global_batch_size=4"), Sampling(9, 1.5, 0.9, seed=3)
    free = test_generation.written(alone, how)
    ends = free[0].ids[3], free[-1].ids[6]
    config = tiny(*small, "zero.stage=3", "train.global_batch_size=4", *mesh)
    texts = test_generation.written(config, how, ends=ends)
    assert texts == test_generation.written(alone, how, ends=ends)
    assert any(text.ended for text in texts)
    assert len({len(text.ids) for text in texts}) > 1 or len(texts) == 1


# ---------------------------------------------------------------- 29: unequal counts of tokens


class Counted:
    """Item i has i mod 5 targets that count, of 4; in most micro-batches of one there are fewer than in the
    others, in some there are none."""

    def __init__(self, shift: int = 0):
        self.shift = shift

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index + 100 * self.shift)
        labels = torch.randint(0, 3, (4,), generator=draw)
        labels[(index + self.shift) % 5:] = -100
        return torch.randn(4, 6, generator=draw), labels


class Layer(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.into, self.out = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.into(x)))


def counted(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def average(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return counted(logits, labels)[0] / (labels != -100).sum().clamp(min=1)


LAYERS = [threed.Spec(Layer, 6), threed.Spec(Layer, 6), threed.Spec(Layer, 6), threed.Spec(nn.Linear, 6, 3)]
COUNTS = threed.Layers(LAYERS, counted, (Counted(), Counted(2)))
PP, DP = "parallel.pp=2", "parallel.dp=2"
EVERY = ["train.micro_batch_size=1", "train.eval_every=1"]


@pytest.mark.parametrize("others", [
    ["zero.stage=0"], ["train.micro_batch_size=4"], [DP, "zero.stage=0", "optimizer.clip_grad=0.05"],
    [DP, "zero.stage=1", PP], [DP, "zero.stage=2", "zero.reduce_every=step"],
    [DP, "zero.stage=2", "zero.reduce_every=2", PP, "parallel.schedule=zb-h1"],
    [DP, "zero.stage=3", PP, "parallel.schedule=zb-v", "optimizer.clip_grad=0.05"],
    [DP, "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu", "optimizer.clip_grad=0.05"],
    [DP, PP, "activation.policy=full", "offload.optimizer=cpu", "offload.ratio=0.5"],
    ["parallel.dp=4", "zero.stage=3", "zero.shard_size=2"],
    [DP, PP, "precision.dtype=bf16", "zero.stage=2"],
    [DP, "precision.dtype=fp16", "precision.loss_scale=128", "optimizer.clip_grad=0.05"],
    [DP, PP, "precision.dtype=fp16", "zero.stage=3", "offload.optimizer=cpu"]], ids=" ".join)
def test_a_loss_that_counts(others):
    """Losses, gradients, norms, clipping, weights and the loss of an evaluation, against plain torch, where
    the sum over the global batch is divided by its count before backward."""
    own.assert_own(own.own(COUNTS, *EVERY, *others))


@pytest.mark.parametrize("others", [[], [PP, "zero.stage=2"]], ids=str)
def test_a_loss_that_counts_and_an_update_that_waits(others):
    """Each step's gradients are divided by the count of their own batch, though they are applied at the head
    of the next step: the numbers of plain torch, and to the bit those of a step that ends with its update."""
    usual = [*EVERY, DP, *others, "train.steps=4", "offload.optimizer=cpu", "optimizer.clip_grad=0.05"]
    own.assert_own(own.own(COUNTS, *usual))
    same_bits([own.run(own.own(COUNTS, *usual, f"offload.overlap={when}"), 4) for when in ("next", "none")])


def test_an_evaluation_weighs_batches_by_their_counts():
    """Of three global batches, as tokens weigh and not as batches do."""
    config = own.own(COUNTS, *EVERY, DP, "train.eval_batches=3")
    plan = make_plan(config)
    got = set(run_loopback(plan, make_mesh(config), lambda comm: mean_loss(Engine(Analysis(plan), comm),
                                                                           own.samples_of(config)[1])))
    plain = own.Reference(config)
    plain.split = own.samples_of(config)[1]
    with torch.no_grad():
        parts = [plain.loss(first, False) for first in range(24)]
    assert {number for _, number in got} == {24}
    assert got.pop()[0] == pytest.approx(sum(total.item() for total, _ in parts) / sum(n for _, n in parts))


def test_a_batch_in_which_nothing_counts():
    """Its loss is 0 and its gradients are zeros: no number is divided by 0."""
    empty = [(torch.randn(4, 6), torch.full((4,), -100))] * 8
    ranks = own.run(own.own(threed.Layers(LAYERS, counted, empty), DP), 1)
    assert ranks.losses == ranks.norms == [0.0]
    assert all(bool(value.isfinite().all()) for value in ranks.weights.values())


@pytest.mark.parametrize(("loss", "words"), [
    (lambda out, labels: (average(out, labels), None), "a pair whose second is no number"),
    (lambda out, labels: (average(out, labels), labels), "a pair whose second is no number"),
    (lambda out, labels: (1.0, 2), "is a float"),
    (lambda out, labels: (average(out, labels), 1, 2), "is a tuple")], ids=range(4))
def test_pairs_that_are_none(loss, words):
    with pytest.raises(InputError, match=words):
        threed.plan(own.own(threed.Layers(LAYERS, loss, Counted()), DP))


@pytest.mark.parametrize(("loss", "words"), [
    (lambda out, labels: (average(out, labels), -1.0), "whose sum over the global batch is -8"),
    (lambda out, labels: (average if type(labels) is torch.Tensor else counted)(out, labels),  # in the run
     "a pair in some calls and a number in others")], ids=range(2))
def test_counts_that_are_none(loss, words):
    with pytest.raises(RunError, match=words):
        own.run(own.own(threed.Layers(LAYERS, loss, Counted()), DP), 1)


@pytest.mark.parametrize(("loss", "data", "others", "said"), [
    (average, Counted(), [DP], True), (average, Counted(), [], True), (counted, Counted(), [DP], False),
    (average, Counted(), ["train.micro_batch_size=8"], False),  # there is one micro-batch
    (lambda out, labels: F.cross_entropy(out.mean(1), labels), [(torch.randn(4, 6), 1)] * 8, [DP], False)],
    ids=range(5))
def test_a_mean_over_a_micro_batch_is_said(loss, data, others, said):
    config = own.own(threed.Layers(LAYERS, loss, data), *others)
    found = [line for line in threed.check(config)["warnings"] if "let the loss return (sum, count)" in line]
    assert len(found) == said


def test_gradients_that_wait_are_applied_before_a_checkpoint(tmp_path):
    """A checkpoint between a step and its update, which the next step would have run: what goes on has the
    bits of the run that did not stop."""
    late = own.own(COUNTS, *EVERY, DP, "optimizer.lr=0.05", "train.steps=5", "offload.optimizer=cpu",
                   f"run.dir={tmp_path}")
    plan, paths = make_plan(late), list[Path]()

    def work(comm: Comm, stops: bool) -> list[float]:
        config = late if stops or not paths else named(late, paths[0])
        engine, found = Engine(Analysis(plan), comm), list[float]()
        if paths:
            resume(config, engine.zero)
        for number in range(engine.zero.step_number, 3 if stops else 5):
            found.append(engine.train_step(own.batches(config, comm, number))[0].loss)
        if stops:
            saver = Saver(engine, Lineage("test-0"), lambda: None)
            saver.begin(COUNTERS)
            outcome = saver.drain()
            assert outcome is not None and outcome.problem is None, outcome
            found.append(outcome.path)  # pyright: ignore
        engine.close()
        return found

    whole, stopped = (run_loopback(plan, make_mesh(late), lambda comm, stops=stops: work(comm, stops))[0]
                      for stops in (False, True))
    paths.append(stopped.pop())  # pyright: ignore
    assert stopped == whole[:3]
    assert run_loopback(plan, make_mesh(late), lambda comm: work(comm, False))[0] == whole[3:]
