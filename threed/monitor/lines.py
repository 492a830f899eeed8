"""Files with a line of JSON for each step, {"step": 7, ...}. Each step has one line, whatever happens to the
run or to its disk.

A run that goes on from step 4 repeats the later steps: their old lines are cut off, and so is half a line
that a kill has left. A line that cannot be written (the disk is full, the folder has gone) is kept in memory
until it can.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

_STEP = re.compile(rb'\{"step": ?(\d+),')
_BLOCK = 4096
_MOST_KEPT = 10_000  # lines in memory


def cut(path: Path, step: int, undone: Path | None = None) -> None:
    """Cut off the lines of steps after `step`. If `undone` is given, whole lines are first added to that
    file, so that a crash in between loses nothing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = _end(file, step)
        if end == file.seek(0, os.SEEK_END):
            return
        file.seek(end)
        lines = (line for line in file if line.endswith(b"\n"))
        if undone is not None and (first := next(lines, None)) is not None:
            with undone.open("ab") as kept:
                kept.write(first)
                kept.writelines(lines)
                kept.flush()
                os.fsync(kept.fileno())
        file.truncate(end)


def _end(file: BinaryIO, step: int) -> int:
    """The offset at which the last whole line of a step up to `step` ends; searched from the end of the file,
    which is near."""
    end = _line_before(file, file.seek(0, os.SEEK_END))
    while end > 0:
        begin = _line_before(file, end - 1)
        file.seek(begin)
        match = _STEP.match(file.read(min(64, end - begin)))
        if match and int(match[1]) <= step:
            break
        end = begin
    return end


def _line_before(file: BinaryIO, stop: int) -> int:
    """The offset at which the line that ends at `stop` begins: after the last newline before `stop`."""
    while stop > 0:
        start = max(0, stop - _BLOCK)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


class StepLines:
    """A file of steps that a run adds to."""

    def __init__(self, path: Path):
        """OSError: it cannot be opened."""
        self.path = path
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()  # a checkpoint that is written in the background syncs
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=_MOST_KEPT)
        self._failing = False  # whether the last line could not be written
        self._lost: set[int] = set()  # steps whose lines were dropped
        self._open()

    def add(self, step: int, line: str) -> str | None:
        """Add a step. Returns a message when writing begins to fail, or works again; otherwise None."""
        with self._lock:
            if len(self._waiting) == _MOST_KEPT:
                self._lost.add(self._waiting[0][0])
            self._waiting.append((step, line.encode()))
            before = self._failing
            try:
                self._write()
                self._failing = False
            except OSError as error:
                self._failing = True
                why = error.strerror or error
                return None if before else (f"warning: {self.path} cannot be written ({why}): the run goes "
                                            "on, and keeps its steps until it can")
        if not before:
            return None
        missing = ", with all steps"
        if self._lost:
            missing = f", but {len(self._lost)} steps from {min(self._lost)} on are missing"
        self._lost.clear()
        return f"{self.path} is written again{missing}"

    def sync(self) -> None:
        """Wait until all lines are on the disk. OSError where they cannot be. May be called on another
        thread."""
        with self._lock:
            self._write()
            assert self._file is not None
            descriptor = os.dup(self._file.fileno())
        try:
            os.fsync(descriptor)  # may take long: lines are added meanwhile
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self) -> None:
        """Write all waiting lines, or none."""
        if not self._is_there():
            self._open()
        assert self._file is not None
        size = self._file.seek(0, os.SEEK_END)
        text = memoryview(b"".join(line for _, line in self._waiting))
        try:
            while text:
                text = text[self._file.write(text):]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise
        self._waiting.clear()

    def _is_there(self) -> bool:
        """Whether the path still names the open file: writing to a file that was removed raises no error."""
        assert self._file is not None
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        """Open the file. If it was removed, copy its lines from the old file, which exists while it is
        open."""
        new, old = self.path.open("ab+", buffering=0), self._file
        if old is not None and new.seek(0, os.SEEK_END) == 0:
            try:
                old.seek(0)
                shutil.copyfileobj(old, new)
            except OSError:
                new.close()
                self.path.unlink(missing_ok=True)
                raise
        self.close()
        self._file = new
        folder = os.open(self.path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):
            os.fsync(folder)
        os.close(folder)
