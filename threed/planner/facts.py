"""Facts: the table of units, stages, sizes and traffic that a config gives. No torch.

    layers -> compute units -> stages        schedules/split
    parameters -> parameter units, laid out  features/zero/shard
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

from threed.base.axes import axes_of
from threed.base.errors import InputError
from threed.base.mesh import FOLDS, GROUPS, OWNERS, Mesh
from threed.base.quantity import BYTES, add_up
from threed.base.remember import remembered
from threed.config.stages import stage_runs
from threed.features.offload import plan as offload
from threed.features.pipeline.message_parts import NODE_RANKS, cut, settings
from threed.features.zero import plan as zero
from threed.features.zero.shard import FlatLayout, layout
from threed.models.kinds import layer_costs
from threed.models.layers.base import Layer
from threed.models.layers.handing import handing, passes
from threed.models.layers.head import Generates
from threed.models.tiling import cut_layers, folds_of, model_key, share_of, unit_layers
from threed.optim.registry import OPTIMIZERS, turning
from threed.planner.hand_overs import hand_overs
from threed.planner.owners import with_owners
from threed.planner.unit_kinds import (
    KINDS,
    OWN,
    TIED,
    UnitParameters,
    depends_on,
    fold_of,
    parameter_units,
    persists,
    stepped_by,
)
from threed.program.costs import load_costs
from threed.program.entries import ComputeUnit, MadeTensor, ParameterUnit, ReadTensor, Reduction
from threed.program.instruction import PHASES, Instruction, Op, Tier
from threed.program.settings import (
    ActivationSettings,
    Elements,
    LogitsSettings,
    PairSettings,
    UpdateSettings,
    ZeroSettings,
)
from threed.program.simulate import cost_of
from threed.program.table import Table
from threed.schedules.split import split_stages
from threed.schema import PIECES, Config
from threed.spec.parameter import SEQUENCE, Cost, Parameter, Share, Traffic


@remembered(lambda config: (model_key(config), config.parallel.costs))
def unit_costs(config: Config) -> list[tuple[float, float, float]]:
    """Costs of each unit's forward, input half and weights' half: seconds that the run `parallel.costs` has
    measured, or FLOPs."""
    model_layers, runs = unit_layers(config)
    if config.parallel.costs is None:  # + 1: even a layer without matrix products takes some time
        size = config.train.micro_batch_size
        work = [sum((layer.cost(Share(sequences=size)) for layer in model_layers[first:stop]), Cost())
                for first, stop in runs]
        flops = [(cost.flops / size, cost.frozen_flops / size) for cost in work]
        return [(every + 1.0, every + 1.0, every - frozen + 1.0) for every, frozen in flops]
    measured = cost_of(load_costs(config.parallel.costs))
    forward, first_half, second_half = ([measured(0, Instruction(op, unit, 0)) for unit in range(len(runs))]
                              for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    return list(zip(forward, first_half, second_half, strict=True))


def unit_parameters(config: Config) -> dict[int, tuple[Parameter, ...]]:
    """Parameter unit -> its parameters."""
    return {number: unit.parameters for number, unit in parameter_units(config).items()}


def make_mesh(config: Config) -> Mesh:
    """The mesh of a config: its axes, their sizes and their order among ranks."""
    parallel = config.parallel
    extra = ["keys"] * parallel.cp_overlap + [OWNERS] * (turning(config.optimizer.name) is not None)
    return Mesh(tuple(parallel.axis_order.split("-")), config.shard_size, folds_of(config),
                {"cp": parallel.cp_form}, extra, **config.axis_sizes, **config.fold_sizes)


@remembered(lambda config: (depends_on(config), config.shard_size,
                            tuple(config.axis_sizes.values()) if folds_of(config) else ()))
def layouts(config: Config) -> dict[int, FlatLayout]:
    """Parameter unit -> its flat layout on one rank, cut into shards (whatever the ZeRO stage, so that the
    gradient norm is summed over the same ranges)."""
    mesh = make_mesh(config) if folds_of(config) else None

    def shards(unit: UnitParameters) -> int:
        fold = fold_of(unit.parameters)
        return FOLDS[fold].ranks(mesh, fold) if mesh is not None and fold else config.shard_size

    return {index: layout(unit.parameters, share_of(config).ranks, shards(unit))
            for index, unit in parameter_units(config).items()}


def make_table(config: Config, place: tuple[int, ...]) -> Table:
    """Units, stages, sizes and traffic of a config whose stages are at the positions `place`."""
    (model_layers, runs), parallel = unit_layers(config), config.parallel
    check_shapes(config, model_layers)
    together = stage_runs(config)
    if len(place) > len(together) or (parallel.stage_units is not None
                                      and len(parallel.stage_units) != len(place)):
        layers = f" in {len(together)} layers" if len(together) < len(runs) else ""
        raise InputError(f"parallel.schedule={parallel.schedule} has {len(place)} stages; the model has "
                         f"{len(runs)} units{layers}, and parallel.stage_units={parallel.stage_units}")
    ends, laid_out, kinds = {place[0], place[-1]}, layouts(config), parameter_units(config)
    tied = any(unit.kind == TIED for unit in kinds.values())
    if tied and not (place[0] == 0 and place[-1] in (0, parallel.pp - 1)):
        raise InputError(f"parallel.schedule={parallel.schedule} has the embedding on position {place[0]} "
                         f"and the head on {place[-1]}; tied embeddings need the embedding on the first "
                         "position and the head on the first or the last: change the order of the rows, or "
                         "set model.tie_embeddings=false")
    sizes = parallel.stage_units or stage_sizes(config, len(place))
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    uses_tied = _uses_tied(config)
    used = [list[int]() for _ in runs]
    for number, held in kinds.items():
        users = [held.user] if held.kind != TIED else compress(range(len(runs)), uses_tied)
        for user in users:
            used[user].append(number)
    units = tuple(replace(unit, stage=stage, parameters=tuple(mine))
                  for unit, stage, mine in zip(_compute_units(config), stage_of, used, strict=True))
    table = Table(units, {}, place, config.num_microbatches, _act_bytes(config), _elements(config),
                  _zero(config), _activation(config), _update(config), pair=_pair(config, units))
    ordinary = _Shared.of(config, table.elements)
    parameters = {}
    for index, laid in laid_out.items():
        kind, user, _ = kinds[index]
        positions = tuple(sorted(ends)) if kind == TIED else (place[stage_of[user]],)
        name = {OWN: units[user].name, TIED: "tied embedding"}.get(kind, f"{units[user].name}, {kind}")
        trains = any(placed.parameter.trains for placed in laid.placed)
        fold, (optimizer, dtype) = fold_of(kinds[index].parameters), _of_kind(config, kinds[index])
        shared = ordinary.folded(config, fold) if fold else ordinary
        parameters[index] = ParameterUnit(
            name, positions, laid.numel, laid.padding, shared.group, shared.shards,
            shared.reductions(laid, len(positions)) if trains else (),
            whole=all(persists(config, placed.parameter) for placed in laid.placed), trains=trains,
            kind=kind, optimizer=optimizer, fold=fold, dtype=dtype)
    _send_home(config, parameters)
    parameters = with_owners(config, make_mesh(config), laid_out, parameters)
    return cut(replace(table, parameters=parameters),
               settings(config, make_mesh(config), parallel.sequence_parallel))


def _of_kind(config: Config, unit: UnitParameters) -> tuple[str, str]:
    """(optimizer, dtype) of a parameter unit, where these are not the config's."""
    row = KINDS.get(unit.kind)
    dtype = row.dtype if row is not None and row.dtype != config.precision.dtype else ""
    return (row.optimizer if row is not None else "") or stepped_by(config, unit.parameters), dtype


def with_logits(config: Config, table: Table) -> Table:
    """The table of a plan with the program `generate`, for the prompts `train.sample_prompts`. InputError
    where no layer of the model makes logits."""
    model_layers, share = unit_layers(config)[0], share_of(config)
    made, sent = dict[int, int](), dict[int, dict[str, int]]()
    for index, unit in enumerate(table.units):
        members = model_layers[slice(*unit.layers)]
        each = [layer.logits(share) if isinstance(layer, Generates) else None for layer in members]
        if logits := [one for one in each if one is not None]:
            others = sum((layer.cost(share) for layer, one in zip(members, each, strict=True) if one is None),
                         Cost()).sent
            forward = {axis: sent.bytes for (phase, axis), sent in others.items() if phase == "forward"}
            made[index], sent[index] = logits[-1].bytes, add_up([forward, *(one.sent for one in logits)])
    if not made:
        raise InputError(f"model.family={config.model.family}: no layer of the model makes logits "
                         "(`logits`), so it cannot generate text")
    count = -(-len(config.train.sample_prompts) // (config.train.micro_batch_size * config.dp))
    return replace(table, logits=LogitsSettings(max(1, count), made, sent))


@remembered(lambda config, stages: (model_key(config), config.parallel.costs, stages))
def stage_sizes(config: Config, stages: int) -> list[int]:
    """Compute units of each of so many stages, balanced by cost."""
    return split_stages([sum(parts) for parts in unit_costs(config)], stage_runs(config), stages)


class _Shared(NamedTuple):
    """How parameter units are shared among ranks."""

    group: str  # over which they are sharded
    replica: str  # the group of ranks with copies of a shard
    shards: int
    sharded: bool  # whether a rank keeps its shard of a sum alone
    copies: int
    ranks: dict[str, int]  # axis of parameters -> its ranks
    sequence: tuple[str, ...]  # axes that cut the sequence of the residual stream
    elements: Elements

    @classmethod
    def of(cls, config: Config, elements: Elements) -> _Shared:
        copies = config.data_ranks // config.shard_size
        share = share_of(config)
        ranks = {axis: share.over(axis) for axis in axes_of("parameters")}
        return cls(make_mesh(config).shard_group, "replica", config.shard_size, config.zero.stage >= 1,
                   copies, ranks, share.sequence, elements)

    def folded(self, config: Config, axis: str) -> _Shared:
        """How units of a fold are. (Their group sums over the axes that it spans.)"""
        mesh, fold = make_mesh(config), FOLDS[axis]
        others = {each: ranks for each, ranks in self.ranks.items() if each not in fold.spans}
        return self._replace(group=fold.group(mesh), replica=fold.replica,
                             shards=fold.ranks(mesh, axis), ranks=others)

    def reductions(self, laid: FlatLayout, positions: int) -> tuple[Reduction, ...]:
        parts = {axis: laid.partial(GROUPS[axis].axes or (), self.sequence) for axis in self.ranks}
        partial = {axis: (self.ranks[axis], sum(part.stop - part.start for part in each))
                   for axis, each in parts.items() if each and self.ranks[axis] > 1}
        kept = laid.numel // (self.shards if self.sharded else 1)
        return zero.reductions(laid.numel, self.shards, self.group,
                               zero.Sums(partial, kept, self.copies, positions, self.replica), self.elements)


def _elements(config: Config) -> Elements:
    precision = config.precision
    return Elements(BYTES[precision.dtype], BYTES[precision.grad_dtype], BYTES[precision.reduce_dtype])


def _zero(config: Config) -> ZeroSettings:
    asked = config.zero
    return ZeroSettings(asked.stage, config.reduce_every, 1 if asked.residency is None else asked.residency,
                        1 if asked.prefetch is None else asked.prefetch, config.offload.gradients == "host")


def _activation(config: Config) -> ActivationSettings:
    activation, parallel = config.activation, config.parallel
    # Under sequence parallelism, kept inputs are cut over tp already.
    parts = parallel.tp if activation.partition and not parallel.sequence_parallel else 1
    return ActivationSettings("tp" if parts > 1 else "", parts, activation.offload == "cpu",
                              activation.contiguous)


def _update(config: Config) -> UpdateSettings:
    # No snapshots where state lives on disk: the host has no memory for it.
    on_disk = "nvme" in (config.offload.optimizer, config.offload.parameters)
    background = config.checkpoint.background and config.checkpoint.every > 0 and not on_disk
    # Matrices are turned when all ranks have their gradients: at the end of the step.
    overlap = (config.offload.optimizer != "none" and config.offload.overlap != "none"
               and turning(config.optimizer.name) is None)
    return UpdateSettings(OPTIMIZERS[config.optimizer.name].buffers,
                          config.precision.dtype != "fp32" and config.precision.master == "fp32",
                          overlap, background)


# FLOPs that a GPU computes while it sends a byte to another of its node, and of another node: an H100 reaches
# 400 TFLOPS, 400 GB/s and 50 GB/s. (A plan does not look at a machine.)
FLOPS_A_BYTE, FLOPS_A_FAR_BYTE = 1000.0, 8000.0


def _pair(config: Config, units: Sequence[ComputeUnit]) -> PairSettings | None:
    """By what the two of a pair are put in order."""
    if not config.parallel.pair:
        return None
    costs, mesh = unit_costs(config), make_mesh(config)
    # In what `costs` are: seconds of a run, or FLOPs
    rate = sum(forward for forward, *_ in costs) / sum(unit.forward_flops + 1 for unit in units)
    groups = {each.over: mesh.group(each.over, 0) for unit in units for each in unit.makes if each.over}
    far = {group: len({rank // NODE_RANKS for rank in ranks}) > 1 for group, ranks in groups.items()}
    return PairSettings(tuple(costs), {group: rate * (FLOPS_A_FAR_BYTE if far[group] else FLOPS_A_BYTE)
                                       for group in sorted(groups)})


def _send_home(config: Config, parameters: dict[int, ParameterUnit]) -> None:
    """Set the tiers on which units' optimizer state and parameters live."""
    tiers = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
    asked = config.offload
    for position in {unit.positions[0] for unit in parameters.values()}:
        here = {p: unit for p, unit in parameters.items() if unit.positions[0] == position}
        sizes = {p: unit.numel for p, unit in here.items() if unit.trains}
        homes = offload.homes(sizes, config.offload.ratio, tiers[asked.optimizer])
        for p, unit in here.items():
            home = homes.get(p, Tier.DEVICE)
            stays = unit.whole or (unit.trains and home == Tier.DEVICE)
            parameters[p] = replace(unit, state_home=home,
                                    weight_home=Tier.DEVICE if stays else tiers[asked.parameters])


def _act_bytes(config: Config) -> int:
    """Bytes of the residual stream of a micro-batch between two units, on one rank."""
    return share_of(config).bytes(config.model.seq_len * config.model.hidden, SEQUENCE)


def saved_by_piece(config: Config) -> dict[str, int]:
    """Bytes of a block that a rank saves a micro-batch by recomputing each activation piece."""
    sizes = {str(piece): 0 for piece in PIECES}
    for kept in (kept for layer in cut_layers(config)[1] for kept in layer.cost(share_of(config)).saved):
        if kept.piece is not None and kept.kept_by is None:
            sizes[kept.piece] += kept.bytes
    return sizes


def check_shapes(config: Config, layers: Sequence[Layer]) -> None:
    """Raises InputError where a CUDA graph could not hold a layer: its shapes depend on counts of rows, or on
    what the layer's `shapes_from` says."""
    for layer in layers if config.run.cuda_graphs else ():
        counted = [f"how many rows of '{way.becomes}' come" for way in handing(layer).travels.values()
                   if way.gives]
        if what := getattr(layer, "shapes_from", "") or "".join(counted[:1]):
            raise InputError(f"run.cuda_graphs=true: in layer {layer.name} shapes depend on {what}, and a "
                             "CUDA graph has fixed ones; set it to false")


@remembered(model_key)
def _uses_tied(config: Config) -> list[bool]:
    """Of each compute unit, whether it uses the tied embedding."""
    model_layers, runs = unit_layers(config)
    return [any(p.tied for layer in model_layers[first:stop] for p in layer.parameters())
            for first, stop in runs]


def _travel_ranks(config: Config) -> dict[str, int]:
    """The groups over which tensors of a model travel -> their ranks."""
    ways = [way for layer in unit_layers(config)[0] for way in handing(layer).travels.values()]
    over = {way.over for way in ways} & GROUPS.keys()
    mesh = make_mesh(config) if over else None
    return {group: len(mesh.group(group, 0)) for group in sorted(over)} if mesh else {}


@remembered(lambda config: (model_key(config), tuple(config.pieces), tuple(_travel_ranks(config).items())))
def _compute_units(config: Config) -> list[ComputeUnit]:
    """The compute units of a model, before they are on stages and have parameter units."""
    model_layers, runs = unit_layers(config)
    members = [model_layers[first:stop] for first, stop in runs]
    handed = hand_overs(members, share_of(config), _travel_ranks(config))
    of_layers = layer_costs(config)
    costs = [sum(of_layers[first:stop], Cost()) for first, stop in runs]
    return [_compute_unit(config, *row) for row in zip(members, runs, costs, handed, strict=True)]


def _compute_unit(config: Config, members: Sequence[Layer], run: tuple[int, int], cost: Cost,
                  handed: tuple[tuple[MadeTensor, ...], tuple[ReadTensor, ...]]) -> ComputeUnit:
    share, (makes, reads) = share_of(config), handed
    names = [layer.name for layer in members]
    name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rsplit('.', 1)[-1]}"
    sent = {phase: dict[str, Traffic]() for phase in (*PHASES[Op.RECOMPUTE], *PHASES[Op.BACKWARD])}
    for (phase, axis), each in cost.sent_by(config.pieces).items():
        sent.setdefault(phase, {})[axis] = each
    traffic, rings = ({phase: {axis: getattr(each, what) for axis, each in axes.items()}
                       for phase, axes in sent.items()} for what in ("bytes", "rings"))
    exchanged = {phase: some for phase, axes in sent.items()
                 if (some := {axis: (each.exchanged, each.exchanges) for axis, each in axes.items()
                              if each.exchanges})}
    return ComputeUnit(name, run, 0, (), cost.kernels, cost.saved_bytes(config.pieces),
                       cost.operands, traffic, rings=rings, exchanged=exchanged, makes=makes, reads=reads,
                       loss=any(layer.loss for layer in members), adds=all(layer.adds for layer in members),
                       output=passes(members[-1], share),
                       again=tuple(kernel for kernel in cost.kernels if kernel.piece in config.pieces))
