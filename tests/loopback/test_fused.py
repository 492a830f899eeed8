"""model.fused: the same numbers from pieces that keep less."""

from __future__ import annotations

import gc
import itertools
import shutil

import pytest
import torch
import torch.nn.functional as F

from tests.harness import assert_contract, cell_config, covering, loopback, same_bits, tiny
from threed.engine.device import compiles
from threed.errors import ConfigError, InputError
from threed.planner import make_plan
from threed.program.summary import stages
from threed.tensor.alive import Alive
from threed.tensor.fused import Fused
from threed.tensor.random import keep_mask

S, B, D = 6, 2, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEY, SAMPLES = (3, "here"), torch.tensor([5, 6])
FIRST = 3
COUNTERS = torch.arange(FIRST * D, (FIRST + S) * D).view(S, D)
COS, SIN = (torch.rand(S, 1, D, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def rotary(table: torch.Tensor) -> torch.Tensor:
    """Both elements of a pair are turned by the same angle."""
    return torch.cat([table[..., :D // 2]] * 2, -1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * rotary(COS).to(x.dtype) + torch.cat([-high, low], -1) * rotary(SIN).to(x.dtype)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def drop(x: torch.Tensor) -> torch.Tensor:
    return x * keep_mask(0.25, KEY, SAMPLES, COUNTERS).transpose(0, 1) / 0.75


PIECES = {
    "swiglu": (swiglu, lambda fused, x: fused.swiglu(x)),
    "rotate": (rotate, lambda fused, x: fused.rotate(x, rotary(COS).to(x.dtype), rotary(SIN).to(x.dtype))),
    "drop": (drop, lambda fused, x: fused.drop(x, 0.25, KEY, SAMPLES, FIRST)),
    "rms_norm": (lambda x: F.rms_norm(x, (D,), torch.arange(1.0, D + 1).to(x.dtype), 1e-5),
                 lambda fused, x: fused.rms_norm(x, torch.arange(1.0, D + 1).to(x.dtype), 1e-5)),
}


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(S, B, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
            torch.randn(S, B, D, generator=generator, dtype=torch.float64).to(dtype))


def results(piece, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a piece, and the gradient of its input."""
    x, grad = drawn(dtype)
    y = piece(x)
    y.backward(grad[..., :y.shape[-1]])
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["swiglu", "rotate", "drop"])
def test_same_bits(name, dtype):
    """A plain body has the operations of separate ones, in their order, in both directions."""
    plain, fused = PIECES[name]
    for want, value in zip(results(plain, dtype), results(lambda x: fused(Fused(), x), dtype), strict=True):
        assert torch.equal(want, value) and value.dtype == dtype


@pytest.mark.parametrize("name", PIECES)
def test_gradients(name):
    x, _ = drawn(torch.float64)
    assert torch.autograd.gradcheck(lambda x: PIECES[name][1](Fused(), x), x)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.parametrize("name", PIECES)
def test_compiled(name):
    """Compiled bodies round once, so they are as near to fp64 as plain ones are, or nearer."""
    plain, fused = PIECES[name]
    exact = results(lambda x: plain(x.double()).to(x.dtype), torch.float32)
    for dtype, limit in zip(DTYPES, (1e-5, 2e-2, 4e-3), strict=True):
        for want, value in zip(exact, results(lambda x: fused(Fused(compile=True), x), dtype), strict=True):
            assert value.dtype == dtype
            torch.testing.assert_close(value.float(), want, rtol=limit, atol=limit)


def test_dropout_keeps_nothing():
    """Neither its mask nor the counters of its mask, which would be larger: also not in a closure."""
    x, _ = drawn(torch.float32)
    with Alive() as alive:
        y = Fused().drop(x, 0.25, KEY, SAMPLES, FIRST)
        gc.collect()
        assert alive.bytes() == y.nbytes


LLAMA = ["model.activation=swiglu", "model.norm=rmsnorm", "model.bias=false", "model.kv_heads=4",
         "model.dropout=0.1"]
MESHES = {"alone": [], "sp": ["parallel.tp=2", "parallel.sequence_parallel=true"],
          "zb-v": ["parallel.pp=2", "parallel.schedule=zb-v"],
          "pieces": ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]"],
          "tiles": ["model.tile_linears=8KiB", "model.tie_embeddings=false", "zero.stage=3", "parallel.dp=2"]}


@pytest.mark.parametrize(("mesh", "dtype"), list(itertools.product(MESHES, ("fp32", "bf16", "fp16"))))
def test_runs_have_the_same_bits(mesh, dtype):
    scale = ["precision.loss_scale=1024"] if dtype == "fp16" else []
    always = ["train.global_batch_size=4", f"precision.dtype={dtype}", *scale, *LLAMA, *MESHES[mesh]]
    same_bits([loopback(tiny(*always, f"model.fused={fused}"), 3) for fused in ("off", "auto")])


def test_the_plan_knows():
    """A block keeps the opened gate and two dropout masks less, and the head half of the softmax."""
    peaks = []
    for fused in ("off", "auto"):
        config = tiny("precision.dtype=bf16", "parallel.tp=2", *LLAMA, f"model.fused={fused}")
        peaks.append(max(row["activation_peak_bytes"] for row in stages(make_plan(config))))
    model = config.model
    masks = (1 + 2 * model.layers) * model.hidden
    logits = 2 * model.padded_vocab // 2 - 7  # in 16 bits, not 32; and 7 bytes more a token
    gates = 2 * model.num_ffn_hidden * model.layers // 2
    assert peaks[0] - peaks[1] == model.seq_len * (gates + masks + logits)


@pytest.mark.parametrize("cell", covering(), ids=lambda cell: cell.id)
def test_contract(cell, references):
    """The contract's sample, with a model that has all pieces."""
    config = cell_config(cell, 8)
    config.model.fused, config.model.activation, config.model.norm = "auto", "swiglu", "rmsnorm"
    config.model.dropout, config.model.ffn_hidden = 0.1, 32
    assert_contract(config, references, steps=2)


# ---------------------------------------------------------------- the setting


@pytest.mark.parametrize("text, value", [("on", "on"), ("off", "off"), ("auto", "auto"), ("true", "on")])
def test_on_and_off(text, value):
    """YAML reads both as booleans."""
    assert tiny(f"model.fused={text}").model.fused == value


@pytest.mark.parametrize("text", ["always", "1", "null"])
def test_what_is_no_setting(text):
    with pytest.raises(ConfigError, match=r"model\.fused"):
        tiny(f"model.fused={text}")


def test_where_no_compiler_is(monkeypatch):
    """`on` says what is missing; `auto` computes the same without."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CC", "cc-of-nobody")
    monkeypatch.setattr("threed.engine.device.find_spec", lambda name: None)
    for device, missing in (("cpu", r"g\+\+"), ("cuda", "triton")):
        assert not compiles(tiny("model.fused=auto"), torch.device(device))
        assert not compiles(tiny("model.fused=off"), torch.device(device))
        with pytest.raises(InputError, match=f"model.fused=on compiles for a {device}, .*{missing}"):
            compiles(tiny("model.fused=on"), torch.device(device))
    monkeypatch.setattr("threed.engine.device.find_spec", lambda name: object())
    assert not compiles(tiny("model.fused=auto"), torch.device("cuda")), "triton alone cannot compile"
    monkeypatch.setenv("CC", "sh")
    assert compiles(tiny("model.fused=auto"), torch.device("cuda"))
