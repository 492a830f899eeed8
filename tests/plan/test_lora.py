"""LoRA in the plan: frozen units, and keys that cannot be."""

from __future__ import annotations

import pytest

from threed.base.errors import ConfigError
from threed.config.load import load
from threed.models.layers.base import Part
from threed.models.layers.block import Branch
from threed.models.layers.mlp import Mlp
from threed.models.model import adapters, model_flops, num_parameters, parameters
from threed.planner import make_plan, unit_costs
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware
from threed.program.effects import effects
from threed.program.instruction import Instruction, Op
from threed.spec.parameter import Parameter, Rows

BASE = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.vocab=64", "model.vocab_multiple=32",
        "model.seq_len=8", "parallel.dp=2"]
EVERY = "model.lora_targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"


@pytest.mark.parametrize("overrides, words", [
    (["model.lora_rank=0"], "model.lora_rank=0: must be at least 1"),
    (["model.lora_rank=2", "model.lora_alpha=0"], "model.lora_alpha=0.0: must be above 0"),
    (["model.lora_alpha=8"], "model.lora_alpha=8.0 needs model.lora_rank"),
    (["model.lora_targets=[q_proj]"], r"model.lora_targets=\['q_proj'\] needs model.lora_rank"),
    (["model.lora_rank=2", "model.lora_targets=[c_attn]"], "no linear c_attn; it has q_proj, k_proj, "),
    (["model.lora_rank=2", "model.lora_targets=[gate_proj]"], "no linear gate_proj"),  # of a gelu
    (["model.lora_rank=2", "model.lora_targets=[qkv_proj,v_proj]"], "qkv_proj is one adapter for queries"),
    (["model.lora_rank=2", "model.lora_targets=[]"], "must be some of q_proj, "),
    (["model.lora_rank=2", "model.lora_targets=[q_proj,q_proj]"], "each once"),
    (["model.lora_rank=2", "model.lora_targets=all-linear"], "=all-linear: must be a list, such as"),
    (["model.lora_rank=2", "model.tile_linears=1KiB"], "tiles have no adapters"),
    (["model.r=2"], "for PEFT's model.r use model.lora_rank"),
])
def test_keys_that_cannot_be(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load(None, [*BASE, *overrides])


def test_a_parameter_that_cannot_be_frozen(monkeypatch):
    """It would be trained, without a word."""
    class Own(Part):
        def parameters(self) -> list[Parameter]:
            return [Parameter("own.weight", (4,))]

    original = Branch.__init__

    def init(self: Branch, name: str, *others) -> None:
        original(self, name, *others)
        vars(self)["own"] = Own() if name == "blocks.1.mlp" else None

    monkeypatch.setattr(Branch, "__init__", init)
    with pytest.raises(ConfigError, match=r"parameter own\.weight of family gpt .* cannot be frozen"):
        load(None, [*BASE, "model.lora_rank=2"])


@pytest.mark.parametrize("stage", range(4))
def test_nothing_is_done_to_a_frozen_unit(stage):
    """Whoever puts such an instruction into a program is told so."""
    plan = make_plan(load(None, [*BASE, "model.lora_rank=2", f"zero.stage={stage}", "checkpoint.every=1"]))
    frozen = next(p for p, unit in plan.table.parameters.items() if not unit.trains)
    bad = [Instruction(Op.STEP, frozen), Instruction(Op.REDUCE, frozen, group="dp"),
           Instruction(Op.OFFLOAD, frozen, kind="snapshot"), Instruction(Op.OFFLOAD, frozen, kind="gshard"),
           *([Instruction(Op.GATHER, frozen, group="dp")] if stage < 3 else [])]
    for item in bad:
        with pytest.raises(KeyError):
            effects(item, plan.table, 0)


def test_adapters_have_pefts_sizes():
    """A [rank, inputs], B [outputs, rank], of each target; all else is frozen."""
    config = load(None, [*BASE, "model.family=llama", "model.kv_heads=2", "model.ffn_hidden=24",
                         "model.lora_rank=3", EVERY])
    sizes = {"q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16), "gate": (24, 16), "up": (24, 16),
             "down": (16, 24)}
    found = {each.name: [p.shape for p in each.parameters()] for each in adapters(config.model)}
    place = {**dict.fromkeys("qkvo", "attention"), **dict.fromkeys(("gate", "up", "down"), "mlp")}
    assert found == {f"blocks.{block}.{place[what]}.{what}_proj": [(3, inputs), (outputs, 3)]
                     for block in range(2) for what, (outputs, inputs) in sizes.items()}
    trained = [p for p in parameters(config.model) if p.trains]
    assert [p.name for p in trained] == [p.name for each in adapters(config.model) for p in each.parameters()]
    base = load(None, [*BASE, "model.family=llama", "model.kv_heads=2", "model.ffn_hidden=24"]).model
    assert num_parameters(config.model) - num_parameters(base) == sum(p.numel for p in trained)


def test_frozen_weights_have_no_gradients_flops():
    """Of the base model two thirds are left, and attention's own; adapters have all three products."""
    base, tuned = (load(None, [*BASE, *more]) for more in ([], ["model.lora_rank=2"]))
    added = 2 * 8 * 2 * (16 + 16) * 2 * 2  # tokens, rank, inputs and outputs, targets, blocks
    attention = 2 * 4 * 4 * 8**2 * 4  # blocks, heads, queries by keys, size
    products = model_flops(base.model, 1) // 3 - attention
    assert model_flops(tuned.model, 1) == 2 * products + 3 * attention + 3 * added
    assert all(second <= first for first, _, second in unit_costs(tuned))
    assert all(second == first for first, _, second in unit_costs(base))


@pytest.mark.parametrize("fused", ["off", "auto"])
def test_a_frozen_embedding_has_no_backward(fused):
    """Not even of rows that are added up at scattered places, which have a rate of their own."""
    config = load(None, [*BASE, "model.lora_rank=2", f"model.fused={fused}"])
    price = cost(make_plan(config), Hardware.parse("h100-sxm"))
    assert price(0, Instruction(Op.FORWARD, 0, 0)) > 0 == price(0, Instruction(Op.BACKWARD, 0, 0))


def test_rows():
    assert [Rows(0, 2, 4, 3).count(24), Rows(3, 4, 4, 3).count(24), Rows().count(24)] == [12, 6, 24]
    assert Rows().whole and Rows(0, 4, 4, 3).whole and not Rows(0, 1, 2).whole


def test_a_layer_of_ones_own_offers_targets():
    """A linear that offers nothing has no adapters, and is frozen."""
    model = load(None, [*BASE, "model.lora_rank=2", "model.lora_targets=[up_proj]"]).model
    up = Mlp(model, "blocks.0.mlp").up
    assert [each.name for each in up.adapters] == ["blocks.0.mlp.up_proj"] and up.keeps
    assert not Mlp(model, "blocks.0.mlp").down.adapters
