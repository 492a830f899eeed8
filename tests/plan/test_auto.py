"""`auto`: what it promises, what it reaches, and the bound that is printed beside it."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.plan.test_docs import run
from threed.base.errors import InputError
from threed.config.load import load
from threed.planner import make_plan
from threed.prediction.schedule_only import Times, parse_times, predict_bare
from threed.schedules import rule
from threed.schedules.auto import repeat, search
from threed.schedules.bound import Bound, bound
from threed.schedules.explore import Trial
from threed.schedules.orders import SCHEDULES, Order, Task, can_run, line, needs, vee
from threed.schedules.rule import OrderRule
from threed.schedules.timed import StageTimes, play

UNIT = Times(1.0, 1.0, 1.0)
EPS = 1e-6  # relative


def auto(p: int, m: int, times: Times, limit: float | None) -> tuple[Trial, Bound]:
    """`limit` in multiples of 1F1B's peak."""
    whole = times.f, times.b, times.w
    return search(p, m, lambda place: StageTimes.equal(len(place), whole, len(place) // p, times.comm),
                  limit and limit * min(p, m))


# ---------------------------------------------------------------- what is promised


def draw(rng: random.Random, p: int, m: int) -> tuple[int, int, Times, float | None]:
    """A bare pipeline of at most p positions and m micro-batches; most are small, since time is short."""
    p, m = 1 + int(p * rng.random() ** 1.5), 1 + int(m * rng.random() ** 2)
    times = Times(rng.uniform(0.5, 3), rng.uniform(0.5, 3), rng.uniform(0.2, 3),
                  rng.choice((0.0, 0.0, rng.uniform(0, 0.5))))
    limit = rng.choice((None, 0.5, 1.0, 1.5, 2.0, rng.uniform(0.3, 3)))
    return p, m, times, limit if limit is None else max(limit, 1 / min(p, m))


def check_promises(seed: int, p: int, m: int) -> tuple[bool, bool]:
    """Never worse than a named schedule, than with a lower limit, than with a divisor of the micro-batches.
    Returns whether the span's rate was worse than a named schedule's, and whether the step's rate was worse
    than with fewer micro-batches where no bound explains it."""
    rng = random.Random(seed)
    p, m, times, limit = draw(rng, p, m)
    best, least = auto(p, m, times, limit)
    total_s, span_s = best.timed.total_s, best.timed.span_s
    assert can_run(best.timed.order) and len(best.timed.order) == p
    assert least.total_s <= total_s * (1 + EPS) and least.span_s <= span_s * (1 + EPS)
    assert limit is None or best.timed.peak <= limit * min(p, m) * best.virtual + EPS
    worse = False
    for name, schedule in SCHEDULES.items():
        v = schedule.virtual or 2
        if m >= schedule.least(p):
            place = schedule.place(p, v)
            named = play(schedule.make(p, m, v), place, StageTimes.equal(
                len(place), (times.f, times.b, times.w), v, times.comm))
            if limit is None or named.peak <= limit * min(p, m) * v + EPS:
                assert total_s <= named.total_s * (1 + EPS), (seed, name)
                worse |= span_s > named.span_s * (1 + EPS)
    if limit is not None:
        lower = rng.uniform(1 / min(p, m), limit)
        assert total_s <= auto(p, m, times, lower)[0].timed.total_s * (1 + EPS), (seed, lower)
    fewer = rng.choice([d for d in range(1, m + 1) if m % d == 0])
    same = None if limit is None else limit * min(p, m) / min(p, fewer)
    assert total_s / m <= auto(p, fewer, times, same)[0].timed.total_s / fewer * (1 + EPS), (seed, fewer)
    fewer = rng.randrange(1, m + 1)
    same = None if limit is None else limit * min(p, m) / min(p, fewer)
    other = auto(p, fewer, times, same)[0].timed.total_s / fewer
    return worse, total_s / m > other * (1 + EPS) and least.total_s / m <= other


@pytest.mark.parametrize("seed", range(4))
def test_promises(seed):
    check_promises(seed, 6, 16)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_many_promises(part):
    """2,000 in all."""
    found = [check_promises(seed, 12, 64) for seed in range(1000 + 50 * part, 1050 + 50 * part)]
    print(part, sum(worse for worse, _ in found), sum(worse for _, worse in found))


def test_three_take_as_long_as_four():
    """Why nothing is promised for any smaller number of micro-batches: with memory for two, no order of three
    has as small a rate as an order of two."""
    times = StageTimes.equal(8, (1.0, 1.0, 1.0), 1)
    two = search(8, 2, lambda place: times if len(place) == 8 else None, 2.0, 1)[0]
    assert bound(line(8, 1), times, 3, 2).span_s / 3 > two.timed.span_s / 2 * 1.05


def test_close_times():
    """Times that hardly differ give rates that hardly differ."""
    rates = []
    for text in ("f=18.522,b=18.086,w=9.337,comm=0.601", "f=18.513,b=18.086,w=9.331,comm=0.626"):
        rates.append(predict_bare("auto", 8, 24, parse_times(text), None, 16).bubble_rate)
    assert max(rates) < 0.01


def test_repeat():
    order = [[Task("F", 0, 0), Task("B", 0, 0)]]
    assert repeat(order, 1, 2) == [[Task("F", 0, 0), Task("B", 0, 0), Task("F", 0, 1), Task("B", 0, 1)]]


def test_the_same_each_time():
    """No clock and no chance decides, unless a time is given."""
    times = Times(1.3, 1.7, 0.9, 0.1)
    assert predict_bare("auto", 3, 7, times, None, 3) == predict_bare("auto", 3, 7, times, None, 3)


# ---------------------------------------------------------------- what is reached


def test_less_memory_than_1f1b():
    """With half of 1F1B's memory and equal times: at most v-min's rate, which is 0.16."""
    assert predict_bare("auto", 8, 24, UNIT, None, 4).bubble_rate <= 0.16


def test_more_seconds():
    """A search that goes on is no worse, and ends at its time, or at the bound."""
    times = Times(1.0, 1.1, 0.7, 0.05)
    default = predict_bare("auto", 4, 6, times, None, 3)
    begun = time.monotonic()
    longer = predict_bare("auto", 4, 6, times, None, 3, 0.5)
    assert longer.step_time <= default.step_time and time.monotonic() - begun < 30
    begun = time.monotonic()
    assert predict_bare("auto", 1, 4, UNIT, None, None, 100.0).bubble_rate == 0
    assert time.monotonic() - begun < 50


def test_auto_in_a_plan():
    """`auto` keeps to its limit, in micro-batches and in bytes, on a real table; a named schedule above it is
    refused."""
    base = ["model.layers=14", "parallel.pp=4", "train.global_batch_size=12"]
    for limit in ("1x", "2x", "2MiB", "6MiB"):
        make_plan(load(None, [*base, "parallel.schedule=auto", f"parallel.activation_limit={limit}",
                              "model.hidden=16"]))
    with pytest.raises(InputError, match=r"keeps 12 micro-batches a rank at its peak, above "
                                         r"parallel\.activation_limit=2x"):
        make_plan(load(None, [*base, "parallel.schedule=gpipe", "parallel.activation_limit=2x"]))
    with pytest.raises(InputError,
                       match=r"of activations at its peak, above parallel\.activation_limit=1KiB"):
        make_plan(load(None, [*base, "parallel.activation_limit=1KiB"]))


@pytest.mark.parametrize("command, message", [
    ("--schedule zb-v --seconds 1", "--seconds 1: only --schedule auto searches, and this is zb-v"),
    ("--schedule auto --activation-limit 0.1x", "keeps at most 0.4 micro-batches a position"),
    ("--schedule v-half --activation-limit 0.5x", "v-half keeps 3 micro-batches at its peak, above the limit "
                                                  "of 2; use --schedule auto"),
    ("--schedule v-min --virtual-stages 3", "--virtual-stages 3: v-min has 2 a position"),
    ("--seconds 1 configs/toy.yaml", "CONFIG and --seconds exclude each other")])
def test_bad_input(command, message):
    assert message in run(f"threed predict {command}")


def test_seconds_are_not_negative():
    from typer.testing import CliRunner

    from threed.cli.main import app

    done = CliRunner().invoke(app, ["predict", "--schedule", "auto", "--seconds", "-1"])
    assert done.exit_code == 2 and "Invalid value for '--seconds'" in done.output


# ---------------------------------------------------------------- the bound


def random_times(rng: random.Random, stages: int) -> StageTimes:
    """Some halves of backward take no time at all, as where a layer has no weights."""
    rows = [[rng.choice((0.0, 1.0, rng.uniform(0.1, 3))) for _ in range(stages)] for _ in range(3)]
    return StageTimes(*rows, message=rng.choice((0.0, rng.uniform(0, 1))))


def random_order(rng: random.Random, place: tuple[int, ...], m: int) -> Order:
    """Any order that can run: of the tasks that can be next, one is drawn."""
    left = {Task(kind, stage, k) for kind in "FIW" for stage in range(len(place)) for k in range(m)}
    order: Order = [[] for _ in range(max(place) + 1)]
    lean = {kind: rng.uniform(0.05, 1) for kind in "FIW"}
    while left:
        ready = sorted(task for task in left if not any(need in left for need in needs(task, len(place) - 1)))
        task = rng.choices(ready, [lean[task.kind] for task in ready])[0]
        left.remove(task)
        order[place[task.stage]].append(task)
    return order


def check_bound(order: Order, place: tuple[int, ...], times: StageTimes, m: int, note: Any) -> None:
    timed = play(order, place, times)
    for room in (timed.peak, timed.peak + 1, None):
        least = bound(place, times, m, room)
        assert least.span_s <= timed.span_s * (1 + EPS) + EPS, (note, room)
        assert least.total_s <= timed.total_s * (1 + EPS) + EPS, (note, room)


@pytest.mark.parametrize("seed", range(10))
def test_no_order_is_below_the_bound(seed):
    """Named schedules, orders of random rules, and random orders, for uneven times."""
    rng = random.Random(seed)
    for case in range(25):
        p, m = rng.randrange(1, 6), rng.randrange(1, 8)
        for name, schedule in SCHEDULES.items():
            v = schedule.virtual or 2
            if m >= schedule.least(p):
                place = schedule.place(p, v)
                times = random_times(rng, len(place))
                check_bound(schedule.make(p, m, v), place, times, m, (name, seed, case))
        for place in (line(p, 1), vee(p, 2), line(p, 2)):
            times, v = random_times(rng, len(place)), len(place) // p
            check_bound(random_order(rng, place, m), place, times, m, (seed, case))
            drawn = OrderRule(tuple(rng.random() for _ in range(2 * v)), (0.0,) * (2 * v - 1),
                              rng.choice((0.0, 1.0)), rng.random(), rng.choice((-1.0, rng.random())))
            order = rule.play(drawn, place, times, m, rng.randrange(v, m * v + 1))
            if order is not None:
                again = play(order.order, place, times)
                assert again.total_s == pytest.approx(order.total_s) and again.peak == order.peak
                check_bound(order.order, place, times, m, (drawn, seed, case))


def test_the_bound_is_reached():
    """It says something: schedules without a bubble reach it, and one micro-batch alone does."""
    times = StageTimes.equal(16, (1.0, 1.0, 1.0), 2)
    order = play(SCHEDULES["zb-v"].make(8, 24, 2), vee(8, 2), times)
    assert bound(vee(8, 2), times, 24, 16) == Bound(order.span_s, order.total_s) == Bound(72.0, 75.5)
    alone = StageTimes.equal(4, (1.0, 2.0, 0.5), 1, 0.25)
    order = play(SCHEDULES["zb-h1"].make(4, 1, 1), line(4, 1), alone)
    assert bound(line(4, 1), alone, 1, 1) == Bound(order.span_s, order.total_s)
    # with memory for one, micro-batches follow each other
    assert bound(line(4, 1), alone, 3, 1).span_s == pytest.approx(3 * order.span_s)
