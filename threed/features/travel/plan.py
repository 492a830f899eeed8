"""Travel as a pass: an instruction directly after the one that makes a tensor, or its gradient, takes it to
other ranks. Placed after other computation, it would wait for that. No torch.
"""

from __future__ import annotations

from itertools import product

from threed.program.instruction import COMPUTE, Instruction, Programs, insert
from threed.program.table import Table
from threed.program.trips import leaving


def travel(programs: Programs, table: Table) -> Programs:
    """Insert the instructions that take tensors, and their gradients, to other ranks."""
    after = {(op, unit): items for op, unit in product(COMPUTE, range(len(table.units)))
             if (items := leaving(Instruction(op, unit), table))}
    if not after:
        return programs
    return [insert(program, {}, {index: [Instruction(each.op, each.unit, item.microbatch, each.kind,
                                                     group=each.group) for each in after[item.op, item.unit]]
                                 for index, item in enumerate(program) if (item.op, item.unit) in after})
            for program in programs]
