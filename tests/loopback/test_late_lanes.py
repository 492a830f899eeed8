"""Lanes that are late: the engine waits for all that it needs, and each of its waits is needed."""

from __future__ import annotations

import threading

import pytest

from tests.harness import (
    assert_contract,
    assert_parity,
    batches,
    cell_config,
    covering,
    dense,
    each_value,
    loopback,
    tiny,
)
from tests.late import be_late
from tests.recorder import record_on_cpu
from threed.base.errors import ThreedError
from threed.comm.group import Comm
from threed.comm.lanes import Job
from threed.engine import loopback as loop
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.storage import Storage
from threed.planner import analyse, make_mesh, make_plan
from threed.program import analysis
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.order import Order
from threed.program.slots import Slots
from threed.schema import Config


def busy(cell) -> bool:
    """Whether a cell has lanes besides those of messages."""
    return cell.stage > 0 or cell.offload != "none"


@pytest.mark.parametrize("cell", [cell for cell in covering() if busy(cell)], ids=lambda cell: cell.id)
def test_the_contracts_sample(cell, references, monkeypatch):
    """With a result that is read too early, or a buffer that is written too early, numbers would differ."""
    be_late(monkeypatch, seed=3)
    assert_contract(cell_config(cell, ranks=8), references, steps=2)


@pytest.mark.parametrize("cell", each_value(dense(covering())), ids=lambda cell: cell.id)
def test_all_at_once(cell, references, monkeypatch):
    """Late lanes, fused pieces, a loss in chunks, and CUDA graphs."""
    be_late(monkeypatch, seed=5)
    made, config = record_on_cpu(monkeypatch), cell_config(cell, ranks=8)
    config.model.fused, config.model.loss_chunk, config.run.cuda_graphs = "auto", 5, True
    assert_contract(config, references, steps=3)
    assert all(each.made for each in made)


SMALL = ["model.layers=3", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=4", "parallel.dp=2"]
TRAVEL = "model.family=tests/families/travelling.py:TRAVELLING"
EXPERTS = ["model.family=moe", "model.experts=4", "model.shared_expert_ffn=8", "parallel.ep=2"]
CPU = ["zero.stage=3", "zero.prefetch=2", "offload.optimizer=cpu", "offload.parameters=cpu"]


def small(path, *others: str) -> Config:
    files = [f"offload.nvme_path={path}"] if any("nvme" in text for text in others) else []
    return tiny(*SMALL, *others, *files)


CONFIGS: dict[str, list[str]] = {
    "zero1": ["zero.stage=1"],
    "zero2": ["zero.stage=2", "model.tie_embeddings=false"],
    "zero3": ["zero.stage=3", "zero.prefetch=1"],
    "tied": ["zero.stage=0", "parallel.pp=2"],
    "cpu": CPU,
    "cpu-zero0": ["zero.stage=0", "offload.optimizer=cpu"],
    "cpu-zero1": ["zero.stage=1", "offload.optimizer=cpu"],
    "cpu-zero3": ["zero.stage=3", "offload.optimizer=cpu", "model.tie_embeddings=false"],
    "ring": ["zero.stage=2", "offload.optimizer=cpu", "model.layers=8"],
    "no-overlap": ["zero.stage=2", "offload.optimizer=cpu", "offload.overlap=none", "model.layers=8"],
    "gradients": ["zero.stage=2", "offload.optimizer=cpu", "offload.gradients=host"],
    "gradients-zero3": [*CPU, "offload.gradients=host", "zero.reduce_every=1"],
    "nvme": ["zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme"],
    "travel": [TRAVEL, "zero.stage=2", "activation.policy=full"],
    "travel-gathered": [TRAVEL, "model.by=gather", "zero.stage=3", "parallel.pp=2",
                        "parallel.schedule=zb-h1"],
    "travel-again": [TRAVEL, "model.by=again", "zero.stage=2", "activation.policy=full"],
    "kept": ["activation.policy=full", "activation.offload=cpu", "zero.stage=1"],
    "experts": [*EXPERTS, "zero.stage=2"],
    "experts-full": [*EXPERTS, "zero.stage=3", "activation.policy=full", "parallel.pp=2",
                     "parallel.schedule=zb-h1"],
}


def waits_for_lanes(config: Config) -> set[tuple[str, str]]:
    """(op that waits, op that it waits for) of the waits for jobs, over all positions of a plan's step."""
    plan, found = make_plan(config), set()
    for position, program in enumerate(plan.programs["train"]):
        order = Analysis(plan).order("train", position)
        found |= {(kind(program[index].op), kind(program[need].op)) for index, needs in enumerate(order.waits)
                  for need in needs if need in order.jobs}
    return found


def kind(op: Op) -> str:
    return "compute" if op in COMPUTE else str(op)


MOE = {
    "folded": ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=4", "zero.stage=2",
               "model.balance=sequence"],
    "zb-v-zero3": ["parallel.pp=2", "parallel.schedule=zb-v", "zero.stage=3", "model.balance=bias"],
    "offload-full": [*CPU, "activation.policy=full", "activation.offload=cpu", "model.balance=bias"],
    "pair-zero3": ["parallel.pp=2", "parallel.schedule=dualpipe-v", "parallel.pair=true", "zero.stage=3",
                   "train.global_batch_size=16"],
    "groups-selective": ["parallel.dp=4", "zero.shard_size=2", "zero.stage=3", "activation.policy=selective",
                         "activation.pieces=[attention,norm,mlp_act]"],
}


@pytest.mark.parametrize("name", MOE)
def test_experts(name, references, monkeypatch):
    """Rows that are late, while a shared expert computes; each rank's at another time."""
    be_late(monkeypatch, seed=6)
    assert_contract(small(None, *EXPERTS, *MOE[name]), references)


# What waits for what, in which of these configs it matters. A gradient's buffer that BACKWARD takes while its
# REDUCE is under way is in tests/search/test_order.py. That BACKWARD and REDUCE come after the gradient
# of the step before has left follows from FORWARD's wait for the unit's update.
MATTERS = {
    ("compute", "GATHER"): "zero1 zero2 zero3 cpu cpu-zero3 nvme travel-again",
    ("compute", "REDUCE"): "travel-gathered travel-again",
    ("CLIP", "REDUCE"): "zero1 zero2 zero3 tied cpu cpu-zero1 no-overlap",
    ("CLIP", "OFFLOAD"): "gradients gradients-zero3",
    ("OFFLOAD", "REDUCE"): "gradients gradients-zero3",
    ("GATHER", "FETCH"): "cpu cpu-zero1 cpu-zero3 ring gradients nvme",
    ("FETCH", "STEP"): "cpu cpu-zero0 cpu-zero1 no-overlap gradients gradients-zero3",
    ("STEP", "OFFLOAD"): "cpu cpu-zero0 cpu-zero1 no-overlap nvme",
    ("OFFLOAD", "STEP"): "ring no-overlap nvme",
    ("STEP", "FETCH"): "cpu-zero0 ring no-overlap nvme",
    ("compute", "FETCH"): "kept cpu-zero0",
    ("compute", "EXCHANGE"): "travel experts experts-full",
}


LANES = {"GATHER": ["dp"], "REDUCE": ["dp", "tie"], "OFFLOAD": ["d2h", "write"], "FETCH": ["h2d", "read"],
         "STEP": ["host"], "EXCHANGE": ["dp", "ep"]}


@pytest.mark.parametrize(("waits", "name"), [
    pytest.param(waits, name, id=f"{' for '.join(waits)} in {name}")
    for waits, names in MATTERS.items() for name in names.split()])
def test_without_a_wait(waits, name, monkeypatch, tmp_path):
    """The engine without one kind of its waits, where what should be waited for is late: other numbers, or
    none. (With all of them: the numbers of lanes that are not late.)"""
    config = small(tmp_path, *CONFIGS[name])
    monkeypatch.setattr(Storage, "one_memory", False)  # copies between the tiers, as on a GPU
    assert waits in waits_for_lanes(config)
    right = loopback(config, 2)
    be_late(monkeypatch, seed=5, late=1.0, lanes=LANES[waits[1]])
    monkeypatch.setattr(loop, "TIMEOUT_S", 20.0)
    assert_parity(loopback(config, 2), right)

    class Forgetful(Order):
        @classmethod
        def of(cls, links) -> Order:
            order, program = Order.of(links), links.program
            less = [[need for need in needs if (kind(program[index].op), kind(program[need].op)) != waits]
                    for index, needs in enumerate(order.waits)]
            return order._replace(waits=less)

    monkeypatch.setattr(analysis, "Order", Forgetful)
    with pytest.raises((AssertionError, ThreedError)):
        assert_parity(loopback(config, 2), right)


def test_weights_that_come_late_hold_up_their_own_unit_alone():
    """Of a single rank, too, whose GATHER sends nothing: the weights of the second unit do not come before
    the first has computed."""
    config = tiny(*SMALL, *CPU, "parallel.dp=1", "zero.prefetch=1")
    analysis, computed = analyse(config), threading.Event()

    def work(comm: Comm) -> None:
        engine = Engine(analysis, comm)
        fetch, forward = engine.handlers[Op.FETCH], engine.handlers[Op.FORWARD]

        def late(item: Instruction, slots: Slots) -> Job:
            job = fetch(item, slots)

            def waits() -> None:
                assert item.unit != 1 or computed.wait(20), "nothing is computed before"
                job()

            return waits

        def first(item: Instruction, slots: Slots) -> None:
            forward(item, slots)
            computed.set()

        engine.handlers |= {Op.FETCH: late, Op.FORWARD: first}
        engine.train_step(batches(config, comm, 0))
        engine.close()

    run_loopback(analysis.plan, make_mesh(config), work)
