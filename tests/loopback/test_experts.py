"""Mixture of experts, against a loop over experts in one process (tests/reference.py)."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest
import torch

from tests.harness import assert_contract, batches, loopback, tiny
from tests.layouts import H100, full_s
from tests.loopback.test_axis import train
from threed.base.errors import ConfigError, InputError
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.config.load import checked
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.travel.run import TravelRun
from threed.layout_search.best_first import Search
from threed.layout_search.layout import config_of
from threed.models.layers.experts import Routes
from threed.models.layers.handing import handing
from threed.models.measure import Measured
from threed.models.tiling import layers_of, share_of
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Slot
from threed.program.traffic import sent_by
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.spec.parameter import Cost, Saved
from threed.tensor import experts
from threed.tensor.context import Batch
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import DTYPES

SMALL = ["model.family=moe", "model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8",
         "model.vocab=30", "model.vocab_multiple=16", "model.experts=8", "model.expert_ffn_hidden=24",
         "train.global_batch_size=8", "train.seed=1"]
PP, FULL, BF16 = ["parallel.pp=2"], ["activation.policy=full"], ["precision.dtype=bf16"]
SP = ["parallel.tp=2", "parallel.sequence_parallel=true"]
BIAS = ["model.balance=bias", "optimizer.balance_rate=0.05", "model.router_score=sigmoid"]
SHARED = ["model.shared_expert_ffn=20"]
MESHES = {
    "alone": [], "dp": ["parallel.dp=2"], "ep": ["parallel.dp=2", "parallel.ep=2"],
    "ep-edp": ["parallel.dp=4", "parallel.ep=2"], "folded": [*SP, "parallel.dp=2", "parallel.ep=4"],
    "in-tp": [*SP, "parallel.dp=2", "parallel.ep=2"], "ep-1-tp": [*SP, "parallel.dp=2"],
    "groups": ["parallel.dp=4", "parallel.ep=2", "zero.shard_size=2"],
}
# Meshes x ZeRO stages; without shards (stage 0) there are no groups of them.
CELLS = [(name, stage) for name in MESHES for stage in range(4) if stage or name != "groups"]


def moe(*overrides: str) -> Config:
    return tiny(*SMALL, *overrides)


@pytest.mark.parametrize("name, stage", CELLS)
def test_contract(name, stage, references):
    assert_contract(moe(*MESHES[name], f"zero.stage={stage}", *(BIAS if stage % 2 else SHARED)), references)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_and_stage(schedule, stage, references):
    two = ["parallel.virtual_stages=2"] if SCHEDULES[schedule].virtual is None else []
    assert_contract(moe(f"parallel.schedule={schedule}", f"zero.stage={stage}", *PP, *MESHES["ep"], *two,
                        *(FULL if stage % 2 else []), "train.global_batch_size=12"), references)


MORE = {
    "sigmoid-groups": ["model.router_score=sigmoid", "model.expert_groups=4", "model.groups_per_token=2",
                       "model.routed_scale=2.5", "train.seed=3"],
    "one-expert-a-token": ["model.experts_per_token=1", "model.normalize_top_k=false"],
    "all-experts": ["model.experts_per_token=8"],
    "penalties": ["model.balance=sequence", "model.balance_weight=0.1", "model.z_loss=0.01", *SP, *FULL],
    "penalties-sigmoid": ["model.balance=sequence", "model.balance_weight=0.1", "model.router_score=sigmoid"],
    "balanced": ["model.moe_route=balanced"],
    "dense-between": ["model.layers=4", "model.moe_every=2", "model.first_dense=1", *PP],
    "dropout": ["model.dropout=0.2", *SHARED, *FULL],
    "clip": ["optimizer.clip_grad=0.1", *BIAS], "shared-sp": [*SHARED, *SP, "parallel.ep=4"],
    "qk-norm": ["model.qk_norm=true", "model.kv_heads=2", "model.tie_embeddings=true", *PP],
    "offload": ["offload.optimizer=cpu", "offload.parameters=cpu", "zero.stage=3", *FULL, *BIAS],
    "overlap": ["offload.optimizer=cpu", *BIAS],
    "no-overlap": ["offload.optimizer=cpu", "offload.overlap=none", *BIAS],
    "gradients": ["offload.optimizer=cpu", "offload.gradients=host", "zero.stage=2", *BIAS],
    "kept-on-host": [*FULL, "activation.offload=cpu", "zero.stage=1"],
    "selective": ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]", *SHARED],
    "evaluate-verify": ["train.eval_every=1", "run.verify_every=1", "zero.stage=2"],
    "documents": ["data.document_mask=true", "data.loss_mask=answers", "data.source=none.jsonl"],
    "lora": ["model.lora_rank=2", "model.lora_targets=[q_proj,up_proj,o_proj]", *SHARED],
    "zb-v-clip": [*PP, "parallel.schedule=zb-v", *BIAS, *SHARED],
}


@pytest.mark.parametrize("name", MORE)
def test_more(name, references):
    assert_contract(moe(*MESHES["ep"], *MORE[name]), references)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("more", [
    [], [*SP, "parallel.ep=4", *FULL], [*PP, "parallel.schedule=zb-v", "zero.stage=3"],
    ["precision.master=none"]], ids=["ep", "sp-full", "zb-v-zero-3", "no-master"])
def test_16_bits(dtype, more, references):
    scale = ["precision.loss_scale=1024"] if dtype == "fp16" else BIAS
    assert_contract(moe(*MESHES["ep"], f"precision.dtype={dtype}", *scale, *SHARED, *more), references)


# ---------------------------------------------------------------- identities


def in_place(rows: torch.Tensor) -> experts.RowOrder:
    return experts.RowOrder.of(torch.arange(len(rows)))


def swiglu(x, up, down):
    return (torch.nn.functional.silu(x @ up[0].t()) * (x @ up[1].t())) @ down.t()


@pytest.mark.parametrize("ranks, count", [(1, 1), (1, 3), (2, 3), (3, 1)], ids=str)
def test_products_of_experts(ranks, count):
    """Values and gradients of a plain loop; rows of each rank one after the other; an expert without rows."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.arange(ranks * count).view(ranks, count) * 2
    up, down, rows = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in (
        (count, 2, 6, 8), (count, 8, 6), (int(counts.sum()), 8)))
    weights = torch.rand(len(rows), generator=generator, requires_grad=True)
    numbers = torch.arange(count).repeat(ranks).repeat_interleave(counts.flatten())
    plain = torch.stack([weight * swiglu(row, up[at], down[at]) for row, weight, at in zip(
        rows, weights, numbers.tolist(), strict=True)]) if len(rows) else rows * weights.unsqueeze(1)
    back = torch.randn(plain.shape, generator=generator)
    tensors = up, down, rows, weights
    want = torch.autograd.grad(plain, tensors, back, allow_unused=True)
    packed = experts.routed(rows, weights.unsqueeze(1), in_place(rows))
    made = experts.compute(packed, counts, up, down, WeightGrads())
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5)
    for got, each, of in zip(torch.autograd.grad(made, tensors, back), want, tensors, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(of) if each is None else each, rtol=1e-5, atol=1e-5)


def test_equal_experts_are_one_mlp():
    """For any number of them a token, if its weights add up to 1; and so is one expert."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(*shape, generator=generator) for shape in ((5, 8), (2, 6, 8), (8, 6)))
    for count, k in ((1, 1), (4, 1), (4, 2), (4, 4)):
        scores = torch.rand(5, count, generator=generator)
        picks = experts.choose(scores, k)
        order = experts.RowOrder.of(picks.flatten())
        packed = experts.routed(x, experts.weights_of(scores, picks, True, 1.0), order)
        counts = picks.flatten().bincount(minlength=count).view(1, count)
        answers = experts.compute(packed, counts, up.repeat(count, 1, 1, 1), down.repeat(count, 1, 1),
                                  WeightGrads())
        made = experts.summed(answers, order, k)
        torch.testing.assert_close(made, swiglu(x, up, down), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_travel_as_bits(dtype):
    rows, weights = torch.randn(5, 8).to(dtype), torch.tensor([0.0, -0.0, 1e-30, 0.1, torch.nan])
    packed = experts.routed(rows, weights.unsqueeze(1), in_place(rows))
    assert packed.dtype == dtype and packed.shape[1] * packed.itemsize == 8 * packed.itemsize + 16
    got, bits = experts._unpack(packed)
    assert torch.equal(got, rows) and torch.equal(bits.view(torch.int32), weights.view(torch.int32))


def test_equal_scores():
    """The lower number wins."""
    assert experts.choose(torch.full((1, 6), 0.5), 3).tolist() == [[0, 1, 2]]
    assert experts.choose(torch.full((1, 6), 0.5), 2, 3, 1).tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [[], BF16], ids=["fp32", "bf16"])
def test_biases_are_equal_to_the_bit(dtype, references):
    """On every mesh, schedule and size of micro-batches; and they do move. (In 16 bits choices are replayed.)
    """
    usual = moe(*BIAS, *dtype)
    picks = references(usual, 5).picks if dtype else None
    runs = [loopback(moe(*BIAS, *dtype, *more), 5, picks=picks) for more in (
        [], MESHES["folded"], [*MESHES["ep-edp"], "zero.stage=3"], ["train.micro_batch_size=4"],
        [*PP, *MESHES["ep"], "parallel.schedule=zb-v"], [*PP, "parallel.schedule=gpipe", *FULL],
        ["train.micro_batch_size=2", *PP, "parallel.schedule=interleaved", "parallel.virtual_stages=2"])]
    names = [name for name in runs[0].weights if name.endswith("router.bias")]
    assert len(names) == 2
    for name in names:
        assert runs[0].weights[name].abs().max() > 0
        assert all(torch.equal(run.weights[name], references(usual, 5).weights[name]) for run in runs)


# ---------------------------------------------------------------- cost


COSTS = {
    "lora": ["model.lora_rank=2", *SHARED],
    "plain": [], "fused": ["model.fused=on", "model.dropout=0.1", *SHARED],
    "penalties": ["model.balance=sequence", "model.z_loss=0.1", "model.router_score=sigmoid", *SHARED],
    "sp": [*SP, "parallel.dp=2", "parallel.ep=2", "model.balance=sequence", "model.z_loss=0.1",
           "model.normalize_top_k=false", *SHARED],
    "bias": [*BF16, *BIAS],
}


@pytest.mark.parametrize("name", COSTS)
def test_layers_cost_what_they_declare(name):
    """With as many rows as balanced experts get."""
    config = moe("train.micro_batch_size=2", "model.moe_room=1", *COSTS[name])
    share, dtype = share_of(config), DTYPES[config.precision.dtype]
    rows, ranks = 32 // share.over("tp"), share.over("ep")
    given = {"arrived": torch.randn(rows, 16 + 16 // dtype.itemsize).to(dtype).requires_grad_(),
             "arriving": torch.full((ranks, 8 // ranks), rows // 8),
             "picks": torch.arange(rows).view(-1, 2) % 8,
             "returned": torch.randn(rows, 16).to(dtype).requires_grad_()}
    for layer in layers_of(config)[1:-1]:
        with initialized():
            measured = Measured(layer, config.model, share)
            measured.reads = {name: given.get(name, measured.reads.get(name))
                              for name in handing(layer).reads}
            cost = measured.cost()
        declared = layer.cost(share)
        if ranks > 1 and layer.name.endswith("experts"):  # the order of rows is kept, but not by autograd
            declared += Cost(saved=(Saved("order of rows", -16 * rows),))
        sent = {where: each for where, each in declared.sent.items() if each.bytes}
        assert (declared.flops, declared.saved_bytes(), declared.operands, sent) == (
            cost.flops, cost.saved_bytes(), cost.operands, cost.sent), layer.name


# ---------------------------------------------------------------- bytes, checkpoints


@pytest.mark.parametrize("more", [
    [], [*SP, *FULL], [*SP, "model.experts_per_token=1"], [*SP, "parallel.ep=4", "model.experts_per_token=1"],
    ["parallel.dp=4"]], ids=["ep", "sp-full", "few-tokens", "few-tokens-ep-4", "dp-4"])
@pytest.mark.parametrize("route", ["balanced", "learned"])
def test_bytes(route, more):
    """Balanced, what `comm` counts is what the plan says; else it is what the counts of rows say."""
    config = moe(*MESHES["ep"], "zero.stage=0", f"model.moe_route={route}", *SHARED, *more)
    plan = make_plan(config)
    expected = sum(sent_by(plan.table, item).get("ep", 0) for item in plan.programs["train"][0])
    counted = []

    def work(comm: Comm) -> int:
        engine = Engine(Analysis(plan), comm)
        own = engine.comm.groups["ep"].rank()

        def after(instruction, slots):
            if instruction.op == "EXCHANGE" and instruction.kind == "routed":
                counts = slots.get(instruction.slot._replace(kind="counts")).sum(1)
                counted.append(int(counts.sum() - counts[own]))

        engine.after = after
        engine.train_step(batches(config, comm, 0))
        return comm.sent["ep"]

    sent, ranks = run_loopback(plan, make_mesh(config), work), config.world_size
    if route == "balanced":
        assert set(sent) == {expected}
    # rows there and their gradients back, answers and theirs
    width, exchanges = 2 * (4 * config.model.hidden + 16) + 2 * 4 * config.model.hidden, len(counted)
    assert exchanges == ranks * config.num_microbatches * config.model.layers
    others = 1 - 1 / config.parallel.ep  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(sent) == sum(counted) * width + exchanges * 8 * config.model.experts * others


@pytest.mark.parametrize("room", [1, 1.3, 2, 1.0 + 1 / 3])
@pytest.mark.parametrize("more", [[], ["model.seq_len=12", "parallel.dp=4"],
                                  [*SP, "train.micro_batch_size=3"]])
def test_planned_rows_are_whole(room, more):
    """As many come back as have left, whatever room there is between."""
    config = moe(*MESHES["ep"], f"model.moe_room={room}", "train.global_batch_size=24", *more)
    plan, row = make_plan(config), 4 * config.model.hidden
    rows = 2 * config.train.micro_batch_size * config.model.seq_len // config.parallel.tp
    sizes = {name: plan.table.size(Slot(name, unit)) for unit in (1, 2)
             for made in plan.table.units[unit].makes for name in (made.name, made.becomes)
             if name}
    assert sizes["routed"] == rows * (row + 16) and sizes["returned"] == rows * row
    assert sizes["arrived"] == math.ceil(rows * room) * (row + 16)
    assert sizes["answers"] == math.ceil(rows * room) * row
    sent = {item.kind: sent_by(plan.table, item)["ep"] for item in plan.programs["train"][0]
            if item.op == "EXCHANGE" and item.unit < 3}
    assert sent["answers"] * (row + 16) == sent["routed"] * row


def test_checkpoints(tmp_path, references):
    """ep 2 -> 4 -> 1, across pp and tp."""
    path, want = "auto", references(moe(*BIAS), 6).losses
    runs = [[*MESHES["in-tp"], "zero.stage=1"], ["parallel.dp=4", "parallel.ep=4", *PP, "zero.stage=3"],
            ["parallel.dp=2", "zero.stage=2", "offload.optimizer=cpu"]]
    for number, chosen in enumerate(runs):
        config = moe(*BIAS, *chosen, f"run.dir={tmp_path / str(number)}", f"train.resume={path}")
        losses, path = train(config, 2)
        assert losses == pytest.approx(want[2 * number:2 * number + 2], rel=1e-5)


def test_what_is_saved_is_equal_to_the_bit(tmp_path):
    sums, path = [], "auto"
    for size, chosen in ((2, MESHES["in-tp"]), (4, ["parallel.dp=4", "parallel.ep=4", *PP, "zero.stage=3"]),
                         (1, ["parallel.dp=2"])):
        folder = tmp_path / str(size)
        _, path = train(moe(*BIAS, *chosen, f"run.dir={folder}", f"train.resume={path}"), 2 * (not sums))
        parameters = json.loads((path / "manifest.json").read_text())["parameters"]
        sums.append({name: each["sums"] for name, each in parameters.items()})
    assert sums[0] == sums[1] == sums[2] and {"blocks.0.experts.up", "blocks.1.router.bias"} <= sums[0].keys()


def test_search():
    """Layouts with and without expert parallelism, timed as their whole plans are."""
    base = moe("train.global_batch_size=64", "run.device=auto")
    for ep in (1, 2, 4):
        result = Search(base, H100, 1 << 36).run(4, {"ep": ep})
        assert result.timed and {found.layout.ep for found in result.timed} == {ep}
        for found in result.timed[:3]:
            config = checked(config_of(found.layout, base))
            assert found.step_s == pytest.approx(full_s(config, H100), rel=0.02)


def test_for_whom_ranks_wait(monkeypatch):
    """A rank does not come to an exchange. Each names the first instruction of a lane that does not end, and
    its ranks: what comes behind it on the lane may be of other ranks."""
    config = moe(*MESHES["ep-edp"], *SHARED, "zero.stage=1", "model.layers=1")
    plan, taken = make_plan(config), TravelRun._taken
    engines, here, come = {}, threading.Barrier(5, timeout=60), threading.Event()

    def late(self, move, *others):
        if self.comm.rank == 1 and move.source.kind == "counts" and not come.is_set():
            come.wait(60)
        return taken(self, move, *others)

    monkeypatch.setattr(TravelRun, "_taken", late)

    def work(comm: Comm) -> None:
        engines[comm.rank] = engine = Engine(Analysis(plan), comm)
        here.wait()
        engine.train_step(batches(config, comm, 0))

    ranks = threading.Thread(target=run_loopback, args=(plan, make_mesh(config), work), daemon=True)
    ranks.start()
    here.wait()
    counts = ("at 'FORWARD u3 m0', which needs 'EXCHANGE routed u1 m0 (ep)', "
              "behind 'EXCHANGE counts u1 m0 (ep)', with rank ")
    sums = "at 'CLIP', which needs 'REDUCE p0 (dp)', behind 'REDUCE p5 (dp)', with ranks "
    want = [counts + "1", counts + "0", sums + "0, 1, 3", sums + "0, 1, 2"]
    until, said = time.monotonic() + 30, []
    while said != want and time.monotonic() < until:
        lines = [engines[rank].where().splitlines()[0] for rank in range(4)]
        said = [line[line.find("at '"):] for line in lines]
        time.sleep(0.02)
    come.set()
    ranks.join(60)
    assert said == want


# ---------------------------------------------------------------- bad input


BAD = {
    "tp": (["parallel.tp=2"], r"sequence_parallel=false with parallel.tp=2 .* set it to true"),
    "ep": (["parallel.dp=4", "parallel.ep=3"], r"ep=3 does not divide the 4 ranks of dp x tp"),
    "experts": (["parallel.dp=4", "parallel.ep=4", "model.experts=6"],
                r"parallel.ep=4 does not divide model.experts=6"),
    "dense": (["model.family=llama", "parallel.dp=2", "parallel.ep=2"], r"ep=2: model.family=llama has no"),
    "copies": (["parallel.dp=4", "parallel.ep=4", "zero.shard_size=2"], r"the 2 shard groups do not divide"),
    "k": (["model.experts_per_token=9"], r"per_token=9 is more than model.experts=8: take at most 8"),
    "groups": (["model.expert_groups=3"], r"groups=3 does not divide model.experts=8: take a divisor of 8"),
    "odd": (["model.hidden=17", "model.head_dim=4", "precision.dtype=bf16"],
            r"model.hidden=17 with precision.dtype=bf16: .* take an even one"),
    "none": (["model.first_dense=2"], r"first_dense=2 leaves none of model.layers=2 .* at most 1"),
    "of-groups": (["model.expert_groups=4", "model.experts_per_token=6", "model.groups_per_token=2"],
                  r"cannot give model.experts_per_token=6"),
    "room": (["model.moe_room=0.5"], r"moe_room=0.5: must be at least 1"),
    "gelu": (["model.activation=gelu"], r"set model.activation=swiglu"),
    "units": (["parallel.layers_per_unit=2"], r"set parallel.layers_per_unit=1"),
    "graphs": (["run.cuda_graphs=true", "run.device=auto"], r"set it to false"),
    "bias": ([*BIAS, *BF16, "precision.grad_dtype=bf16"], r"grad_dtype=bf16 with model.balance=bias"),
    "tiles": (["model.tile_linears=1KiB"], r"layer blocks.0 has 4.0 KiB a rank, and cannot be cut"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad(name):
    overrides, message = BAD[name]
    with pytest.raises((ConfigError, InputError), match=message):
        config = moe(*overrides)
        make_plan(config)


# ---------------------------------------------------------------- Megatron-LM's functions


def megatron():
    """megatron-core's functions of experts, which run on a CPU."""
    from threed.tensor.layers import _without_extras

    with _without_extras():
        from megatron.core.transformer.moe import moe_utils
    return moe_utils


ROUTERS = {
    "softmax": {}, "sigmoid": {"score_function": "sigmoid", "scaling_factor": 2.5},
    "groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
    "groups-softmax": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "bias": {"score_function": "sigmoid", "expert_bias": torch.arange(8) / 20},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_weights_are_megatrons(name):
    asked, logits = ROUTERS[name], torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    weights, chosen = megatron().topk_routing_with_score_function(logits, 4, **asked)
    scores = experts.scores_of(logits, asked.get("score_function", "softmax"))
    picks = experts.choose(scores, 4, asked.get("num_groups", 1), asked.get("group_topk", 1),
                           asked.get("expert_bias"))
    mine = experts.weights_of(scores, picks, not asked.get("use_pre_softmax"),
                              asked.get("scaling_factor", 1.0))
    assert torch.equal(torch.zeros_like(chosen).scatter(1, picks, True), chosen)
    mine = torch.zeros_like(weights).scatter(1, picks, mine)
    torch.testing.assert_close(mine, weights, rtol=1e-5, atol=1e-6)


def test_penalties_are_megatrons():
    """Of one sequence: the auxiliary loss is that of all its tokens; the z-loss is of each token."""
    config = moe("model.balance=sequence", "model.balance_weight=0.3", "model.z_loss=0.2", "model.seq_len=40",
                 "train.global_batch_size=1")
    routes = layers_of(config)[1]
    assert isinstance(routes, Routes)
    with initialized():
        Measured(routes, config.model, share_of(config))  # builds it
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    scores = logits.softmax(-1)
    picks = experts.choose(scores, 2)
    batch = Batch(torch.zeros(1, 40), torch.zeros(1, 40), torch.zeros(1), 0, 40)
    got = routes._penalty(logits, scores, picks, batch)
    theirs = megatron()
    counts = experts.count(picks, 8)
    want = (theirs.switch_load_balancing_loss_func(scores, counts, 40, 2, 8, 0.3)
            + theirs.z_loss_func(logits, 0.2))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
