"""Run a config on all ranks, in loopback, on the reference's data; and put its shards together again."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from allpairspy import AllPairs

from tests.reference import Picks, data_of
from threed.base.axes import axes_of
from threed.base.errors import PlanError
from threed.base.mesh import FOLDS
from threed.comm.group import Comm
from threed.comm.process import ProcessComm
from threed.config.contract import Cell, axes, cells, refusal
from threed.config.load import load
from threed.engine.engine import Engine
from threed.engine.loopback import channel_pairs, run_loopback
from threed.models.layers.experts import ExpertsConfig, Routes
from threed.planner import analyse, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.check import check_programs
from threed.program.instruction import Instruction, Op, Slot
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.documents import Documents
from threed.tensor.places import runs_of

TINY = ["model.layers=6", "model.hidden=32", "model.heads=8", "model.vocab=120", "model.vocab_multiple=64",
        "model.seq_len=16", "train.global_batch_size=8", "train.micro_batch_size=1", "train.steps=5",
        "optimizer.lr=1e-3", "optimizer.eps=1e-2", "optimizer.clip_grad=0", "optimizer.schedule=constant",
        "model.init_std=0.1"]


def tiny(*overrides: str) -> Config:
    """A model small enough for thousands of runs; no clipping, no warm-up, so that no fault can hide."""
    return load(None, [*TINY, *overrides])


def schedule_config(name: str, p: int, tp: int, zero: int, count: str, *others: str) -> Config:
    """A model with a unit for each stage (two a rank), and `count` micro-batches (a number, or p, p+1, 2p,
    3p+1)."""
    m = {"p": p, "p+1": p + 1, "2p": 2 * p, "3p+1": 3 * p + 1}.get(count) or int(count)
    virtual = ["parallel.virtual_stages=2"] if name in SCHEDULES and SCHEDULES[name].virtual is None else []
    return tiny(f"model.layers={2 * p}", "model.hidden=16", "model.seq_len=8", f"parallel.pp={p}",
                f"parallel.tp={tp}",
                f"parallel.schedule={name}", f"zero.stage={zero}", f"train.global_batch_size={m}", *virtual,
                *others)


# All that a block with experts can have, and a seed with which no fp32 cell chooses between equal scores.
EXPERTS = ["model.family=moe", "model.experts=4", "model.expert_ffn_hidden=24", "model.shared_expert_ffn=20",
           "model.router_score=sigmoid", "model.balance=bias", "optimizer.balance_rate=0.05",
           "model.z_loss=0.01", "train.seed=4"]
FILES = f"offload.nvme_path={tempfile.gettempdir()}"
# Overrides for each value of each axis of the contract. Two stages a rank where a schedule can have them:
# then on V-shaped and interleaved ones a unit is a stage of its own.
SETTINGS: dict[str, dict[object, list[str]]] = {
    "schedule": {
        **{name: [f"parallel.schedule={name}", "parallel.virtual_stages=2"]
           for name, row in SCHEDULES.items() if row.virtual is None},
        "auto": ["parallel.schedule=auto", "parallel.activation_limit=1.5x"],
        "file": [f"parallel.schedule=file:{Path(__file__).with_name('loopback') / 'order.csv'}"],
    },
    "stage": {stage: [f"zero.stage={stage}"] for stage in axes()["stage"]},
    "offload": {
        "none": [],
        "cpu": ["offload.optimizer=cpu"],
        "nvme": ["offload.optimizer=nvme", FILES],
        "cpu+parameters": ["offload.optimizer=cpu", "offload.parameters=cpu", "offload.overlap=none"],
        "nvme+parameters": ["offload.optimizer=nvme", "offload.parameters=nvme", FILES,
                            "offload.gradients=host"],
    },
    "activation": {
        "none": [],
        "full": ["activation.policy=full"],
        "selective": ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]"],
        "budget": ["activation.policy=budget"],  # and the budget, which depends on the rest
        "partition": ["activation.policy=full", "activation.partition=true"],
        "cpu": ["activation.policy=full", "activation.offload=cpu"],
    },
    "precision": {
        "fp32": [],
        "bf16": ["precision.dtype=bf16"],
        "fp16": ["precision.dtype=fp16", "precision.loss_scale=1024"],
    },
    "sequence_parallel": {False: [], True: ["parallel.sequence_parallel=true"]},
    "tied": {False: ["model.tie_embeddings=false"], True: ["model.tie_embeddings=true"]},
    "shard_groups": {False: [], True: []},  # a matter of the mesh
    "experts": {"none": [], "one": EXPERTS, "ep": [*EXPERTS, "parallel.ep=2"],
                "pair": [*EXPERTS, "parallel.ep=2", "parallel.pair=true"]},
    "context": {"none": [], "keys": ["parallel.cp=2"],  # and half as many ranks of dp
                "heads": ["parallel.cp=2", "parallel.cp_form=heads"],
                "overlap": ["parallel.cp=2", "parallel.cp_overlap=true"]},
}
# What these need on two positions; the others take 3, or 2 on the larger mesh of shard groups.
MICROBATCHES = {"file": 2, **{name: row.least(2) for name, row in SCHEDULES.items() if row.least(2) > 3}}


def cell_config(cell: Cell, ranks: int = 16, others: Iterable[str] = ()) -> Config:
    """A cell of the contract on a small mesh: pp=2, tp=2, and dp=2, or 4 in two shard groups (which on 8
    ranks are of one rank where tp has something to cut, else without tp). Experts without sequence
    parallelism are without tp, and with dp=4. Where ranks share sequences, they are half of those of dp.
    `others`: overrides. Raises what `load` raises."""
    dp, size, tp = (4, 2, 2) if cell.shard_groups else (2, 2, 2)
    if cell.experts != "none" and not cell.sequence_parallel:
        dp, size, tp = 4, 2 if cell.shard_groups else 4, 1
    elif cell.shard_groups and ranks < 16:
        dp, size, tp = (2, 1, 2) if cell.sequence_parallel or cell.activation == "partition" else (4, 2, 1)
    dp //= 2 if cell.context != "none" else 1
    batch = dp * MICROBATCHES.get(cell.schedule, 2 if dp == 4 or cell.shard_groups else 3)
    schedule = SETTINGS["schedule"].get(cell.schedule, [f"parallel.schedule={cell.schedule}"])
    chosen = [text for axis in axes() if axis != "schedule" for text in SETTINGS[axis][getattr(cell, axis)]]
    rest = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
            "model.vocab_multiple=16", "parallel.pp=2", f"parallel.tp={tp}", f"parallel.dp={dp}",
            f"zero.shard_size={size}",
            f"train.global_batch_size={batch}", *schedule, *chosen, *others]
    if cell.activation == "budget":
        others = [text for text in rest if text != "activation.policy=budget"]
        rest.append(f"activation.budget={least_budget(*others)}")
    return tiny(*rest)


def least_budget(*overrides: str) -> int:
    """Bytes of activations that a rank keeps with every unit recomputed: the least `activation.budget` that
    there can be."""
    return max(row.activation_peak_bytes
               for row in stages(analyse(tiny(*overrides, "activation.policy=full"))))


@cache
def covering() -> list[Cell]:
    """A few working cells in which every pair of values meets that works together anywhere: without experts
    and context parallelism all pairs, and with each of these each value of the other axes."""
    works = [cell for cell in dense(cells()) if refusal(cell) is None]
    starts = {cell[:count] for cell in works for count in range(len(cell) + 1)}
    rows = AllPairs(list(axes().values())[:-2], filter_func=lambda row: tuple(row) in starts)
    chosen = [Cell(*row) for row in rows]
    missing = pairs(works) - pairs(chosen)
    while missing:  # by rows that the library could not complete
        row, i, j = min(missing, key=str)
        best = max((cell for cell in works if (cell[i], cell[j]) == row),
                   key=lambda cell: len(missing & pairs([cell])))
        chosen.append(best)
        missing -= pairs([best])
    for axis, some in (("experts", with_experts()), ("context", with_context())):
        missing = {pair for pair in pairs(some) - pairs(chosen) if [*axes()][pair[1]] == axis}
        met = Counter()
        while missing:
            best = max(some, key=lambda cell: (len(missing & pairs([cell])), -_times(cell, met)))
            chosen.append(best)
            met.update(pairs([best]))
            missing -= pairs([best])
    return chosen


def _times(cell: Cell, met: Counter) -> int:
    """How often the pairs of a cell have met."""
    return sum(met[pair] for pair in pairs([cell]))


@cache
def with_experts() -> list[Cell]:
    """A working cell for each choice of experts, schedule, ZeRO stage and precision."""
    return _least_met(lambda cell: (cell.experts, cell.schedule, cell.stage, cell.precision)
                      if cell.experts != "none" == cell.context else None)


@cache
def with_context() -> list[Cell]:
    """A working cell with each form of context parallelism for each choice of schedule, ZeRO stage and
    precision, and of schedule and experts."""
    def choice(cell: Cell) -> tuple[object, ...] | None:
        if cell.context == "none":
            return None
        return (cell.context, *((cell.schedule, cell.experts) if cell.experts != "none"
                                else (cell.schedule, cell.stage, cell.precision)))

    return _least_met(choice)


def _least_met(choice: Callable[[Cell], tuple[object, ...] | None]) -> list[Cell]:
    """A working cell for each choice, None of a cell that is left out. Its other values are those that have
    met least often."""
    choices: defaultdict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells():
        if (key := choice(cell)) is not None and refusal(cell) is None:
            choices[key].append(cell)
    met, chosen = Counter(), []
    for some in choices.values():
        best = min(some, key=lambda cell: _times(cell, met))
        met.update(pairs([best]))
        chosen.append(best)
    return chosen


def dense(some: Iterable[Cell]) -> list[Cell]:
    """Those without experts and context parallelism."""
    return [cell for cell in some if cell.experts == cell.context == "none"]


def each_value(some: Iterable[Cell]) -> list[Cell]:
    """The cells of `some` with a value that no earlier cell has."""
    seen: set[tuple[int, object]] = set()
    chosen = []
    for cell in some:
        if not seen.issuperset(enumerate(cell)):
            chosen.append(cell)
        seen.update(enumerate(cell))
    return chosen


def pairs(some: Iterable[Cell]) -> set[tuple[tuple[object, object], int, int]]:
    """((value, value), axis, axis) of any two values that meet in a cell."""
    return {((cell[i], cell[j]), i, j) for cell in some for i in range(len(axes())) for j in range(i)}


@dataclass
class Ranks:
    losses: list[float]
    norms: list[float]
    first_grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    sent: list[dict[str, int]]
    evaluated: float | None = None  # loss of the step after the last, forward only, where the plan has such a
    # program


def batches(config: Config, comm: Comm, step: int, train: bool = True) -> Callable[[int], Batch]:
    data = data_of(config, step)
    micro, size = config.train.micro_batch_size, config.train.global_batch_size

    def batch(microbatch: int) -> Batch:
        first = (microbatch * config.dp + comm.here.replica) * micro
        rows = slice(first, first + micro)
        samples = torch.arange(step * size + first, step * size + first + micro)
        documents = Documents.of(data.positions_GS[rows]) if data.positions_GS is not None else None
        return Batch(data.tokens_GS[rows], data.labels_GS[rows], samples, config.train.seed,
                     data.num_tokens(config), train, documents)

    return batch


def loopback(config: Config, steps: int = 5, plan: Plan | None = None,
             data: Callable[..., Callable[[int], Batch]] = batches, picks: Picks | None = None) -> Ranks:
    analysis = analyse(config) if plan is None else Analysis(plan)
    torch.set_num_threads(1)

    def work(comm: Comm):
        engine = Engine(analysis, comm)
        return drive(config, engine, comm, steps, data=data, picks=picks)

    return collect(config, run_loopback(analysis.plan, make_mesh(config), work))


def drive(config: Config, engine: Engine, comm: Comm, steps: int,
          train_step: Callable[..., Any] | None = None,
          data: Callable[..., Callable[[int], Batch]] = batches, picks: Picks | None = None):
    """Train for some steps, then evaluate if the plan does; returns this rank's numbers and its parts of
    gradients and weights. `train_step` replaces the engine's, and `picks` the choices of routers."""
    if picks is not None:
        replay(engine, picks)
    train_step = train_step or engine.train_step
    steps_clipped, grads, scale = [], {}, engine.zero.scaler.scale

    def after(instruction, slots):
        if instruction.op == Op.CLIP:
            for unit, state in engine.zero.stepped.items():
                gradient = state.gradient.values
                by = scale * share(slots.get(Slot("scale")))
                counts = state.part.layout.placed[0].parameter.counted  # of rows: nothing scales them
                grads[unit] = (gradient.float() / (1.0 if counts else by)).cpu()

    def share(clipped: Any) -> float:  # by which STEP divides, where a loss counts by itself
        return 1.0 if clipped.counted is None else clipped.counted / config.tokens_per_step

    engine.after = after
    for step in range(steps):
        steps_clipped.append(train_step(data(config, comm, step))[0])
        engine.after = None
    engine.settle()
    # (from here, on a GPU, because another thread's stream would not wait for this one's)
    weights = {unit: torch.clone(state.optimizer_state.master).cpu() for unit, state in engine.states.items()}
    places = {unit: (state.part.owned, state.part.layout) for unit, state in engine.states.items()}
    # (read late: until now nobody has waited for a GPU)
    losses, norms = ([getattr(each, name) for each in steps_clipped] for name in ("loss", "grad_norm"))
    sent, evaluated = dict(comm.sent), None
    if "evaluate" in engine.plan.programs:
        evaluated = engine.run("evaluate", data(config, comm, steps, train=False))[0].loss
    engine.close()
    return losses, norms, grads, weights, places, comm.here, sent, evaluated


def replay(engine: Engine, picks: Picks) -> None:
    """Routers choose what a reference chose."""

    def choice(layer: Routes, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = layer.context.places(batch.documents).runs
        mine = [[picks[layer.name, sample][place] for run in runs_of(rows, at) for place in run]
                for at, sample in enumerate(batch.samples_B.tolist())]
        return torch.tensor(mine, device=scores.device).transpose(0, 1).flatten(0, 1)

    for layer in itertools.chain(*engine.pipeline.layers.values()):
        if isinstance(layer, Routes):
            layer._choice = partial(choice, layer)


def collect(config: Config, results: list) -> Ranks:
    """Whole tensors from every rank's parts. Parts that several ranks hold must agree."""
    whole: list[dict[str, torch.Tensor]] = [{}, {}]
    buffers: list[dict] = [{}, {}]
    layouts, sizes = {}, {**config.axis_sizes, **config.fold_sizes}
    for _, _, grads, weights, places, here, *_ in results:
        for which, parts in enumerate((grads, weights)):
            for unit, part in parts.items():
                (start, stop), layout = places[unit]
                folds = {axis for placed in layout.placed for axis in placed.parameter.axes if axis in FOLDS}
                cut = tuple((axis, here.on[axis]) for axis in folds or axes_of("parameters"))
                key = (unit, cut, here.position)
                buffer = buffers[which].setdefault(key, torch.full((layout.numel,), torch.nan))
                buffer[start:stop] = part
                layouts[key] = layout
    for which in (0, 1):
        for key, buffer in buffers[which].items():
            for placed in layouts[key].placed:
                value = buffer[placed.start:placed.stop].view(placed.shape)
                empty = torch.full(placed.parameter.stored, torch.nan)
                into = whole[which].setdefault(placed.parameter.name, empty)
                offset, shape = placed.parameter.part(sizes, dict(key[1]))
                _write(into[tuple(slice(at, at + size) for at, size in zip(offset, shape))], value)
    losses, norms, evaluated = results[0][0], results[0][1], results[0][7]
    for result in results:
        assert (result[0], result[1], result[7]) == (losses, norms, evaluated), "ranks disagree"
    return Ranks(losses, norms, whole[0], whole[1], [result[6] for result in results], evaluated)


def _write(into: torch.Tensor, part: torch.Tensor) -> None:
    """Write a rank's part where nothing is yet, or what another rank has written is the same."""
    before = into[~into.isnan()]
    assert not len(before) or torch.equal(into, part), "ranks hold different copies"
    into.copy_(part)


class Tolerance(NamedTuple):
    """Tolerances of the numerics contract: relative, or relative to a tensor's largest element."""

    loss: float
    norm: float
    grad: float
    weight: float


# Triton is not among .venv's packages: other tests run without it, as for most who have no GPU. make kernels,
# which CI runs, has it, and skips none.
needs_triton = pytest.mark.skipif(find_spec("triton") is None,
                                  reason="needs the package triton (without a GPU: make kernels)")
MARGIN = 1e-5  # of scores in fp32: with less between two, a mesh may choose another expert than the reference
FP32, SIXTEEN = Tolerance(1e-5, 1e-4, 1e-5, 1e-4), Tolerance(1e-3, 5e-3, 5e-2, 1e-1)


def assert_contract(config: Config, references, run: Callable[..., Ranks] = loopback,
                    steps: int | None = None) -> None:
    """The numerics contract of a config's precision, against the reference that uses the same casts. `run`
    gets config and steps; and with experts in 16 bits, whose rounding would change a few choices, `picks`:
    those of the reference."""
    usual, tolerance = (3, FP32) if config.precision.dtype == "fp32" else (4, SIXTEEN)
    steps = steps or usual
    reference, replayed = references(config, steps), {}
    if isinstance(config.model, ExpertsConfig):
        if tolerance is FP32:
            assert reference.margin >= MARGIN, f"{reference.margin}: take another train.seed"
        else:
            replayed = {"picks": reference.picks}
    assert_parity(run(config, steps, **replayed), reference, tolerance)


def assert_parity(ranks: Ranks, reference, tolerance: Tolerance = FP32) -> None:
    loss, norm, grad, weight = tolerance
    for got, want in zip(ranks.losses, reference.losses, strict=True):
        assert abs(got - want) <= loss * want, (ranks.losses, reference.losses)
    if ranks.evaluated is not None:
        got, want = ranks.evaluated, reference.evaluated
        assert abs(got - want) <= loss * want, (got, want)
    for got, want in zip(ranks.norms, reference.norms, strict=True):
        assert abs(got - want) <= norm * want, (ranks.norms, reference.norms)
    for all_got, all_want, most in ((ranks.first_grads, reference.first_grads, grad),
                                    (ranks.weights, reference.weights, weight)):
        assert all_got.keys() == all_want.keys()
        for name, want in all_want.items():
            error, size = (all_got[name] - want).abs().max().item(), want.abs().max().item()
            assert error <= most * max(size, 1e-3), (name, error, size)


def same_bits(runs: list[Ranks]) -> None:
    """Runs that are equal in every number, tensor and bit."""
    for a, b in itertools.pairwise(runs):
        assert (a.losses, a.norms, a.evaluated) == (b.losses, b.norms, b.evaluated)
        for one, other in ((a.first_grads, b.first_grads), (a.weights, b.weights)):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert torch.equal(value, other[name]), name


def over_gloo(rank: int, store_path: str, config: Config, steps: int, picks: Picks | None = None):
    """`loopback` for one real process of tests.workers."""
    plan = make_plan(config)
    store = dist.FileStore(store_path, config.world_size)
    comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), 60.0, store)
    try:
        comm.open_channels(channel_pairs(plan))
        return drive(config, Engine(Analysis(plan), comm), comm, steps, picks=picks)
    finally:
        comm.close()


def why_refused(plan: Plan, edit: Callable[[list[Instruction]], None], name: str = "train") -> str:
    """Why an edit of the first position's program is refused."""
    program, *others = plan.programs[name]
    edit(edited := list(program))
    with pytest.raises(PlanError) as caught:
        check_programs(name, [tuple(edited), *others], plan.table)
    return str(caught.value).splitlines()[0]
