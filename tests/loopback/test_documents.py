"""Attention inside documents, and losses of which some tokens do not count: under every feature the numbers
are those of documents one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tests import reference
from tests.harness import (
    FP32,
    assert_contract,
    assert_parity,
    cell_config,
    covering,
    each_value,
    loopback,
    same_bits,
    tiny,
)
from tests.reference import Reference, data_of
from threed.comm.process import initialized
from threed.models.layers.base import Out
from threed.spec.parameter import NOT_COUNTED
from threed.tensor import documents as subject
from threed.tensor.context import Batch
from threed.tensor.documents import Documents, attend, outside

MASKS = ["data.document_mask=true", "data.loss_mask=answers"]
SAMPLE = covering()
CORE = each_value(SAMPLE)[:6]


@pytest.mark.parametrize("cell", [
    pytest.param(cell, id=cell.id, marks=[pytest.mark.core] * (cell in CORE)) for cell in SAMPLE])
def test_cell(cell, references):
    """The contract's sample, under both masks, against documents one by one."""
    # Seed: AdamW's first steps of a bias, from zero, take the sign of its gradient. With others, in bf16, a
    # gradient of 1/500 of its tensor's largest turns its sign by rounding.
    assert_contract(cell_config(cell, others=[*MASKS, "train.seed=5"]), references, steps=2)


@pytest.mark.parametrize("others", [
    ["data.document_mask=true"], ["data.loss_mask=answers"],
    [*MASKS, "model.position=learned", "parallel.tp=2", "parallel.sequence_parallel=true"],
    [*MASKS, "model.family=llama", "model.kv_heads=2", "model.fused=auto", "activation.policy=selective",
     "activation.pieces=[attention,norm,mlp_act]"],
    [*MASKS, "model.tile_linears=8KiB", "model.tie_embeddings=false", "model.kv_heads=4", "parallel.tp=2"],
    [*MASKS, "model.tile_linears=8KiB", "model.tie_embeddings=false", "model.kv_heads=4",
     "model.loss_chunk=5"],
    [*MASKS, "model.loss_chunk=5", "parallel.tp=2", "precision.dtype=fp16", "precision.loss_scale=1024"],
    [*MASKS, "train.eval_every=1", "parallel.pp=2", "train.micro_batch_size=2"],
    [*MASKS, "run.verify_every=1", "parallel.dp=2"]], ids=lambda others: "-".join(others[-2:]))
def test_what_no_cell_has(others, references):
    assert_contract(tiny("model.layers=2", *others), references, steps=2)


def test_micro_batches_and_meshes_agree():
    """The divisor is the global batch's count: a mean of micro-batches' means would move with their size. One
    micro-batch has nothing that counts."""
    results = [loopback(tiny("model.layers=2", *MASKS, *others), 2) for others in (
        ["train.micro_batch_size=8"], ["train.micro_batch_size=1"], ["parallel.dp=4"],
        ["train.micro_batch_size=2", "parallel.pp=2", "parallel.tp=2"])]
    for result in results[1:]:
        assert_parity(result, replace_evaluated(results[0]), FP32)


def replace_evaluated(result):
    return replace(result, evaluated=result.evaluated or 0.0)


def test_the_same_bits_under_every_zero_stage():
    for stages in ((0, 1), (2, 3)):  # of which both add gradients in one order
        same_bits([loopback(tiny("model.layers=2", *MASKS, "parallel.dp=2", f"zero.stage={stage}"), 2)
                   for stage in stages])


def logits(model: Reference, batch: Batch) -> torch.Tensor:
    """[B, S, V], of the layers of a reference."""
    seen = []
    context = model.context
    context.cross_entropy = lambda logits, labels: seen.append(logits.clone()) or logits.sum(-1)  # pyright: ignore
    x = None
    for layer in model.layers:
        out = layer(x, batch)
        x = out.x if isinstance(out, Out) else out
    return seen[0].transpose(0, 1)


@pytest.mark.parametrize("others", [
    [], ["model.position=learned"], ["model.family=llama", "model.kv_heads=2"], ["precision.dtype=bf16"],
    ["model.attention_dropout=0.5", "model.dropout=0.1"]], ids=lambda others: others[0] if others else "gpt")
def test_a_document_does_not_see_the_others(others):
    """Document B's logits have the same bits whatever the tokens of document A are, and, alone in a sequence,
    where nothing is dropped, those of B at another place."""
    config = tiny("model.layers=2", *MASKS, *others)
    starts = [0, 5, 11]
    with initialized():
        model = Reference(config)
        tokens = torch.randint(0, 120, (1, 16))
        places = torch.arange(16)
        positions = places - torch.tensor([max(start for start in starts if start <= p) for p in places])
        batch = Batch(tokens, tokens, torch.zeros(1, dtype=torch.int64), 0, torch.tensor(1), True,
                      Documents.of(positions[None]))
        other = tokens.clone()
        other[0, :5] = (tokens[0, :5] + 7) % 120
        with torch.no_grad():
            one, two = (logits(model, replace(batch, tokens_BS=each)) for each in (tokens, other))
            assert torch.equal(one[:, 5:], two[:, 5:]) and not torch.equal(one[:, :5], two[:, :5])
            if config.model.dropout:
                return
            moved = torch.cat([tokens[:, 5:11], tokens[:, :5], tokens[:, 11:]], 1)  # B first
            places = torch.cat([positions[5:11], positions[:5], positions[11:]])[None]
            three = logits(model, replace(batch, tokens_BS=moved, documents=Documents.of(places)))
        torch.testing.assert_close(three[:, :6], one[:, 5:11], rtol=1e-5, atol=1e-5)


def test_without_the_mask_a_document_is_seen():
    """The comparison above: restarting positions alone leaks."""
    config = tiny("model.layers=2")
    with initialized():
        model = Reference(config)
        tokens = torch.randint(0, 120, (1, 16))
        batch = Batch(tokens, tokens, torch.zeros(1, dtype=torch.int64), 0, 16)
        other = tokens.clone()
        other[0, :5] = (tokens[0, :5] + 7) % 120
        with torch.no_grad():
            one, two = (logits(model, replace(batch, tokens_BS=each)) for each in (tokens, other))
    assert not torch.equal(one[:, 5:], two[:, 5:])


def test_the_loss_is_torchs():
    """Of torch's own cross entropy, which leaves labels out by itself."""
    config = tiny("model.layers=2", *MASKS)
    data = data_of(config, 0)
    assert data.positions_GS is not None
    with initialized():
        model = Reference(config)
        batch = Batch(data.tokens_GS, data.labels_GS, torch.arange(8), 0, torch.tensor(data.count), True,
                      Documents.of(data.positions_GS))
        loss = model.loss(batch)
        everything = logits(model, batch)
    want = F.cross_entropy(everything[..., :120].flatten(0, 1), data.labels_GS.flatten(),
                           ignore_index=NOT_COUNTED)
    torch.testing.assert_close(loss, want)


def parts(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, count, 8, 6, dtype=dtype, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)]


DOCUMENTS = Documents.of(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]]))


@pytest.fixture(autouse=True)
def asked_anew():
    """How torch's kernel for documents is called."""
    subject.varlen_call.cache_clear()
    yield
    subject.varlen_call.cache_clear()


def of_2_13(q, k, v, starts, starts_k, longest, longest_k, *, window_size=(-1, -1), enable_gqa=False):
    """What torch's page says of varlen_attn."""
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return stand_in(q, k, v, starts, starts_k, longest, longest_k, window_size == (-1, 0))


def of_2_11(q, k, v, starts, starts_k, longest, longest_k, *, window_size=(-1, -1)):
    return stand_in(q, k, v, starts, starts_k, longest, longest_k, window_size == (-1, 0))


def of_2_10(q, k, v, starts, starts_k, longest, longest_k, is_causal=False):
    return stand_in(q, k, v, starts, starts_k, longest, longest_k, is_causal)


def stand_in(q, k, v, starts, starts_k, longest, longest_k, causal):
    edges = starts.tolist()
    runs, repeats = list(pairwise(edges)), q.shape[1] > k.shape[1]
    assert starts.dtype == torch.int32 and starts is starts_k
    assert edges[0] == 0 and edges[-1] == len(q) and longest == longest_k == max(b - a for a, b in runs)
    return torch.cat([F.scaled_dot_product_attention(
        *(each[a:b].transpose(0, 1)[None] for each in (q, k, v)), is_causal=causal,
        enable_gqa=repeats)[0].transpose(0, 1) for a, b in runs])


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kernel", [None, of_2_13, of_2_11, of_2_10])
def test_attention_is_that_of_a_mask(kv_heads, kernel, monkeypatch):
    """torch's kernel for documents needs a GPU: here its arguments are checked against a stand-in, of each
    version that has other ones."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    q, k, v = parts(4, kv_heads)
    out = attend(q, k, v, DOCUMENTS, varlen=kernel is not None)
    mask = ~outside(DOCUMENTS.positions_BS, torch.arange(8), 8) & torch.ones(8, 8, dtype=torch.bool).tril()
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, want)
    for mine, theirs in zip(torch.autograd.grad(out, (q, k, v), grad),
                            torch.autograd.grad(want, (q, k, v), grad), strict=True):
        torch.testing.assert_close(mine, theirs)


def careless(q, k, v, *starts, **others):
    """Attends to what comes later, too, whatever it is told."""
    return stand_in(q, k, v, *starts, causal=False)


def without_gradients(*arguments, **others):
    return of_2_13(*arguments, **others).detach() + 0 * arguments[0]


@pytest.mark.parametrize("kernel", [careless, without_gradients])
def test_a_kernel_that_computes_something_else_is_not_used(kernel, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    assert subject.varlen_call(torch.device("cpu"), torch.bfloat16, 8, False) is None


def test_what_a_cpu_has():
    for repeats in (False, True):
        assert subject.varlen_call(torch.device("cpu"), torch.bfloat16, 8, repeats) is None


def test_one_document_a_sequence_is_plain_attention(monkeypatch):
    monkeypatch.setattr(subject._Attend, "apply", None)
    q, k, v = parts(4, 4, torch.float32)
    documents = Documents.of(torch.arange(8).repeat(2, 1))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert documents.whole and torch.equal(attend(q, k, v, documents, False), want)


def test_the_reference_sees_documents_one_by_one():
    """It would not notice a leak that it has itself."""
    config = tiny("model.layers=2", "data.document_mask=true")
    lengths = []
    with initialized():
        model = Reference(config)
        right = model.parts
        model.parts = lambda batch: lengths.append(batch.tokens_BS.shape) or right(batch)
        list(model.losses(0))
    data = reference.data_of(config, 0)
    assert data.positions_GS is not None
    assert len(lengths) == int((data.positions_GS == 0).sum()) and all(size == 1 for size, _ in lengths)
    assert sum(length for _, length in lengths) == data.tokens_GS.numel()
