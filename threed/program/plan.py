"""The plan: what all ranks of a run will do. It is a value; `analysis` holds what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from threed.program.digest import digest_of
from threed.program.instruction import Instruction
from threed.program.table import Table
from threed.schema import Config


@dataclass(frozen=True)
class Plan:
    """All positions' programs, by name (`names` lists them), with the table. `programs[name][position]`."""

    table: Table
    programs: dict[str, list[tuple[Instruction, ...]]]
    config: Config | None = field(default=None, compare=False, repr=False)  # None: not made from a config

    @property
    def digest(self) -> str:
        """Two ranks with equal digests will do the same thing. It is computed each time that it is read."""
        return digest_of(self.table, self.programs)

    def __len__(self) -> int:
        return sum(len(program) for programs in self.programs.values() for program in programs)
