"""Travel as a pass: directly behind what makes a tensor, or its gradient, it goes to other ranks. No torch.

Placed after other computation, it would wait for that.
"""

from __future__ import annotations

from threed.program.handed import leaving
from threed.program.instruction import COMPUTE, Programs, insert
from threed.program.table import Table


def travel(programs: Programs, table: Table) -> Programs:
    """The programs with what travels."""
    if not any(each.trip for unit in table.units for each in unit.makes):
        return programs
    return [insert(program, {}, {index: after for index, item in enumerate(program)
                                 if item.op in COMPUTE and (after := leaving(item, table))})
            for program in programs]
