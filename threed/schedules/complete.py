"""Whether an order has each task once, at its stage's position, and a backward behind its forward. Orders of
users may lack one, which a plan would show only by what waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from threed.base.errors import PlanError
from threed.base.quantity import many

_KINDS = {"F": "forward", "B": "backward", "I": "input half of a backward",
          "W": "weights' half of a backward"}


def check_order(name: str, order: Any, place: Sequence[int], p: int, m: int) -> None:
    """Raise PlanError, which names a schedule and the first thing that is wrong with its order, or with
    `place`, the position of each of its stages, for p positions and m micro-batches."""
    wrong = next(_wrong(order, place, p, m), None)
    if wrong is not None:
        raise PlanError(f"schedule {name}: {wrong}")


def _wrong(order: Any, place: Sequence[int], p: int, m: int) -> Iterator[str]:
    """Each thing that is wrong. Later ones are asked for where there is none before."""
    if sorted(set(place)) != list(range(p)):
        yield (f"its stages are on the positions {', '.join(map(str, place))}, and each of 0 to {p - 1} must "
               "have one")
    if not isinstance(order, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in order):
        yield "its order must be a list of tasks for each position"
    elif len(order) != p:
        yield f"its order has tasks for {many(len(order), 'position')}, and there are {p}"
    for position, tasks in enumerate(order):
        yield from (text for task in tasks for text in _misplaced(task, position, place, m))
        yield from _miscounted(tasks, position, place, m)
        yield from _backwards_first(tasks, position)


def _misplaced(task: Any, position: int, place: Sequence[int], m: int) -> Iterator[str]:
    if not (isinstance(task, tuple) and len(task) == 3 and task[0] in _KINDS
            and all(type(number) is int for number in task[1:])):
        yield (f"{task!r} on position {position} is no task: write Task(kind, stage, micro-batch), with a "
               f"kind of {', '.join(_KINDS)} and whole numbers")
        return
    kind, stage, k = task
    if not 0 <= stage < len(place):
        yield f"{_named(kind, k, stage, position)}: there is no such stage, only 0 to {len(place) - 1}"
    elif place[stage] != position:
        yield f"{_named(kind, k, stage, position)}: stage {stage} is on position {place[stage]}"
    elif not 0 <= k < m:
        yield f"{_named(kind, k, stage, position)}: there is no such micro-batch, only 0 to {m - 1}"


def _miscounted(tasks: Sequence[tuple[str, int, int]], position: int, place: Sequence[int],
                m: int) -> Iterator[str]:
    count = Counter(tasks)
    for (kind, stage, k), times in count.items():
        if times > 1:
            yield f"{_named(kind, k, stage, position)}: it is there {times} times"
        elif kind in "IW" and ("B", stage, k) in count:
            yield (f"{_named(kind, k, stage, position)}: the whole backward is there, too; B is both halves, "
                   "I and W are one each")
    for stage in (stage for stage, where in enumerate(place) if where == position):
        for k in range(m):
            whole = not any((half, stage, k) in count for half in "IW")
            yield from (f"no {_named(kind, k, stage, position)}" for kind in ("FB" if whole else "FIW")
                        if (kind, stage, k) not in count)


def _backwards_first(tasks: Sequence[tuple[str, int, int]], position: int) -> Iterator[str]:
    done = set[tuple[str, int, int]]()
    for kind, stage, k in tasks:
        needed = {"F": kind, "W": "I"}.get(kind, "F")
        if needed != kind and (needed, stage, k) not in done:
            yield f"{_named(kind, k, stage, position)}: it comes before the {_KINDS[needed]}"
        done.add((kind, stage, k))


def _named(kind: str, k: int, stage: int, position: int) -> str:
    return f"{_KINDS[kind]} of micro-batch {k} on stage {stage} (position {position})"
