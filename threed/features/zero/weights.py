"""The weights of a parameter unit, in the dtype in which compute reads them: gathered before they are used,
released after that, and fetched where their home is the host or the disk."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from threed.comm.lanes import Job, copy
from threed.features.zero.part import UnitPart
from threed.features.zero.storage import Storage
from threed.features.zero.transition import Transition
from threed.program.instruction import Tier
from threed.tensor.precision import DTYPES


class Residency(Enum):
    """What the device has of a unit's weights."""

    REPLICATED = "every rank has all of them, and gathers nothing"
    OFFLOADED = "the device has none of them"
    SHARDED = "the device has this rank's shard"
    GATHERED = "the device has all of them"
    PREFETCHED = "the device has all of them, and a shard for the GATHER after their RELEASE"


class Staging(Enum):
    """Whether a buffer of the host has a rank's shard, on its way between two tiers."""

    EMPTY = "no buffer of the host has them"
    STAGED = "a buffer of the host has them"


# Of all weights. USE leaves them where they are.
GATHER = Transition("GATHER", {Residency.SHARDED: Residency.GATHERED})
USE = Transition("use", {each: each for each in (Residency.REPLICATED, Residency.GATHERED,
                                                 Residency.PREFETCHED)})

_SHARDED = {Residency.GATHERED: Residency.SHARDED}
_OFFLOADED = {Residency.GATHERED: Residency.OFFLOADED, Residency.PREFETCHED: Residency.SHARDED}
_FETCHED = {Residency.OFFLOADED: Residency.SHARDED, Residency.GATHERED: Residency.PREFETCHED}
_IN, _OUT = {Staging.EMPTY: Staging.STAGED}, {Staging.STAGED: Staging.EMPTY}
_NONE: dict[Staging, Staging] = {}


class _Moves(NamedTuple):
    """The transitions of weights that have their home on one tier."""

    release: Transition[Residency]
    fetch: Transition[Residency]
    stage: Transition[Staging]  # from the disk to the host
    fetch_staged: Transition[Staging]  # from the host on to the device, for a GATHER
    step: Transition[Staging]  # a STEP on the host, of weights that go to their home afterwards
    refresh: Transition[Staging]  # to their home on the device
    offload: Transition[Staging]  # to their home on the disk

    @classmethod
    def of(cls, release: dict[Residency, Residency], fetch: dict[Residency, Residency],
           *staged: dict[Staging, Staging]) -> _Moves:
        names = "FETCH to the host", "FETCH from the host", "STEP", "FETCH of new values", "OFFLOAD"
        return cls(Transition("RELEASE", release), Transition("FETCH", fetch),
                   *map(Transition, names, staged))


MOVES = {
    #                       release     fetch     stage  fetch_staged  step   refresh  offload
    Tier.DEVICE: _Moves.of(_SHARDED, {}, _NONE, _NONE, _IN, _OUT, _NONE),
    Tier.HOST: _Moves.of(_OFFLOADED, _FETCHED, _NONE, _NONE, _NONE, _NONE, _NONE),
    Tier.DISK: _Moves.of(_OFFLOADED, _FETCHED, _IN, _OUT, _IN, _NONE, _OUT),
}


class Weights:
    """
        parameters        those of the modules: views of the whole weights, by key
        at_home  [owned]  what the rank owns of them: on the device (a part of the whole weights where the
                          unit stays whole), on the host or in a file

    The whole weights [numel] have a buffer of their own where the unit stays whole, else one of the pool
    while they are GATHERED.
    """

    def __init__(self, part: UnitPart, storage: Storage):
        self.part, self.storage, self.home = part, storage, part.unit.weight_home
        self._what = f"weights of {part.name}"
        self._dtype = dtype = DTYPES[part.unit.dtype] if part.unit.dtype else storage.precision.compute
        device, numel = storage.device, part.layout.numel
        if part.unit.whole:
            self._whole = torch.zeros(numel, dtype=dtype, device=device)
        else:
            self._whole = storage.params.sample(numel, dtype)  # (gives shapes to the parameters)
        if self.home == Tier.DISK:
            storage.files.make(self._file, part.count * dtype.itemsize)
        elif self.home == Tier.HOST:
            self._shard = storage.on_host(part.count, dtype)
        elif part.unit.whole:
            self._shard = self._whole[slice(*part.owned)]
        else:
            self._shard = torch.zeros(part.count, dtype=dtype, device=device)
        self._moves = MOVES[self.home]
        # Whether a STEP on the host writes to them directly: what reads them waits for the FETCH behind it.
        self.in_place = self.home == Tier.DEVICE and storage.one_memory
        on_device = Residency.SHARDED if part.sharded else Residency.REPLICATED
        self.residency = on_device if self.home == Tier.DEVICE else Residency.OFFLOADED
        self.staging = Staging.EMPTY
        self.parameters: dict[str, nn.Parameter] = {}
        for placed in part.layout.placed:
            # Setting `.data` gives the parameter its own version counter: the buffer's changes with every
            # unit that is gathered into it.
            parameter = nn.Parameter(torch.empty(0, dtype=dtype, device=device), part.unit.trains)
            parameter.data = self.part.view(placed, self._whole)
            self.parameters[placed.parameter.key] = parameter

    @property
    def _file(self) -> str:
        return f"p{self.part.number}.weights"

    @property
    def at_home(self) -> torch.Tensor:
        """What this rank owns of the weights. A file is mapped into memory, which is used between steps
        only."""
        if self.home == Tier.DISK:
            return self.storage.files.map(self._file, self.part.count, self._dtype)
        return self._shard

    def whole(self) -> torch.Tensor:
        """The whole weights, which the device must have."""
        USE(self.residency, self._what)
        return self._whole

    @property
    def in_pool(self) -> bool:
        """Whether the whole weights are in a buffer that other units use in turn."""
        return not self.part.unit.whole and self.residency in USE.ends

    # ---- between shard and whole

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a buffer for the whole weights. Returns it, and the shard from which they are gathered."""
        self.residency = GATHER(self.residency, self._what)
        if not self.part.unit.whole:
            self._whole = self.storage.params.take(self.part.layout.numel, self._dtype)
            for placed, parameter in zip(self.part.layout.placed, self.parameters.values(), strict=True):
                parameter.data = self.part.view(placed, self._whole)
        if self.home == Tier.DEVICE:
            return self._whole, self._shard
        self.storage.pshards.give(self._fetched)
        return self._whole, self._fetched

    def release(self) -> None:
        """Give up the gathered weights. A unit with `whole` keeps its buffer. (The parameters of the modules
        keep their shapes, which autograd checks.)"""
        self.residency = self._moves.release(self.residency, self._what)
        if not self.part.unit.whole:
            self.storage.params.give(self._whole)

    # ---- between tiers

    def fetch(self) -> tuple[torch.Tensor, Job]:
        """Copy the shard to a buffer of the device's pool, for a GATHER: from its home on the host, or from
        the host's buffer that has what was on disk."""
        self.residency = self._moves.fetch(self.residency, self._what)
        source = self._shard if self.home == Tier.HOST else self._unstage(self._moves.fetch_staged)
        self._fetched = shard = self.storage.pshards.take(self.part.count, self._dtype)
        return shard, lambda: copy(shard, source[:self.part.count])

    def stage(self) -> tuple[torch.Tensor, Job]:
        """Read the shard from its file into a buffer of the host."""
        buffer = self._stage(self._moves.stage)
        return buffer, lambda: self.storage.files.read(self._file, buffer.view(torch.uint8))

    def step_output(self) -> torch.Tensor:
        """Where a STEP on the host writes new weights, [owned] or more: at home, or in a buffer of the host
        that `refresh` or `offload` empties."""
        if self.in_place:
            self.staging, self._staged = self._moves.step(self.staging, self._what), self._shard
            return self._shard
        return self._shard if self.home == Tier.HOST else self._stage(self._moves.step)

    def refresh(self) -> tuple[torch.Tensor, Job]:
        """Copy new weights from the host's buffer to their home on the device."""
        source, home = self._unstage(self._moves.refresh), self._shard
        return home, lambda: source is home or copy(home, source[:self.part.count])

    def offload(self) -> Job:
        """Write new weights from the host's buffer to their file."""
        buffer = self._unstage(self._moves.offload)
        return lambda: self.storage.files.write(self._file, buffer.view(torch.uint8))

    def _stage(self, move: Transition[Staging]) -> torch.Tensor:
        self.staging = move(self.staging, self._what)
        numel = self.part.file_bytes(self._dtype.itemsize) // self._dtype.itemsize
        self._staged = self.storage.host_weights.take(numel, self._dtype)
        return self._staged

    def _unstage(self, move: Transition[Staging]) -> torch.Tensor:
        self.staging = move(self.staging, self._what)
        if not self.in_place:
            self.storage.host_weights.give(self._staged)
        return self._staged
