"""Optimizer state and parameters on the host and on disk: against the reference, and against the device, to
the bit."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from tests.harness import Ranks, assert_contract, batches, loopback, same_bits, tiny
from tests.late import be_late
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.engine.underway import UnderWay
from threed.features.zero.storage import Storage
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.show import timeline
from threed.program.traffic import sent_by
from threed.schema import Config

SMALL = ["model.layers=4", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16",
         "train.eval_every=1"]
TP, SP = ["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
CPU, NVME = ["offload.optimizer=cpu"], ["offload.optimizer=nvme"]
CPU_BOTH, NVME_BOTH = [*CPU, "offload.parameters=cpu"], [*NVME, "offload.parameters=nvme"]
TIERS = {"cpu": CPU, "nvme": NVME, "cpu-both": CPU_BOTH, "nvme-both": NVME_BOTH,
         "state-on-disk": [*NVME, "offload.parameters=cpu"],
         "weights-on-disk": [*CPU, "offload.parameters=nvme"]}
BF16, FP16 = ["precision.dtype=bf16"], ["precision.dtype=fp16", "precision.loss_scale=1024"]


def small(path: Path, stage: int, *others: str, dp: int = 2, pp: int = 2, micro_batches: int = 3) -> Config:
    """Files go to `path` where some are asked for."""
    files = [f"offload.nvme_path={path}"] if any(text.endswith("=nvme") for text in others) else []
    return tiny(*SMALL, f"zero.stage={stage}", f"parallel.dp={dp}", f"parallel.pp={pp}",
                f"train.global_batch_size={dp * micro_batches}", *files, *others)


# ---------------------------------------------------------------- all together

AXES: dict[str, list] = {
    "tier": list(TIERS),
    "stage": [3, 0, 1, 2],
    "ratio": [1.0, 0.3, 0.5],
    "schedule": ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "breadth-first"],
    "mesh": ["plain", "tp", "sp", "groups"],
    "tied": [True, False],
    "precision": ["fp32", "bf16", "fp16"],
    "activation": ["none", "full", "cpu"],
}
MESHES = {"plain": (2, []), "tp": (2, TP), "sp": (2, SP), "groups": (4, ["zero.shard_size=2"])}
PRECISIONS = {"fp32": [], "bf16": BF16, "fp16": FP16}
ACTIVATIONS = {"none": [], "full": ["activation.policy=full"],
               "cpu": ["activation.policy=full", "activation.offload=cpu"]}


def works(row: list) -> bool:
    """What the contract does not refuse."""
    parameters = len(row) > 0 and any("parameters" in text for text in TIERS[row[0]])
    if len(row) > 1 and parameters and row[1] < 3:
        return False
    return not (len(row) > 4 and row[1] == 0 and row[4] == "groups")


def composed(path: Path, tier: str, stage: int, ratio: float, schedule: str, mesh: str, tied: bool,
             precision: str,
             activation: str, *others: str) -> Config:
    dp, over = MESHES[mesh]
    virtual = ["parallel.virtual_stages=2"] if schedule in ("interleaved", "breadth-first") else []
    return small(path, stage, *TIERS[tier], f"offload.ratio={ratio}", f"parallel.schedule={schedule}",
                 *virtual, *over,
                 f"model.tie_embeddings={tied}", *PRECISIONS[precision], *ACTIVATIONS[activation], *others,
                 dp=dp, micro_batches=4 if schedule == "dualpipe-v" else 3)


SAMPLE = [tuple(row) for row in AllPairs(list(AXES.values()), filter_func=works)]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: "-".join(map(str, row)))
def test_pairs(row, references, tmp_path):
    """Two features that do not work together: every two values of two axes meet here."""
    assert_contract(composed(tmp_path, *row), references)


PRODUCT = [row for row in itertools.product(*(AXES[axis] for axis in ("tier", "stage", "ratio", "schedule")))
           if works(list(row))]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "row"), list(enumerate(PRODUCT)),
                         ids=["-".join(map(str, row)) for row in PRODUCT])
def test_product(number, row, references, tmp_path):
    """The same, every tier, stage, ratio and schedule; with other values of the other axes each time."""
    rng = random.Random(number)
    mesh, tied, precision, activation = (rng.choice(AXES[axis])
                                         for axis in ("mesh", "tied", "precision", "activation"))
    tier, stage, ratio, schedule = row
    mesh = "plain" if stage == 0 and mesh == "groups" else mesh
    config = composed(tmp_path, tier, stage, ratio, schedule, mesh, tied, precision, activation)
    assert_contract(config, references)


# ---------------------------------------------------------------- settings that meet offload

VARIANTS = {
    "gradients-1": (2, ["zero.reduce_every=1", "offload.gradients=host"]),
    "gradients-2": (2, ["zero.reduce_every=2", "offload.gradients=host", "offload.overlap=none"]),
    "gradients-step": (2, ["zero.reduce_every=step", "offload.gradients=host"]),
    "3-gradients-1": (3, ["zero.reduce_every=1", "offload.gradients=host"]),
    "3-gradients-2": (3, ["zero.reduce_every=2", "offload.gradients=host", "offload.ratio=0.5"]),
    "3-no-overlap": (3, ["offload.overlap=none"]),
    "reduce-every-1": (2, ["zero.reduce_every=1"]),
    "reduce-every-2": (2, ["zero.reduce_every=2"]),
    "reduce-every-step": (2, ["zero.reduce_every=step"]),
    "3-reduce-every-2": (3, ["zero.reduce_every=2"]),
    "3-reduce-every-step": (3, ["zero.reduce_every=step"]),
    "residency-2": (3, ["zero.residency=2", "zero.prefetch=0"]),
    "residency-stage": (3, ["zero.residency=stage", "zero.prefetch=2"]),
    "residency-step": (3, ["zero.residency=step"]),
    "prefetch-3": (3, ["zero.prefetch=3"]),
    "persist-some": (3, ["zero.persist_below=100"]),
    "persist-all": (3, ["zero.persist_below=1000000"]),
    "clipping-0": (0, ["optimizer.clip_grad=0.5"]),
    "clipping-3": (3, ["optimizer.clip_grad=0.5"]),
    "bf16-gradients": (2, [*BF16, "precision.grad_dtype=bf16", "precision.reduce_dtype=bf16"]),
    "bf16-gradients-3": (3, [*BF16, "precision.grad_dtype=bf16"]),
    "groups-of-one": (3, ["zero.shard_size=1"]),
    "contiguous": (3, ["activation.policy=full", "activation.offload=cpu", "activation.contiguous=true"]),
}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, pp, references, tmp_path):
    """A part of a gradient that comes down twice or never; a unit that is up when its GATHER is not there, or
    the other way."""
    stage, others = VARIANTS[name]
    for tier in ("cpu", "nvme") if stage < 3 else ("cpu-both", "nvme-both"):
        assert_contract(small(tmp_path, stage, *TIERS[tier], *others, pp=pp, micro_batches=4), references)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 1])
def test_one_rank(ratio, references, tmp_path):
    """dp = tp = pp = 1: lanes with nobody to talk to."""
    for stage, tier in itertools.product((0, 3), ("cpu", "nvme")):
        assert_contract(small(tmp_path, stage, *TIERS[tier], f"offload.ratio={ratio}", dp=1, pp=1),
                        references)


# ---------------------------------------------------------------- to the bit

BITS = {
    "stage-0": (0, []),
    "stage-1": (1, ["offload.ratio=0.5"]),
    "stage-1-sp": (1, SP),
    "stage-2-step": (2, ["zero.reduce_every=step"]),
    "stage-3-step": (3, ["zero.reduce_every=step"]),
    "groups": (1, ["zero.shard_size=2"]),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BITS)
def test_equal_to_the_device(name, precision, tmp_path):
    """With clipping, 5 steps: the host's arithmetic is the device's, on the same ranges."""
    stage, others = BITS[name]

    def run(*settings: str) -> Ranks:
        mine = [text for text in others if settings or "ratio" not in text]
        return loopback(small(tmp_path, stage, "model.layers=2", "optimizer.clip_grad=1.0",
                              *PRECISIONS[precision], *mine,
                              *settings, dp=4 if name == "groups" else 2, micro_batches=2), 5)

    same_bits([run(), run(*CPU), run(*NVME), *([run(*CPU_BOTH), run(*NVME_BOTH)] if stage == 3 else [])])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("others", [[], ["zero.reduce_every=2", "offload.ratio=0.5"],
                                    ["model.tie_embeddings=false", *SP]],
                         ids=["", "often", "sp"])
@pytest.mark.parametrize("stage", [2, 3])
def test_disk_is_equal_to_the_host(stage, others, precision, tmp_path):
    """Bytes that are lost on the way to the disk or back, or come from the unit before."""
    tiers = ("cpu", "nvme") if stage < 3 else ("cpu", "nvme-both", "weights-on-disk")
    same_bits([loopback(small(tmp_path, stage, "model.layers=2", "optimizer.clip_grad=1.0",
                              *PRECISIONS[precision], *others,
                              *TIERS[tier]), 10) for tier in tiers])


@pytest.mark.parametrize("tier", TIERS)
def test_evaluation_in_between(tier, tmp_path):
    """An evaluation that reads parameters before they are up from the step, or leaves something behind for
    the next one."""

    def run(*settings: str) -> list[list[float]]:
        config = small(tmp_path, 3, "zero.reduce_every=step", *settings)
        plan = make_plan(config)

        def work(comm: Comm) -> list[float]:
            engine, losses = Engine(Analysis(plan), comm), []
            for step in range(4):
                losses += [engine.run("evaluate", batches(config, comm, 9, train=False))[0].loss
                           for _ in range(2)]
                losses.append(engine.train_step(batches(config, comm, step))[0].loss)
            engine.close()
            return losses

        return run_loopback(plan, make_mesh(config), work)

    evaluated = run(*TIERS[tier])
    assert evaluated == run() and evaluated[0][0] == evaluated[0][1] != evaluated[0][3]


@pytest.mark.parametrize("tier", TIERS)
def test_a_skipped_step_changes_nothing(tier, tmp_path):
    """An overflow: the host must leave weights and moments alone, on disk, too, and what comes up must be the
    old weights."""
    config = small(tmp_path, 3, "precision.dtype=fp16", f"precision.initial_loss_scale={2.0**40}",
                   *TIERS[tier])
    plan = make_plan(config)

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)

        def look() -> tuple[float, list[torch.Tensor]]:
            evaluated = engine.run("evaluate", batches(config, comm, 9, train=False))[0].loss
            return evaluated, [torch.clone(part) for state in engine.states.values() for part in (
                state.optimizer_state.master, *state.optimizer_state.buffers.values())]

        loss, before = look()
        assert not any(engine.train_step(batches(config, comm, step))[0].finite for step in range(2))
        again, after = look()
        assert loss == again and all(a.equal(b) for a, b in zip(before, after, strict=True))
        engine.close()

    run_loopback(plan, make_mesh(config), work)


@pytest.mark.parametrize("others", [CPU, [*CPU, "offload.overlap=none"], NVME_BOTH, ["zero.shard_size=2"]],
                         ids=str)
def test_for_whom_a_rank_waits(others, tmp_path):
    """A report of a failure or a hang that fails itself: each instruction has its peers or none, and so has
    what it needs."""
    config = small(tmp_path, 3, *TP, "activation.policy=full", "activation.partition=true", *others, dp=4)
    plan = make_plan(config)

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        for name, programs in plan.programs.items():
            for index, item in enumerate(programs[comm.here.position]):
                said = engine._awaited(name, index)
                if item.op in COMPUTE:  # the embedding's backward sends nothing
                    assert ("with rank" in said) == any(sent_by(plan.table, item).values()), item
                elif item.op in (Op.CLIP, Op.SEND, Op.RECV) or (item.op == Op.GATHER and item.of_slot):
                    assert "with rank" in said, item
                elif item.op not in (Op.GATHER, Op.REDUCE):  # a group of theirs may have one rank
                    assert "with rank" not in said, item
                for need in engine.orders[name].waits[index]:
                    engine._under = UnderWay(engine.orders[name], engine.clock, comm.device, {})
                    engine._under.waiting = need
                    assert "which needs" in engine._awaited(name, index)
                engine._under = None
        engine.close()

    run_loopback(plan, make_mesh(config), work)


# ---------------------------------------------------------------- when the host steps, and where it adds

OVERLAP_AXES: dict[str, list] = {
    "tier": list(TIERS),
    "stage": [3, 0, 1, 2],
    "overlap": ["next", "none"],
    "gradients": ["device", "host"],
    **{axis: AXES[axis] for axis in ("schedule", "mesh", "tied", "precision", "activation")},
}


def overlap_works(row: list) -> bool:
    """What the contract does not refuse, of OVERLAP_AXES."""
    parts = len(row) > 3 and row[3] == "host" and row[1] < 2
    return works(row[:2]) and not parts and not (len(row) > 5 and row[1] == 0 and row[5] == "groups")


OVERLAP_PAIRS = [tuple(row) for row in AllPairs(list(OVERLAP_AXES.values()), filter_func=overlap_works)]


@pytest.mark.parametrize("row", OVERLAP_PAIRS, ids=lambda row: "-".join(map(str, row)))
def test_overlap_pairs(row, references, tmp_path):
    """A gradient that is stepped twice, late, or never, or with another step's rate or factor of clipping;
    weights that are read before their update."""
    tier, stage, overlap, gradients, schedule, mesh, tied, precision, activation = row
    config = composed(tmp_path, tier, stage, 1, schedule, mesh, tied, precision, activation,
                      f"offload.overlap={overlap}", f"offload.gradients={gradients}",
                      "optimizer.clip_grad=1.0", "optimizer.warmup_steps=2")
    assert_contract(config, references)


@pytest.mark.parametrize(("precision", "schedule"), [
    ("fp32", "1f1b"), ("bf16", "zb-v"), pytest.param("fp32", "zb-v", marks=pytest.mark.slow),
    pytest.param("bf16", "1f1b", marks=pytest.mark.slow)])
def test_tiers_stages_and_overlaps_are_equal_to_the_bit(schedule, precision, tmp_path):
    """Over 8 steps, all of them, and with no offload."""
    over = [f"parallel.schedule={schedule}", "train.steps=8", "optimizer.clip_grad=1.0",
            "zero.reduce_every=step", *PRECISIONS[precision]]

    def run(stage: int, *others: str) -> Ranks:
        mine = [text for text in over if stage >= 2 or "reduce" not in text]
        return loopback(small(tmp_path, stage, *mine, *others), 8)

    same_bits([run(1), *(run(stage, *TIERS[tier], f"offload.overlap={overlap}") for stage, tier, overlap in (
        (0, "cpu", "next"), (1, "cpu", "next"), (1, "cpu", "none"), (2, "nvme", "next"), (3, "cpu", "next"),
        (3, "cpu-both", "next"), (3, "nvme-both", "next"), (3, "nvme", "none")))])


def test_a_step_hides_the_host(tmp_path):
    """The point of it: where a group of micro-batches takes longer through a unit than the host's step of it,
    only the first unit's step is seen, predicted; else all of them are."""
    config = small(tmp_path, 3, *CPU_BOTH, "parallel.schedule=vertical", "model.tie_embeddings=false", pp=1,
                   micro_batches=4)
    sections = (dataclasses.replace(config.offload, overlap=overlap) for overlap in ("none", "next"))
    after, beside = (make_plan(dataclasses.replace(config, offload=section)) for section in sections)

    def cost(_: int, instruction: Instruction) -> float:
        return 1.0 if instruction.op in COMPUTE else 3.0 if instruction.op == Op.STEP else 0.0

    steps = [timeline(Analysis(plan), cost=cost).total_s for plan in (after, beside)]
    alone = timeline(Analysis(after),
                     cost=lambda at, item: cost(at, item) if item.op in COMPUTE else 0.0).total_s
    assert steps == [alone + 3.0 * len(after.table.parameters), alone + 3.0]


def test_a_skipped_step_that_waits(tmp_path):
    """Overflows, then none: each update comes with the next step, and of a skipped one nothing. The count of
    updates, and with it the rate, is that of the step whose gradients they are."""
    config = small(tmp_path, 2, "precision.dtype=fp16", f"precision.initial_loss_scale={2.0**24}",
                   "precision.hysteresis=1", *CPU, "train.steps=20")
    plan = make_plan(config)

    def work(comm: Comm) -> list[tuple[bool, bool, int]]:
        engine, seen = Engine(Analysis(plan), comm), []

        def moved(act: Callable[[], Any]) -> tuple[Any, bool]:
            before = [torch.clone(state.optimizer_state.master) for state in engine.states.values()]
            result = act()
            return result, any(not weights.equal(state.optimizer_state.master)
                               for weights, state in zip(before, engine.states.values(), strict=True))

        for step in range(20):
            (clipped, _), changed = moved(lambda step=step: engine.train_step(batches(config, comm, step)))
            seen.append((clipped.finite, changed, engine.zero.updates))
        seen.append((False, moved(engine.settle)[1], engine.zero.updates))
        assert not moved(engine.settle)[1], "there is nothing to settle"
        return seen

    for *seen, last in run_loopback(plan, make_mesh(config), work):
        finite = [each for each, _, _ in seen]
        assert not finite[0] and sum(finite) > 8
        assert [moved for _, moved, _ in seen] + [last[1]] == [False, *finite]
        assert [updates for *_, updates in seen] == [sum(finite[:step + 1]) for step in range(20)]
        assert last[2] == sum(finite)


# ---------------------------------------------------------------- under hostile timing

MUON = ["optimizer.name=muon", "optimizer.turn_dtype=fp32"]
HOSTILE = {
    "stage-0": (0, CPU, []),
    "stage-1-tied": (1, NVME, ["parallel.schedule=zb-h1"]),
    "stage-2": (2, CPU, ["model.tie_embeddings=false"]),
    "stage-2-groups": (2, NVME, ["zero.shard_size=1", "offload.ratio=0.5"]),
    "stage-3": (3, CPU_BOTH, ["zero.prefetch=2"]),
    "stage-3-window": (3, NVME_BOTH, ["zero.residency=2", "parallel.schedule=zb-v"]),
    "stage-3-bf16": (3, NVME_BOTH, [*BF16, "zero.reduce_every=2"]),
    "stage-3-recompute": (3, TIERS["state-on-disk"], ACTIVATIONS["cpu"]),
    "stage-1-no-overlap": (1, CPU, ["offload.overlap=none", "optimizer.clip_grad=0.5"]),
    "stage-2-gradients": (2, CPU, ["offload.gradients=host", "zero.reduce_every=1"]),
    "stage-3-gradients": (3, CPU_BOTH, ["offload.gradients=host", "zero.reduce_every=2",
                                        "offload.ratio=0.5"]),
    "stage-2-muon": (2, CPU, MUON),
    "stage-1-muon": (1, NVME, [*MUON, "offload.ratio=0.5"]),
    "stage-3-muon": (3, NVME_BOTH, [*MUON, "zero.shard_size=1"]),
    "stage-3-persist": (3, TIERS["weights-on-disk"], ["zero.persist_below=100", "zero.residency=stage"]),
}


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_late_lanes(name, copies, references, tmp_path, monkeypatch):
    """A wait that is missing: a gradient that is overwritten before it is down, a weight that is gathered
    before it is up, a buffer that is used again before it is on disk. `copies`: between the tiers there are
    copies, as on a GPU."""
    be_late(monkeypatch, seed=3)
    if copies:
        monkeypatch.setattr(Storage, "one_memory", False)
    stage, tier, others = HOSTILE[name]
    assert_contract(small(tmp_path, stage, *tier, *others), references)
