"""model.fused: the same numbers from pieces that keep less."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness import assert_contract, cell_config, covering, loopback, same_bits, tiny
from tests.loopback import interpreted
from threed.base.errors import ConfigError, InputError, RunError
from threed.devices import device_of
from threed.engine import compiler
from threed.engine.compiler import lacks, uncompiled
from threed.engine.device import compiles
from threed.planner import analyse
from threed.program.summary import stages
from threed.tensor import fused
from threed.tensor.alive import Alive
from threed.tensor.fused import Fused
from threed.tensor.fused_loss import Chunks
from threed.tensor.pieces import Separate
from threed.tensor.random import keep_mask

S, B, D = 6, 2, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEY, SAMPLES = (3, "here"), torch.tensor([5, 6])
FIRST = 3
ROWS = ((range(FIRST, FIRST + S),),)
COUNTERS = torch.arange(FIRST * D, (FIRST + S) * D).view(1, S, D)
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
    "drop": (drop, lambda fused, x: fused.drop(x, 0.25, KEY, SAMPLES, ROWS)),
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
        y = Fused().drop(x, 0.25, KEY, SAMPLES, ROWS)
        gc.collect()
        assert alive.bytes() == y.nbytes


SUMS = ("gelu", "gelu_backward", "joined", "ended", "ended_backward", "add_rows")
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
    for text in ("off", "auto"):
        config = tiny("precision.dtype=bf16", "parallel.tp=2", *LLAMA, f"model.fused={text}")
        peaks.append(max(row.activation_peak_bytes for row in stages(analyse(config))))
    model = config.model
    masks = (1 + 2 * model.layers) * model.hidden
    logits = 2 * model.padded_vocab // 2 - 7  # in 16 bits, not 32; and 7 bytes more a token
    gates = 2 * model.num_ffn_hidden * model.layers // 2
    assert peaks[0] - peaks[1] == model.seq_len * (gates + masks + logits)


@pytest.mark.parametrize("cell", covering(), ids=lambda cell: cell.id)
def test_contract(cell, references):
    """The contract's sample, with a model that has all pieces."""
    config = cell_config(cell, 8, ["model.fused=auto", "model.activation=swiglu", "model.norm=rmsnorm",
                                   "model.dropout=0.1", "model.ffn_hidden=32"])
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


@pytest.fixture
def asked():
    """The machine is asked anew, and again after the test."""
    lacks.cache_clear()
    fused._compiled.cache_clear()
    yield
    fused._compiled.cache_clear()
    lacks.cache_clear()


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("device", "variables", "triton", "header", "missing"), [
    ("cuda", {}, None, "Python.h", "the package triton is missing"),
    ("cuda", {"CC": "cc-of-nobody"}, True, "Python.h", r"cc-of-nobody \(which CC names\) is missing"),
    ("cuda", {"PATH": "/nowhere"}, True, "Python.h", "gcc or clang is missing"),
    ("cuda", {"CC": "sh"}, True, None, r".*/Python\.h is missing \(package python3-dev"),
    ("cuda", {"CC": "sh"}, True, "Python.h", "a small piece was not compiled: .*CUDA"),  # which is not here
    ("cpu", {"CXX": "of-nobody"}, None, "Python.h", r"of-nobody \(which CXX names\) is missing"),
], ids=["triton", "CC", "PATH", "Python.h", "what else", "CXX"])
def test_what_a_compiler_lacks(device, variables, triton, header, missing, monkeypatch, tmp_path):
    """`on` says what is missing; `auto` computes the same without, and its log says why."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if header:
        (tmp_path / header).touch()
    monkeypatch.setattr(compiler, "find_spec", lambda name: triton)
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(torch, "compile", no_compiler)  # no kernel of an earlier run takes its place
    here, auto = torch.device(device), tiny("model.fused=auto")
    assert not compiles(auto, here) and not compiles(tiny("model.fused=off"), here)
    with pytest.raises(InputError, match=f"model.fused=on cannot compile for a {device} here: {missing}"):
        compiles(tiny("model.fused=on"), here)
    said = uncompiled(auto, here)
    assert [bool(re.search(missing, line)) for line in said] == ([True] if device == "cuda" else [])
    assert not uncompiled(tiny("model.fused=off"), here)


@pytest.mark.usefixtures("asked")
def test_compiles_in_its_own_process(monkeypatch):
    """Else each rank starts a pool of up to 32 processes. Who asks for them gets them."""
    from torch._inductor import config as inductor

    monkeypatch.setattr(compiler, "find_spec", lambda name: True)
    monkeypatch.setattr(torch, "compile", no_compiler)
    for wanted in (None, "7"):
        monkeypatch.setattr(inductor, "compile_threads", 9)
        monkeypatch.delenv(compiler.THREADS, raising=False)
        if wanted:
            monkeypatch.setenv(compiler.THREADS, wanted)
        lacks.cache_clear()
        lacks(torch.device("cuda"))
        assert (os.environ[compiler.THREADS], inductor.compile_threads) == (("7", 9) if wanted else ("1", 1))


def no_compiler(*_: object, **__: object) -> Any:
    def fails(*_: object) -> None:
        raise RuntimeError("backend='inductor' raised:\nCppCompileError: C++ compile error\n\nOutput:\n"
                           "main.cpp:1: fatal error: Python.h: No such file or directory")

    return fails


@pytest.fixture
def broken(monkeypatch):
    """A compiler that fails when it is used."""
    fused._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", no_compiler)
    yield
    fused._compiled.cache_clear()


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("name", PIECES)
def test_falls_back_at_the_first_call(name, capsys):
    """To the plain piece's bits in both directions, with one warning; `on` asks for an error."""
    pieces = Fused(compile=True, falls_back=True)
    assert pieces.compile
    for _ in range(2):
        for want, value in zip(results(lambda x: PIECES[name][1](Fused(), x), torch.bfloat16),
                               results(lambda x: PIECES[name][1](pieces, x), torch.bfloat16), strict=True):
            assert torch.equal(want, value)
    assert not pieces.compile
    said = capsys.readouterr().err
    assert said.count("warning: model.fused=auto: a piece of the model was not compiled") == 1, said
    assert "fatal error: Python.h: No such file" in said
    with pytest.raises(RuntimeError, match="C\\+\\+ compile error"):
        PIECES[name][1](Fused(compile=True), drawn(torch.bfloat16)[0])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RunError("stop")], ids=str)
def test_does_not_fall_back_for_what_is_no_compilers(error, monkeypatch):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(fused, "_compiled", lambda body: fails)
    pieces = Fused(compile=True, falls_back=True)
    with pytest.raises(type(error)):
        pieces.swiglu(drawn(torch.float32)[0])
    assert pieces.compile
    monkeypatch.setattr(fused, "_compiled", lambda body: no_compiler())
    with pytest.raises(RuntimeError, match="size"):  # the plain piece fails as well: the input is wrong
        pieces.rotate(drawn(torch.float32)[0], torch.ones(3), torch.ones(3))
    assert pieces.compile


@pytest.mark.parametrize(("sizes", "vocab", "tp", "tiles"), [
    ((7, 3, 16), 13, 1, 1), ((1, 1, 1), 1, 1, 1), ((600, 1, 40), 40, 1, 1), ((5, 2, 48), 11, 4, 1),
    ((5, 2, 48), 20, 2, 3), ((5, 2, 48), 48, 1, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_falls_back(dtype, sizes, vocab, tp, tiles, monkeypatch):
    """What takes the place of its kernels has their numbers: more tokens than a chunk, a rank or a tile that
    is all padding."""
    monkeypatch.setattr(interpreted, "Interpreted", Chunks())
    interpreted.compare(sizes, vocab, dtype, tp, tiles)


@pytest.mark.usefixtures("broken")
def test_the_losss_kernels_may_fail(monkeypatch, capsys):
    """In forward, or in backward behind a forward that was theirs."""
    works = types.SimpleNamespace(statistics=Chunks().statistics, gradient=no_compiler())
    for kernels in (works, None):
        monkeypatch.setattr(fused, "_triton", lambda kernels=kernels: kernels or no_compiler()())
        pieces = Fused(compile=True, falls_back=True)
        assert pieces.kernels(torch.device("cpu")) is None
        chosen = pieces.kernels(torch.device("cuda"))
        assert chosen is not None
        monkeypatch.setattr(interpreted, "Interpreted", chosen)
        interpreted.compare((5, 2, 48), 40, torch.bfloat16, 2)
        assert pieces.kernels(torch.device("cuda")) is None
        assert capsys.readouterr().err.count("was not compiled on this rank") == 1
    with pytest.raises(RuntimeError, match="C\\+\\+ compile error"):
        Fused(compile=True).kernels(torch.device("cuda"))


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("fails_in", SUMS)
def test_kernels_of_sums_may_fail(fails_in, monkeypatch, capsys):
    """In forward, or in backward behind a forward that was theirs: with one warning, and to the bits of
    separate operations where none has run before."""
    works = {name: getattr(Separate, name) for name in SUMS}
    monkeypatch.setattr(fused, "_kernels",
                        lambda: types.SimpleNamespace(**{**works, fails_in: no_compiler()}))
    monkeypatch.setattr(type(device_of(torch.device("cpu"))), "triton", True)
    monkeypatch.setattr("threed.engine.engine.compiles", lambda config, _: config.model.fuses)
    monkeypatch.setattr(Fused, "kernels", lambda *_: None)
    config = ["model.dropout=0.1", "precision.dtype=bf16", "model.position=learned"]
    ranks = [loopback(tiny(*config, f"model.fused={text}"), 2) for text in ("auto", "off")]
    assert ranks[0].losses == pytest.approx(ranks[1].losses, rel=1e-3)
    assert capsys.readouterr().err.count("was not compiled on this rank") == 1


@pytest.mark.usefixtures("broken")
def test_a_run_falls_back(monkeypatch, capsys):
    monkeypatch.setattr("threed.engine.engine.compiles", lambda config, _: config.model.fuses)
    configs = [tiny("parallel.tp=2", *LLAMA, f"model.fused={text}") for text in ("auto", "off")]
    same_bits([loopback(config, 2) for config in configs])
    assert capsys.readouterr().err.count("was not compiled on this rank") == 2  # ranks
