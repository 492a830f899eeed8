"""Compile interposer.c, start over with it preloaded, and arm it.

A site is one call of a save: who makes it, what it does to which file, and how many such calls that process
made before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WHAT = {"kill": 1, "kill node": 2, "tear": 3, "fail": 4, "sleep": 5, "stop": 6}
SOURCE = Path(__file__).with_name("interposer.c")


@dataclass(frozen=True)
class Site:
    rank: int
    op: str  # create open write read fsync truncate allocate close rename mkdir unlink rmdir
    path: str  # under run.dir; a pattern, where part of a name is drawn by chance
    number: int  # such calls of the process before this one

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.op} {self.path}" + (f" ({self.number + 1})" if self.number else "")

    @property
    def changes(self) -> bool:
        """Whether the call changes the disk, so that a full or broken disk makes it fail. (mkdir of an
        existing folder does not.)"""
        return self.op not in ("open", "read", "close") and (self.op, self.path) != ("mkdir", "checkpoints")


@dataclass(frozen=True)
class Strike:
    """What happens at a site. `amount`: an errno, or milliseconds. `times`: failing calls in a row."""

    site: Site
    what: str
    amount: int = 0
    times: int = 1

    def arm(self, run_dir: Path, marker: Path) -> None:
        """In the process that is to be struck."""
        _library().chaos_arm(os.fsencode(run_dir), self.site.op.encode(), self.site.path.encode(),
                             self.site.number,
                             WHAT[self.what], self.amount, self.times, os.fsencode(marker))


@contextlib.contextmanager
def in_front() -> Iterator[None]:
    """With the library in front of libc, where there is a compiler: this program starts over once, in the
    same process."""
    if not preloaded():
        folder = Path(tempfile.mkdtemp(prefix="interposer-"))
        if library := compile_into(folder):
            os.environ["LD_PRELOAD"] = str(library)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        folder.rmdir()
    try:
        yield
    finally:
        if preloaded():
            shutil.rmtree(Path(os.environ["LD_PRELOAD"]).parent)


def compile_into(folder: Path) -> Path | None:
    """Path of the compiled library; None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    target = folder / "interposer.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-Wno-format-truncation", "-o", target, SOURCE],
                   check=True)
    return target


def preloaded() -> bool:
    return hasattr(_library(), "chaos_arm")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def report(run_dir: Path, file: Path) -> None:
    """From now on, write each call of this process under run_dir to a file."""
    _library().chaos_report(os.fsencode(run_dir), os.fsencode(file))


def read_report(rank: int, file: Path) -> list[Site]:
    """The calls of a rank, in order."""
    seen: Counter[tuple[str, str]] = Counter()
    sites = []
    for line in file.read_text().splitlines():
        _, op, path = line.split("\t")
        key = (op, pattern(path))
        sites.append(Site(rank, *key, seen[key]))
        seen[key] += 1
    return sites


def pattern(path: str) -> str:
    """A path without what is drawn by chance: safetensors' .tmpXXXXXX, and identifiers of eight or more
    hexadecimal digits."""
    path = re.sub(r"\.[0-9a-f]{8}(?=\.tmp)", ".*", re.sub(r"/\.tmp\w{6}(?=$| )", "/.tmp*", path))
    return re.sub(r"(?<=[-.])(?=[0-9a-f]*[a-f])[0-9a-f]{8,}(?=[./]|$)", "*", path)


def die_with_parent() -> None:
    """The kernel kills this process when the one that forked it ends."""
    _library().prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt() -> None:
    """Processes whose parent ends become children of this one: none gets lost."""
    _library().prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
