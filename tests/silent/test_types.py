"""Row 30 of docs/silent-faults.md: a type checker of distributed tensors (the package spmd_types) over the
layers of `models/layers` and over `threed/tensor`.

Over tp a tensor is one of: I, the same on all ranks, and so is its gradient; R, the same, with a gradient of
which each rank has a part; V, each rank has its own. The types of parameters are what threed's plan says of
them: V where they are cut, R where a REDUCE over tp adds their gradients up (`FlatLayout.partial`), I else.
The checker infers all others, and refuses sums and products of types that do not go together: I with R or V.
So a parameter with the wrong one is an error: a gradient that is never summed, or is summed twice.

What `threed/tensor`'s own autograd functions do is declared here (RULES): the checker does not look into
them. And it does not know pipelines, ZeRO, or factors: the divisor of the loss, say.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
from spmd_types import I, P, R, S, V, rules
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import tiny
from threed.base.mesh import GROUPS
from threed.comm.group import Group
from threed.comm.lanes import Handle
from threed.features.zero.shard import layout
from threed.models.layers.base import Out
from threed.models.model import layers, parameters
from threed.schema import Config
from threed.tensor import documents, fused, fused_loss, pieces
from threed.tensor import layers as subject
from threed.tensor.context import Batch, Context
from threed.tensor.documents import Documents

MODELS: dict[str, list[str]] = {
    "gpt": ["model.position=learned"],
    "untied": ["model.tie_embeddings=false"],
    "llama": ["model.family=llama", "model.kv_heads=4"],
    "qwen": ["model.family=llama", "model.kv_heads=4", "model.qkv_bias=true", "model.qk_norm=true"],
    "everything": ["model.bias=true", "model.qkv_bias=true", "model.qk_norm=true", "model.norm=rmsnorm"],
    "documents": ["data.document_mask=true", "data.loss_mask=answers"],
    "fused": ["model.family=llama", "model.fused=auto", "model.qk_norm=true"],
    "chunks": ["model.loss_chunk=5"],
}


# Autograd functions that talk to nobody: each rank computes on its own heads or tokens.
for function in (documents._Attend, documents._RotateAt, fused._Rotate, fused._RmsNorm, fused._SwiGlu,
                 pieces._Apart, pieces._Ended, pieces._Gelu):
    spmd.register_local_autograd_function(function)


class Still(Group):
    """A rank of two, alone: only shapes matter."""

    def _all_reduce(self, tensor, op):
        return Handle(None)

    def _reduce_scatter(self, output, tensor, add, scratch):
        output.zero_()
        return Handle(None)

    def _all_gather(self, output, tensor):
        output.zero_()
        return Handle(None)

    def _exchange(self, output, tensor, gives, takes):
        output.zero_()
        return Handle(None)


@pytest.fixture
def tp():
    """The axis: tp of two ranks, over torch's fake process group."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with spmd.set_current_mesh(mesh):
            yield mesh.get_group("tp")
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- what our autograd functions do


def summed(x: Any, group: Any, sp: bool) -> Any:
    """Parts of a sum over tp -> the sum, or this rank's tokens of it."""
    x = rules.reinterpret(x, group, src=V, dst=P)
    return rules.reduce_scatter(x, group, src=P, dst=S(0)) if sp else rules.all_reduce(x, group, src=P, dst=I)


def row_of(group: Any) -> Any:
    def row(*, x, weight, layer):
        return summed(rules.einsum("sbi,oi->sbo", x, weight), group, layer.sp)

    return row


def rules_of(group: Any) -> dict[type, Any]:
    def column(*, x, weight, bias, layer):
        """Each rank's product has a part of x's gradient, which backward sums."""
        whole = (rules.all_gather(x, group, src=S(0), dst=R) if layer.sp
                 else rules.convert(x, group, src=I, dst=R))
        y = rules.einsum("sbi,oi->sbo", whole, weight)
        return y if bias is None else rules.einsum("sbo,o->sbo", y, bias)

    def sum_over_tp(*, x, sp):
        return summed(x, group, sp)

    def cross_entropy(outputs, *, logits, target):
        spmd.assert_type(logits, {group: V})
        spmd.assert_type(target, {group: I})
        spmd.assert_type(outputs, {group: I})

    def in_chunks(outputs, *, logits, labels):
        cross_entropy(outputs, logits=logits, target=labels)

    return {subject._Column: column, subject._Row: row_of(group), subject._SumOverTp: sum_over_tp,
            subject._CrossEntropy: cross_entropy, fused_loss._CrossEntropy: in_chunks}


# ---------------------------------------------------------------- the trial


def declared(config: Config) -> dict[str, Any]:
    """Name of a parameter -> its type over tp, as the flat layout and its reductions have it."""
    sequence = ("tp",) if config.parallel.sequence_parallel else ()
    types = {}
    for spec in parameters(config.model):
        partial = layout((spec,), {"tp": 2}, 1).partial(("tp",), sequence)
        types[spec.name] = V if "tp" in spec.axes else R if partial else I
    return types


def check(config: Config, group: Any, types: dict[str, Any]) -> dict[str, Any]:
    """Run all layers of one rank of tp under the checker; the types of what they hand on, by layer.
    SpmdTypeError where types do not go together."""
    groups = {name: Still(name, (0, 1) if name == "tp" else (0,), 0, Counter()) for name in GROUPS}
    context = Context(config.model, groups, config.parallel.sequence_parallel, torch.float32,
                      subject.WeightGrads())
    specs = parameters(config.model)
    weights = {spec.name: nn.Parameter(torch.zeros(spec.module_shape({"tp": 2}))) for spec in specs}
    built = [layer.build(context, weights) for layer in layers(config.model)]
    seq, found = config.model.seq_len, {}
    tokens, labels = (torch.zeros(1, seq, dtype=torch.int64) for _ in range(2))
    positions = torch.arange(seq).remainder(5)[None]
    apart = Documents.of(positions) if config.data.document_mask else None
    count = torch.tensor(seq) if config.masked else seq
    with spmd_types.checker.typecheck(), pytest.MonkeyPatch.context() as patch:
        for function, rule in rules_of(group).items():
            patch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
        for name, weight in weights.items():
            spmd.assert_type(weight, {group: types[name]})
        for tensor, kind in ((tokens, R), (labels, I), (positions, R)):
            spmd.assert_type(tensor, {group: kind})
        if isinstance(count, torch.Tensor):
            spmd.assert_type(count, {group: I})
        batch = Batch(tokens, labels, torch.zeros(1, dtype=torch.int64), 0, count, True, apart)
        x = None
        for layer in built:
            out = layer(x, batch)
            out = out if isinstance(out, Out) else Out(out)
            x = out.x
            handed = x if x is not None else out.loss
            assert handed is not None
            found[layer.name] = spmd.get_axis_local_type(handed, group)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("name", MODELS)
def test_types_go_together(name, sequence_parallel, tp):
    """Every layer, with the types that the plan says of parameters: the stream is the same on all ranks, or
    each has tokens of its own; the loss is the same."""
    config = config_of(name, sequence_parallel)
    found = check(config, tp, declared(config))
    stream = V if sequence_parallel else I
    assert list(found.values()) == [*[stream] * (len(found) - 1), I]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("name", ["gpt", "everything", "qwen"])
def test_another_type_is_refused(name, sequence_parallel, tp):
    """The trial itself: each replicated parameter, declared to have a whole gradient on each rank where it
    has a part, or the other way round."""
    config = config_of(name, sequence_parallel)
    types = declared(config)
    replicated = [each for each, kind in types.items() if kind is not V]
    kinds = {R} if sequence_parallel else {I} if name == "gpt" else {I, R}
    assert {types[each] for each in replicated} == kinds
    for each in replicated:
        with pytest.raises(spmd.SpmdTypeError):
            check(config, tp, {**types, each: I if types[each] is R else R})


def test_a_product_that_is_not_summed_is_refused(tp, monkeypatch):
    """Half a sum over tp goes on as if it were whole."""
    config = config_of("gpt", False)

    def forgotten(*, x, weight, layer):
        return rules.einsum("sbi,oi->sbo", x, weight)

    monkeypatch.setattr("tests.silent.test_types.row_of", lambda group: forgotten)
    with pytest.raises(spmd.SpmdTypeError):
        check(config, tp, declared(config))


def config_of(name: str, sequence_parallel: bool) -> Config:
    return tiny("model.layers=1", "parallel.tp=2", f"parallel.sequence_parallel={sequence_parallel}",
                *MODELS[name])
