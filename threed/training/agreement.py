"""Agreement: what all ranks learn of each other with the numbers of a step, in the meter's all-reduce, and on
which they act after the same step: requests to stop and to save (a rank's own are in base/requests), and
whether pieces of the model are compiled."""

from __future__ import annotations

from collections.abc import Iterable

from threed.base.axes import axes_of
from threed.base.errors import RunError
from threed.base.mesh import Mesh
from threed.base.requests import Requests
from threed.comm.group import Comm
from threed.monitor.meter import StepReport
from threed.tensor.fused import Fused


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


class SamePieces:
    """A writer of the meter. A rank whose compiler fails in a step goes on by separate operations, which
    round otherwise. Ranks of a tensor-parallel group, which have copies of the same weights, must do alike,
    or these would part. Other ranks need not: a piece may be one that only some stages have."""

    columns: tuple[str, ...] = ("pieces",)

    def __init__(self, fused: Fused, mesh: Mesh):
        self._fused, self._mesh = fused, mesh

    def row(self) -> Iterable[float]:
        return [float(self._fused.compile)]

    def learn(self, step: StepReport) -> None:
        """RunError, on all ranks, where some of a group have compiled pieces and others have not."""
        compiled = step.column("pieces").tolist()
        if min(compiled) == max(compiled):
            return
        for group in (group for axis in axes_of("parameters") for group in self._mesh.groups(axis)):
            rank, best = (choose(group, key=compiled.__getitem__) for choose in (min, max))
            if compiled[rank] != compiled[best]:
                raise RunError(
                    f"model.fused=auto: rank {rank} could not compile a piece of the model in this step (its "
                    f"warning says why), and rank {best} could, which rounds otherwise and has copies of the "
                    "same weights. Go on from the newest checkpoint; if it happens again, set "
                    "model.fused=off")
