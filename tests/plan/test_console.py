"""The console: whatever becomes of a terminal, a pipe or a disk, writing ends nothing and stops nothing."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from threed.base import console
from threed.base.console import Outlet, Record


@pytest.fixture
def outlet():
    """outlet(descriptor) -> an Outlet that writes there."""
    open_ones = []

    def make(descriptor: int) -> Outlet:
        open_ones.append(descriptor)
        return Outlet(descriptor)

    yield make
    for descriptor in open_ones:
        os.close(descriptor)


def lines(count: int) -> list[bytes]:
    return [b"%d %s\n" % (number, b"x" * 90) for number in range(count)]


def test_a_pipe_whose_reader_has_gone(outlet):
    reads, writes = os.pipe()
    out = outlet(writes)
    out.write(b"first\n")
    assert os.read(reads, 100) == b"first\n"
    os.close(reads)
    begin = time.monotonic()
    for _ in range(300):
        out.write(b"second\n")
    out.flush()
    assert time.monotonic() - begin < console.WAIT_S


def test_a_terminal_that_has_gone(outlet):
    master, terminal = pty.openpty()
    out = outlet(terminal)
    out.write(b"first\n")
    assert os.read(master, 100) == b"first\r\n"
    os.close(master)
    begin = time.monotonic()
    for _ in range(300):
        out.write(b"second\n")
    out.flush()
    assert time.monotonic() - begin < console.WAIT_S


def test_a_closed_descriptor(outlet):
    reads, writes = os.pipe()
    os.close(reads)
    os.close(writes)
    out = Outlet(writes)
    out.write(b"nobody\n")
    out.flush()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_that_stops(terminal, outlet, monkeypatch):
    """`| less`, Ctrl-S: it is waited for once, and not for long; when it reads again, nothing is repeated or
    torn, and what is missing is said."""
    monkeypatch.setattr(console, "WAIT_S", 0.2)
    monkeypatch.setattr(console, "KEPT", 20_000)
    reads, writes = pty.openpty() if terminal else os.pipe()
    out, sent, begin = outlet(writes), lines(5000), time.monotonic()
    for line in sent:
        out.write(line)
    assert 0.2 <= time.monotonic() - begin < 5.0
    os.set_blocking(reads, False)
    seen = b""
    for number in range(300):
        with contextlib.suppress(BlockingIOError):
            seen += os.read(reads, 1 << 16)
        if number == 20:
            out.write(b"the end\n")
        out.flush() if number > 20 else None
        if seen.endswith((b"the end\n", b"the end\r\n")):
            break
    seen = seen.replace(b"\r\n", b"\n")
    whole = seen.splitlines(keepends=True)
    (note,) = [line for line in whole if line.startswith(b"threed: ")]
    kept, lost = whole.index(note), int(re.findall(rb"threed: (\d+) lines are left out", note)[0])
    assert whole[:kept] == sent[:kept] and whole[kept + 1:] == [b"the end\n"]
    assert kept + lost == len(sent), "each line was written, or counted"


def test_a_socket_whose_reader_stops(outlet, monkeypatch):
    monkeypatch.setattr(console, "WAIT_S", 0.2)
    reader, writer = socket.socketpair()
    out, begin = outlet(writer.detach()), time.monotonic()
    for line in lines(4000):
        out.write(line)
    assert 0.2 <= time.monotonic() - begin < 5.0
    with reader:
        assert reader.recv(1 << 20).startswith(lines(1)[0])


def test_what_was_said_before_a_process_is_killed(outlet):
    reads, writes = os.pipe()
    out = outlet(writes)
    if not (child := os.fork()):
        out.write(b"the last word\n")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.read(reads, 100) == b"the last word\n"


def test_a_slow_reader_gets_everything(outlet):
    """A process that ends waits for a reader as long as it reads."""
    reads, writes = os.pipe()
    out, sent = outlet(writes), lines(1500)
    child = os.fork()
    if not child:
        for line in sent:
            out.write(line)
        out.flush()
        os._exit(0)
    os.close(os.dup2(os.open(os.devnull, os.O_WRONLY), writes))
    os.open(os.devnull, os.O_WRONLY)
    seen = b""
    while chunk := os.read(reads, 4000):
        seen += chunk
        time.sleep(0.002)
    os.waitpid(child, 0)
    assert seen == b"".join(sent)


def test_a_full_device(outlet):
    """Lines are lost, counted, and writing goes on once there is room."""
    out = outlet(os.open("/dev/full", os.O_WRONLY))
    for line in lines(7):
        out.write(line)
    reads, writes = os.pipe()
    os.dup2(writes, out.number)
    out.write(b"room again\n")
    text = os.read(reads, 1000).decode()
    assert text.startswith("threed: 7 lines are left out here") and text.endswith("room again\n")


def test_what_a_console_cannot_say(capfdbinary, monkeypatch):
    """LANG=C: as a number, and no error."""
    class Plain:
        encoding = "ascii"

        def fileno(self) -> int:
            return 1

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Plain())
    monkeypatch.setattr(console, "OUT", Outlet(1))
    console.show("é → \U0001f600")
    assert capfdbinary.readouterr().out == b"\\xe9 \\u2192 \\U0001f600\n"


def test_a_line_in_pieces(capfdbinary, monkeypatch, tmp_path):
    """print(..., end=""), and a bar that is drawn again and again: whole on the console, and in the log as it
    was last."""
    (tmp_path / "state.json").write_text("{}")
    record = Record()
    record.open(tmp_path)
    monkeypatch.setattr(console, "RECORD", record)
    assert sys.__stdout__ is not None
    stream = console.ConsoleStream(sys.__stdout__, Outlet(1), True)
    print("a", "b", sep="", end="", file=stream)
    print("c", file=stream)
    for share in (10, 50, 100):
        print(f"\r{share}%", end="", file=stream, flush=True)
    print(" done", file=stream)
    stream.writelines(["x\n", "y"])
    stream.flush()
    assert capfdbinary.readouterr().out == b"abc\n\r10%\r50%\r100% done\nx\ny"
    assert stamped(tmp_path / "log.txt") == ["abc", "100% done", "x"]


# ---------------------------------------------------------------- log.txt


def stamped(file: Path) -> list[str]:
    rows = file.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( |$)", row) for row in rows), rows
    return [row[20:] for row in rows]


def test_the_log_of_a_run(tmp_path):
    """Lines from before the folder was the run's come first; those of other processes are added."""
    folder, record = tmp_path / "run", Record()
    record.open(folder)
    record.add("preparing")
    assert not folder.exists()
    if not (child := os.fork()):
        folder.mkdir()
        record.begin()
        record.add("step 1\nand more")
        os._exit(0)
    os.waitpid(child, 0)
    record.add("restart 1 of 3")
    assert stamped(folder / "log.txt") == ["preparing", "step 1", "and more", "restart 1 of 3"]
    record.close()
    record.add("of nobody")
    assert len(stamped(folder / "log.txt")) == 4


def test_a_start_that_is_refused(tmp_path):
    """Of a new run: no file and no folder. Of one that exists: a line."""
    record, old = Record(), tmp_path / "old"
    record.open(tmp_path / "new")
    record.add("threed: refused")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    record.open(tmp_path / "mine")
    record.add("threed: refused")
    assert not list((tmp_path / "mine").iterdir()), "a folder that is no run's"
    old.mkdir()
    (old / "state.json").write_text("{}")
    record.open(old)
    record.add("threed: refused")
    assert stamped(old / "log.txt") == ["threed: refused"]


def test_the_log_is_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "LOG_BYTES", 2000)
    record = Record()
    record.open(tmp_path)
    record.begin()
    for number in range(500):
        record.add(f"line {number}")
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["log.txt", *(f"log.txt.{number}" for number in range(1, console.LOG_FILES + 1))]
    assert stamped(tmp_path / "log.txt")[-1] == "line 499"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000 * (console.LOG_FILES + 1)


@pytest.mark.parametrize("how", ["the folder has gone", "it is a folder", "the disk is full"])
def test_a_log_that_cannot_be_written(how, tmp_path, capfd):
    folder, record = tmp_path / "run", Record()
    folder.mkdir()
    if how == "it is a folder":
        (folder / "log.txt").mkdir()
    if how == "the disk is full":
        (folder / "log.txt").symlink_to("/dev/full")
    record.open(folder)
    record.begin()
    if how == "the folder has gone":
        (folder / "log.txt").unlink()
        folder.rmdir()
    for _ in range(3):
        record.add("a line")
    record.close()
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- a process

PRINTS = """
import sys, time
from threed.base import console
console.open_standard()
console.steady()
while True:
    print("a library's line")
    print("é", file=sys.stderr)
    console.show("a line")
    console.say("a word")
    if time.monotonic() > float(sys.argv[1]):
        break
console.flush()
open("done", "w").close()
"""


@pytest.mark.parametrize("redirected", [">&- 2>&-", ">&-", "2>&- >/dev/null", ">/dev/full 2>/dev/full",
                                        "2>&1 | head -1", "2>&1 | sleep 0.1"])
def test_a_process_goes_on(redirected, tmp_path):
    """Everything that prints in it, print() of a script's callback too."""
    until = str(time.monotonic() + 0.6)
    (tmp_path / "prints.py").write_text(PRINTS)
    command = f'"{sys.executable}" prints.py {until} {redirected}'
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    for _ in range(300):
        if (tmp_path / "done").exists():
            break
        time.sleep(0.05)
    assert (tmp_path / "done").exists(), done.stderr
    assert b"Traceback" not in done.stderr


def test_a_signal_within_a_write(tmp_path):
    """A handler that writes, too: nothing hangs, and no line is torn or repeated."""
    code = """
import os, signal, sys
from threed.base import console
count = 0
def handler(*_):
    global count
    count += 1
    console.show(f"signal {count}")
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for number in range(3000):
    console.show(f"line {number}")
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    rows = done.stdout.splitlines()
    assert done.returncode == 0 and [row for row in rows if row.startswith("line")] == [
        f"line {number}" for number in range(3000)]
    assert all(re.fullmatch(r"(line|signal) \d+", row) for row in rows)
    assert signal.SIGALRM and len(rows) == len(set(rows))


@pytest.mark.parametrize("after_s", [0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01])
def test_the_last_word_of_a_signal(after_s, tmp_path):
    """A handler that says why it ends the process: within a write, within a flush, and between them."""
    log = tmp_path / "log.txt"

    def stop(number: int, _: object) -> None:
        console.say("the last word")
        console.leave(128 + number)

    for _ in range(10):
        if not (child := os.fork()):
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, after_s + 1e-6)
            for count in range(10 ** 9):
                console.say(f"line {count}")
                console.flush()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGALRM
        *rows, last = log.read_text().splitlines()
        assert last == "threed: the last word" and rows == [f"threed: line {n}" for n in range(len(rows))]
