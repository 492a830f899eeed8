"""Attribute: how one rank spent the time of a step. The parts add up to the step.

    compute      FORWARD and BACKWARD, with the tensor-parallel collectives inside them; RELEASE and
                 GATHER of what they keep
    p2p_wait     waiting for activations and gradients of other positions, for a tied embedding's other half,
                 and until what was sent has left; issuing messages
    dp_wait      waiting for the results of GATHER, REDUCE and EXCHANGE, issuing them, and CLIP's all-reduce
    *_wait       the same of each other lane of a group
    optimizer    STEP; waiting for one on the host
    offload      waiting for what comes from the host or the disk, or must leave; issuing OFFLOAD and FETCH
    idle         the rest: waiting at CLIP for the last rank to arrive, and the host between instructions

A rank waits at CLIP as long as the last one computes: that is imbalance, most of all the drain of the
pipeline, and no cost of communication. What CLIP itself takes is what it takes on the rank that arrives last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from threed.base.mesh import GROUPS, Mesh
from threed.program.instruction import COLLECTIVES, COMPUTE, MESSAGES, WHOLES, Instruction, Op
from threed.program.trace import Trace

# Lanes of groups -> what waiting for them counts as; those of other groups are part of the computation, or of
# what a position waits for from others.
WAITS = {row.lane: f"{row.lane}_wait" for row in GROUPS.values()
         if row.lane not in ("", "compute") and not row.across_positions}



def unused(mesh: Mesh) -> set[str]:
    """Of these, the waits for lanes of groups that a mesh does not need."""
    return set(WAITS.values()) - {WAITS.get(row.lane) for row in GROUPS.values() if row.needed(mesh)}


OF_SOME = unused(Mesh())  # of groups that not every mesh needs: those of experts, of keys
CAUSES = ("compute", "p2p_wait", *WAITS.values(), "optimizer", "offload", "idle")
PARTS = ("compute", "p2p_wait", *WAITS.values(), "optimizer", "offload", "clip")  # what one rank can tell

# Lanes of what is offloaded, which work beside the computation, and what waiting for them counts as.
BESIDE = ("d2h", "h2d", "host", "read", "write")
WAITED = "waited"


def shown_causes(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """The causes that texts show of some rows: those that not every mesh has only where a row has any."""
    return [cause for cause in CAUSES if cause not in OF_SOME or any(row[cause] for row in rows)]


def cause_of(item: Instruction) -> str:
    """What the time of an instruction counts as, on its own rank or on one that waits for it."""
    if item.op in COMPUTE or (item.of_slot and item.kind in WHOLES.values()):
        return "compute"
    if item.op in MESSAGES or (item.op == Op.REDUCE and GROUPS[item.group].across_positions):
        return "p2p_wait"
    if item.op in COLLECTIVES:
        lane = GROUPS[item.group].lane
        return "compute" if lane == "compute" and item.of_slot else WAITS.get(lane, WAITS["dp"])
    return {Op.STEP: "optimizer", Op.OFFLOAD: "offload", Op.FETCH: "offload",
            Op.CLIP: "clip"}.get(item.op, "idle")


def parts(trace: Trace, program: Sequence[Instruction]) -> dict[str, float]:
    """Seconds by part. The parts do not overlap: instructions follow one another, and an instruction waits
    before it starts."""
    seconds: dict[str, float] = dict.fromkeys([*PARTS, "idle"], 0.0)
    for index, item in enumerate(program):
        seconds[cause_of(item)] += trace.ended[index] - trace.started[index]
    rest = max(0.0, trace.total_s - trace.ended[-1]) if trace.ended else 0.0
    for index, source, wait_s in trace.waits:
        # A wait without a source instruction is for a checkpoint's copy to the host.
        seconds[cause_of(program[source]) if source >= 0 else "offload"] += wait_s
        rest -= wait_s if index == len(program) else 0.0
    seconds["p2p_wait"] += max(0.0, rest)
    del seconds["idle"]
    return seconds


def beside(trace: Trace, lanes: Sequence[str]) -> dict[str, float]:
    """Seconds that each lane of BESIDE worked, and WAITED, those in which the rank waited for any of them.
    `lanes`: of each instruction."""
    seconds: dict[str, float] = dict.fromkeys((*BESIDE, WAITED), 0.0)
    for index, _, ran_s in trace.ran:
        seconds[lanes[index]] += ran_s
    seconds[WAITED] = sum(wait_s for _, source, wait_s in trace.waits
                          if source >= 0 and lanes[source] in BESIDE)
    return seconds


def attribute(seconds: Mapping[str, float], clip_s: float, step_s: float) -> dict[str, float]:
    """Seconds by cause, from a rank's parts and from the time of CLIP on the rank that reached it last."""
    causes = {name: seconds[name] for name in PARTS if name != "clip"}
    causes["dp_wait"] += min(clip_s, seconds["clip"])
    return {**causes, "idle": step_s - sum(causes.values())}
