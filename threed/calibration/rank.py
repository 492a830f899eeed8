"""Rank: what each process of a calibration does, one thing after the other, while the others do the same."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from threed.calibration.compute import Compute
from threed.calibration.grid import Grid
from threed.calibration.layers import Dispatch, layers
from threed.calibration.links import CHANNELS, Links
from threed.calibration.points import Computed, Sent
from threed.comm import Comm, ProcessComm, file_store
from threed.errors import ThreedError
from threed.mesh import Mesh

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Task:
    """What a launcher gives to each rank."""

    grid: Grid
    ranks: int
    processors: int
    cuda: bool
    folder: str


@dataclass
class Measured:
    """What one rank has measured. `rates`: bytes a second, or seconds, by name."""

    computed: list[Computed] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    rests: list[Dispatch] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)


def mesh_of(ranks: int) -> Mesh:
    """Two pipeline positions where ranks are even, so that there are messages."""
    return Mesh(pp=2, dp=ranks // 2) if ranks % 2 == 0 else Mesh(dp=ranks)


def measure(rank: int, task: Task, store: str, pipe: Any) -> int:
    """Body of a rank. Sends ("say", text) on rank 0, and in the end ("done", Measured) or ("failed", text).
    Returns the exit status."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, task.processors // task.ranks))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = torch.device("cuda", rank) if task.cuda else torch.device("cpu")
    try:
        comm = ProcessComm(mesh_of(task.ranks), rank, device, TIMEOUT_S, file_store(store, task.ranks))
        measured = _measure(comm, task, pipe if rank == 0 else None)
        measured.rates["context"] = float(memory)
        pipe.send(("done", measured))
        comm.exchange(None)  # nobody leaves while another rank may still talk to it
        return 0
    except ThreedError as error:
        pipe.send(("failed", str(error)))
    except Exception:
        pipe.send(("failed", f"rank {rank}: {traceback.format_exc()}"))
    return 1


def _measure(comm: Comm, task: Task, pipe: Any) -> Measured:
    measured, compute = Measured(), Compute(task.grid, comm.device)
    # On a CPU that many ranks have a processor for themselves.
    alone = task.cuda or comm.rank < task.processors
    wide, narrow = torch.float32, torch.bfloat16

    def rates() -> None:
        measured.rates["launch"], measured.rates["link"] = compute.launch_s(), compute.link()
        measured.rates["step"] = compute.step()

    def on_layers() -> None:
        measured.computed, measured.rests = [*measured.computed, *(found := layers(task.grid))[0]], found[1]

    parts: list[tuple[str, Callable[[], Any]]] = [
        ("products", lambda: measured.computed.extend(compute.products(wide) + compute.products(narrow))),
        ("element-wise kernels", lambda: measured.computed.extend(compute.element_wise())),
        ("attention", lambda: measured.computed.extend(compute.attention(narrow if task.cuda else wide))),
        *([("layers", on_layers)] if task.grid.layers else []),
        ("copies, launches and the host's optimizer step", rates),
        (f"the disk at {task.folder}", lambda: measured.rates.update(
            zip(("write", "read"), compute.disk(task.folder, comm.rank), strict=True)))]
    for what, part in parts:
        _say(pipe, what)
        if alone:
            part()
        comm.exchange(None)  # all measure the same at the same time
    if comm.mesh.size > 1:
        _say(pipe, f"collectives of {comm.mesh.size} ranks")
        if comm.mesh.positions > 1:
            comm.open_channels(CHANNELS)
        links = Links(task.grid, comm)
        measured.sent = links.points()
        measured.rates["contention"] = links.contention()
    return measured


def _say(pipe: Any, text: str) -> None:
    if pipe is not None:
        pipe.send(("say", text))
