"""Walking a program: which instruction waits for which, when each runs, and whether all of them can.

`link` follows the slots of one program and finds each instruction's producers. `walk` builds one graph over
all positions and visits it; with costs it is also the clock of the simulator. The mode says what may block:

    BUFFERED     every lane runs by itself, and a SEND never waits for its RECV (as on a GPU at its best)
    RENDEZVOUS   the host of each rank issues in order and waits for compute; a SEND waits until its RECV is
                 posted
    BLOCKING     each rank has one blocking queue: every compute or communication call ends before the next
                 begins

Each mode finds deadlocks that the modes above it cannot find. A program that passes BLOCKING runs on any
backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from threed.mesh import GROUPS
from threed.program.effects import Effects, effects
from threed.program.instruction import MESSAGES, Instruction, Op, Slot
from threed.program.table import Table

Program = Sequence[Instruction]
Cost = Callable[[int, Instruction], float]  # (position, instruction) -> seconds


class Mode(Enum):
    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    BLOCKING = "blocking"


class Links(NamedTuple):
    """The result of `link` for one program."""

    effects: list[Effects]
    producers: list[list[int]]  # for each instruction: the earlier instructions whose results it uses
    alive: set[Slot]  # at the end
    faults: list[tuple[int, str]]  # (index, reason): reads of dead slots, double writes, ...


def link(program: Program, table: Table, position: int, start: set[Slot]) -> Links:
    """Follow the slots of a program from those alive at its start."""
    made_by: dict[Slot, list[int]] = {slot: [] for slot in start}
    sealed: set[Slot] = set()
    all_effects, producers, faults = [], [], []
    for index, instruction in enumerate(program):
        try:
            effect = effects(instruction, table, position)
        except KeyError as error:
            faults.append((index, f"names something that does not exist: {error.args[0]}"))
            all_effects.append(Effects("compute"))
            producers.append([])
            continue
        needs: list[int] = []
        for slot in effect.reads:
            if slot not in made_by:
                faults.append((index, f"reads '{slot}', which is not alive"))
            needs += made_by.get(slot, ())
            sealed.add(slot)
        for slot in effect.updates:
            if slot not in made_by:
                faults.append((index, f"updates '{slot}', which is not alive"))
            needs += made_by.get(slot, ())
            made_by[slot] = [index]
        for slot in effect.writes:
            if slot in made_by:
                faults.append((index, f"writes '{slot}', which is already alive"))
            made_by[slot] = [index]
        for slot in effect.adds:
            if slot in sealed:
                faults.append((index, f"adds to '{slot}' after it was used"))
            made_by.setdefault(slot, []).append(index)
        for slot in effect.frees:
            if slot not in made_by:
                if slot not in effect.reads:
                    faults.append((index, f"frees '{slot}', which is not alive"))
                continue
            del made_by[slot]
            sealed.discard(slot)
        all_effects.append(effect)
        producers.append(needs)
    return Links(all_effects, producers, set(made_by), faults)


class Walk(NamedTuple):
    """When each instruction ran, in seconds from the start of the step; `stuck` names instructions that never
    could run."""

    start: list[list[float]]  # [position][index]
    end: list[list[float]]
    stuck: list[tuple[int, int]]  # (position, index), the first of each position

    @property
    def total_s(self) -> float:
        return max((time for times in self.end for time in times), default=0.0)


def walk(programs: Sequence[Program], links: Sequence[Links], mode: Mode = Mode.BLOCKING,
         cost: Cost | None = None) -> Walk:
    """Visit all instructions of all positions in an order that the mode allows.

    Send k of a channel meets receive k of its other end: `check` has made sure that both name the same slot.
    """
    node_of, seconds = _merge(programs, links, mode, cost)
    after: list[list[int]] = [[] for _ in seconds]
    waits = [0] * len(seconds)

    # The loops below see every edge of large plans: they are written out for speed.
    blocking, buffered = mode == Mode.BLOCKING, mode == Mode.BUFFERED
    for position, nodes in enumerate(node_of):
        tails: dict[str, int] = {}
        for node, item, effect in zip(nodes, programs[position], links[position].effects, strict=True):
            lane = effect.lane if buffered else "host"
            # A message is sent from where the computation is, after what is computed before it. And the host
            # reads the result of CLIP before it issues anything else.
            behinds = (lane, "compute") if lane.startswith(_MESSAGES) else (lane, "CLIP")
            for behind in behinds:
                previous = tails.get(behind, node)
                if previous != node:
                    after[previous].append(node)
                    waits[node] += 1
            tails[lane] = node
            if item.op == Op.CLIP:
                tails["CLIP"] = node
    sent_by: dict[tuple[int, int], int] = {}  # a receive -> the node whose end brings its slot
    for sends, receives in () if blocking else channels(programs).values():
        for (sender, i), (receiver, j) in zip(sends, receives, strict=False):
            send, receive = node_of[sender][i], node_of[receiver][j]
            first, then = (send, receive) if buffered else (receive, send)
            after[first].append(then)
            waits[then] += 1
            if not buffered:
                sent_by[receiver, j] = send
    for position, nodes in enumerate(node_of):
        for node, producers in zip(nodes, links[position].producers, strict=True):
            for producer in producers:
                first = sent_by.get((position, producer), nodes[producer]) if sent_by else nodes[producer]
                if first != node:
                    after[first].append(node)
                    waits[node] += 1
    return _visit(node_of, seconds, after, waits)


_MESSAGES = ("send", "recv")  # the beginnings of their lanes


def _merge(programs: Sequence[Program], links: Sequence[Links], mode: Mode,
           cost: Cost | None) -> tuple[list[list[int]], list[float]]:
    """Give each instruction a node, and each node its seconds. A collective over several positions is one
    node: it begins and ends everywhere together. In BLOCKING mode a SEND and its RECV are one node too."""
    across = {group for group, row in GROUPS.items() if row.across_positions}
    shared: dict[object, int] = {}
    node_of: list[list[int]] = []
    seconds: list[float] = []
    for position, program in enumerate(programs):
        counts: dict[object, int] = {}
        nodes = []
        for instruction, effect in zip(program, links[position].effects, strict=True):
            key: object = None
            if not across.isdisjoint(effect.groups):
                key = next(group for group in effect.groups if group in across)
            if mode == Mode.BLOCKING and instruction.op in MESSAGES:
                key = _channel(position, instruction)
            node = len(seconds)
            if key is not None:
                count = counts[key] = counts.get(key, 0) + 1
                node = shared.setdefault((key, count), node)
            took = cost(position, instruction) if cost is not None else 0.0
            if node == len(seconds):
                seconds.append(took)
            else:
                seconds[node] = max(seconds[node], took)
            nodes.append(node)
        node_of.append(nodes)
    return node_of, seconds


def _visit(node_of: list[list[int]], seconds: list[float], after: list[list[int]], waits: list[int]) -> Walk:
    """Topological visit with clocks. Nodes that are never visited form a cycle, or wait for one."""
    begin, end = [0.0] * len(seconds), [0.0] * len(seconds)
    ready = [node for node, count in enumerate(waits) if count == 0]
    done = [False] * len(seconds)
    while ready:
        node = ready.pop()
        done[node] = True
        now = end[node] = begin[node] + seconds[node]
        for then in after[node]:
            if begin[then] < now:
                begin[then] = now
            waits[then] -= 1
            if waits[then] == 0:
                ready.append(then)
    stuck = []
    for position, nodes in enumerate(node_of):
        first = next((index for index, node in enumerate(nodes) if not done[node]), None)
        if first is not None:
            stuck.append((position, first))
    return Walk([[begin[node] for node in nodes] for nodes in node_of],
                [[end[node] for node in nodes] for nodes in node_of], stuck)


def _channel(position: int, instruction: Instruction) -> tuple[int, int, str]:
    """(sender, receiver, act or grad) of a message."""
    if instruction.op == Op.SEND:
        return position, instruction.peer, instruction.kind
    return instruction.peer, position, instruction.kind


Channels = dict[tuple[int, int, str], tuple[list[tuple[int, int]], list[tuple[int, int]]]]


def channels(programs: Sequence[Program]) -> Channels:
    """Channel -> (position, index) of its sends, and of its receives, in program order."""
    ends: Channels = {}
    for position, program in enumerate(programs):
        for index, instruction in enumerate(program):
            if instruction.op in MESSAGES:
                pair = ends.setdefault(_channel(position, instruction), ([], []))
                pair[instruction.op == Op.RECV].append((position, index))
    return ends


class Memory(NamedTuple):
    """Bytes alive on one rank over a program, by kind of slot: [index] -> after that instruction's writes."""

    by_kind: dict[str, list[int]]

    def peak(self, *kinds: str) -> int:
        """The most bytes that slots of these kinds (without arguments, of all kinds) take together."""
        rows = [row for kind, row in self.by_kind.items() if not kinds or kind in kinds]
        return max((sum(column) for column in zip(*rows, strict=True)), default=0)


def memory(program: Program, table: Table, links: Links, start: set[Slot]) -> Memory:
    """Follow the bytes of a program in issue order."""
    sizes: dict[Slot, int] = {}
    now: dict[str, int] = {}
    by_kind: dict[str, list[int]] = {}

    def put(slot: Slot) -> None:
        if slot not in sizes:
            sizes[slot] = table.size(slot)
            now[slot.name] = now.get(slot.name, 0) + sizes[slot]

    for slot in start:
        put(slot)
    for index in range(len(program)):
        effect = links.effects[index]
        for slot in (*effect.writes, *effect.adds):
            put(slot)
        for kind, size in now.items():
            by_kind.setdefault(kind, [0] * index).append(size)
        for slot in effect.frees:
            now[slot.name] -= sizes.pop(slot, 0)
    return Memory(by_kind)
