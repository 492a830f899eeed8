"""Whether the mesh, the stages and the schedule suit each other and the model. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

from threed.base.axes import axes_of, shown
from threed.base.errors import Idle, Problem
from threed.base.mesh import FOLDS, fold_problem
from threed.base.quantity import divisors
from threed.base.remember import remembered
from threed.models.layers.handing import handing
from threed.models.tiling import counts_rows, folds_of, layers_of, model_key, share_of, together, unit_layers
from threed.schedules.orders import SCHEDULES, Schedule
from threed.schema import Config


def check_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    if world_size not in (None, config.world_size):
        sizes = config.axis_sizes
        others = {axis: sizes[axis] for axis in reversed(shown(sizes)) if axis != "dp"}
        least = math.prod(others.values())
        sizes = "".join(f" x {axis}={size}" for axis, size in others.items())
        fits = (f", which {' x '.join(others)} = {least} does not divide" if world_size % least else
                f": set parallel.dp={world_size // least}, or auto")
        yield Problem.of("parallel.dp", f"={config.dp}{sizes} = {config.world_size} processes, but the world "
                         f"size is {world_size}{fits}")
    yield from _check_schedule_shape(config)


def check_folds(config: Config) -> Iterator[Problem]:
    folds = () if config.model.own_layers else folds_of(config)
    split = [axis for fold in folds for axis in FOLDS[fold].axes if axis in axes_of("parameters")]
    for axis in dict.fromkeys(split):
        same = (f"and weights cut over {', '.join(folds)}: all ranks of {axis} would send the same tokens, "
                "whose gradients would be added up")
        if (ranks := config.axis_sizes[axis]) == 1 or axis in share_of(config).sequence:
            continue
        if axis == "tp":
            yield Problem.of("parallel.sequence_parallel", f"=false with parallel.tp={ranks} {same}; set it "
                             "to true")
        else:
            yield Problem.of(f"parallel.{axis}", f"={ranks} {same}; leave {axis} out of the axes of the fold")
    precision = config.precision
    for key in ("grad_dtype", "reduce_dtype"):
        value = getattr(precision, key)
        if value != "fp32" and not config.model.own_layers and counts_rows(config):
            yield Problem.of(f"precision.{key}", f"={value} with model.balance=bias: counts of rows are "
                             "added up as gradients, and must be exact; set it to fp32")
    for axis, size in config.fold_sizes.items() if config.data_ranks % config.shard_size == 0 else ():
        problem = fold_problem(axis, size, config.axis_sizes, config.shard_size)
        if axis in folds and problem:
            yield Problem.of(f"parallel.{axis}", f"={size} {problem}")
        elif size != 1 and axis not in folds:
            yield Idle.of(f"parallel.{axis}", f"={size}: model.family={config.model.family} has no "
                          f"parameters that are cut over {axis}; leave it out")


def check_pair(config: Config) -> Iterator[Problem]:
    """There is something that travels while others compute."""
    if not config.parallel.pair:
        return
    sizes = {**config.axis_sizes, **config.fold_sizes}
    if all(sizes.get(way.over, 2) == 1 for layer in layers_of(config)
           for way in handing(layer).travels.values()):
        ep = "raise parallel.ep, or " if not config.model.own_layers and folds_of(config) else ""
        yield Idle.of("parallel.pair", "=true lets tensors travel between ranks while others are "
                      f"computed, and none travels here: {ep}leave it out")


def check_stages(config: Config) -> Iterator[Problem]:
    """Each stage has a unit, and no stage begins in the middle of a layer's tiles."""
    parallel, runs = config.parallel, stage_runs(config)
    units = sum(runs)
    if parallel.stage_units is not None and _by_unit(config):
        yield Idle.of("parallel.stage_units", f"={list(parallel.stage_units)}: parallel.schedule="
                      f"{parallel.schedule} makes each unit a stage; leave it out")
        return
    if config.num_stages > len(runs):
        parts = "" if config.model.own_layers else f" (embedding, {len(runs) - 2} of blocks, head)"
        what = f"layers{parts}, whose {units} tiles" if units > len(runs) else f"units{parts}"
        yield Problem.of("parallel.pp", f"={parallel.pp} makes {config.num_stages} stages, more than the "
                         f"model's {len(runs)} "
                         f"{what}{' stay on one stage each' if units > len(runs) else ''}")
    if parallel.stage_units is not None:
        listed = list(parallel.stage_units)
        if len(listed) != config.num_stages:
            yield Problem.of("parallel.stage_units", f"={listed} has {len(listed)} stages, but there are "
                             f"{config.num_stages}")
        elif sum(listed) != units or min(listed) < 1:
            yield Problem.of("parallel.stage_units", f"={listed} must be positive and add up to the model's "
                             f"{units} units")
        elif not set(accumulate(listed)) <= (ends := set(accumulate(runs))):
            cut = min(set(accumulate(listed)) - ends)
            near = max(end for end in ends | {0} if end < cut), min(end for end in ends if end > cut)
            yield Problem.of("parallel.stage_units", f"={listed} parts the tiles of a layer, units {near[0]} "
                             f"to {near[1] - 1}, which must be on one stage: end a stage after {near[0]} or "
                             f"{near[1]} units, not after {cut}")


def _check_schedule_shape(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    name, virtual = parallel.schedule, parallel.virtual_stages
    schedule = SCHEDULES.get(name)
    if schedule and not schedule.takes(virtual):
        yield _wrong_stages(schedule, name, virtual)
    if name == "auto" and virtual not in (None, 1, 2):
        yield Idle.of("parallel.virtual_stages", f"={virtual}: parallel.schedule=auto searches 1 or 2 stages "
                      "a rank")


def _wrong_stages(schedule: Schedule, name: str, virtual: int | None) -> Problem:
    if schedule.by_unit:
        return Idle.of("parallel.virtual_stages", f"={virtual}: parallel.schedule={name} makes each unit a "
                       "stage; leave it out")
    if schedule.virtual is None:
        return Problem.of("parallel.schedule", f"={name} needs parallel.virtual_stages of at least 2: with "
                          f"one stage a rank it would be {schedule.alone}")
    stages = {1: "one stage", 2: "two stages"}.get(schedule.virtual, f"{schedule.virtual} stages")
    others = " and ".join(other for other, row in SCHEDULES.items() if row.virtual is None)
    more = f"; {others} have more" if schedule.virtual == 1 else ""
    return Idle.of("parallel.virtual_stages", f"={virtual}: parallel.schedule={name} has {stages} a "
                   f"rank{more}")


def check_group(config: Config) -> Iterator[Problem]:
    """parallel.group has an effect, and divides the micro-batches."""
    parallel, m = config.parallel, config.num_microbatches
    if parallel.group == "auto":
        return
    if not _by_unit(config):
        grouped = " or ".join(name for name, row in SCHEDULES.items() if row.by_unit)
        yield Idle.of("parallel.group", f"={parallel.group} needs parallel.schedule={grouped}, and it is "
                      f"{parallel.schedule}, which has no groups; leave it out")
    elif m % int(parallel.group):
        yield Problem.of("parallel.group", f"={parallel.group} does not divide the {m} micro-batches of a "
                         f"step: take one of {', '.join(map(str, divisors(m)))}, or auto")


def _by_unit(config: Config) -> bool:
    schedule = SCHEDULES.get(config.parallel.schedule)
    return schedule is not None and schedule.by_unit


@remembered(model_key)
def stage_runs(config: Config) -> list[int]:
    """Lengths of the runs of units that must be on one stage: the tiles of one layer, or a single unit."""
    layers, runs = unit_layers(config)
    return together([layers[first:stop] for first, stop in runs])
