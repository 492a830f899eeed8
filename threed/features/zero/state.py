"""The buffers of one rank's parameter units: parameters, gradients, master weights and optimizer state, each
a flat tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial

import torch
from torch import nn

from threed.base.quantity import ALIGNMENT, round_up
from threed.comm.lanes import Job, copy
from threed.features.zero.shard import FlatLayout, Placed, Segment
from threed.features.zero.snapshot import Snapshot
from threed.features.zero.storage import Storage
from threed.optim.base import BYTES, Buffer
from threed.program.instruction import Slot, Tier
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import DTYPES, has_bits_of
from threed.tensor.products import add_product
from threed.tensor.random import Draw, draw


class Reduced(Enum):
    """Where this step's reduced gradient is so far. The next reduction adds to it."""

    NOTHING = "no part of it is reduced"
    SHARD = "a part is in `gshard`"
    HOST = "a part is on the host"


class UnitState:
    """One parameter unit on one rank.

        param    [numel]  in the precision of compute; a buffer of its own where the unit stays whole, else a
                          buffer of the pool, or None
        pshard   [owned]  this rank's part of the parameters; part of `param` where the unit stays whole; on
                          the host if offloaded to the host; None if offloaded to disk
        grad     [numel]  the sum over micro-batches; from ZeRO-2 on a buffer of the pool, or None
        gshard   [owned]  the reduced gradient; below ZeRO-2 part of `grad`; a buffer of the pool where it
                          goes to the host as soon as it is reduced
        gradient [owned]  read by CLIP and STEP: `gshard`, or a copy on the host; `host_prev`: the gradient of
                          the step before, which waits for its STEP
        master   [owned]  fp32 weights; None where the optimizer updates `pshard` itself
        buffers  [owned]  the optimizer's, by name; with the master on the host or in a file, if offloaded
        snapshot          a copy of what this rank writes to the checkpoint under way; None: no copy

    Where nothing trains there are no gradients, and of a frozen unit there are parameters alone.

    `owned` is the rank's shard from ZeRO-1 on, the whole buffer under ZeRO-0 and of a frozen unit that stays
    whole.
    """

    def __init__(self, number: int, layout: FlatLayout, index: int, storage: Storage):
        self.layout, self.index, self.storage = layout, index, storage
        table, precision, device = storage.table, storage.precision, storage.device
        self.number, self.unit = number, table.parameters[number]
        self.sharded, self.trains = table.is_cut(number), table.trains and self.unit.trains
        self.owned = layout.shard(index) if self.sharded else (0, layout.numel)
        self.count = self.owned[1] - self.owned[0]
        self.param = self.grad = None
        if self.unit.whole and self.unit.weight_home == Tier.DEVICE:
            self.param = torch.zeros(layout.numel, dtype=precision.compute, device=device)
        if table.zero.stage < 2 and self.trains:
            self.grad = torch.zeros(layout.numel, dtype=precision.grad, device=device)
        # whether this rank writes its shard to checkpoints: one of the ranks with the same values does
        self.writes = False
        self.snapshot: Snapshot | None = None
        self._make_shards()
        self._make_states()
        # parameters of which `grad` has no gradient yet
        self._unwritten = set(range(len(layout.placed)))
        self.parameters: dict[str, nn.Parameter] = {}
        values = self.param if self.param is not None else storage.params.sample(layout.numel)
        for number, placed in enumerate(layout.placed):
            # Setting `.data` gives the parameter its own version counter: the buffer's changes with every
            # unit that is gathered into it.
            parameter = nn.Parameter(torch.empty(0, dtype=precision.compute, device=device), self.unit.trains)
            parameter.data = _view(values, placed)
            self.parameters[placed.parameter.key] = parameter
            if not self.unit.trains:
                continue
            parameter.add_product = partial(self._add_product, number)  # pyright: ignore[reportAttributeAccessIssue]
            # A weak reference, since Python cannot collect a reference cycle through a hook.
            hook = _hook(weakref.WeakMethod(self._add), number, storage.weight_grads)
            parameter.register_post_accumulate_grad_hook(hook)

    @property
    def weights(self) -> torch.Tensor:
        """The weights that the optimizer updates and a checkpoint keeps."""
        if self.master is None and self.pshard is None:  # frozen, on disk
            return self._file()
        return not_none(self.master if self.master is not None else self.pshard)

    def _file(self) -> torch.Tensor:
        """This rank's part of parameters whose home is the disk."""
        return self.storage.files.map(f"p{self.number}.weights", self.count, self.storage.precision.compute)

    # ---- tiers

    def _make_shards(self) -> None:
        storage, precision, owned = self.storage, self.storage.precision, self.owned
        self.pshard: torch.Tensor | None = None
        if self.unit.weight_home == Tier.DEVICE:
            self.pshard = _part(self.param, owned, precision.compute, storage.device)
        elif self.unit.weight_home == Tier.HOST:
            self.pshard = storage.on_host(self.count, precision.compute)
        pooled = storage.table.streams(self.number) or not self.trains
        self.gshard: torch.Tensor | None = None if pooled else _part(self.grad, owned, precision.grad,
                                                                     storage.device)
        self.reduced = Reduced.NOTHING
        away = self.unit.state_home != Tier.DEVICE
        self.host_grad = storage.on_host(self.count, precision.grad) if away else None
        delayed = storage.table.update.delayed and self.unit.trains
        self.host_prev = storage.on_host(self.count, precision.grad) if delayed else None

    def _make_states(self) -> None:
        home, count, device, disk = self.unit.state_home, self.count, self.storage.device, self.storage.disk
        if self.unit.weight_home == Tier.DISK and disk is not None:
            disk.make(f"p{self.number}.weights", count * self.storage.precision.compute.itemsize)
        if home == Tier.DISK and disk is not None:
            disk.make(f"p{self.number}.state", count * self.storage.table.state_bytes(home))
            self.bind(None)
        elif home == Tier.HOST:
            self.bind(self.storage.on_host(count * self.storage.table.state_bytes(home), torch.uint8))
        else:
            has_master = self.storage.precision.master and self.unit.trains
            self.master = torch.zeros(count, device=device) if has_master else None
            self.buffers = {buffer.name: torch.zeros(count, dtype=DTYPES[buffer.dtype], device=device)
                            for buffer in self.storage.table.update.buffers if self.unit.trains}

    def bind(self, buffer: torch.Tensor | None) -> None:
        """Let `master` and `buffers` be views of this host memory [bytes]; None: of the file, mapped into
        memory, which is used between steps only."""
        table = self.storage.table
        if buffer is None:
            state = self.storage.files.map(f"p{self.number}.state", self.count * table.state_bytes(Tier.DISK),
                                           torch.uint8)
        else:
            state = buffer
        self.state_buffer, kept, start = buffer, dict[str, torch.Tensor](), 0
        for name, dtype in (Buffer("master"), *table.update.buffers):
            stop = start + self.count * BYTES[dtype]
            kept[name], start = state[start:stop].view(DTYPES[dtype]), stop
        self.master, self.buffers = kept.pop("master"), kept

    def file_bytes(self, itemsize: int) -> int:
        """Bytes of a file with `itemsize` bytes per element."""
        return round_up(self.count * itemsize, ALIGNMENT)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient that CLIP and STEP read."""
        return not_none(self.gshard if self.host_grad is None else self.host_grad)

    @property
    def gradient_prev(self) -> torch.Tensor:
        """The gradient of the step before, which waits for its STEP."""
        return not_none(self.host_prev)

    # ---- checkpoints

    def kept(self, waiting: bool) -> dict[str, torch.Tensor]:
        """Kind -> tensor over `owned` that a checkpoint keeps. `waiting`: with the gradients that the next
        step applies."""
        kinds = {"param": self.weights, **self.buffers}
        if waiting and self.host_prev is not None:
            kinds["waiting"] = self.host_prev
        return kinds

    def take_snapshot(self, waiting: bool) -> Job | None:
        """Copy the tensors that this rank writes to the host, while the next program runs; None where another
        rank writes the same values."""
        if self.snapshot is None:
            return None
        part = slice(*(at - self.owned[0] for at in self.shard))
        return self.snapshot.begin(lambda: [whole[part] for whole in self.kept(waiting).values()])

    def to_save(self, waiting: bool) -> dict[str, Callable[[int, int], torch.Tensor]]:
        """Kind -> a function that returns a range of this rank's shard, in fp32 on the host: of the snapshot
        if there is one, else of the current values (which a frozen unit keeps)."""
        first = self.shard[0] - self.owned[0]

        def current(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return whole[first + start:first + stop].detach().cpu().float()

        def of_snapshot(row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return row[start:stop]

        kept = self.kept(waiting)
        if self.snapshot is None:
            return {kind: partial(current, whole) for kind, whole in kept.items()}
        return {kind: partial(of_snapshot, row) for kind, row in zip(kept, self.snapshot.rows, strict=False)}

    # ---- moves between tiers

    def lower_gradient(self) -> Job:
        """Move the reduced gradient to the host, where it adds to what was reduced before in this step."""
        gshard, host = not_none(self.gshard), not_none(self.host_grad)
        adds, self.reduced = self.reduced == Reduced.HOST, Reduced.HOST
        if self.storage.table.streams(self.number):
            self.storage.gshards.give(gshard)
            self.gshard = None
        if not adds:
            return lambda: copy(host, gshard)
        return lambda: self.storage.add_to(host, gshard)

    def raise_weights(self, slot: Slot, brought: torch.Tensor | None) -> tuple[torch.Tensor, Job]:
        """Copy this rank's part of the parameters from the host to the device, as `slot`: to its home, or to
        a buffer of the pool for a GATHER. `brought`: a pool's buffer on the host, which is returned to the
        pool; None: copy from the part's home on the host."""
        source = not_none(self.pshard if brought is None else brought)
        if slot == self.storage.table.weight(self.number):
            value = not_none(self.pshard if slot.kind == "pshard" else self.param)
        else:
            value = self.storage.pshards.take(self.count)
        if brought is not None:
            self.storage.host_weights.give(brought)
        return value, lambda: copy(value, source[:self.count])

    def write_state(self) -> Job:
        """Write the optimizer's state from host memory to its file."""
        buffer = not_none(self.state_buffer)
        self.storage.host_states.give(buffer)
        self.bind(None)
        return lambda: self.write("state", buffer)

    def write_weights(self, buffer: torch.Tensor) -> Job:
        """Write this rank's part of the parameters from a buffer on the host to its file."""
        self.storage.host_weights.give(buffer)
        return lambda: self.write("weights", buffer)

    def room_for_state(self) -> torch.Tensor:
        """Take host memory into which the optimizer's state can be read."""
        buffer = self.storage.host_states.take(self.file_bytes(self.storage.table.state_bytes(Tier.HOST)))
        self.bind(buffer)
        return buffer

    def room_for_weights(self) -> torch.Tensor:
        """Take host memory for this rank's part of the parameters."""
        itemsize = self.storage.table.elements.param
        return self.storage.host_weights.take(self.file_bytes(itemsize) // itemsize)

    def read(self, name: str, into: torch.Tensor) -> None:
        """Fill a buffer from the file `name`: "state" or "weights"."""
        self.storage.files.read(f"p{self.number}.{name}", into.view(torch.uint8))

    def write(self, name: str, buffer: torch.Tensor) -> None:
        """Write a buffer to the file `name`."""
        self.storage.files.write(f"p{self.number}.{name}", buffer.view(torch.uint8))

    # ---- parameters that do not stay whole

    def occupy(self, buffer: torch.Tensor) -> None:
        """Use this buffer for the whole parameters."""
        self.param = buffer
        for placed, parameter in zip(self.layout.placed, self.parameters.values(), strict=True):
            parameter.data = _view(buffer, placed)

    def vacate(self) -> None:
        """Give up the whole parameters. (Those of the modules keep their shapes, which autograd checks.)"""
        assert self.param is not None
        self.storage.params.give(self.param)
        self.param = None

    def whole_param(self) -> torch.Tensor:
        """The whole parameters, which must be resident."""
        assert self.param is not None, "a parameter is needed that was not gathered"
        return self.param

    # ---- gradients

    def room_for_grad(self) -> torch.Tensor:
        """The whole gradient's buffer, from the pool if there is none yet."""
        if self.grad is None:
            self.grad = self.storage.grads.take(self.layout.numel)
        return self.grad

    def into(self, number: int) -> tuple[torch.Tensor, bool]:
        """The view into which the gradient of a parameter goes, and whether it holds a gradient already. It
        does afterwards."""
        fresh = number in self._unwritten
        self._unwritten.discard(number)
        if (taken := self.storage.weight_grads.taken) is not None:
            taken.append((self, number))
        return _view(self.room_for_grad(), self.layout.placed[number]), not fresh

    def grad_place(self) -> tuple[int, frozenset[int]]:
        """The address of the whole gradient, and the parameters of which it has none yet."""
        return self.room_for_grad().data_ptr(), frozenset(self._unwritten)

    def _add(self, number: int, grad: torch.Tensor) -> None:
        into, written = self.into(number)
        into.add_(grad) if written else into.copy_(grad)  # also 16 bits into fp32

    def _add_product(self, number: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a product of matrices; where the device can, without an intermediate tensor."""
        add_product(*self.into(number), left, right)

    def whole_grad(self) -> tuple[torch.Tensor, Job]:
        """The gradient so far, to be reduced; and a job that must come first: it writes zeros for parameters
        that have none."""
        assert self.grad is not None
        missing = [_view(self.grad, self.layout.placed[number]) for number in self._unwritten]
        self._unwritten.clear()

        def complete() -> None:
            for view in missing:
                view.zero_()

        return self.grad, complete

    def begin_anew(self) -> None:
        """Let the next gradient not add to this one. A buffer of the pool is given back."""
        self._unwritten.update(range(len(self.layout.placed)))
        if self.storage.table.zero.stage >= 2 and self.grad is not None:
            self.storage.grads.give(self.grad)
            self.grad = None

    def written(self) -> Iterable[torch.Tensor]:
        """The gradients added up so far, one per parameter that has one."""
        return (_view(self.grad, placed) for number, placed in enumerate(self.layout.placed)
                if self.grad is not None and number not in self._unwritten)

    # ---- ranges

    @property
    def shard(self) -> tuple[int, int]:
        """(start, stop) of the range whose gradient norm this rank sums, whatever the ZeRO stage."""
        return self.layout.shard(self.index)

    def range(self, whole: torch.Tensor, segment: Segment) -> torch.Tensor:
        """The part of a tensor over `owned` that is in a segment (in buffer coordinates)."""
        return whole[segment.start - self.owned[0]:segment.stop - self.owned[0]]

    def segments(self) -> list[Segment]:
        """The segments that this rank steps, cut at shard borders even when it steps all shards: the kernel
        then gets the same ranges under every ZeRO stage, and rounds in the same way."""
        indices = [self.index] if self.sharded else range(self.layout.num_shards)
        return [segment for index in indices for segment in self.layout.segments_of(index)]

    @torch.no_grad()
    def fill(self, place: Mapping[str, int], seed: int, draw: Draw = draw) -> None:
        """Draw initial values of this rank's part into its weights. `place`: axis -> the rank's index."""
        first, last = self.owned
        for placed in self.layout.placed:
            start, stop = max(placed.start, first), min(placed.stop, last)
            if stop > start:
                part = placed.parameter.part(self.layout.ranks, place)
                draw(self.weights[start - first:stop - first], placed.parameter, part, seed,
                     start - placed.start)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights to the tensor or file from which parameters are gathered, between steps or
        after a step on the device."""
        if self.unit.weight_home == Tier.DISK:
            self._file().copy_(self.weights)
        elif self.master is not None and self.pshard is not None:
            self.pshard.copy_(self.master)

    @torch.no_grad()
    def is_published(self) -> bool:
        """Whether the tensor or file from which parameters are gathered has the bits of the master
        weights."""
        if self.unit.weight_home == Tier.DISK:
            return has_bits_of(self._file(), self.weights)
        return self.master is None or self.pshard is None or has_bits_of(self.pshard, self.master)


def not_none(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _part(whole: torch.Tensor | None, owned: tuple[int, int], dtype: torch.dtype,
          device: torch.device) -> torch.Tensor:
    """A range of a buffer; a new tensor if there is no buffer."""
    if whole is not None:
        return whole[slice(*owned)]
    return torch.zeros(owned[1] - owned[0], dtype=dtype, device=device)


def _view(buffer: torch.Tensor, placed: Placed) -> torch.Tensor:
    return buffer[placed.start:placed.stop].view(placed.module_shape)


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
