"""What compute instructions hold beside their slots: predicted on tensors without memory, and measured in
storages that are really alive."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.harness import batches, tiny
from tests.loopback.test_saved import CASES, FULL, SIZES, SPLIT, selective
from threed.comm.group import Comm
from threed.comm.lanes import Handle
from threed.engine.engine import Engine
from threed.engine.loopback import ThreadGroup, run_loopback
from threed.features.zero.gradient import Gradient
from threed.planner import make_mesh, make_plan
from threed.prediction import transient
from threed.prediction.transient import temporaries_of
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.instruction import COMPUTE, PARAMETER_KINDS
from threed.program.plan import Plan
from threed.schema import Config
from threed.tensor import rectangles
from threed.tensor.alive import Alive

NAMES = ("fp32", "sp", "tp", "untied-bf16-tp", "learned-bf16-sp", "grouped", "llama", "llama-bf16-sp",
         "dropout", "unfused", "blocks-of-two", "zero-3", "tiles", "tiles-sp")
LORA = ["model.lora_rank=16", "model.lora_targets=[q_proj,v_proj,o_proj,up_proj]"]
CONFIGS = {
    **{name: CASES[name] for name in NAMES},
    "halves": SPLIT, "halves-llama-bf16-sp": [*SPLIT, *CASES["llama-bf16-sp"]],
    # Micro-batches of one step that are not computed alike.
    **{f"{schedule}-{policy}": [f"parallel.schedule={schedule}", f"activation.policy={policy}",
                                "train.global_batch_size=8", "model.layers=2", *more]
       for policy in ("none", "full") for schedule, *more in (
           ["gpipe"], ["dualpipe-v"], ["interleaved", "parallel.virtual_stages=2"])},
    "full": FULL, "full-dropout": [*FULL, "model.dropout=0.1"],
    "selective": selective("attention,norm,mlp_act"),
    "chunks": ["model.loss_chunk=16"], "chunks-tiles": ["model.loss_chunk=16", *CASES["tiles"]],
    "lora": LORA, "halves-lora-bf16-sp": [*SPLIT, *LORA, *CASES["llama-bf16-sp"]],
    "fused": ["model.fused=auto", *CASES["llama"], "model.dropout=0.1"],
    **{f"{form}-{name}": ["parallel.cp=2", f"parallel.cp_form={form}", *more] for form in ("keys", "heads")
       for name, more in (("whole", []),
                          ("halves", [*SPLIT, *CASES["llama-bf16-sp"], "model.kv_heads=4"]),
                          ("pieces", selective("attention")))},
}


def measured(config: Config, plan: Plan) -> list[int]:
    """For each compute instruction of the last rank, which has the vocabulary's padding: the most bytes that
    are alive within it, less those before it."""
    torch.set_num_threads(1)

    def work(comm: Comm) -> list[int]:
        engine, most = Engine(Analysis(plan), comm), []
        with Alive() as alive:
            engine.train_step(batches(config, comm, 0))  # makes what is made once

            def watching(handler):
                def handle(instruction, slots):
                    before = alive.peak = alive.bytes()
                    handler(instruction, slots)
                    most.append(alive.peak - before)

                return handle

            engine.handlers |= {op: watching(engine.handlers[op]) for op in COMPUTE}
            data = batches(config, comm, 1)
            first = data(0)  # which no plan counts
            engine.train_step(lambda _: first)
        return most

    return run_loopback(plan, make_mesh(config), work)[-1]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    alike(monkeypatch)


def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a product that is added to a 16-bit weight's gradient has no memory of its own, nor has a
    message; attention over cp is one kernel. As here: no piece is compiled."""
    monkeypatch.setattr(rectangles, "HOST", rectangles.SHAPES)
    monkeypatch.setattr(Alive, "one_kernel", nullcontext)
    monkeypatch.delattr(transient._Kernels, "sums")
    monkeypatch.setattr(Gradient, "_add_product", lambda *_: None)
    call = ThreadGroup._call

    def unseen(*arguments) -> Handle:
        with _disable_current_modes():
            handle = call(*arguments)

        def wait() -> None:
            with _disable_current_modes():
                handle.wait()

        return Handle(wait)

    monkeypatch.setattr(ThreadGroup, "_call", unseen)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_held_within_an_instruction(name, monkeypatch):
    monkeypatch.setattr(transient._Kernels, "kernels", lambda *_: None)  # nor are there the loss's kernels
    compare(tiny(*SIZES, *CONFIGS[name]))


def compare(config: Config) -> None:
    """A temporary that no plan counts: of every compute instruction, within 2% or a few bytes a token."""
    plan = make_plan(config)
    table, held = plan.table, temporaries_of(plan)
    seen, alive = iter(measured(config, plan)), set()
    for item in plan.programs["train"][0]:
        effect = effects(item, table, 0)
        created = {slot for slot in {*effect.writes, *effect.adds} - alive
                   if slot.kind not in PARAMETER_KINDS}
        alive = (alive | created) - set(effect.frees)
        if item.op in COMPUTE:
            expected = sum(map(table.size, created)) + held(item)
            assert next(seen) == pytest.approx(expected, rel=0.02, abs=0.02 * table.act_bytes), item
    assert next(seen, None) is None


def test_blocks_of_one_size_are_measured_once(monkeypatch):
    """The advice on a large model took half a minute, of which each block had its part."""
    measured, measure = [], transient._measure
    monkeypatch.setattr(transient, "_measure", lambda *what: measured.append(what[2]) or measure(*what))
    temporaries_of(make_plan(tiny("model.layers=6")))
    assert measured == [range(0, 1), range(1, 2), range(7, 8)]
