"""Faults to put into threed, which the oracle must see. Each is a context, and knows in which cells it does
anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tests.oracle import drive
from tests.oracle.cells import Cell
from tests.oracle.comparison import compare
from tests.oracle.corpus import Wrong
from threed.comm.group import sum_parts
from threed.engine import loopback
from threed.engine.engine import Engine
from threed.tensor import context, experts
from threed.tensor.context import Batch
from threed.training.trainer import batches_of


@contextmanager
def gradients_times_ranks() -> Iterator[None]:
    """What is summed over dp is multiplied by its ranks once more."""
    def times(parts: Any, output: torch.Tensor, add: bool) -> None:
        sum_parts([len(parts) * part for part in parts], output, add)

    with patch.object(loopback, "sum_parts", times):
        yield


@contextmanager
def no_decay_on_one_rank() -> Iterator[None]:
    original = Engine.__init__

    def init(self: Engine, config: Any, plan: Any, comm: Any, **rest: Any) -> None:
        if comm.rank == comm.mesh.size - 1:
            config = replace(config, optimizer=replace(config.optimizer, weight_decay=0.0))
        original(self, config, plan, comm, **rest)

    with patch.object(Engine, "__init__", init):
        yield


def _other_batches(change: Callable[[Engine, Batch, int], Batch]) -> Any:
    def other(engine: Engine, split: Any, start: int) -> Callable[[int], Batch]:
        read = batches_of(engine, split, start)
        return lambda microbatch: change(engine, read(microbatch), microbatch)

    return patch.object(drive, "batches_of", other)


def dropped_microbatch() -> Any:
    """The last micro-batch of the first replica counts in no loss, but in the divisor."""
    def change(engine: Engine, batch: Batch, microbatch: int) -> Batch:
        last = engine.config.num_microbatches - 1
        dropped = microbatch == last and engine.comm.here.replica == 0
        return replace(batch, labels_BS=torch.full_like(batch.labels_BS, -1),
                       num_tokens=torch.as_tensor(batch.num_tokens)) if dropped else batch

    return _other_batches(change)


def mean_of_means() -> Any:
    """The loss of a step is the mean over micro-batches, whatever their tokens."""
    def change(engine: Engine, batch: Batch, microbatch: int) -> Batch:
        mine = (batch.labels_BS >= 0).sum().clamp(min=1)
        return replace(batch, num_tokens=mine * engine.config.num_microbatches * engine.config.dp)

    return _other_batches(change)


@contextmanager
def wrong_rope_base() -> Iterator[None]:
    with patch.object(context, "frequencies", lambda model: _frequencies(model) * 1.01):
        yield


_frequencies = context.frequencies


@contextmanager
def last_of_equal_ones() -> Iterator[None]:
    """Of equal weights the last tokens are computed within an expert's capacity, not the first."""
    original = experts.within

    def within(picks: torch.Tensor, weights: torch.Tensor, *sizes: int) -> torch.Tensor:
        return original(picks.flip(0), weights.flip(0), *sizes).flip(0)

    with patch.object(experts, "within", within):
        yield


class Fault(NamedTuple):
    put: Callable[[], Any]
    does: Callable[[Cell], bool]  # whether it does anything in a cell

    def seen(self, seed: str, number: int, folder: Path) -> str:
        """By what the oracle sees it in a cell; "" where it does not."""
        try:
            return "; ".join(compare(seed, number, folder, self.put).problems())
        except Wrong as error:
            return str(error)


def _counts_differ(cell: Cell) -> bool:
    keys = cell.keys
    return (cell.values["data"] != "stream" and cell.values["data"] != "repeated"
            and keys["train.global_batch_size"] > keys["train.micro_batch_size"])


FAULTS = {
    "gradients-times-ranks": Fault(gradients_times_ranks, lambda cell: cell.keys["parallel.dp"] > 1),
    "no-decay-on-one-rank": Fault(
        no_decay_on_one_rank, lambda cell: cell.keys["optimizer.weight_decay"] > 0
        and cell.values["dtype"] == "fp32" and cell.keys["parallel.dp"] > 1 and cell.keys["zero.stage"] > 0),
    "dropped-microbatch": Fault(dropped_microbatch, lambda cell: True),
    "mean-of-means": Fault(mean_of_means, _counts_differ),
    "wrong-rope-base": Fault(wrong_rope_base,
                             lambda cell: cell.family != "gpt2" and cell.values["dtype"] == "fp32"),
    "last-of-equal-ones": Fault(
        last_of_equal_ones, lambda cell: cell.keys.get("model.moe_capacity") is not None
        and cell.values["dtype"] == "fp32" and cell.values["data"] == "repeated"),
}
