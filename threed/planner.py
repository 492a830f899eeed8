"""Config -> plan: split the model, choose the order, run the passes in their order, check. No torch.

    layers -> units -> stages        pipeline/split
    order -> FORWARD, BACKWARD       pipeline/orders, pipeline/plan.expand
          -> + SEND, RECV            pipeline/plan.communicate
          -> + GATHER, REDUCE, STEP  zero/plan
          -> check                   program/check
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from threed.activation import plan as activation
from threed.errors import InputError
from threed.mesh import Mesh
from threed.models.spec import Layer, Parameter, tied_parameter
from threed.models.tiling import layers_of
from threed.offload import plan as offload
from threed.optimizers.registry import OPTIMIZERS
from threed.pipeline.auto import Times, play, search
from threed.pipeline.file import read_order
from threed.pipeline.orders import SCHEDULES, Order, forward_only, line
from threed.pipeline.plan import communicate, expand
from threed.pipeline.split import split_layers, split_stages
from threed.predict.cost import load_costs
from threed.predict.simulate import cost_of
from threed.program.check import EVALUATE, VERIFY, check
from threed.program.instruction import Instruction, Op
from threed.program.summary import stages
from threed.program.table import SNAPSHOT, WAITING, ComputeUnit, ParameterUnit, Plan, Table, ring
from threed.quantity import parse_bytes, show_bytes
from threed.schema import Config
from threed.validate import PIECES, parse_limit, stage_runs
from threed.zero import plan as zero
from threed.zero.shard import Layout, layout


def make_mesh(config: Config) -> Mesh:
    parallel = config.parallel
    return Mesh(parallel.pp, config.dp, parallel.tp, tuple(parallel.axis_order.split("-")), config.shard_size)


class Pipeline(NamedTuple):
    """An order, and the position of each of its stages."""

    order: Order
    place: tuple[int, ...]


def make_pipeline(config: Config) -> Pipeline:
    """The order that a config asks for. Only `auto` and `file:` depend on more than the config: one rank asks, all use."""
    parallel, m = config.parallel, config.num_microbatches
    if parallel.schedule.startswith("file:"):
        return Pipeline(*read_order(Path(parallel.schedule.removeprefix("file:")), parallel.pp))
    if parallel.schedule == "auto":
        return _search(config)
    schedule = SCHEDULES[parallel.schedule]
    if m < schedule.least(parallel.pp):
        raise InputError(f"parallel.schedule={parallel.schedule} needs {schedule.least(parallel.pp)} micro-batches for "
                         f"parallel.pp={parallel.pp}, and there are {m}: it fills the pipeline from both ends at once; raise "
                         "train.global_batch_size or lower train.micro_batch_size")
    v = schedule.virtual or parallel.virtual_stages or 2
    return Pipeline(schedule.make(parallel.pp, m, v), schedule.place(parallel.pp, v))


def _search(config: Config) -> Pipeline:
    """`auto`. A limit in bytes is first taken by what a forward keeps; where the plan then keeps more (messages, operands of
    split backwards), it is searched again with less room."""
    parallel, limit = config.parallel, _limit(config)
    size = parse_limit(parallel.activation_limit)[1] if parallel.activation_limit is not None else None
    while True:
        found = search(parallel.pp, config.num_microbatches, lambda place: _times(config, place), limit, parallel.virtual_stages)
        pipeline = Pipeline(found.played.order, found.place)
        if size is None or limit is None:
            return pipeline
        peak = max(row["activation_peak_bytes"] for row in stages(_plan(config, pipeline)))
        if peak <= size:
            return pipeline
        limit *= min(0.95, size / peak)


def make_plan(config: Config, pipeline: Pipeline | None = None) -> Plan:
    """The checked plan of a config, or of a pipeline that was made of it elsewhere. Raises PlanError where the programs are
    not legal: a bug, or a user's own order; InputError where it keeps more than `parallel.activation_limit`."""
    pipeline = pipeline or make_pipeline(config)
    plan = _plan(config, pipeline)
    check(plan)
    _check_limit(config, pipeline, plan)
    return plan


def _plan(config: Config, pipeline: Pipeline) -> Plan:
    table = make_table(config, pipeline.place)
    policy, every = config.activation.policy, config.activation.every or 1
    if policy == "full":
        table = activation.mark(table, [u for u in activation.worthwhile(table) if u % every == 0])
    elif policy == "budget":
        table = _budgeted(config, pipeline, table)
    return _programs(config, pipeline, table)


def _budgeted(config: Config, pipeline: Pipeline, table: Table) -> Table:
    """The units that `activation.policy=budget` recomputes. InputError where all of them are not enough."""
    budget = parse_bytes(config.activation.budget or 0)

    def peaks(chosen: Collection[int]) -> list[int]:
        plan = _programs(config, pipeline, activation.mark(table, chosen))
        return [row["activation_peak_bytes"] for row in stages(plan)]

    chosen = activation.choose(table, [parts[0] for parts in unit_costs(config)], peaks, budget)
    if chosen is None:
        least = max(peaks(activation.worthwhile(table)))
        raise InputError(f"activation.budget={config.activation.budget}: with every unit recomputed a rank still keeps "
                         f"{show_bytes(least)} of activations at its peak; raise the budget, lower train.micro_batch_size, or "
                         "use a schedule that keeps fewer micro-batches")
    return activation.mark(table, chosen)


def _programs(config: Config, pipeline: Pipeline, table: Table) -> Plan:
    """The passes, in their order."""
    forward_backward = expand(pipeline.order, table)
    for transform in (activation.recompute, activation.partition, activation.offload, communicate, zero.train):
        forward_backward = transform(forward_backward, table)
    programs = {"train": offload.parameters(offload.optimizer(forward_backward, table), table)}
    if table.delayed:
        programs = {**offload.delay(forward_backward, table), "plain": programs["train"]}
    if config.run.verify_every:
        programs[VERIFY] = zero.rehearse(programs["plain" if table.delayed else "train"])
    if config.train.eval_every:
        forward = expand(forward_only(pipeline.place, config.num_microbatches), table, keep="none")
        programs[EVALUATE] = offload.parameters(zero.evaluate(communicate(forward, table), table), table)
    if table.snapshots:
        programs[SNAPSHOT] = offload.snapshot(table, waiting=False)
    if table.snapshots and table.delayed:
        programs[WAITING] = offload.snapshot(table, waiting=True)
    return Plan(table, {name: [tuple(program) for program in each] for name, each in programs.items()})


def _times(config: Config, place: tuple[int, ...]) -> Times | None:
    """Times of each stage; None where there are more stages than the units can fill."""
    if len(place) > len(stage_runs(config)):
        return None
    table = make_table(config, place)
    found = Times([0.0] * len(place), [0.0] * len(place), [0.0] * len(place))
    for unit, parts in zip(table.units, unit_costs(config), strict=True):
        for times, part in zip((found.forward, found.input, found.weight), parts, strict=True):
            times[unit.stage] += part
    return found


def unit_layers(config: Config) -> tuple[list[Layer], list[tuple[int, int]]]:
    """The layers of a model, and those of each unit: (first, one past the last)."""
    found = layers_of(config)
    return found, split_layers(len(found) - 2, config.parallel.layers_per_unit)


def unit_costs(config: Config) -> list[tuple[float, float, float]]:
    """Forward, input half and weights' half of each unit: seconds as measured by the run `parallel.costs`, or FLOPs."""
    model_layers, runs = unit_layers(config)
    if config.parallel.costs is None:  # + 1: even a layer without products takes its turn
        work = [sum(layer.forward_flops for layer in model_layers[first:stop]) + 1.0 for first, stop in runs]
        return [(flops, flops, flops) for flops in work]
    measured = cost_of(load_costs(config.parallel.costs))
    forward, first_half, second_half = ([measured(0, Instruction(op, unit, 0)) for unit in range(len(runs))]
                              for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    return list(zip(forward, first_half, second_half, strict=True))


def _limit(config: Config) -> float | None:
    """`parallel.activation_limit` in micro-batches of a position's whole share."""
    if config.parallel.activation_limit is None:
        return None
    times, size = parse_limit(config.parallel.activation_limit)
    if times is not None:
        return times * min(config.parallel.pp, config.num_microbatches)
    table = make_table(config, line(config.parallel.pp, 1))
    shares = [sum(table.units[u].saved_bytes for u in table.units_of(position)) for position in range(config.parallel.pp)]
    assert size is not None
    return size / max(shares)


def _check_limit(config: Config, pipeline: Pipeline, plan: Plan) -> None:
    if config.parallel.activation_limit is None:
        return
    times, size = parse_limit(config.parallel.activation_limit)
    if times is not None:
        peak = play(pipeline.order, pipeline.place, Times.equal(len(pipeline.place), (1.0, 1.0, 1.0), 1)).peak
        kept = peak * config.parallel.pp / len(pipeline.place)
        limit = _limit(config)
        if limit is not None and kept > limit + 1e-9:
            raise InputError(f"parallel.schedule={config.parallel.schedule} keeps {kept:g} micro-batches a rank at its peak, "
                             f"above parallel.activation_limit={config.parallel.activation_limit} ({limit:g}); use auto, or a "
                             "schedule that keeps fewer, or raise the limit")
        return
    for position, row in enumerate(stages(plan)):
        if size is not None and row["activation_peak_bytes"] > size:
            raise InputError(f"a rank of pp{position} keeps {show_bytes(row['activation_peak_bytes'])} of activations at its "
                             f"peak, above parallel.activation_limit={config.parallel.activation_limit}; lower "
                             "train.micro_batch_size, use a schedule that keeps fewer, or raise the limit")


def unit_parameters(config: Config) -> dict[int, tuple[Parameter, ...]]:
    """Parameter unit -> its parameters. A tied embedding is the unit after the last compute unit. After it come the small
    parameters that stay whole under ZeRO-3, a unit for each compute unit that has some besides others."""
    model_layers, runs = unit_layers(config)
    units = {index: tuple(p for layer in model_layers[first:stop] for p in layer.parameters)
             for index, (first, stop) in enumerate(runs)}
    for index in range(len(runs)):
        small = tuple(p for p in units[index] if persists(config, p))
        if 0 < len(small) < len(units[index]):
            units[len(runs) + 1 + index] = small
            units[index] = tuple(p for p in units[index] if p not in small)
    tied = tied_parameter(config.model)
    if tied is not None:
        units[len(runs)] = (tied,)
    return {index: parameters for index, parameters in sorted(units.items()) if parameters}


def persists(config: Config, parameter: Parameter) -> bool:
    """Whether a parameter stays whole, from its first use in a step to its last, whatever the window."""
    return config.zero.stage < 3 or parameter.numel < (config.zero.persist_below or 0)


def layouts(config: Config) -> dict[int, Layout]:
    """Parameter unit -> its flat layout on one tp rank, cut into shards (whatever the ZeRO stage, so that the
    gradient norm is summed over the same ranges)."""
    return {index: layout(parameters, config.parallel.tp, config.shard_size)
            for index, parameters in unit_parameters(config).items()}


def make_table(config: Config, place: tuple[int, ...]) -> Table:
    """Units, stages, sizes and traffic of a config whose stages are at the positions `place`."""
    (model_layers, runs), parallel = unit_layers(config), config.parallel
    costs, together = [sum(parts) for parts in unit_costs(config)], stage_runs(config)
    if len(place) > len(together) or (parallel.stage_units is not None and len(parallel.stage_units) != len(place)):
        raise InputError(f"parallel.schedule={parallel.schedule} has {len(place)} stages; the model has {len(runs)} units"
                         f"{f' in {len(together)} layers' if len(together) < len(runs) else ''}, and "
                         f"parallel.stage_units={parallel.stage_units}")
    ends = {place[0], place[-1]}
    if config.model.tie_embeddings and not (place[0] == 0 and place[-1] in (0, parallel.pp - 1)):
        raise InputError(f"parallel.schedule={parallel.schedule} has the embedding on position {place[0]} and the head on "
                         f"{place[-1]}; tied embeddings need them on the first position and on the first or the last: number the "
                         "rows so, or set model.tie_embeddings=false")
    sizes = parallel.stage_units or split_stages(costs, together, len(place))
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    tied = len(runs)
    laid_out = layouts(config)
    units = tuple(_compute_unit(config, model_layers[first:stop], (first, stop), stage_of[index],
                                tuple(p for p in (index, tied, tied + 1 + index) if p in laid_out and (
                                    p != tied or any(layer.uses_tied for layer in model_layers[first:stop]))))
                  for index, (first, stop) in enumerate(runs))
    parameters = {}
    for index, laid in laid_out.items():
        of = index if index < tied else index - tied - 1  # its compute unit
        positions = tuple(sorted(ends)) if index == tied else (place[stage_of[of]],)
        groups = zero.reductions(laid.replicated, parallel.sequence_parallel, len(positions) > 1, config.shard_size < config.dp)
        name = "tied embedding" if index == tied else units[of].name + (", small" if index > tied else "")
        parameters[index] = ParameterUnit(name, positions, laid.numel, laid.padding, laid.replicated, groups,
                                          whole=all(persists(config, placed.parameter) for placed in laid.placed))
    _send_home(config, parameters)
    precision = config.precision
    return Table(units, parameters, place, config.num_microbatches, config.dp, parallel.tp, config.zero.stage,
                 param_bytes=_bytes(precision.dtype), act_bytes=_act_bytes(config), shard_size=config.shard_size,
                 reduce_every=config.reduce_every, residency=1 if config.zero.residency is None else config.zero.residency,
                 prefetch=1 if config.zero.prefetch is None else config.zero.prefetch, grad_bytes=_bytes(precision.grad_dtype),
                 reduce_bytes=_bytes(precision.reduce_dtype),
                 master=precision.dtype != "fp32" and precision.master == "fp32",
                 partition=config.activation.partition and parallel.tp > 1 and not parallel.sequence_parallel,
                 offload_kept=config.activation.offload == "cpu", contiguous=config.activation.contiguous,
                 delayed=config.offload.delayed_update, optimizer=OPTIMIZERS[config.optimizer.name].buffers,
                 snapshots=_snapshots(config))


def _snapshots(config: Config) -> bool:
    """Whether checkpoints are written from a copy on the host. State that lives on disk has no room there."""
    on_disk = "nvme" in (config.offload.optimizer, config.offload.parameters)
    return config.checkpoint.background and config.checkpoint.every > 0 and not on_disk


def _send_home(config: Config, parameters: dict[int, ParameterUnit]) -> None:
    """Say where units' optimizer state and parameters live."""
    tiers, asked = {"none": "device", "cpu": "host", "nvme": "disk"}, config.offload
    for position in {unit.positions[0] for unit in parameters.values()}:
        sizes = {p: unit.numel for p, unit in parameters.items() if unit.positions[0] == position}
        for p, home in offload.homes(sizes, config.offload.ratio, tiers[asked.optimizer]).items():
            unit = parameters[p]
            weights = "device" if unit.whole or home == "device" else tiers[asked.parameters]
            parameters[p] = replace(unit, state_home=home, weight_home=weights)


def _bytes(dtype: str) -> int:
    """Of an element."""
    return 4 if dtype == "fp32" else 2


def _act_bytes(config: Config) -> int:
    """Bytes of the residual stream of a micro-batch between two units, on one rank."""
    share = config.parallel.tp if config.parallel.sequence_parallel else 1
    return config.train.micro_batch_size * config.model.seq_len * config.model.hidden * _bytes(config.precision.dtype) // share


def saved_by_piece(config: Config) -> dict[str, int]:
    """Bytes of a block, a rank and a micro-batch that each activation piece saves where it is computed again."""
    parallel, found = config.parallel, {str(piece): 0 for piece in PIECES}
    for kept in (kept for layer in layers_of(config) if layer.block == 0 for kept in layer.saved):
        if kept.piece is not None:
            size = kept.bytes_a_rank(_bytes(config.precision.dtype), parallel.tp, parallel.sequence_parallel)
            found[kept.piece] += size * config.train.micro_batch_size
    return found


def _compute_unit(config: Config, members: list[Layer], run: tuple[int, int], stage: int,
                  parameters: tuple[int, ...]) -> ComputeUnit:
    tp, sp, batch = config.parallel.tp, config.parallel.sequence_parallel, config.train.micro_batch_size
    element = _bytes(config.precision.dtype)
    full = tp if sp else 1
    saved = sum(kept.bytes_a_rank(element, tp, sp) for layer in members for kept in layer.saved
                if kept.piece not in config.pieces)
    operands = element * sum(layer.operand_full // full + layer.operand_whole + layer.operand_cut // tp
                             + (layer.operand_gathered if sp else 0) for layer in members)
    operands += sum(kept.bytes_a_rank(element, tp, sp) for layer in members if layer.operand_saved for kept in layer.saved)
    # One all-gather or reduce-scatter of the whole residual stream; an all-reduce is two.
    stream = ring(batch * config.model.seq_len * config.model.hidden * element, tp)
    columns, rows = sum(layer.columns for layer in members), sum(layer.rows for layer in members)
    loss = sum(3 * 2 * ring(batch * config.model.seq_len * 4, tp) for layer in members if layer.has_loss)
    if sp:  # forward: gather before columns, scatter after rows; backward: the same turned round, and columns gather their
        forward, backward, weight = columns + rows, columns + rows, columns  # input again for the weight gradient
    else:
        forward, backward, weight = 2 * rows, 2 * columns, 0
    names = [layer.name for layer in members]
    name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rsplit('.', 1)[-1]}"
    first = members[0]
    return ComputeUnit(name, run, stage, parameters, sum(layer.forward_flops for layer in members) * batch // tp,
                       saved * batch, operands * batch,
                       forward * stream + loss, backward * stream, weight * stream, tile=first.tile, tiles=first.tiles,
                       normed_bytes=_act_bytes(config) if first.shares else 0, adds=first.adds,
                       running_bytes=2 * 4 * batch * config.model.seq_len if first.running else 0)
