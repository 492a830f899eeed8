"""Faults that people make, each refused with position, index, neighbours and reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import pytest

from tests.harness import tiny
from threed.base.errors import PlanError
from threed.config.load import load
from threed.planner import make_plan
from threed.program.check import check_programs, describe
from threed.program.effects import effects
from threed.program.instruction import COLLECTIVES, FIELDS, MOVES, Instruction, Op
from threed.program.link import link
from threed.program.plan import Plan
from threed.program.seam import seam_of
from threed.program.walk import Mode, walk

F, B, S, R = Op.FORWARD, Op.BACKWARD, Op.SEND, Op.RECV


@cache
def plan_of(*overrides: str) -> Plan:
    """Two positions of three units, three micro-batches, tied embeddings, ZeRO-1."""
    return make_plan(load(None, ["model.layers=4", "parallel.pp=2", "parallel.dp=2",
                                 "train.global_batch_size=6",
                                 "parallel.stage_units=[3,3]", "train.eval_every=1", *overrides]))


def parse(text: str, program: Sequence[Instruction]) -> int:
    """The place of the instruction that prints as `text`."""
    return [str(instruction) for instruction in program].index(text)


def fault(programs: Sequence[Sequence[Instruction]], plan: Plan, name: str = "train") -> str:
    with pytest.raises(PlanError) as caught:
        check_programs(name, [tuple(program) for program in programs], plan.table)
    return str(caught.value)


def without(text: str, position: int = 0, plan: Plan | None = None, name: str = "train") -> str:
    plan = plan or plan_of()
    programs = [list(program) for program in plan.programs[name]]
    del programs[position][parse(text, programs[position])]
    return fault(programs, plan, name)


def moved(text: str, behind: str, position: int = 0) -> str:
    """The fault when an instruction runs right after another."""
    plan = plan_of()
    programs = [list(program) for program in plan.programs["train"]]
    program = programs[position]
    instruction = program.pop(parse(text, program))
    program.insert(parse(behind, program) + 1, instruction)
    return fault(programs, plan)


def expect(message: str, position: int, at: str, reason: str) -> None:
    """The four parts of a message: position and index, the instruction, its neighbours, the reason."""
    first, *rest = message.splitlines()
    place = re.match(rf"program '\w+', position pp{position}, instruction (\d+) of \d+: ", first)
    assert place and reason in first, message
    here = [line for line in rest if line.startswith("  > ")]
    assert len(here) == 1 and here[0].split(maxsplit=2)[1:] == [place.group(1), at], message
    assert 2 <= len(rest) <= 5 and rest.index(here[0]) in (0, 1, 2), "neighbours on both sides"


def test_the_plan_itself_passes():
    """Without this, every refusal below could be for another reason."""
    plan = plan_of()
    for name, programs in plan.programs.items():
        assert len(check_programs(name, programs, plan.table)) == 2


@pytest.mark.parametrize("text, position, at, reason", [
    ("BACKWARD u3 m1", 1, "SEND grad u2 m1 -> pp0", "reads 'grad u2 m1', which is not alive"),
    ("BACKWARD u0 m2", 0, "STEP p6", "leaves 'grad u0 m2' behind"),
    ("FORWARD u1 m1", 0, "FORWARD u2 m1", "reads 'act u1 m1', which is not alive"),
    ("SEND act u2 m1 -> pp1", 0, "STEP p6", "leaves 'act u2 m1' behind"),
    ("RECV act u2 m0 <- pp0", 1, "FORWARD u3 m0", "reads 'act u2 m0', which is not alive"),
    ("GATHER p1 (dp)", 0, "FORWARD u1 m0", "reads 'param p1', which is not alive"),
    ("REDUCE p1 (dp)", 0, "CLIP", "reads 'gshard p1', which is not alive"),
    ("REDUCE p6 (dp)", 1, "REDUCE p6 (tie)", "reads 'gpart p6', which is not alive"),
    ("REDUCE p6 (tie)", 1, "CLIP", "reads 'gshard p6', which is not alive"),
    ("CLIP", 0, "STEP p1", "reads 'scale', which is not alive"),
    ("STEP p1", 0, "STEP p6", "leaves 'gshard p1' behind"),
])
def test_missing(text, position, at, reason):
    """Any instruction that is left out: a backward, a message, a gather, a reduction, the other half of a
    tie, a step."""
    expect(without(text, position), position, at, reason)


@pytest.mark.parametrize("text, behind, position, at, reason", [
    ("REDUCE p1 (dp)", "CLIP", 0, "CLIP", "reads 'gshard p1', which is not alive"),
    ("REDUCE p1 (dp)", "BACKWARD u1 m1", 0, "STEP p6", "leaves 'wgrad p1' behind"),
    ("REDUCE p6 (tie)", "REDUCE p1 (dp)", 0, "REDUCE p6 (tie)", "reads 'gpart p6', which is not alive"),
    ("STEP p1", "REDUCE p6 (tie)", 0, "STEP p1", "reads 'scale', which is not alive"),
    ("FORWARD u0 m2", "STEP p6", 0, "FORWARD u1 m2", "reads 'act u0 m2', which is not alive"),
    ("FORWARD u5 m2", "STEP p6", 1, "BACKWARD u5 m2", "reads 'saved u5 m2', which is not alive"),
    ("GATHER p2 (dp)", "FORWARD u2 m0", 0, "FORWARD u2 m0", "reads 'param p2', which is not alive"),
    ("GATHER p2 (dp)", "STEP p2", 0, "FORWARD u2 m0", "reads 'param p2', which is not alive"),
    ("BACKWARD u3 m0", "SEND grad u2 m0 -> pp0", 1, "SEND grad u2 m0 -> pp0",
     "reads 'grad u2 m0', which is not"),
    ("RECV act u2 m0 <- pp0", "FORWARD u3 m0", 1, "FORWARD u3 m0", "reads 'act u2 m0', which is not alive"),
])
def test_out_of_order(text, behind, position, at, reason):
    """REDUCE after CLIP or before the last gradient, STEP before CLIP, FORWARD after STEP, use before
    arrival."""
    expect(moved(text, behind, position), position, at, reason)


@pytest.mark.parametrize("text, where, position, at, reason", [
    ("GATHER p1 (dp)", "FORWARD u2 m1", 0, "GATHER p1 (dp)", "writes 'param p1', which is already alive"),
    ("GATHER p1 (dp)", "STEP p1", 0, "STEP p6", "leaves 'param p1' behind"),
    ("FORWARD u0 m0", "FORWARD u0 m0", 0, "FORWARD u0 m0", "writes 'act u0 m0', which is already alive"),
    ("BACKWARD u4 m1", "BACKWARD u4 m1", 1, "BACKWARD u4 m1", "reads 'saved u4 m1', which is not alive"),
    ("SEND act u2 m0 -> pp1", "SEND act u2 m0 -> pp1", 0, "SEND act u2 m0 -> pp1",
     "reads 'act u2 m0', which is not"),
    ("RECV act u2 m0 <- pp0", "RECV act u2 m0 <- pp0", 1, "RECV act u2 m0 <- pp0",
     "writes 'act u2 m0', which is al"),
    ("REDUCE p1 (dp)", "BACKWARD u1 m1", 0, "REDUCE p1 (dp)", "writes 'gshard p1', which is already alive"),
    ("CLIP", "CLIP", 0, "CLIP", "writes 'scale', which is already alive"),
    ("STEP p1", "STEP p1", 0, "STEP p1", "reads 'gshard p1', which is not alive"),
])
def test_twice(text, where, position, at, reason):
    """Any instruction that comes twice: a second gather overwrites what is read, a second reduction the
    first."""
    plan = plan_of()
    programs = [list(program) for program in plan.programs["train"]]
    program = programs[position]
    program.insert(parse(where, program) + 1, program[parse(text, program)])
    expect(fault(programs, plan), position, at, reason)


def test_unit_runs_too_often_or_not_at_all():
    """Slots alone would accept an untied last unit that runs forward and backward twice: completeness does
    not."""
    plan = plan_of("parallel.pp=1", "parallel.stage_units=[6]")
    program = [item for item in plan.programs["train"][0] if item.microbatch != 1]
    expect(fault([program], plan), 0, "STEP p6", "'FORWARD u0 m1' runs 0 times here, not 1")
    program = list(plan.programs["train"][0])
    first = parse("FORWARD u0 m0", program)
    again = [item for item in program if item.microbatch == 0]
    expect(fault([program[:first] + again + program[first:]], plan), 0, "FORWARD u0 m0",
           "'FORWARD u0 m0' runs 2 times here, not 1")


@pytest.mark.parametrize("old, change, reason", [
    ("FORWARD u1 m0", {"unit": 9}, "names something that does not exist: FORWARD u9 m0"),
    ("FORWARD u1 m0", {"unit": -1}, "names something that does not exist: FORWARD m0"),
    ("REDUCE p1 (dp)", {"unit": 9}, "names something that does not exist: p9 has no reduction over 'dp'"),
    ("REDUCE p1 (dp)", {"group": "tie"}, "p1 has no reduction over 'tie'"),
    ("REDUCE p1 (dp)", {"group": "world"}, "p1 has no reduction over 'world'"),
    ("GATHER p1 (dp)", {"unit": 9}, "p9 is sharded over nothing, not 'dp'"),
    ("GATHER p1 (dp)", {"unit": 3}, "reads 'pshard p3', which is not alive"),
    ("GATHER p1 (dp)", {"group": "tp"}, "p1 is sharded over dp, not 'tp'"),
    ("SEND act u2 m0 -> pp1", {"kind": "saved"}, "messages are act or grad, or parts of them"),
    ("FORWARD u1 m0", {"keep": "some"}, "names something that does not exist"),
    ("FORWARD u1 m0", {"group": "dp"}, "sets group, which FORWARD does not use"),
    ("STEP p1", {"microbatch": 1, "peer": 0}, "sets microbatch and peer, which STEP does not use"),
    ("CLIP", {"unit": 2}, "sets unit, which CLIP does not use"),
])
def test_names_that_mean_nothing(old, change, reason):
    """A unit, group or field that does not exist would be ignored or fail on all ranks at once."""
    plan = plan_of()
    programs = [list(program) for program in plan.programs["train"]]
    index = parse(old, programs[0])
    programs[0][index] = programs[0][index]._replace(**change)
    expect(fault(programs, plan), 0, str(programs[0][index]), reason)


@pytest.mark.parametrize("old, change, position, at, reason", [
    ("FORWARD u1 m0", {"keep": "none"}, 0, "BACKWARD u1 m0", "reads 'saved u1 m0', which is not alive"),
    ("CLIP", {"gradients": "none"}, 0, "CLIP gradients=none", "CLIP must run once, over gradients"),
    ("SEND act u2 m0 -> pp1", {"peer": 5}, 0, "SEND act u2 m0 -> pp5", "there is no such peer"),
    ("SEND act u2 m0 -> pp1", {"peer": 0}, 0, "SEND act u2 m0 -> pp0", "there is no such peer"),
    ("RECV act u2 m0 <- pp0", {"peer": -1}, 1, "RECV act u2 m0 <- pp-1", "there is no such peer"),
])
def test_wrong_peer_or_keep(old, change, position, at, reason):
    """A message to nobody; a clipping that leaves out the gradients."""
    plan = plan_of()
    programs = [list(program) for program in plan.programs["train"]]
    index = parse(old, programs[position])
    programs[position][index] = programs[position][index]._replace(**change)
    expect(fault(programs, plan), position, at, reason)


def swap(program: list[Instruction], first: str, second: str) -> None:
    i, j = parse(first, program), parse(second, program)
    program[i], program[j] = program[j], program[i]


def test_swapped_receives():
    """There are no tags: a receive that comes in another order gets another micro-batch's values, without any
    error."""
    plan = plan_of("parallel.schedule=gpipe")
    programs = [list(program) for program in plan.programs["train"]]
    for program in programs[1:]:  # all receives first, in the wrong order
        receives = [item for item in program if item.op == R]
        program[:] = [receives[1], receives[0], *receives[2:], *(item for item in program if item.op != R)]
    expect(fault(programs, plan), 1, "RECV act u2 m1 <- pp0",
           "message 0 of act from pp0 is 'SEND act u2 m0 -> pp1'")


def test_a_message_that_only_one_end_knows():
    """A receive without a send hangs the run; a send without a receive is refused too, at either end."""
    plan = plan_of()
    programs = [list(program) for program in plan.programs["train"]]
    send = parse("SEND grad u2 m2 -> pp0", programs[1])
    programs[1][send] = programs[1][send]._replace(peer=0, kind="act")
    assert "position pp1" in fault(programs, plan)
    alone = plan_of("parallel.pp=1", "parallel.stage_units=[6]")
    assert "has 1 positions, but the table has 2" in fault(alone.programs["train"], plan)
    programs = [list(program) for program in plan.programs["evaluate"]]
    mine = parse("SEND act u2 m1 -> pp1", programs[0])
    programs[0][mine] = Instruction(S, 2, 1, "grad", peer=1)
    expect(fault(programs, plan, "evaluate"), 0, "SEND grad u2 m1 -> pp1",
           "reads 'grad u2 m1', which is not alive")


def stuck(programs: Sequence[Sequence[Instruction]], plan: Plan) -> list[bool]:
    """Which of the three modes find a deadlock."""
    links = [link(program, plan.table, p, seam_of(plan.table, p)) for p, program in enumerate(programs)]
    assert not any(ends.faults for ends in links)
    return [bool(walk(programs, links, mode).stuck) for mode in Mode]


@pytest.mark.parametrize("position, first, second, modes", [
    (1, "RECV act u2 m2 <- pp0", "SEND grad u2 m1 -> pp0", (False, True, True)),
    (0, "SEND act u2 m2 -> pp1", "RECV grad u2 m1 <- pp1", (False, False, True))])
def test_deadlock_in_some_modes_only(position, first, second, modes):
    """Where pp0 sends an activation and pp1 a gradient. Both SEND first: fine while sends are buffered, a
    hang as soon as a message is large. Both RECV first: fine while receives are posted ahead, a hang where
    every call blocks."""
    plan = plan_of()
    programs = [list(program) for program in plan.programs["train"]]
    swap(programs[position], first, second)
    assert stuck(programs, plan) == list(modes)
    message = fault(programs, plan)
    assert message.startswith(f"deadlock ({list(Mode)[modes.index(True)].value})")
    for part in ("position pp0", "position pp1", "never runs", " u2 m2 ", " u2 m1 "):
        assert part in message
    assert message.count("  > ") == 2, "one instruction for each position that waits"


def test_cycle_in_the_order():
    """pp0 wants the gradient of m0 before it runs m1, pp1 wants m1 before it gives that gradient: never, in
    any mode."""
    plan = plan_of("parallel.schedule=gpipe")
    programs = [list(program) for program in plan.programs["train"]]
    program = programs[0]
    early = [item for item in program if item.microbatch == 0]
    gathers = [item for item in program if item.op == Op.GATHER]
    programs[0] = [*gathers, *early, *(item for item in program if item not in early and item not in gathers)]
    assert stuck(programs, plan) == [True, True, True]
    message = fault(programs, plan)
    assert message.startswith("deadlock (buffered)")
    assert "position pp0" in message
    assert "position pp1" in message


def test_collectives_of_positions_meet():
    """CLIP and the tie's REDUCE are one call of several positions: in another order on each, they wait for
    ever."""
    plan = plan_of()
    programs = [list(program) for program in plan.programs["evaluate"]]
    program = programs[0]
    # pp0 has no loss: for its slots any place will do
    program.insert(0, program.pop(parse("CLIP gradients=none", program)))
    message = fault(programs, plan, "evaluate")
    assert message.startswith("deadlock (buffered)") and "CLIP gradients=none" in message


def test_tie_on_one_end_only():
    """A tie that only one end reduces: a hang at the last position."""
    table = plan_of("model.tie_embeddings=false").table
    untied = plan_of("model.tie_embeddings=false").programs["train"]
    assert not any(item.group == "tie" for program in untied for item in program)
    programs = [list(untied[0]), list(untied[1])]
    programs[1].insert(-1, Instruction(Op.REDUCE, 5, group="tie"))
    assert "p5 has no reduction over 'tie'" in fault(programs, Plan(table, {}))


def evaluating(change) -> str:
    plan = plan_of()
    programs = [list(program) for program in plan.programs["evaluate"]]
    change(programs)
    return fault(programs, plan, "evaluate")


@pytest.mark.parametrize("text, position, at, reason", [
    ("FORWARD u5 m1 keep=none", 1, "CLIP gradients=none", "leaves 'act u4 m1' behind"),
    ("RELEASE p3", 1, "CLIP gradients=none", "leaves 'param p3' behind"),
    ("CLIP gradients=none", 1, "RELEASE p6", "leaves 'loss' behind"),
    ("CLIP gradients=none", 0, "SEND act u2 m2 -> pp1", "CLIP must run once"),
    ("GATHER p3 (dp)", 1, "FORWARD u3 m0 keep=none", "reads 'param p3', which is not alive"),
])
def test_evaluate_lacks_something(text, position, at, reason):
    """An evaluation that leaves a batch out, keeps parameters, or never tells the loss."""
    expect(without(text, position, name="evaluate"), position, at, reason)


def test_evaluate_does_something_else():
    """An evaluation that keeps activations, or that trains; a training program that only evaluates."""
    def keeps(programs):
        programs[1] = [item._replace(keep="all") if item.op == F else item for item in programs[1]]

    def clips(programs):
        programs[0] = [item._replace(gradients="step") if item.op == Op.CLIP else item
                       for item in programs[0]]

    assert "leaves 'saved u3 m0' behind" in evaluating(keeps)
    assert "reads 'gshard" in evaluating(clips)
    plan = plan_of()
    assert "runs 1 times here, not 0" in fault(plan.programs["train"], plan, "evaluate")
    assert "runs 0 times here, not 1" in fault(plan.programs["evaluate"], plan)


def test_a_step_that_is_never_taken():
    """ZeRO-0 keeps its gradient whole and its parameters resident: a STEP that is missing must show all the
    same."""
    plan = plan_of("zero.stage=0")
    expect(without("STEP p2", 0, plan), 0, "STEP p6", "leaves 'gshard p2' behind")
    programs = [list(program) for program in plan.programs["train"]]
    programs[0].insert(0, Instruction(Op.GATHER, 1, group="dp"))
    expect(fault(programs, plan), 0, "GATHER p1 (dp)", "reads 'pshard p1', which is not alive")


def test_split_backward_is_complete_or_refused():
    """BACKWARD in two halves: both once, the input's first, the reduction after the last weight gradient."""
    plan = plan_of("parallel.pp=1", "parallel.stage_units=[6]")
    program = list(plan.programs["train"][0])

    def halves(order: str) -> list[Instruction]:
        parts = {"I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
        return [new for item in program for new in
                ([item._replace(op=parts[letter]) for letter in order] if item.op == B else [item])]

    check_programs("train", [halves("IW")], plan.table)
    assert "reads 'operands u5 m0', which is not alive" in fault([halves("WI")], plan)
    assert "reads 'wgrad p5', which is not alive" in fault([halves("I")], plan)
    late = halves("IW")
    weight = late.pop(parse("BACKWARD_WEIGHT u3 m2", late))
    late.insert(parse("REDUCE p3 (dp)", late) + 1, weight)
    assert "leaves 'wgrad p3' behind" in fault([late], plan)


def test_describe_at_the_ends():
    """A message about the first or the last instruction, or about an empty program, has the neighbours that
    exist."""
    program = plan_of().programs["train"][0]
    assert len(describe("train", [program], 0, 0, "x").splitlines()) == 4
    assert len(describe("train", [program], 0, len(program) - 1, "x").splitlines()) == 4
    assert "leaves" in fault([program[:-1], plan_of().programs["train"][1]], plan_of())
    assert "position pp0" in fault([(), plan_of().programs["train"][1]], plan_of())


def test_every_op_has_effects_and_fields():
    """A new op that is forgotten in one of the two places where its meaning is."""
    assert set(FIELDS) == set(Op)
    table = make_plan(tiny("model.family=tests/families/travelling.py:TRAVELLING", "parallel.dp=2")).table
    for op in Op:
        kind = {S: "act", R: "act", **dict.fromkeys(MOVES, "kept"), Op.EXCHANGE: "sent"}.get(op, "")
        group = "dp" if op in COLLECTIVES else ""
        microbatch = -1 if op in (Op.GATHER, Op.REDUCE, Op.RELEASE) else 0
        assert effects(Instruction(op, 1, microbatch, kind, group=group, peer=1), table, 0).lane
