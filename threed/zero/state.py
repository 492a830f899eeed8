"""The buffers of one rank's parameter units: parameters, gradients, master weights and moments, each one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from threed.comm import Comm, Handle
from threed.program.buffers import Buffers
from threed.program.table import Table
from threed.schema import Config
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import Precision
from threed.tensor.random import initial_values
from threed.zero.buffers import Pool
from threed.zero.optimizer import Moments
from threed.zero.shard import Layout, Placed, Segment


class Storage(NamedTuple):
    """What all units of a rank have in common."""

    stage: int
    precision: Precision
    device: torch.device
    params: Pool  # for whole parameters that do not stay whole
    grads: Pool  # for whole gradients from ZeRO-2 on
    weight_grads: WeightGrads


class UnitState:
    """One parameter unit on one rank.

        param    [numel]  in the precision of compute; its own buffer where the unit stays whole, else one of the pool's, or None
        pshard   [owned]  what this rank steps of it; part of `param` where the unit stays whole
        grad     [numel]  gradients of micro-batches are added here; from ZeRO-2 on one of the pool's, or None
        gshard   [owned]  the reduced gradient; below ZeRO-2 part of `grad`
        master   [owned]  fp32 weights; None where the optimizer updates `pshard` itself
        moments  [owned]  fp32

    `owned` is the rank's shard from ZeRO-1 on, everything under ZeRO-0.
    """

    def __init__(self, layout: Layout, index: int, whole: bool, storage: Storage):
        self.layout, self.index, self.whole, self.storage = layout, index, whole, storage
        precision, device = storage.precision, storage.device
        self.sharded = storage.stage >= 1
        self.owned = layout.shard(index) if self.sharded else (0, layout.numel)
        count = self.owned[1] - self.owned[0]
        param = torch.zeros(layout.numel, dtype=precision.compute, device=device) if whole else None
        grad = torch.zeros(layout.numel, dtype=precision.grad, device=device) if storage.stage < 2 else None
        self.param, self.grad = param, grad
        self.pshard = _part(param, self.owned, precision.compute, device)
        self.gshard = _part(grad, self.owned, precision.grad, device)
        self.reduced = False  # whether `gshard` has part of this step's gradient
        self.master = torch.zeros(count, device=device) if precision.master else None
        self.moments = Moments(torch.zeros(count, device=device), torch.zeros(count, device=device))
        self._unwritten = set(range(len(layout.placed)))  # parameters whose part of `grad` holds nothing of use
        self.parameters: dict[str, nn.Parameter] = {}
        values = self.param if self.param is not None else storage.params.first[layout.numel]
        for number, placed in enumerate(layout.placed):
            # `.data` is set apart, for a count of changes of its own: the buffer's goes up whenever any unit is gathered into it.
            parameter = nn.Parameter(torch.empty(0, dtype=precision.compute, device=device))
            parameter.data = _view(values, placed)
            parameter.add_product = partial(self._add_product, number)  # pyright: ignore[reportAttributeAccessIssue]
            parameter.register_post_accumulate_grad_hook(_hook(partial(self._add, number), storage.weight_grads))
            self.parameters[placed.parameter.name] = parameter

    @property
    def weights(self) -> torch.Tensor:
        """What the optimizer updates, and a checkpoint keeps."""
        return self.master if self.master is not None else self.pshard

    # ---- parameters that do not stay whole

    def occupy(self, buffer: torch.Tensor) -> None:
        """The whole parameters are (or will be) in this buffer."""
        self.param = buffer
        for placed, parameter in zip(self.layout.placed, self.parameters.values(), strict=True):
            parameter.data = _view(buffer, placed)

    def vacate(self) -> None:
        """The whole parameters are given up. (The modules' keep their shapes, which autograd looks at, over any memory.)"""
        assert self.param is not None
        self.storage.params.give(self.param)
        self.param = None

    # ---- gradients

    def _into(self, number: int) -> tuple[torch.Tensor, bool]:
        """Where the gradient of a parameter goes, and whether something is there already."""
        if self.grad is None:
            self.grad = self.storage.grads.take(self.layout.numel)
        fresh = number in self._unwritten
        self._unwritten.discard(number)
        return _view(self.grad, self.layout.placed[number]), not fresh

    def _add(self, number: int, grad: torch.Tensor) -> None:
        into, there = self._into(number)
        into.add_(grad) if there else into.copy_(grad)  # fp32 += 16 bit too

    def _add_product(self, number: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a product of matrices; where it has the gradient's dtype, without a tensor in between."""
        if left.dtype != self.storage.precision.grad:
            self._add(number, left @ right)
            return
        into, there = self._into(number)
        into.addmm_(left, right) if there else torch.mm(left, right, out=into)

    def whole_grad(self) -> torch.Tensor:
        """The gradient as it is now, to be reduced."""
        assert self.grad is not None
        for number in self._unwritten:
            _view(self.grad, self.layout.placed[number]).zero_()
        self._unwritten.clear()
        return self.grad

    def begin_anew(self, handle: Handle) -> None:
        """The next gradient does not add to this one. A buffer of the pool may be used again once `handle` is done."""
        self._unwritten.update(range(len(self.layout.placed)))
        if self.storage.stage >= 2 and self.grad is not None:
            self.storage.grads.give(self.grad, handle)
            self.grad = None

    def written(self) -> Iterable[torch.Tensor]:
        """What has been added up so far, by parameter."""
        return (_view(self.grad, placed) for number, placed in enumerate(self.layout.placed)
                if self.grad is not None and number not in self._unwritten)

    # ---- ranges

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
        """Draw initial values of what this rank steps, one parameter at a time."""
        first, last = self.owned
        for placed in self.layout.placed:
            start, stop = max(placed.start, first), min(placed.stop, last)
            if stop > start:
                values = initial_values(placed.parameter, tp, tp_rank, seed).view(-1)
                self.weights[start - first:stop - first] = values[start - placed.start:stop - placed.start]
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the master weights into what is gathered."""
        if self.master is not None:
            self.pshard.copy_(self.master)


def _part(whole: torch.Tensor | None, owned: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A range of a buffer, or a tensor of its own where there is no such buffer."""
    return whole[slice(*owned)] if whole is not None else torch.zeros(owned[1] - owned[0], dtype=dtype, device=device)


def _view(buffer: torch.Tensor, placed: Placed) -> torch.Tensor:
    return buffer[placed.start:placed.stop].view(placed.module_shape)


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


class _Handle(NamedTuple):
    """A tensor that lies in the whole parameters of a unit, wherever they will be when it is asked for."""

    state: UnitState
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


def handles(states: list[UnitState]) -> AbstractContextManager[Any]:
    """The context of a FORWARD: what autograd keeps of parameters that do not stay whole, it keeps as handles, so that their
    buffers can be used for others until BACKWARD, when the parameters may lie elsewhere."""
    windowed = [state for state in states if not state.whole]
    if not windowed:
        return nullcontext()
    owner = {state.param.untyped_storage().data_ptr(): state for state in windowed if state.param is not None}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Handle:
        state = owner.get(tensor.untyped_storage().data_ptr())
        return tensor if state is None else _Handle(state, tensor.storage_offset(), tensor.shape, tensor.stride())

    def unpack(kept: torch.Tensor | _Handle) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        assert kept.state.param is not None, "BACKWARD needs a parameter that was not gathered"
        return kept.state.param.as_strided(kept.size, kept.stride, kept.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def make_states(config: Config, comm: Comm, table: Table, layouts: dict[int, Layout], buffers: Buffers,
                weight_grads: WeightGrads) -> dict[int, UnitState]:
    """The states of the parameter units that a rank holds, with initial values."""
    precision, states = Precision.of(config.precision), {}
    storage = Storage(table.zero_stage, precision, comm.device, Pool(buffers.params, precision.compute, comm.device),
                      Pool(buffers.grads, precision.grad, comm.device), weight_grads)
    for unit in table.held(comm.here.pp):
        state = UnitState(layouts[unit], comm.here.dp % table.shard_size, table.parameters[unit].whole, storage)
        state.fill(config.parallel.tp, comm.here.tp, config.train.seed)
        states[unit] = state
    return states
