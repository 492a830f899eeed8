"""Rows 23 to 29 of docs/silent-faults.md: pipelines and communicators, what grows, what a step is disturbed by,
bytes of uneven stages, prompts of uneven lengths, and the divisor of a loss of one's own."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threed
from tests import own
from tests.harness import SIXTEEN, Ranks, assert_parity, batches, loopback, same_bits, tiny
from tests.late import be_late
from tests.loopback.test_generation import plainly, written
from tests.loopback.test_memory import malloc_bytes, storages, tensors
from tests.reference import Result
from tests.silent.test_gradients import SMALL, schedule
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.comm import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import ThreadComm, channel_pairs, run_loopback
from threed.errors import InputError, RunError
from threed.pipeline.orders import SCHEDULES
from threed.planner import make_mesh, make_plan
from threed.sampling import Sampling
from threed.trainer import mean_loss

pytestmark = pytest.mark.usefixtures("one_core")

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
def test_a_loss_that_counts_and_is_late(others):
    """With a delayed update each step's gradients are divided by the count of their own batch, though they
    are applied beside the next one: with SGD and a constant rate, as many updates give the same weights,
    whatever the first step's batch counts."""
    late = own.own(COUNTS, *EVERY, DP, *others, "optimizer.name=sgd", "optimizer.lr=0.1", "train.steps=4",
                   "offload.optimizer=cpu", "offload.delayed_update=true", "offload.warmup=1",
                   "optimizer.weight_decay=0", "optimizer.clip_grad=0.05")
    got, want = own.run(late, 4), DelayedReference(late).run(4)
    assert_parity(got, want)


class DelayedReference(own.Reference):
    """Plain SGD, of which the updates of steps 2 and 3 wait for a step."""

    def run(self, steps: int) -> Result:
        result, waiting = Result([], [], {}, {}), None
        size, names = self.config.train.global_batch_size, list(self.masters)
        for step in range(steps):
            whole, total = self.whole(step, True), 0.0
            for first in range(step * size, (step + 1) * size):
                loss = self.loss(first, True)[0] / whole
                loss.backward()
                total += loss.item()
            grads = {name: self.live[name].grad.clone() for name in names}  # pyright: ignore
            norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
            result.losses.append(total)
            result.norms.append(norm)
            result.first_grads = result.first_grads or {name: grad.clone() for name, grad in grads.items()}
            clipped = {name: grad * min(1.0, 0.05 / (norm + 1e-6)) for name, grad in grads.items()}
            delayed = 1 <= step < steps - 1
            with torch.no_grad():
                for due in [each for each in (waiting, None if delayed else clipped) if each]:
                    for name in names:
                        self.live[name] -= 0.1 * due[name]
            waiting = clipped if delayed else None
            for value in self.live.values():
                value.grad = None
        result.weights = {name: value.detach() for name, value in self.live.items()}
        with torch.no_grad():
            result.evaluated = sum(self.loss(first, False)[0].item() for first in
                                   range(steps * size, (steps + 1) * size)) / self.whole(steps, False)
        return result


def test_an_evaluation_weighs_batches_by_their_counts():
    """Of three global batches, as tokens weigh and not as batches do."""
    config = own.own(COUNTS, *EVERY, DP, "train.eval_batches=3")
    plan = make_plan(config)
    got = set(run_loopback(plan, make_mesh(config), lambda comm: mean_loss(Engine(config, plan, comm),
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
