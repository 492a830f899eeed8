"""Storage: the pools and files from which the parameter units of a rank get their memory."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from threed.comm.group import Comm
from threed.comm.lanes import Handle, copy, so_far
from threed.devices import device_of
from threed.devices import host as plain
from threed.program.buffers import Buffers
from threed.program.table import Table
from threed.schema import Config
from threed.tensor.disk import Disk
from threed.tensor.layers import WeightGrads
from threed.tensor.pool import Pool, flat
from threed.tensor.precision import Precision


class Storage(NamedTuple):
    """Sources of memory and settings that all units of a rank share."""

    table: Table
    precision: Precision
    device: torch.device
    params: Pool  # gathered parameters of units that do not stay whole
    grads: Pool  # whole gradients, from ZeRO-2 on
    pshards: Pool  # this rank's part of parameters whose home is not the device
    gshards: Pool  # this rank's part of gradients that go to the host as soon as they are reduced
    host_grads: Pool  # this rank's part of gradients on their way to the host's step
    adding: torch.Tensor  # of the host: where pieces of a gradient arrive that are added to a sum there
    host_weights: Pool  # parameters on their way between the host and another tier
    host_states: Pool  # optimizer state on its way between the host and the disk
    host_matrices: Pool  # what the host has begun to step, and what was turned, on their way
    packing: torch.Tensor  # of the host: where an update of matrices is made, before it is packed
    disk: Disk | None
    weight_grads: WeightGrads

    @classmethod
    def make(cls, config: Config, table: Table, buffers: Buffers, comm: Comm,
             weight_grads: WeightGrads) -> Storage:
        precision, device, host = Precision.of(config.precision), comm.device, torch.device("cpu")
        pinned = device_of(device).asynchronous
        uses_disk = "nvme" in (config.offload.optimizer, config.offload.parameters)
        return cls(table, precision, device, Pool(buffers.params, precision.compute, device),
                   Pool(buffers.grads, precision.grad, device),
                   Pool(buffers.pshards, precision.compute, device),
                   Pool(buffers.gshards, precision.grad, device),
                   Pool(buffers.host_grads, precision.grad, host, pinned),
                   flat(buffers.adding, precision.grad, host, pinned),
                   Pool(buffers.host_weights, precision.compute, host, pinned, for_disk=True),
                   Pool(buffers.host_states, torch.uint8, host, for_disk=True),
                   Pool(buffers.host_matrices, torch.uint8, host, pinned),
                   plain.zeros(buffers.packing, torch.uint8),
                   Disk(str(config.offload.nvme_path), comm.rank) if uses_disk else None, weight_grads)

    @property
    def one_memory(self) -> bool:
        """Whether the device's memory is the host's, as on a CPU: then nothing is copied between them that
        computation leaves alone until the copy is given back."""
        return not device_of(self.device).asynchronous

    @property
    def files(self) -> Disk:
        """The disk, which must be in use."""
        assert self.disk is not None
        return self.disk

    def rewind(self) -> None:
        """Before a program: what computation reads is where it was in the last one."""
        self.params.rewind()
        self.grads.rewind()

    def on_host(self, numel: int, dtype: torch.dtype, crosses: bool = True) -> torch.Tensor:
        """Zeros in memory of the host. `crosses`: whether the device copies from or to it. Other memory is
        not pinned: to pin takes long, and what is pinned nobody else can have."""
        if not crosses:
            return plain.zeros(numel, dtype)
        return flat(numel, dtype, torch.device("cpu"), device_of(self.device).asynchronous)

    @torch.no_grad()
    def add_to(self, host: torch.Tensor, part: torch.Tensor) -> None:
        """Add a gradient on the device to a sum on the host, which adds a piece while the next arrives."""
        halves = self.adding.split(len(self.adding) // 2)
        size, arriving = len(halves[0]), deque[tuple[torch.Tensor, torch.Tensor, Handle]]()

        def add() -> None:
            sum_, piece, arrived = arriving.popleft()
            arrived.block()
            sum_.add_(piece)

        for number, (sum_, piece) in enumerate(zip(host.split(size), part.split(size), strict=True)):
            into = halves[number % 2][:len(piece)]
            if len(arriving) == 2:
                add()
            copy(into, piece)
            arriving.append((sum_, into, so_far(self.device)))
        while arriving:
            add()
