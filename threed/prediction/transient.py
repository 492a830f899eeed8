"""Transient memory: what FORWARD, RECOMPUTE and BACKWARD hold beside all slots, until they end.

Temporaries are known only to the code that makes them. So each kind of unit is run once, by the handlers of
the engine, on tensors that have a shape and no memory: sizes are those of the config, and time and memory are
not. Kernels count as on a GPU: weight gradients are added to their sum without a product in between, and a
piece of model.fused, or a norm, is one kernel.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from threed.base.mesh import GROUPS
from threed.base.remember import remembered, remembering
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.features.pipeline.run import PipelineRun, built, streams
from threed.models.kinds import layer_kinds
from threed.models.measure import silent_groups, weight_of
from threed.models.tiling import layers_of, share_of, together
from threed.planner import make_mesh
from threed.planner.from_config import config_of
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.entries import gradient_kind
from threed.program.graphs import graphs
from threed.program.instruction import COMPUTE, PARAMETER_KINDS, SENT, Instruction, Op, Slot
from threed.program.link import Program
from threed.program.plan import Plan
from threed.program.slots import Slots
from threed.program.summary import activations
from threed.program.table import Table
from threed.schema import Config
from threed.spec.parameter import Share
from threed.tensor.alive import Alive
from threed.tensor.context import Batch, Context
from threed.tensor.documents import Documents
from threed.tensor.fused import Body, Fused
from threed.tensor.fused_loss import LossKernels
from threed.tensor.layers import WeightGrads
from threed.tensor.pieces import Kernels, Pieces
from threed.tensor.precision import DTYPES
from threed.tensor.rectangles import SHAPES, Rectangle
from threed.tensor.saving import SavingPolicy, UnsavedMemory
from threed.tensor.shapes import Shapes

What = tuple[Op, str, int]  # op, what FORWARD keeps, unit


@runtime_checkable
class ReadsInputs(Protocol):
    """A first layer that reads `inputs` of a batch, and not its tokens. `example`: inputs and targets of a
    micro-batch, without meaning, but of the right shapes."""

    def example(self, share: Share) -> tuple[Any, Any]: ...


@remembering()
def temporaries_of(plan: Plan) -> Callable[[Instruction], int]:
    """Bytes that an instruction of a plan's train step holds at its peak, beside the slots that are alive
    before it or that it makes. Negative where it frees memory that its slots count until its end."""
    config, table = config_of(plan), plan.table
    layers, share = layers_of(config), share_of(config)
    units = [layers[slice(*unit.layers)] for unit in table.units]
    bytes_of, kinds = dict[What, int](), layer_kinds(config)
    program, first = [_once(each) for each in plan.programs["train"]], 0
    for length in together(units):
        run = range(first, first + length)
        items = [item for item in program[table.position(first)] if item.unit in run]
        # Two runs of units are the same to memory where their layers are of the same kinds, and cost the
        # same.
        key = (repr(config.model), config.pieces, repr(share), run.start == 0, run.stop == len(units),
               [kinds[at] for unit in run for at in range(*table.units[unit].layers)],
               [(item.op, item.keep, item.unit - run.start) for item in items],
               [table.units[unit].makes for unit in run])
        for item, size in zip(items, _measured(key, config, table, run, items), strict=True):
            bytes_of[_what(item)] = max(size, bytes_of.get(_what(item), size))
        first += length
    return lambda instruction: (_of_part(instruction, table) if instruction.part else
                                bytes_of.get(_what(instruction), 0))


def _of_part(item: Instruction, table: Table) -> int:
    """Of a part of a step that turns matrices: `begin` packs what it has made; a turn has three squares, and
    a matrix beside the one that it began with."""
    way = table.parameters[item.unit].turning
    assert way is not None, item
    turn = max(math.prod(each.shape) + 3 * min(each.shape)**2 for each in way.matrices)
    made = {"turn": turn}
    if not table.shards.away(item.unit):
        made["begin"] = table.parameters[item.unit].numel // table.parameters[item.unit].shards
    return made.get(item.part, 0) * way.element


def _what(item: Instruction) -> What:
    return item.op, item.keep, item.unit


def _once(program: Program) -> list[Instruction]:
    """The instructions that compute, of a few micro-batches that have one of each kind: some schedules split
    the backward of some, and some policies recompute some."""
    turns: dict[int, list[Instruction]] = defaultdict(list)
    for item in program:
        if item.op in COMPUTE:
            turns[item.microbatch].append(item)
    seen, some = set[What](), list[Instruction]()
    for items in turns.values():
        if not seen.issuperset(kinds := {*map(_what, items)}):
            seen |= kinds
            some += items
    return some


@remembered(lambda key, *_: repr(key))
def _measured(_: object, *run: Any) -> list[int]:
    """What `_measure` returns, once for each key."""
    return _measure(*run)


def _measure(config: Config, table: Table, run: range, items: Sequence[Instruction]) -> list[int]:
    """The transient bytes of each of these instructions."""
    with initialized(), Shapes(), Alive() as alive:
        compute, slots = _pipeline(config, table, run, items, alive), Slots()
        handlers, sizes = compute.handlers(), []
        for item in items:
            effect = effects(item, table, table.position(item.unit))
            for slot in effect.reads:
                if slot not in slots and slot.kind not in PARAMETER_KINDS:
                    came = _came(table, slots, slot)
                    slots.put(slot, came if came is not None else _stream(config, table, compute, slot))
            created = {slot for slot in (*effect.writes, *effect.adds)
                       if slot not in slots and slot.kind not in PARAMETER_KINDS}
            before = alive.peak = alive.bytes()
            handlers[item.op](item, slots)
            sizes.append(alive.peak - before - sum(map(table.size, created)))
            for slot in effect.frees:
                slots.free(slot)
    return sizes


def _pipeline(config: Config, table: Table, run: range, items: Sequence[Instruction],
              alive: Alive) -> PipelineRun:
    """The engine's handlers, for a rank that has these units alone."""
    share, sent, grads = share_of(config), Counter[str](), WeightGrads()
    comm = _Alone(config, table.position(run.start))
    mesh = comm.mesh
    comm.groups = {**silent_groups(share, sent, {name: len(mesh.group(name, 0)) for name, row in
                                                 GROUPS.items() if row.needed(mesh)})}
    dtype = DTYPES[config.precision.dtype]
    saving = SavingPolicy(config.pieces)
    context = Context(config.model, comm.groups, config.parallel.sequence_parallel, dtype, grads, saving,
                      _Kernels(alive), tokens=(share.tokens - 1, share.tokens), by_heads=share.by_heads)
    layers = layers_of(config)
    parameters = {p.key: p for unit in run for layer in layers[slice(*table.units[unit].layers)]
                  for p in layer.parameters()}
    weights = {key: weight_of(parameter, share, dtype) for key, parameter in parameters.items()}
    for weight in (weight for weight in weights.values() if weight.requires_grad):
        weight.register_post_accumulate_grad_hook(_forgetting(grads))

    def keeping(unit: int, others: Sequence[UnsavedMemory]) -> AbstractContextManager[Any]:
        return saving.keeping(others)

    compute = PipelineRun(comm, table, built(config, table, run, context, weights), context,
                          streams(config, table, context), keeping, _Kept())
    size, length = config.train.micro_batch_size, config.model.seq_len
    tokens, labels = (torch.zeros(size, length, dtype=torch.int64) for _ in range(2))
    inputs, targets = layers[0].example(share) if isinstance(layers[0], ReadsInputs) else (None, None)
    batch = Batch(tokens, labels, torch.zeros(size, dtype=torch.int64), 0, config.tokens_per_step,
                  inputs=inputs, targets=targets)
    if config.data.document_mask:  # one document a sequence: most of what there can be
        batch = replace(batch, documents=Documents(torch.zeros_like(tokens), ((length,),) * size))
    if config.masked:
        batch = replace(batch, num_tokens=torch.ones((), dtype=torch.int64))
    compute.feed.begin(lambda _: batch, items)
    context.rotary(comm.device, config.data.document_mask)  # a rank makes its table once
    return compute


def _came(table: Table, slots: Slots, slot: Slot) -> torch.Tensor | None:
    """What an instruction that is not measured has brought from other ranks: a tensor, or the gradient of
    one; None of other slots."""
    for made in table.units[slot.unit].makes if slot.unit >= 0 else ():
        source = slot._replace(kind=made.name)
        if not made.over or source not in slots:
            continue
        left = slots.get(source)
        if slot.kind == made.becomes:
            # as many rows as the plan counts
            rows = made.arriving_bytes // (left.itemsize * left.shape[1:].numel())
            return left.new_zeros((rows, *left.shape[1:]))
        if slot.kind == gradient_kind(made.name):
            return torch.zeros_like(left, dtype=torch.float32 if made.again else None)
    return None


def _stream(config: Config, table: Table, compute: PipelineRun, slot: Slot) -> torch.Tensor:
    """What a unit that is not measured hands on, or its gradient."""
    assert slot.kind in SENT, slot
    output = table.units[slot.unit].output
    if output is not None and not output.flat:
        return torch.zeros(2, config.model.seq_len, share_of(config).sequences)
    return compute.stream(slot.unit).empty(slot.kind, torch.device("cpu"))


def peak_bytes(analysis: Analysis, position: int, transient: Callable[[Instruction], int]) -> int:
    """The most bytes that activations and temporaries of a position take together in a train step. With
    run.cuda_graphs they are in memory of the graphs."""
    if not config_of(analysis.plan).run.cuda_graphs:
        return _peak(analysis, position, "train", transient)
    held = graphs(analysis, position, transient)
    others = [_peak(analysis, position, name, transient)
              for name in analysis.plan.programs if name != "train"]
    return held.sets + max([held.beside, *others])  # the other programs run without graphs


def _peak(analysis: Analysis, position: int, name: str, transient: Callable[[Instruction], int]) -> int:
    return max(working(analysis, position, transient, name), default=0)


def working(analysis: Analysis, position: int, transient: Callable[[Instruction], int],
            name: str = "train") -> list[int]:
    """Bytes of activations and temporaries of a position at each instruction of a program."""
    held = analysis.memory(position, name).total(*activations(analysis.table))
    forms = analysis.links_at(name, position).forms
    temporaries = {form: transient(form.item) if form.item.op in COMPUTE or form.item.part else 0
                   for form in dict.fromkeys(forms)}
    return [size + temporaries[form] for size, form in zip(held, forms, strict=True)]


class _Alone(Comm):
    """A rank of a pipeline position that talks to nobody."""

    def __init__(self, config: Config, position: int):
        mesh = make_mesh(config)
        super().__init__(mesh, mesh.group("pp", 0)[position], torch.device("cpu"))

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class _Kept:
    """Kept inputs wherever FORWARD leaves them: the slots of other instructions count their moves."""

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def give_back(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Kernels(Fused):
    """Pieces of which each is one kernel."""

    def __init__(self, alive: Alive):
        super().__init__()

        def one(body: Body) -> Body:
            def kernel(*inputs: Any) -> Any:
                with alive.one_kernel():
                    return body(*inputs)

            return kernel

        self.body = one

    def rectangle(self, *_: object) -> Rectangle:
        return SHAPES

    def kernels(self, device: torch.device) -> LossKernels | None:
        return _Loss

    def sums(self, device: torch.device) -> Pieces:
        return Kernels(_nothing)


class _Loss:
    """The loss's kernels, without numbers: what they make."""

    @staticmethod
    def largest(*_: Any) -> None:
        """`statistics` finds it."""

    @staticmethod
    def statistics(logits: torch.Tensor, places: torch.Tensor,
                   *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(2, *places.shape), torch.zeros(places.shape)

    @staticmethod
    def gradient(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        """It is written over the logits."""
        return logits.detach()


def _forgetting(grads: WeightGrads) -> Callable[[torch.Tensor], None]:
    """A hook of a parameter, for gradients of autograd: they are held until they would be added up."""
    def hook(parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None and grads.put_off is not None:
            grads.put_off.append(partial(_nothing, grad))

    return hook


def _nothing(*_: Any, **__: Any) -> None:
    pass
