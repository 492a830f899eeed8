"""Summary: what a rank of each pipeline position holds and sends, from the plan alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from threed.program.buffers import buffers
from threed.program.instruction import Op, Slot
from threed.program.table import Plan
from threed.program.walk import Memory, link, memory

ACTIVATIONS = ("act", "grad", "saved", "kept", "kpart", "operands")


def stages(plan: Plan) -> list[dict[str, Any]]:
    """One object a pipeline position: parameters and bytes of one of its ranks; collectives and bytes sent in a train step.

    Parameters, gradients and optimizer state keep their memory from step to step, as shards or whole by the ZeRO stage;
    buffers are what units share in turn (whole parameters and gradients that do not stay, staging). `slot_peak_bytes` is the
    most that slots of each kind take over the step, wherever they live.
    """
    table, rows = plan.table, []
    for position, program in enumerate(plan.programs["train"]):
        alive = alive_bytes(plan, position)
        sent: Counter[str] = Counter({"dp": 0, "tp": 0, "pp": 0})
        for instruction in program:
            sent.update(table.sent(instruction))
        held = [(p, table.parameters[p]) for p in table.held(position)]
        counts = Counter(instruction.op for instruction in program if instruction.op != Op.REDUCE or instruction.group != "tp")
        rows.append({
            "parameters": sum(unit.numel - unit.padding for _, unit in held),
            "parameter_bytes": sum(table.size(Slot("param" if unit.whole else "pshard", p)) for p, unit in held),
            # Below ZeRO-2 the reduced shard is a part of the whole gradient.
            "gradient_bytes": sum(table.size(Slot("wgrad" if table.zero_stage < 2 else "gshard", p)) for p, _ in held),
            "optimizer_bytes": sum(table.size(Slot("state", p)) for p, _ in held),
            "buffer_bytes": buffers(plan, position).bytes(table),
            "activation_peak_bytes": alive.peak(*ACTIVATIONS),
            "slot_peak_bytes": {kind: max(row) for kind, row in sorted(alive.by_kind.items()) if max(row)},
            "gathers": counts[Op.GATHER], "reduces": counts[Op.REDUCE],
            "sent_bytes": dict(sent),
            "units": [table.units[u].name for u in table.units_of(position)],
        })
    return rows


def alive_bytes(plan: Plan, position: int) -> Memory:
    """Bytes of the slots of a position over its train step."""
    program, seam = plan.programs["train"][position], plan.table.seam(position)
    return memory(program, plan.table, link(program, plan.table, position, seam), seam)


def fixed_bytes(row: dict[str, Any]) -> int:
    """What a rank holds all the time."""
    return row["parameter_bytes"] + row["gradient_bytes"] + row["optimizer_bytes"] + row["buffer_bytes"]
