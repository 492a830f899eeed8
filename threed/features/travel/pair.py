"""Pairs as a pass: a forward and a backward of different micro-batches that are neighbours are computed
together, so that what travels for one of them does so while the other computes (DualPipe, DeepSeek-AI 2024).
No torch.

    F u1 m1  F u2 m1  B u2 m0  B u1 m0    ->    F u1 m1  I u2 m0  F u2 m1  W u2 m0  I u1 m0  W u1 m0

Backwards are split into their halves: while rows of its input's gradient travel, a backward computes its own
weights' gradients, too. Instructions are moved, and none changes what it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from threed.program.access import Effects
from threed.program.effects import effects
from threed.program.halves import halves
from threed.program.instruction import COMPUTE, Instruction, Op, Programs, Slot
from threed.program.link import follow
from threed.program.pairs import cost_in_pair
from threed.program.table import Table
from threed.program.trips import leaving, returning
from threed.schedules.arrange import LaneTask, arrange
from threed.schedules.orders import Task, needs

_KINDS = {Op.FORWARD: "F", Op.RECOMPUTE: "I", Op.BACKWARD: "I", Op.BACKWARD_INPUT: "I",
          Op.BACKWARD_WEIGHT: "W"}


class _Run(NamedTuple):
    """What a position computes without waiting for other positions in between: a forward, or a backward with
    the weights' halves that follow it."""

    tasks: tuple[Task, ...]
    items: tuple[Instruction, ...]  # of micro-batch 0, 1, ...: runs alike have the same
    microbatches: tuple[int, ...]  # those that are meant

    @classmethod
    def of(cls, tasks: Sequence[Task], items: Sequence[Instruction]) -> _Run:
        names = tuple(dict.fromkeys(task.microbatch for task in tasks))
        return cls(tuple(tasks), tuple(item._replace(microbatch=names.index(item.microbatch))
                                       for item in items), names)

    def pairs_with(self, other: _Run) -> bool:
        first, then = self.tasks[0], other.tasks[0]
        return {first.kind, then.kind} == {"F", "I"} and first.microbatch != then.microbatch


class _Timed(NamedTuple):
    """Instructions in the order in which they are computed, and how long they take."""

    items: list[Instruction]
    span: float
    ends: dict[Task, float]


def pair(programs: Programs, table: Table) -> Programs:
    """The programs with forwards and backwards in pairs, if the table has costs to choose by. A pair ends
    later than its first half would alone, so a step can get longer where others wait for it. The shortest of
    three is taken: with pairs; with each run by itself and a backward in the best order of its halves; and
    unchanged."""
    if table.pair is None:
        return programs
    walks = [_Walk(programs, table, pairs, moves) for pairs, moves in ((True, True), (False, True),
                                                                       (False, False))]
    results = [(walk.run(), max(walk.clock)) for walk in walks]
    return min(results, key=lambda result: result[1])[0]


class _Walk:
    """Simulates all positions run by run. If the next run of a position can begin, too, and its wait costs
    less than the pair saves, both are computed as a pair. So no position waits for what comes later. `pairs`:
    whether to form pairs; `moves`: whether instructions of a run may change places."""

    def __init__(self, programs: Programs, table: Table, pairs: bool, moves: bool):
        self.table, self.pairs, self.moves = table, pairs, moves
        self.left = [deque(_runs(program, table)) for program in programs]
        self.clock = [0.0] * len(programs)
        self.done: dict[tuple[str, int, int], float] = {}  # task -> its end
        self.known: dict[tuple[object, ...], _Timed] = {}

    def run(self) -> Programs:
        out: Programs = [[] for _ in self.left]
        while any(self.left):
            begins = [(begin, position) for position, left in enumerate(self.left)
                      if left and (begin := self.begin(position, left[0])) is not None]
            if not begins:  # the order can never run, which the pass of the messages says
                return [[*done, *(item for run in left for item in _named(run.items, run.microbatches))]
                        for done, left in zip(out, self.left, strict=True)]
            begin, position = min(begins)
            out[position] += self.step(begin, position)
        return out

    def begin(self, position: int, *runs: _Run) -> float | None:
        """When runs can begin together; None where that is not known yet."""
        begin, last = self.clock[position], len(self.table.stage_positions) - 1
        for run in runs:
            for need in (need for task in run.tasks for need in needs(task, last)):
                end = 0.0 if need in run.tasks else self.done.get(need)
                if end is None:
                    return None
                begin = max(begin, end)
        return begin

    def step(self, begin: float, position: int) -> list[Instruction]:
        """Simulate the next run of a position, or the next two as a pair if the pair ends sooner. Returns
        the instructions in the order in which they run. `begin`: when the first run can begin."""
        left = self.left[position]
        runs = (left.popleft(),)
        timed = self.timed(position, *runs)
        if self.pairs and left and runs[0].pairs_with(left[0]):
            both = *runs, left[0]
            at, together = self.begin(position, *both), self.timed(position, *both)
            alone = timed.span + self.timed(position, left[0]).span
            if at is not None and at + together.span < begin + alone:
                left.popleft()
                begin, timed = at, together
        self.done |= {task: begin + end for task, end in timed.ends.items()}
        self.clock[position] = begin + timed.span
        return timed.items

    def timed(self, position: int, *runs: _Run) -> _Timed:
        """Compute these runs together: the best order of their instructions, the time that it takes, and
        when each task ends. (Equal runs share one result.)"""
        key = position, *(run.items for run in runs)
        names = tuple(name for run in runs for name in run.microbatches)
        if key not in self.known:
            self.known[key] = self._timed(position, runs)
        items, span, ends = self.known[key]
        return _Timed(_named(items, names), span,
                     {task._replace(microbatch=names[task.microbatch]): end for task, end in ends.items()})

    def _timed(self, position: int, runs: Sequence[_Run]) -> _Timed:
        items, first = list[Instruction](), 0
        for run in runs:
            items += [item._replace(microbatch=item.microbatch + first) for item in run.items]
            first += len(run.microbatches)
        moves = self.moves and any(leaving(item, self.table) for item in items)
        if moves:
            items = [half for item in items for half in halves(item, self.table)]
        again = self.brought(items)
        items = [each for index, item in enumerate(items)
                 for each in (*again.get(index, ()), item, *leaving(item, self.table))]
        seen = [effects(item, self.table, position) for item in items]
        before: list[set[int]] = [set() for _ in items]
        also = (_one_ahead(items, [*chain(*again.values())]) if moves else _in_turn(items))
        for earlier, later in (*follow(enumerate(seen), ()).pairs, *_added(seen), *also):
            before[later].add(earlier)
        jobs = [LaneTask(cost_in_pair(item, self.table), effect.lane, tuple(sorted(mine)))
                for item, effect, mine in zip(items, seen, before, strict=True)]
        best = arrange(tuple(jobs))
        ends = dict[Task, float]()
        for item, end in zip(items, best.ends, strict=True):
            if item.op in COMPUTE:
                task = _task(item, self.table)
                ends[task] = max(ends.get(task, 0.0), end)
        return _Timed([items[index] for index in best.order if items[index].op in COMPUTE], best.span, ends)

    def brought(self, items: Sequence[Instruction]) -> dict[int, list[Instruction]]:
        """Index -> the instructions that bring again what it is the first to need."""
        first = {item.turn: index for index, item in reversed([*enumerate(items)])
                 if returning(item, self.table)}
        return {index: returning(items[index], self.table) for index in first.values()}


def _runs(program: Sequence[Instruction], table: Table) -> Iterator[_Run]:
    tasks, items = list[Task](), list[Instruction]()
    for task, instructions in groupby(program, lambda item: _task(item, table)):
        if tasks and not (task.kind == "W" and tasks[0].kind == "I"):
            yield _Run.of(tasks, items)
            tasks, items = [], []
        tasks.append(task)
        items += instructions
    if tasks:
        yield _Run.of(tasks, items)


def _task(item: Instruction, table: Table) -> Task:
    return Task(_KINDS[item.op], table.units[item.unit].stage, item.microbatch)


def _named(items: Sequence[Instruction], microbatches: Sequence[int]) -> list[Instruction]:
    return [item._replace(microbatch=microbatches[item.microbatch]) for item in items]


def _added(seen: Sequence[Effects]) -> Iterator[tuple[int, int]]:
    """(earlier, later) of instructions that add to one slot: they stay in the order of the program, since
    another order would round differently."""
    last: dict[Slot, int] = {}
    for index, effect in enumerate(seen):
        for slot in effect.adds:
            if slot in last:
                yield last[slot], index
            last[slot] = index


def _in_turn(items: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """(earlier, later) of computations: each waits for the one before it."""
    return pairwise(index for index, item in enumerate(items) if item.op in COMPUTE)


def _one_ahead(items: Sequence[Instruction], again: Collection[Instruction]) -> Iterator[tuple[int, int]]:
    """(earlier, later): a RECOMPUTE waits for the second-last backward before it, and so does what brings
    tensors again. Recomputing or gathering everything at once would take the memory that this saves."""
    ends: list[int] = []
    for index, item in enumerate(items):
        if len(ends) > 1 and (item.op == Op.RECOMPUTE or item in again):
            yield ends[-2], index
        elif item.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            ends.append(index)
