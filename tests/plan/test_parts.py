"""Messages in parts, in the plan: which messages are cut, what it costs, and what `check` refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.layouts import full_s, short_s
from threed.base.errors import ConfigError, PlanError
from threed.base.quantity import ring
from threed.config.load import load
from threed.config.validate import warnings
from threed.features.pipeline import message_parts
from threed.features.pipeline.message_parts import cut, in_parts
from threed.layout_search.layout import Layout, config_of
from threed.planner import make_plan
from threed.prediction.analytic import cost
from threed.prediction.contention import step
from threed.prediction.hardware import GroupPlace, Hardware
from threed.prediction.prices import Prices, Travel
from threed.program.analysis import Analysis
from threed.program.check import check_programs
from threed.program.instruction import COMPUTE, MESSAGES, PARTS, WHOLES, Instruction, Op, Slot
from threed.program.plan import Plan
from threed.program.settings import WHOLE_MESSAGES, MessageSettings
from threed.program.summary import stages
from threed.schema import Config
from threed.spec.parameter import Outflow

ON, OFF = "parallel.split_messages=on", "parallel.split_messages=off"
# A message of 1 MiB.
SIZE = ["model.layers=6", "model.hidden=512", "model.heads=8", "model.seq_len=512", "model.vocab=1000",
        "model.tie_embeddings=false", "train.eval_every=1", "run.verify_every=5", "parallel.tp=2",
        "parallel.pp=2", "train.global_batch_size=32"]
INTERLEAVED = ["parallel.schedule=interleaved", "parallel.virtual_stages=2"]


def config_of_these(*others: str) -> Config:
    return load(None, [*SIZE, *others])


def plan_of(*others: str) -> Plan:
    return make_plan(config_of_these(*others))


def channels(plan: Plan, program: str = "train") -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(sender, receiver) of messages in parts, and of whole ones."""
    ends = [(position, item.peer, item.kind) for position, items in enumerate(plan.programs[program])
            for item in items if item.op == Op.SEND]
    return tuple({(here, there) for here, there, kind in ends if (kind in WHOLES) is way}
                 for way in (True, False))  # pyright: ignore[reportReturnType]


def both_ways(*pairs: tuple[int, int]) -> set[tuple[int, int]]:
    return {*pairs, *((there, here) for here, there in pairs)}


# ---------------------------------------------------------------- which messages

NEXT = [(0, 1), (1, 2), (2, 3)]  # of four positions


@pytest.mark.parametrize("others, cuts", [
    (["parallel.dp=4"], [(0, 1)]),  # a position is a node
    (["parallel.dp=2"], []),  # all is one node
    (["parallel.dp=2", "parallel.pp=4"], [(1, 2)]),
    (["parallel.dp=8", "parallel.pp=4"], NEXT),
    (["parallel.dp=2", "parallel.pp=4", *INTERLEAVED], [(1, 2), (3, 0)]),  # and from the last to the first
    (["parallel.dp=1", "parallel.tp=8"], [(0, 1)]),
    (["parallel.dp=1", "parallel.tp=4", "parallel.pp=4"], [(1, 2)]),
    (["parallel.dp=4", "parallel.pp=4", "parallel.axis_order=dp-pp-tp"], []),  # the pipeline is a node
    (["parallel.dp=8", "parallel.axis_order=pp-tp-dp"], []),  # a tp group is not inside a node
    (["parallel.dp=4", "parallel.schedule=zb-v"], [(0, 1)]),  # no message at the turn
    (["parallel.dp=4", "parallel.tp=1"], []),
    (["parallel.dp=16", "parallel.pp=1"], []),
    (["parallel.dp=4", "parallel.sequence_parallel=true"], []),
    (["parallel.dp=4", "run.device=cpu"], []),
    (["parallel.dp=4", "model.seq_len=511"], []),  # less than 1 MiB
    (["parallel.dp=4", "precision.dtype=bf16"], []),
    (["parallel.dp=4", "precision.dtype=bf16", "train.micro_batch_size=2"], [(0, 1)]),
], ids=lambda value: "-".join(map(str, value)))
def test_auto(others, cuts):
    """Messages between nodes of 8, and no others; and where there are none, the plan is that without."""
    plan = plan_of(*others)
    for program in ("train", "evaluate", "verify"):
        in_pieces, whole = channels(plan, program)
        if program == "evaluate":
            assert in_pieces <= both_ways(*cuts) and not in_pieces & whole
        else:
            assert in_pieces == both_ways(*cuts) and not in_pieces & whole
    if not cuts:
        assert plan.digest == plan_of(*others, OFF).digest and plan.table.messages == WHOLE_MESSAGES


@pytest.mark.parametrize("others, does", [
    ([], True), (["model.seq_len=4", "run.device=cpu"], True), (["parallel.tp=1"], False),
    (["parallel.pp=1"], False), (["parallel.sequence_parallel=true"], False)])
def test_on(others, does):
    """All messages, wherever their ranks are; where there is nothing to cut, a warning says so."""
    config = config_of_these("parallel.dp=1", *others, ON)
    pieces, whole = channels(make_plan(config))
    assert (bool(pieces), bool(whole)) == (does, not does and config.parallel.pp > 1)
    said = [line for line in warnings(config) if "parallel.split_messages" in line]
    assert bool(said) == (not does), said
    assert not [line for line in warnings(config_of_these(*others)) if "split_messages" in line]


def test_a_value_that_means_nothing():
    with pytest.raises(ConfigError, match=r"parallel\.split_messages=always: must be one of auto, on, off"):
        config_of_these("parallel.split_messages=always")


def test_what_does_not_divide_is_whole():
    """A message whose elements tp does not divide, or that is no flat buffer."""
    plan = plan_of("parallel.dp=1", OFF)
    table, programs = plan.table, [list(program) for program in plan.programs["train"]]
    three = cut(table, MessageSettings("tp", 3))
    assert three == table and in_parts(programs, three) == programs
    assert in_parts(programs, replace(table, messages=MessageSettings("tp", 3))) == programs
    end = max(table.units_of(0))
    for output, divides in ((Outflow(64, 48), {"act": True, "grad": True}),
                            (Outflow(64, 36), {"act": True, "grad": False}),
                            (Outflow(64, 0), {"act": True, "grad": False}),
                            (Outflow(64, 64, False), {"act": False, "grad": False})):
        units = (*table.units[:end], replace(table.units[end], output=output), *table.units[end + 1:])
        other = replace(table, units=units, messages=MessageSettings("tp", 2))
        made = [item for program in in_parts(programs, other) for item in program if item.op == Op.SEND]
        assert {item.kind for item in made} == {PARTS[kind] if way else kind for kind, way in divides.items()}
        check_programs("train", [tuple(program) for program in in_parts(programs, other)], other)


# ---------------------------------------------------------------- the programs

SCHEDULES = [[f"parallel.schedule={name}"] for name in ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe-v")]
WAYS = [["parallel.dp=2", "zero.stage=3", "activation.policy=full", "activation.partition=true"],
        ["parallel.dp=1"]]


@pytest.mark.parametrize("schedule, way", [*itertools.product([*SCHEDULES, INTERLEAVED], WAYS)], ids=str)
def test_each_message(schedule, way):
    """RELEASE stands right before its SEND. GATHER stands before what reads the value and behind what does
    not, so that nothing waits for a message sooner than it did: RECOMPUTE runs before its gradient comes."""
    plan, whole = (plan_of(*schedule, *way, other) for other in (ON, OFF))
    for name, programs in plan.programs.items():
        for program, before in zip(programs, whole.programs[name]):
            assert [item for item in program
                    if not item.of_slot or item.kind == "kept"] == [
                item._replace(kind=PARTS[item.kind]) if item.op in MESSAGES else item for item in before]
            for index, item in enumerate(program):
                if item.kind in ("act", "grad"):
                    assert item.of_slot
                    then = program[index + 1]
                    if item.op == Op.RELEASE:
                        assert then == item._replace(op=Op.SEND, kind=PARTS[item.kind], peer=then.peer)
                    else:
                        then = next(each for each in program[index:] if each.op in COMPUTE)
                        unit = item.unit + (item.kind == "act")
                        assert then.turn == (unit, item.microbatch) and then.op != Op.RECOMPUTE


@pytest.mark.parametrize("others", [["parallel.dp=1"], ["parallel.dp=1", "parallel.schedule=zb-h1"],
                                    ["parallel.dp=1", *INTERLEAVED]], ids=str)
def test_none_can_be_left_out(others):
    """A RELEASE, GATHER or message that is left out, runs twice, or is of another micro-batch or kind."""
    plan = plan_of(*others, "train.global_batch_size=3", "run.verify_every=0", ON)
    tried = 0
    for position, program in enumerate(plan.programs["train"]):
        for index, item in enumerate(program):
            if not item.of_slot and item.op not in MESSAGES:
                continue
            other = {**PARTS, **WHOLES}[item.kind]
            for changed in ((), (item, item), (item._replace(microbatch=item.microbatch ^ 1),),
                            (item._replace(kind=other),), (item._replace(unit=item.unit + 1),)):
                programs = list(plan.programs["train"])
                programs[position] = (*program[:index], *changed, *program[index + 1:])
                with pytest.raises(PlanError):
                    check_programs("train", programs, plan.table)
                tried += 1
    assert tried > 100


def test_a_plan_without_parts_has_no_such_instructions():
    """RELEASE of a message, or a message of a part, in a plan in which no message is cut."""
    plan = plan_of("parallel.dp=1", OFF)
    at = next(index for index, item in enumerate(plan.programs["train"][0]) if item.op == Op.SEND)
    send = plan.programs["train"][0][at]
    for changed in ((Instruction(Op.RELEASE, send.unit, send.microbatch, kind="act"), send),
                    (send._replace(kind="actpart"),)):
        programs = list(plan.programs["train"])
        programs[0] = (*programs[0][:at], *changed, *programs[0][at + 1:])
        with pytest.raises(PlanError, match="names something that does not exist"):
            check_programs("train", programs, plan.table)


# ---------------------------------------------------------------- sizes and prices

FAR = ["parallel.dp=1", "parallel.tp=8", "precision.dtype=bf16", "train.micro_batch_size=4"]


def test_sizes():
    """Bytes that a rank sends, and what is alive: of what waits, a part."""
    whole, pieces = plan_of(*FAR, OFF), plan_of(*FAR)
    act = whole.table.act_bytes
    assert pieces.table.size(Slot("actpart", 3, 0)) == pieces.table.size(Slot("gradpart", 3, 0)) == act // 8
    m = whole.table.num_microbatches
    for before, after in zip(stages(Analysis(whole)), stages(Analysis(pieces))):
        assert before.sent_bytes["pp"] == 8 * after.sent_bytes["pp"] == m * act
        assert after.sent_bytes["tp"] - before.sent_bytes["tp"] == m * ring(act, 8)
        # While GATHER makes the whole, the part is alive, too.
        assert after.activation_peak_bytes <= before.activation_peak_bytes + act // 8
    gpipe = ["parallel.schedule=gpipe", *FAR]
    before, after = (stages(Analysis(plan_of(*gpipe, way)))[1].slot_peak_bytes
                     for way in (OFF, "zero.stage=1"))
    assert after["act"] + after["actpart"] < before["act"] + act


def test_prices():
    """SEND takes an adapter's time for a part; RELEASE and GATHER take memory's and NVLink's."""
    plan, hardware = plan_of(*FAR), Hardware.parse("a100-sxm")
    priced, act, travel = cost(plan, hardware), plan.table.act_bytes, Travel(hardware)
    send = next(item for item in plan.programs["train"][0] if item.op == Op.SEND)
    assert priced(0, send) == travel.message(act // 8, True) < travel.message(act, True) / 4
    cut = Instruction(Op.RELEASE, send.unit, 0, kind="act")
    gather = Instruction(Op.GATHER, send.unit, 0, kind="act", group="tp")
    assert priced(0, cut) == Prices(hardware, 2).moved(act // 4)
    assert priced(1, gather) == travel.ring(ring(act, 8), GroupPlace(range(8), 8))


@pytest.mark.parametrize("hardware, least", [("a100-sxm", 0.02), ("a100-sxm,adapter_gbps=25", 0.5)])
def test_it_pays(hardware, least):
    """A step of a deep pipeline is shorter, the more the slower the links between nodes are."""
    machine = Hardware.parse(hardware)
    deep = [*FAR, "parallel.pp=8", "train.global_batch_size=64"]
    whole_s, parts_s = (step(Analysis(plan), cost(plan, machine), machine).total_s
                        for plan in (plan_of(*deep, OFF), plan_of(*deep)))
    assert whole_s / parts_s - 1 > least, (whole_s, parts_s)


@pytest.mark.parametrize("layout", [
    Layout(8, 4, 2, micro_batch_size=2, policy="full"),
    Layout(4, 3, 4, schedule="zb-h1", stage=3, residency=1, reduce_every=1),
    Layout(2, 4, 2, schedule="interleaved", virtual_stages=2, policy="selective"),
    Layout(8, 2, 2, schedule="zb-v", virtual_stages=2, policy="full", stage=2, reduce_every=1),
    Layout(4, 4, 4, "dp-pp-tp", offload_optimizer=True)], ids=lambda layout: layout.text())
@pytest.mark.parametrize("way", ["auto", "on"])
def test_search_agrees(layout, way):
    """Short plans against the full plan."""
    layout = layout._replace(shard_size=layout.dp)
    base = load("configs/llama3-8b.yaml", ["model.layers=10", "train.global_batch_size=64",
                                           "train.eval_every=0", "checkpoint.every=0",
                                           "parallel.sequence_parallel=false",
                                           f"parallel.split_messages={way}"])
    hardware = Hardware.parse("a100-sxm,adapter_gbps=50")
    config = config_of(layout, base)
    assert make_plan(config).table.messages.group == "tp"
    assert short_s(config, hardware) == pytest.approx(full_s(config, hardware), rel=0.002)


def test_the_size_of_a_node(monkeypatch):
    """`auto` asks for no machine: the same config gives the same plan, but for a constant."""
    four = ["parallel.dp=2"]
    assert not channels(plan_of(*four))[0]
    monkeypatch.setattr(message_parts, "NODE_RANKS", 4)
    assert channels(plan_of(*four))[0] == both_ways((0, 1))
