"""Storage: the pools and files from which the parameter units of a rank get their memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from threed.comm.group import Comm
from threed.comm.lanes import copy
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
    adding: torch.Tensor  # where what the host has of a gradient comes back, to be added to
    host_weights: Pool  # parameters on their way between the host and another tier
    host_states: Pool  # optimizer state on its way between the host and the disk
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
                   torch.zeros(buffers.adding, dtype=precision.grad, device=device),
                   Pool(buffers.host_weights, precision.compute, host, pinned, for_disk=True),
                   Pool(buffers.host_states, torch.uint8, host, for_disk=True),
                   Disk(str(config.offload.nvme_path), comm.rank) if uses_disk else None, weight_grads)

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
        """Add a gradient on the device to a sum on the host. The device computes it: the sum is copied there,
        a piece at a time, and back. `part` is overwritten."""
        size = len(self.adding)
        for sum_, piece in zip(host.split(size), part.split(size), strict=True):
            before = self.adding[:len(piece)]
            copy(before, sum_)
            piece.add_(before)
            copy(sum_, piece)
