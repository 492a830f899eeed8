"""Files of a line a step: each step stands once, half lines go, and lines outlive a full disk and a removed
folder."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import time
from contextlib import contextmanager

import pytest

from threed.base.errors import of_folder
from threed.config.load import load
from threed.monitor import lines as subject
from threed.monitor.lines import StepLines, cut
from threed.monitor.log import Log


def line(step: int, size: int = 0) -> str:
    return json.dumps({"step": step, "x": "y" * size}) + "\n"


def steps(path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


@pytest.mark.parametrize("size", [0, 50, 5000])
@pytest.mark.parametrize("tail", ["", '{"step": 99, "tra', "garbage\n", "\0" * 5000])
@pytest.mark.parametrize("step, left", [(0, 0), (3, 3), (4, 4), (7, 7), (9, 7)])
def test_cut(tmp_path, size, tail, step, left):
    """Later steps and half a line left by a kill are cut off; whole lines are kept in a file beside, and
    nothing else is lost."""
    path, undone = tmp_path / "a.jsonl", tmp_path / "undone.jsonl"
    path.write_text("".join(line(each, size) for each in range(1, 8)) + tail)
    cut(path, step, undone)
    assert steps(path) == list(range(1, left + 1))
    kept = [each for each in undone.read_text().splitlines() if each != "garbage"] if undone.exists() else []
    assert [json.loads(each)["step"] for each in kept] == list(range(left + 1, 8))


def test_cut_of_traces(tmp_path):
    """A header is cut if all of its steps are run again; the header before it is kept."""
    path = tmp_path / "rank.jsonl"
    before = '{"rank":0}\n{"step":2,"x":1}\n{"step":4,"x":1}\n'
    path.write_text(before + '{"rank":0}\n{"step":6,"x":1}\n')
    cut(path, 5)
    assert path.read_text() == before
    cut(tmp_path / "none.jsonl", 5)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_crash_while_cutting(tmp_path, monkeypatch):
    """Killed before it is cut, the file is whole; the next start cuts it."""
    path, undone = tmp_path / "a.jsonl", tmp_path / "undone.jsonl"
    path.write_text("".join(map(line, range(1, 8))))

    def crash(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subject.os, "fsync", crash)
        cut(path, 4, undone)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    cut(path, 4, undone)
    assert steps(path) == [1, 2, 3, 4] and set(steps(undone)) == {5, 6, 7}


@contextmanager
def at_most(size: int):
    """Files cannot grow beyond this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path, monkeypatch):
    """Lines wait, one warning is given, and no half line is written; once there is room all lines are
    written. Lines that do not fit in memory are missing, and a message says so."""
    file = StepLines(tmp_path / "a.jsonl")
    assert file.add(1, line(1)) is None
    with at_most(100):
        assert "cannot be written (File too large)" in (file.add(2, line(2, 80)) or "")
        assert file.add(3, line(3, 80)) is None and steps(file.path) == [1]
    assert (file.add(4, line(4))
            or "").endswith("is written again, with all steps") and file.add(5, line(5)) is None
    assert steps(file.path) == [1, 2, 3, 4, 5]
    monkeypatch.setattr(subject, "_MOST_KEPT", 2)
    small = StepLines(tmp_path / "b.jsonl")
    small._waiting = subject.deque(maxlen=2)
    with at_most(0):
        for step in range(1, 5):
            small.add(step, line(step))
    assert (small.add(5, line(5))
            or "").endswith("but 3 steps from 1 on are missing") and steps(small.path) == [4, 5]


def test_a_folder_that_is_removed(tmp_path):
    """Lines go into a deleted file that nobody sees. Once the folder exists again, it has all lines."""
    folder = tmp_path / "run"
    folder.mkdir()
    file = StepLines(folder / "a.jsonl")
    file.add(1, line(1))
    shutil.rmtree(folder)
    assert "cannot be written (No such file or directory)" in (file.add(2, line(2)) or "")
    assert file.add(3, line(3)) is None
    folder.mkdir()
    assert (file.add(4, line(4)) or "").endswith("is written again, with all steps")
    assert steps(file.path) == [1, 2, 3, 4]
    os.replace(file.path, folder / "b.jsonl")  # moved away: another file
    assert file.add(5, line(5)) is None and steps(file.path) == [1, 2, 3, 4, 5]
    file.sync()
    file.close()


def test_a_log_that_cannot_be_closed(tmp_path, monkeypatch, capsys):
    """A disk or a server that does not answer delays the end of a run for a while; an error while closing is
    a warning, because the work is done."""
    log = Log(load("configs/toy.yaml", [f"run.dir={tmp_path}", "monitor.wandb=disabled"]))
    monkeypatch.setattr(Log, "_close", lambda self: time.sleep(60))
    log.close(0.1)
    assert "does not answer for 0.1 s" in capsys.readouterr().out
    monkeypatch.setattr(Log, "_close", lambda self: 1 // 0)
    log.close()
    assert "not closed as it should be: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(errno.EACCES, 2), (errno.EROFS, 2), (errno.EIO, 1),
                                                (errno.ENOSPC, 2), (errno.ESTALE, 1)])
def test_whose_a_folder_s_failure_is(number, status):
    """An error that the user must mend, after which nothing is restarted, or an error of the disk."""
    assert of_folder("run.dir cannot be used", OSError(number, "why")).status == status
