"""Summary: what a rank of each pipeline position holds and sends, from the plan alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from threed.program.instruction import Slot
from threed.program.table import Plan
from threed.program.walk import link, memory


def stages(plan: Plan) -> list[dict[str, Any]]:
    """One object a pipeline position: parameters and bytes of one of its ranks, bytes that it sends in a train step."""
    table, rows = plan.table, []
    for position, program in enumerate(plan.programs["train"]):
        held = table.held(position)
        seam = table.seam(position)
        alive = memory(program, table, link(program, table, position, seam), seam)
        sent: Counter[str] = Counter({"dp": 0, "tp": 0, "pp": 0})
        for instruction in program:
            sent.update(table.sent(instruction))
        rows.append({
            "parameters": sum(table.parameters[p].numel - table.parameters[p].padding for p in held),
            "parameter_bytes": sum(table.size(Slot("param", p)) for p in held),
            # Gradients keep their buffers from step to step; the reduced shard is a part of them.
            "gradient_bytes": sum(table.size(Slot("wgrad", p)) for p in held),
            "optimizer_bytes": sum(table.size(Slot("state", p)) for p in held),
            "activation_peak_bytes": alive.peak("act", "grad", "saved", "operands"),
            "sent_bytes": dict(sent),
            "units": [table.units[u].name for u in table.units_of(position)],
        })
    return rows
