"""Faults that other frameworks have had where features meet, each by its name.

Those of activations (cut over tp, recomputed before a split backward) are in test_activation.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.harness import assert_parity, batches, loopback, tiny
from threed.base.errors import PlanError
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.models.layers.parts import WORD
from threed.models.model import parameters
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.check import check_programs
from threed.program.instruction import Instruction, Op
from threed.schema import Config, OffloadConfig, PrecisionConfig, ZeroConfig

SMALL = ["model.layers=3", "model.hidden=16", "model.heads=4", "model.seq_len=8"]
SHARDED = {
    "stage-1": ["zero.stage=1"], "stage-2": ["zero.stage=2"],
    "stage-2-every-2": ["zero.stage=2", "zero.reduce_every=2"],
    "stage-3": ["zero.stage=3"],
    "stage-3-step": ["zero.stage=3", "zero.residency=step", "zero.reduce_every=step"],
    "groups": ["zero.stage=3", "zero.shard_size=2", "parallel.dp=4"],
}

# ---------------------------------------------------------------- tied embeddings with sharded gradients

ENDS = {
    "two-positions": ["parallel.pp=2"], "one-position": ["parallel.pp=1"],
    "one-position-two-stages": ["parallel.pp=2", "parallel.schedule=zb-v"],
    "split-backward": ["parallel.pp=3", "parallel.schedule=zb-h1"],
    "sequence-parallel": ["parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true"],
}


@pytest.mark.parametrize(("sharded", "ends"), [
    pytest.param(sharded, ends, marks=[pytest.mark.core] * (sharded == "groups" or ends == "two-positions"))
    for sharded in SHARDED for ends in ENDS])
def test_tied_embeddings_with_sharded_gradients(sharded, ends, references):
    """The embedding's and the head's halves of a gradient that is already in shards: half of it lost, or
    counted twice."""
    config = tiny(*SMALL, "parallel.dp=2", *ENDS[ends], *SHARDED[sharded])
    ranks, reference = loopback(config, 3), references(config, 3)
    assert_parity(ranks, reference)
    error = (ranks.first_grads[WORD] - reference.first_grads[WORD]).abs().max()
    assert error <= 1e-5 * reference.first_grads[WORD].abs().max()


@pytest.mark.parametrize("sharded", SHARDED)
def test_the_ends_of_a_tie_stay_equal(sharded):
    """Two copies of one weight that drift apart: after some steps their shards are equal to the bit."""
    config = tiny(*SMALL, "parallel.dp=2", "parallel.pp=2", *SHARDED[sharded])
    plan, mesh = make_plan(config), make_mesh(config)
    tied = next(p for p, unit in plan.table.parameters.items() if unit.name == "tied embedding")

    def work(comm: Comm) -> torch.Tensor:
        engine = Engine(Analysis(plan), comm)
        for step in range(3):
            engine.train_step(batches(config, comm, step))
        return engine.states[tied].optimizer_state.master.clone().cpu()

    weights = run_loopback(plan, mesh, work)
    for dp in range(config.dp):
        assert torch.equal(*(weights[mesh.rank(pp=pp, dp=dp)] for pp in (0, 1)))


@pytest.mark.parametrize("sharded", SHARDED)
def test_a_tie_that_is_left_out_is_refused(sharded):
    """A plan without the sum over both ends, or with it before the shards are whole."""
    plan = make_plan(tiny(*SMALL, "parallel.dp=2", "parallel.pp=2", *SHARDED[sharded]))
    programs = [list(program) for program in plan.programs["train"]]
    ties = [next(item for item in program if item.group == "tie") for program in programs]
    without = [[item for item in program if item != tie] for program, tie in zip(programs, ties)]
    early = [[item for old in program for item in ([tie, old] if old == last(program, tie.unit) else [old])]
             for program, tie in zip(without, ties)]
    for broken in (without, early):
        with pytest.raises(PlanError, match=f"p{ties[0].unit}"):
            check_programs("train", [tuple(program) for program in broken], plan.table)


def last(program: list[Instruction], unit: int) -> Instruction:
    return [item for item in program if item.op == Op.REDUCE and item.unit == unit][-1]


# ---------------------------------------------------------------- a stage that holds only the embedding


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("sharded", ["stage-1", "stage-2", "stage-3", "groups"])
def test_a_stage_that_holds_only_the_embedding(sharded, schedule, tied, references):
    """No unit of its own to gather or reduce when it is tied, nothing to send a gradient to: a rank that
    waits for ever."""
    config = tiny(*SMALL, "parallel.dp=2", "parallel.pp=3", "parallel.stage_units=[1,3,1]",
                  f"parallel.schedule={schedule}",
                  f"model.tie_embeddings={tied}", *SHARDED[sharded])
    assert make_plan(config).table.units_of(0) == [0]
    assert_parity(loopback(config, 2), references(config, 2))


# ---------------------------------------------------------------- p2p buffers that ignore dtype


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_messages_have_the_dtype_of_compute(dtype, schedule, sp):
    """An fp32 buffer for a 16-bit message: over gloo and NCCL the receiver waits for bytes that never come,
    or reads noise."""
    config = tiny(*SMALL, "parallel.pp=2", "parallel.tp=2", f"parallel.schedule={schedule}",
                  f"precision.dtype={dtype}",
                  "train.eval_every=1", f"parallel.sequence_parallel={sp}")
    plan = make_plan(config)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    def work(comm: Comm) -> tuple[set, int]:
        engine, seen, received = Engine(Analysis(plan), comm), set(), 0

        def after(instruction, slots):
            nonlocal received
            if instruction.op in (Op.SEND, Op.RECV):
                tensor = slots.get(instruction.slot)
                seen.add((tensor.dtype, tuple(tensor.shape), tensor.nbytes))
                received += instruction.op == Op.RECV

        engine.after = after
        engine.train_step(batches(config, comm, 0))
        engine.run("evaluate", batches(config, comm, 0))
        return seen, received

    shape = (8 // (2 if sp else 1), 1, 16)
    for seen, received in run_loopback(plan, make_mesh(config), work):
        assert seen == {(wanted, shape, math.prod(shape) * wanted.itemsize)}
        assert seen == {(wanted, shape, plan.table.act_bytes)}
        assert received >= config.num_microbatches


# ---------------------------------------------------------------- norms that count what is held t times, t
# times



def squares(config: Config, gradients: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """Squared gradient norms: of all, of what is replicated over tp, of the tied embedding."""
    specs = parameters(config.model)
    each = {spec: gradients[spec.name].double().square().sum().item() for spec in specs}
    return (sum(each.values()), sum(square for spec, square in each.items() if not spec.axes),
            sum(square for spec, square in each.items() if spec.tied))


@pytest.mark.parametrize("overrides", [
    ["parallel.tp=4", "zero.stage=0"], ["parallel.tp=4", "parallel.sequence_parallel=true", "zero.stage=2"],
    ["parallel.tp=2", "parallel.dp=2", "zero.stage=3"],
    ["parallel.dp=4", "zero.shard_size=2", "zero.stage=1"],
    ["parallel.dp=4", "zero.shard_size=1", "zero.stage=3"],
    ["parallel.pp=2", "parallel.tp=2", "zero.stage=1"],
    ["parallel.pp=2", "parallel.dp=4", "zero.shard_size=2", "zero.stage=2"],
    ["parallel.tp=2", "parallel.dp=2", "zero.stage=0"],
], ids=lambda overrides: "-".join(text.split(".")[1] for text in overrides))
def test_the_norm_counts_each_parameter_once(overrides, references):
    """Parameters replicated over tp counted t times, shards of several groups once a group, a tied embedding
    twice. Each would be seen: their share is far above the tolerance."""
    config = tiny(*SMALL, "model.position=learned", "optimizer.clip_grad=0.5", *overrides)
    reference, ranks = references(config, 2), loopback(config, 2)
    every, replicated, tied = squares(config, reference.first_grads)
    assert ranks.norms == pytest.approx(reference.norms, rel=1e-5)
    assert ranks.norms[0] == pytest.approx(math.sqrt(every), rel=1e-5)
    assert min(replicated, tied) > 0.001 * every and ranks.norms[0] > 0.5


# ---------------------------------------------------------------- fp16 overflow seen by one stage only


@pytest.mark.parametrize(("sharded", "position"), [
    pytest.param(sharded, position, marks=[pytest.mark.core] * (sharded == "groups" or position == 1))
    for sharded in ("stage-1", "stage-2", "stage-3", "groups") for position in range(3)])
def test_an_overflow_seen_by_one_stage_only(sharded, position):
    """Other stages take the step that one skips: the model is of two steps at once, and their loss scales
    part for good."""
    config = tiny(*SMALL, "parallel.dp=2", "parallel.pp=3", "precision.dtype=fp16",
                  "precision.initial_loss_scale=64",
                  "precision.hysteresis=1", *SHARDED[sharded])
    plan, mesh = make_plan(config), make_mesh(config)

    def work(comm: Comm) -> tuple[bool, float, bool]:
        engine = Engine(Analysis(plan), comm)
        backward = engine.handlers[Op.BACKWARD]
        before = {p: state.optimizer_state.master.clone() for p, state in engine.states.items()}

        def handle(instruction, slots):
            backward(instruction, slots)
            if comm.rank == mesh.rank(pp=position, dp=1) and instruction.microbatch == 1:
                for p in plan.table.units[instruction.unit].parameters:
                    state = engine.states[p]
                    state.gradient.whole()[state.part.layout.placed[-1].stop - 1] = torch.inf

        engine.handlers[Op.BACKWARD] = handle
        clipped, _ = engine.train_step(batches(config, comm, 0))
        moved = any(not torch.equal(before[p], state.optimizer_state.master)
                    for p, state in engine.states.items())
        return clipped.finite, engine.zero.scaler.scale, moved

    assert set(run_loopback(plan, mesh, work)) == {(False, 32.0, False)}


# ---------------------------------------------------------------- a config key that is read but has no effect

FP16, BF16, HUGE = ["precision.dtype=fp16"], ["precision.dtype=bf16"], f"precision.initial_loss_scale={2**26}"
OFFLOADED = "offload.optimizer=cpu"
KEYS: dict[str, tuple[list[str], Any, str]] = {  # key -> (where it matters, another value, what must change)
    "zero.stage": ([], 2, "plan, run"),
    "zero.shard_size": ([], 2, "plan, run"),
    "zero.reduce_every": (["zero.stage=2"], 2, "plan, run"),
    "zero.residency": (["zero.stage=3"], 2, "plan, run"),
    "zero.prefetch": (["zero.stage=3"], 3, "plan, buffers"),
    "zero.persist_below": (["zero.stage=3"], 100, "plan, run"),
    "precision.dtype": ([], "bf16", "plan, run"),
    "precision.loss_scale": (FP16, 64, "run"),
    "precision.initial_loss_scale": (FP16, 64, "run"),
    "precision.loss_scale_window": ([*FP16, "precision.initial_loss_scale=64"], 1, "run"),
    "precision.hysteresis": ([*FP16, HUGE], 1, "run"),
    "precision.min_loss_scale": ([*FP16, HUGE], 2**26, "run"),
    "precision.grad_dtype": (BF16, "bf16", "plan, run"),
    "precision.reduce_dtype": (BF16, "bf16", "plan, run"),
    "precision.master": (BF16, "none", "plan, run"),
    "offload.optimizer": ([], "cpu", "plan"),
    "offload.ratio": ([OFFLOADED], 0.5, "plan"),
    "offload.parameters": ([OFFLOADED, "zero.stage=3"], "cpu", "plan"),
    "offload.overlap": ([OFFLOADED], "none", "plan"),
    "offload.gradients": ([OFFLOADED, "zero.stage=2"], "host", "plan"),
}


def observed(config: Config) -> dict[str, Any]:
    """What a change of a key may change: the plan; the bytes of the shared buffers; numbers, traffic and
    memory of a run."""
    plan = make_plan(config)

    def work(comm: Comm) -> tuple[Any, int]:
        engine, numbers = Engine(Analysis(plan), comm), []
        states = engine.states.values()
        for step in range(3):
            clipped, _ = engine.train_step(batches(config, comm, step))
            numbers.append((clipped.loss, str(clipped.grad_norm), clipped.loss_scale, clipped.finite))
        owned = [t for s in states
                 for t in (s.weights.at_home, s.gradient.values, s.optimizer_state.master,
                           *s.optimizer_state.buffers.values())]
        held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in owned}.values())
        storage = engine.storage
        shared = sum(t.nbytes for pool in (storage.params, storage.grads) for free in pool._free.values()
                     for t in free)
        return (numbers, dict(comm.sent), held), shared

    results = run_loopback(plan, make_mesh(config), work)
    return {"plan": plan.digest, "run": [run for run, _ in results],
            "buffers": [shared for _, shared in results]}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_has_no_effect(key):
    """A setting that is taken and does nothing is a lie about what was run."""
    where, value, parts = KEYS[key]
    before, after = (observed(tiny("model.layers=4", "parallel.dp=4", *where, *change))
                     for change in ([], [f"{key}={value}"]))
    assert {part: before[part] != after[part]
            for part in parts.split(", ")} == dict.fromkeys(parts.split(", "), True)


def test_every_key_is_among_them():
    """A new key of zero, precision or offload that nobody has shown to matter. (A folder that is not there is
    an error: see gloo/test_offload_faults.py.)"""
    sections = {"zero": ZeroConfig, "precision": PrecisionConfig, "offload": OffloadConfig}
    every = {f"{name}.{leaf.name}" for name, section in sections.items()
             for leaf in dataclasses.fields(section)}
    assert {*KEYS, "offload.nvme_path"} == every


@pytest.mark.parametrize("stage, key, value", [
    (1, "shard_size", 4), (2, "reduce_every", 1), (3, "residency", 1), (3, "prefetch", 1),
    (3, "persist_below", 0)])
def test_null_means_what_the_schema_says(stage, key, value):
    """A default that is documented as one thing and done as another."""
    base = ["parallel.dp=4", f"zero.stage={stage}"]
    assert make_plan(tiny(*base)).digest == make_plan(tiny(*base, f"zero.{key}={value}")).digest
