"""A rank's GPU among those of its machine: no other rank has it, and the rank runs on the processors beside
it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from threed.base.errors import InputError
from threed.comm.group import Comm
from threed.devices import device_of, kind_of
from threed.devices.host import SYSFS, group_files

ISSUING = 2  # threads of a rank that issue kernels: its own, and the one that autograd starts for a device
THREADS = Path("/proc/self/task")  # of this process, by number


def hosts(comm: Comm) -> list[str]:
    """The name of each rank's host. InputError where two ranks have the same GPU, or some ranks have a GPU
    and others have none: NCCL would say of the first "duplicate GPU", and would wait for the second."""
    devices = comm.all_gather((comm.device.type, device_of(comm.device).uuid(), socket.gethostname()))
    if wrong := clash(devices):
        raise InputError(wrong)
    return [host for _, _, host in devices]


def clash(devices: Sequence[tuple[str, str, str]]) -> str:
    """What is wrong with the devices of all ranks, given as (type, UUID, host) by rank; "" if nothing is."""
    kinds = [kind for kind, _, _ in devices]
    if len(set(kinds)) > 1:
        having = next(rank for rank, kind in enumerate(kinds) if kind != "cpu")
        without, known = kinds.index("cpu"), kind_of(kinds[having])
        return (f"rank {without} on {devices[without][2]} sees no GPU, and rank {having} on "
                f"{devices[having][2]} has one: see there whether {known.lister} lists GPUs, and what "
                f"{known.visible} says; run.device=cpu uses none")
    first: dict[str, int] = {}
    for rank, (kind, uuid, host) in enumerate(devices):
        other = first.setdefault(uuid, rank) if uuid else rank
        if other != rank:
            return (f"ranks {other} and {rank} have the same GPU, {uuid} on {host}: give each a GPU of its "
                    f"own (by {kind_of(kind).visible}, or Slurm's --gpus-per-task=1), or start as many ranks "
                    "a machine as it has GPUs")
    return ""


# ---------------------------------------------------------------- processors beside a GPU


def stay_beside(device: torch.device, sysfs: Path = SYSFS) -> None:
    """Let this process run only on the processors of its GPU's NUMA node: memory that it pins from now on is
    there, too. From the other socket copies would take about twice the time. Call it before memory is pinned
    and before the first work on the GPU.

    It does nothing where somebody has bound the process (numactl, srun --cpu-bind), where all its processors
    are on one node, or where the kernel does not say (a virtual machine without NUMA).
    """
    if not (bus := (gpu := device_of(device)).bus()):
        return
    allowed = os.sched_getaffinity(0)
    cpus = near_cpus(bus, allowed, sysfs)
    if cpus is None:
        return
    for thread in map(int, os.listdir(THREADS)):  # a thread that starts later runs where its maker does
        os.sched_setaffinity(thread, cpus)
    if "OMP_NUM_THREADS" not in os.environ:
        sharing = sum(near_cpus(gpu.bus(each), allowed, sysfs) == cpus for each in range(gpu.driver.count()))
        torch.set_num_threads(max(1, min(torch.get_num_threads(), len(cpus) // max(1, sharing))))


def step_threads(comm: Comm, hosts: Sequence[str]) -> int:
    """Threads of this rank's optimizer step on the host, on processors that it may share with other ranks of
    its host: all but those that issue work to the GPU meanwhile. 0, as many as torch's, on a CPU, or where
    somebody has chosen (OMP_NUM_THREADS). `hosts`: the name of each rank's host. All ranks call it."""
    mine = os.sched_getaffinity(0)
    everywhere = comm.all_gather((hosts[comm.rank], sorted(mine)))
    if not device_of(comm.device).asynchronous or "OMP_NUM_THREADS" in os.environ:
        return 0
    sharing = sum(host == hosts[comm.rank] and not mine.isdisjoint(cpus) for host, cpus in everywhere)
    return max(1, len(mine) // sharing - ISSUING)


def near_cpus(bus: str, allowed: set[int], sysfs: Path = SYSFS) -> set[int] | None:
    """Those of the `allowed` processors that are on the NUMA node of a GPU, which is given by its bus address
    such as 0000:3b:00.0; None where the process is to stay as it is."""
    nodes = {int(path.name.removeprefix("node")): numbers(_read(path / "cpulist"))
             for path in (sysfs / "devices/system/node").glob("node[0-9]*")}
    node = _read(sysfs / "bus/pci/devices" / bus / "numa_node")
    cpus = nodes.get(int(node or -1), set()) & allowed
    spans = sum(bool(each & allowed) for each in nodes.values()) > 1
    bound = allowed != _whole(sysfs)
    return cpus if cpus and spans and not bound else None


def numbers(text: str) -> set[int]:
    """0-3,8 as the kernel writes it -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _whole(sysfs: Path) -> set[int]:
    """The processors of a process that nobody has bound: those of its control group (a container, a job), or
    all."""
    files = group_files("cpuset", "cpuset.cpus.effective", "cpuset.effective_cpus")
    places = [*(sysfs / path for path in files), sysfs / "devices/system/cpu/online"]
    return next((found for found in map(numbers, map(_read, places)) if found), set())


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
