"""Timelines: the times that ranks measured, on one clock, as Chrome trace events for Perfetto and as a
picture.

Ranks' clocks differ. All ranks leave CLIP together, so in each step every rank's times are shifted so that
its CLIP ends when rank 0's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from threed.mesh import AXES
from threed.monitor.traces import RankTrace, RunTrace
from threed.program.instruction import Instruction, Op
from threed.program.show import svg
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
            events += _events(rank, trace, step, origin, threads[rank.rank])
    zero = min(event["ts"] for event in events)
    for event in events:
        event["ts"] = round((event["ts"] - zero) * 1e6, 1)
        event["dur"] = round(event["dur"] * 1e6, 1)
    return {"traceEvents": [*shown, *events], "displayTimeUnit": "ms",
            "otherData": {"digest": traced.digest, "run": str(traced.run)}}


def _events(rank: RankTrace, trace: Trace, step: int, origin: float,
            threads: dict[str, int]) -> list[dict[str, Any]]:
    """Complete events, in seconds. Waits are shown one after the other from the issue of the instruction that
    waits."""
    events = []
    reached = dict(enumerate((*trace.issued, trace.ended[-1])))
    waiting = [*zip(rank.lanes, map(str, rank.program), strict=True), ("compute", "the end of the program")]
    for index, source, wait_s in trace.waits:
        awaited = str(rank.program[source]) if source >= 0 else "a copy for a checkpoint"
        events.append({"ph": "X", "pid": rank.rank, "tid": threads[waiting[index][0]],
                       "name": f"wait {awaited}", "cat": "wait", "ts": origin + reached[index], "dur": wait_s,
                       "args": {"step": step, "for": waiting[index][1]}})
        reached[index] += wait_s
    for index, item in enumerate(rank.program):
        args = {"step": step, "index": index, "op": str(item.op)}
        args |= {name: value for name, value in (("unit", item.unit), ("microbatch", item.microbatch))
                 if value >= 0}
        events.append({"ph": "X", "pid": rank.rank, "tid": threads[rank.lanes[index]], "name": str(item),
                       "cat": str(item.op), "ts": origin + trace.started[index],
                       "dur": trace.ended[index] - trace.started[index], "args": args})
    return events


def picture(programs: Sequence[Sequence[Instruction]], traces: Sequence[Trace], title: str) -> str:
    """A drawing of one rank of each position, in the form of `threed show --svg`."""
    origins = [-trace.ended[_clip(program)] for program, trace in zip(programs, traces, strict=True)]
    zero = min(origin + trace.started[0] for origin, trace in zip(origins, traces))
    moved = [([time + origin - zero for time in trace.started],
              [time + origin - zero for time in trace.ended])
             for origin, trace in zip(origins, traces)]
    return svg(programs, Walk([start for start, _ in moved], [end for _, end in moved], []), title)


def picture_of(traced: RunTrace, step: int) -> str:
    """The picture of a step of a run: the ranks of dp 0 and tp 0."""
    row = sorted((rank for rank in traced.ranks if rank.here.is_first(axis for axis in AXES if axis != "pp")),
                 key=lambda rank: rank.here.position)
    return picture([rank.program for rank in row], [rank.trace(step) for rank in row],
                   f"{traced.run}, step {step}, measured on dp 0 tp 0")
