"""The gradient of a parameter unit: added up over micro-batches, reduced over ranks, offloaded where the
optimizer steps on the host, and stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from threed.comm.lanes import Job, Waiting, copy
from threed.features.zero.part import UnitPart
from threed.features.zero.storage import Storage
from threed.features.zero.transition import Transition
from threed.tensor.layers import WeightGrads
from threed.tensor.pieces import Pieces
from threed.tensor.products import add_product


class Accumulated(Enum):
    """Whether a unit's gradient has a buffer, in which it is added up over micro-batches."""

    NOTHING = "it has no buffer"
    WHOLE = "it has a buffer"


class Reduced(Enum):
    """The state of a unit's reduced gradient during a step: how much of it is reduced, and where that is."""

    NOTHING = "no part of it is reduced"
    SHARD = "what is reduced is on the device"
    HOST = "what is reduced is on the host"
    BOTH = "the last part is on the device, and the sum of those before is on the host"
    CLIPPED = "it is complete, and CLIP has read it"
    LOWERED = "CLIP has read it, and it is on the host, for its STEP"


class _Reduction(NamedTuple):
    """What REDUCE over the shard group does: to the whole gradient, and to the reduced one."""

    whole: Transition[Accumulated]
    shard: Transition[Reduced]

    @classmethod
    def of(cls, whole: dict[Accumulated, Accumulated], shard: dict[Reduced, Reduced]) -> _Reduction:
        return cls(Transition("REDUCE", whole), Transition("REDUCE", shard))


_STAYS, _IN_POOL = {Accumulated.WHOLE: Accumulated.WHOLE}, {Accumulated.WHOLE: Accumulated.NOTHING}
_FIRST = {Reduced.NOTHING: Reduced.SHARD}
IN_PLACE = _Reduction.of(_STAYS, _FIRST)  # below ZeRO-2
SUMMED = _Reduction.of(_IN_POOL, {**_FIRST, Reduced.SHARD: Reduced.SHARD})  # from ZeRO-2 on
STREAMED = _Reduction.of(_IN_POOL, {**_FIRST, Reduced.HOST: Reduced.BOTH})  # (Shards.streams)
SUM_PARTS = Transition("REDUCE", _STAYS)  # before the shard group
SUM_COPIES = Transition("REDUCE", {each: each for each in (Reduced.SHARD, Reduced.BOTH)})  # after it
DROP = Transition("the drop", {Reduced.CLIPPED: Reduced.NOTHING})


class _Update(NamedTuple):
    """What CLIP, OFFLOAD and STEP do to the reduced gradient."""

    clip: Transition[Reduced]
    offload: Transition[Reduced]
    step: Transition[Reduced]

    @classmethod
    def of(cls, read: Reduced, lowers: dict[Reduced, Reduced], stepped: Reduced) -> _Update:
        return cls(Transition("CLIP", {read: Reduced.CLIPPED}), Transition("OFFLOAD", lowers),
                   Transition("STEP", {stepped: Reduced.NOTHING}))


# where the optimizer steps on the device; where it steps on the host, and CLIP reads the gradient on the
# device; and where it reads it on the host, too (Shards.streams)
ON_DEVICE = _Update.of(Reduced.SHARD, {}, Reduced.CLIPPED)
ON_HOST = _Update.of(Reduced.SHARD, {Reduced.CLIPPED: Reduced.LOWERED}, Reduced.LOWERED)
ADDED_ON_HOST = _Update.of(Reduced.HOST, {Reduced.SHARD: Reduced.HOST, Reduced.BOTH: Reduced.HOST},
                           Reduced.CLIPPED)


class Scatter(NamedTuple):
    """A reduction over the shard group."""

    whole: torch.Tensor
    complete: Job  # comes first
    shard: torch.Tensor  # the place of the result
    adds: bool  # whether the result is added to what is there


class Gradient:
    """
        values [owned]  the reduced gradient, which CLIP reads
        shard  [owned]  the same on the device; a part of the whole gradient (Shards.in_place), or a buffer of
                        the pool where it goes to the host as soon as it is reduced (Shards.streams)
        host   [owned]  the same on the host, where the optimizer steps there: a sum, or a buffer of the pool

    The whole gradient [numel] is the sum over micro-batches, from ZeRO-2 on in a buffer of the pool. A frozen
    unit has none of these.
    """

    def __init__(self, part: UnitPart, storage: Storage, parameters: Iterable[nn.Parameter]):
        """`parameters`: of the unit, in the order of its layout."""
        self.part, self.storage = part, storage
        self._what = f"gradient of {part.name}"
        table, dtype, device = storage.table, storage.precision.grad, storage.device
        self.away, self.streams = table.shards.away(part.number), table.shards.streams(part.number)
        self._in_pool = not table.shards.in_place(part.number)
        self._whole = self.shard = self.host = torch.empty(0, dtype=dtype, device=device)
        self.accumulated = Accumulated.NOTHING
        if part.trains and not self._in_pool:
            self._whole = torch.zeros(part.layout.numel, dtype=dtype, device=device)
            self.accumulated, self.shard = Accumulated.WHOLE, self._whole[slice(*part.owned)]
        elif part.trains and not self.streams:
            self.shard = torch.zeros(part.count, dtype=dtype, device=device)
        if self.streams:
            self.host = storage.on_host(part.count, dtype)
        # Of what has gone to the host in one piece: the squared norm of each segment, taken before it went.
        self.squares: list[torch.Tensor] | None = None
        self.reduced = Reduced.NOTHING
        self._reduction = STREAMED if self.streams else SUMMED if self._in_pool else IN_PLACE
        self._update = ADDED_ON_HOST if self.streams else ON_HOST if self.away else ON_DEVICE
        # parameters of which the whole gradient has none yet
        self._unwritten = set(range(len(part.layout.placed)))
        for number, parameter in enumerate(parameters if part.unit.trains else ()):
            one, several = partial(self._add_product, number), partial(self._add_products, number)
            parameter.add_product = one  # pyright: ignore[reportAttributeAccessIssue]
            parameter.add_products = several  # pyright: ignore[reportAttributeAccessIssue]
            parameter.add_rows = partial(self._add_rows, number)  # pyright: ignore[reportAttributeAccessIssue]
            parameter.add_count = partial(self._add, number)  # pyright: ignore[reportAttributeAccessIssue]
            # A weak reference, since Python cannot collect a reference cycle through a hook.
            hook = _hook(weakref.WeakMethod(self._add), number, storage.weight_grads)
            parameter.register_post_accumulate_grad_hook(hook)

    @property
    def values(self) -> torch.Tensor:
        return self.host if self.streams else self.shard

    # ---- the whole gradient

    def whole(self) -> torch.Tensor:
        """The whole gradient's buffer, from the pool if there is none yet."""
        if self.accumulated is Accumulated.NOTHING:
            self._whole = self.storage.grads.take(self.part.layout.numel)
            self.accumulated = Accumulated.WHOLE
        return self._whole

    def into(self, number: int) -> tuple[torch.Tensor, bool]:
        """The view into which the gradient of a parameter goes, and whether it holds a gradient already. It
        does afterwards."""
        fresh = number in self._unwritten
        self._unwritten.discard(number)
        if (taken := self.storage.weight_grads.taken) is not None:
            taken.append((self, number))
        return self.part.view(self.part.layout.placed[number], self.whole()), not fresh

    def place(self) -> tuple[int, frozenset[int]]:
        """The address of the whole gradient, and the parameters of which it has none yet."""
        return self.whole().data_ptr(), frozenset(self._unwritten)

    def _add(self, number: int, grad: torch.Tensor) -> None:
        into, written = self.into(number)
        into.add_(grad) if written else into.copy_(grad)  # also 16 bits into fp32

    def _add_product(self, number: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a product of matrices; where the device can, without an intermediate tensor."""
        add_product(*self.into(number), left, right)

    def _add_products(self, number: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add a product to each of the matrices of a parameter, [matrices, ..., columns]."""
        into, written = self.into(number)
        for matrix, (left, right) in zip(into.flatten(1, -2).unbind(), pairs, strict=True):
            add_product(matrix, written, left, right)

    def _add_rows(self, number: int, ids: torch.Tensor, grad: torch.Tensor, sums: Pieces) -> None:
        """Add [..., columns] to the rows `ids` of a parameter; ids behind its last row are left out."""
        into, written = self.into(number)
        sums.add_rows(into if written else into.zero_(), ids, grad)

    def written(self) -> Iterable[torch.Tensor]:
        """The gradients added up so far, one per parameter that has one."""
        return (self.part.view(placed, self._whole) for number, placed in enumerate(self.part.layout.placed)
                if number not in self._unwritten)

    def _complete(self) -> Job:
        """A job that writes zeros for the parameters that have no gradient."""
        missing = [self.part.view(self.part.layout.placed[number], self._whole) for number in self._unwritten]
        self._unwritten.clear()

        def complete() -> None:
            for view in missing:
                view.zero_()

        return complete

    # ---- reductions

    def sum_parts(self) -> tuple[torch.Tensor, Job]:
        """The whole gradient, in which parts are summed before it is reduced; and a job that must come
        first."""
        self.accumulated = SUM_PARTS(self.accumulated, self._what)
        return self._whole, self._complete()

    def reduce(self) -> Scatter:
        """Reduce the whole gradient. The next one does not add to it, and a buffer of the pool is given
        back."""
        self.accumulated = self._reduction.whole(self.accumulated, self._what)
        before, self.reduced = self.reduced, self._reduction.shard(self.reduced, self._what)
        whole, complete = self._whole, self._complete()
        if self.streams:
            self.shard = self.storage.gshards.take(self.part.count)
        shard = self.shard if self._in_pool else whole[slice(*self.part.shard)]
        self._unwritten.update(range(len(self.part.layout.placed)))
        if self._in_pool:
            self.storage.grads.give(whole)
        return Scatter(whole, complete, shard, before is Reduced.SHARD)

    def sum_copies(self) -> torch.Tensor:
        """The reduced gradient, which is summed over more groups."""
        self.reduced = SUM_COPIES(self.reduced, self._what)
        return self.shard

    def offload(self) -> Job:
        """Copy the reduced gradient to the host: for its STEP, or to be added to what was reduced before in
        this step."""
        before, self.reduced = self.reduced, self._update.offload(self.reduced, self._what)
        shard = self.shard
        if self.streams:
            self.storage.gshards.give(shard)
        elif self.storage.one_memory:  # the next to add to it is a backward, which waits for this STEP
            self.host = shard
            return _nothing
        else:
            self.host = self.storage.host_grads.take(self.part.count)
        host = self.host
        if before is Reduced.BOTH:
            self.squares = None
            return Waiting(lambda: self.storage.add_to(host, shard))
        squares = self.squares = [] if self.streams else None

        def job() -> None:
            if squares is not None:
                squares.extend(self.part.squared_norms(shard))
            copy(host, shard)

        return job

    # ---- after the last reduction

    def clip(self) -> None:
        """It is complete: the next reduction belongs to the next step."""
        self.reduced = self._update.clip(self.reduced, self._what)

    def step(self) -> torch.Tensor:
        """Its values are applied: after this STEP they are not read again."""
        self.reduced = self._update.step(self.reduced, self._what)
        if self.away and not self.streams and self.host is not self.shard:
            self.storage.host_grads.give(self.host)
        return self.host if self.away else self.shard

    def drop(self) -> None:
        """It is never applied."""
        self.reduced = DROP(self.reduced, self._what)


def _nothing() -> None:
    """The copy between two tiers that are one memory."""


def _hook(adder: weakref.WeakMethod, number: int,
          weight_grads: WeightGrads) -> Callable[[torch.Tensor], None]:
    """The hook that autograd calls when a parameter has a new `.grad`: adds it to the unit's gradient, now or
    with the other weight gradients that are put off."""

    def add(grad: torch.Tensor) -> None:
        method = adder()
        assert method is not None
        method(number, grad)

    def hook(parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return  # its product was put off
        if weight_grads.put_off is None:
            add(grad)
        else:
            weight_grads.put_off.append(lambda: add(grad))

    return hook
