"""Requests: signals and callbacks ask a rank to stop or to save."""

from __future__ import annotations

import signal
from typing import Any

from threed.early import STOPS, handle


class Requests:
    """SIGTERM, SIGINT and SIGHUP ask the run to save and stop, SIGUSR1 to save and go on. All ranks learn of
    a request when they exchange the numbers of the step."""

    def __init__(self) -> None:
        self.stop = self.save = False
        handle(STOPS, self._on_stop)
        handle([signal.SIGUSR1], self._on_save)
        # Signals that were blocked since the launcher forked are delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*STOPS, signal.SIGUSR1])

    def take(self) -> tuple[bool, bool]:
        """Whether this rank was asked to stop, and to save. A request to save is returned once."""
        asked, self.save = (self.stop, self.save), False
        return asked

    def _on_stop(self, *_: Any) -> None:
        self.stop = True

    def _on_save(self, *_: Any) -> None:
        self.save = True
