"""What a layer declares is what it does: parameters, products, messages, what it keeps. All planning rests on
it.

A parameter that the plan does not know is never stepped, and one of another shape breaks its buffer: a layer
refuses to be built so. Costs are measured of each layer alone, exactly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness import tiny
from threed.comm.process import initialized
from threed.models.layers.base import Layer
from threed.models.layers.handing import passes
from threed.models.layers.mlp import Mlp
from threed.models.measure import Measured
from threed.models.tiling import layers_of, share_of, tile_of
from threed.schema import Config
from threed.spec.kernels import Product
from threed.spec.parameter import Cost, Saved, Traffic

SIZES = ["model.layers=1", "model.hidden=64", "model.heads=4", "model.seq_len=32", "model.vocab=120",
         "model.vocab_multiple=64", "train.global_batch_size=2", "train.micro_batch_size=2"]
FAMILIES = {
    "gpt": ["model.position=learned"], "gpt-rotary": [],
    "gpt-untied": ["model.tie_embeddings=false", "model.bias=false"],
    "llama": ["model.family=llama", "model.kv_heads=2", "model.ffn_hidden=96"],
    "dropout": ["model.dropout=0.1", "model.attention_dropout=0.1"],
    "dropout-grouped": ["model.family=llama", "model.kv_heads=2", "model.dropout=0.1",
                        "model.attention_dropout=0.1"],
    "fused": ["model.family=llama", "model.kv_heads=2", "model.dropout=0.1", "model.fused=auto"],
    "chunks": ["model.loss_chunk=5"],
    "qk-norm": ["model.family=llama", "model.kv_heads=2", "model.head_dim=12", "model.qk_norm=true"],
    "qk-norm-alone": ["model.position=learned", "model.qk_norm=true", "model.qkv_bias=false"],
    "qk-norm-dropout": ["model.family=llama", "model.qk_norm=true", "model.attention_dropout=0.1"],
    "qk-norm-dropout-grouped": ["model.family=llama", "model.kv_heads=2", "model.qk_norm=true",
                                "model.head_dim=8", "model.attention_dropout=0.1"],
    "qkv-bias": ["model.family=llama", "model.qkv_bias=true", "model.rope_scaling=[8,1,4,16]"],
    "documents": ["data.document_mask=true"],
    "documents-learned": ["data.document_mask=true", "model.position=learned", "model.loss_chunk=5"],
    "documents-llama": ["data.document_mask=true", "model.family=llama", "model.kv_heads=2",
                        "model.fused=auto"],
    "parallel": ["model.family=tests/families/parallel_block.py:PARALLEL"],
}
MESHES = {"alone": [], "tp": ["parallel.tp=2"], "sp": ["parallel.tp=2", "parallel.sequence_parallel=true"]}
TILES = ["model.tile_linears=8KiB", "model.tie_embeddings=false", "model.ffn_hidden=64", "model.kv_heads=4",
         "model.hidden=32"]


def measured(config: Config, all_layers: list[Layer], index: int, pieces: tuple[str, ...] = ()) -> Cost:
    share = share_of(config)
    running = index > 0 and passes(all_layers[index - 1], share) is not None
    torch.manual_seed(0)
    with initialized():
        return Measured(all_layers[index], config.model, share, running, pieces).cost(first=index == 0)


def known_difference(config: Config, layer: Layer) -> Cost:
    """What is kept less what is declared, a few bytes a token: an embedding that is cut keeps which tokens
    are its own, and tiles of the head keep fewer numbers of the running softmax."""
    tokens = config.train.micro_batch_size * config.model.seq_len
    sums = [each.bytes for each in layer.cost(share_of(config)).saved
            if each.what == "log of attention's sums"]
    if config.data.document_mask and sums:
        # One document at a time keeps no sums, and here each has half of the sequence. One kernel for all of
        # them, which needs a GPU, keeps what is declared.
        heads = sum(sums) // 4 // tokens
        return Cost((Product(-tokens * heads, config.model.seq_len, config.model.head_size),),
                    (Saved("log of attention's sums", -sum(sums)),))
    if layer.name.startswith("embedding") and (config.parallel.tp > 1 or tile_of(layer).count > 1):
        return Cost(saved=(Saved("mask of tokens", tokens),), operands=tokens)
    if layer.name.startswith("head") and tile_of(layer).index > 0 and not (
            config.model.fuses or config.model.loss_chunk is not None):
        return Cost(saved=(Saved("running softmax", -tokens * (4 if tile_of(layer).last else 8)),))
    return Cost()


def shown(cost: Cost, again: tuple[str, ...] = ()) -> dict[str, object]:
    sent = {where: size for where, size in cost.sent.items() if size.bytes}
    return {"flops": cost.flops, "saved": cost.saved_bytes(again), "operands": cost.operands, "sent": sent}


@pytest.mark.parametrize("tiled", [[], TILES], ids=["whole", "tiles"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_cost_what_they_declare(name, mesh, tiled):
    config = tiny(*SIZES, *FAMILIES[name], *MESHES[mesh], *tiled)
    all_layers = layers_of(config)
    assert bool(tiled) == (len(all_layers) > 3)
    for index, layer in enumerate(all_layers):
        cost = measured(config, all_layers, index)
        declared = layer.cost(share_of(config)) + known_difference(config, layer)
        assert shown(declared) == shown(cost), f"{layer.name} declares {declared}, and it is {cost}"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("others", [[], ["model.loss_chunk=5"]])
def test_a_head_in_16_bits(mesh, others):
    """(On a CPU a layernorm's statistics have 16 bits, too; on a GPU they have 32, as declared.)"""
    config = tiny(*SIZES, *MESHES[mesh], "model.norm=rmsnorm", "precision.dtype=bf16", *others)
    all_layers = layers_of(config)
    declared = all_layers[-1].cost(share_of(config))
    assert shown(declared) == shown(measured(config, all_layers, len(all_layers) - 1))


@pytest.mark.parametrize("what, wrong", [
    ("flops", Cost((Product(1, 1, 1),))), ("saved", Cost(saved=(Saved("nothing", 8),))),
    ("operands", Cost(operands=4)),
    ("sent", Cost(sent={("forward", "tp"): Traffic(4, 1)}))])
def test_a_wrong_declaration_is_seen(what, wrong, monkeypatch):
    config = tiny(*SIZES, *MESHES["sp"])
    right = Mlp.cost
    monkeypatch.setattr(Mlp, "cost", lambda self, share: right(self, share) + wrong)
    declared, cost = layers_of(config)[1].cost(share_of(config)), measured(config, layers_of(config), 1)
    assert {key for key, value in shown(declared).items() if value != shown(cost)[key]} == {what}


def test_a_wrong_shape_is_refused(monkeypatch):
    config = tiny(*SIZES)
    layer = layers_of(config)[1]
    wrong = [replace(each, shape=(32, 64)) if each.name.endswith("mlp.up.weight") else each
             for each in layer.parameters()]
    monkeypatch.setattr(layer, "parameters", lambda: wrong)
    with pytest.raises(AssertionError, match=r"mlp.up.weight.*256, 64"):
        measured(config, [layer, layer], 1)
