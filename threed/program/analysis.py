"""Analysis: what follows from a plan, each thing computed once. No torch.

A plan is a value. Who checks, prints, predicts or runs one makes one analysis of it, and hands it on.
"""

from __future__ import annotations

from functools import cached_property

from threed.program.buffers import Buffers, count_buffers
from threed.program.link import Links, Memory, link, memory
from threed.program.order import Order, run_links, simulated
from threed.program.plan import Plan
from threed.program.seam import seam_of


class Analysis:
    """What is derived from one plan, and remembered: links, buffers, memory."""

    def __init__(self, plan: Plan):
        self.plan, self.table = plan, plan.table
        self._links: dict[tuple[str, int], Links] = {}
        self._simulated: dict[str, list[Links]] = {}
        self._buffers: dict[int, Buffers] = {}
        self._memory: dict[tuple[str, int], Memory] = {}

    @cached_property
    def digest(self) -> str:
        """The plan's digest."""
        return self.plan.digest

    def links(self, name: str) -> list[Links]:
        """The links of a program, one a position."""
        return [self.links_at(name, position) for position in range(len(self.plan.programs[name]))]

    def links_at(self, name: str, position: int) -> Links:
        """The links of a position's program."""
        key = name, position
        if key not in self._links:
            self._links[key] = link(self.plan.programs[name][position], self.table, position,
                                    seam_of(self.table, position, name))
        return self._links[key]

    def simulated(self, name: str) -> list[Links]:
        """The links of a program for a walk, one a position: see `order.simulated`."""
        if name not in self._simulated:
            self._simulated[name] = [
                simulated(links, self.table, seam_of(self.table, position, name), self.buffers(position))
                for position, links in enumerate(self.links(name))]
        return self._simulated[name]

    def run_links(self, name: str, position: int) -> Links:
        """The links of a position's program with all that is waited for: see `order.run_links`. They are
        long, and not remembered."""
        return run_links(self.links_at(name, position), self.table, seam_of(self.table, position, name),
                         self.buffers(position))

    def order(self, name: str, position: int) -> Order:
        """What the engine of a position must know of a program before it runs."""
        return Order.of(self.run_links(name, position))

    def buffers(self, position: int) -> Buffers:
        """The buffers that a rank of a position needs over all programs."""
        if position not in self._buffers:
            links = [self.links_at(name, position) for name in self.plan.programs]
            self._buffers[position] = count_buffers(self.table, position, links)
        return self._buffers[position]

    def memory(self, position: int, name: str = "train") -> Memory:
        """Bytes of a position's slots over a program."""
        key = name, position
        if key not in self._memory:
            self._memory[key] = memory(self.plan.programs[name][position], self.table,
                                       self.links_at(name, position), seam_of(self.table, position, name))
        return self._memory[key]
