"""The errors that people see.

Every message says what is wrong, where, and what to do. The command line prints the message, never a
traceback, and leaves with `status`: 2 when the input is at fault, 1 when the run is, 3 when a machine
computes wrongly.
"""

from __future__ import annotations

import errno
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRONG_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
                 errno.EISDIR, errno.EEXIST)


class ThreedError(Exception):
    """Base of all errors meant for people; `status` is the exit status of the command line."""

    status = 1


class InputError(ThreedError, ValueError):
    """A config, a file or an argument that cannot be honoured."""

    status = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config: the dotted key that it is about, and the line that is
    printed."""

    key: str
    text: str

    @classmethod
    def of(cls, key: str, rest: str) -> Problem:
        """With a line that begins with the key."""
        return cls(key, f"{key}{rest}")

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    def __str__(self) -> str:
        return self.text


class Idle(Problem):
    """A key that has no effect, by the values of others; with its default it would be no problem."""


class ConfigError(InputError):
    """Everything that is wrong with a config, at once; `advice` is about all of it."""

    def __init__(self, problems: Sequence[Problem], where: str = "the config", advice: str = ""):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in {where}:\n" + "\n".join(f"  - {problem}" for problem in problems)
                         + (f"\n{advice}" if advice else ""))


class PlanError(ThreedError):
    """A program that is not legal, complete or free of deadlock: rank, index, instruction, neighbours,
    reason."""


class RunError(ThreedError):
    """A failure at run time, with the instruction that failed and what was alive."""


def check_type(name: str, value: Any, kinds: type | tuple[type | None, ...], give: str) -> None:
    """InputError where an argument is of another type than `kinds` (None among them allows None). `give`:
    what to give instead."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if value is None and None in kinds:
        return
    types = tuple(kind for kind in kinds if kind is not None)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InputError(f"{name} is of type {type(value).__name__}: give {give}")


def of_folder(text: str, error: OSError) -> ThreedError:
    """The error for a folder that cannot be used: InputError if the folder is wrong (it does not exist, or
    may not be written, or the disk is full), RunError if the disk fails, after which a run may start
    again."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(f"{text}; make room there")
    return (InputError if error.errno in _WRONG_FOLDER else RunError)(text)


class Reported(RunError):
    """Ranks have failed, and one of them has said why on stderr."""


class WrongResult(RunError):
    """A machine computes wrongly, so its checkpoints cannot be trusted: the run is not started again."""

    status = 3


class NotSaved(RunError):
    """The run has made its steps, and their checkpoint cannot be saved: a new start would make them again."""


class Stopped(ThreedError):
    """A request to stop that came before the first step."""

    status = 128 + 15


def line_of(error: BaseException) -> str:
    """" (file.py, line 12)": the innermost line of an error's traceback that is the user's, and not
    threed's, torch's or Python's; "" where there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _own(frame.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _own(file: str) -> bool:
    packages = (sys.modules.get(name) for name in ("threed", "torch", "megatron.core"))
    folders = [Path(package.__file__).parent for package in packages if package and package.__file__]
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    python = path.is_relative_to(sysconfig.get_path("stdlib")) and not installed
    return not (file.startswith("<") or python or any(map(path.is_relative_to, folders)))
