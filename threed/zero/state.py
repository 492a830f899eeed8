"""The buffers of one rank's parameter units: parameters, gradients, master weights and the optimizer's, each one flat tensor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from threed.comm import Comm, Handle
from threed.offload.tiers import Disk
from threed.optimizers.base import BYTES, Buffer
from threed.pool import Pool
from threed.program.buffers import Buffers
from threed.program.table import Table
from threed.quantity import ALIGNMENT, round_up
from threed.schema import Config
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import DTYPES, Precision
from threed.tensor.random import draw
from threed.tensor.saving import Place
from threed.zero.shard import Layout, Placed, Segment

PIECE = 1 << 20  # elements that are compared at a time


class Storage(NamedTuple):
    """What all units of a rank have in common: where memory comes from."""

    table: Table
    precision: Precision
    device: torch.device
    params: Pool  # whole parameters that do not stay whole
    grads: Pool  # whole gradients, from ZeRO-2 on
    pshards: Pool  # this rank's part of parameters that live elsewhere
    gshards: Pool  # this rank's part of gradients that go down as they come
    host_weights: Pool  # parameters on their way between the host and another tier
    host_states: Pool  # optimizer state on its way between the host and the disk
    disk: Disk | None
    weight_grads: WeightGrads

    @classmethod
    def make(cls, config: Config, table: Table, buffers: Buffers, comm: Comm, weight_grads: WeightGrads) -> Storage:
        precision, device, host = Precision.of(config.precision), comm.device, torch.device("cpu")
        pinned = device.type == "cuda"
        uses_disk = "nvme" in (config.offload.optimizer, config.offload.parameters)
        return cls(table, precision, device, Pool(buffers.params, precision.compute, device),
                   Pool(buffers.grads, precision.grad, device), Pool(buffers.pshards, precision.compute, device),
                   Pool(buffers.gshards, precision.grad, device),
                   Pool(buffers.host_weights, precision.compute, host, pinned, for_disk=True),
                   Pool(buffers.host_states, torch.uint8, host, pinned, for_disk=True),
                   Disk(str(config.offload.nvme_path), comm.rank) if uses_disk else None, weight_grads)

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=self.device.type == "cuda")


class UnitState:
    """One parameter unit on one rank.

        param    [numel]  in the precision of compute; its own buffer where the unit stays whole, else one of the pool's, or None
        pshard   [owned]  what this rank steps of it; part of `param` where the unit stays whole; on the host, or None, where it
                          is offloaded to the host, or to disk
        grad     [numel]  gradients of micro-batches are added here; from ZeRO-2 on one of the pool's, or None
        gshard   [owned]  the reduced gradient; below ZeRO-2 part of `grad`; one of the pool's where it goes down as it comes
        gradient [owned]  what CLIP and STEP read: `gshard`, or a copy on the host; `host_prev`: that of the step before, which
                          waits for its STEP
        master   [owned]  fp32 weights; None where the optimizer updates `pshard` itself
        buffers  [owned]  what the optimizer keeps, by name; on the host, or in a file, where that is offloaded, with the master
        snapshot [kinds, shard]  fp32, on the host: what the checkpoint under way keeps of what this rank writes; None without one

    `owned` is the rank's shard from ZeRO-1 on, everything under ZeRO-0.
    """

    def __init__(self, number: int, layout: Layout, index: int, storage: Storage):
        self.layout, self.index, self.storage = layout, index, storage
        table, precision, device = storage.table, storage.precision, storage.device
        self.number, self.unit = number, table.parameters[number]
        self.whole = self.unit.whole
        self.sharded = table.sharded
        self.owned = layout.shard(index) if self.sharded else (0, layout.numel)
        self.count = self.owned[1] - self.owned[0]
        stays = self.unit.whole and self.unit.weight_home == "device"
        param = torch.zeros(layout.numel, dtype=precision.compute, device=device) if stays else None
        grad = torch.zeros(layout.numel, dtype=precision.grad, device=device) if table.zero_stage < 2 else None
        self.param, self.grad = param, grad
        self.writes = False  # whether this rank's shard goes into checkpoints: not where another writes the same
        self.snapshot: torch.Tensor | None = None  # [kinds, shard] on the host: what the next checkpoint keeps
        self._snapped = threading.Event()
        self._uncopied: Exception | None = None  # why the copy came to nothing
        self._copied: Any = None  # of a GPU: the event at the end of the copies
        self._make_shards()
        self._make_states()
        self._unwritten = set(range(len(layout.placed)))  # parameters whose part of `grad` holds nothing of use
        self.parameters: dict[str, nn.Parameter] = {}
        values = self.param if self.param is not None else storage.params.sample(layout.numel)
        for number, placed in enumerate(layout.placed):
            # `.data` is set apart, for a count of changes of its own: the buffer's goes up whenever any unit is gathered into it.
            parameter = nn.Parameter(torch.empty(0, dtype=precision.compute, device=device))
            parameter.data = _view(values, placed)
            parameter.add_product = partial(self._add_product, number)  # pyright: ignore[reportAttributeAccessIssue]
            # A weak reference: Python does not see what a hook refers to, and would never free the ring of the two.
            parameter.register_post_accumulate_grad_hook(_hook(weakref.WeakMethod(self._add), number, storage.weight_grads))
            self.parameters[placed.parameter.key] = parameter

    @property
    def weights(self) -> torch.Tensor:
        """What the optimizer updates, and a checkpoint keeps."""
        found = self.master if self.master is not None else self.pshard
        assert found is not None
        return found

    # ---- what lives where

    def _make_shards(self) -> None:
        storage, precision, owned = self.storage, self.storage.precision, self.owned
        self.pshard: torch.Tensor | None = None
        if self.unit.weight_home == "device":
            self.pshard = _part(self.param, owned, precision.compute, storage.device)
        elif self.unit.weight_home == "host":
            self.pshard = storage.on_host(self.count, precision.compute)
        streams = storage.table.streams(self.number)
        self.gshard: torch.Tensor | None = None if streams else _part(self.grad, owned, precision.grad, storage.device)
        self.reduced = False  # whether `gshard` has part of this step's gradient
        away = self.unit.state_home != "device"
        self.host_grad = storage.on_host(self.count, precision.grad) if away else None
        self.host_prev = storage.on_host(self.count, precision.grad) if storage.table.delayed else None
        self.came_down = False  # whether `host_grad` has part of this step's gradient

    def _make_states(self) -> None:
        home, count, device, disk = self.unit.state_home, self.count, self.storage.device, self.storage.disk
        if self.unit.weight_home == "disk" and disk is not None:
            disk.make(f"p{self.number}.weights", count * self.storage.precision.compute.itemsize)
        if home == "disk" and disk is not None:
            disk.make(f"p{self.number}.state", count * self.storage.table.state_bytes(home))
            self.bind(None)
        elif home == "host":
            self.bind(self.storage.on_host(count * self.storage.table.state_bytes(home), torch.uint8))
        else:
            self.master = torch.zeros(count, device=device) if self.storage.precision.master else None
            self.buffers = {buffer.name: torch.zeros(count, dtype=DTYPES[buffer.dtype], device=device)
                            for buffer in self.storage.table.optimizer}

    def bind(self, buffer: torch.Tensor | None) -> None:
        """The optimizer's state is in this host memory [bytes]; None: in its file, where one may look at it between steps."""
        table = self.storage.table
        if buffer is None:
            assert self.storage.disk is not None
            state = self.storage.disk.map(f"p{self.number}.state", self.count * table.state_bytes("disk"), torch.uint8)
        else:
            state = buffer
        self.bound, kept, start = buffer, dict[str, torch.Tensor](), 0
        for name, dtype in (Buffer("master"), *table.optimizer):
            stop = start + self.count * BYTES[dtype]
            kept[name], start = state[start:stop].view(DTYPES[dtype]), stop
        self.master, self.buffers = kept.pop("master"), kept

    def file_bytes(self, itemsize: int) -> int:
        """Of a file with so many bytes an element."""
        return round_up(self.count * itemsize, ALIGNMENT)

    @property
    def gradient(self) -> torch.Tensor:
        """What CLIP and STEP read."""
        return there(self.gshard if self.host_grad is None else self.host_grad)

    @property
    def gradient_prev(self) -> torch.Tensor:
        """That of the step before, where it waits for its STEP."""
        return there(self.host_prev)

    # ---- what a checkpoint keeps

    def kept(self, waiting: bool) -> dict[str, torch.Tensor]:
        """By kind, flat over `owned`. `waiting`: with the gradients that the next step applies."""
        kinds = {"param": self.weights, **self.buffers}
        if waiting and self.host_prev is not None:
            kinds["waiting"] = self.host_prev
        return kinds

    def make_snapshot(self, kinds: int) -> None:
        """Memory for a copy of what this rank writes of the unit, in fp32."""
        self.snapshot = self.storage.on_host(kinds * (self.shard[1] - self.shard[0]), torch.float32).view(kinds, -1)

    @torch.no_grad()
    def take_snapshot(self, waiting: bool) -> None:
        """Copy it there: the job of a lane. `snapped` returns once it is done."""
        try:
            part = slice(*(at - self.owned[0] for at in self.shard))
            for row, whole in zip(there(self.snapshot), self.kept(waiting).values(), strict=False):
                row.copy_(whole[part], non_blocking=True)
            if self.storage.device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        except Exception as error:  # it costs the checkpoint, not the run: `snapped` raises it
            self._uncopied = error
        finally:
            self._snapped.set()

    def begin_snapshot(self) -> None:
        self._snapped.clear()
        self._uncopied = None

    def snapped(self) -> None:
        """Wait, on the host, until the snapshot is there. What failed in its copy is raised: half a copy must not be written."""
        if self.snapshot is not None:
            self._snapped.wait()
            if self._uncopied is not None:
                raise self._uncopied
            if self._copied is not None:
                self._copied.synchronize()

    def to_save(self, waiting: bool) -> dict[str, Callable[[int, int], torch.Tensor]]:
        """By kind, what gives a range of this rank's shard, in fp32 on the host: of the snapshot, else of what there is now."""
        first = self.shard[0] - self.owned[0]

        def of_now(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return whole[first + start:first + stop].detach().float().cpu()

        def of_snapshot(row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return row[start:stop]

        kept = self.kept(waiting)
        if self.snapshot is None:
            return {kind: partial(of_now, whole) for kind, whole in kept.items()}
        return {kind: partial(of_snapshot, row) for kind, row in zip(kept, self.snapshot, strict=False)}

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

    def whole_param(self) -> torch.Tensor:
        """The whole parameters, which must be there now."""
        assert self.param is not None, "a parameter is needed that was not gathered"
        return self.param

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
        if self.storage.table.zero_stage >= 2 and self.grad is not None:
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
    def fill(self, place: Mapping[str, int], seed: int) -> None:
        """Draw initial values of what this rank (axis -> its index) steps, straight into it."""
        first, last = self.owned
        for placed in self.layout.placed:
            start, stop = max(placed.start, first), min(placed.stop, last)
            if stop > start:
                part = placed.parameter.part(self.layout.ranks, place)
                draw(self.weights[start - first:stop - first], placed.parameter, part, seed, start - placed.start)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the master weights to where parameters are gathered from, between steps or after one on the device."""
        if self.unit.weight_home == "disk":
            assert self.storage.disk is not None
            dtype = self.storage.precision.compute
            self.storage.disk.map(f"p{self.number}.weights", self.count, dtype).copy_(self.weights)
        elif self.master is not None and self.pshard is not None:
            self.pshard.copy_(self.master)

    @torch.no_grad()
    def is_published(self) -> bool:
        """Whether what parameters are gathered from has the bits of the master weights."""
        dtype = self.storage.precision.compute
        if self.unit.weight_home == "disk":
            assert self.storage.disk is not None
            return has_bits_of(self.storage.disk.map(f"p{self.number}.weights", self.count, dtype), self.weights)
        return self.master is None or self.pshard is None or has_bits_of(self.pshard, self.master)


def has_bits_of(published: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether a flat tensor has the bits of the weights in its dtype, a piece at a time, on its device: the weights may lie on
    another one. A NaN is a NaN: the bits that rounding gives it are the device's."""
    bits = {2: torch.int16, 4: torch.int32}[published.dtype.itemsize]
    for start in range(0, len(published), PIECE):
        piece = published[start:start + PIECE]
        want = weights[start:start + PIECE].to(piece.device, piece.dtype)
        same = (piece.view(bits) == want.view(bits)) | (piece.isnan() & want.isnan())
        if not same.all():
            return False
    return True


def there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _part(whole: torch.Tensor | None, owned: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A range of a buffer, or a tensor of its own where there is no such buffer."""
    return whole[slice(*owned)] if whole is not None else torch.zeros(owned[1] - owned[0], dtype=dtype, device=device)


def _view(buffer: torch.Tensor, placed: Placed) -> torch.Tensor:
    return buffer[placed.start:placed.stop].view(placed.module_shape)


def _hook(adder: weakref.WeakMethod, number: int, weight_grads: WeightGrads) -> Callable[[torch.Tensor], None]:
    """What autograd calls with a parameter whose `.grad` is new: add it to the unit's, now or with what was put off."""

    def add(grad: torch.Tensor) -> None:
        found = adder()
        assert found is not None
        found(number, grad)

    def hook(parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return  # its product was put off
        if weight_grads.put_off is None:
            add(grad)
        else:
            weight_grads.put_off.append(lambda: add(grad))

    return hook


def places(states: list[UnitState]) -> list[Place]:
    """Where autograd must not keep parameters as such: buffers that are used for others until BACKWARD, when the parameters may
    lie elsewhere."""
    return [Place(state.param, state.whole_param) for state in states if not state.whole and state.param is not None]


def make_states(config: Config, comm: Comm, layouts: dict[int, Layout], storage: Storage) -> dict[int, UnitState]:
    """The states of the parameter units that a rank holds, with initial values."""
    states = {}
    for unit in storage.table.held(comm.here.pp):
        state = UnitState(unit, layouts[unit], comm.here.dp % storage.table.shard_size, storage)
        state.writes = storage.table.saves(comm.here.pp, unit) and comm.here.dp < storage.table.shard_size
        if state.writes and storage.table.snapshots:
            state.make_snapshot(storage.table.kept_kinds)
        state.fill(comm.here._asdict(), config.train.seed)
        states[unit] = state
    return states
