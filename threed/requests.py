"""Requests: what signals ask of a rank, and what its callbacks ask."""

from __future__ import annotations

import signal
from typing import Any

from threed.early import STOPS, handle


class Requests:
    """SIGTERM, SIGINT and SIGHUP save and stop, SIGUSR1 saves and goes on. All ranks hear of it with the
    numbers of the step."""

    def __init__(self) -> None:
        self.stop = self.save = False
        handle(STOPS, self._on_stop)
        handle([signal.SIGUSR1], self._on_save)
        # Those that have waited since the launcher forked come now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*STOPS, signal.SIGUSR1])

    def take(self) -> tuple[bool, bool]:
        """Whether this rank was asked to stop, and to save. A request to save is heard once."""
        asked, self.save = (self.stop, self.save), False
        return asked

    def _on_stop(self, *_: Any) -> None:
        self.stop = True

    def _on_save(self, *_: Any) -> None:
        self.save = True
