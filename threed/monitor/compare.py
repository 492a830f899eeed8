"""Compare: what a run measured beside what walking its plan predicts, and where each rank's time went.

The measured steps are the last ten traced ones, without the first step of a process; of these the middle half
by step time, so that one slow step does not count. The prediction walks the plan with the mean costs of
instructions in the same steps. A difference is time that the walk takes to be zero: communication and the
host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from threed.base.axes import AXES, QUIET
from threed.base.errors import InputError
from threed.base.quantity import many, show_seconds
from threed.base.texttable import render
from threed.monitor.attribute import BESIDE, CAUSES, attribute, parts, shown_causes
from threed.monitor.traces import RankTrace, RunTrace, read_run
from threed.planner import analyse
from threed.planner.from_config import CONFIG, load_config
from threed.program.analysis import Analysis
from threed.program.in_words import unit_words
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.plan import Plan
from threed.program.simulate import predict
from threed.program.trace import Ran, Trace, Wait
from threed.program.walk import Walk

MOST_STEPS = 10
Row = dict[str, float]


# ---------------------------------------------------------------- measured | predicted


@dataclass(frozen=True)
class Seconds:
    predicted: float
    measured: float


@dataclass(frozen=True)
class UnitSeconds:
    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Compared:
    """Where the time of a run's steps went: the document of `threed compare --json`."""

    run: str
    digest: str
    steps: list[int]
    notes: list[str]  # what the trace leaves out
    step: Seconds
    stages: list[dict[str, Row]]  # predicted and measured, by position: the step, its causes, the bubble
    ranks: list[Row]  # number, coordinate, the step and its causes
    offload: dict[str, Row]  # of each lane of it, seconds a step that it worked, and that ranks waited for it
    ops: dict[str, Seconds]
    lanes: dict[str, Seconds]
    units: dict[str, UnitSeconds]


def compare(run: Path) -> Compared:
    """Raises InputError where no step was traced, or of another plan."""
    traced = read_run(run)
    analysis = analyse(load_config(run))
    plan = analysis.plan
    if analysis.digest != traced.digest:
        raise InputError(f"{run}: the trace is of plan {traced.digest}, but {CONFIG} makes plan "
                         f"{analysis.digest}: the run was started with another config, or by another version "
                         "of threed, and no step of it was traced since")
    chosen = _choose(traced)
    programs = plan.programs["train"]
    traces = [[rank.trace(step) for step in chosen] for rank in traced.ranks]
    clips = [min(parts(of_rank[k], rank.program)["clip"] for rank, of_rank in zip(traced.ranks, traces))
             for k in range(len(chosen))]
    ranks = [_attribute_rank(rank, of_rank, clips) for rank, of_rank in zip(traced.ranks, traces)]
    prediction = predict(analysis, mean_costs(traced.ranks, traces, clips))
    walked = [_as_trace(analysis, prediction.walk, position) for position in range(len(programs))]
    stages = [{"predicted": row, "measured": _with_bubble(
                  _mean([rank for rank in ranks if rank["pp"] == position], ("step", *CAUSES)))}
              for position, row in enumerate(_attribute_walk(plan, walked, prediction.step_s))]
    lanes = {rank.here.position: rank.lanes for rank in traced.ranks}

    def both(group: Callable[[Trace, Sequence[Instruction], Sequence[str]], Row],
             over_all: bool = True) -> dict[str, Seconds]:
        measured = _average([_average([group(trace, rank.program, rank.lanes) for trace in of_rank])
                             for rank, of_rank in zip(traced.ranks, traces)], over_all)
        predicted = _average([group(trace, program, lanes[position])
                              for position, (trace, program) in enumerate(zip(walked, programs))], over_all)
        return {name: Seconds(predicted.get(name, 0.0), measured.get(name, 0.0))
                for name in dict.fromkeys((*predicted, *measured))}

    table = plan.table
    names = {**{f"u{index}": unit.name for index, unit in enumerate(table.units)},
             **{f"p{index}": f"{unit_words(unit)}, STEP" for index, unit in table.parameters.items()}}
    units = both(_by_unit, over_all=False)  # a unit's time is that of a rank that holds it
    step_s = sum(max(of_rank[k].total_s for of_rank in traces) for k in range(len(chosen))) / len(chosen)
    return Compared(
        str(run), analysis.digest, chosen, traced.notes, Seconds(prediction.step_s, step_s), stages, ranks,
        _offload(traced.ranks, traces), both(_by_op), both(_by_lane),
        {name: UnitSeconds(text, units[name].predicted, units[name].measured)
         for name, text in names.items() if name in units})


def _offload(ranks: Sequence[RankTrace], traces: Sequence[Sequence[Trace]]) -> dict[str, Row]:
    """Means of all ranks."""
    used = [lane for lane in BESIDE if any(lane in rank.lanes for rank in ranks)]
    count = sum(map(len, traces))
    rows: dict[str, Row] = {lane: {"worked": 0.0, "waited": 0.0} for lane in used}
    for rank, of_rank in zip(ranks, traces, strict=True):
        for trace in of_rank:
            for index, _, ran_s in trace.ran:
                rows[rank.lanes[index]]["worked"] += ran_s / count
            for _, source, wait_s in trace.waits:
                if source >= 0 and rank.lanes[source] in rows:
                    rows[rank.lanes[source]]["waited"] += wait_s / count
    return rows


def _choose(traced: RunTrace) -> list[int]:
    cold = set().union(*(rank.first_steps for rank in traced.ranks))
    warm = [step for step in traced.steps if step not in cold] or traced.steps
    last = warm[-MOST_STEPS:]
    slowest = {step: max(rank.trace(step).total_s for rank in traced.ranks) for step in last}
    aside = len(last) // 4
    return sorted(sorted(last, key=lambda step: slowest[step])[aside:len(last) - aside])


def typical_step(traced: RunTrace) -> int:
    """The traced step whose time is the median of those that `compare` takes."""
    chosen = sorted(_choose(traced), key=lambda step: max(rank.trace(step).total_s for rank in traced.ranks))
    return chosen[len(chosen) // 2]


def mean_costs(ranks: Sequence[RankTrace], traces: Sequence[Sequence[Trace]],
               clips: Sequence[float]) -> dict[tuple[int, Op, int], float]:
    """Mean seconds of (position, op, unit) over ranks, steps and micro-batches. CLIP's are those of the last
    rank to arrive."""
    sums: dict[tuple[int, Op, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rank, of_rank in zip(ranks, traces):
        for trace in of_rank:
            for item, took, lane in zip(rank.program, trace.took(), rank.lanes, strict=True):
                if item.op in COMPUTE or (item.op == Op.STEP and not (item.part and lane == "host")):
                    pair = sums[rank.here.position, item.op, item.unit]
                    pair[0] += took
                    pair[1] += 1
    costs = {key: total / count for key, (total, count) in sums.items()}
    return costs | {(rank.here.position, Op.CLIP, -1): sum(clips) / len(clips) for rank in ranks}


def _attribute_rank(rank: RankTrace, traces: Sequence[Trace], clips: Sequence[float]) -> Row:
    rows = [{"step": trace.total_s, **attribute(parts(trace, rank.program), clip_s, trace.total_s)}
            for trace, clip_s in zip(traces, clips, strict=True)]
    return {"rank": rank.rank, **rank.here.on, **_mean(rows, ("step", *CAUSES))}


def attribute_walk(analysis: Analysis, walk: Walk) -> list[Row]:
    """Where the time of a walked train step goes: a row a position, with the step, its causes and the
    bubble."""
    plan = analysis.plan
    walked = [_as_trace(analysis, walk, position) for position in range(len(plan.programs["train"]))]
    return _attribute_walk(plan, walked, walk.total_s)


def _attribute_walk(plan: Plan, walked: Sequence[Trace], step_s: float) -> list[Row]:
    all_parts = [parts(*pair) for pair in zip(walked, plan.programs["train"], strict=True)]
    clip_s = min(each["clip"] for each in all_parts)
    return [_with_bubble({"step": step_s, **attribute(each, clip_s, step_s)}) for each in all_parts]


def _as_trace(analysis: Analysis, walk: Walk, position: int) -> Trace:
    """A walked program as a trace: the compute lane's instructions follow one another, and wait for the other
    lanes."""
    program, links = analysis.plan.programs["train"][position], analysis.run_links("train", position)
    trace, last = Trace("train"), 0.0
    for index, item in enumerate(program):
        start, end = walk.start[position][index], walk.end[position][index]
        if links.effects[index].lane == "compute":
            source = max(links.producers[index], key=lambda i: walk.end[position][i], default=-1)
            # The walk starts CLIP once for all positions; a rank arrives when its own inputs are ready.
            arrived = start
            if item.op == Op.CLIP:
                arrived = max(last, walk.end[position][source] if source >= 0 else 0.0)
            if arrived > last and source >= 0:
                trace.waits.append(Wait(index, source, arrived - last))
            issued, start, last = last, arrived, end
        else:  # beside compute
            trace.ran += [Ran(index, start, end - start)] if end > start else []
            issued, end = start, start
        trace.issued.append(issued)
        trace.started.append(start)
        trace.ended.append(end)
    trace.total_s = trace.ended[-1]
    return trace


# ---------------------------------------------------------------- grouping


def _by_op(trace: Trace, program: Sequence[Instruction], _: Sequence[str]) -> Row:
    seconds: Row = defaultdict(float)
    for index, item in enumerate(program):
        seconds[str(item.op)] += trace.ended[index] - trace.started[index]
    return seconds


def _by_lane(trace: Trace, program: Sequence[Instruction], lanes: Sequence[str]) -> Row:
    """Time in a lane's instructions and in waiting for them. `recv 0 act` and `recv 1 act` are both `recv
    act`."""
    names = [" ".join(word for word in lane.split() if not word.isdecimal()) for lane in lanes]
    seconds: Row = defaultdict(float)
    for index in range(len(program)):
        seconds[names[index]] += trace.ended[index] - trace.started[index]
    for _, source, wait_s in trace.waits:
        if source >= 0:
            seconds[names[source]] += wait_s
    return seconds


def _by_unit(trace: Trace, program: Sequence[Instruction], _: Sequence[str]) -> Row:
    seconds: Row = defaultdict(float)
    for item, took in zip(program, trace.took(), strict=True):
        if item.op in COMPUTE or item.op == Op.STEP:
            seconds[f"{'p' if item.op == Op.STEP else 'u'}{item.unit}"] += took
    return seconds


def _mean(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> Row:
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _average(rows: Sequence[Row], over_all: bool = True) -> Row:
    """The mean of each key, over all rows or over those that have it."""
    means = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        means[name] = sum(values) / (len(rows) if over_all else len(values))
    return means


def _with_bubble(row: Row) -> Row:
    return {**row, "bubble": 1.0 - (row["compute"] + row["optimizer"]) / (row["step"] or 1.0)}


# ---------------------------------------------------------------- as text

HEADS = {name: name.replace("_", " ") for name in ("step", *CAUSES)}
MOST_RANKS = 64


def show(compared: Compared, columns: int | None = None) -> str:
    """As text. `columns`: of a terminal, if tables are to fit."""
    step, ranks = compared.step, compared.ranks
    axes = [axis for axis in AXES if axis not in QUIET or any(row[axis] for row in ranks)]
    shown = shown_causes([*ranks, *(row for stage in compared.stages for row in stage.values())])
    heads = {name: HEADS[name] for name in ("step", *shown)}
    error = step.predicted / step.measured - 1.0 if step.measured else 0.0
    lines = [f"{compared.run}, plan {compared.digest}, step{'s' if len(compared.steps) > 1 else ''} "
             + ", ".join(map(str, compared.steps)),
             f"{show_seconds(step.measured)} a step measured, {show_seconds(step.predicted)} "
             f"predicted, {abs(error):.1%} {'more' if error > 0 else 'less'}",
             "predicted is when instructions run and what waits; the times of compute and STEP are the "
             "measured ones,", "so they are equal below, and communication is free", "",
             "where the time of a rank went, by stage",
             render(("", *heads.values(), "bubble"),
                    [(f"{f'pp{position}' if kind == 'predicted' else '':6}{kind}",
                      *(show_seconds(row[name]) for name in heads), f"{row['bubble']:.1%}")
                     for position, stage in enumerate(compared.stages) for kind, row in stage.items()],
                    columns, fold=False),
             "", "and by rank, measured",
             render(("", *heads.values()), [
                 (f"rank {row['rank']} " + " ".join(f"{axis}{row[axis]}" for axis in axes),
                  *(show_seconds(row[name]) for name in heads)) for row in ranks[:MOST_RANKS]],
                 columns)]
    if len(ranks) > MOST_RANKS:
        lines.append(f"... and {many(len(ranks) - MOST_RANKS, 'rank')} more")
    if beside := [(lane, row["worked"], row["waited"]) for lane, row in compared.offload.items()]:
        lines += ["", render(("offload, mean of all ranks", "worked", "waited for", "hidden"), [
            (lane, *map(show_seconds, (worked, waited, max(0.0, worked - waited))))
            for lane, worked, waited in beside], columns, fold=False)]
    for title, rows in (("by op, mean of all ranks", compared.ops),
                        ("by lane, waiting for it included", compared.lanes),
                        ("by unit, on a rank that holds it", compared.units)):
        lines += ["", render((title, "predicted", "measured"), [
            (f"{name:5} {row.name if isinstance(row, UnitSeconds) else ''}", show_seconds(row.predicted),
             show_seconds(row.measured)) for name, row in rows.items()], columns, fold=False)]
    return "\n".join([*lines, *(f"note: {note}" for note in compared.notes)])
