"""model.loss_chunk: the same losses and gradients, without a copy of the logits in fp32."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import assert_contract, cell_config, covering, dense, loopback, same_bits, tiny
from threed.base.errors import ConfigError
from threed.base.mesh import Mesh
from threed.engine.loopback import ThreadGroup, World
from threed.planner import analyse
from threed.program.summary import stages
from threed.tensor import fused_loss, softmax
from threed.tensor.fused_loss import Chunks
from threed.tensor.layers import vocab_parallel_cross_entropy
from threed.tensor.softmax import cross_entropy_of

S, B, V, VOCAB = 7, 3, 16, 13  # three ids are padding
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def alone() -> ThreadGroup:
    return ThreadGroup("tp", (0,), 0, Counter(), World(Mesh()))


def cross_entropy_in_chunks(logits: torch.Tensor, labels: torch.Tensor, vocab: int, chunks: Chunks,
                            group: ThreadGroup) -> torch.Tensor:
    return fused_loss.cross_entropy(logits, labels, vocab, group, chunks)


def add_to_softmax(before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                   vocab: int, chunks: Chunks | None) -> torch.Tensor:
    given = before, logits, labels, first, vocab
    return softmax.add_to_softmax(*given) if chunks is None else fused_loss.add_to_softmax(*given, chunks)


def drawn(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, labels, and the gradient of each token's loss."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(S, B, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (S, B), generator=generator)
    return logits.to(dtype), labels, torch.rand(S, B, generator=generator)


CHUNKS = [Chunks(1, False), Chunks(4, False), Chunks(S * B, False), Chunks(1000, False), Chunks(4)]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits(dtype, chunks):
    logits, labels, of_loss = drawn(dtype)
    results = []
    for compute in (lambda x: vocab_parallel_cross_entropy(x, labels, VOCAB, alone()),
                    lambda x: cross_entropy_in_chunks(x, labels, VOCAB, chunks, alone())):
        leaf = logits.clone().requires_grad_()
        loss = compute(leaf * 1)  # which it overwrites
        loss.backward(of_loss)
        results.append((loss.detach(), leaf.grad))
    (loss, grad), (chunked, chunked_grad) = results
    assert torch.equal(loss, chunked) and torch.equal(grad, chunked_grad)
    assert grad.dtype == dtype and not grad[..., VOCAB:].any()


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_have_the_same_bits(dtype, chunks):
    """Tiles of 8, 8 and 4 ids, the last of padding alone."""
    logits, labels, of_loss = drawn(dtype)
    logits = torch.cat([logits, logits[..., :4]], -1)
    results = []
    for size in (None, chunks):
        leaf = logits.clone().requires_grad_()
        running = None
        for first, tile in zip((0, 8, 16), (leaf * 1).split((8, 8, 4), -1), strict=True):
            running = add_to_softmax(running, tile.clone(), labels, first, VOCAB, size)
        assert running is not None
        loss = cross_entropy_of(running, alone())
        loss.backward(of_loss)
        results.append((loss.detach(), leaf.grad))
    (loss, grad), (chunked, chunked_grad) = results
    assert torch.equal(loss, chunked) and torch.equal(grad, chunked_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", [False, True])
def test_logits_of_another_layout_which_others_read(tiles, dtype):
    """A family may make logits [B, S, V] and turn them, and add a loss of its own to them."""
    logits, labels, of_loss = drawn(dtype)
    results = []
    for chunk in (None, Chunks(4, in_place=False)):
        leaf = logits.transpose(0, 1).contiguous().requires_grad_()
        turned = (leaf * 1).transpose(0, 1)
        # Without chunks fp32 logits are overwritten: there it gets a copy.
        given, other = turned.clone() if chunk is None else turned, turned.float().logsumexp(-1)
        if tiles:
            loss = cross_entropy_of(add_to_softmax(None, given, labels, 0, VOCAB, chunk), alone())
        elif chunk is None:
            loss = vocab_parallel_cross_entropy(given, labels, VOCAB, alone())
        else:
            loss = cross_entropy_in_chunks(given, labels, VOCAB, chunk, alone())
        (loss + 0.1 * other).backward(of_loss)
        results.append((loss.detach(), leaf.grad))
    for want, value in zip(*results, strict=True):  # another layout, another order of a sum
        torch.testing.assert_close(value, want)


@pytest.mark.parametrize("tiles", [False, True])
def test_equal_to_torch_in_fp64(tiles):
    """(torch.autograd.gradcheck runs a graph's backward twice; this one overwrites what it read.)"""
    logits, labels, of_loss = drawn(torch.float64)
    results, chunks = [], Chunks(4, in_place=False)
    for compute in (
            lambda x: cross_entropy(x[..., :VOCAB].permute(0, 2, 1), labels, reduction="none"),
            lambda x: cross_entropy_of(add_to_softmax(None, x * 1, labels, 0, VOCAB, chunks), alone())
            if tiles else cross_entropy_in_chunks(x * 1, labels, VOCAB, chunks, alone())):
        leaf = logits.clone().requires_grad_()
        loss = compute(leaf)
        loss.backward(of_loss.double())
        results.append((loss.detach(), leaf.grad))
    for want, value in zip(*results, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)


class Widest(TorchDispatchMode):
    """Notes the most elements of an fp32 tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.numel = max(self.numel, out.numel())
        return out


def test_never_all_logits_in_fp32():
    """In forward and backward, what is in fp32 is a chunk; else it is all."""
    logits, labels, of_loss = drawn(torch.bfloat16)
    wide = {}
    for chunk in (None, Chunks(4, in_place=False)):
        with Widest() as widest:
            leaf = logits.clone().requires_grad_()
            add_to_softmax(None, leaf * 1, labels, 0, VOCAB, chunk)[0].backward(of_loss)
        wide[chunk] = widest.numel
    assert wide == {None: S * B * V, Chunks(4, in_place=False): 4 * V}
    with Widest() as widest:
        leaf = logits.clone().requires_grad_()
        cross_entropy_in_chunks(leaf * 1, labels, VOCAB, Chunks(4, in_place=False), alone()).backward(of_loss)
    assert widest.numel == 4 * V


@pytest.mark.parametrize("chunk", ["0", "-4", "1.5", "all"])
def test_what_is_no_chunk(chunk):
    with pytest.raises(ConfigError, match=r"model\.loss_chunk"):
        tiny(f"model.loss_chunk={chunk}")


def test_the_plan_knows():
    """What is kept of the logits has two bytes a number instead of four; 7 bytes more a token."""
    peaks = []
    for others in ([], ["model.loss_chunk=8"]):
        config = tiny("precision.dtype=bf16", "model.vocab=1000", "model.fused=off", *others)
        peaks.append(max(row.activation_peak_bytes for row in stages(analyse(config))))
    tokens = config.model.seq_len
    assert peaks[0] - peaks[1] == tokens * (2 * config.model.padded_vocab - 7)


@pytest.mark.parametrize("others", [
    [], ["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"],
    ["model.tile_linears=8KiB", "model.tie_embeddings=false"]])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_runs_have_the_same_bits(dtype, others):
    scale = ["precision.loss_scale=1024"] if dtype == "fp16" else []
    always = ["train.global_batch_size=4", f"precision.dtype={dtype}", *scale, *others]
    same_bits([loopback(tiny(*always, *chunk), 3) for chunk in (
        ["model.fused=off"], ["model.fused=off", "model.loss_chunk=5"], ["model.fused=auto"])])


@pytest.mark.parametrize("cell", dense(covering()), ids=lambda cell: cell.id)
def test_contract(cell, references):
    """The contract's sample. (Experts change nothing of the loss.)"""
    config = cell_config(cell, 8)
    config.model.loss_chunk, config.model.fused = 3, "off"
    assert_contract(config, references, steps=2)
