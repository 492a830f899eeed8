"""Context parallelism: ranks of cp share each sequence (parallel.cp), in both forms (parallel.cp_form). It
changes no number."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness import EXPERTS, assert_contract, batches, loopback, tiny
from tests.loopback.test_axis import train
from tests.loopback.test_measure import known_difference, shown
from tests.loopback.test_traffic import check
from threed.base.errors import ConfigError, ThreedError
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.config.load import checked
from threed.config.validate import warnings
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.models.layers.base import Layer
from threed.models.measure import Measured
from threed.models.tiling import layers_of, share_of
from threed.planner import analyse, make_mesh, make_plan
from threed.planner.auto import chosen_for, decided
from threed.prediction.analytic import cost
from threed.prediction.hardware import GroupPlace
from threed.prediction.hardware import load as load_hardware
from threed.prediction.prices import Travel
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op
from threed.program.summary import stages
from threed.schema import Config
from threed.spec.kernels import Product
from threed.spec.parameter import NOT_COUNTED, Cost, Saved, Traffic
from threed.tensor import keys as subject
from threed.tensor.context import Batch
from threed.tensor.documents import Documents, attend
from threed.tensor.heads import to_heads, to_tokens
from threed.tensor.places import Places, in_order, numbers, taken
from threed.tensor.rectangles import HOST, SEPARATE, lower_right

SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=16", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=6"]
PP, DP, TP, SP = ["parallel.pp=2"], ["parallel.dp=2"], ["parallel.tp=2"], ["parallel.sequence_parallel=true"]
LLAMA = ["model.family=llama", "model.kv_heads=2", "model.qk_norm=true"]
DROPOUT = ["model.dropout=0.2", "model.attention_dropout=0.2"]
DOCUMENTS = ["data.document_mask=true"]
PIECES = ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]"]
KEPT = ["activation.policy=selective", "activation.pieces=[keys]"]
BOTH = "activation.pieces=[keys,attention]"
BUDGET = ["activation.policy=budget"]
CELLS = {
    "alone": [], "dp": DP, "tp": TP, "sp": [*TP, *SP], "llama": LLAMA, "learned": ["model.position=learned"],
    "pp-tp": [*PP, *TP, "model.tie_embeddings=true"], "zb-h1": [*PP, *DP, "parallel.schedule=zb-h1"],
    "zb-v": [*PP, *TP, *SP, "parallel.schedule=zb-v"], "full": [*PP, "activation.policy=full", *LLAMA],
    "partition": [*TP, "activation.policy=full", "activation.partition=true"],
    "pieces": [*PIECES, *PP, "parallel.schedule=zb-h1"], "offload": [*DP, "offload.optimizer=cpu"],
    "keys": [*KEPT, *PP, "parallel.schedule=zb-h1"], "keys-again": [*PIECES[:1], BOTH, *LLAMA, *TP],
    "host": ["activation.policy=full", "activation.offload=cpu"],
    "budget": [*BUDGET, "activation.budget=1GiB", *PP],
    "bf16": ["precision.dtype=bf16", *LLAMA], "bf16-sp": ["precision.dtype=bf16", *TP, *SP, *PP],
    "dropout": [*DROPOUT, *TP, *SP], "dropout-fused": ["model.dropout=0.2", "model.fused=auto", *TP, *SP],
    "dropout-llama": [*DROPOUT, *LLAMA, *PIECES], "masked": ["data.loss_mask=chat", *DP],
    "documents": [*DOCUMENTS, *LLAMA], "documents-sp": [*DOCUMENTS, "model.position=learned", *TP, *SP],
    "tiles": ["model.tile_linears=1KiB", "model.tie_embeddings=false", *TP, *SP],
    "lora": ["model.lora_rank=2", *LLAMA], "fused": ["model.fused=auto", "model.loss_chunk=3", *LLAMA],
    "evaluates": ["train.eval_every=1", "data.validation_fraction=0.1", *PP, *DROPOUT],
    "order": [*TP, *DP, "parallel.axis_order=pp-cp-dp-tp"],
}


FORMS = ["keys", "heads"]
MANY = ["model.heads=8", "model.hidden=32"]  # heads for each rank of cp and tp
# Cells in which a tp rank has fewer, or tiles have
MORE = {"tiles": ["model.tile_linears=4KiB", "model.heads=16"], "keys-again": ["model.kv_heads=8"]}


def with_cp(size: int, *overrides: str, form: str = "keys") -> Config:
    if form == "heads":
        more = ("model.kv_heads=4" if each == "model.kv_heads=2" else each for each in overrides)
        overrides = (*MANY, *more, f"parallel.cp_form={form if size > 1 else 'keys'}")
    return tiny(*SMALL, f"parallel.cp={size}", *overrides)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size, stage", [(2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 3)])
@pytest.mark.parametrize("cell", CELLS)
def test_contract(cell, size, stage, form, references):
    chosen = [*CELLS[cell], *(MORE.get(cell, []) if form == "heads" else [])]
    assert_contract(with_cp(size, *chosen, f"zero.stage={stage}", form=form), references)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cell", [[], ["parallel.ep=2", *PP], [*TP, *SP, "parallel.ep=4", "zero.stage=3"],
                                  ["model.moe_capacity=0.75", *TP, *SP],
                                  ["model.moe_capacity=1.0", "parallel.ep=2"],
                                  ["model.balance=sequence", *TP, *SP],
                                  ["precision.dtype=bf16", "parallel.ep=2"]])
def test_experts(cell, size, form, references):
    """Capacity, penalties and counts are of whole sequences. (Another seed chooses between scores that are
    not nearly equal.)"""
    balance = ["optimizer.balance_rate=0.0"] if "model.balance=sequence" in cell else []
    assert_contract(with_cp(size, *EXPERTS, *cell, *balance, "train.seed=5", form=form), references)


@pytest.mark.parametrize("cell", [[], [*PP, *TP, "parallel.schedule=zb-v"], DOCUMENTS, DROPOUT])
def test_forms_agree(cell):
    both = [loopback(with_cp(2, *MANY, *cell, f"parallel.cp_form={form}"), 3) for form in FORMS]
    one, other = ([*each.losses, *each.norms] for each in both)
    assert one == pytest.approx(other, rel=1e-6)


# ---------------------------------------------------------------- places


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_token_has_one_rank(count, parts):
    whole = [Places(16, index, count, part, parts) for index in range(count) for part in range(parts)]
    places = [place for each in whole for runs in each.runs for run in runs for place in run]
    assert sorted(places) == list(range(16)) and {each.size for each in whole} == {16 // count // parts}
    for each in whole:
        (own,), (runs,) = numbers(each.own, torch.device("cpu")).tolist(), each.runs
        assert own[each.stream] == [place for run in runs for place in run]
        assert [each.local(place) for place in own] == list(range(len(own)))
        assert each.local(next(iter({*range(16)} - {*own}), 16)) is None


@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_rank_has_the_same_work(count):
    """Pairs of a query and a key up to its chunk's end."""
    work = [sum((block.queries.stop - block.queries.start) * block.keys.stop
                for block in subject._blocks(Places(64, index, count), None, None)) for index in range(count)]
    assert len({*work}) == 1


def test_parts_become_whole():
    places = [Places(16, index, 4) for index in range(4)]
    whole = torch.randn(3, 16, 2)
    assert torch.equal(in_order([taken(whole, each.own) for each in places], places[0].deals, 1), whole)


# ---------------------------------------------------------------- attention


def over_ranks(size: int, work: Any) -> list[Any]:
    """Of each rank of cp: what `work` returns of its group and its number."""
    config = with_cp(size)
    return run_loopback(make_plan(config), make_mesh(config), lambda comm: work(comm.groups["cp"], comm.rank))


def attended(size: int, parts: list[torch.Tensor], documents: Documents | None = None,
             form: str = "keys") -> list[torch.Tensor]:
    """Attention's output, and gradients of queries, keys and values, of `size` ranks together. `parts`:
    queries, keys, values and the output's gradient, of whole sequences."""
    length, ways = parts[0].shape[2], {"keys": subject.attend_to_all, "heads": by_heads}

    def work(group: Any, rank: int) -> tuple[torch.Tensor, ...]:
        places = Places(length, rank, size)
        q, k, v, grad = (taken(part, places.own, 2) for part in parts)
        q, k, v = inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        out = ways[form](q, k, v, subject.Shared(group, places), documents)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    deals = Places(length, 0, size).deals
    return [in_order(each, deals, 2) for each in zip(*over_ranks(size, work), strict=True)]


def by_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: Any,
             documents: Documents | None) -> torch.Tensor:
    """As keys.attend_to_all."""
    kv_heads, sizes = k.shape[1], (q.shape[1] // k.shape[1], 1, 1)
    cells = torch.cat([part.permute(2, 0, 1, 3).unflatten(2, (kv_heads, -1)) for part in (q, k, v)], 3)
    parts = [part.flatten(2, 3).permute(1, 2, 0, 3) for part in to_heads(cells, sizes, shared)]
    q, k, v = parts
    out = one_rank(q, k, v, documents).permute(2, 0, 1, 3)
    return to_tokens(out.unflatten(2, (-1, sizes[0])), shared).flatten(2, 3).permute(1, 2, 0, 3)


def one_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None) -> torch.Tensor:
    if documents is not None:
        return attend(q, k, v, documents, False)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def drawn(length: int, heads: int, kv_heads: int,
          dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, count, length, 8).to(dtype) for count in (heads, kv_heads, kv_heads, heads)]


def plain(parts: list[torch.Tensor], documents: Documents | None = None) -> list[torch.Tensor]:
    """The same of one rank, in fp64, by a mask."""
    *inputs, grad = (part.double() for part in parts)
    inputs = [each.requires_grad_() for each in inputs]
    length = grad.shape[2]
    mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    for index, first, stop in documents.runs() if documents is not None else ():
        mask[index, :, first:stop, :first] = False
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


TWO = Documents(torch.empty(0), ((3, 4, 21, 64), (64,)))  # shorter than a chunk, and over several


@pytest.mark.parametrize("documents", [None, TWO], ids=["whole", "documents"])
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_attention_is_that_of_one_rank(form, size, kv_heads, documents):
    """A causal rectangle aligned at the upper left; a gradient that is summed twice, or not at all."""
    parts = drawn(64, 8, kv_heads)
    for got, want in zip(attended(size, parts, documents, form), plain(parts, documents), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("documents", [None, TWO], ids=["whole", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_have_the_bits_of_one_rank(dtype, documents):
    """Whole sequences, the same kernel; and each head comes back to its place."""
    parts = drawn(64, 8, 4, dtype)
    q, k, v = inputs = [part.clone().requires_grad_() for part in parts[:3]]
    out = one_rank(q, k, v, documents)
    want = [out.detach(), *torch.autograd.grad(out, inputs, parts[3])]
    for got, one in zip(attended(4, parts, documents, "heads"), want, strict=True):
        assert torch.equal(got, one)


def test_gradients_of_keys_are_added_in_fp32():
    """Each key has a gradient from every chunk behind it."""
    parts = drawn(512, 2, 2, torch.bfloat16)
    q, k, v = inputs = [part.clone().requires_grad_() for part in parts[:3]]
    alone = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, parts[3])
    for mine, one, want in zip(attended(8, parts)[2:], alone[1:], plain(parts)[2:], strict=True):
        assert (mine.double() - want).norm() < 0.8 * (one.double() - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_kernels_agree(rows):
    *inputs, grad = drawn(8, 4, 2)
    q, grad = inputs[0][:, :, -rows:], grad[:, :, -rows:]
    results = []
    for kernel in (HOST, SEPARATE):
        out, kept = kernel.forward(q, *inputs[1:], *[lower_right(8, 8, q)] * bool(kernel.rows))
        parts = [each[1:] for each in kernel.backward(grad, q, *inputs[1:], out, kept)]
        of_q, of_k, of_v = zip(*parts, strict=True)
        results.append([out, sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_other_documents_are_not_seen(form):
    """To the bit, over a border of chunks."""
    parts = drawn(64, 8, 4)
    changed = [part.clone() for part in parts]
    for part in changed[:3]:
        part[0, :, :21] += 1.0
    one, other = (attended(4, each, TWO, form)[0] for each in (parts, changed))
    assert torch.equal(one[0, :, 21:], other[0, :, 21:]) and not torch.equal(one[0, :, :21], other[0, :, :21])


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize("size", [2, 4])
def test_labels_are_shifted_before_the_cut(size):
    """The label of a part's last token is the first token of the chunk behind it, on whichever rank."""
    whole = Batch(torch.arange(16).repeat(2, 1), torch.arange(1, 17).repeat(2, 1), torch.arange(2), 0, 32)
    parts = [whole.at(Places(16, index, size)) for index in range(size)]
    assert all(torch.equal(part.labels_BS, part.tokens_BS + 1) for part in parts)
    assert sorted(torch.cat([part.tokens_BS[0] for part in parts]).tolist()) == list(range(16))


@pytest.mark.parametrize("counts", [[0], [15], [3, 4, 5, 8]])
@pytest.mark.parametrize("form", FORMS)
def test_labels_that_count_unevenly(counts, form):
    """Ranks none of whose labels count; a label on the border of two chunks. The loss is that of cp=1."""

    def losses(size: int) -> list[float]:
        config = with_cp(size, "data.loss_mask=chat", "optimizer.name=sgd", "optimizer.lr=0.1", form=form)

        def masked(comm: Comm, step: int) -> Any:
            read = batches(config, comm, step)

            def batch(microbatch: int) -> Batch:
                given = read(microbatch)
                labels = torch.full_like(given.labels_BS, NOT_COUNTED)
                labels[:, counts] = given.tokens_BS[:, counts]
                return replace(given, labels_BS=labels, num_tokens=torch.tensor(6 * len(counts)))

            return batch

        def work(comm: Comm) -> list[float]:
            engine = Engine(Analysis(make_plan(config)), comm)
            return [engine.train_step(masked(comm, step))[0].loss for step in range(4)]

        return run_loopback(make_plan(config), make_mesh(config), work)[0]

    one, two, four = map(losses, (1, 2, 4))
    assert two == pytest.approx(one, rel=1e-6) and four == pytest.approx(one, rel=1e-6) and one[0] != one[3]


# ---------------------------------------------------------------- costs

FAMILIES = {"gpt": [], "learned": ["model.position=learned"], "llama": LLAMA, "dropout": DROPOUT,
            "dropout-llama": [*DROPOUT, *LLAMA], "fused": ["model.fused=auto", *LLAMA],
            "experts": EXPERTS, "capacity": [*EXPERTS, "model.moe_capacity=0.75"],
            "documents": [*DOCUMENTS, "model.family=llama"],
            "documents-learned": [*DOCUMENTS, "model.position=learned"],
            "balanced": ["model.family=moe", "model.experts=4", "model.balance=sequence"]}


WITH_EXPERTS = "experts", "capacity", "balanced"
MESHES = {"alone": [], "tp": TP, "sp": [*TP, *SP]}
COSTED = [(name, mesh) for name in FAMILIES for mesh in MESHES if mesh != "tp" or name not in WITH_EXPERTS]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_over_tp_need_sequence_parallelism(name):
    """What COSTED leaves out, no config may ask for."""
    with pytest.raises(ConfigError, match=r"parallel\.sequence_parallel=false with parallel\.tp=2"):
        checked(tiny(*SMALL, "parallel.cp=2", *FAMILIES[name], *MESHES["tp"]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pieces", [(), ("attention",), ("keys",), ("keys", "attention")])
@pytest.mark.parametrize("name, mesh", COSTED)
def test_layers_cost_what_they_declare(name, mesh, pieces, form):
    """Bytes that are gathered and summed over cp included. Attention's products count all keys, of which
    those behind a chunk are not computed."""
    config = with_cp(2, *FAMILIES[name], *MESHES[mesh], form=form)
    share = share_of(config)
    for index, layer in enumerate(layers_of(config)[:2]):
        with initialized():
            cost = Measured(layer, config.model, share, pieces=pieces).cost(first=index == 0)
        declared = layer.cost(share)
        sent = {where: each for where, each in declared.sent_by(pieces).items() if each.bytes}
        for axis in ("tp", "cp"):  # one forward is measured, in training
            if once := sent.pop(("once", axis), None):
                sent["forward", axis] = sent.get(("forward", axis), Traffic()) + once
        assert sent == cost.sent, layer.name
        again = "attention" in pieces
        exact = not (again and share.documents) if form == "heads" else not again
        if name != "capacity" and exact:  # its row weights say what it saves
            got, want = shown(cost), shown(declared + difference(config, layer), pieces)
            # (attention inside documents is declared as of whole windows)
            but = {"sent": 0, **({"flops": 0} if share.documents and form == "keys" else {})}
            assert got | but == want | but, layer.name


def difference(config: Config, layer: Layer) -> Cost:
    """What is measured less what is declared."""
    share, model = share_of(config), config.model
    if layer.name == "embedding":  # which tokens are its own, where it is cut
        cut = model.seq_len // share.tokens * (share.over("tp") > 1)
        return Cost(saved=(Saved("mask of tokens", cut),), operands=cut)
    heads = model.heads // share.over("tp")
    if share.by_heads:  # on a CPU attention to one document at a time does not keep its output
        output = share.bytes(model.seq_len * model.heads * model.head_size, "tp") * share.documents
        return known_difference(config, layer) + Cost(saved=(Saved("output", -output),))
    if model.attention_dropout:
        return Cost()
    chunk = model.seq_len // 4  # of four; the last rank has the second and the third
    behind = 2 * chunk * (2 * model.seq_len - 2 * chunk - 3 * chunk) // 2
    return Cost((Product(-behind * heads * model.head_size, 2, 1),))


@pytest.mark.parametrize("cell", [[], [*TP, *SP, *PP], DROPOUT, PIECES, ["activation.policy=full"],
                                  ["precision.dtype=bf16", *LLAMA], [*PIECES, *DROPOUT], KEPT,
                                  [*KEPT[:1], BOTH, *PP], [*EXPERTS, "model.moe_capacity=0.75", *TP, *SP]])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_counted_is_predicted(size, cell, form):
    check(with_cp(size, *cell, form=form))


def test_keys_are_kept_or_sent_again():
    """The plan knows both: bytes kept, of all tokens, and bytes sent."""
    without, kept = (make_plan(with_cp(4, *LLAMA, *more)).table.units[1] for more in ([], KEPT))
    gathered = 2 * 16 * 8 * 4
    assert kept.saved_bytes - without.saved_bytes == gathered
    assert without.traffic["input"]["cp"] - kept.traffic["input"]["cp"] == gathered * 3 // 4
    said = warnings(with_cp(2, *KEPT, "model.attention_dropout=0.1"))
    assert any("keys does nothing here: with model.attention_dropout they are kept anyway" in line
               for line in said)
    assert any("keys does nothing here: parallel.cp=1" in line for line in warnings(with_cp(1, *KEPT)))


def test_a_budget_keeps_keys_where_it_has_room():
    """Not where another unit would be recomputed for it; and with no more than what a budget says."""
    def kept(*overrides: str) -> tuple[int, int]:
        """Bytes that a rank keeps, and units that are recomputed."""
        analysis = analyse(with_cp(4, *overrides))
        return (max(row.activation_peak_bytes for row in stages(analysis)),
                sum(unit.recompute for unit in analysis.table.units))

    def within(size: int, *overrides: str) -> tuple[int, int]:
        return kept(*BUDGET, f"activation.budget={size}", *overrides)

    (least, _), (most, _) = kept(), kept(*KEPT)
    assert within(most) == (most, 0) and within(most, "activation.pieces=[]") == (least, 0)
    assert within(most - 1) == within(least) == (least, 0)
    tight, recomputed = within(least - 1)
    assert tight < least and recomputed == within(least - 1, "activation.pieces=[]")[1] == 1
    assert within(least - 1, "activation.pieces=[keys]")[0] < least  # of a unit that costs more
    given = with_cp(4, *BUDGET, "activation.budget=1GiB")
    assert chosen_for(given, decided(given)) == [
        "activation.pieces: keys, since activation.budget has room for them"]


@pytest.mark.parametrize("pieces", ["null", "[]", "[keys]"])
def test_a_tight_budget(pieces, references):
    assert_contract(with_cp(4, *BUDGET, "activation.budget=8500", f"activation.pieces={pieces}"), references)


def test_bytes_of_a_layer():
    """Keys and values of the sequence, or what a rank has of queries, keys, values and output, times (cp -
    1) / cp."""
    unit = make_plan(with_cp(4, *LLAMA)).table.units[1]
    assert unit.traffic["forward"]["cp"] == 2 * 16 * 8 * 4 * 3 // 4
    unit = make_plan(with_cp(4, *LLAMA, form="heads")).table.units[1]
    assert unit.traffic["forward"]["cp"] == (2 * 32 + 2 * 16) * 16 * 4 * 3 // 4 // 4
    assert unit.traffic["input"] == unit.traffic["forward"]


@pytest.mark.parametrize("form", FORMS)
def test_work_is_equal(form):
    """Attention's FLOPs of a rank are those of the whole square over cp."""
    whole, part = (sum(unit.forward_flops for unit in make_plan(with_cp(size, form=form)).table.units)
                   for size in (1, 4))
    assert part * 4 == whole


def test_an_exchange_has_its_price():
    """All-to-alls do not take the time of a ring."""
    plan, hardware = make_plan(with_cp(4, form="heads")), load_hardware("h100-sxm")
    slow = replace(hardware, exchange_efficiency=hardware.exchange_efficiency / 1000)
    item, place = Instruction(Op.FORWARD, 1, 0), GroupPlace(range(4), 8)
    size = plan.table.units[1].traffic["forward"]["cp"]
    once, twice = (cost(plan, each)(0, item) for each in (hardware, slow))
    more = [Travel(each).all_to_all(size, place, 2) for each in (hardware, slow)]
    assert twice - once == pytest.approx(more[1] - more[0]) and more[1] > 1.4 * more[0]
    keys = make_plan(with_cp(4))
    assert cost(keys, hardware)(0, item) == cost(keys, slow)(0, item)


# ---------------------------------------------------------------- runs that change it


def test_checkpoints(tmp_path, references):
    """4 ranks, 2, 1, with dp, tp, pp and the form changing."""
    path, want = "auto", references(with_cp(1), 6).losses
    runs = [(2, [*PP, *TP, "zero.stage=1", "parallel.cp_form=heads"]), (4, [*DP, "zero.stage=3"]),
            (1, [*PP, "zero.stage=2"])]
    for number, (size, chosen) in enumerate(runs):
        losses, path = train(with_cp(size, *chosen, f"run.dir={tmp_path}", f"train.resume={path}"), 2)
        assert losses == pytest.approx(want[2 * number:2 * number + 2], rel=1e-5)


def test_sequences_grow(tmp_path):
    """A run begins with short sequences on one rank each, and goes on with longer ones on four."""
    _, path = train(with_cp(1, f"run.dir={tmp_path}"), 2)
    longer = ["model.seq_len=64", f"train.resume={path}"]
    losses = [train(with_cp(size, *longer, f"run.dir={tmp_path}/{size}"), 2)[0] for size in (1, 2, 4)]
    for one, other in pairwise(losses):
        assert one == pytest.approx(other, rel=1e-5)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("overrides, said", [
    (["parallel.cp=3"], "model.seq_len=16 with parallel.cp=3: each rank has two equal chunks of a sequence; "
                        "take a multiple of 6"),
    (["parallel.cp=4", "model.seq_len=24", "parallel.tp=4", *SP],
     "model.seq_len=24 with parallel.cp=4 and parallel.tp=4: each rank has two equal chunks of a sequence, "
     "and equal parts of them; take a multiple of 16"),
    (["parallel.cp=2", "parallel.axis_order=pp-cp-dp-cp-tp"], "must name each axis once"),
    (["parallel.cp=0"], "parallel.cp=0: must be at least 1"),
    (["parallel.cp_form=heads"], "parallel.cp_form=heads needs parallel.cp > 1"),
    (["parallel.cp=2", "parallel.cp_form=ulysses"], "parallel.cp_form=ulysses: must be one of keys, heads"),
    (["parallel.cp=2", *BUDGET, "activation.budget=1GiB", "activation.pieces=[norm]"],
     "activation.pieces=['norm']: must be some of keys with activation.policy=budget"),
    (["parallel.cp=4", "parallel.cp_form=heads", *TP],
     "parallel.cp_form=heads: parallel.cp=4 does not divide the 2 key heads of a tp rank (4 over "
     "parallel.tp=2); use parallel.cp_form=keys"),
    (["parallel.cp=2", "parallel.cp_form=heads", "model.family=llama", "model.kv_heads=1"],
     "parallel.cp_form=heads: parallel.cp=2 does not divide the 1 key head of a tp rank; use "
     "parallel.cp_form=keys"),
    (["parallel.cp=2", "parallel.cp_form=heads", "model.tile_linears=512", "model.tie_embeddings=false"],
     "its smallest tile, one kv head with its queries for each rank of cp, has"),
])
def test_bad_input(overrides, said):
    with pytest.raises(ThreedError) as error:
        tiny(*SMALL, *overrides)
    assert said in str(error.value)


def test_a_world_that_it_does_not_divide():
    with pytest.raises(ThreedError, match="tp x cp x pp = 2 does not divide"):
        checked(replace_dp(with_cp(2)), 3)


def replace_dp(config: Config) -> Config:
    return replace(config, parallel=replace(config.parallel, dp=1))
