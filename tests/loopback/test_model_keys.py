"""model.head_dim, qkv_bias, qk_norm and rope_scaling: with a sample of the contract against the reference,
and each against the formula that it stands for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.harness import assert_contract, cell_config, covering, each_value, loopback, same_bits, tiny
from threed.base.errors import InputError
from threed.models.layers.handing import handing
from threed.models.model import layers, own_parameters, parameters
from threed.models.tiling import layers_of
from threed.schema import Config
from threed.tensor.rotary import frequencies

# (A budget of activations is computed for the model without these keys.)
SAMPLE = [cell for cell in each_value(covering()) if cell.activation != "budget"]


def with_keys(config: Config) -> Config:
    return replace(config, model=replace(
        config.model, norm="rmsnorm", activation="swiglu", bias=False, head_dim=6, qkv_bias=True,
        qk_norm=True, kv_heads=4 if config.parallel.cp_form == "heads" else 2,
        rope_scaling=[8.0, 1.0, 4.0, 4.0]))


@pytest.mark.parametrize("cell", [
    pytest.param(cell, id=cell.id, marks=[pytest.mark.slow] if index % 3 else [])
    for index, cell in enumerate(SAMPLE)])
def test_contract(cell, references):
    """All keys together: a norm's gradient that only some ranks of tp have, or that is counted twice."""
    assert_contract(with_keys(cell_config(cell, ranks=8)), references, steps=2)


KEYS = ["model.norm=rmsnorm", "model.activation=swiglu", "model.kv_heads=4", "model.qk_norm=true",
        "model.head_dim=6"]


@pytest.mark.parametrize("mesh", [[], ["parallel.tp=2", "parallel.sequence_parallel=true"],
                                  ["model.tile_linears=5KiB", "model.tie_embeddings=false", "parallel.tp=2"]])
def test_fused_and_pieces_have_the_same_bits(mesh):
    """Attention computed again in backward, from the norms' weights as they are then; pieces of their own."""
    pieces = ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]", "zero.stage=3",
              "parallel.dp=2"]
    usual = ["zero.stage=3", "parallel.dp=2"]
    same_bits([loopback(tiny("model.layers=2", *KEYS, *mesh, *others), 2)
               for others in (usual, pieces, [*usual, "model.fused=auto"])])


def test_parameters():
    """Heads of 6 numbers whose sum is not the hidden size; three biases; two norms that no axis cuts."""
    model = with_keys(tiny("model.layers=1")).model
    shapes = {each.name.removeprefix("blocks.0.attention."): each.shape for each in parameters(model)}
    heads = model.heads + 2 * model.num_kv_heads
    assert shapes["qkv.weight"] == (6 * heads, 32) and shapes["qkv.bias"] == (6 * heads,)
    assert shapes["out.weight"] == (32, 6 * model.heads) and "out.bias" not in shapes
    ends = "q_norm.weight", "k_norm.weight"
    norms = [each for each in layers(model)[1].parameters() if each.name.endswith(ends)]
    assert [(each.shape, each.axes, each.partial_over, each.fill, each.decay) for each in norms] == [
        ((6,), (), ("tp",), 1.0, False)] * 2
    names = {each.name for each in parameters(replace(model, bias=True, qkv_bias=False))}
    assert "blocks.0.attention.out.bias" in names and "blocks.0.attention.qkv.bias" not in names


def test_rope_scaling():
    """Long waves are stretched by the factor, short ones stay, and what is between is between."""
    model = replace(tiny().model, head_dim=64, rope_theta=5e5)
    plain, scaled = frequencies(model), frequencies(replace(model, rope_scaling=[8.0, 1.0, 4.0, 8192.0]))
    waves = 2 * math.pi / plain
    long, short = waves > 8192, waves < 2048
    assert long.any() and short.any() and not (long | short).all()
    assert torch.equal(scaled[long], plain[long] / 8) and torch.equal(scaled[short], plain[short])
    rest = ~(long | short)
    assert ((scaled < plain) & (scaled > plain / 8))[rest].all() and (scaled[1:] < scaled[:-1]).all()


def test_a_tiled_attention_hands_its_norms_on():
    """Tiles without the norms' weights read them from the first one."""
    config = tiny("model.layers=1", *KEYS, "model.tile_linears=5KiB", "model.tie_embeddings=false")
    tiles = [layer for layer in layers_of(config) if layer.name.startswith("blocks.0.attention")]
    assert len(tiles) > 1 and ["q_norm" in str(own_parameters(tile)) for tile in tiles] == [
        True, *[False] * (len(tiles) - 1)]
    assert all("qk_scales" in handing(tile).reads for tile in tiles[1:])
    with pytest.raises(InputError, match="smallest tile"):
        tiny("model.layers=1", *KEYS, "model.tile_linears=1KiB", "model.tie_embeddings=false")
