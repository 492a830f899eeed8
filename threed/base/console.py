"""Console: the one writer to the terminal, which neither ends nor stops a run, and the log of what was said.

A terminal goes away, a reader ends or reads no more, a disk behind a redirection is full: a run trains on.
What cannot be written now waits, up to KEPT bytes; what comes after that is left out here, with a note once
there is room again. A process waits for a reader at most once, WAIT_S long, until it has read again.
(No queue of logging's: a process that is killed would lose what the queue's thread has not written yet.)

`RECORD` adds all of it, with times, to run.dir/log.txt. Before the folder is a run's, lines are kept in
memory that the processes of a run share, so that a start that is refused makes no folder.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

WAIT_S = 1.0  # for a reader that does not read
END_S = 5.0  # the same at the end of a process, each time anew while it reads
KEPT = 1 << 18  # bytes that wait for a reader
LOG, STATE = "log.txt", "state.json"  # in run.dir; the second says that the folder is a run's
LOG_BYTES, LOG_FILES = 10 << 20, 4  # of a log.txt, after which it becomes log.txt.1; how many of these
EARLY_BYTES = 1 << 20  # of lines that wait for a folder


class Outlet:
    """The process's stdout (1) or stderr (2), as the kernel knows it. No method raises."""

    def __init__(self, number: int):
        self.number = number
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a forked process: another one writes what waits here, and may hold the lock."""
        self._given: deque[bytes] = deque()
        self._waiting: deque[tuple[bytes, int]] = deque()  # what to write, and how many lines it stands for
        self._bytes, self._lost, self._stuck = 0, 0, False  # bytes that wait, and lines that are left out
        self._in_line = False  # whether the last byte that was taken ended no line
        self._lock, self._writer = threading.RLock(), 0
        self.status: int | None = None  # with which the process ends when the write that goes on is over

    def interrupted(self) -> bool:
        """Whether this is a signal's handler within a write, which goes on when the handler returns."""
        return self._writer == threading.get_ident()

    def write(self, data: bytes) -> None:
        """Write whole lines, or what waits for a reader before them."""
        self._given.append(data)
        self._write_given()

    def flush(self) -> None:
        """Write what waits, until all is written or the reader takes no more."""
        if self.interrupted():
            return
        with self._writing():
            before = -1
            while self._bytes not in (0, before):
                before = self._bytes
                self._drain(END_S)
        self._write_given()

    def _write_given(self) -> None:
        while self._given and not self.interrupted():
            with self._writing():
                while self._given:
                    self._write(self._given.popleft())
        if self.status is not None and not self.interrupted():
            status, self.status = self.status, None
            leave(status)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            self._writer = threading.get_ident()
            try:
                yield
            finally:
                self._writer = 0

    def _write(self, data: bytes) -> None:
        self._drain(0.0)
        if self._lost and self._bytes + len(data) < KEPT:
            note = (f"threed: {self._lost} lines are left out here, which could not be written; {LOG} in "
                    "run.dir has them\n")
            torn = self._in_line and not self._waiting
            self._append(b"\n" * torn + note.encode(), self._lost)
            self._lost = 0
        self._append(data, data.count(b"\n"))
        self._drain(0.0 if self._stuck else WAIT_S)
        while len(self._waiting) > 1 and self._bytes > KEPT:
            data, lines = self._waiting.pop()
            self._bytes, self._lost = self._bytes - len(data), self._lost + lines

    def _append(self, data: bytes, lines: int) -> None:
        self._waiting.append((data, lines))
        self._bytes += len(data)

    def _drain(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while self._waiting:
            data, lines = self._waiting[0]
            try:
                sent = self._send(data)
            except BlockingIOError:
                sent = 0
            except OSError:  # nobody reads any more, or a disk is full, which may have room again later
                self._lost += sum(lines for _, lines in self._waiting)
                self._waiting.clear()
                self._bytes = 0
                return
            if sent:
                self._bytes -= sent
                self._in_line = data[sent - 1:sent] != b"\n"
                self._waiting.popleft()
                if sent < len(data):
                    self._waiting.appendleft((data[sent:], lines))
            elif (left_s := until - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self.number, select.POLLOUT)
                poll.poll(1000 * min(left_s, 0.1))
            else:
                self._stuck = True
                return
        self._stuck = False

    def _send(self, data: bytes) -> int:
        """Bytes that were taken, without waiting. What is open here may change."""
        mode = os.fstat(self.number).st_mode
        if stat.S_ISSOCK(mode):
            with socket.socket(fileno=os.dup(self.number)) as taker:
                return taker.send(data, socket.MSG_DONTWAIT)
        with contextlib.ExitStack() as stack:
            number = self.number
            if not stat.S_ISREG(mode):
                # A description of our own: others that share this one may rely on calls that wait.
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
                with contextlib.suppress(OSError):  # another user's terminal: then a call may wait
                    number = os.open(f"/proc/self/fd/{self.number}", flags)
                    stack.callback(os.close, number)
            return os.write(number, data)


class Record:
    """run.dir/log.txt. A disk that is full, or a folder that is gone, ends nothing."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._early = -1  # a file in memory: lines from before the folder was the run's
        self._handler: logging.Handler | None = None  # of the one process that may rename the file

    def open(self, folder: Path) -> None:
        """What is said from here on, by this process and those that it forks, is of the run in `folder`."""
        self.close()
        self.folder, self._early = folder, os.memfd_create("threed-log")

    def begin(self) -> None:
        """The folder is the run's from here on. Called by rank 0."""
        if self.folder is None or self._handler is not None:
            return
        with contextlib.suppress(OSError):
            self._handler = _Quiet(self.folder / LOG, maxBytes=LOG_BYTES, backupCount=LOG_FILES,
                                   encoding="utf-8", errors="backslashreplace")
        self._take_early()

    def close(self) -> None:
        """Keep no more."""
        if self._early >= 0:
            os.close(self._early)
        if self._handler is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._handler.close()
        self.folder, self._early, self._handler = None, -1, None

    def add(self, text: str) -> None:
        """Add lines, with the time."""
        if self.folder is None:
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "\n".join(f"{now} {line}".rstrip() for line in text.split("\n"))
        with contextlib.suppress(OSError):
            if self._handler is not None:
                self._write(lines)
            elif (self.folder / LOG).exists() or (self.folder / STATE).exists():
                self._take_early()
                self._write(lines)
            elif os.fstat(self._early).st_size < EARLY_BYTES:
                os.write(self._early, f"{lines}\n".encode(errors="backslashreplace"))

    def _take_early(self) -> None:
        size = os.fstat(self._early).st_size
        if size:
            text = os.pread(self._early, size, 0).decode()
            os.ftruncate(self._early, 0)
            os.lseek(self._early, 0, os.SEEK_SET)
            self._write(text.rstrip("\n"))

    def _write(self, lines: str) -> None:
        if self._handler is not None:
            self._handler.handle(logging.LogRecord("threed", logging.INFO, "", 0, "%s", (lines,), None))
        else:
            assert self.folder is not None
            with (self.folder / LOG).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{lines}\n")


class _Quiet(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: logging would print a traceback for each line that a full disk does not take."""


class ConsoleStream:
    """In place of sys.stdout or sys.stderr, for whatever prints in a run: a script's callbacks, libraries."""

    def __init__(self, stream: TextIO, outlet: Outlet, keeps: bool):
        """`keeps`: whether lines go to the record, too."""
        self.stream, self.outlet, self.keeps = stream, outlet, keeps
        self._line = self._begun = ""  # what waits for its newline, and what of that line is written already

    def write(self, text: str) -> int:
        whole, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self.put(whole, f"{self._begun}{whole}")
            self._begun = ""
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def put(self, text: str, record: str | None) -> None:
        """Write whole lines. `record`: what the record gets, of a line that is drawn anew its last form."""
        self.outlet.write(_encoded(f"{text}\n", self.stream))
        if self.keeps and record is not None:
            RECORD.add("\n".join(line.rpartition("\r")[2] for line in record.split("\n")))

    def flush(self) -> None:
        if self._line:  # such as a bar
            self.outlet.write(_encoded(self._line, self.stream))
            self._begun = f"{self._begun}{self._line}".rpartition("\r")[2]
            self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


OUT, ERR, RECORD = Outlet(1), Outlet(2), Record()
os.register_at_fork(after_in_child=OUT.begin_anew)
os.register_at_fork(after_in_child=ERR.begin_anew)


def show(text: str, console: bool = True, record: str | None = None) -> None:
    """Lines on stdout. `console=False`: for the record alone. `record`: what the record gets instead."""
    _put(sys.stdout, OUT, text, console, record)


def say(message: str) -> None:
    """A line on stderr in one write: ranks share stderr. A signal's handler may call it."""
    _put(sys.stderr, ERR, f"threed: {message}", True)


def speaks_for_machine() -> bool:
    """Whether this process is its machine's first rank, or no rank. It alone says what all ranks see."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def put_error(text: str) -> None:
    """Lines on stderr as they are."""
    _put(sys.stderr, ERR, text, True)


def flush() -> None:
    """Before a process ends, or forks."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    OUT.flush()
    ERR.flush()


def leave(status: int) -> None:
    """End this process at once, when what was said is written. Where a signal's handler calls it within a
    write, it returns, and the write ends the process: the handler must do no more."""
    for outlet in (OUT, ERR):
        if outlet.interrupted():
            outlet.status = status
            return
    flush()
    os._exit(status)


def open_standard() -> None:
    """Open what the process was started without (`>&-`): the next file that is opened would be its stdout.
    Nobody reads what is written there."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def steady(keeps: bool = True) -> None:
    """Have whatever prints in this process go through here. `keeps`: as of `ConsoleStream`."""
    for name, outlet in (("stdout", OUT), ("stderr", ERR)):
        stream = getattr(sys, name)
        if isinstance(stream, ConsoleStream):
            stream.keeps = keeps
        elif _number(stream) == outlet.number:
            with contextlib.suppress(Exception):
                stream.flush()
            setattr(sys, name, ConsoleStream(stream, outlet, keeps))


def _put(stream: Any, outlet: Outlet, text: str, console: bool, record: str | None = None) -> None:
    if console and isinstance(stream, ConsoleStream):
        stream.put(text, None)
    elif console and _number(stream) == outlet.number:
        with contextlib.suppress(Exception):
            stream.flush()
        outlet.write(_encoded(f"{text}\n", stream))
    elif console:  # a notebook's, or a test's
        with contextlib.suppress(Exception):
            stream.write(f"{text}\n")
            stream.flush()
    RECORD.add(record or text)


def _number(stream: Any) -> int:
    try:
        return stream.fileno()
    except Exception:  # no file at all, or a closed one
        return -1


def _encoded(text: str, stream: Any) -> bytes:
    """As the console wants it; what it cannot say as a number."""
    try:
        return text.encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")
    except (LookupError, UnicodeError):
        return text.encode("ascii", "backslashreplace")
