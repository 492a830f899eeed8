"""Orders: what each pipeline position computes, and when, without communication. A schedule is one function
and one row of `SCHEDULES`; all other code that knows the schedules (choices, checks, the contract) reads the
rows.

An order is, for each position, a list of (kind, stage, micro-batch). The kind is F for forward, B for
backward, or I and W for the two halves of backward: the gradient of the input, and of the weights. There are
p positions, m micro-batches, and v stages a position. With p = 3 and m = 4:

    gpipe: all forwards, then all backwards; keeps m micro-batches

    pp0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    pp1   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    pp2   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3

    1f1b: p - rank forwards ahead, then one backward for each forward; keeps p - rank

    pp0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    pp1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
    pp2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

    zb-h1: 1f1b with each weights' half delayed by `rank` micro-batches, to where the rank would wait; keeps p

    pp0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    pp1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    pp2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    zb-h2: twice as many forwards ahead, so that no rank waits at the start either; keeps 2p - 1

    pp0   F0 F1 F2 F3 .  B0 W0 B1 W1 B2 W2 B3 W3
    pp1   .  F0 F1 F2 B0 F3 B1 .  B2 W0 B3 W1 W2 W3
    pp2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3

interleaved and breadth-first give each position v stages, which are p apart; zb-v, v-half, v-min and
dualpipe-v give it two, in V shape, so that the first position also has the last stage; vertical makes each
unit a stage. With p = 1, 3 units and m = 4, in groups of 2 (F2.0 is the forward of stage 2, micro-batch 0):

    F0.0 F0.1 F1.0 F1.1 F2.0 F2.1  B2.0 B2.1 B1.0 B1.1 B0.0 B0.1  F0.2 F0.3 F1.2 F1.3 ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple


class Task(NamedTuple):
    """One computation of an order."""

    kind: str  # F, B, I (input half of backward) or W (weights half)
    stage: int
    microbatch: int


Order = list[list[Task]]


def gpipe(p: int, m: int, v: int = 1) -> Order:
    """Huang et al. 2019."""
    return [[Task(kind, position, k) for kind in "FB" for k in range(m)] for position in range(p)]


def one_f_one_b(p: int, m: int, v: int = 1, most: int | None = None, more: int = 0) -> Order:
    """Narayanan et al. 2021 (PipeDream-Flush). With `most`, a position keeps at most that many micro-batches,
    and waits instead. With `more`, it keeps so many more than it needs."""
    order = []
    for position in range(p):
        ahead = min(p - position - 1 + more, m, m if most is None else most - 1)
        tasks = [Task("F", position, k) for k in range(ahead)]
        for k in range(m):
            tasks += [Task("F", position, ahead + k)] if ahead + k < m else []
            tasks.append(Task("B", position, k))
        order.append(tasks)
    return order


def zb_h1(p: int, m: int, v: int = 1, more: int = 0) -> Order:
    """Qi et al. 2024, handcrafted: as much memory as 1F1B. With `more`, so many micro-batches more."""
    return _zero_bubble(p, m, 1, more)


def zb_h2(p: int, m: int, v: int = 1) -> Order:
    """Qi et al. 2024, handcrafted: twice the memory of 1F1B, less one micro-batch."""
    return _zero_bubble(p, m, 2)


def _zero_bubble(p: int, m: int, times: int, more: int = 0) -> Order:
    order = []
    for position in range(p):
        ahead, late = min(times * (p - position - 1) + more, m), times * position
        tasks = [Task("F", position, k) for k in range(ahead)]
        for k in range(m):
            tasks += [Task("F", position, ahead + k)] if ahead + k < m else []
            tasks.append(Task("I", position, k))
            tasks += [Task("W", position, k - late)] if k >= late else []
        order.append(tasks + [Task("W", position, k) for k in range(max(0, m - late), m)])
    return order


def interleaved(p: int, m: int, v: int) -> Order:
    """Narayanan et al. 2021: groups of p micro-batches pass through a position's stages in turn. The last
    group may be smaller; where this makes the usual warm-up too short, each position runs more forwards
    ahead, until the order can run."""
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    forward = [(chunk, k) for group in groups for chunk in range(v) for k in group]
    backward = [(v - 1 - chunk, k) for chunk, k in forward]
    for more in range(len(forward)):
        order = []
        for position in range(p):
            ahead = min(2 * (p - position - 1) + (v - 1) * p + more, len(forward))
            tasks = [Task("F", chunk * p + position, k) for chunk, k in forward[:ahead]]
            for index, (chunk, k) in enumerate(backward):
                if ahead + index < len(forward):
                    next_chunk, next_k = forward[ahead + index]
                    tasks.append(Task("F", next_chunk * p + position, next_k))
                tasks.append(Task("B", chunk * p + position, k))
            order.append(tasks)
        if can_run(order):
            return order
    raise AssertionError("all forwards first can always run")


def breadth_first(p: int, m: int, v: int) -> Order:
    """Lamy-Poirier 2023: every micro-batch passes one stage before the position's next stage begins. Keeps
    v * m chunks."""
    return in_groups(line(p, v), m, m)


def in_groups(place: Sequence[int], m: int, group: int) -> Order:
    """Breadth-first for one group of micro-batches after the other: its forwards through all stages, then its
    backwards, and then the next group. `place`: the position of each stage."""
    order: Order = [[] for _ in range(max(place) + 1)]
    stages = range(len(place))
    for first in range(0, m, group):
        for kind, through in (("F", stages), ("B", reversed(stages))):
            for stage in through:
                order[place[stage]] += [Task(kind, stage, k) for k in range(first, min(first + group, m))]
    return order


class _Vee:
    """Collects a position's tasks in V shape: chunk 0 is stage `position`, chunk 1 is its mirror image."""

    def __init__(self, p: int, m: int, position: int):
        self.m, self.stages = m, (position, 2 * p - 1 - position)
        self.tasks: list[Task] = []
        self.count: Counter[tuple[str, int]] = Counter()

    def add(self, *steps: str) -> None:
        """Add steps such as F0 (forward of chunk 0 for its next micro-batch). Steps beyond the last
        micro-batch are left out."""
        for step in steps:
            kind, chunk = step[0], int(step[1])
            counted = "B" if kind == "I" else kind, chunk  # a backward, whole or its first half
            k = self.count[counted]
            self.count[counted] += 1
            if k < self.m:
                self.tasks.append(Task(kind, self.stages[chunk], k))


def zb_v(p: int, m: int, v: int = 2) -> Order:
    """Qi et al. 2024 (pipeline parallelism with controllable memory): no bubble with the memory of 1F1B,
    where F, I and W take equal time."""
    # With fewer micro-batches than it needs, this is the order for enough of them, without the missing ones.
    enough = max(m, 2 * p - 1)
    order = []
    for position in range(p):
        vee = _Vee(p, m, position)
        vee.add(*["F0"] * (2 * (p - position) - 1), *["F1", "F0"] * position,
                *["F1", "I1", "W1"] * (p - position))
        while vee.count["F", 1] < enough:
            vee.add(*["F0"] * (vee.count["F", 0] < enough), "I0", "W0", "F1", "I1", "W1")
        vee.add(*["I0", "I1"] * position, *["I0", "W0"] * (p - position))
        vee.add(*["W1"] * (enough - vee.count["W", 1]), *["W0"] * (enough - vee.count["W", 0]))
        order.append(vee.tasks)
    return order


def v_half(p: int, m: int, v: int = 2) -> Order:
    """Qi et al. 2024 (controllable memory): keeps floor(p / 2) + 1 micro-batches. Where F, I and W take
    equal time, the bubble is little more than half of 1F1B's."""
    return _blocks(p, m, (1, 2, 1, 2), (0, 0, 1) if p % 2 else (0, 3, 1))


def v_min(p: int, m: int, v: int = 2) -> Order:
    """Qi et al. 2024 (controllable memory): keeps floor((p + 4) / 3) micro-batches. Where F, I and W take
    equal time, the bubble is some two thirds of 1F1B's."""
    return _blocks(p, m, (1, 1, 1, 1), (0, 0, 0) if p % 3 else (2, 0, 2))


def _blocks(p: int, m: int, steps: tuple[int, ...], gaps: tuple[int, ...]) -> Order:
    """A building block, repeated each six slots, for tasks of one slot each. A micro-batch goes down and up
    the V, forwards and then backwards: `steps` are the slots between neighbours on these four legs, and
    `gaps` those that it waits between legs. No two tasks of a position may fall on the same slot of the six.

    A weights' half has the next free slot of the block. Together the blocks say which forwards and input
    halves a position runs in turn, and how many weights' halves must have been run before each forward, which
    sets what it keeps. Then the blocks are squeezed: weights' halves are postponed to where a position would
    wait, as far as these numbers allow.
    """
    lines = [_line(position, p, m, steps, gaps) for position in range(p)]
    order: Order = [[] for _ in range(p)]
    due: Order = [[] for _ in range(p)]
    ended: dict[tuple[str, int, int], int] = {}
    freed, slot = [0] * p, 0
    while any(lines) or any(due):
        for position, line_ in enumerate(lines):
            task, before = line_[0] if line_ else (None, 0)
            ready = task is not None and all(ended.get(need, slot) < slot for need in needs(task, 2 * p - 1))
            if task is not None and ready and freed[position] >= before:
                line_.pop(0)
                due[position] += [task._replace(kind="W")] if task.kind == "I" else []
            elif due[position]:
                task = due[position].pop(0)
                freed[position] += 1
            else:
                continue
            order[position].append(task)
            ended[task] = slot
        slot += 1
    return order


def _line(position: int, p: int, m: int, steps: tuple[int, ...],
          gaps: tuple[int, ...]) -> list[tuple[Task, int]]:
    """A position's forwards and input halves in the order of the blocks; and with each forward, how many
    weights' halves come before it."""
    stages = position, 2 * p - 1 - position
    slots, now = [], 0
    for leg, step in enumerate(steps):
        slots.append(now + step * (p - 1 - position if leg % 2 else position))
        now += step * (p - 1) + 1 + (gaps[leg] if leg < 3 else 0)
    tasks = list(zip(slots, "FFII", (stages[0], stages[1], stages[1], stages[0]), strict=True))
    taken = {slot % 6 for slot in slots}
    assert len(taken) == 4, (position, p, steps, gaps)
    for slot, _, stage in tasks[2:]:
        late = next(late for late in range(slot + 1, slot + 7) if late % 6 not in taken)
        taken.add(late % 6)
        tasks.append((late, "W", stage))
    result, freed = [], 0
    for _, k, kind, stage in sorted((slot + 6 * k, k, kind, stage) for slot, kind, stage in tasks
                                    for k in range(m)):
        if kind == "W":
            freed += 1
        else:
            result.append((Task(kind, stage, k), freed if kind == "F" else 0))
    return result


def dualpipe_v(p: int, m: int, v: int = 2) -> Order:
    """DualPipe (DeepSeek-AI 2024) cut in half, so that parameters are held once: forwards of one chunk
    alternate with backwards of the other. It fills both arms of the V at once, so it needs 2p
    micro-batches."""
    order = []
    for position in range(p):
        vee = _Vee(p, m, position)
        before, after = p - position - 1, position + 1
        vee.add(*["F0"] * (2 * before), *["F0", "F1"] * after, *["I1", "W1", "F1"] * before)
        vee.add(*["F0", "B1", "F1", "B0"] * (m - 2 * p + after), *["B1", "F1", "B0"] * before)
        late: list[str] = []  # chunks whose weights' half is delayed towards the end
        for index in range(2 * after):
            chunk = "10"[index % 2]
            if index < after:
                vee.add(f"B{chunk}")
            else:
                vee.add(f"I{chunk}")
                late.append(chunk)
        for _ in range(before):
            vee.add(*[f"W{late.pop(0)}"] if late else [], "I0")
            late.append("0")
        vee.add(*[f"W{chunk}" for chunk in late])
        order.append(_number_weights(vee.tasks))
    return order


def _number_weights(tasks: list[Task]) -> list[Task]:
    """Give each W the oldest micro-batch of its stage whose input half ran alone (as I, not as B)."""
    open_: dict[int, list[int]] = {}
    result = []
    for task in tasks:
        if task.kind == "I":
            open_.setdefault(task.stage, []).append(task.microbatch)
        result.append(task._replace(microbatch=open_[task.stage].pop(0)) if task.kind == "W" else task)
    return result


def forward_only(place: tuple[int, ...], m: int, group: int | None = None) -> Order:
    """Evaluation, for any placement of stages: each position runs its tasks in the order of the wave front;
    or, where micro-batches pass stages in groups, as in training."""
    if group is not None:
        return [[task for task in tasks if task.kind == "F"] for tasks in in_groups(place, m, group)]
    order: Order = [[] for _ in range(max(place) + 1)]
    for wave in range(len(place) + m - 1):
        for stage in range(max(0, wave - m + 1), min(wave + 1, len(place))):
            order[place[stage]].append(Task("F", stage, wave - stage))
    return order


# ---------------------------------------------------------------- placements of stages


def line(p: int, v: int) -> tuple[int, ...]:
    """Position of each stage: 0 1 2 0 1 2."""
    return tuple(range(p)) * v


def vee(p: int, v: int) -> tuple[int, ...]:
    """Position of each stage: 0 1 2 2 1 0."""
    return (*range(p), *reversed(range(p)))


def looped(p: int, stages: int) -> tuple[int, ...]:
    """Position of each of so many stages, which p need not divide: a line whose first round skips positions
    behind 0, so that the last stage is on the last position. For 5 stages and p = 3: 0 2 0 1 2."""
    whole = line(p, -(-stages // p))
    return (0, *whole[len(whole) - stages + 1:])


@dataclass(frozen=True)
class Schedule:
    """A row of `SCHEDULES`."""

    make: Callable[[int, int, int], Order]  # (p, m, v) -> order
    place: Callable[[int, int], tuple[int, ...]] = line  # (p, v) -> position of each stage
    # Stages a position; None: any number of at least 2, from parallel.virtual_stages; 0: each unit is a
    # stage, which groups of parallel.group micro-batches pass (`make` then makes the order of one group)
    virtual: int | None = 1
    least: Callable[[int], int] = lambda p: 1  # p -> the least number of micro-batches
    alone: str = "1f1b"  # where `virtual` is None: the schedule that it equals with one stage a position
    # The order for parallel.pair, where `make` runs too few forwards ahead for pairs; False: it has none,
    # since all forwards come before all backwards
    paired: Callable[[int, int, int], Order] | bool = True

    @property
    def by_unit(self) -> bool:
        return self.virtual == 0

    def takes(self, v: int | None) -> bool:
        """Whether it may have v stages a position. None: no number is asked for."""
        return (v or 1) > 1 if self.virtual is None else v in (None, self.virtual)

    def fills(self, p: int, m: int) -> bool:
        """Whether m micro-batches are enough for p positions."""
        return m >= self.least(p)

    def order(self, p: int, m: int, v: int, pair: bool = False) -> Order:
        """The order, or that for parallel.pair."""
        return (self.paired if pair and callable(self.paired) else self.make)(p, m, v)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, paired=False),
    "1f1b": Schedule(one_f_one_b, paired=partial(one_f_one_b, more=1)),
    "interleaved": Schedule(interleaved, virtual=None),
    "zb-h1": Schedule(zb_h1, paired=partial(zb_h1, more=1)),
    "zb-h2": Schedule(zb_h2),
    "zb-v": Schedule(zb_v, vee, 2),
    "v-half": Schedule(v_half, vee, 2),
    "v-min": Schedule(v_min, vee, 2),
    "dualpipe-v": Schedule(dualpipe_v, vee, 2, lambda p: 2 * p),
    "breadth-first": Schedule(breadth_first, virtual=None, alone="gpipe", paired=False),
    "vertical": Schedule(breadth_first, virtual=0, paired=False),
}


def needs(task: Task, last_stage: int) -> list[tuple[str, int, int]]:
    """The tasks that a task waits for, of other stages or of its own. A whole backward (B) is named by its
    input half (I) here. (They are plain tuples: searches ask for millions.)"""
    kind, stage, k = task
    if kind == "F":
        return [("F", stage - 1, k)] if stage > 0 else []
    if kind == "W":
        return [("I", stage, k)]
    return [("F", stage, k), ("I", stage + 1, k)] if stage < last_stage else [("F", stage, k)]


def can_run(order: Order) -> bool:
    """Whether every position comes to its end."""
    done: set[tuple[str, int, int]] = set()
    last = max(task.stage for tasks in order for task in tasks)
    heads, moved = [0] * len(order), True
    while moved:
        moved = False
        for position, tasks in enumerate(order):
            while heads[position] < len(tasks):
                task = tasks[heads[position]]
                if not done.issuperset(needs(task, last)):
                    break
                done.add(("I", task.stage, task.microbatch) if task.kind == "B" else task)
                heads[position] += 1
                moved = True
    return all(heads[position] == len(tasks) for position, tasks in enumerate(order))
