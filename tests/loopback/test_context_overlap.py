"""Keys and values that travel between two units (parallel.cp_overlap): the same numbers, to the bit."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import EXPERTS, assert_contract, loopback, same_bits, tiny
from tests.late import be_late
from tests.loopback import test_saved as saved
from tests.loopback import test_transient as transients
from tests.loopback.test_context import (
    DOCUMENTS,
    DP,
    LLAMA,
    PP,
    SMALL,
    SP,
    TP,
    with_cp,
)
from tests.loopback.test_context_order import ORDER
from tests.loopback.test_measure import shown
from tests.loopback.test_saved import quiet  # noqa: F401
from tests.loopback.test_traffic import check as counted
from tests.recorder import record_on_cpu
from threed.base.errors import PlanError, ThreedError
from threed.comm.group import Comm, sum_parts
from threed.comm.lanes import Handle, Lane
from threed.comm.process import initialized
from threed.config.validate import warnings
from threed.engine.engine import Engine
from threed.engine.loopback import ThreadGroup, run_loopback
from threed.models.measure import Measured
from threed.models.tiling import layers_of, share_of
from threed.planner import make_mesh, make_plan
from threed.prediction import transient
from threed.program.analysis import Analysis
from threed.program.check import check
from threed.program.instruction import Instruction, Op, Slot
from threed.program.traffic import sent_by
from threed.schema import Config
from threed.spec.kernels import Product
from threed.spec.parameter import Cost
from threed.tensor import leaves
from threed.tensor.alive import Alive

BF16 = ["precision.dtype=bf16"]
OVERLAP = "parallel.cp_overlap=true"
FULL = ["activation.policy=full"]
NORMS = ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]"]
ZB, ZB_V = ["parallel.schedule=zb-h1", *PP], ["parallel.schedule=zb-v", *PP]
CELLS = {
    "alone": [], "llama": LLAMA, "dp-zero3": [*DP, "zero.stage=3"], "tp": [*TP, "model.position=learned"],
    "sp-zero2": [*TP, *SP, *LLAMA, "zero.stage=2"], "learned": ["model.position=learned"],
    "zb-h1-zero3": [*ZB, *DP, "zero.stage=3"], "zb-v-sp": [*ZB_V, *TP, *SP],
    "full": [*FULL, *PP, *LLAMA], "full-zb-h1-bf16": [*FULL, *ZB, *BF16],
    "selective": [*NORMS, *LLAMA, *PP], "documents": [*DOCUMENTS, *LLAMA], "bf16": [*BF16, *LLAMA],
    "order": [*ORDER, *LLAMA], "order-zb-v": [*ORDER, *ZB_V, *TP, *SP],
    "documents-sp-bf16": [*DOCUMENTS, *TP, *SP, *BF16, "zero.stage=3"],
    "partition": [*TP, *FULL, "activation.partition=true"], "host": [*FULL, "activation.offload=cpu"],
    "offload": [*DP, "offload.optimizer=cpu", "zero.stage=3", "offload.parameters=cpu"],
    "dropout": ["model.dropout=0.2", *TP, *SP], "masked": ["data.loss_mask=chat", *DP],
    "fused": ["model.fused=auto", "model.loss_chunk=3", *LLAMA], "lora": ["model.lora_rank=2", *LLAMA],
    "interleaved": [*PP, "parallel.schedule=interleaved", "parallel.virtual_stages=2", "zero.stage=2"],
    "evaluates": ["train.eval_every=1", "data.validation_fraction=0.1", *PP],
    "experts": [*EXPERTS, "train.seed=5"], "experts-ep-pair": [
        *EXPERTS, "parallel.ep=2", "parallel.pair=true", *PP, "zero.stage=2", "train.seed=5"],
}


def overlapped(size: int, *overrides: str) -> Config:
    return with_cp(size, OVERLAP, *overrides)


@pytest.fixture
def in_one_order(monkeypatch):
    """Sums over ranks begin with the first of them, not with the one that keeps the sum: which one that is
    depends on the units."""
    def reduce_scatter(self: ThreadGroup, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                       scratch: Any) -> Handle:
        def finish(parts: list[torch.Tensor]) -> None:
            mine = [part.view(self.size(), -1)[self.rank()].clone() for part in parts]
            sum_parts(mine, output.view(-1), add)

        return self._call(tensor, finish)

    monkeypatch.setattr(ThreadGroup, "_reduce_scatter", reduce_scatter)


@pytest.mark.usefixtures("in_one_order")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("size", [2, 4])
def test_to_the_bit(size, cell):
    off, on = (loopback(make(size, *CELLS[cell]), 3) for make in (with_cp, overlapped))
    assert on.norms == pytest.approx(off.norms, rel=1e-7)  # summed shard by shard, and units are others
    same_bits([off, replace(on, norms=off.norms)])


@pytest.mark.parametrize("cell", ["llama", "sp-zero2", "zb-h1-zero3", "full-zb-h1-bf16", "documents-sp-bf16",
                                  "experts", "offload", "evaluates"])
def test_contract(cell, references):
    assert_contract(overlapped(2, *CELLS[cell]), references)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cell", ["order", "order-zb-v"])
def test_contract_by_documents(cell, size, references):
    """Each sequence has places of its own (parallel.cp_order=documents)."""
    assert_contract(overlapped(size, *CELLS[cell]), references)


# ---------------------------------------------------------------- costs

FAMILIES = {"gpt": [], "learned": ["model.position=learned"], "llama": LLAMA,
            "llama-documents": [*LLAMA, *DOCUMENTS],
            "learned-normed": ["model.position=learned", "model.qk_norm=true"],
            "grouped": ["model.family=llama", "model.kv_heads=2", "model.position=learned"],
            "fused": ["model.fused=auto", *LLAMA], "bf16": [*LLAMA, *BF16], "experts": EXPERTS,
            "lora": ["model.lora_rank=2"]}
MESHES = {"alone": [], "tp": TP, "sp": [*TP, *SP]}


@pytest.mark.parametrize("pieces", [(), ("attention", "norm", "mlp_act")], ids=["all", "pieces"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_cost_what_they_declare(name, mesh, pieces):
    if name == "experts" and mesh == "tp":
        return  # refused
    config = overlapped(2, "train.micro_batch_size=2", *FAMILIES[name], *MESHES[mesh])
    share = share_of(config)
    for layer in layers_of(config)[1:3]:
        with initialized():
            cost = Measured(layer, config.model, share, pieces=pieces).cost()
        declared = layer.cost(share)
        assert {where: each for where, each in declared.sent_by(pieces).items() if each.bytes} == {
            where: each for where, each in cost.sent.items() if where[1] != "ep"}, layer.name
        if not pieces:
            difference = _behind(config) if layer.name.endswith("attend") or (name == "experts" and (
                layer.name == "blocks.0")) else Cost()
            got, want = shown(cost), shown(declared + difference)
            assert got | {"sent": 0} == want | {"sent": 0}, layer.name


def _behind(config: Config) -> Cost:
    """Keys behind a chunk are declared, and not computed."""
    model, chunk = config.model, config.model.seq_len // 4  # the last rank has the second and the third
    heads = model.heads // config.parallel.tp
    keys = (2 + (1 if config.data.document_mask else 3)) * chunk
    behind = 2 * chunk * (2 * model.seq_len) // 2 - chunk * keys
    return Cost((Product(-config.train.micro_batch_size * behind * heads * model.head_size, 2, 1),))


@pytest.mark.parametrize("cell", [[], [*TP, *SP, *PP], NORMS, FULL, [*BF16, *LLAMA], ZB, EXPERTS], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_counted_is_planned(size, cell):
    counted(overlapped(size, *cell))


def test_bytes_of_a_step():
    """What is sent without overlap, but for the last block of each micro-batch: its backward is the next to
    need keys, and finds them there."""
    off, on = (loopback(make(4, *LLAMA, *BF16), 1).sent[0]["cp"] for make in (with_cp, overlapped))
    plan = make_plan(overlapped(4, *LLAMA, *BF16))
    gather = Instruction(Op.GATHER, 1, 0, "kv", group="keys")
    assert off - on == plan.table.num_microbatches * sent_by(plan.table, gather)["cp"] > 0


# ---------------------------------------------------------------- memory


@pytest.fixture
def at_once(monkeypatch):
    """Lanes run their jobs in the thread of their rank, whose storages are counted."""
    monkeypatch.setattr(Comm, "_make_lane", lambda self, *_: Lane(self.device))


KEPT = {"gpt": [], "learned": ["model.position=learned"], "llama-bf16": [*LLAMA, *BF16],
        "llama-sp": [*LLAMA, *TP, *SP], "tp": TP, "pieces": [*NORMS, *LLAMA], "grouped": ["model.kv_heads=2"]}


@pytest.mark.usefixtures("quiet", "at_once")
@pytest.mark.parametrize("name", KEPT)
def test_kept_by_a_forward(name):
    """The first gathered keys are gone behind it, whatever autograd keeps. (The residual stream that passes
    through `project` is one tensor: it is not made there, and not gone behind `attend`.)"""
    plan, sizes = saved.measured(tiny(*saved.SIZES, *saved.SPLIT, "parallel.cp=2", OVERLAP, *KEPT[name]))
    act_bytes = plan.table.act_bytes
    passed = {"blocks.0.project": -act_bytes, "blocks.0.attend": act_bytes}
    assert len(sizes) == 2 * len(plan.table.units)
    for (kind, unit), size in sizes.items():
        expected = plan.table.size(Slot(kind, unit)) + passed.get(plan.table.units[unit].name, 0)
        assert size == pytest.approx(expected, rel=0.02, abs=0.05 * act_bytes), (kind, unit)


INSIDE = {"none": [], "llama-bf16": [*LLAMA, *BF16], "full": FULL, "sp": [*TP, *SP],
          "documents": [*LLAMA, *DOCUMENTS]}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", INSIDE)
def test_what_is_held_within_an_instruction(name, monkeypatch):
    """A copy of the gathered keys that is there for longer than it is needed."""
    transients.alike(monkeypatch)
    monkeypatch.setattr(transient._Kernels, "kernels", lambda *_: None)
    transients.compare(tiny(*saved.SIZES, "parallel.cp=2", OVERLAP, *INSIDE[name]))


@pytest.mark.usefixtures("quiet", "at_once")
@pytest.mark.parametrize("name", ["none", "llama-bf16", "full"])
def test_peak(name, monkeypatch):
    """Over a step, of every rank, temporaries included. Where a block is recomputed, the plan counts its
    input twice, which is one tensor."""
    transients.alike(monkeypatch)
    monkeypatch.setattr(transient._Kernels, "kernels", lambda *_: None)
    config = tiny(*saved.SIZES, *saved.PP, "parallel.cp=2", OVERLAP, "train.global_batch_size=4",
                  *INSIDE[name])
    plan = make_plan(config)
    analysis, mesh = Analysis(plan), make_mesh(config)

    def work(comm: Comm) -> int:
        engine = Engine(analysis, comm)
        data = [saved.fresh(config) for _ in range(config.num_microbatches)]
        with Alive() as alive:
            engine.train_step(data.__getitem__)
            comm.all_gather(None)
            gc.collect()
            before = alive.peak = alive.bytes()
            engine.train_step(data.__getitem__)
            return alive.peak - before

    act_bytes, held = plan.table.act_bytes, transient.temporaries_of(plan)
    for rank, got in enumerate(run_loopback(plan, mesh, work)):
        position = mesh.coordinate(rank).position
        planned = transient.peak_bytes(analysis, position, held)
        twice = 2 * (mesh.positions - position) * act_bytes if name == "full" else 0
        assert planned - twice <= got <= planned + 1.1 * act_bytes, (rank, (got - planned) / act_bytes)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_gathered_keys_of_two_units_are_there(schedule):
    """And where half a backward comes between, of a forward besides; whatever the number of units."""
    for layers in (2, 6):
        plan = make_plan(overlapped(2, *PP, f"parallel.schedule={schedule}", f"model.layers={layers}"))
        memory, of_one = Analysis(plan).memory(0), plan.table.size(Slot("allkv", 1))
        assert memory.peak("allkv") == 2 * of_one and memory.peak("gallkv") == of_one


# ---------------------------------------------------------------- faults


def test_a_backward_without_its_second_gather_is_refused():
    plan = make_plan(overlapped(2))
    items = list(plan.programs["train"][0])
    gather = Instruction(Op.GATHER, 1, 0, "kv", group="keys")
    assert str(gather) == "GATHER kv u1 m0 (keys)" and items.count(gather) == 2
    del items[len(items) - 1 - items[::-1].index(gather)]
    with pytest.raises(PlanError, match=r"reads 'allkv u1 m0', which is not alive"):
        check(replace(plan, programs={"train": [tuple(items)]}))


def test_gathers_of_backward_come_ahead():
    """Each while the unit above computes; and a gradient goes back beside weights' halves. The keys of the
    last block, whose backward comes next, stay."""
    items = make_plan(overlapped(2, "model.layers=3")).programs["train"][0]
    first = next(index for index, item in enumerate(items) if item.op == Op.BACKWARD)
    assert [str(item) for item in items[first:first + 14]] == [
        "BACKWARD u7 m0", "GATHER kv u3 m0 (keys)", "BACKWARD_INPUT u6 m0", "REDUCE gallkv u5 m0 (keys)",
        "BACKWARD_WEIGHT u6 m0", "BACKWARD u5 m0", "GATHER kv u1 m0 (keys)", "BACKWARD_INPUT u4 m0",
        "REDUCE gallkv u3 m0 (keys)", "BACKWARD_WEIGHT u4 m0", "BACKWARD u3 m0", "BACKWARD_INPUT u2 m0",
        "REDUCE gallkv u1 m0 (keys)", "BACKWARD_WEIGHT u2 m0"]


LATE = {"zero3-full": [*FULL, "zero.stage=3", *DP], "zb-h1-bf16": [*ZB, *BF16],
        "experts": [*EXPERTS, "train.seed=5"], "sp-1f1b": [*TP, *SP, *PP]}


@pytest.mark.parametrize("name", LATE)
def test_late_lanes(name, monkeypatch, references):
    be_late(monkeypatch, seed=3)
    assert_contract(overlapped(2, *LATE[name]), references)


def test_what_is_waited_for():
    """The gather of forward, and the reduction, which is behind the gather of backward on their lane."""
    config = overlapped(2)
    order = Analysis(make_plan(config)).order("train", 0)
    program = make_plan(config).programs["train"][0]
    waited = {(program[index].op, program[need].op) for index, needs in enumerate(order.waits)
              for need in needs if need in order.jobs and program[need].of_slot}
    assert waited >= {(Op.FORWARD, Op.GATHER), (Op.BACKWARD, Op.REDUCE)}


def test_graphs(monkeypatch, references):
    made = record_on_cpu(monkeypatch)
    assert_contract(overlapped(2, *PP, "run.cuda_graphs=true"), references)
    assert all(each.made for each in made)


@pytest.mark.parametrize("overrides, said", [
    ([OVERLAP], "parallel.cp_overlap=true needs parallel.cp above 1: without it no keys travel; leave it "
                "out"),
    ([OVERLAP, "parallel.cp=2", "parallel.cp_form=heads"],
     "parallel.cp_overlap=true with parallel.cp_form=heads: what is exchanged for heads does not travel "
     "between two units, only gathered keys do; leave it out, or take parallel.cp_form=keys"),
    ([OVERLAP, "parallel.cp=2", "parallel.layers_per_unit=2"],
     "parallel.cp_overlap=true with parallel.layers_per_unit=2: attention becomes two units, between which "
     "keys travel, and the other makes several blocks one; leave one of the two out"),
    ([OVERLAP, "parallel.cp=2", "model.attention_dropout=0.1"],
     "parallel.cp_overlap=true with model.attention_dropout=0.1: attention with dropout keeps the keys of "
     "all tokens until backward, so that nothing would be gathered again; leave one of the two out"),
    ([OVERLAP, "parallel.cp=2", "model.tile_linears=1KiB", "model.tie_embeddings=false"],
     "parallel.cp_overlap=true makes attention two units, and in layer blocks.0.attention"),
    ([OVERLAP, "parallel.cp=2", "model.family=tests/families/parallel_block.py:PARALLEL"],
     "its attention is not the only body of one branch"),
])
def test_bad_input(overrides, said):
    with pytest.raises(ThreedError) as error:
        make_plan(tiny(*SMALL, *overrides))
    assert said in str(error.value)


@pytest.mark.parametrize("overrides, said", [
    ([OVERLAP], "with parallel.cp_overlap=true what backward needs is gathered again, ahead"),
    (["parallel.cp_form=heads"], "with parallel.cp_form=heads no keys are gathered"), ([], "")])
def test_no_gathered_keys_to_keep(overrides, said):
    config = with_cp(2, "activation.policy=selective", "activation.pieces=[attention,keys]", *overrides)
    found = [line.partition("here: ")[2] for line in warnings(config) if "keys does nothing here" in line]
    assert found == [said] * bool(said)


def test_other_layers_may_be_tiled():
    """Only what is above the limit is cut."""
    names = [unit.name for unit in make_plan(overlapped(
        2, "model.tile_linears=4KiB", "model.ffn_hidden=256", "model.tie_embeddings=false")).table.units]
    assert names[1:4] == ["blocks.0.attention.project", "blocks.0.attention.attend", "blocks.0.mlp 1/8"]


def test_older_torch_has_no_wide_gradients(monkeypatch):
    """In 16 bits gradients of keys would be added up in 16 bits."""
    monkeypatch.setattr(leaves, "WIDENS", False)
    loopback(overlapped(2), 1)
    with pytest.raises(ThreedError, match=r"parallel.cp_overlap.*torch 2\.10"):
        loopback(overlapped(2, *BF16), 1)
