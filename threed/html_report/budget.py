"""Budget: the boxes of a page. Where a plan has more, some positions and micro-batches are drawn, and a note
says which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from threed.program.instruction import COMPUTE, Instruction

MOST_BOXES = 40_000  # in all lanes of a page; a browser draws those of some positions at a time
MOST_COMPUTED = 12_000  # in the picture of the compute lanes, which are drawn together


@dataclass
class Budget:
    """Which boxes of a plan are drawn."""

    programs: Sequence[Sequence[Instruction]]  # of all positions
    num_microbatches: int
    notes: list[str]  # the page's

    @cached_property
    def drawn(self) -> list[int]:
        """Positions whose lanes are all drawn: all positions, or a selection within MOST_BOXES boxes."""
        return self._positions(MOST_BOXES, "All lanes", len)

    @cached_property
    def computed(self) -> list[int]:
        """Positions of which the compute lane is drawn."""
        return self._positions(MOST_COMPUTED, "Compute lanes", _computed)

    def _positions(self, most: int, what: str, count: Callable[[Sequence[Instruction]], int]) -> list[int]:
        each = max(map(count, self.programs))
        return self.spread(most // each, what, f": all have {each * len(self.programs):,} boxes")

    def spread(self, most: int, what: str, why: str = "") -> list[int]:
        """Positions to draw: all, or `most`, from the first to the last. A note says which."""
        count, most = len(self.programs), max(2, most)
        if most >= count:
            return list(range(count))
        chosen = sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
        self.notes.append(f"{what}: {len(chosen)} of {count} positions are drawn "
                          f"({', '.join(f'pp{p}' for p in chosen)}){why}. Sums, peaks and bytes are of all.")
        return chosen

    @cached_property
    def microbatches(self) -> range:
        """Micro-batches of which boxes are drawn."""
        count = self.num_microbatches
        longest = max(map(len, self.programs))
        if 2 * longest <= MOST_BOXES:
            return range(count)
        most = max(1, count * MOST_BOXES // (2 * longest))
        self.notes.append(f"Micro-batches 0 to {most - 1} of {count} are drawn: one position alone has "
                          f"{longest:,} instructions.")
        return range(most)


def _computed(program: Sequence[Instruction]) -> int:
    """How many boxes the compute lane of a program has."""
    items = [(item.op, item.microbatch) for item in program if item.op in COMPUTE]
    return 2 + sum(one != other for one, other in zip(items, items[1:]))
