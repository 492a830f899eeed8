"""The order of context parallelism: each sequence is dealt by its documents (parallel.cp_order=documents). It
changes no number, and all ranks have nearly equal work."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.harness import EXPERTS, assert_contract, assert_parity, batches, loopback, tiny
from tests.loopback.test_axis import train
from tests.loopback.test_context import (
    DOCUMENTS,
    DP,
    DROPOUT,
    LLAMA,
    PIECES,
    PP,
    SMALL,
    SP,
    TP,
    over_ranks,
    plain,
)
from tests.loopback.test_traffic import check
from tests.reference import data_of
from threed.base.errors import ConfigError
from threed.comm.group import Comm
from threed.config.load import checked
from threed.config.validate import validate
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.layout_search.layout import Layout, config_of
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.spec.deal import CHUNKS, Deal, balanced, by_documents, work, zigzag
from threed.tensor import keys
from threed.tensor.context import Batch
from threed.tensor.documents import Documents
from threed.tensor.places import Places, in_order, taken

ORDER = [*DOCUMENTS, "parallel.cp_order=documents", "model.seq_len=32", "train.micro_batch_size=2",
         "train.global_batch_size=8"]
CELLS = {
    "alone": [], "llama": [*DP, *LLAMA], "learned": [*TP, *SP, "model.position=learned"],
    "pp": ["parallel.pp=3", "model.layers=4", *LLAMA], "zb-v": [*PP, *TP, *SP, "parallel.schedule=zb-v"],
    "full": [*PP, "activation.policy=full", *LLAMA], "pieces": [*PIECES, *PP, "parallel.schedule=zb-h1"],
    "offload": ["offload.optimizer=cpu"], "bf16": ["precision.dtype=bf16", *TP, *LLAMA],
    "masked": ["data.loss_mask=chat"], "experts": [*EXPERTS, "parallel.ep=2", *PP, "train.seed=5"],
    "evaluates": ["train.eval_every=1", "data.validation_fraction=0.1"],
}
# The reference knows no dropout with documents, and no numbers of whole sequences: these are compared with
# one rank.
OF_ONE = {
    "dropout": [*DROPOUT, *TP, *SP], "fused": ["model.dropout=0.2", "model.fused=auto", *TP, *SP],
    "dropout-llama": [*DROPOUT, *LLAMA, *PIECES, *DP],
    "capacity": [*EXPERTS, "model.moe_capacity=0.75", *TP, *SP],
    "capacity-ep": [*EXPERTS, "model.moe_capacity=1.0", "parallel.ep=2", "zero.stage=3"],
    "sequence": [*EXPERTS, "model.balance=sequence", "optimizer.balance_rate=0.0", *TP, *SP],
    "balanced": [*EXPERTS, "model.moe_route=balanced", *PP],
}


def in_the_order(size: int, *overrides: str) -> Config:
    return tiny(*SMALL, f"parallel.cp={size}", *ORDER, *overrides)


@pytest.mark.parametrize("size, stage", [(2, 1), (2, 3), (4, 0), (4, 2)])
@pytest.mark.parametrize("cell", CELLS)
def test_contract(cell, size, stage, references):
    assert_contract(in_the_order(size, *CELLS[cell], f"zero.stage={stage}"), references)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cell", OF_ONE)
def test_numbers_of_one_rank(cell, size):
    """Counters of dropout, capacity and penalties are of whole sequences, whose tokens each rank has from
    other places."""
    alone = [text for text in OF_ONE[cell] if text.startswith(("model.", "optimizer.", "train."))]
    one = tiny(*SMALL, *ORDER, *alone, "parallel.cp_order=zigzag")
    assert_parity(loopback(in_the_order(size, *OF_ONE[cell]), 3), loopback(one, 3))


def test_losses_are_those_of_zigzag():
    """The cells above say nothing unless documents are dealt otherwise."""
    config = in_the_order(4, *LLAMA)
    positions_GS = data_of(config, 0).positions_GS
    assert positions_GS is not None
    every = Documents.of(positions_GS).ends
    assert sum(by_documents(ends, 4) != zigzag(32, 4) for ends in every) > 4
    usual = replace(config, parallel=replace(config.parallel, cp_order="zigzag"))
    one, other = loopback(config, 4), loopback(usual, 4)
    assert one.losses == pytest.approx(other.losses, rel=1e-6) and one.sent == other.sent


@pytest.mark.parametrize("size", [2, 4])
def test_counted_is_predicted(size):
    check(in_the_order(size, *TP, *SP, *PP))
    check(in_the_order(size, *DROPOUT, *LLAMA, *PIECES))


def test_checkpoints(tmp_path, references):
    """The order is none of the weights': a run goes on in another."""
    path, want = "auto", references(in_the_order(2, "parallel.cp=1", "parallel.cp_order=zigzag"), 6).losses
    for number, chosen in enumerate((["parallel.cp=2"], ["parallel.cp=4", *PP],
                                     ["parallel.cp=4", "parallel.cp_order=zigzag"])):
        config = in_the_order(2, *chosen, f"run.dir={tmp_path}", f"train.resume={path}")
        losses, path = train(config, 2)
        assert losses == pytest.approx(want[2 * number:2 * number + 2], rel=1e-5)


# ---------------------------------------------------------------- the deal


def power_law(length: int, least: int, exponent: float, seed: int) -> tuple[int, ...]:
    """Where documents of a sequence end, whose lengths are of a power law."""
    drawn, ends = random.Random(seed), list[int]()
    while not ends or ends[-1] < length:
        size = int(least * drawn.paretovariate(exponent))
        ends.append(min(length, (ends[-1] if ends else 0) + max(1, size)))
    return tuple(ends)


def some_ends(seed: int, length: int) -> tuple[int, ...]:
    """Documents of any lengths: of a power law, all equal, one long one first or last, of one token."""
    drawn = random.Random(seed)
    at = drawn.randrange(1, length)
    cut = sorted({*drawn.sample(range(1, length), drawn.randrange(1, min(length, 40))), length})
    return [power_law(length, drawn.choice((1, 5, 40)), drawn.choice((0.7, 1.0, 1.5)), seed),
            (*tuple(range(at, length, at)), length), (at, length), tuple(cut),
            (*tuple(range(1, at)), length)][seed % 5]


def test_every_deal_is_sound():
    """Equal token counts, every token once, never worse than zig-zag, and the same when it is dealt again."""
    for seed in range(400):
        count = (1, 2, 3, 4, 8)[seed % 5]
        length = CHUNKS[0] * count * (1, 3, 8, 32)[seed % 4]
        ends = some_ends(seed // 5, length)
        deal, usual = by_documents(ends, count), zigzag(length, count)
        assert sorted(place for runs in deal for run in runs for place in run) == [*range(length)]
        assert {sum(map(len, runs)) for runs in deal} == {length // count}
        assert all(one.stop <= other.start for runs in deal for one, other in pairwise(runs))
        assert max(work(deal, ends)) <= max(work(usual, ends))
        assert deal == usual or max(work(deal, ends)) < max(work(usual, ends))
        by_documents.cache_clear()
        assert by_documents(ends, count) == deal


@pytest.mark.parametrize("ends", [(64,), (3, 4, 21, 64), (1, 2, 3, 64), tuple(range(1, 65))])
def test_work_is_pairs(ends):
    """Of a query and a key of its document up to it, counted one by one."""
    starts = [max([0, *(end for end in ends if end <= place)]) for place in range(64)]
    for deal in (by_documents(ends, 4), zigzag(64, 4)):
        counted = [sum(place - starts[place] + 1 for run in runs for place in run) for runs in deal]
        assert work(deal, ends) == counted


def test_one_document_is_in_zigzag_order():
    assert by_documents((64,), 4) == zigzag(64, 4)
    assert len({*work(zigzag(64, 4), (64,))}) == 1


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("exponent", [0.8, 1.2, 1.5])
def test_power_laws_are_balanced(exponent, count):
    """The busiest rank has at most 1.05 of the mean."""
    for seed in range(30):
        assert balanced(by_documents(ends := power_law(2**17, 200, exponent, seed), count), ends)


# ---------------------------------------------------------------- attention

ENDS = (3, 4, 21, 64), (64,)  # documents shorter than a chunk, and over several; one alone


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_attention_is_that_of_one_rank(size, kv_heads):
    torch.manual_seed(0)
    parts = [torch.randn(2, heads, 64, 8) for heads in (4, kv_heads, kv_heads, 4)]
    documents = Documents(torch.empty(0), ENDS)
    deals = tuple(by_documents(ends, size) for ends in ENDS)
    assert deals[1] == zigzag(64, size) != deals[0]
    got = attended(deals, parts, documents)
    for one, other in zip(got, plain(parts, documents), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-6)


def attended(deals: tuple[Deal, ...], parts: list[torch.Tensor], documents: Documents) -> list[torch.Tensor]:
    """Attention's output, and gradients of queries, keys and values, of all ranks together."""
    size, length = len(deals[0]), parts[0].shape[2]

    def work(group, rank: int) -> tuple[torch.Tensor, ...]:
        places = Places(length, rank, size, own_deals=deals)
        q, k, v, grad = (taken(part, places.own, 2) for part in parts)
        q, k, v = inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        out = keys.attend_to_all(q, k, v, keys.Shared(group, places), documents)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    return [in_order(each, deals, 2) for each in zip(*over_ranks(size, work), strict=True)]


# ---------------------------------------------------------------- a batch


@pytest.mark.parametrize("order", ["zigzag", "documents"])
def test_a_rank_in_the_middle_of_a_pipeline_has_positions_of_its_tokens(order):
    """It sees no tokens, and documents all the same."""
    config = in_the_order(2, *LLAMA, "parallel.pp=3", "model.layers=4", f"parallel.cp_order={order}")

    def work(comm: Comm) -> list[float]:
        engine = Engine(Analysis(make_plan(config)), comm)
        ends = comm.here.position in (0, 2)

        def read(step: int):
            given, none = batches(config, comm, step), torch.empty(0, dtype=torch.int64)

            def batch(microbatch: int) -> Batch:
                whole = given(microbatch)
                return whole if ends else replace(whole, tokens_BS=none, labels_BS=none)

            return batch

        return [engine.train_step(read(step))[0].loss for step in range(2)]

    losses = run_loopback(make_plan(config), make_mesh(config), work)[0]
    assert losses == pytest.approx(loopback(config, 2).losses, rel=1e-6)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("overrides, said", [
    (["parallel.cp_order=documents", *DOCUMENTS],
     "parallel.cp_order=documents with parallel.cp=1: each rank has all tokens of its sequences; leave it "
     "out, or give parallel.cp"),
    (["parallel.cp_order=documents", "parallel.cp=2"],
     "parallel.cp_order=documents with data.document_mask=false: each sequence is one document, in which "
     "all ranks have equal work in zig-zag order; leave it out, or set data.document_mask=true"),
    ([*ORDER, "parallel.cp=2", "parallel.cp_form=heads"],
     "parallel.cp_order=documents with parallel.cp_form=heads: each rank attends to whole sequences, so that "
     "all have equal work; leave it out, or take parallel.cp_form=keys"),
    ([*ORDER, "parallel.cp=4", "model.seq_len=48"],
     "model.seq_len=48 with parallel.cp=4: each rank has 8 equal chunks of a sequence in "
     "parallel.cp_order=documents; take a multiple of 32"),
    ([*ORDER, "parallel.cp=2", "run.cuda_graphs=true"],
     "run.cuda_graphs=true with data.document_mask=true: attention has the shapes of the documents"),
    (["parallel.cp_order=zagzig"], "parallel.cp_order=zagzig"),
])
def test_bad_input(overrides, said):
    with pytest.raises(ConfigError) as error:
        checked(tiny(*SMALL, *overrides))
    assert said in str(error.value)


def test_layouts_without_context_parallelism_have_no_order():
    base = in_the_order(2)
    for size, order in ((1, "zigzag"), (2, "documents")):
        config = config_of(Layout(cp=size, micro_batch_size=2), base)
        assert not validate(config) and config.parallel.cp_order == order
