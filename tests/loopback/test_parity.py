"""Every composition against the single-process reference, all ranks in one process (tp included: ranks as
threads)."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.harness import assert_parity, loopback, tiny

MESHES = [(dp, tp, pp) for dp, tp, pp in itertools.product((1, 2, 4, 8), repeat=3) if dp * tp * pp <= 8]


def mesh(dp: int, tp: int, pp: int) -> list[str]:
    return [f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.pp={pp}"]


@pytest.mark.parametrize(("schedule", "zero"), [
    ("gpipe", 0), ("1f1b", 1), pytest.param("gpipe", 1, marks=pytest.mark.slow),
    pytest.param("1f1b", 0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dp", "tp", "pp"), MESHES)
def test_mesh(dp, tp, pp, schedule, zero, references):
    """Loss, gradient norm, every gradient and the weights after 5 steps, on every mesh of up to 8 ranks."""
    config = tiny(*mesh(dp, tp, pp), f"parallel.schedule={schedule}", f"zero.stage={zero}")
    assert_parity(loopback(config), references(config))


LLAMA = ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.kv_heads=4"]
VARIANTS = {
    "sequence-parallel": ["parallel.sequence_parallel=true"],
    "untied": ["model.tie_embeddings=false"],
    "untied-sequence-parallel": ["model.tie_embeddings=false", "parallel.sequence_parallel=true"],
    "learned-positions": ["model.position=learned", "parallel.sequence_parallel=true"],
    "llama": [*LLAMA, "parallel.sequence_parallel=true"],
    "llama-untied": [*LLAMA, "model.tie_embeddings=false"],
    "qkv-bias": [*LLAMA, "model.qkv_bias=true", "model.rope_scaling=[8,1,4,8]"],
    "qk-norm": [*LLAMA, "model.qk_norm=true", "model.head_dim=6"],
    "qk-norm-sequence-parallel": ["model.qk_norm=true", "model.head_dim=8", "parallel.sequence_parallel=true",
                                  "model.attention_dropout=0.1"],
    "units-of-two-blocks": ["parallel.layers_per_unit=2"],
    "uneven-stages": ["parallel.stage_units=[2,6]"],
    "only-the-embedding": ["parallel.stage_units=[1,7]"],
    "only-the-head": ["parallel.stage_units=[7,1]", "model.tie_embeddings=false"],
    "axis-order": ["parallel.axis_order=tp-dp-pp"],
    "micro-batches-of-two": ["train.micro_batch_size=2"],
    "clipping": ["optimizer.clip_grad=1.0"],
    "clipping-sequence-parallel": ["optimizer.clip_grad=1.0", "parallel.sequence_parallel=true"],
    "warm-up-and-decay": ["optimizer.warmup_steps=2", "optimizer.schedule=cosine", "optimizer.lr=1e-2"],
    "dropout": ["model.dropout=0.1", "model.attention_dropout=0.1"],
    "dropout-sequence-parallel": ["model.dropout=0.2", "parallel.sequence_parallel=true"],
}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, zero, references):
    """Each variant on dp=2 x tp=2 x pp=2."""
    config = tiny(*mesh(2, 2, 2), f"zero.stage={zero}", *VARIANTS[name])
    assert_parity(loopback(config), references(config))


@pytest.mark.parametrize("variant", [[], ["model.tie_embeddings=false"], ["parallel.sequence_parallel=true"]])
@pytest.mark.parametrize("zero", [0, 1])
def test_bf16(zero, variant, references):
    """bf16 with fp32 master weights: 1e-3 on the loss and 5e-3 on the norm over 4 steps, same casts as the
    reference."""
    config = tiny(*mesh(2, 2, 2), f"zero.stage={zero}", "precision.dtype=bf16", *variant)
    reference = references(config, 4)
    ranks = loopback(config, 4)
    for got, want in zip(ranks.losses, reference.losses, strict=True):
        assert abs(got - want) <= 1e-3 * want
    for got, want in zip(ranks.norms, reference.norms, strict=True):
        assert abs(got - want) <= 5e-3 * want


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stages_are_equal_to_the_bit(dtype):
    """Two ZeRO stages on one mesh, with clipping: the same sums in the same order give the same bits."""
    both = [*mesh(2, 2, 2), f"precision.dtype={dtype}", "optimizer.clip_grad=1.0"]
    runs = [loopback(tiny(*both, f"zero.stage={zero}"), 5) for zero in (0, 1)]
    assert runs[0].losses == runs[1].losses and runs[0].norms == runs[1].norms
    for name, value in runs[0].weights.items():
        assert torch.equal(value, runs[1].weights[name]), name


@pytest.mark.core
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_micro_batch_counts(micro_batches, references):
    """Fewer micro-batches than stages, and counts that do not divide."""
    config = tiny(*mesh(1, 1, 4), f"train.global_batch_size={micro_batches}")
    assert_parity(loopback(config), references(config))


@pytest.mark.core
def test_reference_notices_a_fault(references):
    """The comparison itself: a gradient of one parameter off by a thousandth is seen."""
    config = tiny(*mesh(2, 1, 1))
    ranks = loopback(config)
    name = "blocks.3.mlp.up.weight"
    ranks.first_grads[name] = ranks.first_grads[name] * 1.001
    with pytest.raises(AssertionError, match=name):
        assert_parity(ranks, references(config))
