"""The buffers of one rank's parameter units: parameters, gradients, master weights and moments, each one flat tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from threed.comm import Comm
from threed.program.table import Table
from threed.schema import Config
from threed.tensor.layers import WeightGrads
from threed.tensor.random import initial_values
from threed.zero.optimizer import Moments
from threed.zero.shard import Layout, Segment


class UnitState:
    """One parameter unit on one rank.

        param    [numel]  in the precision of compute; whole
        grad     [numel]  fp32, whole: gradients of all micro-batches are added here
        gshard   [owned]  the reduced gradient of what this rank steps: part of `grad`
        master   [owned]  fp32 weights of what this rank steps: part of `param` where that is fp32 too
        moments  [owned]  fp32

    `owned` is the rank's shard under ZeRO-1, everything under ZeRO-0.
    """

    def __init__(self, layout: Layout, index: int, sharded: bool, dtype: torch.dtype, device: torch.device,
                 weight_grads: WeightGrads):
        self.layout, self.index, self.sharded = layout, index, sharded
        self.owned = layout.shard(index) if sharded else (0, layout.numel)
        self.param = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.grad = torch.zeros(layout.numel, device=device)
        count = self.owned[1] - self.owned[0]
        self.gshard = self.grad[slice(*self.owned)]
        self.master = self.param[slice(*self.owned)] if dtype == torch.float32 else torch.zeros(count, device=device)
        self.moments = Moments(torch.zeros(count, device=device), torch.zeros(count, device=device))
        self._clean = True  # whether `grad` is zero
        self.parameters: dict[str, nn.Parameter] = {}
        for placed in layout.placed:
            shape = placed.module_shape
            parameter = nn.Parameter(self.param[placed.start:placed.stop].view(shape))
            add = self._adder(self.grad[placed.start:placed.stop].view(shape))
            parameter.add_grad = add  # pyright: ignore[reportAttributeAccessIssue]
            parameter.register_post_accumulate_grad_hook(_hook(add, weight_grads))
            self.parameters[placed.parameter.name] = parameter

    def _adder(self, into: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def add(grad: torch.Tensor) -> None:
            if not self._clean:
                self.grad.zero_()
                self._clean = True
            into.add_(grad)  # fp32 += 16 bit too

        return add

    def start_over(self) -> None:
        """The gradient has been used: the next one begins at zero."""
        self._clean = False

    @property
    def shard(self) -> tuple[int, int]:
        """(start, stop) of the range whose gradient norm this rank sums, whatever the ZeRO stage."""
        return self.layout.shard(self.index)

    def range(self, whole: torch.Tensor, segment: Segment) -> torch.Tensor:
        """The part of a tensor over `owned` that a segment (in buffer coordinates) names."""
        return whole[segment.start - self.owned[0]:segment.stop - self.owned[0]]

    def segments(self) -> list[Segment]:
        """Segments of what this rank steps, cut at shard borders even when it steps all shards: the kernel then sees
        the same ranges under every ZeRO stage, and rounds the same."""
        indices = [self.index] if self.sharded else range(self.layout.num_shards)
        return [segment for index in indices for segment in self.layout.segments_of(index)]

    @torch.no_grad()
    def fill(self, tp: int, tp_rank: int, seed: int) -> None:
        """Draw initial values, one parameter at a time."""
        for placed in self.layout.placed:
            values = initial_values(placed.parameter, tp, tp_rank, seed).view(-1)
            start, stop = max(placed.start, self.owned[0]), min(placed.stop, self.owned[1])
            self.param[placed.start:placed.stop] = values
            if stop > start and self.master.dtype != self.param.dtype:
                self.master[start - self.owned[0]:stop - self.owned[0]] = values[start - placed.start:stop - placed.start]

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights into this rank's part of `param` (they are the same memory in fp32)."""
        if self.master.dtype != self.param.dtype:
            self.param[slice(*self.owned)] = self.master.to(self.param.dtype)


def _hook(add: Callable[[torch.Tensor], None], weight_grads: WeightGrads) -> Callable[[torch.Tensor], None]:
    """What autograd calls with a parameter whose `.grad` is new: add it to the unit's, now or with what was put off."""

    def hook(parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return  # its product was put off
        if weight_grads.put_off is None:
            add(grad)
        else:
            weight_grads.put_off.append(lambda: add(grad))

    return hook


def make_states(config: Config, comm: Comm, table: Table, layouts: dict[int, Layout],
                dtype: torch.dtype, weight_grads: WeightGrads) -> dict[int, UnitState]:
    """The states of the parameter units that a rank holds, with initial values."""
    states = {}
    for unit in table.held(comm.here.pp):
        state = UnitState(layouts[unit], comm.here.dp, table.sharded, dtype, comm.device, weight_grads)
        state.fill(config.parallel.tp, comm.here.tp, config.train.seed)
        states[unit] = state
    return states
