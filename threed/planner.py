"""Config -> plan: split the model, choose the order, run the passes in their order, check. No torch.

    layers -> units -> stages        pipeline/split
    order -> FORWARD, BACKWARD       pipeline/orders, pipeline/plan.expand
          -> + SEND, RECV            pipeline/plan.communicate
          -> + GATHER, REDUCE, STEP  zero/plan
          -> check                   program/check
"""

from __future__ import annotations

from threed.mesh import Mesh
from threed.models.spec import Layer, Parameter, layers, tied_parameter
from threed.pipeline import plan as pipeline
from threed.pipeline.orders import ORDERS, forward_only
from threed.pipeline.split import split_layers, split_units
from threed.program.check import check
from threed.program.table import ComputeUnit, ParameterUnit, Plan, Table, ring
from threed.schema import Config
from threed.zero import plan as zero
from threed.zero.shard import Layout, layout


def make_mesh(config: Config) -> Mesh:
    return Mesh(config.parallel.pp, config.dp, config.parallel.tp, tuple(config.parallel.axis_order.split("-")))


def make_plan(config: Config) -> Plan:
    """The checked plan of a config. Raises PlanError where the programs are not legal: a bug, or a user's own order."""
    table = make_table(config)
    positions, microbatches = table.num_positions, table.num_microbatches
    order = ORDERS[config.parallel.schedule](positions, microbatches)
    train = zero.train(pipeline.communicate(pipeline.expand(order, table), table), table)
    programs = {"train": train}
    if config.train.eval_every:
        forward = pipeline.expand(forward_only(positions, microbatches), table, keep="none")
        programs["evaluate"] = zero.evaluate(pipeline.communicate(forward, table), table)
    plan = Plan(table, {name: [tuple(program) for program in each] for name, each in programs.items()})
    check(plan)
    return plan


def unit_parameters(config: Config) -> dict[int, tuple[Parameter, ...]]:
    """Parameter unit -> its parameters. A tied embedding is the unit after the last compute unit."""
    model_layers = layers(config.model)
    runs = split_layers(config.model.layers, config.parallel.layers_per_unit)
    units = {index: tuple(p for layer in model_layers[first:stop] for p in layer.parameters)
             for index, (first, stop) in enumerate(runs)}
    tied = tied_parameter(config.model)
    if tied is not None:
        units[len(runs)] = (tied,)
    return {index: parameters for index, parameters in units.items() if parameters}


def layouts(config: Config) -> dict[int, Layout]:
    """Parameter unit -> its flat layout on one tp rank, cut into dp shards (whatever the ZeRO stage, so that the
    gradient norm is summed over the same ranges)."""
    return {index: layout(parameters, config.parallel.tp, config.dp)
            for index, parameters in unit_parameters(config).items()}


def make_table(config: Config) -> Table:
    """Units, stages, sizes and traffic of a config."""
    model_layers, parallel = layers(config.model), config.parallel
    runs = split_layers(config.model.layers, parallel.layers_per_unit)
    costs = [sum(layer.forward_flops for layer in model_layers[first:stop]) for first, stop in runs]
    sizes = parallel.stage_units or split_units(costs, config.num_stages)
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    tied = len(runs)
    units = tuple(_compute_unit(config, model_layers[first:stop], (first, stop), stages[index],
                                (*((index,) if any(layer.parameters for layer in model_layers[first:stop]) else ()),
                                 *((tied,) if any(layer.uses_tied for layer in model_layers[first:stop]) else ())))
                  for index, (first, stop) in enumerate(runs))
    stage_positions = tuple(range(len(sizes)))
    parameters = {}
    for index, place in layouts(config).items():
        ends = (stage_positions[stages[0]], stage_positions[stages[-1]])
        positions = tuple(sorted(set(ends))) if index == tied else (stage_positions[stages[index]],)
        groups = zero.reductions(place.replicated, parallel.sequence_parallel, len(positions) > 1)
        name = "tied embedding" if index == tied else units[index].name
        parameters[index] = ParameterUnit(name, positions, place.numel, place.padding, place.replicated, groups)
    return Table(units, parameters, stage_positions, config.num_microbatches, config.dp, parallel.tp, config.zero.stage,
                 param_bytes=_element_bytes(config), act_bytes=_act_bytes(config))


def _element_bytes(config: Config) -> int:
    return 4 if config.precision.dtype == "fp32" else 2


def _act_bytes(config: Config) -> int:
    """Bytes of the residual stream of a micro-batch between two units, on one rank."""
    share = config.parallel.tp if config.parallel.sequence_parallel else 1
    return config.train.micro_batch_size * config.model.seq_len * config.model.hidden * _element_bytes(config) // share


def _compute_unit(config: Config, members: list[Layer], run: tuple[int, int], stage: int,
                  parameters: tuple[int, ...]) -> ComputeUnit:
    tp, sp, batch = config.parallel.tp, config.parallel.sequence_parallel, config.train.micro_batch_size
    element = _element_bytes(config)
    saved = sum(batch * element * (layer.saved_full // (tp if sp else 1) + layer.saved_cut // tp) for layer in members)
    # One all-gather or reduce-scatter of the whole residual stream; an all-reduce is two.
    stream = ring(batch * config.model.seq_len * config.model.hidden * element, tp)
    columns, rows = sum(layer.columns for layer in members), sum(layer.rows for layer in members)
    loss = sum(3 * 2 * ring(batch * config.model.seq_len * 4, tp) for layer in members if layer.has_loss)
    if sp:  # forward: gather before columns, scatter after rows; backward: the same turned round, and columns gather
        forward, backward = columns + rows, 2 * columns + rows  # their input again for the weight gradient
    else:
        forward, backward = 2 * rows, 2 * columns
    names = [layer.name for layer in members]
    name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rsplit('.', 1)[-1]}"
    return ComputeUnit(name, run, stage, parameters,
                       sum(layer.forward_flops for layer in members) * batch // tp, saved,
                       forward * stream + loss, backward * stream)
