"""Agreement: requests to stop and to save, on which all ranks act after the same step. A rank's own requests
are in base/requests; all ranks learn of them with the numbers of a step, in the meter's all-reduce."""

from __future__ import annotations

from collections.abc import Iterable

from threed.base.requests import Requests
from threed.comm.group import Comm
from threed.monitor.meter import StepReport


class Agreement:
    """A writer of the meter."""

    columns: tuple[str, ...] = ("stop", "save")

    def __init__(self, requests: Requests):
        self._requests = requests
        self.stop = self.save = False  # what any rank has asked for, by the last step

    def begin(self, comm: Comm, late: bool) -> None:
        """Agree before the first step whether to stop. `late`: whether this rank asks for it, too."""
        self.stop = bool(comm.numbers(float(self._requests.stop or late)).any())

    def row(self) -> Iterable[float]:
        """What this rank asks for."""
        return map(float, self._requests.take())

    def learn(self, step: StepReport) -> None:
        """Take over what any rank has asked for."""
        self.stop, self.save = (bool(step.column(what).any()) for what in self.columns)
