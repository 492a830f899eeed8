"""Start: train in the role that the environment gives to this process: one rank, or the launcher of all
ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from threed.base import marks
from threed.base.errors import InputError
from threed.comm.environment import place_of_environment
from threed.monitor.loggers.logger import check_installed
from threed.schema import Config
from threed.training.hooks import Callback, check_callbacks

Load = Callable[[int | None], Config]  # world size, if it is known -> the config for it


def start(load: Load, callbacks: Sequence[Callback] = (), parent: int | None = None) -> int:
    """Train, and return the exit status of the run, or of this rank. `parent`: the id of this process's
    parent at its start."""
    parent = parent or os.getppid()
    marks.begin_once("start")
    try:
        return _start(load, callbacks, parent)
    finally:
        marks.take()  # a script may train again


def _start(load: Load, callbacks: Sequence[Callback], parent: int) -> int:
    check_callbacks(callbacks)
    first = load(None)  # raises for bad input before torch is imported, which takes seconds
    place = place_of_environment()
    if place is None or place.rank == 0:
        check_installed(first)
    from threed.launcher import local as launcher
    from threed.launcher import rank

    if place is not None:
        return rank.run_place(rank.Job(load(place.world_size), callbacks), place, parent)
    if _dp_is_open(load):
        first = load(launcher.local_world_size(first.run.device))
    return launcher.run_local(first, callbacks)


def _dp_is_open(load: Load) -> bool:
    """Whether the world size decides dp: it does if another world size would give another dp."""
    one = load(None)
    try:
        return load(2 * one.world_size).dp != one.dp
    except InputError:
        return False
