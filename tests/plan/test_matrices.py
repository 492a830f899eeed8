"""Logical matrices: which pieces ranks have, who owns them, and what the plan says of their turns."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

import threed
from tests.harness import tiny, why_refused
from threed.base.errors import ConfigError
from threed.base.mesh import OWNERS, Mesh
from threed.config.load import load
from threed.features.zero.matrices import UnitMatrices, members
from threed.features.zero.shard import layout
from threed.models.layers.attention import targets
from threed.planner import layouts, make_mesh, make_plan
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware
from threed.program.instruction import Instruction, Op, Slot, SlotKind
from threed.program.traffic import sent_by
from threed.schema import ModelConfig
from threed.spec.parameter import Cut, Parameter, Rows, each_of

QKV = tuple(targets(ModelConfig(heads=8, kv_heads=4, hidden=24, head_dim=3))[each]
            for each in ("q_proj", "k_proj", "v_proj"))
PARAMETERS = {
    "rows": Parameter("rows", (16, 6), (Cut(0, "tp"),), matrices=each_of(1)),
    "columns": Parameter("columns", (10, 12), (Cut(1, "tp"),), matrices=each_of(1)),
    "gate and up": Parameter("up", (24, 5), (Cut(0, "tp", 2),), matrices=each_of(2)),
    "queries, keys, values": Parameter("qkv", (48, 7), (Cut(0, "tp"),), matrices=QKV, heads=each_of(16)),
    "whole": Parameter("whole", (9, 8), matrices=each_of(3)),
    "one row": Parameter("row", (1, 40), matrices=each_of(1)),
}


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize(("tp", "dp", "shard"), [(1, 1, 1), (2, 1, 1), (1, 3, 3), (4, 2, 2), (2, 4, 2)])
def test_pieces_are_all_of_each_matrix(tp, dp, shard, heads):
    """What ranks send are all elements of each matrix once, each from where it lies; and what a rank updates
    is all that it has."""
    mesh = Mesh(("pp", "dp", "tp"), shard, extra=[OWNERS], tp=tp, dp=dp)
    laid = layout(tuple(PARAMETERS.values()), {"tp": tp}, shard)
    ranks = members(mesh, OWNERS, mesh.shard_group, 0)
    unit = UnitMatrices(laid, ranks[0].place, heads)
    wholes = {name: torch.arange(math.prod(each.shape)).view(each.stored) for name, each in
              ((each.name, each) for each in PARAMETERS.values())}
    found = [torch.full(each.shape, -1) for each in unit.whole]
    for member in ranks:
        buffer = torch.full((laid.numel,), -1)
        for placed in laid.placed:
            offset, shape = placed.parameter.part(laid.ranks, member.place)
            part = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
            buffer[placed.start:placed.stop] = wholes[placed.parameter.name][part].flatten()
        for piece in unit.sends(member):
            into = found[piece.matrix][slice(*piece.rows), slice(*piece.columns)]
            assert (into == -1).all()
            into.copy_(buffer[piece.start:piece.stop].view(piece.shape))
        for sharded, (start, stop) in ((True, laid.shard(member.shard)), (False, (0, laid.numel))):
            covered = sorted((piece.start, piece.stop) for piece in unit.owned(member, sharded))
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(covered))
            assert sum(b - a for a, b in covered) == min(stop, laid.placed[-1].stop) - min(
                start, laid.placed[-1].stop)
    for each, got in zip(unit.whole, found, strict=True):
        parameter = laid.placed[each.placed].parameter
        rows = parameter.heads if heads and parameter.heads else parameter.matrices
        flat = wholes[parameter.name].reshape(-1, parameter.stored[-1])
        mine = [row for first, stop in rows[each.index].cells(len(flat)) for row in range(first, stop)]
        assert torch.equal(got, flat[mine])


def test_rows_are_all_rows():
    assert sorted(row for rows in QKV for cell in rows.cells(48) for row in range(*cell)) == [*range(48)]
    assert [*Rows(1, 2, 2).cells(24)] == [(12, 24)] and Rows(1, 2, 2).count(24) == 12


@pytest.mark.parametrize("order", [*itertools.permutations(("pp", "dp", "cp", "tp"))])
def test_the_group_of_owners(order):
    """All ranks of a position whose data ranks are one shard group, whatever the order of axes."""
    mesh = Mesh(order, 3, extra=[OWNERS], pp=2, dp=3, cp=2, tp=2)
    for rank in range(mesh.size):
        group, here = mesh.group(OWNERS, rank), mesh.coordinate(rank).on
        shards = {each for each in mesh.group("shard", rank)}
        of_tp = {other for each in shards for other in mesh.group("tp", each)}
        assert set(group) == of_tp and len(group) == 6 and rank in group
        assert {mesh.coordinate(each).on["pp"] for each in group} == {here["pp"]}


def config_of(*overrides: str):
    return tiny("optimizer.name=muon", "model.activation=swiglu", "model.kv_heads=4", *overrides)


def test_the_kinds_of_units():
    """What AdamW steps beside matrices is a unit of its own; a unit without matrices is what it was."""
    config = config_of("zero.stage=3", "parallel.dp=2", "zero.persist_below=1100", "model.layers=1",
                       "model.tie_embeddings=false")
    table = make_plan(config).table
    found = {unit.name: ([placed.parameter.name.removeprefix("blocks.0.") for placed in
                          layouts(config)[number].placed], unit.turning is not None, unit.optimizer)
             for number, unit in table.parameters.items()}
    assert found["blocks.0"] == (["attention.qkv.weight", "mlp.up.weight", "mlp.down.weight"], True, "")
    assert found["blocks.0, small"] == (["attention.out.weight"], True, "")
    assert found["blocks.0, plain_small"][1:] == (False, "adamw")
    assert found["embedding"][1:] == found["head"][1:] == (False, "adamw")
    own = {name for name in found if not name.startswith("blocks")}
    usual = make_plan(tiny("zero.stage=3", "parallel.dp=2", "zero.persist_below=1100", "model.layers=1",
                           "model.tie_embeddings=false")).table.parameters
    assert own == {unit.name for unit in usual.values() if not unit.name.startswith("blocks")}


def test_what_a_matrix_is():
    matrices = [each for unit in make_plan(config_of("model.layers=1")).table.parameters.values()
                if unit.turning for each in unit.turning.matrices]
    assert Counter((each.parameter.removeprefix("blocks.0."), each.shape) for each in matrices) == Counter({
        ("attention.qkv.weight", (32, 32)): 1, ("attention.qkv.weight", (16, 32)): 2,
        ("attention.out.weight", (32, 32)): 1, ("mlp.up.weight", (128, 32)): 2,
        ("mlp.down.weight", (32, 128)): 1}), matrices


def test_each_head():
    table = make_plan(config_of("model.layers=1", "optimizer.matrices=heads")).table
    shapes = Counter(each.shape for unit in table.parameters.values() if unit.turning
                     for each in unit.turning.matrices if "qkv" in each.parameter)
    assert shapes == {(4, 32): 8 + 2 * 4}


@pytest.mark.parametrize(("pp", "units"), [(1, "[34]"), (2, "[17,17]"), (4, "[9,8,8,9]")])
def test_owners_are_balanced(pp, units):
    """With equally many blocks on each position. (Where they are not, matrices are too large for that: 27
    large ones on 16 ranks.)"""
    config = load("configs/llama3-8b.yaml", ["optimizer.name=muon", f"parallel.pp={pp}", "parallel.tp=1",
                                             f"parallel.dp={64 // pp}", f"parallel.stage_units={units}"])
    table = make_plan(config).table
    for position in range(pp):
        work = Counter[int]()
        for number in table.held(position):
            for each in getattr(table.parameters[number].turning, "matrices", ()):
                work[each.owner] += each.flops
        most = max(work.values()) / (sum(work.values()) / (64 // pp))
        assert most < 1.10
        assert {way.busiest for number in table.held(position)
                if (way := table.parameters[number].turning)} == {round(most, 4)}


def test_bytes_of_the_exchanges():
    """All that does not lie with its owner, once each way: on average (n - 1) / n of it."""
    config = config_of("parallel.dp=2", "parallel.tp=2", "zero.stage=1")
    table = make_plan(config).table
    for number, unit in table.parameters.items():
        if unit.turning is None:
            continue
        elements = sum(math.prod(each.shape) for each in unit.turning.matrices)
        assert 0.5 * elements < unit.turning.sent <= elements
        assert unit.turning.returned == unit.turning.sent
        sent = sent_by(table, Instruction(Op.EXCHANGE, number, kind="update", group=OWNERS))
        assert sent == {"dp": round(unit.turning.sent * 2 / 4)}
        assert table.size(Slot(SlotKind.UPDATE, number)) == unit.numel // 2 * 2
        assert table.size(Slot(SlotKind.MATRIX, number)) == unit.turning.owned * 2
    ways = [unit.turning for unit in table.parameters.values() if unit.turning]
    owned = Counter[int]()
    for each in (each for way in ways for each in way.matrices):
        owned[each.owner] += math.prod(each.shape)
    assert 0 <= sum(way.owned for way in ways) - max(owned.values()) <= len(ways)


def test_whole_parts_come_back_where_state_is_whole():
    whole, cut = (make_plan(config_of("parallel.dp=4", f"zero.stage={stage}")).table.parameters
                  for stage in (0, 1))
    for number, unit in whole.items():
        if unit.turning is not None and (other := cut[number].turning) is not None:
            assert unit.turning.sent == other.sent
            assert unit.turning.returned == 3 * sum(math.prod(each.shape) for each in unit.turning.matrices)


def edited(edit) -> str:
    return why_refused(make_plan(config_of("parallel.dp=2", "zero.stage=1", "model.layers=2")), edit)


def test_three_parts_each_once():
    begin, turn, end = (Instruction(Op.STEP, 1, part=part) for part in ("begin", "turn", "end"))
    there = Instruction(Op.EXCHANGE, 1, kind="update", group=OWNERS)
    back = Instruction(Op.EXCHANGE, 1, kind="turned", group=OWNERS)
    assert "leaves 'direction p1' behind" in edited(lambda program: program.remove(end))
    assert "reads 'matrix p1', which is not alive" in edited(lambda program: program.remove(there))
    assert "reads 'turned p1', which is not alive" in edited(lambda program: program.remove(turn))
    assert "reads 'update p1', which is not alive" in edited(lambda program: program.remove(begin))
    assert "reads 'direction p1', which is not alive" in edited(lambda program: program.remove(back))

    def early(program: list[Instruction]) -> None:
        program.insert(program.index(there), program.pop(program.index(turn)))

    def copied(program: list[Instruction]) -> None:
        program.insert(program.index(begin), Instruction(Op.GATHER, 1, group="dp"))
        program.insert(program.index(end) + 1, Instruction(Op.RELEASE, 1))

    def between(program: list[Instruction]) -> None:
        at = program.index(turn)
        program[at:at] = [Instruction(Op.GATHER, 1, group="dp"), Instruction(Op.RELEASE, 1)]

    def whole(program: list[Instruction]) -> None:
        at = program.index(begin)
        program[at] = begin._replace(part="")

    assert "reads 'matrix p1', which is not alive" in edited(early)
    assert "updates 'pshard p1' while 'param p1'" in edited(copied)
    assert "reads 'pshard p1', which this step has already updated" in edited(between)
    assert "has no such part of a step" in edited(whole)


@pytest.mark.parametrize(("overrides", "words"), [
    (["model.tile_linears=9000", "model.tie_embeddings=false"], "a tile is no whole matrix"),
    (["precision.dtype=fp16", "precision.master=none"], "smaller than what fp16 weights can hold"),
    (["optimizer.momentum=1"], "optimizer.momentum=1.0: must be less than 1"),
    (["optimizer.momentum=-0.1"], "optimizer.momentum=-0.1: must be at least 0"),
    (["optimizer.turns=0"], "optimizer.turns=0: must be at least 1"),
    (["optimizer.turns=21"], "optimizer.turns=21: must be at most 20"),
    (["optimizer.turn_scale=mean"], "optimizer.turn_scale=mean: must be one of match_rms_adamw, original"),
    (["optimizer.turn_dtype=fp16"], "optimizer.turn_dtype=fp16: must be one of bf16, fp32"),
    (["optimizer.turn_coefficients=[1,2]"], "must be three numbers a, b and c"),
    (["optimizer.turn_eps=0"], "optimizer.turn_eps=0.0: must be above 0"),
    (["optimizer.lr=0", "optimizer.adamw_lr=1"], "=1.0 follows the schedule of optimizer.lr, which is 0"),
    (["model.lora_rank=2"], "model.lora_rank trains adapters alone, which AdamW steps; choose adamw"),
    (["optimizer.name=lion", "optimizer.turns=3"], "optimizer.turns=3 needs optimizer.name=muon or polar"),
    (["optimizer.name=adamw", "optimizer.adamw_lr=1"], "needs optimizer.name=muon or polar"),
    (["offload.optimizer=cpu", "offload.overlap=next"],
     "offload.overlap=next with optimizer.name=muon: owners turn matrices at the end of the step"),
])
def test_bad_input(overrides, words):
    with pytest.raises(ConfigError) as caught:
        tiny("optimizer.name=muon", *overrides)
    assert words in str(caught.value)


def test_what_the_host_steps_is_not_the_turns():
    """What its steps and moves make a step longer is no more than what they take; and a run's costs are of
    what the device computes."""
    config = config_of("parallel.dp=2", "zero.stage=1", "offload.optimizer=cpu")
    document = threed.predict(config, "h100-sxm")
    stage, = document["stages"]
    assert 0 < document["exposed_host_s"] <= stage["host_s"] + sum(stage["transfer_s"].values())
    plan = make_plan(config)
    turn, = {item for item in plan.programs["train"][0] if item.part == "turn" and item.unit == 1}
    priced = cost(plan, Hardware.parse("h100-sxm"), {(0, Op.STEP, 1): 7.0})
    assert priced(0, turn) == 7.0
    assert priced(0, turn._replace(part="begin")) < 1.0 and priced(0, turn._replace(part="end")) < 1.0


def test_the_mesh_is_what_it_was():
    """Only a run that turns matrices opens the group."""
    assert OWNERS not in make_mesh(tiny("parallel.dp=2")).extra
