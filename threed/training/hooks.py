"""Hooks: callbacks, for what happens around the steps of a run. Saving, tracing, evaluation and the log are
callbacks, and so is what a script adds.

    on_start
    for each step:    on_step_begin    (the step)    on_step_end
    on_end
    on_save           whenever a checkpoint is complete: during one of the calls above

`callbacks.ORDER` is the order in which callbacks are called. Each rank has its own callbacks, and calls the
same methods after the same steps: what one rank sends in a callback, the other ranks can receive in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threed.base.errors import InputError, ThreedError, line_of

if TYPE_CHECKING:
    from threed.monitor.meter import StepReport as Measured
    from threed.program.trace import Trace
    from threed.training.trainer import Trainer


@dataclass
class Step:
    """A step that has ended. Loss, norm and `finite` are the same on all ranks.

    `metrics` are the numbers that the log will write, by name. A callback may add numbers; rank 0's are
    written.
    """

    number: int  # from 1
    loss: float  # mean over the tokens of the global batch
    grad_norm: float  # before clipping
    finite: bool  # False: the step has changed no weight
    trace: Trace  # when this rank ran each instruction, in seconds
    measured: Measured  # what all ranks reported, by rank
    metrics: dict[str, float | None] = field(default_factory=dict)


class Callback:
    """Base of callbacks: override what you need; each method does nothing by itself.

    Methods run on every rank, in the process that trains. An exception ends the run on all ranks, with a
    message that names the callback, the method and the line; the run does not restart.

    >>> class Quick(threed.Callback):
    ...     def on_step_end(self, trainer, step): step.metrics["mine/margin"] = 5.0 - step.loss
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, once a checkpoint is loaded: `trainer.step_number` steps are done."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Before step `trainer.step_number + 1`."""

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        """After a step."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint is complete under its name, `path`. It may hold an earlier step: checkpoints are
        written in the background."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step and its checkpoint; not called when the run fails."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """InputError where an object is no Callback, or has a method on_... that is not one of `METHODS`."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks={callbacks!r}: give a list, such as callbacks=[MyCallback()]")
    for index, callback in enumerate(callbacks):
        if isinstance(callback, type):
            name = callback.__name__
            raise InputError(f"callbacks[{index}] is the class {name}: give an object, {name}()")
        if not isinstance(callback, Callback):
            raise InputError(f"callbacks[{index}] is a {type(callback).__name__}: give an object of a class "
                             "that inherits from threed.Callback and has some of its methods "
                             f"({', '.join(METHODS)})")
        unknown = [name for name in dir(callback) if name.startswith("on_") and name not in METHODS]
        if unknown:
            raise InputError(f"callbacks[{index}], a {type(callback).__name__}, has {unknown[0]}, which "
                             f"nobody calls; a callback has {', '.join(METHODS)}")


class Guarded(Callback):
    """Calls a script's callback. An error names the callback, the method and the line. It is an InputError:
    the script is at fault and not the machine, so the run is not started again."""

    def __init__(self, callback: Callback):
        self._callback = callback

    def on_start(self, trainer: Trainer) -> None:
        self._call("on_start", trainer)

    def on_step_begin(self, trainer: Trainer) -> None:
        self._call("on_step_begin", trainer)

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        known = list(step.metrics)
        self._call("on_step_end", trainer, step)
        left, metrics = f"{self._name}.on_step_end has left", step.metrics
        if not isinstance(metrics, dict) or not all(name in metrics for name in known):
            raise InputError(f"{left} step.metrics = {metrics!r} in step {step.number}: add numbers to the "
                             "dictionary, and leave what is in it")
        for name, value in metrics.items():
            number = isinstance(value, float | int | None) and not isinstance(value, bool)
            if not number or not isinstance(name, str):
                raise InputError(f"{left} metrics[{name!r}] = {value!r} in step {step.number}: a metric is a "
                                 "number under a name; of a tensor take .item()")

    def on_save(self, trainer: Trainer, path: Path) -> None:
        self._call("on_save", trainer, path)

    def on_end(self, trainer: Trainer) -> None:
        self._call("on_end", trainer)

    @property
    def _name(self) -> str:
        return f"callback {type(self._callback).__name__}"

    def _call(self, method: str, trainer: Trainer, *arguments: Any) -> None:
        try:
            with trainer.watch.phase(f"{self._name}: {method}", waits=False):
                getattr(self._callback, method)(trainer, *arguments)
        except ThreedError:
            raise
        except Exception as error:
            raise InputError(f"{self._name}: {method} after step {trainer.step_number} has failed on rank "
                             f"{trainer.rank}: {type(error).__name__}: {error}{line_of(error)}") from error
