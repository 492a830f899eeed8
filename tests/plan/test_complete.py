"""An order that lacks a task, or has one in the wrong place, is refused by the name of the task."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import threed
from threed.base.errors import PlanError
from threed.schedules.complete import check_order
from threed.schedules.orders import SCHEDULES, Order, Schedule, Task, one_f_one_b

Edit = Callable[[Order], object]


def _swap(tasks: list[Task], one: Task, other: Task) -> None:
    i, j = tasks.index(one), tasks.index(other)
    tasks[i], tasks[j] = other, one


def _put(order: Order, old: Task, *new: Task) -> None:
    tasks = order[old.stage]
    at = tasks.index(old)
    tasks[at:at + 1] = new


LAST = Task("B", 1, 3)
EDITS: dict[str, tuple[Edit, str]] = {
    "no last backward": (lambda o: o[1].pop(), "no backward of micro-batch 3 on stage 1 (position 1)"),
    "no backward that none waits for": (lambda o: o[0].pop(), "no backward of micro-batch 3 on stage 0 (pos"),
    "no first forward": (lambda o: o[1].pop(0), "no forward of micro-batch 0 on stage 1 (position 1)"),
    "nothing on a position": (lambda o: o[1].clear(), "no forward of micro-batch 0 on stage 1 (position 1)"),
    "a forward twice": (lambda o: o[0].insert(1, o[0][0]), "forward of micro-batch 0 on stage 0 (position 0)"
                        ": it is there 2 times"),
    "a backward twice": (lambda o: o[1].append(LAST), "backward of micro-batch 3 on stage 1 (position 1): it "
                         "is there 2 times"),
    "a stage of another position": (lambda o: o[0].append(LAST), "on stage 1 (position 0): stage 1 is on "
                                    "position 1"),
    "no such stage": (lambda o: o[0].append(Task("F", 7, 0)), "there is no such stage, only 0 to 1"),
    "a stage below 0": (lambda o: o[0].append(Task("F", -1, 0)), "there is no such stage, only 0 to 1"),
    "no such micro-batch": (lambda o: _put(o, LAST, Task("B", 1, 4)), "backward of micro-batch 4 on stage 1 "
                            "(position 1): there is no such micro-batch, only 0 to 3"),
    "backward first": (lambda o: _swap(o[1], Task("F", 1, 1), Task("B", 1, 1)), "backward of micro-batch 1 "
                       "on stage 1 (position 1): it comes before the forward"),
    "weights' half first": (lambda o: _put(o, LAST, Task("W", 1, 3), Task("I", 1, 3)), "weights' half of a "
                            "backward of micro-batch 3 on stage 1 (position 1): it comes before the input"),
    "no weights' half": (lambda o: _put(o, LAST, Task("I", 1, 3)), "no weights' half of a backward of micro-"
                         "batch 3 on stage 1 (position 1)"),
    "no input half": (lambda o: _put(o, LAST, Task("W", 1, 3)), "no input half of a backward of micro-batch "
                      "3 on stage 1 (position 1)"),
    "a backward and its half": (lambda o: o[1].append(Task("W", 1, 3)), "the whole backward is there, too"),
    "no such kind": (lambda o: o[0].append(Task("f", 0, 0)), "is no task"),
    "a text for a number": (lambda o: o[0].append(Task("F", 0, "0")), "is no task"),  # pyright: ignore
    "a position too many": (lambda o: o.append([]), "tasks for 3 positions, and there are 2"),
    "a position too few": (lambda o: o.pop(), "tasks for 1 position, and there are 2"),
    "no list": (lambda o: o.append(None), "must be a list of tasks for each position"),  # pyright: ignore
}


@pytest.mark.parametrize("edit, message", EDITS.values(), ids=EDITS)
def test_what_is_wrong_with_an_order_is_named(edit: Edit, message: str, monkeypatch: pytest.MonkeyPatch):
    def make(p: int, m: int, v: int = 1) -> Order:
        order = one_f_one_b(p, m)
        edit(order)
        return order

    monkeypatch.setitem(SCHEDULES, "mine", Schedule(make))
    config = threed.load("configs/toy.yaml", ["parallel.schedule=mine"])
    with pytest.raises(PlanError) as caught:
        threed.plan(config)
    assert str(caught.value).startswith("schedule mine: ") and message in str(caught.value)


@pytest.mark.parametrize("place", [(0,), (0, 0), (0, 2), (1, 2)])
def test_each_position_has_a_stage(place: tuple[int, ...]):
    with pytest.raises(PlanError, match="each of 0 to 1 must have one"):
        check_order("mine", one_f_one_b(2, 4), place, 2, 4)


def test_tasks_in_a_circle_are_still_a_circle(monkeypatch: pytest.MonkeyPatch):
    def make(p: int, m: int, v: int = 1) -> Order:
        order = one_f_one_b(p, m)
        _swap(order[0], Task("B", 0, 0), Task("F", 0, 1))
        _swap(order[1], Task("B", 1, 0), Task("F", 1, 1))
        return order

    monkeypatch.setitem(SCHEDULES, "mine", Schedule(make))
    with pytest.raises(PlanError, match="each of these waits for another: pp0 BACKWARD u4 m0; pp1 FORWARD"):
        threed.plan(threed.load("configs/toy.yaml", ["parallel.schedule=mine"]))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p, m", [(1, 2), (2, 4), (4, 8), (3, 7)])
def test_the_schedules_are_complete(name: str, p: int, m: int):
    schedule = SCHEDULES[name]
    v = schedule.virtual or 2
    check_order(name, schedule.order(p, m, v, pair=schedule.paired is not False), schedule.place(p, v), p, m)
