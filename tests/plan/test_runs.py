"""`threed runs`: a run that is under way is told from one that is dead by its lock, and by nothing weaker."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from threed.base.errors import InputError
from threed.cli import main as cli
from threed.config.load import load
from threed.monitor import runs, state
from threed.planner.from_config import save_config

ROOT = Path(__file__).parents[2]


def make(folder: Path, steps: int = 3, said: str | None = None) -> Path:
    """The folder of a run with this many steps of 180."""
    config = load("configs/toy.yaml", [f"run.dir={folder}"])
    assert not save_config(config)
    (folder / ".lock").touch()
    rows = [{"step": step, "train/loss": 6.0 - step, "perf/tokens_per_s": 2e3, "perf/step_s": 2.0,
             "run/time": time.time() - 300} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if said is not None:
        state.note(folder, said, steps)
    then = time.time() - 300
    os.utime(folder / "metrics.jsonl", (then, then))
    return folder


def one(folder: Path) -> dict:
    rows = runs.find(folder)
    assert len(rows) == 1
    return rows[0]


def test_states(tmp_path):
    """Each word, with the last loss and speed."""
    for said, steps in (("ended", 180), ("stopped", 12), ("failed", 5)):
        make(tmp_path / said, steps, said)
    found = {Path(row["run"]).name: row for row in runs.find(tmp_path)}
    assert {name: row["state"] for name, row in found.items()} == {name: name for name in found}
    row = found["stopped"]
    assert (row["step"], row["steps"], row["loss"], row["tokens_per_s"]) == (12, 180, -6.0, 2e3)
    text = runs.show(list(found.values()))
    assert "12/180" in text and "2.0K" in text and len(text.splitlines()) == 4


def test_running_and_killed(tmp_path):
    """A process that holds the lock is a run under way; when it is killed it says nothing, and the run has
    failed, however young its last line is."""
    folder = make(tmp_path / "a", said="running")
    code = ("import fcntl, sys, time\n"
            "lock = open(sys.argv[1], 'a+'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
            "print('held', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, str(folder / ".lock")],
                          stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert one(folder)["state"] == "running"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    row = one(folder)
    assert row["state"] == "failed" and "killed" in row["remark"]


def test_a_look_takes_no_lock(tmp_path):
    """A look at a run that begins at this moment must not stop it."""
    folder = make(tmp_path / "a")
    assert state.is_locked(folder) is False
    with (folder / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert state.is_locked(folder) is True
    assert state.is_locked(tmp_path) is None


@pytest.mark.parametrize("word, locked, age_s, done, expected", [
    ({"state": "running", "host": "far"}, False, 5.0, False, "running"),
    ({"state": "running", "host": "far"}, False, 3600.0, False, "unknown"),
    ({"state": "running", "host": "far"}, True, 3600.0, False, "running"),
    ({"state": "ended", "host": "far"}, False, 3600.0, True, "ended"),
    ({"state": "stopped", "host": "far"}, None, 3600.0, False, "stopped"),
    ({}, False, 9.0, True, "ended"), ({}, False, 9.0, False, "unknown"), ({}, None, None, False, "unknown")])
def test_what_cannot_be_known(word, locked, age_s, done, expected):
    """A run on another host, whose lock may not be seen here; a run of an older version, without a word."""
    assert state.state_of(word, locked, age_s, done)[0] == expected


def test_folders(tmp_path):
    """Runs at any depth, the newest first; not what is inside one; a broken file is no traceback."""
    old, new = make(tmp_path / "x" / "old", said="ended"), make(tmp_path / "new", said="ended")
    make(new / "wandb" / "inner")
    for name in ("metrics.jsonl", "state.json", "config.json"):
        (old / name).write_bytes(b"\xff half a li")
    (tmp_path / "empty").mkdir()
    rows = runs.find(tmp_path)
    assert {row["run"] for row in rows} == {str(new), str(old)}
    broken = next(row for row in rows if row["run"] == str(old))
    assert (broken["state"], broken["step"], broken["loss"]) == ("unknown", 0, None)
    assert "?" in runs.show(rows)


def test_half_a_line(tmp_path):
    """What a kill leaves at the end of metrics.jsonl."""
    folder = make(tmp_path / "a", 7, "running")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/lo')
    assert one(folder)["step"] == 7


def test_command(tmp_path):
    make(tmp_path / "a", said="ended")
    runner = CliRunner()
    assert "ended" in runner.invoke(cli.app, ["runs", str(tmp_path)]).output
    document = json.loads(runner.invoke(cli.app, ["runs", str(tmp_path), "--json"]).output)
    assert document["runs"][0]["state"] == "ended"
    assert isinstance(runner.invoke(cli.app, ["runs", str(tmp_path / "none")]).exception, InputError)


def test_ages():
    assert [runs.show_age(s) for s in (3, 119, 300, 7300, 200_000)] == ["3 s", "119 s", "5 min", "2 h", "2 d"]


def test_damaged_files(tmp_path):
    """Words and rows that are of other types, or no JSON at all: each is a run of which little is known."""
    for name, word, row in (("a", '{"state": "ended", "time": "x", "step": "q"}',
                             '{"step": 3, "train/loss": null}'),
                            ("b", "[]", '{"step": 3, "train/loss": NaN, "run/time": "now"}'),
                            ("c", "\x00", "\x00\xff")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(word)
        (tmp_path / name / "metrics.jsonl").write_text(row + "\n")
    rows = {Path(row["run"]).name: row for row in runs.find(tmp_path)}
    assert rows["a"]["state"] == "ended" and [rows[name]["step"] for name in "abc"] == [3, 3, 0]
    assert runs.show(list(rows.values())).count("\n") == 3


def test_a_start_that_was_killed_before_its_first_step(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").write_text("on vm, process 7, since yesterday\n")
    row = one(tmp_path / "a")
    assert (row["state"], row["step"], row["remark"]) == ("unknown", 0,
                                                          "no process has it, and it has made no step")
