"""Auto: the order of a config's pipeline, what is `auto` because it depends on a device's memory, and the
units that are recomputed to meet a memory budget. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from threed.base.errors import InputError
from threed.base.quantity import divisors, parse_bytes, parse_limit, show_bytes
from threed.config.context import no_keys
from threed.config.stages import stage_runs
from threed.features.activation import plan as activation
from threed.planner.facts import make_table, unit_costs, with_logits
from threed.planner.passes import Pipeline, run_passes
from threed.program.analysis import Analysis
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.program.table import Table
from threed.schedules.auto import search
from threed.schedules.complete import check_order
from threed.schedules.file import read_order
from threed.schedules.orders import SCHEDULES, in_groups, line, looped
from threed.schedules.timed import StageTimes, play
from threed.schema import KEYS, Config

# Bytes of a device that a plan may take where nobody says which device: what `prediction.peak.plan_room` says
# of the hardware that `predict` takes by default.
USUAL_ROOM = 73.1e9


def make_pipeline(config: Config, room: float | None = None) -> Pipeline:
    """The order that a config asks for. `auto` and `file:` depend on more than the config, so one rank calls
    this and sends the result to all others. `room`: as `choices` takes it."""
    config = decided(config, room)
    parallel, m = config.parallel, config.num_microbatches
    if parallel.schedule == "auto":
        return _search(config)
    pipeline = _given(config)
    check_order(parallel.schedule, *pipeline, parallel.pp, m)
    return pipeline


def _given(config: Config) -> Pipeline:
    """The order of a schedule's function, or of a file."""
    parallel, m = config.parallel, config.num_microbatches
    if parallel.schedule.startswith("file:"):
        return Pipeline(*read_order(Path(parallel.schedule.removeprefix("file:")), parallel.pp))
    schedule = SCHEDULES[parallel.schedule]
    if schedule.by_unit:
        place = looped(parallel.pp, len(stage_runs(config)))
        return Pipeline(in_groups(place, m, config.grouped or m), place)
    if not schedule.fills(parallel.pp, m):
        raise InputError(f"parallel.schedule={parallel.schedule} needs {schedule.least(parallel.pp)} "
                         f"micro-batches for parallel.pp={parallel.pp}, and there are {m}: it fills the "
                         "pipeline from both ends at once; raise train.global_batch_size or lower "
                         "train.micro_batch_size")
    v = schedule.virtual or parallel.virtual_stages or 2
    return Pipeline(schedule.order(parallel.pp, m, v, parallel.pair), schedule.place(parallel.pp, v))


def _search(config: Config) -> Pipeline:
    """`auto`. A limit in bytes first counts only what FORWARD keeps; where the plan keeps more than the limit
    (messages, operands of split backwards), the search is repeated with less room."""
    parallel, limit = config.parallel, _limit(config)
    size = parse_limit(parallel.activation_limit)[1] if parallel.activation_limit is not None else None
    while True:
        best, _ = search(parallel.pp, config.num_microbatches, lambda place: _times(config, place), limit,
                         parallel.virtual_stages)
        pipeline = Pipeline(best.timed.order, best.place)
        if size is None or limit is None:
            return pipeline
        peak = max(row.activation_peak_bytes for row in stages(Analysis(unchecked_plan(config, pipeline))))
        if peak <= size:
            return pipeline
        limit *= min(0.95, size / peak)


def decided(config: Config, room: float | None = None) -> Config:
    """A config with a value for each key that is `auto` because it depends on a device's memory. `room`: as
    `choices` takes it."""
    return with_choices(config, choices(config, room))


class Chosen(NamedTuple):
    values: dict[str, Any]  # dotted key -> what its `auto` is here
    analysis: Analysis | None  # of the plan with these values, where it was made to see whether it fits


def choices(config: Config, room: float | None = None) -> dict[str, Any]:
    """Dotted key -> what its `auto` is here: see `choose`."""
    return choose(config, room).values


def choose(config: Config, room: float | None = None) -> Chosen:
    """A value for each key that is `auto` because it depends on a device's memory. `room`: bytes of a device
    that a plan may take; infinity: any number; None: nobody knows the device, and those of a usual one are
    taken, or any number on a CPU."""
    if room is None:
        room = math.inf if config.run.device == "cpu" else USUAL_ROOM
    if config.activation.policy != "budget" or config.activation.pieces is not None or no_keys(config):
        return _choose(config, room)
    without, kept = (with_choices(config, {"activation.pieces": pieces}) for pieces in ([], [KEYS]))
    chosen = _choose(without, room)
    if _recomputed(with_choices(kept, chosen.values)) <= _recomputed(with_choices(without, chosen.values)):
        kept_too = _choose(kept, room)
        if kept_too.values == chosen.values:
            return Chosen({**kept_too.values, "activation.pieces": [KEYS]}, kept_too.analysis)
    return Chosen({**chosen.values, "activation.pieces": []}, chosen.analysis)


def _recomputed(config: Config) -> float:
    """Seconds of what `activation.policy=budget` computes again; infinity where the budget is not kept."""
    try:
        table = marked_table(config, make_pipeline(config))
    except InputError:
        return math.inf
    return sum(parts[0] for unit, parts in zip(table.units, unit_costs(config), strict=True)
               if unit.recompute)


def _choose(config: Config, room: float) -> Chosen:
    """`choose` of groups and gradients."""
    schedule, m = SCHEDULES.get(config.parallel.schedule), config.num_microbatches
    grouped = bool(schedule and schedule.by_unit) and config.parallel.group == "auto"
    groups = [{"parallel.group": size} for size in reversed(divisors(m))] if grouped else [{}]
    ways = _gradients(config)
    limited = config.parallel.activation_limit is not None or config.activation.policy == "budget"
    if len(ways) * len(groups) == 1 or (room == math.inf and not limited):
        return Chosen(ways[0] | groups[0], None)
    for way in ways:
        # Where gradients stay on the device, the smallest group takes least.
        least = with_choices(config, way | groups[-1])
        if len(groups) > 1 and way.get("offload.gradients") == "device" and fitting(least, room) is None:
            continue
        for group in groups:
            if (analysis := fitting(with_choices(config, way | group), room)) is not None:
                return Chosen(way | group, analysis)
    return Chosen(ways[-1] | groups[-1], None)


def _gradients(config: Config) -> list[dict[str, Any]]:
    """When gradients are reduced and where they are until CLIP, where the host steps: the best first. Whole
    gradients on the device, a rank's part of them, and none, which a schedule that is done with one unit
    before the next begins sends to the host once a step, and others after every micro-batch."""
    if config.offload.optimizer == "none" or config.zero.stage < 2:
        return [{}]
    every = ("step", 1) if config.zero.reduce_every in ("auto", None) else (config.zero.reduce_every,)
    where = ("device", "host") if config.offload.gradients == "auto" else (config.offload.gradients,)
    return [{"zero.reduce_every": each, "offload.gradients": place} for place in where for each in every]


def with_choices(config: Config, chosen: dict[str, Any]) -> Config:
    """A config with values of dotted keys; the config itself where there are none."""
    for dotted, value in chosen.items():
        section, name = dotted.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def chosen_for(given: Config, config: Config) -> list[str]:
    """What to say of each choice in `config`, which `given` leaves open."""
    lines = []
    if given.parallel.group == "auto" and config.grouped is not None:
        lines.append(f"parallel.group=auto: {config.grouped} of {config.num_microbatches} micro-batches pass "
                     "a unit together, the most that fit")
    if given.activation.pieces is None and config.activation.pieces == [KEYS]:
        lines.append(f"activation.pieces: {KEYS}, since activation.budget has room for them")
    if config.offload.optimizer != "none" and config.zero.stage >= 2:
        every, where = config.zero.reduce_every, config.offload.gradients
        if given.zero.reduce_every in ("auto", None):
            whole = "whole gradients" if where == "device" else "whole gradients of the units under way"
            lines.append(f"zero.reduce_every=auto: {every}, since {whole} "
                         f"{'fit the device' if every == 'step' else 'do not fit the device'}")
        if given.offload.gradients == "auto":
            lines.append(f"offload.gradients=auto: {where}, "
                         + ("since they fit; each goes to the host once a step" if where == "device" else
                            "since they do not fit the device; the host adds up what each reduction gives"))
    return lines


def fitting(config: Config, room: float) -> Analysis | None:
    """A config's plan, which is not checked, where it takes at most `room` bytes of a device and keeps within
    `parallel.activation_limit`; None where it does not. An instruction's temporaries are counted as what the
    largest unit saves: what they are exactly, only torch knows (prediction/transient)."""
    try:
        pipeline = make_pipeline(config)
        analysis = Analysis(unchecked_plan(config, pipeline))
        check_limit(config, pipeline, analysis)
    except InputError:  # a limit or a budget that no plan of this pipeline keeps
        return None
    beside = max(unit.saved_bytes for unit in analysis.table.units)
    within = all(row.fixed_bytes + row.activation_peak_bytes + beside <= room for row in stages(analysis))
    return analysis if within else None


def unchecked_plan(config: Config, pipeline: Pipeline) -> Plan:
    return run_passes(config, pipeline, marked_table(config, pipeline))


def marked_table(config: Config, pipeline: Pipeline) -> Table:
    """The table of a plan, with the units marked that are recomputed."""
    table = make_table(config, pipeline.place)
    if config.train.sample_every:
        table = with_logits(config, table)
    policy, every = config.activation.policy, config.activation.every or 1
    if policy == "full":
        table = activation.mark(table, [u for u in activation.worthwhile(table) if u % every == 0])
    elif policy == "budget":
        table = _budgeted(config, pipeline, table)
    return table


def _budgeted(config: Config, pipeline: Pipeline, table: Table) -> Table:
    """The table with the units marked that `activation.policy=budget` recomputes. Raises InputError where
    even recomputing all of them keeps more than the budget."""
    budget = target = parse_bytes(config.activation.budget or 0)
    alone = replace(table, pair=None)  # to put pairs in order takes long

    def peaks(chosen: Collection[int], table: Table = alone) -> list[int]:
        plan = run_passes(config, pipeline, activation.mark(table, chosen))
        return [row.activation_peak_bytes for row in stages(Analysis(plan))]

    costs = [parts[0] for parts in unit_costs(config)]
    while (chosen := activation.choose(alone, costs, peaks, target)) is not None:
        above = max(peaks(chosen, table)) - budget if table.pair else 0
        if above <= 0:
            return activation.mark(table, chosen)
        target -= above
    every = activation.worthwhile(table)
    if (least := max(peaks(every, table))) <= budget:  # what is chosen without pairs may keep more with them
        return activation.mark(table, every)
    raise InputError(f"activation.budget={config.activation.budget}: with every unit recomputed a rank "
                     f"still keeps {show_bytes(least)} of activations at its peak; raise the budget, "
                     "lower train.micro_batch_size, or use a schedule that keeps fewer micro-batches")


def _times(config: Config, place: tuple[int, ...]) -> StageTimes | None:
    """Times of each stage; None where the units cannot fill so many stages."""
    if len(place) > len(stage_runs(config)):
        return None
    table = make_table(config, place)
    times = StageTimes([0.0] * len(place), [0.0] * len(place), [0.0] * len(place))
    for unit, parts in zip(table.units, unit_costs(config), strict=True):
        for row, part in zip((times.forward, times.input, times.weight), parts, strict=True):
            row[unit.stage] += part
    return times


def _limit(config: Config) -> float | None:
    """`parallel.activation_limit` in micro-batches of a position's whole share."""
    if config.parallel.activation_limit is None:
        return None
    times, size = parse_limit(config.parallel.activation_limit)
    if times is not None:
        return times * min(config.parallel.pp, config.num_microbatches)
    table = make_table(config, line(config.parallel.pp, 1))
    shares = [sum(table.units[u].saved_bytes for u in table.units_of(position))
              for position in range(config.parallel.pp)]
    assert size is not None
    return size / max(shares)


def check_limit(config: Config, pipeline: Pipeline, analysis: Analysis) -> None:
    """InputError where a plan keeps more than `parallel.activation_limit`."""
    if config.parallel.activation_limit is None:
        return
    times, size = parse_limit(config.parallel.activation_limit)
    if times is not None:
        equal = StageTimes.equal(len(pipeline.place), (1.0, 1.0, 1.0), 1)
        peak = play(pipeline.order, pipeline.place, equal).peak
        kept = peak * config.parallel.pp / len(pipeline.place)
        limit = _limit(config)
        if limit is not None and kept > limit + 1e-9:
            raise InputError(f"parallel.schedule={config.parallel.schedule} keeps {kept:g} micro-batches a "
                             "rank at its peak, above "
                             f"parallel.activation_limit={config.parallel.activation_limit} ({limit:g}); "
                             "use auto, or a schedule that keeps fewer, or raise the limit")
        return
    for position, row in enumerate(stages(analysis)):
        if size is not None and row.activation_peak_bytes > size:
            raise InputError(f"a rank of pp{position} keeps {show_bytes(row.activation_peak_bytes)} of "
                             "activations at its peak, above "
                             f"parallel.activation_limit={config.parallel.activation_limit}; lower "
                             "train.micro_batch_size, use a schedule that keeps fewer micro-batches, or "
                             "raise the limit")
