"""What `threed predict CONFIG` says: step time, bubbles, memory over time and bytes, from a plan and its instructions' costs."""

from __future__ import annotations

from typing import Any

from threed.program.instruction import COMPUTE, Op
from threed.program.summary import ACTIVATIONS, alive_bytes, fixed_bytes, stages
from threed.program.table import Plan
from threed.program.walk import Cost, Mode, link, walk
from threed.quantity import show_bytes, show_seconds

SAMPLES = 50  # points of memory over time


def report(plan: Plan, cost: Cost, source: str) -> dict[str, Any]:
    """Times are of one train step; bytes of one rank of a position, on tier `device` (the only one so far)."""
    table, programs = plan.table, plan.programs["train"]
    links = [link(program, table, position, table.seam(position)) for position, program in enumerate(programs)]
    when = walk(programs, table, links, Mode.BUFFERED, cost)
    total = when.total_s
    rows = []
    for position, (program, held) in enumerate(zip(programs, stages(plan), strict=True)):
        busy = sum(cost(position, item) for item in program if item.op in COMPUTE or item.op == Op.STEP)
        by_kind, fixed = alive_bytes(plan, position).by_kind, fixed_bytes(held)
        kept = [sum(column) for column in zip(*(by_kind[kind] for kind in ACTIVATIONS if kind in by_kind), strict=True)]
        every = max(1, len(program) // SAMPLES)
        rows.append({
            "bubble": max(0.0, 1.0 - busy / total) if total else 0.0, "busy_s": busy,
            "peak_bytes": {"device": fixed + max(kept, default=0)},
            "memory": [{"seconds": when.start[position][i], "device": fixed + kept[i]} for i in range(0, len(kept), every)],
            **held,
        })
    bubble = sum(row["bubble"] for row in rows) / len(rows)
    return {"step_time": total, "bubble": bubble, "costs": source, "digest": plan.digest, "stages": rows}


def show(values: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [f"step {show_seconds(values['step_time'])}, bubble {values['bubble']:.1%} (costs: {values['costs']})",
             "".join(text.rjust(12) for text in ("a rank of", "busy", "bubble", "peak", "fixed", "activations",
                                                 "sends dp", "tp", "pp"))]
    for position, row in enumerate(values["stages"]):
        peak = row["peak_bytes"]["device"]
        cells = [f"pp{position}", show_seconds(row["busy_s"]), f"{row['bubble']:.1%}", show_bytes(peak),
                 show_bytes(peak - row["activation_peak_bytes"]), show_bytes(row["activation_peak_bytes"]),
                 *(show_bytes(row["sent_bytes"][axis]) for axis in ("dp", "tp", "pp"))]
        lines.append("".join(cell.rjust(12) for cell in cells))
    return "\n".join(lines)
