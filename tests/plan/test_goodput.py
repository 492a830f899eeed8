"""What the time of a run went into: every second once, from records that survive a kill."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threed.base import marks
from threed.monitor.goodput import DOWN, FILE, OVER, PARTS, Ledger, Mark, Spent, Stepped, account, read, spent

BEGUN = [Mark(0, "start", True), Mark(2, "data"), Mark(5, "start"), Mark(6, "load"), Mark(8, "start"),
         Mark(10, "steps")]


def parts(*records) -> dict[str, float]:
    found = account([*BEGUN, *records]).spent
    assert found.wall_s == pytest.approx(max(record.at_s for record in [*BEGUN, *records]))
    return {part: seconds for part, seconds in found.parts.items() if seconds}


def test_a_run_from_its_start_to_its_end():
    assert parts(Stepped(20), Stepped(30), Mark(31, "save"), Mark(35, "end"), Mark(36, OVER)) == {
        "start": 5, "data": 3, "load": 2, "steps": 21, "save": 4, "end": 1}


def test_what_steps_stood_still_for():
    """A checkpoint before the end of a step, an evaluation after it; both come off the time of steps."""
    assert parts(Stepped(20, blocked_s=3), Stepped(30, apart_s=4), Mark(35, "save")) == {
        "start": 5, "data": 3, "load": 2, "steps": 18, "save": 3, "evaluation": 4}


def test_nothing_is_taken_twice():
    """A wait that is longer than what is left of an interval is taken from the next."""
    assert parts(Stepped(12, blocked_s=5), Stepped(20), Mark(20, "end")) == {
        "start": 5, "data": 3, "load": 2, "steps": 5, "save": 5}


def test_killed_twice():
    """Once everything is killed, and nobody knows when; once the launcher lives and notes it. Steps that are
    repeated count once."""
    first = [Stepped(20), Stepped(30, counts=False)]  # killed at some time before 50
    second = [Mark(50, "start", True), Mark(55, "steps"), Stepped(65), Stepped(75, counts=False)]
    third = [Mark(78, DOWN, True), Mark(83, "start"), Mark(85, "steps"), Stepped(95), Mark(96, "save"),
             Mark(97, "end"), Mark(100, OVER)]
    assert parts(*first, *second, *third) == {
        "start": 5 + 5 + 2, "data": 3, "load": 2, "steps": 10 + 10 + 10 + 1, "repeated": 10 + 10 + 3,
        DOWN: 20 + 5, "save": 1, "end": 3}


def test_stopped_and_started_again():
    """The time between is nobody's."""
    assert parts(Stepped(20), Mark(20, "save"), Mark(21, OVER), Mark(1000, "start", True),
                 Mark(1001, "steps"), Stepped(1011)) == {
        "start": 6, "data": 3, "load": 2, "steps": 20, "save": 1, DOWN: 979}


def test_a_run_that_fails():
    """A rank that waits for another until it fails has lost that time, and so has the step."""
    assert parts(Stepped(20), Mark(70, OVER), Mark(71, DOWN, True), Mark(75, "start")) == {
        "start": 5, "data": 3, "load": 2, "steps": 10, "repeated": 50, DOWN: 5}


def test_killed_before_a_step():
    assert parts(Mark(60, "start", True), Mark(61, "waiting"), Mark(63, "start"), Mark(70, DOWN, True)) == {
        "start": 5 + 1 + 7, "data": 3, "load": 2, DOWN: 50, "waiting": 2}


def test_steps_of_an_older_version():
    """It left no marks: what came before the first mark does not count."""
    found = account([Stepped(1), Stepped(2), Mark(10, "start", True), Mark(12, "steps"), Stepped(15)])
    assert found.spent.parts == {
        **dict.fromkeys(PARTS, 0.0), "start": 2, "steps": 3}


TIMES = st.floats(0, 1e6)
RECORDS = st.lists(st.one_of(st.builds(Mark, TIMES, st.sampled_from([*PARTS, OVER]), st.booleans()),
                             st.builds(Stepped, TIMES, st.floats(0, 1e3), st.floats(0, 1e3), st.booleans())))


@given(RECORDS)
def test_parts_add_up(records):
    """Whatever the records say, no second is lost or counted twice."""
    found = account(records).spent
    marked = [record.at_s for record in records if isinstance(record, Mark)]
    if not marked:
        assert found.wall_s == 0
        return
    last = max(record.at_s for record in records)
    assert found.wall_s == pytest.approx(last - min(marked), abs=1e-6)
    assert all(seconds >= 0 for seconds in found.parts.values())


def test_files(tmp_path, monkeypatch):
    """A ledger writes what it is told, and finds it again; half a line and other damage are left out."""
    monkeypatch.setenv("THREED_MARKS", "start:1000.0 data:1002.0 start:1003.0")
    ledger = Ledger.of(tmp_path)
    assert marks.take() == []
    ledger.mark("steps")
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(row["doing"], row["first"]) for row in rows] == [
        ("start", True), ("data", False), ("start", False), ("steps", False)]
    now = rows[-1]["time"]
    metrics = ledger.step({"run/time": now + 10, "checkpoint/blocked_s": 2.0, "train/loss": None})
    assert metrics["spent/steps"] == pytest.approx(8) and metrics["spent/save"] == 2
    assert metrics["run/goodput"] == pytest.approx(8 / (now + 10 - 1000))
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "run/time": now + 10, "checkpoint/blocked_s": 2.0}) + "\n"
        + '{"step": 2, "run/time": 1e9')
    (tmp_path / "metrics.undone.jsonl").write_text(json.dumps({"step": 2, "run/time": now + 13}) + "\n\x00\n")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": "never", "doing": "save", "first": 1}\n[]\n{"time": 3')
    assert read(tmp_path)[-2:] == [Stepped(now + 10, 2.0), Stepped(now + 13, counts=False)]
    found = spent(tmp_path)
    assert found is not None and found.parts["steps"] == pytest.approx(8)
    assert found.parts["repeated"] == pytest.approx(3)
    Ledger.of(tmp_path).mark("end")  # after half a line
    assert sum(isinstance(record, Mark) for record in read(tmp_path)) == 5


def test_a_disk_that_is_full(tmp_path):
    """A mark that cannot be written ends nothing."""
    (tmp_path / FILE).mkdir()
    Ledger.of(tmp_path).mark("steps")


def test_without_marks(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "run/time": 5.0}\n')
    assert spent(tmp_path) is None and spent(tmp_path / "nowhere") is None
    assert Spent().goodput is None and Spent().text() == "-"


def test_text():
    assert Spent({**dict.fromkeys(PARTS, 0.0), "steps": 50, "start": 20, "down": 30}).text() == (
        "50.0% of 100.0 s since the run began; the rest: down 30.0%, start 20.0%")


def test_marks(monkeypatch):
    """A mark holds until the next; a second start in a process begins anew."""
    monkeypatch.delenv("THREED_MARKS", raising=False)
    marks.begin_once("start")
    marks.mark("data")
    marks.begin_once("load")
    assert [doing for doing, _ in marks.take()] == ["start", "data"]
    marks.mark("data")
    marks.begin("down")
    assert [doing for doing, _ in marks.take()] == ["down"]


def test_the_age_of_a_process():
    """From its start, in which Python reads its files."""
    code = "import time; time.sleep(0.2)\nfrom threed.base.marks import age_s\nprint(age_s())"
    begin = time.monotonic()
    age_s = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 0.2 <= age_s <= time.monotonic() - begin + 0.02  # the kernel counts in hundredths
