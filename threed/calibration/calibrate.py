"""The verb `threed calibrate`: measure this machine, fit the constants of Hardware, and write them down."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from threed import devices
from threed.base.errors import InputError, RunError
from threed.base.files import write_whole
from threed.base.quantity import show_bytes
from threed.calibration.fitted import Machine, fitted, text
from threed.calibration.grid import Grid, grid
from threed.calibration.points import Point, RankPoints
from threed.calibration.task import CalibrationTask, measure
from threed.launcher.processes import CONTEXT, be_rank, end_all, signals_wait, start
from threed.prediction.hardware import Hardware

MOST_RANKS = 8  # of a CPU, unless asked for more


def calibrate(output: Path, ranks: int | None = None, quick: bool = False, folder: Path = Path("."),
              device: str = "auto", say: Callable[[str], None] = print) -> tuple[Hardware, list[Point]]:
    """Measure this machine with `ranks` processes (default: one a GPU or processor), and write a hardware
    file for `--hardware`.

    `folder`: of whose disk the speed is measured. `say` gets a line for each part. Returns the hardware and
    the points that it was fitted to. InputError for bad arguments, RunError where a rank fails.
    """
    (kind, gpus), processors = _kind(device), len(os.sched_getaffinity(0))
    if ranks is None:
        ranks = gpus or min(MOST_RANKS, processors)
    machine, chosen = Machine(ranks, processors, kind), grid(gpus > 0, quick)
    _check(output, folder, machine, gpus)
    _check_room(folder, chosen, ranks)
    begin = time.monotonic()

    def progress(line: str) -> None:
        say(f"{time.monotonic() - begin:5.0f} s  {line}")

    measured = _measured(machine, chosen, folder, progress)
    progress("fit")
    hardware, points = fitted(measured, machine)
    try:
        write_whole(output, text(hardware, points, machine))
    except OSError as error:
        raise InputError(f"-o {output}: {error.strerror}") from None
    return hardware, points


def _kind(device: str) -> tuple[str, int]:
    """The kind of device to use, and how many GPUs there are."""
    if device not in devices.CHOICES:
        raise InputError(f"--device {device}: give {devices.NAMED}")
    kind, gpus = devices.for_forks(device)
    if device in devices.ACCELERATORS and not gpus:
        raise InputError(f"--device {device}: torch sees no GPU here; use --device cpu")
    return kind, gpus


def _check(output: Path, folder: Path, machine: Machine, gpus: int) -> None:
    if machine.ranks < 1:
        raise InputError(f"--ranks {machine.ranks}: give at least 1")
    if machine.on_gpus and machine.ranks > gpus:
        raise InputError(f"--ranks {machine.ranks}: there are {gpus} GPUs; give as many, or use --device cpu")
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise InputError(f"-o {output}: no file can be written there; give a file in a folder that exists "
                         "and may be written to")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--folder {folder}: not a folder that may be written to; give one on the disk that "
                         "runs will use")


def _check_room(folder: Path, chosen: Grid, ranks: int) -> None:
    disk = os.statvfs(folder)
    needed, free = ranks * chosen.disk, disk.f_bavail * disk.f_frsize
    if free < 1.1 * needed:
        raise InputError(f"--folder {folder}: {show_bytes(free)} are free, and {show_bytes(needed)} are "
                         "written for a moment; give another folder, or use --quick")


def _measured(machine: Machine, chosen: Grid, folder: Path, say: Callable[[str], None]) -> list[RankPoints]:
    """Start the ranks, and collect what each has measured."""
    meeting = os.memfd_create("threed-store")
    task = CalibrationTask(chosen, machine, str(folder), f"/proc/self/fd/{meeting}")
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(machine.ranks)]
    ranks: list[Any] = []
    try:
        with signals_wait():
            ranks += [CONTEXT.Process(target=be_rank, name=f"rank {rank}",
                                      args=(os.getpid(), partial(measure, rank, task, theirs)))
                      for rank, (_, theirs) in enumerate(pipes)]
            start(ranks)
        return _collect(ranks, [ours for ours, _ in pipes], say)
    finally:  # also after Ctrl-C
        end_all(ranks)
        os.close(meeting)


def _collect(ranks: Sequence[Any], pipes: Sequence[Any], say: Callable[[str], None]) -> list[RankPoints]:
    """What each rank sends in the end. RunError where one fails."""
    found: dict[int, RankPoints] = {}
    while len(found) < len(ranks):
        left = [rank for rank in range(len(ranks)) if rank not in found]
        wait([pipes[rank] for rank in left] + [ranks[rank].sentinel for rank in left])
        for rank in left:
            ended = ranks[rank].exitcode is not None
            while rank not in found and pipes[rank].poll():
                what, value = pipes[rank].recv()
                if what == "failed":
                    raise RunError(f"{value}; nothing was written")
                if what == "say":
                    say(value)
                else:
                    found[rank] = value
            if ended and rank not in found:
                raise RunError(f"rank {rank} has ended before it had measured all; nothing was written")
    return [found[rank] for rank in range(len(ranks))]
