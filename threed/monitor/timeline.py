"""Timelines: the times that ranks measured, on one clock, as Chrome trace events for Perfetto and as a
picture.

Ranks' clocks differ. All ranks leave CLIP together, so in each step every rank's times are shifted so that
its CLIP ends when rank 0's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from threed.base.axes import AXES
from threed.monitor.traces import RankTrace, RunTrace
from threed.program.instruction import Instruction, Op
from threed.program.timeline_svg import svg
from threed.program.trace import Trace
from threed.program.walk import Walk


def _clip(program: Sequence[Instruction]) -> int:
    return next(index for index, item in enumerate(program) if item.op == Op.CLIP)


def chrome(traced: RunTrace, steps: Sequence[int]) -> dict[str, Any]:
    """The trace-event format: a process a rank, a thread a lane, microseconds since the first of the steps
    began."""
    events: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    threads = {rank.rank: {lane: number for number, lane in enumerate(dict.fromkeys(rank.lanes))}
               for rank in traced.ranks}
    for rank in traced.ranks:
        here = rank.here
        names = [("process_name", 0, {"name": f"rank {rank.rank} {here}"}),
                 ("process_sort_index", 0, {"sort_index": rank.rank})]
        names += [("thread_name", number, {"name": lane}) for lane, number in threads[rank.rank].items()]
        names += [("thread_sort_index", number, {"sort_index": number})
                  for number in threads[rank.rank].values()]
        shown += [{"ph": "M", "pid": rank.rank, "tid": tid, "name": name, "args": args}
                  for name, tid, args in names]
    for step in steps:
        first = traced.ranks[0].trace(step)
        together = first.begin + first.ended[_clip(traced.ranks[0].program)]
        for rank in traced.ranks:
            trace = rank.trace(step)
            origin = together - trace.ended[_clip(rank.program)]
            events += [_event(rank, span, step, origin, threads[rank.rank]) for span in spans(rank, trace)]
    zero = min(event["ts"] for event in events)
    for event in events:  # begin and end are rounded, and not the time between: so spans do not overlap
        begin, end = (round((time - zero) * 1e6, 1) for time in (event["ts"], event["dur"]))
        event["ts"], event["dur"] = begin, round(end - begin, 1)
    return {"traceEvents": [*shown, *events], "displayTimeUnit": "ms",
            "otherData": {"digest": traced.digest, "run": str(traced.run)}}


class Span(NamedTuple):
    """What a lane did for a while; times in seconds from the begin of the step."""

    lane: str
    begin: float
    end: float
    name: str
    index: int  # of the instruction that ran, or that waited; the program's length: the end of the program
    waits: bool = False


def spans(rank: RankTrace, trace: Trace) -> list[Span]:
    """The waits and instructions of a rank, in order. Waits come one after the other from the issue of the
    instruction that waits. The times of a trace are rounded apart: where two spans of a lane would overlap by
    that, the later one begins at the end of the earlier one."""
    found, reached = [], dict(enumerate((*trace.issued, trace.ended[-1])))
    lanes = [*rank.lanes, "compute"]
    for index, source, wait_s in trace.waits:
        awaited = str(rank.program[source]) if source >= 0 else "a copy for a checkpoint"
        begin, reached[index] = reached[index], reached[index] + wait_s
        found.append(Span(lanes[index], begin, reached[index], f"wait {awaited}", index, True))
    for index, (item, start, end) in enumerate(zip(rank.program, *trace.times(), strict=True)):
        found.append(Span(lanes[index], start, end, str(item), index))
    busy_until: dict[str, float] = {}
    ordered = []
    for span in sorted(found, key=lambda span: (span.index, not span.waits)):
        begin = max(span.begin, busy_until.get(span.lane, 0.0))
        busy_until[span.lane] = end = max(begin, span.end)
        ordered.append(span._replace(begin=begin, end=end))
    return ordered


def _event(rank: RankTrace, span: Span, step: int, origin: float, threads: dict[str, int]) -> dict[str, Any]:
    """A complete event; begin and end (as `dur`) in seconds."""
    program, index = rank.program, span.index
    args: dict[str, Any] = {"step": step}
    if span.waits:
        args["for"] = str(program[index]) if index < len(program) else "the end of the program"
    else:
        item = program[index]
        args |= {"index": index, "op": str(item.op)}
        args |= {name: value for name, value in (("unit", item.unit), ("microbatch", item.microbatch))
                 if value >= 0}
    return {"ph": "X", "pid": rank.rank, "tid": threads[span.lane], "name": span.name,
            "cat": "wait" if span.waits else str(program[index].op), "ts": origin + span.begin,
            "dur": origin + span.end, "args": args}


def on_one_clock(traced: RunTrace, step: int) -> list[Trace]:
    """A step of all ranks, in seconds since the first of them began."""
    traces = [rank.trace(step) for rank in traced.ranks]
    return _shift([rank.program for rank in traced.ranks], traces)


def _shift(programs: Sequence[Sequence[Instruction]], traces: Sequence[Trace]) -> list[Trace]:
    origins = [-trace.ended[_clip(program)] for program, trace in zip(programs, traces, strict=True)]
    zero = min(origin + trace.started[0] for origin, trace in zip(origins, traces))
    return [replace(trace, **{name: [time + origin - zero for time in getattr(trace, name)]
                              for name in ("issued", "started", "ended")},
                    ran=[each._replace(start_s=each.start_s + origin - zero) for each in trace.ran])
            for origin, trace in zip(origins, traces)]


def picture(programs: Sequence[Sequence[Instruction]], traces: Sequence[Trace], title: str) -> str:
    """A drawing of one rank of each position, in the form of `threed show --svg`."""
    started, ended = zip(*(trace.times() for trace in _shift(programs, traces)), strict=True)
    return svg(programs, Walk([*started], [*ended], []), title)


def picture_of(traced: RunTrace, step: int) -> str:
    """The picture of a step of a run: the ranks of dp 0 and tp 0."""
    row = sorted((rank for rank in traced.ranks if rank.here.is_first(axis for axis in AXES if axis != "pp")),
                 key=lambda rank: rank.here.position)
    return picture([rank.program for rank in row], [rank.trace(step) for rank in row],
                   f"{traced.run}, step {step}, measured on dp 0 tp 0")
