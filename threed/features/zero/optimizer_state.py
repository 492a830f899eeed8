"""The optimizer state of a parameter unit: master weights and moments, on the device, on the host, or on disk
between two STEPs."""

from __future__ import annotations

import torch

from threed.base.quantity import BYTES
from threed.comm.lanes import Job
from threed.features.zero.part import UnitPart
from threed.features.zero.storage import Storage
from threed.features.zero.transition import Transition
from threed.features.zero.weights import Weights
from threed.optim.base import Buffer
from threed.program.instruction import Tier
from threed.tensor.precision import DTYPES, has_bits_of

# Of state that has its home on disk; state that has it elsewhere stays there.
FETCH = Transition("FETCH", {Tier.DISK: Tier.HOST})
OFFLOAD = Transition("OFFLOAD", {Tier.HOST: Tier.DISK})
STAYS = Transition[Tier]("FETCH or OFFLOAD", {})


class OptimizerState:
    """
        master  [owned]  the weights that the optimizer updates and a checkpoint keeps: in fp32, or those of
                         `weights` where there is no copy, as of a frozen unit
        buffers [owned]  the optimizer's, by name; none of a frozen unit
        tier             where they are now; on disk they are files mapped into memory, which are used between
                         steps only
    """

    def __init__(self, part: UnitPart, storage: Storage, weights: Weights):
        self.part, self.storage, self._weights = part, storage, weights
        self._what = f"optimizer state of {part.name}"
        self.tier = home = part.unit.state_home
        self.separate = part.unit.trains and storage.table.shards.has_master(home, part.number)
        self._fetch, self._offload = (FETCH, OFFLOAD) if home == Tier.DISK else (STAYS, STAYS)
        if home == Tier.DISK:
            storage.files.make(self._file, self._bytes)
            self._map_file()
        elif home == Tier.HOST:
            self._bind(storage.on_host(self._bytes, torch.uint8, crosses=False))
        else:
            self._master = torch.zeros(part.count if self.separate else 0, device=storage.device)
            self.buffers = {buffer.name: torch.zeros(part.count, dtype=DTYPES[buffer.dtype],
                                                     device=storage.device)
                            for buffer in storage.table.shards.buffers(part.number) if part.unit.trains}

    @property
    def _file(self) -> str:
        return f"p{self.part.number}.state"

    @property
    def _bytes(self) -> int:
        shards, part = self.storage.table.shards, self.part
        return part.count * shards.state_bytes(part.unit.state_home, part.number)

    @property
    def master(self) -> torch.Tensor:
        return self._master if self.separate else self._weights.at_home

    # ---- between host and disk

    def fetch(self) -> tuple[torch.Tensor, Job]:
        """Read the state from its file into a buffer of the host."""
        self.tier = self._fetch(self.tier, self._what)
        itemsize = self.storage.table.shards.state_bytes(Tier.HOST, self.part.number)
        buffer = self.storage.host_states.take(self.part.file_bytes(itemsize))
        self._bind(buffer)
        return buffer, lambda: self.storage.files.read(self._file, buffer)

    def offload(self) -> Job:
        """Write the state from the host's buffer to its file."""
        self.tier = self._offload(self.tier, self._what)
        buffer = self.memory
        self.storage.host_states.give(buffer)
        self._map_file()
        return lambda: self.storage.files.write(self._file, buffer)

    def _map_file(self) -> None:
        self._bind(self.storage.files.map(self._file, self._bytes, torch.uint8))

    def _bind(self, memory: torch.Tensor) -> None:
        """Let `master` and `buffers` be views of this memory of the host [bytes]."""
        self.memory, kept, start = memory, dict[str, torch.Tensor](), 0
        for name, dtype in (Buffer("master"), *self.storage.table.shards.buffers(self.part.number)):
            stop = start + self.part.count * BYTES[dtype]
            kept[name], start = memory[start:stop].view(DTYPES[dtype]), stop
        self._master, self.buffers = kept.pop("master"), kept

    # ---- to the weights that compute reads

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights to the tensor or file from which weights are gathered, between steps or
        after a step on the device."""
        if self.separate:
            self._weights.at_home.copy_(self.master)

    @torch.no_grad()
    def is_published(self) -> bool:
        """Whether the tensor or file from which weights are gathered has the bits of the master weights."""
        return not self.separate or has_bits_of(self._weights.at_home, self.master)
