"""Before anything is allocated: whether each host has the memory that the plan keeps there for its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from psutil import virtual_memory

from threed.base.errors import InputError
from threed.base.quantity import many, show_bytes
from threed.comm.group import Comm
from threed.devices.host import memory_bytes
from threed.monitor.banner import like
from threed.prediction.hardware import Hardware
from threed.prediction.host import RankBytes, bytes_of, remedies, show_remedies
from threed.program.analysis import Analysis
from threed.program.summary import host_bytes, snapshot_bytes
from threed.schema import Config


def check_hosts(config: Config, analysis: Analysis, comm: Comm, hosts: Sequence[str]) -> list[str]:
    """Warnings, of hosts with little memory beside what their ranks need. InputError, on all ranks, where a
    host has less than that, or others use too much of it. `config`: as it was given, of which the plan has
    decided what is `auto`. `hosts`: the name of each rank's."""
    table = analysis.table
    rows = [RankBytes(host_bytes(analysis, position), snapshot_bytes(table, position))
            for position in range(table.num_positions)]
    if not any(map(any, rows)):
        return []
    memory, warnings = comm.all_gather((memory_bytes(), virtual_memory().available)), list[str]()
    machine = Hardware.parse(like(comm.device))
    for name in dict.fromkeys(hosts):
        ranks = [rank for rank, host in enumerate(hosts) if host == name]
        needed = bytes_of(comm.mesh, ranks, rows)
        has, free = (min(memory[rank][which] for rank in ranks) for which in (0, 1))
        here = replace(machine, host_memory_gb=has / 1e9, devices=len(ranks))
        what = f"{many(len(ranks), 'rank')} on {name} will hold {show_bytes(needed)} in its memory"
        if needed > min(has, free):
            todo = show_remedies(remedies(config, here)) if comm.rank == 0 else ""
            used = f", of which {show_bytes(free)} are free" * (free < has)
            raise InputError(f"{what}, and it has {show_bytes(has)}{used}; {comm.broadcast(todo)}")
        if needed > here.usable_host_bytes:
            warnings.append(f"{what}, and it has {show_bytes(has)}: {show_bytes(has - needed)} are left for "
                            "the processes themselves, the system and its caches")
    return warnings
