"""Task: what each process of a calibration does, one thing after the other, while the others do the same."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Any

import torch

from threed.base.errors import ThreedError
from threed.base.mesh import Mesh
from threed.base.quantity import many
from threed.calibration.compute import Compute
from threed.calibration.fitted import Machine
from threed.calibration.grid import Grid
from threed.calibration.layers import layers
from threed.calibration.links import CHANNELS, GroupTimes
from threed.calibration.points import RankPoints
from threed.comm.process import ProcessComm, file_store
from threed.devices import device_of, pick
from threed.engine.device import set_up
from threed.engine.gpu import stay_beside
from threed.schema import Config

TIMEOUT_S = 120.0
WIDE, NARROW = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class CalibrationTask:
    """What a launcher gives to each rank."""

    grid: Grid
    machine: Machine
    folder: str  # of whose disk the speed is measured
    store: str  # the file where ranks meet


def mesh_of(ranks: int) -> Mesh:
    """Two pipeline positions where ranks are even, so that there are messages."""
    return Mesh(pp=2, dp=ranks // 2) if ranks % 2 == 0 else Mesh(dp=ranks)


def measure(rank: int, task: CalibrationTask, pipe: Any) -> int:
    """Body of a rank. Sends ("say", text) on rank 0, and in the end ("done", Measured) or ("failed", text).
    Returns the exit status."""
    machine = task.machine
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, machine.processors // machine.ranks))
    set_up(Config())  # streams, queues and kernels as a run has them
    context = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    try:
        device = pick(machine.device, rank)
        stay_beside(device)
        comm = ProcessComm(mesh_of(machine.ranks), rank, device, TIMEOUT_S,
                           file_store(task.store, machine.ranks))
        measured = _measure(comm, task, pipe)
        measured.rates["context"] = context
        pipe.send(("done", measured))
        comm.all_gather(None)  # nobody leaves while another rank may still talk to it
        return 0
    except ThreedError as error:
        pipe.send(("failed", str(error)))
    return 1


def _measure(comm: ProcessComm, task: CalibrationTask, pipe: Any) -> RankPoints:
    measured, compute, gpus = RankPoints(), Compute(task.grid, comm.device), task.machine.on_gpus
    device = device_of(comm.device)
    computed, rates = measured.computed, measured.rates
    if gpus:
        measured.device, rates["memory"] = device.name(), float(device.memory_bytes())

    def copies() -> None:
        rates["launch"], rates["step"] = compute.launch_s(), compute.step()
        rates["link"], rates["both"] = compute.link()

    def disk() -> None:
        rates["write"], rates["read"] = compute.disk(task.folder, comm.rank)

    parts = {"products": lambda: computed.extend([*compute.products(WIDE), *compute.products(NARROW)]),
             "element-wise kernels": lambda: computed.extend(compute.element_wise()),
             "attention": lambda: computed.extend(compute.attention(device.dtype)),
             "layers": lambda: computed.extend(layers(task.grid)),
             "copies, launches and the host's optimizer step": copies,
             f"the disk at {task.folder}": disk}
    for what, part in parts.items():
        _say(comm, pipe, what)
        # On a CPU that many ranks have a processor for themselves.
        if gpus or comm.rank < task.machine.processors:
            part()
        comm.all_gather(None)  # all measure the same at the same time
    if comm.mesh.size > 1:
        _say(comm, pipe, "the host's optimizer step of one rank")
        if comm.rank == 0:
            rates["alone"] = compute.step()
        comm.all_gather(None)
        _say(comm, pipe, f"collectives and messages of {many(comm.mesh.size, 'rank')}")
        if comm.mesh.positions > 1:
            comm.open_channels(CHANNELS)
        links = GroupTimes(task.grid, comm)
        measured.sent = links.points()
        rates["contention"] = links.contention()
    return measured


def _say(comm: ProcessComm, pipe: Any, text: str) -> None:
    if comm.rank == 0:
        pipe.send(("say", text))
