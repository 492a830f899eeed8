"""Stream: a step in which parameters are gathered, or gradients reduced, in every micro-batch. Where traffic
and computation take turns, the order of single units matters: here units are nodes of a graph, whose longest
path is the step. Gathers come where features/zero/plan puts them, and buffers are those of program/buffers.

    lane compute   F u1   F u2   F u1   B u2   B u1 ...      a node waits for the one before it on its lane,
    lane dp        G u2   G u1   R u2   G u1   R u1 ...      for what it uses, and for its buffer
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from threed.features.zero.plan import window
from threed.layout_search.dp_cost import Toll
from threed.layout_search.steady_state import BACKWARD, FORWARD, INPUT, WEIGHT, channels, few, sequence
from threed.layout_search.units import UnitCost
from threed.program.buffers import shared_sizes

_PACE = 0.99  # of the time that computation alone takes


class UnitPiece(NamedTuple):
    """A compute unit and the parameter units that it uses."""

    unit: UnitCost
    parts: tuple[int, ...]


class TrafficRule(NamedTuple):
    """How traffic runs."""

    window: int | str | None  # units that are gathered at a time, or stage, or step; None: parameters stay
    prefetch: int
    every: int  # micro-batches from one reduction to the next
    gathers: bool
    pooled: bool  # whether gradients take buffers in turn
    streams: bool  # whether each reduced gradient goes to the host
    contention: float


class StageSteps(NamedTuple):
    """A schedule and its stages."""

    name: str
    place: tuple[int, ...]
    stages: Sequence[Sequence[UnitPiece]]
    messages: Sequence[float]  # seconds from a stage to the next
    tolls: dict[int, Toll]  # parameter unit -> what it costs
    moves: Sequence[tuple[float, float]]  # by stage: seconds of SPLIT and JOIN, of a forward, of a backward


def stream(steps: StageSteps, rule: TrafficRule, m: int) -> float:
    """Seconds of m micro-batches, up to the last reduction: of few of them, and of 2p more for each 2p more.
    Where 2p more take less than their computation, they fill what the traffic at the step's end leaves empty,
    and more are played."""
    p, v = max(steps.place) + 1, len(steps.place) // (max(steps.place) + 1)
    some, pace_s = few(steps.name, p, m), _pace_s(steps)
    while m > some + 2 * p:
        less, more = (_Graph(steps, rule, (p, each, v)).total_s() for each in (some, some + 2 * p))
        if more - less > _PACE * 2 * p * pace_s:
            return more + (m - some - 2 * p) * (more - less) / (2 * p)
        some += p * (some // p)
    return _Graph(steps, rule, (p, m, v)).total_s()


def _pace_s(steps: StageSteps) -> float:
    """Seconds that the busiest position computes for a micro-batch, at least."""
    busy = [0.0] * (max(steps.place) + 1)
    for position, pieces in zip(steps.place, steps.stages, strict=True):
        busy[position] += sum(piece.unit.forward_s + piece.unit.backward_s for piece in pieces)
        busy[position] += sum(piece.unit.forward_s * piece.unit.again for piece in pieces[:-1])
    return max(busy)


class _Task(NamedTuple):
    """`at_once`: a backward right after its forward, so that the last unit is not computed again."""

    kind: int
    stage: int
    at_once: bool


class _Item(NamedTuple):
    """A line of a position's program: a computation, or the reduction of a unit."""

    seconds: float
    reads: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    reduces: int | None = None
    last: bool = False  # of its reductions


class _Program:
    """The items of a position, by task, with what is gathered before and released after each."""

    def __init__(self, steps: StageSteps, rule: TrafficRule, tasks: Sequence[_Task], m: int):
        self.items: list[_Item] = []
        self.ends: list[int] = []  # of tasks, in items
        templates = {task: _items(task, steps.stages[task.stage], steps.moves[task.stage])
                     for task in set(tasks)}
        stages = {task.stage for task in tasks}
        users = Counter(part for stage in stages for piece in steps.stages[stage] for part in piece.parts)
        count: Counter[int] = Counter()
        began: dict[int, int] = {}  # units in the order in which their gradients begin
        for task in tasks:
            for item in templates[task]:
                self.items.append(item)
                for part in sorted(item.adds, key=lambda part: began.setdefault(part, len(began))):
                    count[part] += 1
                    last = count[part] == m * users[part]
                    if last or count[part] % (rule.every * users[part]) == 0:
                        self.items.append(_Item(0.0, reduces=part, last=last))
            self.ends.append(len(self.items))
        self.gathers: defaultdict[int, list[int]] = defaultdict(list)
        self.releases: defaultdict[int, list[int]] = defaultdict(list)
        if rule.gathers:
            self._gather(steps, rule, stages)

    def _gather(self, steps: StageSteps, rule: TrafficRule, stages: set[int]) -> None:
        uses = [(index, list(item.reads)) for index, item in enumerate(self.items) if item.reads]
        if rule.window in (None, "step"):
            self.gathers[0] = list(dict.fromkeys(part for _, parts in uses for part in parts))
            return
        capacity = rule.window if isinstance(rule.window, int) else max(
            len({part for piece in steps.stages[stage] for part in piece.parts}) for stage in stages)
        window(uses, capacity, rule.prefetch, self.gathers, self.releases)


def _items(task: _Task, pieces: Sequence[UnitPiece], moves: tuple[float, float]) -> list[_Item]:
    """Of a task. What its messages take from computation (`moves`) counts where the first one comes."""
    kind, (forth, back) = task.kind, moves
    if kind == FORWARD:
        return [_Item(unit.forward_s + (0.0 if at else forth), parts)
                for at, (unit, parts) in enumerate(pieces)]
    result = []
    for at, (unit, parts) in enumerate(reversed(pieces)):
        more = 0.0 if at else back
        if kind in (BACKWARD, INPUT) and unit.again and not (task.at_once and at == 0):
            result.append(_Item(unit.forward_s, parts))
        if kind == BACKWARD:
            result.append(_Item(unit.backward_s + more, parts, parts))
        elif kind == INPUT:
            result.append(_Item(unit.input_s + more, parts))
        else:
            result.append(_Item(unit.weight_s, (), parts))
    return result


class _Pool:
    """Buffers that units take in turn; each with the node that last used it."""

    def __init__(self, sizes: dict[int, int]):
        self.sizes = sorted(sizes)
        self.free = {size: deque([-1] * count) for size, count in sizes.items()}

    def take(self, numel: int) -> int:
        return self._of(numel).popleft()

    def give(self, numel: int, node: int) -> None:
        self._of(numel).append(node)

    def _of(self, numel: int) -> deque[int]:
        return self.free[self.sizes[bisect_left(self.sizes, numel)]]


class _Graph:
    """Nodes in an order in which they can run: their seconds, and for which earlier ones each waits."""

    def __init__(self, steps: StageSteps, rule: TrafficRule, shape: tuple[int, int, int]):
        p, self.m, v = shape
        self.steps, self.rule = steps, rule
        self.seconds: list[float] = []
        self.waits: list[list[int]] = []
        self.computes: list[list[int]] = [[] for _ in range(p)]  # nodes of the lane, by position
        self.sends: list[list[int]] = [[] for _ in range(p)]
        tasks = sequence(steps.name, p, self.m, v).tasks
        mine: list[list[_Task]] = [[] for _ in range(p)]
        before = [-1] * p  # forward before a position's next task
        for kind, stage, position, own, _ in tasks:
            at_once = kind in (BACKWARD, INPUT) and before[position] == own - p * v * self.m
            mine[position].append(_Task(kind, stage, at_once and stage == len(steps.place) - 1))
            before[position] = own if kind == FORWARD else -1
        heads = [0] * p
        lanes = [_Lanes(self, _Program(steps, rule, each, self.m), position)
                 for position, each in enumerate(mine)]
        done: dict[int, int] = {}
        on, back = channels(steps.place)
        sent: dict[int, int] = {}  # channel -> its latest message
        for kind, stage, position, own, at in tasks:
            again = kind in (BACKWARD, INPUT) and steps.stages[stage][-1].unit.again
            again = again and not mine[position][heads[position]].at_once
            heads[position] += 1
            done[own] = node = lanes[position].task(done.get(at, -1), 1 if again else 0)
            if kind == WEIGHT or (kind != FORWARD and not stage):
                continue
            seconds, channel = ((steps.messages[stage], on[stage]) if kind == FORWARD else
                                (steps.messages[stage - 1], back[stage]))
            if seconds:
                waits = [node, *([sent[channel]] if channel in sent else [])]
                done[own] = sent[channel] = self.node(seconds, waits)

    def node(self, seconds: float, waits: list[int]) -> int:
        self.seconds.append(seconds)
        self.waits.append(waits)
        return len(self.seconds) - 1

    def total_s(self) -> float:
        ends = self._ends(self.seconds)
        if self.rule.contention:
            longer = list(self.seconds)
            for computes, sends in zip(self.computes, self.sends, strict=True):
                busy, at = [(ends[node] - self.seconds[node], ends[node]) for node in sends], 0
                for node in computes:
                    end, look = ends[node], 0
                    start = end - self.seconds[node]
                    while at < len(busy) and busy[at][1] <= start:
                        at += 1
                    look = at
                    while look < len(busy) and busy[look][0] < end:
                        longer[node] += self.rule.contention * (min(end, busy[look][1])
                                                                - max(start, busy[look][0]))
                        look += 1
            ends = self._ends(longer)
        return max(ends)

    def _ends(self, seconds: Sequence[float]) -> list[float]:
        ends: list[float] = []
        for took, waits in zip(seconds, self.waits, strict=True):
            start = 0.0
            for node in waits:
                if ends[node] > start:
                    start = ends[node]
            ends.append(start + took)
        return ends


class _Lanes:
    """The lanes of a position, while its program is followed."""

    def __init__(self, graph: _Graph, program: _Program, position: int):
        self.graph, self.program, self.position = graph, program, position
        self.tolls, self.rule = graph.steps.tolls, graph.rule
        self.item = self.tasks = 0
        self.latest: dict[str, int] = {}  # lane -> its latest node
        self.ready: dict[int, int] = {}  # parameter unit -> its gather
        self.added: dict[int, int] = {}  # -> the latest node that added to its gradient
        self.grads: set[int] = set()  # alive
        windowed = bool(program.releases)
        self.params = _Pool(self._sizes(windowed, False)) if windowed else None
        self.pool = _Pool(self._sizes(self.rule.pooled, True)) if self.rule.pooled else None
        self.downs: dict[int, deque[int]] = {}  # shard's size -> the latest nodes that take one to the host
        self.lowered: set[int] = set()  # parameter units of whose gradient the host has a part

    def _sizes(self, asked: bool, grads: bool) -> dict[int, int]:
        alive: Counter[int] = Counter()
        inside: set[int] = set()
        taken: set[tuple[tuple[int, int], ...]] = set()
        seen: set[int] = set()
        for index, item in enumerate(self.program.items if asked else ()):
            come = item.adds if grads else self.program.gathers.get(index, ())
            ended = () if item.reduces is None else (item.reduces,)
            go = ended if grads else self.program.releases.get(index, ())
            for part in come:
                if part not in inside:
                    inside.add(part)
                    seen.add(part)
                    alive[self.tolls[part].numel] += 1
                    taken.add(tuple(alive.items()))
            for part in go:
                inside.discard(part)
                alive[self.tolls[part].numel] -= 1
        return shared_sizes(taken, Counter(self.tolls[part].numel for part in seen), spare=grads)

    def task(self, message: int, before: int) -> int:
        """Follow the items of the next task; its last node. `before`: computations that do not wait for the
        message."""
        end = self.program.ends[self.tasks]
        self.tasks += 1
        node, computed = -1, 0
        for index in range(self.item, end):
            item = self.program.items[index]
            for part in self.program.gathers.get(index, ()):
                self._gather(part)
            if item.reduces is not None:
                self._reduce(item.reduces, item.last)
            else:
                node = self._compute(item, message if computed == before else -1)
                computed += 1
            for part in self.program.releases.get(index, ()):
                assert self.params is not None
                self.params.give(self.tolls[part].numel, node)
        self.item = end
        return node

    def _put(self, lane: str, seconds: float, waits: list[int]) -> int:
        waits = [node for node in (self.latest.get(lane, -1), *waits) if node >= 0]
        node = self.latest[lane] = self.graph.node(seconds, waits)
        return node

    def _gather(self, part: int) -> None:
        toll = self.tolls[part]
        buffer = self.params.take(toll.numel) if self.params is not None else -1
        self.ready[part] = node = self._put("dp", toll.gather_s, [buffer])
        self.graph.sends[self.position].append(node)

    def _compute(self, item: _Item, message: int) -> int:
        waits = [message, *(self.ready.get(part, -1) for part in item.reads)]
        for part in item.adds:
            if self.pool is not None and part not in self.grads:
                waits.append(self.pool.take(self.tolls[part].numel))
                self.grads.add(part)
        node = self._put("compute", item.seconds, waits)
        self.graph.computes[self.position].append(node)
        for part in item.adds:
            self.added[part] = node
        return node

    def _reduce(self, part: int, last: bool) -> None:
        tolls = self.tolls[part]
        added = self.added[part]
        if tolls.sum_s:
            added = self._put("compute", tolls.sum_s, [])
        waits = [added]
        downs = self.downs.setdefault(tolls.shard_numel, deque([-1, -1]))
        if self.rule.streams:
            waits.append(downs.popleft())
        node = self._put("dp", tolls.reduce_s, waits)
        self.graph.sends[self.position].append(node)
        if self.pool is not None:
            self.pool.give(tolls.numel, node)
            self.grads.discard(part)
        if last and tolls.copy_s:
            node = self._put("dp", tolls.copy_s, [])
            self.graph.sends[self.position].append(node)
        if tolls.down_s and (self.rule.streams or last):
            # all but the first: the sum comes up to be added to, and goes down again
            node = self._put("d2h", tolls.down_s * (2 if part in self.lowered else 1), [node])
            self.lowered.add(part)
            if self.rule.streams:
                downs.append(node)
