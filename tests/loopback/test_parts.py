"""Messages in parts: tp ranks send a part each, and every number is what it was with whole messages."""

from __future__ import annotations

import pytest
import torch

from tests.harness import batches, loopback, same_bits, tiny
from tests.late import be_late
from tests.loopback.test_generation import SMALL as PROMPTS
from tests.loopback.test_generation import written
from threed.comm.group import Comm
from threed.data.sampling import Sampling
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import analyse, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import MESSAGES, PARTS, WHOLES, Op
from threed.program.summary import stages
from threed.schema import Config

ON, TP, PP = "parallel.split_messages=on", "parallel.tp=2", "parallel.pp=2"
BASE = ["model.layers=4", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
        "model.vocab_multiple=16", "model.dropout=0.1", "train.global_batch_size=4", "train.eval_every=1",
        TP, PP]
FULL, DP = "activation.policy=full", ["parallel.dp=2", "train.global_batch_size=8"]
V_2 = "parallel.virtual_stages=2"
CELLS: dict[str, list[str]] = {
    "1f1b": ["zero.stage=0"],
    "gpipe-zero2": ["parallel.schedule=gpipe", "zero.stage=2", *DP],
    "interleaved-zero3": ["parallel.schedule=interleaved", V_2, "zero.stage=3", *DP],
    "breadth-first": ["parallel.schedule=breadth-first", V_2, FULL],
    "zb-h1-partition": ["parallel.schedule=zb-h1", FULL, "activation.partition=true"],
    "zb-h2": ["parallel.schedule=zb-h2", "model.tie_embeddings=false"],
    "zb-v": ["parallel.schedule=zb-v", FULL, "activation.partition=true", "activation.contiguous=true"],
    "v-half-cpu": ["parallel.schedule=v-half", FULL, "activation.offload=cpu"],
    "dualpipe-v-bf16": ["parallel.schedule=dualpipe-v", "precision.dtype=bf16"],
    "auto": ["parallel.schedule=auto", "parallel.activation_limit=1.5x"],
    "four-positions": ["parallel.pp=4", "parallel.tp=2", "activation.policy=budget",
                       "activation.budget=1GiB"],
    "four-ranks": ["parallel.tp=4", "train.micro_batch_size=2", "train.global_batch_size=8"],
    "order": ["parallel.axis_order=tp-dp-pp", *DP],
    "offload-zero3": ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu", *DP],
    "overlap": ["offload.optimizer=cpu", *DP],
    "no-overlap": ["offload.optimizer=cpu", "offload.overlap=none", *DP],
    "tiles": ["model.tile_linears=1KiB", "model.tie_embeddings=false"],
    "adapters": ["model.lora_rank=2", "model.tie_embeddings=false"],
    "llama-fp16": ["model.family=llama", "model.norm=rmsnorm", "model.activation=swiglu",
                   "precision.dtype=fp16", "precision.loss_scale=1024", "model.kv_heads=2"],
    "documents": ["data.document_mask=true", "data.packing=best-fit", "model.loss_chunk=3"],
    "rehearsed": ["run.verify_every=2"],
}


def small(*others: str) -> Config:
    return tiny(*BASE, *others)


def both(*others: str, steps: int = 3) -> None:
    """In parts or whole, the same bits; and the messages are parts."""
    config = small(*others, ON)
    plan = make_plan(config)
    messages = [item for programs in plan.programs.values() for program in programs for item in program
                if item.op in MESSAGES]
    assert messages and all(item.kind in WHOLES for item in messages)
    same_bits([loopback(small(*others), steps), loopback(config, steps, plan)])


CORE = ("interleaved-zero3", "zb-h1-partition")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.core) if name in CORE else name
                                  for name in CELLS])
def test_same_bits(name):
    """A part of another rank, a gradient that is joined in another order, a value that is read before all of
    its parts have come."""
    both(*CELLS[name])


@pytest.mark.parametrize("name", ["interleaved-zero3", "zb-v", "offload-zero3"])
def test_late_messages(name, monkeypatch):
    """A GATHER that does not wait for its message."""
    be_late(monkeypatch, seed=4)
    both(*CELLS[name], steps=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_texts(schedule):
    """The program that generates text sends parts, too, and writes the same text."""
    base = [*PROMPTS, TP, PP, f"parallel.schedule={schedule}"]
    how = Sampling(tokens=4, temperature=0.0)
    assert written(tiny(*base, ON), how) == written(tiny(*base), how)


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes(tp):
    """What a rank sends is what the plan says to the byte: over pp 1 / tp of it, over tp the gathers more."""
    others = [f"parallel.tp={tp}", "model.tie_embeddings=false", "train.eval_every=0", "zero.stage=0"]
    sent = {}
    for way in ("off", "on"):
        config = small(*others, f"parallel.split_messages={way}")
        rows, mesh, ranks = stages(analyse(config)), make_mesh(config), loopback(config, 1)
        for rank, bytes_ in enumerate(ranks.sent):
            a_step = rows[mesh.coordinate(rank).position].sent_bytes
            assert {axis: bytes_.get(axis, 0) for axis in a_step} == a_step, rank
        sent[way] = ranks.sent[0]
    assert sent["on"]["pp"] * tp == sent["off"]["pp"] > 0
    # Rank 0 gathers a gradient for each message that it sent.
    assert sent["on"]["tp"] - sent["off"]["tp"] == sent["off"]["pp"] * (tp - 1) // tp


def test_memory():
    """What waits for its turn is a part: nothing else of a message is alive than what the plan counts."""
    config = small("parallel.schedule=gpipe", "train.eval_every=0", ON)
    plan, mesh = make_plan(config), make_mesh(config)

    def work(comm: Comm) -> list[tuple[str, int, int]]:
        engine, found = Engine(Analysis(plan), comm), []

        def look(instruction, slots) -> None:
            if instruction.op in (Op.RELEASE, Op.RECV, Op.GATHER):
                for slot in slots.alive():
                    if slot.kind in (*PARTS, *WHOLES) and slot.kind not in ("kept", "kpart"):
                        value = slots.get(slot)
                        storage = value.untyped_storage().nbytes()
                        found.append((str(slot), storage, plan.table.size(slot)))

        with engine.inspected(look):
            engine.train_step(batches(config, comm, 0))
        engine.close()
        return found

    torch.set_num_threads(1)
    for found in run_loopback(plan, mesh, work):
        assert {name.split()[0] for name, _, _ in found} & set(WHOLES)
        for name, stored, planned in found:
            assert stored == planned, name
