"""In which order a parallel layer's backward multiplies and communicates: what can overlap, does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from threed.comm.lanes import Handle
from threed.comm.process import initialized
from threed.models.measure import SilentGroup
from threed.tensor.layers import ColumnParallelLinear, WeightGrads, parallel_config

RANKS, S, B, I, O = 2, 4, 1, 6, 10  # O: of one rank
PRODUCTS = {(S * B, I): "x's gradient", (O, I): "the weight's gradient"}  # by the shape of their result


class Noted(SilentGroup):
    """Notes when each collective begins and is waited for."""

    def __init__(self, events: list[str]):
        super().__init__("tp", range(RANKS), 0, Counter())
        self.events = events

    def _all_reduce(self, tensor, op):
        return self._note("all-reduce", super()._all_reduce(tensor, op))

    def _reduce_scatter(self, output, tensor, add, scratch):
        return self._note("reduce-scatter", super()._reduce_scatter(output, tensor, add, scratch))

    def _all_gather(self, output, tensor):
        return self._note("all-gather", super()._all_gather(output, tensor))

    def _note(self, name: str, handle: Handle) -> Handle:
        self.events.append(name)
        return Handle(lambda: self.events.append(f"wait for {name}"))


class Products(TorchDispatchMode):
    """Notes each product of matrices, by the shape of its result."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.events.append(PRODUCTS[tuple(result.shape)])
        return result


def backward(sp: bool, delayed: bool) -> list[str]:
    events: list[str] = []
    grads = WeightGrads()
    with initialized():
        group = Noted(events)
        layer = ColumnParallelLinear(I, O * RANKS, False, parallel_config(group, sp, torch.float32), group,
                                     grads)
        total = torch.zeros(O, I)
        setattr(layer.weight, "add_product", lambda left, right: total.addmm_(left, right))  # noqa: B010
        y = layer(torch.randn(S // (RANKS if sp else 1), B, I, requires_grad=True))
        events.clear()
        grads.put_off = [] if delayed else None
        with Products(events):
            y.backward(torch.ones_like(y))
            events += ["then"]
            for product in grads.put_off or ():
                product()
    return events


@pytest.mark.core
def test_sums_run_beside_the_weights_gradient():
    assert backward(sp=False, delayed=False) == ["x's gradient", "all-reduce", "the weight's gradient",
                                                 "wait for all-reduce", "then"]


@pytest.mark.core
def test_under_sequence_parallelism_the_input_is_gathered_beside_the_other_product():
    assert backward(sp=True, delayed=False) == [
        "all-gather", "x's gradient", "reduce-scatter", "wait for all-gather", "the weight's gradient",
        "wait for reduce-scatter", "then"]


@pytest.mark.core
@pytest.mark.parametrize("sp", [False, True])
def test_a_delayed_product_gathers_its_input_later(sp):
    sums = "reduce-scatter" if sp else "all-reduce"
    gathers = ["all-gather", "wait for all-gather"] if sp else []
    assert backward(sp, delayed=True) == ["x's gradient", sums, f"wait for {sums}", "then", *gathers,
                                          "the weight's gradient"]
