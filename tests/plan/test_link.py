"""What is found once for all micro-batches is what each of them has: against accounts that follow every
instruction by itself."""

from __future__ import annotations

import gc
import hashlib
import json
import random
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

import pytest

from tests.plan.test_same_plans import CASES, SIZE
from threed.config.load import load
from threed.planner import make_plan
from threed.planner.from_config import config_of
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.hardware import Hardware
from threed.program import forms
from threed.program.analysis import Analysis
from threed.program.effects import _EFFECTS
from threed.program.forms import Forms
from threed.program.instruction import Instruction, Op
from threed.program.link import follow, joined, link, memory
from threed.program.plan import Plan
from threed.program.seam import seam_of
from threed.program.walk import Mode, all_meet, in_turn, walk
from threed.spec.kernels import Product

SPREAD = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "partition", "overlap", "contiguous", "tiles")


@cache
def plan_of(name: str) -> Plan:
    return make_plan(load(None, [*SIZE, *CASES[name], "train.global_batch_size=16"]))


def each_program(plan: Plan):
    """(name, position, program, slots alive before it)."""
    for name, programs in plan.programs.items():
        for position, program in enumerate(programs):
            yield name, position, program, seam_of(plan.table, position, name)


@pytest.mark.parametrize("name", SPREAD)
def test_effects_of_a_form(name):
    """A rule whose slots depend on the micro-batch in another way than by carrying it."""
    plan = plan_of(name)
    known = Forms(plan.table)
    for _, position, program, _ in each_program(plan):
        for item in program:
            assert known.effects(item, position) == _EFFECTS[item.op](item, plan.table, position)


def test_forms_are_shared():
    """Who asks for the forms of one table, one after the other; and they are gone with the table."""
    plan = plan_of("1f1b")
    table, program = make_plan(config_of(plan)).table, plan.programs["train"][0]
    first, again = (Forms(table).of(program, 0) for _ in range(2))
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert first[0] is not Forms(plan.table).of(program, 0)[0] and id(table) in forms._ALIVE
    number, gone = id(table), weakref.ref(table)
    gc.disable()  # a cycle would keep it for long in a search
    try:
        del table
        assert gone() is None and number not in forms._ALIVE
    finally:
        gc.enable()


@pytest.mark.parametrize("name", SPREAD)
def test_links_by_strands(name):
    """A link within a strand that is missing, or is another micro-batch's; a slot that is lost at the end."""
    plan = plan_of(name)
    for _, position, program, start in each_program(plan):
        links = link(program, plan.table, position, start)
        whole = follow(enumerate(links.effects), start)
        producers: list[list[int]] = [[] for _ in program]
        for first, then in whole.pairs:
            producers[then].append(first)
        assert [sorted(row) for row in links.producers] == [sorted(row) for row in producers]
        assert links.alive == whole.alive and not whole.faults


@pytest.mark.parametrize("name", SPREAD)
def test_memory_by_strands(name):
    """Bytes that come an instruction early or late, or stay."""
    plan = plan_of(name)
    for _, position, program, start in each_program(plan):
        links = link(program, plan.table, position, start)
        by_kind = memory(program, plan.table, links, start).by_kind
        alive = {slot: plan.table.size(slot) for slot in start}
        for index, effect in enumerate(links.effects):
            alive |= {slot: plan.table.size(slot) for slot in (*effect.writes, *effect.adds)}
            now = dict.fromkeys(by_kind, 0)
            for slot, size in alive.items():
                now[slot.name] += size
            assert now == {kind: row[index] for kind, row in by_kind.items()}
            for slot in effect.frees:
                alive.pop(slot, None)


@pytest.mark.parametrize("name", SPREAD)
def test_simulated_is_what_is_waited_for(name):
    """The simulator's links give each instruction the time, to the bit, that the engine's waits give it."""
    plan = plan_of(name)
    analysis = Analysis(plan)
    cost = analytic_cost(plan, Hardware(tflops=0.01, link_gbps=3.0, read_gbps=1.0, adapter_gbps=2.0))
    for name, programs in plan.programs.items():
        engines = [analysis.run_links(name, position) for position in range(len(programs))]
        assert walk(programs, analysis.simulated(name), Mode.BUFFERED, cost) == walk(
            programs, engines, Mode.BUFFERED, cost)


@pytest.mark.parametrize("name", SPREAD)
def test_a_walk_without_a_graph(name, monkeypatch):
    """Going from program to program gives the times, to the bit, of the visit of the graph."""
    plan, rng = plan_of(name), random.Random(name)
    analysis = Analysis(plan)
    for name, programs in plan.programs.items():
        links = analysis.simulated(name)
        seconds = [[rng.choice((0.0, rng.random())) for _ in program] for program in programs]
        when = in_turn(links, seconds)
        with monkeypatch.context() as patch:
            patch.setattr("threed.program.walk.in_turn", lambda *_: None)
            assert when == walk(programs, links, Mode.BUFFERED, seconds)


def test_two_programs_as_one():
    """Two steps, one after the other: the second one's strands at the places of the first one's."""
    plan = plan_of("interleaved")
    for position, links in enumerate(Analysis(plan).links("train")):
        program, start = links.program, seam_of(plan.table, position)
        both = link((*program, *program), plan.table, position, start)
        one = joined(links, links)
        assert one.program == both.program and one.alive == both.alive
        assert {pair for strand in one.strands for first, then in strand.pairs
                for pair in zip(strand.indices[first], strand.indices[then])} | set(both.shared) == {
            (first, then) for then, row in enumerate(both.producers) for first in row}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "overlap"])
def test_digest(name):
    """A digest that is not of the whole plan, or is another one than versions before gave to it."""
    plan = plan_of(name)
    later = ("logits", "trains", "messages", "pair")
    table = {name: value for name, value in asdict(plan.table).items() if name not in later}
    streams, overlap = table["zero"].pop("streams"), table["update"].pop("overlap")
    assert (streams, overlap) == (False, name == "overlap")
    table["update"] |= {"delayed": False} | ({"overlap": True} if overlap else {})  # what older versions had
    for unit in table["parameters"].values():
        assert unit.pop("trains") and unit.pop("kind") in ("own", "tied")
        assert not (unit.pop("fold") or unit.pop("optimizer") or unit.pop("dtype") or unit.pop("turning"))
    for unit in table["units"]:  # a unit of an older version said the bytes of a running softmax
        assert unit.pop("output") is None and unit.pop("rings") and not unit.pop("exchanged")
        unit["running_bytes"] = 0
        for which in ("kernels", "again"):  # nor how fast bytes move, nor how many keys attention has
            unit[which] = [kernel if isinstance(kernel, Product) else kernel[:6] for kernel in unit[which]]
    programs = {name: [[item[:-1] for item in program] for program in each]  # (a step had no parts)
                for name, each in plan.programs.items()}
    text = json.dumps([table, programs], sort_keys=True)
    assert plan.digest == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_all_meet(monkeypatch):
    """Programs with a message later: a deadlock in some mode although all calls meet, or none in the mode in
    which all calls block although they do not. And the walk without a graph has no result where it cannot
    end, although the lanes together might."""
    plan, rng, stuck, only_lanes = plan_of("1f1b"), random.Random(4), 0, 0
    for _ in range(150):
        programs = [list(program) for program in plan.programs["train"]]
        program = rng.choice(programs)
        messages = [at for at, item in enumerate(program) if item.op in (Op.SEND, Op.RECV)]
        at, other = sorted(rng.sample(messages, 2))
        program[at:other + 1] = [*program[at + 1:other + 1], program[at]]
        links = [link(each, plan.table, position, seam_of(plan.table, position))
                 for position, each in enumerate(programs)]
        if any(linked.faults for linked in links) or not _same_messages(programs):
            continue
        found = {mode: bool(walk(programs, links, mode).stuck) for mode in Mode}
        assert all_meet(links) == (not found[Mode.BLOCKING]) and any(found.values()) == found[Mode.BLOCKING]
        stuck += found[Mode.BLOCKING]
        seconds = [[rng.random() for _ in program] for program in programs]
        when = in_turn(links, seconds)
        with monkeypatch.context() as patch:
            patch.setattr("threed.program.walk.in_turn", lambda *_: None)
            visited = walk(programs, links, Mode.BUFFERED, seconds)
        assert when == visited or (when is None and found[Mode.BLOCKING])
        only_lanes += when is None and not visited.stuck
    assert stuck > 5 and only_lanes


def _same_messages(programs: Sequence[Sequence[Instruction]]) -> bool:
    """Whether both ends of each channel name the same slots in the same order."""
    ends: dict[tuple[object, ...], list[object]] = {}
    for position, program in enumerate(programs):
        for item in program:
            if item.op in (Op.SEND, Op.RECV):
                pair = (position, item.peer) if item.op == Op.SEND else (item.peer, position)
                ends.setdefault((item.op, *pair, item.kind), []).append(item.slot)
    return all(slots == ends.get((Op.RECV, *channel))
               for (op, *channel), slots in ends.items() if op == Op.SEND)
