"""Muon: the numbers of torch.optim.Muon on every mesh, what a turn does to singular values, and what is sent
for it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import guides, reference
from tests.harness import EXPERTS, Ranks, batches, collect, drive, loopback, same_bits, tiny
from tests.loopback.test_checkpoint import at, manifest, named, on_ranks, saved_after, step
from tests.own import assert_own, own
from tests.own import run as run_own
from threed.base.errors import InputError
from threed.checkpoint.load import resume
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.boxes import boxes
from threed.models.model import parameters
from threed.monitor.meter import Meter
from threed.optim.base import Update
from threed.optim.registry import OPTIMIZERS, MatrixOptimizer
from threed.planner import analyse, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Op
from threed.program.summary import stages
from threed.program.trace import Trace
from threed.schema import Config, OptimizerConfig

LLAMA = ["optimizer.name=muon", "model.bias=false", "model.norm=rmsnorm", "model.activation=swiglu",
         "model.kv_heads=4", "model.layers=2"]
FP32 = "optimizer.turn_dtype=fp32"


def turned(matrix: torch.Tensor, **others) -> torch.Tensor:
    muon = OPTIMIZERS["muon"]
    assert isinstance(muon, MatrixOptimizer)
    return muon.turn(matrix.clone(), Update(OptimizerConfig(**others), 1.0, 1, True, 1.0))


# ---------------------------------------------------------------- one turn


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (33, 7), (1, 20), (20, 1), (128, 128)])
def test_a_turn_is_that_of_torch(shape):
    """In bf16 to the bit; in fp32 as a plain iteration in fp64."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    weight.grad = matrix.clone()
    optimizer.step()
    expected = -weight.detach() / math.sqrt(max(1, shape[0] / shape[1]))
    if shape[0] <= shape[1]:
        assert torch.equal(turned(matrix.bfloat16()).float(), expected)
    else:
        torch.testing.assert_close(turned(matrix.bfloat16()).float(), expected, rtol=1e-6, atol=0)
    exact = reference.newton_schulz(matrix.double(), OptimizerConfig())
    torch.testing.assert_close(turned(matrix).double(), exact, rtol=0, atol=2e-5)


def test_a_turn_brings_singular_values_to_about_one():
    left, right = (torch.linalg.qr(torch.randn(96, 64, generator=torch.Generator().manual_seed(seed)))[0]
                   for seed in (1, 2))
    values = torch.logspace(0, -1.5, 64)
    found = left.T @ turned(left @ values.diag() @ right.T) @ right
    assert (found - found.diag().diag()).abs().max() < 1e-3  # the vectors are the same
    assert found.diag().min() > 0.68 and found.diag().max() < 1.21


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["muon", "polar"])
def test_zeros_give_zeros(name, dtype):
    optimizer = OPTIMIZERS[name]
    assert isinstance(optimizer, MatrixOptimizer)
    out = optimizer.turn(torch.zeros(8, 6, dtype=dtype), Update(OptimizerConfig(), 1.0, 1, True, 1.0))
    assert torch.equal(out, torch.zeros(8, 6, dtype=dtype))


@pytest.mark.parametrize("size", [1e-6, 1e-9, 1e-12])
def test_a_small_matrix_turns_as_a_large_one(size):
    """Clipping, or a loss scale, may leave a matrix below 1e-7: torch's eps would turn it by less."""
    matrix = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(turned(size * matrix), turned(matrix), rtol=1e-3, atol=1e-4)
    small = turned(size * matrix, turn_eps=1e-7)
    assert size > 1e-10 or small.norm() < 0.1 * turned(matrix).norm()


def test_a_turn_overwrites():
    """So who verifies a turn gives each of the two a matrix of its own."""
    matrix = torch.randn(8, 8)
    before = matrix.clone()
    muon = OPTIMIZERS["muon"]
    assert isinstance(muon, MatrixOptimizer)
    muon.turn(matrix, Update(OptimizerConfig(), 1.0, 1, True, 1.0))
    assert not torch.equal(matrix, before)


def test_flops():
    muon = OPTIMIZERS["muon"]
    assert isinstance(muon, MatrixOptimizer)
    m, n = 16, 40
    assert (muon.flops(m, n, OptimizerConfig()) == muon.flops(n, m, OptimizerConfig())
            == 5 * (4 * m * m * n + 2 * m**3))


# ---------------------------------------------------------------- torch.optim.Muon, given the same gradients


def gradient_of(name: str, shape: tuple[int, ...], at: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(at * 1000 + sum(name.encode()))
    return torch.randn(shape, generator=generator)


def given_gradients(config: Config, steps: int) -> Ranks:
    """Weights after steps whose reduced gradients are `gradient_of`."""
    analysis = analyse(config)
    shapes = {each.name: each.stored for each in parameters(config.model)}
    torch.set_num_threads(1)

    def work(comm: Comm):
        engine = Engine(analysis, comm)
        clip, at = engine.handlers[Op.CLIP], itertools.count()

        def handle(instruction, slots):
            now = next(at)
            for state in engine.zero.stepped.values():
                values, part = state.gradient.values, state.part
                for box in boxes(part.layout, comm.here.on, *part.owned):
                    whole = gradient_of(box.name, shapes[box.name], now)
                    piece = whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
                    values[box.start - part.owned[0]:box.stop - part.owned[0]] = piece.flatten()
            return clip(instruction, slots)

        engine.handlers[Op.CLIP] = handle
        return drive(config, engine, comm, steps)

    return collect(config, run_loopback(analysis.plan, make_mesh(config), work))


def of_torch(config: Config, steps: int) -> dict[str, torch.Tensor]:
    plain = reference.Reference(config)
    for at_step in range(steps):
        for name, value in plain.trained.items():
            value.grad = gradient_of(name, tuple(value.shape), at_step)
        for group in plain.optimizer.param_groups:
            group["lr"] = config.optimizer.lr
        plain.optimizer.step()
    return {name: value.detach() for name, value in plain.masters.items()}


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("mesh", [[], *(["parallel.dp=4", f"zero.stage={stage}"] for stage in range(4)),
                                  ["parallel.dp=2", "parallel.tp=2", "zero.stage=1"],
                                  ["parallel.dp=2", "parallel.pp=2", "zero.stage=3"]])
def test_the_bits_of_torch(mesh, scale):
    """Five updates in bf16. (AdamW rounds otherwise here than in torch.)"""
    from threed.comm.process import initialized

    config = tiny(*LLAMA, *mesh, f"optimizer.turn_scale={scale}", "optimizer.lr=0.02")
    got = given_gradients(config, 5).weights
    with initialized():
        want = of_torch(config, 5)
    matrices = 0
    for name, value in want.items():
        if reference.rows_of_matrices(config, name, value.shape):
            assert torch.equal(got[name], value), name
            matrices += 1
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
    assert matrices == 4 * config.model.layers


# ---------------------------------------------------------------- meshes


def updates(config: Config) -> dict[str, torch.Tensor]:
    """Of each matrix in a first step without decay: the direction, as its weights moved by lr x size."""
    before, after = (loopback(config, steps).weights for steps in (0, 1))
    out = {}
    for name, value in before.items():
        for number, rows in enumerate(reference.rows_of_matrices(config, name, value.shape)):
            moved = (value - after[name]).reshape(-1, value.shape[-1])[rows]
            out[f"{name} {number}"] = moved / (config.optimizer.lr * 0.2 * math.sqrt(max(moved.shape)))
    return out


NO_DECAY = ["optimizer.weight_decay=0", "optimizer.lr=0.1"]


@pytest.mark.parametrize("mesh", [[], ["parallel.dp=2", "parallel.tp=2", "zero.stage=3"]])
def test_the_singular_values_of_an_update(mesh):
    """Whatever an engine does without a turn, this is not what comes out."""
    config = tiny(*LLAMA, FP32, *NO_DECAY, *mesh)
    grads = loopback(config, 1).first_grads
    for key, moved in updates(config).items():
        name, number = key.split()
        rows = reference.rows_of_matrices(config, name, grads[name].shape)[int(number)]
        gradient = grads[name].reshape(-1, grads[name].shape[-1])[rows]
        values = torch.linalg.svdvals(gradient)
        left, began, right = torch.linalg.svd(gradient, full_matrices=False)
        became = (left.T @ moved @ right.T).diag()[began > 0.01 * values.norm()]
        assert len(became) > 4 and became.min() > 0.65 and became.max() < 1.23, key


@pytest.mark.parametrize("overrides", [[], ["optimizer.matrices=heads"], EXPERTS])
def test_meshes_agree(overrides):
    sp = ["parallel.sequence_parallel=true"]
    meshes = [[], ["parallel.tp=2", *sp], ["parallel.tp=4", *sp, "parallel.dp=2", "zero.stage=1"]]
    first, *others = (updates(tiny(*LLAMA, FP32, *NO_DECAY, *overrides, *mesh)) for mesh in meshes)
    for other in others:
        for name, value in first.items():
            assert (other[name] - value).abs().max() < 1e-3 * value.abs().max(), name


def test_parts_turned_apart_do_not(monkeypatch):
    """As an owner of a tp part would: the numbers of another optimizer, which the tolerances see."""
    muon = OPTIMIZERS["muon"]
    assert isinstance(muon, MatrixOptimizer)
    turn, config = type(muon).turn, tiny(*LLAMA, FP32, *NO_DECAY)
    right = updates(config)
    monkeypatch.setattr(type(muon), "turn", lambda self, matrix, by: torch.cat(
        [turn(self, part.clone(), by) for part in matrix.chunk(2)]))
    wrong = updates(config)
    errors = [((wrong[name] - value).norm() / value.norm()).item() for name, value in right.items()]
    assert min(errors) > 0.1, errors


def test_losses_of_twenty_steps():
    meshes = [["parallel.dp=2"], ["parallel.tp=2", "parallel.pp=2"]]
    one, other = (loopback(tiny(*LLAMA, FP32, "train.steps=20", *mesh), 20).losses for mesh in meshes)
    assert one == pytest.approx(other, rel=1e-4)
    one, other = (loopback(tiny(*LLAMA, "train.steps=20", *mesh), 20).losses for mesh in meshes)
    assert one == pytest.approx(other, rel=1e-3)


def test_tiers_change_no_bit(tmp_path):
    """Where the state is: on the host, the disk, with gradients and parameters there, too, and of a part of
    the units. (On the device the norm is summed up in another order.)"""
    disk = ["offload.optimizer=nvme", f"offload.nvme_path={tmp_path}"]
    same_bits([loopback(tiny(*LLAMA, "parallel.dp=2", "zero.stage=2", *each), 3) for each in (
        ["offload.optimizer=cpu"], disk, ["offload.optimizer=cpu", "offload.gradients=host"],
        ["zero.stage=3", *disk, "offload.parameters=nvme"], ["zero.stage=1", *disk])])


def test_shard_groups_change_no_bit():
    """Four ranks that sum in one order, with one copy of what is sharded and with two."""
    runs = [loopback(tiny(*LLAMA, "parallel.dp=2", "parallel.tp=2", "zero.stage=1", *groups), 3)
            for groups in ([], ["zero.shard_size=1"])]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    same_bits([loopback(tiny(*LLAMA, "parallel.dp=4", "zero.shard_size=2", f"zero.stage={stage}",
                             "zero.reduce_every=step", "optimizer.clip_grad=0.5")
                        if stage > 1 else
                        tiny(*LLAMA, "parallel.dp=4", "zero.shard_size=2", f"zero.stage={stage}",
                             "optimizer.clip_grad=0.5"), 3) for stage in (1, 2, 3)])


# ---------------------------------------------------------------- metrics


def metrics_of(config: Config, steps: int, look: Callable[[int, int, Trace], None] = lambda *_: None,
               ) -> list[dict[str, float | None]]:
    """Of each step. `look` is given (step, rank, trace)."""
    plan = make_plan(config)

    def work(comm: Comm) -> list[dict[str, float | None]]:
        engine, out = Engine(Analysis(plan), comm), []
        meter = Meter(config, Analysis(plan), comm, engine.arrivals, turned=engine.zero.matrices.turned)
        for number in range(steps):
            meter.begin()
            _, trace = engine.train_step(batches(config, comm, number))
            out.append(meter.metrics(meter.report(trace, 1.0), 1.0))
            look(number, comm.rank, trace)
        return out

    return run_loopback(plan, make_mesh(config), work)[0]


def sizes_of_updates(config: Config, steps: int) -> list[float]:
    """The root of the mean square of what the matrices of a reference move by, over the learning rate."""
    plain, found = reference.Reference(config), []
    for number in range(steps):
        before = {name: value.detach().clone() for name, value in plain.masters.items()}
        plain.run(1, number)
        moved = [(value.detach() - before[name]).flatten() for name, value in plain.masters.items()
                 if reference.rows_of_matrices(config, name, value.shape)]
        found.append(float(torch.cat(moved).double().square().mean().sqrt()) / config.optimizer.lr)
    return found


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("mesh", [[], ["parallel.dp=4", "zero.shard_size=2", "zero.stage=1"],
                                  ["parallel.dp=2", "zero.stage=1", "offload.optimizer=cpu"],
                                  ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "zero.stage=3"]])
def test_the_size_of_updates_is_a_metric(mesh, scale):
    """Equal on all meshes: each owner adds its matrices."""
    config = tiny(*LLAMA, FP32, *NO_DECAY, f"optimizer.turn_scale={scale}", *mesh)
    got = [each["optimizer/update_rms"] for each in metrics_of(config, 3)]
    want = sizes_of_updates(config, 3)
    if got[0] is None:  # of the step before: the device works behind the host
        got, want = got[1:], want[:-1]
    assert got == pytest.approx(want, rel=1e-3)
    assert scale == "original" or all(0.1 < each < 0.25 for each in want)


def test_the_time_of_turns_is_a_metric():
    """That of the rank that turns longest. (`metrics_of` asks each trace.)"""
    config, took = tiny(*LLAMA, "parallel.dp=2", "zero.stage=1"), dict[tuple[int, int], float]()
    program = make_plan(config).programs["train"][0]

    def look(number: int, rank: int, trace: Trace) -> None:
        took[number, rank] = sum(end - start for item, start, end in
                               zip(program, trace.started, trace.ended, strict=True) if item.part == "turn")

    values = [each["optimizer/turn_s"] for each in metrics_of(config, 3, look)]
    most = [max(took[number, rank] for rank in range(2)) for number in range(3)]
    assert values in (most, [most[0], *most[:-1]]) and min(most) > 0


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize("mesh", [
    ["parallel.dp=4", "zero.stage=0"], ["parallel.dp=4", "zero.stage=1"],
    ["parallel.dp=2", "parallel.tp=2", "zero.stage=2"],
    ["parallel.dp=2", "parallel.pp=2", "zero.stage=3"],
    ["parallel.dp=4", "zero.shard_size=2", "zero.stage=1"],
    [*EXPERTS, "parallel.dp=4", "parallel.ep=2", "zero.stage=1"],
])
def test_counted_is_planned(mesh):
    """In sum over the ranks, exactly; and what else is sent is what the plan says."""
    config = tiny(*LLAMA, *mesh)
    plan, mesh_ = make_plan(config), make_mesh(config)
    ways = {number: unit.turning for number, unit in plan.table.parameters.items() if unit.turning}

    def work(comm: Comm) -> tuple[int, int]:
        engine, sent = Engine(Analysis(plan), comm), list[int]()

        def counting(group):
            exchange = group.exchange

            def counted(output, tensor, gives, takes):
                sent.append((len(tensor) - gives[group.rank()]) * tensor.itemsize)
                return exchange(output, tensor, gives, takes)

            return counted

        for name in {way.group for way in ways.values()}:
            comm.groups[name].exchange = counting(comm.groups[name])
        engine.train_step(batches(config, comm, 0))
        return sum(sent), comm.sent["dp"]

    ranks = run_loopback(plan, mesh_, work)
    copies = {number: sum(1 for _ in mesh_.groups(way.group)) // config.parallel.pp
              for number, way in ways.items()}
    assert sum(sent for sent, _ in ranks) == sum((way.sent + way.returned) * way.element * copies[number]
                                                 for number, way in ways.items())
    planned = len(ranks) // config.parallel.pp * sum(stage.sent_bytes["dp"]
                                                     for stage in stages(Analysis(plan)))
    assert abs(sum(dp for _, dp in ranks) - planned) <= len(ways) * len(ranks)  # which is of whole bytes


def test_the_plan_counts_them():
    config = tiny(*LLAMA, "parallel.dp=2", "zero.stage=1")
    analysis = analyse(config)
    with_muon, = (stage.sent_bytes["dp"] for stage in stages(analysis))
    plain, = (stage.sent_bytes["dp"] for stage in stages(analyse(tiny(*LLAMA[1:], "parallel.dp=2",
                                                                      "zero.stage=1"))))
    ways = [unit.turning for unit in analysis.table.parameters.values() if unit.turning]
    both = sum(round(each * way.element / way.ranks) for way in ways for each in (way.sent, way.returned))
    assert abs(with_muon - plain - both) < 4096  # units apart have padding of their own


# ---------------------------------------------------------------- steps that are skipped


@pytest.mark.parametrize("overrides", [["zero.stage=1"], ["zero.stage=2", "offload.optimizer=cpu"]])
def test_a_skipped_step_changes_nothing(overrides):
    """Neither moment nor weights; both exchanges still happen, as the program says."""
    config = tiny(*LLAMA, "parallel.dp=2", "train.on_nonfinite=skip", *overrides)
    plan = make_plan(config)

    def work(comm: Comm) -> tuple[list[bool], list[bool], list[bool], Counter[Op]]:
        engine, seen, turned_ = Engine(Analysis(plan), comm), Counter[Op](), list[bool]()
        clip, steps, same = engine.handlers[Op.CLIP], itertools.count(), []

        def handle(instruction, slots):
            if next(steps) == 1 and comm.rank == 1:
                next(iter(engine.zero.stepped.values())).gradient.values[0] = torch.nan
            return clip(instruction, slots)

        engine.handlers[Op.CLIP] = handle
        engine.after = lambda item, slots: seen.update([item.op] if item.op == Op.EXCHANGE else [])
        finite = []
        for number in range(3):
            before = {unit: [each.clone() for each in state.kept().values()]
                      for unit, state in engine.states.items()}
            finite.append(engine.train_step(batches(config, comm, number))[0].finite)
            same.append(all(torch.equal(one, other) for unit, state in engine.states.items()
                            for one, other in zip(before[unit], state.kept().values(), strict=True)))
            turned_.append(engine.zero.matrices.turned.take()[1] > 0)
        return finite, same, turned_, seen

    turning = sum(1 for unit in plan.table.parameters.values() if unit.turning)
    for finite, same, turned_, seen in run_loopback(plan, make_mesh(config), work):
        assert finite == [True, False, True] and same == [False, True, False]
        assert turned_ in (finite, [False, *finite[:-1]])  # of the step before, on a GPU
        assert seen[Op.EXCHANGE] == 3 * 2 * turning


# ---------------------------------------------------------------- checkpoints


MESHES = {
    "one": [], "dp": ["parallel.dp=4", "zero.stage=0"], "tp": ["parallel.tp=2", "zero.stage=1"],
    "pp": ["parallel.pp=2", "parallel.dp=2", "zero.stage=3"],
    "all": ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "zero.stage=2",
            "parallel.sequence_parallel=true"],
    "groups": ["parallel.dp=4", "zero.shard_size=2", "zero.stage=1"],
}


def kept(engine: Engine, comm: Comm) -> list[tuple]:
    """What a rank has: (name, kind, box, values)."""
    return [(box.name, kind, box.offset, whole[box.start - state.part.owned[0]:
                                              box.stop - state.part.owned[0]].view(box.shape).clone())
            for state in engine.states.values()
            for box in boxes(state.part.layout, comm.here.on, *state.part.owned)
            for kind, whole in state.kept().items()]


def together(ranks: list[list[tuple]], config: Config) -> dict[tuple[str, str], torch.Tensor]:
    stored = {each.name: each.stored for each in parameters(config.model)}
    out: dict[tuple[str, str], torch.Tensor] = {}
    for name, kind, offset, values in itertools.chain(*ranks):
        into = out.setdefault((name, kind), torch.full(stored[name], torch.nan))
        into[tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))] = values
    return out


@pytest.mark.parametrize("before", MESHES)
def test_moments_go_to_any_mesh(before, tmp_path):
    config = at(tmp_path, *LLAMA, *MESHES[before])
    path = saved_after(config, 2)
    assert {kind for entry in manifest(path)["parameters"].values() for kind in entry["sums"]} == {
        "param", "momentum", "exp_avg", "exp_avg_sq"}
    found = []
    for mesh in MESHES.values():
        other = named(at(tmp_path, *LLAMA, *mesh), path)

        def load(engine: Engine, comm: Comm, other: Config = other) -> list[tuple]:
            resume(other, engine.zero)
            return kept(engine, comm)

        found.append(together(on_ranks(other, load), other))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, value in other.items():
            assert torch.equal(value, found[0][key]) and not value.isnan().any(), key
    assert any(kind == "momentum" and value.abs().max() > 0 for (_, kind), value in found[0].items())


def test_polar_goes_on_from_muon(tmp_path):
    path = saved_after(at(tmp_path, *LLAMA), 1)
    goes_on = named(at(tmp_path, *LLAMA, "optimizer.name=polar"), path)
    resumed, *_ = on_ranks(goes_on, lambda engine, comm: (resume(goes_on, engine.zero),
                                                          step(engine, comm, 1))[0])
    assert any("its momentum goes on" in line for line in resumed.notes)


# ---------------------------------------------------------------- an optimizer of your own


def test_the_guide(monkeypatch):
    """Its `polar`, in some ten lines, has the bits of the one that ships."""
    given: dict[str, Any] = {}
    (block,) = (each for each in guides.code("matrices") if "class Polar" in each)
    exec(block, given)
    config = tiny(*LLAMA, FP32, "optimizer.name=polar", "parallel.dp=2", "parallel.tp=2", "zero.stage=1")
    shipped = loopback(config, 2)
    monkeypatch.setitem(OPTIMIZERS, "polar", given["Polar"]())
    same_bits([shipped, loopback(config, 2)])
    lines = [line for line in block.splitlines()
             if line.strip() and not line.lstrip().startswith(('"', "from"))]
    assert len(lines) <= 12


# ---------------------------------------------------------------- user layers


class Inner(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(size), nn.Linear(size, 3 * size)
        self.down = nn.Linear(3 * size, size)
        self.mix = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + x @ self.mix


def model_of(*adamw: str):
    import threed

    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(6, generator=generator), torch.randn(4, generator=generator)) for _ in range(64)]
    return threed.Layers([threed.Spec(nn.Linear, 6, 16), threed.Spec(Inner, 16),
                          threed.Spec(Inner, 16, adamw=adamw), threed.Spec(nn.Linear, 16, 4)],
                         _squares, data)


def _squares(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (out - wanted).square().mean()  # (of separate operations: fake GPUs have no loss kernel)


@pytest.mark.parametrize("overrides", [{}, {"parallel.dp": 2, "zero.stage": 1},
                                       {"parallel.dp": 2, "parallel.pp": 2, "zero.stage": 3},
                                       {"parallel.dp": 2, "zero.stage": 0, "optimizer.clip_grad": 0.1}])
def test_user_layers(overrides):
    """Matrices of nn.Linear are turned, but those that a layer names for AdamW."""
    named_ = {"optimizer.name": "muon", "optimizer.turn_dtype": "fp32", **overrides}
    config = own(model_of("up.weight"), **named_)
    units = make_plan(config).table.parameters.values()
    turning = {each.parameter for unit in units if unit.turning for each in unit.turning.matrices}
    assert turning == {"Linear.0.weight", "Inner.1.up.weight", "Inner.1.down.weight", "Inner.2.down.weight",
                       "Linear.3.weight"}
    assert_own(config)


def test_user_layers_without_a_name_differ():
    """A reference that named nothing for AdamW would have other numbers."""
    one, other = (run_own(own(model_of(*names), **{"optimizer.name": "muon"}), 2).losses
                  for names in ((), ("up.weight",)))
    assert one[0] == other[0] and one[1] != other[1]


def test_a_parameter_that_a_layer_does_not_have():
    with pytest.raises(InputError, match=r"layer Inner.2 names out.weight for AdamW, and has .*: name one"):
        make_plan(own(model_of("out.weight"), **{"optimizer.name": "muon"}))


def test_a_model_without_a_matrix():
    import threed
    from threed.base.errors import ConfigError

    data = [(torch.zeros(4), torch.zeros(4))] * 8
    layers_ = [threed.Spec(nn.LayerNorm, 4), threed.Spec(nn.LayerNorm, 4)]
    with pytest.raises(ConfigError, match="no layer of the model has one; choose adamw"):
        own(threed.Layers(layers_, nn.functional.mse_loss, data), **{"optimizer.name": "muon"})
    alone = [threed.Spec(nn.Linear, 4, 4, bias=False), threed.Spec(nn.Linear, 4, 4, bias=False)]
    with pytest.raises(ConfigError, match=r"optimizer.eps=0.01 is for what AdamW steps"):
        own(threed.Layers(alone, nn.functional.mse_loss, data), **{"optimizer.name": "muon"})
