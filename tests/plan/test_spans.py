"""Spans of a trace: what `threed trace` draws on a lane does not overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from threed.base.mesh import Coordinate
from threed.monitor.timeline import chrome, on_one_clock, spans
from threed.monitor.traces import RankTrace, RunTrace
from threed.program.instruction import Instruction, Op
from threed.program.trace import Ran, Trace, Wait

PROGRAM = [Instruction(Op.RECV, 0, 0, "act", peer=0), Instruction(Op.FORWARD, 1, 0), Instruction(Op.CLIP)]
LANES = ["recv 0 act", "compute", "compute"]


def test_rounding(monkeypatch):
    """Waits and times are rounded apart: a wait ended up to 2 us after the instruction that waited began."""
    trace = Trace("train", 5.0, [0.0, 0.000002, 0.001], [0.0, 0.000501, 0.001002],
                  [0.000001, 0.001002, 0.0012],
                  [Wait(1, 0, 0.000501), Wait(2, 1, 0.000004), Wait(3, -1, 0.0001)], 0.0013)
    rank = RankTrace(0, Coordinate({"pp": 0, "dp": 0, "cp": 0, "tp": 0}), PROGRAM, LANES, set(), Path("none"))
    found = [(span.lane, span.name, span.waits) for span in spans(rank, trace)]
    assert found == [("recv 0 act", str(PROGRAM[0]), False),
                     ("compute", f"wait {PROGRAM[0]}", True), ("compute", str(PROGRAM[1]), False),
                     ("compute", f"wait {PROGRAM[1]}", True), ("compute", "CLIP", False),
                     ("compute", "wait a copy for a checkpoint", True)]
    monkeypatch.setattr(RankTrace, "trace", lambda self, step: trace)
    events = [event for event in chrome(RunTrace(Path("run"), "digest", [rank], [1], []), [1])["traceEvents"]
              if event["ph"] == "X"]
    lane = [(round(event["ts"] * 10), round((event["ts"] + event["dur"]) * 10)) for event in events
            if event["tid"] == 1]
    assert all(begin <= end for begin, end in lane)
    assert all(one[1] <= other[0] for one, other in zip(lane, lane[1:]))
    assert lane[0] == (20, 5030) and lane[1] == (5030, 10020)  # moved by what was rounded, and no more
    assert lane[-1][1] == pytest.approx(13_000, abs=10)


def test_jobs_are_drawn_where_lanes_did_them(monkeypatch):
    """A copy that is issued at once and comes later; moved with the clock of its rank."""
    program = [Instruction(Op.OFFLOAD, 0, kind="gprev"), Instruction(Op.CLIP)]
    trace = Trace("train", 5.0, [0.0, 0.25], [0.0, 0.25], [0.125, 0.5], total_s=0.75, ran=[Ran(0, 0.25, 0.5)])
    rank = RankTrace(0, Coordinate({"pp": 0, "dp": 0, "cp": 0, "tp": 0}), program, ["d2h", "compute"], set(),
                     Path("none"))
    assert [(span.lane, span.begin, span.end) for span in spans(rank, trace)] == [
        ("d2h", 0.25, 0.75), ("compute", 0.25, 0.5)]
    monkeypatch.setattr(RankTrace, "trace", lambda self, step: trace)
    (moved,) = on_one_clock(RunTrace(Path("run"), "digest", [rank], [1], []), 1)
    assert moved.ran == [Ran(0, 0.25, 0.5)] and moved.times() == ([0.25, 0.25], [0.75, 0.5])
    assert trace.took() == [0.5, 0.25]
