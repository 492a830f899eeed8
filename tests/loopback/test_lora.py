"""LoRA: adapters beside frozen weights, against the same model in one process, and against the base model.

B begins as zero, so A's first gradient is zero and an error in it would not show: where numbers are compared,
B is drawn, in the reference, too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness import FILES, Ranks, assert_contract, loopback, same_bits, tiny
from tests.loopback.test_measure import MESHES, SIZES, known_difference, measured, shown
from tests.loopback.test_saved import measured as kept_bytes
from tests.loopback.test_verify import twice, verified
from threed.models.layers.parts import Adapter
from threed.models.model import adapters, parameters
from threed.models.tiling import layers_of, share_of
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Op, Slot
from threed.program.summary import stages

EVERY = "model.lora_targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
JOINT = "model.lora_targets=[qkv_proj,o_proj,up_proj,down_proj]"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=6", "model.lora_rank=3", "model.lora_alpha=6"]
LLAMA = ["model.family=llama", "model.kv_heads=2", EVERY]
LEARNED = ["model.position=learned", JOINT]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """B is drawn."""
    original = Adapter.__init__

    def init(self: Adapter, *arguments) -> None:
        original(self, *arguments)
        self.held["B"] = replace(self.held["B"], std=0.1)

    monkeypatch.setattr(Adapter, "__init__", init)


# ---------------------------------------------------------------- numbers

PP, DP, TP = ["parallel.pp=2"], ["parallel.dp=2"], ["parallel.tp=2"]
SP, ZB = [*TP, "parallel.sequence_parallel=true"], [*PP, "parallel.schedule=zb-h1"]
PIECES = ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]"]
CELLS = {
    "alone": LLAMA, "tp-learned": [*LEARNED, *TP], "default-targets": DP,
    "sp-zb-2": [*LLAMA, *SP, *ZB, *DP, "zero.stage=2"],
    "3-zb-v-full": [*LEARNED, *TP, *PP, "parallel.schedule=zb-v", *DP, "zero.stage=3",
                    "activation.policy=full"],
    "3-cpu-parameters": [*LLAMA, *DP, *PP, "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu",
                         "zero.residency=2"],
    "3-nvme-parameters": [*LEARNED, *DP, "zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme",
                          FILES, "precision.dtype=bf16"],
    "1-overlap": [*LLAMA, *DP, *PP, "zero.stage=1", "offload.optimizer=cpu"],
    "1-no-overlap": [*LLAMA, *DP, *PP, "zero.stage=1", "offload.optimizer=cpu", "offload.overlap=none"],
    "2-pieces-bf16": [*LLAMA, *SP, *DP, "zero.stage=2", *PIECES, "precision.dtype=bf16"],
    "3-small-fp16-groups": [*LLAMA, "parallel.dp=4", "zero.shard_size=2", "zero.stage=3",
                            "zero.persist_below=64", "precision.dtype=fp16", "precision.loss_scale=1024",
                            "train.global_batch_size=8"],
    "interleaved-partition": [*LEARNED, *TP, *PP, "parallel.schedule=interleaved",
                              "parallel.virtual_stages=2", "activation.policy=full",
                              "activation.partition=true", "model.tie_embeddings=false"],
    "untied-clipped-no-master": [*LEARNED, *TP, *DP, "zero.stage=1", "model.tie_embeddings=false",
                                 "optimizer.clip_grad=0.05", "precision.dtype=bf16", "precision.master=none"],
    "0-dropout-lion": [*LLAMA, *DP, *TP, "zero.stage=0", "model.dropout=0.1", "model.attention_dropout=0.1",
                       "optimizer.name=lion", "optimizer.lr=1e-4"],
    "documents-evaluate": [*LLAMA, *ZB, "data.document_mask=true", "train.eval_every=1",
                           "model.loss_chunk=5"],
    "parallel-block": ["model.family=tests/families/parallel_block.py:PARALLEL", JOINT, *SP, *PP],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.core] * (name in (
    "sp-zb-2", "3-cpu-parameters"))) for name in CELLS])
def test_contract(name, drawn, references):
    assert_contract(tiny(*SMALL, *CELLS[name]), references)


def test_stages_and_moves_change_no_bit(drawn):
    """ZeRO and recomputation move frozen weights, and the sums of adapters' gradients are the same."""
    others = ["zero.stage=0"], ["zero.stage=1"], ["zero.stage=2", "zero.reduce_every=step"], [
        "zero.stage=3", "zero.reduce_every=step", "activation.policy=full"]
    same_bits([loopback(tiny(*SMALL, *LLAMA, *DP, *more, "optimizer.clip_grad=0.5")) for more in others])


def base_of(*overrides: str) -> Ranks:
    return loopback(tiny(*(text for text in [*SMALL, *overrides] if "lora" not in text)), steps=1)


@pytest.mark.parametrize("mesh", [[], [*TP, *PP]], ids=["alone", "tp2-pp2"])
@pytest.mark.parametrize("model", [LLAMA, LEARNED], ids=["llama", "gpt"])
def test_fresh_adapters_change_no_bit(model, mesh, monkeypatch):
    """With B = 0 the logits are those of the base model, to the bit."""
    from threed.tensor.context import Context

    seen: list[list[torch.Tensor]] = []
    original = Context.cross_entropy

    def cross_entropy(self: Context, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen[-1].append((self.group.rank(), logits.detach().clone()))  # pyright: ignore
        return original(self, logits, labels)

    monkeypatch.setattr(Context, "cross_entropy", cross_entropy)
    results = []
    for run in (lambda: base_of(*model, *mesh), lambda: loopback(tiny(*SMALL, *model, *mesh), steps=1)):
        seen.append([])
        results.append(run())
    assert results[0].losses == results[1].losses
    assert len(seen[0]) == len(seen[1]) >= 6
    for rank in range(2):
        for one, other in zip(*([logits for at, logits in each if at == rank] for each in seen), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("others", [["zero.stage=3"],
                                    ["offload.optimizer=cpu"],
                                    ["offload.optimizer=cpu", "offload.overlap=none"]])
def test_a_step_that_is_computed_twice(others, drawn):
    """A rehearsal leaves nothing behind, and sees no difference."""
    config = tiny(*SMALL, *LLAMA, *DP, *PP, *others)
    same_bits([loopback(config), verified(twice(config), 5)])


def test_frozen_weights_stay(drawn):
    """To the bit, on every rank, whatever weight decay and momentum do; and the adapters move."""
    config = tiny(*SMALL, *LLAMA, *DP, *TP, "zero.stage=3", "optimizer.weight_decay=0.5")
    before, after = (loopback(config, steps).weights for steps in (0, 3))
    trained = {each.name for adapter in adapters(config.model) for each in adapter.parameters()}
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    assert trained < before.keys() == {each.name for each in parameters(config.model)}


# ---------------------------------------------------------------- costs and memory

COSTS = {
    "default": [], "joint": LEARNED, "llama": ["model.ffn_hidden=96", *LLAMA],
    "some": ["model.family=llama", "model.kv_heads=2", "model.lora_targets=[v_proj,gate_proj]"],
    "out": ["model.lora_targets=[o_proj]"],
    "down-dropout": ["model.lora_targets=[down_proj]", "model.dropout=0.1", "model.attention_dropout=0.1"],
    "fused": ["model.family=llama", "model.kv_heads=2", "model.dropout=0.1", "model.fused=auto"],
    "qk-norm": ["model.family=llama", "model.qk_norm=true", "model.lora_targets=[k_proj,up_proj]"],
    "side-by-side": ["model.family=tests/families/parallel_block.py:PARALLEL", "model.lora_targets=[o_proj]"],
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", COSTS)
def test_layers_cost_what_they_declare(name, mesh):
    """Products, what is kept, what is sent: frozen linears have half a backward, and keep nothing for it."""
    config = tiny(*SIZES, "model.lora_rank=4", *COSTS[name], *MESHES[mesh])
    all_layers = layers_of(config)
    for index, layer in enumerate(all_layers):
        declared = layer.cost(share_of(config))
        if index:  # a frozen embedding keeps nothing
            declared += known_difference(config, layer)
        cost = measured(config, all_layers, index)
        assert shown(declared) == shown(cost), f"{layer.name} declares {declared}, and it is {cost}"


@pytest.mark.parametrize("name, others", [
    ("every", [EVERY, "model.activation=swiglu", "model.kv_heads=2"]), ("some", []),
    ("some-pieces", PIECES), ("down-pieces", [*PIECES, "model.lora_targets=[down_proj]"]),
    ("zero-3-bf16", ["zero.stage=3", "precision.dtype=bf16", EVERY, "model.activation=swiglu"])])
def test_kept_by_a_forward(name, others):
    """As test_saved.py, by the storages that are alive."""
    sizes = ["model.layers=1", "model.hidden=256", "model.seq_len=128", "model.vocab=1000",
             "model.vocab_multiple=128", "train.global_batch_size=2", "train.micro_batch_size=2"]
    plan, found = kept_bytes(tiny(*sizes, "parallel.schedule=zb-h1", "model.lora_rank=8", *others))
    for (kind, unit), size in found.items():
        expected = plan.table.size(Slot(kind, unit))
        assert size == pytest.approx(expected, rel=0.02, abs=0.02 * plan.table.act_bytes), (
            kind, plan.table.units[unit].name)


def test_the_plan_has_nothing_for_frozen_units():
    for stage in range(4):
        config = tiny(*SMALL, *LLAMA, *DP, *PP, f"zero.stage={stage}", "model.tie_embeddings=true",
                      "checkpoint.every=1")
        plan = make_plan(config)
        frozen = {p for p, unit in plan.table.parameters.items() if not unit.trains}
        assert len(frozen) == 4  # 2 blocks, the head's norm, the tied matrix
        assert len(plan.table.parameters) == 6
        for programs in plan.programs.values():
            ops = {item.op for program in programs for item in program
                   if item.unit in frozen and item.op in (Op.REDUCE, Op.STEP, Op.GATHER, Op.OFFLOAD)}
            assert ops <= ({Op.GATHER} if stage == 3 else set())
        for position, row in enumerate(stages(Analysis(plan))):
            trained = sum(plan.table.shards.numel(p) for p in plan.table.stepped(position))
            assert row.optimizer_bytes == 8 * trained > 0
            assert row.gradient_bytes == 4 * trained * (2 if stage == 1 else 1)
            assert row.snapshot_bytes == 12 * trained // (2 if stage == 0 else 1)
