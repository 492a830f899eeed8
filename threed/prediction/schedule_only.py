"""A bare pipeline, as in the tables of the zero-bubble paper: no model, only a schedule and times of stages.

Bubble rate (Qi et al. 2024): (cost - m (T_F + T_B + T_W)) / cost, where cost is the longest span of any
position, from its first task to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from threed.base.errors import InputError
from threed.base.quantity import parse_limit
from threed.features.pipeline.plan import communicate, expand
from threed.program.check import check_programs
from threed.program.entries import ComputeUnit
from threed.program.instruction import COMPUTE, PHASES, Instruction, Op
from threed.program.link import link
from threed.program.table import Table
from threed.program.walk import Mode, Walk, walk
from threed.schedules.auto import search
from threed.schedules.bound import Bound
from threed.schedules.complete import check_order
from threed.schedules.file import read_order
from threed.schedules.orders import SCHEDULES, Order
from threed.schedules.timed import StageTimes


class Times(NamedTuple):
    """Of all of a position's stages and one micro-batch, in any unit."""

    f: float
    b: float  # input half of backward
    w: float  # weights half
    comm: float = 0.0  # of a message


def parse_times(text: str) -> Times:
    """'f=1,b=1,w=1,comm=0' -> numbers; comm may be left out."""
    times: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            times[name.strip()] = float(value)
        except ValueError:
            raise InputError(f"--times: '{part}' is not name=number; write for example "
                             "f=18.5,b=18.1,w=9.3,comm=0.6") from None
    required = {"f", "b", "w"}
    if not required <= times.keys() <= required | {"comm"} or min(times.values()) < 0:
        raise InputError(f"--times={text}: give f, b (input half of backward), w (weights half) and, if any, "
                         "comm; none negative")
    return Times(**times)


class Choice(NamedTuple):
    name: str
    virtual: int  # stages a position
    place: tuple[int, ...]
    order: Order
    bound: Bound | None = None  # of a searched order: what none is below


def find(p: int, m: int, times: Times, virtual: int | None, limit: float | None,
         seconds: float | None) -> Choice:
    """`auto` for p positions and m micro-batches. `seconds`: how much longer to search."""
    def equal(place: Sequence[int]) -> StageTimes:
        return StageTimes.equal(len(place), (times.f, times.b, times.w), len(place) // p, times.comm)

    best, bound = search(p, m, equal, limit, virtual, seconds)
    return Choice(best.name, best.virtual, best.place, best.timed.order, bound)


def choose(schedule: str, p: int, m: int, virtual: int | None) -> Choice:
    """A named schedule, or a file's, for p positions and m micro-batches."""
    if schedule.startswith("file:"):
        order, place = read_order(Path(schedule.removeprefix("file:")), p)
        return Choice(schedule, len(place) // p, place, order)
    if schedule not in SCHEDULES:
        raise InputError(f"--schedule {schedule}: must be one of {', '.join(SCHEDULES)}, auto, file:PATH")
    known = SCHEDULES[schedule]
    v = known.virtual or virtual or 2
    if not (known.by_unit or known.takes(v if virtual is None else virtual)):
        has = known.virtual or "2 or more"
        raise InputError(f"--virtual-stages {virtual}: {schedule} has {has} a position")
    if not known.fills(p, m):
        raise InputError(f"--micro-batches {m}: {schedule} needs {known.least(p)} for {p} positions")
    return Choice(schedule, v, known.place(p, v), known.make(p, m, v))


@dataclass(frozen=True)
class BareStage:
    busy: float
    span: float  # from its first task to the end of its last
    peak_activations: float  # the most that it keeps, in micro-batches of its whole share


@dataclass(frozen=True)
class BarePrediction:
    """A bare pipeline's step, in the unit of its times."""

    schedule: str
    order: str
    pp: int
    micro_batches: int
    virtual_stages: int
    bubble_rate: float
    step_time: float
    stages: list[BareStage]
    bubble_rate_bound: float | None = None  # what no order is below; None: none was searched
    step_time_bound: float | None = None

    def document(self) -> dict[str, Any]:
        """As `threed predict --schedule ... --json` prints it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def predict_bare(schedule: str, p: int, m: int, times: Times, virtual: int | None = None,
                 limit: float | None = None, seconds: float | None = None) -> BarePrediction:
    """What `threed predict --schedule ...` prints. `limit`: how much a position may keep, in
    micro-batches of its whole share. `seconds`: how much longer `auto` searches."""
    if schedule == "auto":
        name, v, place, order, bound = find(p, m, times, virtual, limit, seconds)
    elif seconds is not None:
        raise InputError(f"--seconds {seconds:g}: only --schedule auto searches, and this is {schedule}")
    else:
        name, v, place, order, bound = choose(schedule, p, m, virtual)
        check_order(name, order, place, p, m)
    programs, table = bare_programs(order, place, m)
    # Tests check the named schedules; a check here would make a large prediction three times as slow.
    if name not in SCHEDULES:
        check_programs("train", programs, table)
    when = clock(programs, table, times, v)
    stages = _stages(programs, when, order, v)
    kept = max(stage.peak_activations for stage in stages)
    if limit is not None and kept > limit + 1e-9:
        raise InputError(f"{schedule} keeps {kept:g} micro-batches at its peak, above the limit of "
                         f"{limit:g}; use --schedule auto")
    cost, ideal = max(stage.span for stage in stages), m * (times.f + times.b + times.w)
    predicted = BarePrediction(schedule, name, p, m, v, _rate(cost, ideal), when.total_s, stages)
    if bound is None:
        return predicted
    # Sums of the same numbers in another order may differ in the last digit.
    return replace(predicted, bubble_rate_bound=_rate(min(cost, bound.span_s), ideal),
                   step_time_bound=min(when.total_s, bound.total_s))


def _rate(cost: float, ideal: float) -> float:
    return (cost - ideal) / cost if cost else 0.0


def show(predicted: BarePrediction) -> str:
    lines = [f"{predicted.schedule} ({predicted.order}, {predicted.virtual_stages} stages a position): "
             f"bubble rate {predicted.bubble_rate:.4f}, step time {predicted.step_time:.3f}"]
    if predicted.bubble_rate_bound is not None:
        lines.append(f"no order is below: bubble rate {predicted.bubble_rate_bound:.4f}, step time "
                     f"{predicted.step_time_bound:.3f}")
    for position, row in enumerate(predicted.stages):
        lines.append(f"pp{position}".ljust(6) + f"busy {row.busy:.3f}  span {row.span:.3f}  "
                     f"keeps {row.peak_activations:g}")
    return "\n".join(lines)


def parse_limit_of_bare(text: str, p: int, m: int) -> float:
    """'2x' -> how much a position may keep, in micro-batches of its whole share."""
    multiple, size = parse_limit(text)
    if multiple is None:
        raise InputError(f"--activation-limit {text}: a bare pipeline has no sizes ({size} bytes of what?); "
                         "give a multiple of 1F1B's peak such as 2x, or a CONFIG")
    return multiple * min(p, m)


def bare_programs(order: Order, place: tuple[int, ...],
                  m: int) -> tuple[list[tuple[Instruction, ...]], Table]:
    """An order as checked programs of a model with one unit a stage and no parameters."""
    silent: dict[str, dict[str, int]] = {phase: {} for phases in PHASES.values() for phase in phases}
    last = len(place) - 1
    units = tuple(ComputeUnit(f"stage {stage}", (stage, stage + 1), stage, (), (), 1, 1, silent,
                              loss=stage == last)
                  for stage in range(len(place)))
    table = Table(units, {}, place, m, act_bytes=1)
    programs = [(*program, Instruction(Op.CLIP)) for program in communicate(expand(order, table), table)]
    return programs, table


def clock(programs: list[tuple[Instruction, ...]], table: Table, times: Times, v: int) -> Walk:
    """Walk the programs with these times: a stage takes 1/v of a position's."""
    costs = {Op.FORWARD: times.f / v, Op.BACKWARD: (times.b + times.w) / v,
             Op.BACKWARD_INPUT: times.b / v, Op.BACKWARD_WEIGHT: times.w / v, Op.SEND: times.comm}
    links = [link(program, table, position, set()) for position, program in enumerate(programs)]
    return walk(programs, links, Mode.BUFFERED, lambda _, item: costs.get(item.op, 0.0))


def _stages(programs: list[tuple[Instruction, ...]], when: Walk, order: Order,
            v: int) -> list[BareStage]:
    rows = []
    for position, program in enumerate(programs):
        spans = [(when.start[position][i], when.end[position][i])
                 for i, item in enumerate(program) if item.op in COMPUTE]
        kept = most = 0
        for task in order[position]:
            kept += {"F": 1, "I": 0}.get(task.kind, -1)
            most = max(most, kept)
        rows.append(BareStage(sum(end - start for start, end in spans), spans[-1][1] - spans[0][0], most / v))
    return rows
