"""Start: train in the role that the environment gives to this process: one rank, or the launcher of all
ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from threed.base import marks
from threed.comm.environment import place_of_environment
from threed.monitor.loggers.logger import check_installed
from threed.schema import Config
from threed.training.hooks import Callback, check_callbacks


class Loads(Protocol):
    """What a config is made of, once the number of ranks is known: `config.load.ConfigSource`, say."""

    @property
    def leaves_dp(self) -> bool:
        """Whether the number of ranks decides `parallel.dp`."""
        ...

    def load(self, world_size: int | None) -> Config:
        """The validated config for so many ranks; None: not known. Raises InputError where it is none."""
        ...


def start(source: Loads, callbacks: Sequence[Callback] = (), parent: int | None = None) -> tuple[int, Config]:
    """Train, and return the exit status of the run, or of this rank, and the config. `parent`: the id of this
    process's parent at its start."""
    parent = parent or os.getppid()
    marks.begin_once("start")
    try:
        return _start(source, callbacks, parent)
    finally:
        marks.take()  # a script may train again


def _start(source: Loads, callbacks: Sequence[Callback], parent: int) -> tuple[int, Config]:
    check_callbacks(callbacks)
    place = place_of_environment()
    # raises for bad input before torch is imported, which takes seconds
    config = source.load(place.world_size if place is not None else None)
    if place is None or place.rank == 0:
        check_installed(config)
    from threed.launcher import local as launcher
    from threed.launcher import rank

    if place is not None:
        return rank.run_place(rank.Job(config, callbacks), place, parent), config
    if source.leaves_dp and (gpus := launcher.local_world_size(config.run.device)):
        config = source.load(gpus)
    return launcher.run_local(config, callbacks), config
