"""Every setting of ZeRO against the reference, training and evaluating; and stages against each other, to the
bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.harness import SIXTEEN, Ranks, assert_contract, assert_parity, loopback, same_bits, tiny
from threed.devices.cpu import Cpu
from threed.optim import native
from threed.optim import step as optimizer
from threed.optim.base import Update, View
from threed.optim.registry import OPTIMIZERS, turning
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.summary import stages
from threed.schema import Config, OptimizerConfig

SMALL = ["model.layers=4", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16",
         "train.eval_every=1"]
UNTIED = "model.tie_embeddings=false"
SP = ["parallel.tp=2", "parallel.sequence_parallel=true"]


def small(stage: int, *others: str, dp: int = 2, pp: int = 2, micro_batches: int = 3) -> Config:
    return tiny(*SMALL, f"zero.stage={stage}", f"parallel.dp={dp}", f"parallel.pp={pp}",
                f"train.global_batch_size={dp * micro_batches}", *others)


@pytest.mark.parametrize("every", [1, 2, 3, "step"])
@pytest.mark.parametrize("stage", [2, 3])
def test_reduce_every(stage, every, references):
    """A part of the gradient that is lost, or added twice, when the last reduction has fewer micro-batches
    than the others."""
    assert_contract(small(stage, f"zero.reduce_every={every}", micro_batches=4), references)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("residency", [1, 2, 3, "stage", "step"])
def test_window(residency, prefetch, references):
    """A unit that is used when its buffer holds another one, or that autograd kept as memory that is used
    again."""
    assert_contract(small(3, f"zero.residency={residency}", f"zero.prefetch={prefetch}"), references)


@pytest.mark.parametrize("others", [[], SP, ["zero.residency=stage"]], ids=["", "sequence-parallel", "stage"])
@pytest.mark.parametrize("below", [1, 100, 10**9])
def test_persist(below, others, references):
    """Parameters of a unit that stay whole and others that do not: none (nothing is that small), biases and
    norms, or all."""
    assert_contract(small(3, f"zero.persist_below={below}", UNTIED, *others), references)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shard_groups(stage, size, references):
    """Copies in several groups that drift apart, or are counted once each in the gradient norm."""
    assert_contract(small(stage, f"zero.shard_size={size}", dp=4), references)


MESHES = {
    "dp2": ((2, 1), []),
    "dp4": ((4, 1), []),
    "dp8": ((8, 1), []),
    "pp2": ((2, 2), ["parallel.schedule=gpipe"]),
    "pp4": ((2, 4), []),
    "zb-v": ((2, 2), ["parallel.schedule=zb-v"]),
    "tp2": ((2, 1), SP),
    "3d": ((2, 2), SP),
    "groups": ((4, 1), [*SP, "zero.shard_size=2"]),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", MESHES)
def test_mesh(name, stage, tied, references):
    """pp=1, where a tied embedding is one unit that two others use; pp=2 and 4, where it is two halves."""
    (dp, pp), others = MESHES[name]
    config = small(stage, *others, *([] if tied else [UNTIED]), dp=dp, pp=pp, micro_batches=2)
    assert_contract(config, references)


VARIANTS = {
    "llama": ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.kv_heads=2", UNTIED,
              *SP],
    "learned-positions": ["model.position=learned", *SP],
    "units-of-two-blocks": ["parallel.layers_per_unit=2"],
    "dropout": ["model.dropout=0.1", "model.attention_dropout=0.1"],
    "clipping": ["optimizer.clip_grad=1.0"],
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, stage, references):
    """What a model keeps for backward when its parameters come and go."""
    assert_contract(small(stage, *VARIANTS[name]), references)


@pytest.mark.parametrize("master", ["fp32", "none"])
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("grad", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dtypes(stage, grad, reduce, master, references):
    """bf16 with gradients kept and sent in either dtype, with and without an fp32 copy of the weights. Losses
    would hardly tell a setting that has no effect: so the values themselves are asked, and the bytes."""
    groups = ["zero.shard_size=2"] if stage in (1, 3) else []
    config = small(stage, "model.layers=2", "precision.dtype=bf16", f"precision.grad_dtype={grad}",
                   f"precision.reduce_dtype={reduce}", f"precision.master={master}", *groups, dp=4, pp=1)
    ranks = loopback(config, 4)
    assert_parity(ranks, references(config, 4), SIXTEEN)
    assert fits_bf16(ranks.weights) == (master == "none")
    # the last sum is over groups
    assert fits_bf16(ranks.first_grads) == ("bf16" in (grad, reduce if groups else None))
    plan = make_plan(config)
    assert ranks.sent[0]["dp"] == 4 * stages(Analysis(plan))[0].sent_bytes["dp"]
    assert plan.table.elements.reduce == (4 if reduce == "fp32" else 2)


def fits_bf16(tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, value.bfloat16().float()) for value in tensors.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_sixteen_bits_throughout(stage, dtype, references):
    """Gradients that are cast a chunk at a time as they are used: divided by the loss scale, and clipped."""
    settings = [f"precision.{key}={dtype}" for key in ("dtype", "grad_dtype", "reduce_dtype")]
    config = small(stage, *settings, "precision.master=none", "precision.loss_scale=256",
                   "optimizer.clip_grad=0.5")
    assert_contract(config, references)


@pytest.mark.parametrize("master", ["fp32", "none"])
def test_master_keeps_what_rounding_loses(master):
    """Updates of less than half a unit in the last place of bf16: without a copy in fp32 the weights never
    move."""
    ranks = loopback(small(2, "precision.dtype=bf16", f"precision.master={master}", "optimizer.lr=1e-5"), 3)
    weight = ranks.weights["blocks.0.mlp_norm.weight"]
    assert torch.equal(weight, torch.ones_like(weight)) == (master == "none")


PRECISIONS = {
    "fp32": [],
    "bf16": ["precision.dtype=bf16"],
    "fp16": ["precision.dtype=fp16", "precision.loss_scale=1024"],
    "bf16-throughout": ["precision.dtype=bf16", "precision.grad_dtype=bf16", "precision.reduce_dtype=bf16",
                        "precision.master=none"],
}
BITS = {
    "dp": ((2, 1), [UNTIED]),
    "pp-tied": ((2, 2), []),
    "sequence-parallel": ((2, 1), SP),
    "zb-v": ((2, 2), ["parallel.schedule=zb-v"]),
    "dp4": ((4, 1), []),
}
CORE = {("dp", "fp32"), ("pp-tied", "bf16")}
QUICK = {(name, precision) for name in ("dp", "pp-tied") for precision in ("fp32", "bf16", "fp16")}


@pytest.mark.parametrize(("name", "precision"), [
    pytest.param(*case, marks=[] if case in QUICK - CORE else pytest.mark.core if case in CORE
                 else pytest.mark.slow)
    for case in itertools.product(BITS, PRECISIONS)])
def test_stages_are_equal_to_the_bit(name, precision):
    """With clipping, 8 steps: what sums the same in the same order has the same bits, whatever is sharded."""
    (dp, pp), others = BITS[name]

    def run(stage: int, *settings: str) -> Ranks:
        return loopback(small(stage, "model.layers=2", "optimizer.clip_grad=1.0", *others,
                              *PRECISIONS[precision], *settings,
                              dp=dp, pp=pp, micro_batches=2), 8)

    once = "zero.reduce_every=step"
    same_bits([run(0), run(1), run(2, once), run(3, once)])
    same_bits([run(2), run(3), run(3, "zero.residency=step", "zero.persist_below=1")])


@pytest.mark.parametrize(("pp", "precision"), [
    pytest.param(*case, marks=pytest.mark.slow if case[0] > 1 else
                 [pytest.mark.core] * (case[1] == "bf16"))
    for case in itertools.product((1, 2), PRECISIONS)])
def test_shard_groups_are_equal_to_the_bit(pp, precision):
    """The same, with two shard groups."""
    runs = [loopback(small(stage, "model.layers=2", "optimizer.clip_grad=1.0", "zero.shard_size=2",
                           *PRECISIONS[precision],
                           *(["zero.reduce_every=step"] if stage > 1 else []), dp=4, pp=pp, micro_batches=2),
                     8)
            for stage in (1, 2, 3)]
    same_bits(runs)


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if turning(name) is None])
def test_a_step_in_chunks(name, dtype, grad_dtype, scale, monkeypatch):
    """A chunk that is stepped twice or never, or that rounds otherwise; a gradient that is not scaled; a copy
    that is older."""
    monkeypatch.setattr(native, "ADAMW", None)  # as without a C compiler

    def step(chunk: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(Cpu, "chunk", chunk)
        generator = torch.Generator().manual_seed(0)
        weight, grad, first, second = (torch.randn(1000, generator=generator) for _ in range(4))
        weight, grad = weight.to(dtype), grad.to(grad_dtype)
        copy = torch.full((1000,), torch.nan, dtype=torch.bfloat16)
        before, averaged, scaled = weight.float().clone(), first.clone(), grad.float() * scale
        state = {"exp_avg": first, "exp_avg_sq": second.square()}
        config = OptimizerConfig(name=name, weight_decay=0.1)
        optimizer.step(Update(config, 0.1, 3, True, scale), View(weight, grad, state), copy)
        (beta1, beta2), rounding = config.betas, 1e-2 if dtype != torch.float32 else 1e-5
        if name == "sgd":
            assert torch.allclose(weight.float(), before * 0.99 - 0.1 * scaled, rtol=rounding, atol=1e-6)
        elif name == "lion":
            direction = (averaged * beta1 + (1 - beta1) * scaled).sign()
            assert torch.allclose(weight.float(), before * 0.99 - 0.1 * direction, rtol=rounding, atol=1e-6)
            assert torch.allclose(first, averaged * beta2 + (1 - beta2) * scaled, rtol=1e-5, atol=1e-6)
        else:
            assert torch.allclose(first, averaged * beta1 + (1 - beta1) * scaled, rtol=1e-5, atol=1e-6)
        assert torch.equal(copy, weight.bfloat16())
        return weight, copy, *state.values()

    for whole, chunked in zip(step(1 << 19), step(64), strict=True):
        assert torch.equal(whole, chunked)
