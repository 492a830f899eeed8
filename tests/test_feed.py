"""The data of a program is read once a micro-batch, and copied to the device once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import batches, loopback, tiny
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.pipeline.feed import Feed
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op
from threed.tensor.context import Batch


def batch(number: int = 0) -> Batch:
    window = torch.arange(10).view(2, 5)
    return Batch(window[:, :-1], window[:, 1:], torch.tensor([number, 7]), 0, 8)


@pytest.mark.parametrize("others", [["activation.policy=full"], ["parallel.pp=2", "parallel.schedule=zb-v"]])
def test_each_micro_batch_is_read_once(others):
    """Each unit's FORWARD and RECOMPUTE used to read the data again."""
    config = tiny("model.layers=4", "train.global_batch_size=3", *others)
    plan = make_plan(config)

    def work(comm):
        engine, read = Engine(Analysis(plan), comm), Counter()
        make = batches(config, comm, 0)

        def counted(microbatch: int) -> Batch:
            read[microbatch] += 1
            return make(microbatch)

        engine.train_step(counted)
        assert not engine.pipeline.feed._here, "data that nobody will read is kept"
        engine.close()
        return read

    assert run_loopback(plan, make_mesh(config), work) == [dict.fromkeys(range(3), 1)] * config.world_size


def test_the_next_one_is_copied_ahead(monkeypatch):
    """On a GPU, once work with this one has been issued."""
    events: list[str] = []
    monkeypatch.setattr(Batch, "to", lambda self, device: events.append(f"copy {self.samples_B[0]}") or self)
    feed = Feed(torch.device("cuda"))
    order = [2, 0, 2, 1, 1, 0]
    feed.begin(batch, [Instruction(Op.FORWARD, 0, microbatch) for microbatch in order])
    for microbatch in order:
        events.append(f"take {feed.take(microbatch).samples_B[0]}")
        feed.ahead(microbatch)
    assert ", ".join(events) == "copy 2, take 2, copy 0, take 0, copy 1, take 2, take 1, take 1, take 0"
    assert not feed._here


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket == torch.ops.aten._to_copy
        return func(*args, **kwargs or {})


def test_one_copy(monkeypatch):
    """All of a micro-batch travels at once, from pinned memory."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with Copies() as copies:
        moved = batch(3).to(torch.device("meta"))
    assert copies.count == 1
    assert pinned[0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3, 4, 6, 7, 8, 9, 3, 7]
    assert (moved.tokens_BS.shape, moved.labels_BS.shape, moved.samples_B.shape) == ((2, 4), (2, 4), (2,))
    assert moved.tokens_BS.is_meta


def test_a_program_without_data():
    with pytest.raises(AssertionError, match="no data was set"):
        Feed(torch.device("cpu")).take(0)


def test_same_numbers_as_before():
    """Dropout masks are keyed by samples that are read once."""
    ranks = loopback(tiny("model.dropout=0.1", "activation.policy=full", "train.global_batch_size=2"), 2)
    again = loopback(tiny("model.dropout=0.1", "train.global_batch_size=2"), 2)
    assert ranks.losses == again.losses
