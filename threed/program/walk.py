"""Walking programs: when each instruction runs, and whether all of them can.

`walk` builds one graph over all positions and visits it; with costs it is also the clock of the simulator.
The mode says what may block:

    BUFFERED     every lane runs by itself, and a SEND never waits for its RECV (as on a GPU at its best)
    RENDEZVOUS   the host of each rank issues in order and waits for compute; a SEND waits until its RECV is
                 posted
    BLOCKING     each rank has one blocking queue: every compute or communication call ends before the next
                 begins

Each mode finds deadlocks that the modes above it cannot find. A program that passes BLOCKING runs on any
backend.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain, repeat
from typing import NamedTuple

from threed.base.mesh import GROUPS
from threed.program.forms import Form
from threed.program.instruction import MESSAGES, Instruction, Op
from threed.program.link import Links, Program

Cost = Callable[[int, Instruction], float]  # (position, instruction) -> seconds, equal for all of a form
Seconds = Sequence[Sequence[float]]  # [position][index]


class Mode(Enum):
    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    BLOCKING = "blocking"


class Walk(NamedTuple):
    """When each instruction ran, in seconds from the start of the step; `stuck` names instructions that never
    could run."""

    start: list[list[float]]  # [position][index]
    end: list[list[float]]
    stuck: list[tuple[int, int]]  # (position, index), the first of each position

    @property
    def total_s(self) -> float:
        return max((max(times) for times in self.end if times), default=0.0)


def seconds_of(links: Sequence[Links], cost: Cost) -> list[list[float]]:
    """Seconds of each instruction."""
    rows = []
    for position, linked in enumerate(links):
        by_form = {form: cost(position, form.item) for form in dict.fromkeys(linked.forms)}
        rows.append([by_form[form] for form in linked.forms])
    return rows


def walk(programs: Sequence[Program], links: Sequence[Links], mode: Mode = Mode.BLOCKING,
         cost: Cost | Seconds | None = None) -> Walk:
    """Visit all instructions of all positions in an order that the mode allows.

    Send k of a channel meets receive k of its other end: `check` has made sure that both name the same slot.
    """
    seconds = seconds_of(links, cost) if callable(cost) else cost
    if mode == Mode.BUFFERED and seconds is not None and (when := in_turn(links, seconds)) is not None:
        return when
    node_of, took = _merge(programs, links, mode, seconds)
    after: list[list[int]] = [[] for _ in took]
    sent_by: list[dict[int, int]] = [{} for _ in links]  # a receive -> the node whose end brings its slot
    for (sender, receiver, _), ends in () if mode == Mode.BLOCKING else channels(programs).items():
        for i, j in zip(*ends, strict=False):
            send, receive = node_of[sender][i], node_of[receiver][j]
            if mode == Mode.BUFFERED:
                after[send].append(receive)
            else:
                after[receive].append(send)
                sent_by[receiver][j] = send
    for nodes, linked, sent in zip(node_of, links, sent_by, strict=True):
        if mode == Mode.BUFFERED:
            _behind_lanes(nodes, linked, after)
            _behind_producers(nodes, linked, after)
        else:  # behind all that is issued before, its producers among it
            for previous, node in zip(nodes, nodes[1:]):
                if previous != node:
                    after[previous].append(node)
            for producers, node in zip(linked.producers, nodes, strict=True) if sent else ():
                for producer in producers:
                    if producer in sent:
                        after[sent[producer]].append(node)
    return _visit(node_of, took, after)


def _behind_lanes(nodes: Sequence[int], links: Links, after: list[list[int]]) -> None:
    """An instruction comes behind the one before it on its lane. A message is sent from where the computation
    is, after what is computed before it. And the host reads the result of CLIP before it issues anything
    else."""
    lanes = {form: (form.effect.lane, "compute" if form.item.op in MESSAGES else "CLIP")
             for form in dict.fromkeys(links.forms)}
    tails: dict[str, int] = {}
    for node, form in zip(nodes, links.forms, strict=True):
        lane, other = lanes[form]
        if lane in tails:
            after[tails[lane]].append(node)
        if other in tails:
            after[tails[other]].append(node)
        tails[lane] = node
        if form.item.op == Op.CLIP:
            tails["CLIP"] = node


def _behind_producers(nodes: Sequence[int], links: Links, after: list[list[int]]) -> None:
    for firsts, thens in links.pairs():
        for first, then in zip(firsts, thens, strict=True):
            after[nodes[first]].append(nodes[then])


def _merge(programs: Sequence[Program], links: Sequence[Links], mode: Mode,
           seconds: Seconds | None) -> tuple[list[list[int]], list[float]]:
    """Give each instruction a node, and each node its seconds. A collective over several positions is one
    node: it begins and ends everywhere together. In BLOCKING mode a SEND and its RECV are one node too.
    (Nobody comes to the nodes of instructions that share another one.)"""
    shared: dict[Meeting, int] = {}
    node_of: list[list[int]] = []
    took: list[float] = []
    for position, linked in enumerate(links):
        count = len(linked.forms)
        nodes = list(range(len(took), len(took) + count))
        took += seconds[position] if seconds is not None else repeat(0.0, count)
        for index, meeting in _meetings(position, linked, mode):
            node = nodes[index]
            nodes[index] = first = shared.setdefault(meeting, node)
            took[first] = max(took[first], took[node])
        node_of.append(nodes)
    return node_of, took


Meeting = tuple[object, int]  # what meets, and how often it has met so far


def _meetings(position: int, links: Links, mode: Mode) -> Iterator[tuple[int, Meeting]]:
    """(index, meeting) of the instructions of a position that begin and end with those of others."""
    keys = _keys(position, links, mode)
    counts = Counter[object]()
    for index, form in enumerate(links.forms):
        if form in keys:
            counts[keys[form]] += 1
            yield index, (keys[form], counts[keys[form]])


def _keys(position: int, links: Links, mode: Mode) -> dict[Form, object]:
    """Forms of instructions of a position that begin and end with those of others -> what meets there."""
    across = {group for group, row in GROUPS.items() if row.across_positions}
    keys: dict[Form, object] = {}
    for form in dict.fromkeys(links.forms):
        if mode == Mode.BLOCKING and form.item.op in MESSAGES:
            keys[form] = _channel(position, form.item)
        elif group := next((group for group in form.effect.groups if group in across), None):
            keys[form] = group
    return keys


def all_meet(links: Sequence[Links]) -> bool:
    """Whether nothing is stuck in BLOCKING mode, without a walk: a position stands still only where it meets
    others, and all that meet go on together. Then nothing is stuck in the other modes, where an instruction
    waits for earlier ones of its position and for the other ends of their messages. (False says nothing:
    positions may have missed each other by a count.)"""
    keys = [_keys(position, linked, Mode.BLOCKING) for position, linked in enumerate(links)]
    members = Counter(key for of_position in keys for key in set(of_position.values()))
    rows = [[of_position[form] for form in linked.forms if form in of_position]
            for of_position, linked in zip(keys, links, strict=True)]
    there: dict[object, list[int]] = {key: [] for key in members}  # positions that wait for others
    heads, ready = [0] * len(rows), list(range(len(rows)))
    while ready:
        position = ready.pop()
        row, head = rows[position], heads[position]
        while head < len(row):
            others = there[row[head]]
            if len(others) + 1 < members[row[head]]:
                others.append(position)
                break
            for other in others:
                heads[other] += 1
            ready += others
            others.clear()
            head += 1
        heads[position] = head
    return all(head == len(row) for head, row in zip(heads, rows, strict=True))


class _Place(NamedTuple):
    """Where positions wait for each other: a channel, or a group across positions."""

    members: int
    sent: deque[float]  # when the messages come that nobody has received yet
    waiting: dict[int, tuple[float, float]]  # position -> since when, and for how long its collective takes


def in_turn(links: Sequence[Links], seconds: Seconds) -> Walk | None:
    """The walk of BUFFERED without a graph: each position goes through its program until it comes to a
    message or a collective for which another position is not ready. None where some never end: there, what
    comes later in a program, on another lane, has to run first. (Programs that can run in BLOCKING mode end.)
    """
    # The inner loop sees every instruction of large plans: it is written out for speed.
    send, receive, clip = Op.SEND, Op.RECV, Op.CLIP
    starts, ends = ([list[float]() for _ in links] for _ in range(2))
    tails, left = _left(links, seconds)
    held: list[list[_Left]] = [[] for _ in links]  # the step at which a position waits
    met: dict[int, tuple[float, float]] = {}  # position -> begin and end of its collective
    ready = list(range(len(links)))
    while ready:
        position = ready.pop()
        start, end, last = starts[position], ends[position], tails[position]
        for step in chain(held[position], left[position]):
            (op, lane, place), takes, needs = step
            now = last[lane]
            for need in needs:
                if end[need] > now:
                    now = end[need]
            if place is None:
                then = now + takes
            elif op is send or op is receive:
                if last[0] > now:
                    now = last[0]
                if op is send:
                    place.sent.append(now + takes)
                    ready += place.waiting
                    place.waiting.clear()
                elif place.sent:
                    comes = place.sent.popleft()
                    now = comes if comes > now else now
                else:
                    place.waiting[position] = now, takes
                    held[position] = [step]
                    break
                then = now + takes
            else:  # a collective begins and ends everywhere together
                if position not in met:
                    place.waiting[position] = now, takes
                    if len(place.waiting) < place.members:
                        held[position] = [step]
                        break
                    now = max(since for since, _ in place.waiting.values())
                    then = now + max(each for _, each in place.waiting.values())
                    met |= dict.fromkeys(place.waiting, (now, then))
                    ready += [each for each in place.waiting if each != position]
                    place.waiting.clear()
                now, then = met.pop(position)
            start.append(now)
            end.append(then)
            last[lane] = then
            if op is clip:  # the host reads its result before it issues anything else
                last[:] = [max(each, then) for each in last]
        else:
            held[position] = []
    done = all(len(end) == len(linked.forms) for end, linked in zip(ends, links, strict=True))
    return Walk(starts, ends, []) if done else None


_Left = tuple[tuple[Op, int, _Place | None], float, list[int]]  # op, lane, place; seconds; producers


def _left(links: Sequence[Links], seconds: Seconds) -> tuple[list[list[float]], list[Iterator[_Left]]]:
    """Of each position: when its lanes end, of which lane 0 computes; its steps."""
    keys = [_keys(position, linked, Mode.BLOCKING) for position, linked in enumerate(links)]
    places = {key: _Place(count, deque(), {}) for key, count in
              Counter(key for of_position in keys for key in set(of_position.values())).items()}
    tails, left = [], []
    for linked, of_position, took in zip(links, keys, seconds, strict=True):
        lanes: dict[str, int] = {"compute": 0}
        steps = {form: (form.item.op, lanes.setdefault(form.effect.lane, len(lanes)),
                        places[of_position[form]] if form in of_position else None)
                 for form in dict.fromkeys(linked.forms)}
        tails.append([0.0] * len(lanes))
        left.append(zip(map(steps.__getitem__, linked.forms), took, linked.producers))
    return tails, left


def _visit(node_of: list[list[int]], took: list[float], after: list[list[int]]) -> Walk:
    """Topological visit with clocks. Nodes that are never visited form a cycle, or wait for one."""
    # The loops see every edge of large plans: they are written out for speed.
    waits = [0] * len(took)
    for then in chain.from_iterable(after):
        waits[then] += 1
    begin, end = [0.0] * len(took), [0.0] * len(took)
    ready = [node for node, count in enumerate(waits) if count == 0]
    while ready:
        node = ready.pop()
        now = end[node] = begin[node] + took[node]
        for then in after[node]:
            if begin[then] < now:
                begin[then] = now
            waits[then] -= 1
            if waits[then] == 0:
                ready.append(then)
    stuck = []
    for position, nodes in enumerate(node_of):
        first = next((index for index, node in enumerate(nodes) if waits[node]), None)
        if first is not None:
            stuck.append((position, first))
    return Walk([[begin[node] for node in nodes] for nodes in node_of],
                [[end[node] for node in nodes] for nodes in node_of], stuck)


def _channel(position: int, instruction: Instruction) -> tuple[int, int, str]:
    """(sender, receiver, act or grad) of a message."""
    if instruction.op == Op.SEND:
        return position, instruction.peer, instruction.kind
    return instruction.peer, position, instruction.kind


# (sender, receiver, act or grad) -> indices of the sends, and of the receives, in program order
Channels = dict[tuple[int, int, str], tuple[list[int], list[int]]]


def channels(programs: Sequence[Program]) -> Channels:
    """The channels of programs that run together."""
    ends: Channels = {}
    messages = frozenset(MESSAGES)
    for position, program in enumerate(programs):
        mine: dict[tuple[Op, int, str], list[int]] = {}
        for index, item in enumerate(program):
            if item.op in messages:
                key = item.op, item.peer, item.kind
                if key not in mine:
                    mine[key] = ends.setdefault(_channel(position, item), ([], []))[item.op == Op.RECV]
                mine[key].append(index)
    return ends
