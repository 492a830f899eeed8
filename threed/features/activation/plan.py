"""Activations as passes: what a forward keeps until its backward. Either everything, or only its input, which
is whole, cut over tp, or on the host. No torch.

    keep all      FORWARD ... BACKWARD
    keep input    FORWARD keep=input ... RECOMPUTE BACKWARD
    partitioned   FORWARD keep=input  RELEASE ... GATHER  RECOMPUTE BACKWARD
    on the host   FORWARD keep=input  OFFLOAD ... FETCH ... RECOMPUTE BACKWARD

RECOMPUTE comes before the half of backward that reads its result, and waits for no message: it runs while the
gradient is on its way. FETCH comes one RECOMPUTE earlier than the one that needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from threed.program.instruction import BACKWARDS, Instruction, Op, Programs, Slot, SlotKind, insert
from threed.program.table import Table

Program = list[Instruction]


def mark(table: Table, units: Collection[int]) -> Table:
    """The table with these units recomputed, and no others."""
    return replace(table, units=tuple(replace(unit, recompute=u in units)
                                      for u, unit in enumerate(table.units)))


def worthwhile(table: Table) -> list[int]:
    """Units that keep more than what they are computed from; to recompute another unit would save no memory.
    """
    return [u for u in range(len(table.units)) if _saves(table, u) > 0]


def _saves(table: Table, u: int) -> int:
    """Bytes per micro-batch that recomputing a unit saves. A recomputed unit stores its input instead, and
    the tensors of other ranks that its FORWARD would free otherwise."""
    unit = table.units[u]
    return unit.saved_bytes - table.size(Slot(SlotKind.KEPT, u)) - sum(
        table.size(Slot(read.name, read.unit)) for read in unit.reads if read.spent)


def choose(table: Table, costs: Sequence[float], peaks: Callable[[Collection[int]], list[int]],
           budget: int) -> set[int] | None:
    """The cheapest units to recompute so that no position keeps more than `budget` bytes; None where even all
    units do not suffice.

    `costs`: of a forward of each unit. `peaks`: units -> bytes that each position keeps. Greedy: while a
    position keeps too much, its unit that saves most for its cost is added; then units that are not needed
    are removed, the costliest first. Exact where the units of a position are alike, as blocks are.
    """
    chosen: set[int] = set()
    gain = {u: _saves(table, u) / costs[u] for u in worthwhile(table)}
    while over := [position for position, peak in enumerate(peaks(chosen)) if peak > budget]:
        left = [u for u in gain if u not in chosen]
        if not left:
            return None
        best = {table.position(u): u for u in sorted(left, key=lambda u: (gain[u], -u))}
        # Where these positions have none left: a position that recomputes sends later, and others hold less.
        chosen.update([best[position] for position in over if position in best] or best.values())
    for u in sorted(chosen, key=lambda u: -costs[u]):
        if max(peaks(chosen - {u})) <= budget:
            chosen.remove(u)
    return chosen


def recompute(programs: Programs, table: Table) -> Programs:
    """Keep only the input where the table says so, but not where backward follows at once: that would save no
    memory."""
    if not any(unit.recompute for unit in table.units):
        return programs
    result = []
    for program in programs:
        out: Program = []
        kept = set()
        for index, item in enumerate(program):
            after = program[index + 1] if index + 1 < len(program) else None
            at_once = after is not None and after.op in BACKWARDS and after.turn == item.turn
            if item.op == Op.FORWARD and table.units[item.unit].recompute and not at_once:
                item = item._replace(keep="input")
                kept.add(item.turn)
            elif item.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and item.turn in kept:
                out.append(Instruction(Op.RECOMPUTE, item.unit, item.microbatch))
            out.append(item)
        result.append(out)
    return result


def partition(programs: Programs, table: Table) -> Programs:
    """Cut kept inputs over tp, and join them before they are used."""
    if not table.activation.partition:
        return programs
    result = []
    for program in programs:
        out: Program = []
        for item in program:
            if item.op == Op.RECOMPUTE and table.keeps_stream(item.unit):
                out.append(Instruction(Op.GATHER, item.unit, item.microbatch, kind=SlotKind.KEPT,
                                       group=table.activation.partition))
            out.append(item)
            if item.op == Op.FORWARD and item.keep == "input" and table.keeps_stream(item.unit):
                out.append(Instruction(Op.RELEASE, item.unit, item.microbatch, kind=SlotKind.KEPT))
        result.append(out)
    return result


def offload(programs: Programs, table: Table) -> Programs:
    """Kept inputs go to the host, and each is fetched one RECOMPUTE ahead of its own. An input that would
    come back at once is left on the device."""
    if not table.activation.offload:
        return programs
    kind, writer, reader = SlotKind.KEPT, Op.FORWARD, Op.RECOMPUTE
    if table.activation.partition:
        kind, writer, reader = SlotKind.KEPT_PART, Op.RELEASE, Op.GATHER
    result = []
    for program in programs:
        uses = [index for index, item in enumerate(program)
                if item.op == reader and table.keeps_stream(item.unit)]
        use_of = {program[index].turn: use for use, index in enumerate(uses)}
        after: dict[int, Program] = defaultdict(list)
        before: dict[int, Program] = defaultdict(list)
        for index, item in enumerate(program):
            use = use_of.get(item.turn)
            if item.op == writer and use is not None:
                ahead = uses[max(0, use - 1)]
                fetch = ahead if ahead > index + 1 else uses[use]
                if fetch > index + 1:
                    after[index].append(Instruction(Op.OFFLOAD, item.unit, item.microbatch, kind=kind))
                    before[fetch].append(Instruction(Op.FETCH, item.unit, item.microbatch, kind=kind))
        for fetches in before.values():  # they share a lane: the first to be used comes first
            fetches.sort(key=lambda fetch: use_of[fetch.turn])
        result.append(insert(program, before, after))
    return result
