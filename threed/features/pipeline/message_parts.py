"""Messages in parts: tp ranks that hold the same activation send a part each, and gather it after.

    whole     FORWARD  SEND act                     RECV act                 FORWARD
    in parts  FORWARD  RELEASE act  SEND actpart    RECV actpart   GATHER act  FORWARD

Without sequence parallelism each tp rank has the whole of what goes to the next position, so all of them send
the same bytes over the slow links between nodes. In parts these carry each byte once, and the fast links of a
node do the rest (Narayanan et al. 2021, section 4.1: "scatter/gather optimization"). Gradients go back in the
same way. GATHER comes right before the computation that reads the value: nothing waits for a message earlier
than it did. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from threed.base.mesh import Mesh
from threed.program.forms import Forms
from threed.program.instruction import MESSAGES, PARTS, SENT, Instruction, Op, Programs, Slot
from threed.program.settings import WHOLE_MESSAGES, MessageSettings
from threed.program.table import Table
from threed.schema import Config

# `auto` does not look at a machine: a plan is the same wherever it is made. Most nodes have 8 GPUs. Smaller
# messages gain less than the latency of a gather (of 7 hops over NVLink, 35 us; a rank's adapter needs as
# long for 0.8 MB).
NODE_RANKS = 8
LEAST = 1 << 20  # bytes


def settings(config: Config, mesh: Mesh, sequence_parallel: bool) -> MessageSettings:
    """Which messages of a mesh are cut, as parallel.split_messages says: all (on), none (off), or those
    between nodes where a tp group lies inside one (auto). With `sequence_parallel` they are parts already."""
    asked, tp, pp = config.parallel.split_messages, mesh.sizes["tp"], mesh.sizes["pp"]
    if asked == "off" or sequence_parallel or tp == 1 or pp == 1:
        return WHOLE_MESSAGES
    if asked == "on":
        return MessageSettings("tp", tp)
    spread = mesh.rank(tp=1) * tp  # ranks from the first of a tp group to the first of the next one
    if NODE_RANKS % spread or config.run.device == "cpu":
        return WHOLE_MESSAGES
    nodes = tuple(mesh.rank(pp=position) // NODE_RANKS for position in range(pp))
    return MessageSettings("tp", tp, LEAST, nodes)


def cut(table: Table, asked: MessageSettings) -> Table:
    """The table with these settings; without them, where they cut no message between two stages."""
    other = replace(table, messages=asked)
    ends = [unit for unit in range(table.last) if table.units[unit].stage != table.units[unit + 1].stage]
    for unit in ends:
        here, there = table.position(unit), table.position(unit + 1)
        if here != there and any(_is_cut(other, kind, unit, (here, there)) for kind in SENT):
            return other
    return table


def _is_cut(table: Table, kind: str, unit: int, ends: tuple[int, int]) -> bool:
    return (table.messages.cuts(table.size(Slot(kind, unit)), *ends)
            and table.sent_in_parts(kind, unit))


def in_parts(programs: Programs, table: Table) -> Programs:
    """Messages that are cut carry a part of a value. RELEASE cuts the value before SEND, and GATHER joins its
    parts before its first reader."""
    if not table.messages.group:
        return programs
    result, forms = [], Forms(table)
    for position, program in enumerate(programs):
        out: list[Instruction] = []
        came: set[Slot] = set()  # of which only a part is here
        for item in program:
            if item.op in MESSAGES and _is_cut(table, item.kind, item.unit, (position, item.peer)):
                if item.op == Op.SEND:
                    out.append(Instruction(Op.RELEASE, item.unit, item.microbatch, kind=item.kind))
                else:
                    came.add(item.slot)
                out.append(item._replace(kind=PARTS[item.kind]))
                continue
            for slot in forms.effects(item, position).reads if came else ():
                if slot in came:
                    came.remove(slot)
                    out.append(Instruction(Op.GATHER, slot.unit, slot.microbatch, kind=slot.kind,
                                           group=table.messages.group))
            out.append(item)
        result.append(out)
    return result
