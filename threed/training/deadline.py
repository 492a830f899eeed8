"""Deadline: a run that ends by itself before `run.stop_after` is over, with a checkpoint. Rank 0 decides; the
others learn of it as of a signal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from threed.base.errors import InputError
from threed.base.quantity import parse_seconds, show_seconds
from threed.comm.environment import began_s
from threed.monitor.loggers.logger import model_size
from threed.schema import Config

STATE_BYTES = 16  # of a parameter in a checkpoint: at most, with AdamW
WRITE_BPS = 1e8  # bytes that a host surely writes in a second, before a save has been measured
MORE = 1.25  # a save takes at most so many times as long as those before it
END_S = 5.0  # what else is done at the end


class Deadline:
    """Whether a run's time is over: there is none left for another step and a checkpoint."""

    def __init__(self, config: Config, hosts: int, longest_save_s: Callable[[], float]):
        """`hosts`: how many write checkpoints. `longest_save_s`: of all saves so far; 0: there was none."""
        assert config.run.stop_after is not None
        self._config, self._limit_s = config, parse_seconds(config.run.stop_after)
        # On the clock that nobody sets.
        self._until = time.monotonic() + began_s() + self._limit_s - time.time()
        self._longest_save_s = longest_save_s
        self._guess_s = model_size(config) * STATE_BYTES / WRITE_BPS / max(1, hosts)
        self._copy_s = config.checkpoint.copy_wait_s if config.checkpoint.copy_to is not None else 0.0
        often = max(100, config.train.eval_every, config.train.sample_every)
        self._steps_s: deque[float] = deque(maxlen=often)  # with what was done between them
        self._last: float | None = None
        self.reached = False  # whether it has ended the run

    def late(self) -> bool:
        """Called before the first step, and at the end of each."""
        now = time.monotonic()
        if self._last is not None:
            self._steps_s.append(now - self._last)
            if len(self._steps_s) == 2:
                self._steps_s.popleft()  # a first step takes longer than others
        self._last = now
        self.reached = now + self.room_s > self._until
        return self.reached

    def refuse(self, step: int) -> NoReturn:
        """InputError for a start that has no time for its first step, which is `step`: a chain of jobs that
        took it for done would start the next one, which has no time either."""
        gone_s = self._limit_s - (self._until - time.monotonic())
        raise InputError(f"run.stop_after={self._config.run.stop_after} leaves no time before step {step}: "
                         f"{show_seconds(gone_s)} have gone into this start, and saving and ending take "
                         f"{show_seconds(self.room_s)}; nothing in {self._config.run.dir} has changed. Give "
                         "it more time")

    @property
    def room_s(self) -> float:
        """What a step and the end of the run take."""
        save_s = self._longest_save_s() or self._guess_s
        return max(self._steps_s, default=0.0) + MORE * save_s + self._copy_s + END_S
