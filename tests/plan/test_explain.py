"""`threed show --explain INDEX`: what one instruction is for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import threed
from threed.api.plans import explain
from threed.base.errors import InputError
from threed.cli.main import app
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.in_words import slot_words, unit_words
from threed.program.instruction import BACKWARDS, MESSAGES, PHASES, Op
from threed.program.traffic import sent_by

BASE = ["parallel.dp=2", "parallel.pp=2", "parallel.tp=2", "model.layers=4", "train.global_batch_size=8",
        "train.eval_every=1", "run.verify_every=2", "checkpoint.every=1"]
CPU = ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"]
TRAVEL = ["model.family=tests/families/travelling.py:TRAVELLING"]
FULL = ["activation.policy=full", "activation.partition=true", "activation.offload=cpu"]
# The passes that may put in each op.
PASSES: dict[Op, tuple[str, ...]] = {
    Op.FORWARD: ("order", "recompute"),
    Op.RECOMPUTE: ("recompute",),
    **dict.fromkeys(BACKWARDS, ("order",)),
    **dict.fromkeys(MESSAGES, ("messages", "messages in parts")),
    **dict.fromkeys((Op.GATHER, Op.RELEASE), ("partition", "messages in parts", "zero", "travel")),
    Op.REDUCE: ("zero", "travel"),
    Op.EXCHANGE: ("travel",),
    Op.CLIP: ("zero", "offload the optimizer", "verify"),
    Op.STEP: ("zero", "offload the optimizer", "settle"),
    **dict.fromkeys((Op.OFFLOAD, Op.FETCH), (
        "offload activations", "offload the optimizer", "settle", "offload parameters", "snapshot")),
}


@pytest.mark.parametrize(
    "overrides", [[], CPU, [*CPU, *FULL], ["offload.optimizer=cpu"],
                  ["offload.optimizer=cpu", "offload.overlap=none"],
                  ["parallel.split_messages=on"], TRAVEL,
                  [*TRAVEL, "model.by=gather", "zero.stage=3"]], ids=str)
def test_each_instruction_has_its_pass(overrides):
    """An instruction that is attributed to the wrong pass; slots, ranks or bytes that are not the plan's. (Of
    a long program, every seventh instruction.)"""
    plan = threed.plan(threed.load(None, [*BASE, *overrides]))
    analysis = Analysis(plan)
    for name, programs in plan.programs.items():
        for index in range(0, len(programs[0]), 7 if len(programs[0]) > 100 else 1):
            item = programs[0][index]
            answer = explain(analysis, index, 0, name)
            assert answer.origin in PASSES[item.op], (str(item), answer.origin)
            effect = effects(item, plan.table, 0)
            assert answer.slots.get("reads", ()) == effect.reads
            assert answer.sends == {axis: size for axis, size in sent_by(plan.table, item).items() if size}
            if item.op in PHASES:
                assert set(effect.groups) == set(answer.sends), str(item)
            for after in answer.after:
                assert int(after.split()[0]) < index
            for waits in answer.waits:
                later = explain(analysis, int(waits.split()[0]), 0, name)
                assert f"{index}  {item}" in later.after
            if item.op == Op.CLIP:
                assert answer.ranks == list(range(1, 8))
            if item.op in MESSAGES:
                assert answer.ranks == [4]


def test_a_plan_that_was_changed():
    """Each instruction keeps its pass, though its index is another; what was added by hand has none."""
    plan = threed.plan(threed.load(None, ["parallel.dp=2"]))
    program = plan.programs["train"][0]
    last = next(index for index in reversed(range(len(program))) if program[index].op == Op.GATHER)
    changed = (*program[:last], *program[last + 1:], program[-1])
    other = replace(plan, programs={**plan.programs, "train": [changed]})
    for index in range(last, len(changed) - 1, 4):
        assert explain(other, index).origin == explain(plan, index + 1).origin
    assert explain(other, len(changed) - 1).origin is None


def test_text(capsys):
    """The command line says the same, as text and as JSON."""
    app(["show", "configs/toy.yaml", "--rank", "1", "--explain", "0"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "instruction 0: GATHER p10 (dp)" in said and "put in by     the pass 'zero'" in said
    assert "reads         pshard p10 (on the device" in said and "with ranks    3\n" in said
    app(["show", "configs/toy.yaml", "--rank", "1", "--explain", "0", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["instruction"] == "GATHER p10 (dp)"


def test_what_belongs_to_the_step_before(capsys):
    """With updates at the head of the next step: an explanation says whose update it is, the picture says
    what it leaves out, and a program that computes nothing has no empty picture."""
    config = ["configs/toy.yaml", "parallel.dp=1", "parallel.tp=1", "parallel.pp=1", "offload.optimizer=cpu"]
    analysis = Analysis(threed.plan(threed.load(config[0], config[1:])))
    for index, item in enumerate(analysis.plan.programs["train"][0]):
        when = explain(analysis, index).when
        of_before = item.op == Op.STEP or (item.op == Op.OFFLOAD and item.kind == "gprev")
        assert (when is not None) == (of_before or item.op == Op.CLIP), str(item)
        assert not of_before or str(when).startswith("it is part of the update of the step before"), str(item)
    app(["show", *config], standalone_mode=False)
    assert "the host updates 10 parameter units with the gradients of the step" in capsys.readouterr().out
    app(["show", *config, "--program", "settle"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "micro-batches\nnothing is computed on a device here: the host updates 10 parameter units" in said
    app(["show", *config, "offload.overlap=none"], standalone_mode=False)
    assert "not drawn" not in capsys.readouterr().out


@pytest.mark.parametrize("index", [-1, 10_000])
def test_there_is_no_such_instruction(index):
    """An index of another program, or of none."""
    with pytest.raises(InputError, match=r"program 'train' of rank 0 has instructions 0 to \d+"):
        explain(threed.load("configs/toy.yaml"), index)


def test_each_slot_and_parameter_unit_has_a_name_in_words():
    """Of dense models and of experts, with every feature that brings slots of its own."""
    parts = ["activation.policy=full", "activation.partition=true", "parallel.sequence_parallel=false"]
    configs = [("toy", ["zero.stage=3", "zero.shard_size=1"]), ("toy", ["zero.shard_size=1", *parts]),
               ("toy", ["parallel.schedule=zb-h1", "train.sample_every=1", "train.sample_prompts=[a]"]),
               ("toy", ["parallel.split_messages=on", "offload.optimizer=cpu"]),
               ("toy", ["model.lora_rank=4", "zero.stage=3", "zero.persist_below=1000"]), ("toy-moe", [])]
    seen: dict[str, str] = {}
    for name, overrides in configs:
        plan = threed.plan(threed.load(f"configs/{name}.yaml", overrides))
        table = plan.table
        for position, item in {(position, item) for programs in plan.programs.values()
                               for position, program in enumerate(programs) for item in program}:
            effect = effects(item, table, position)
            slots = (*effect.reads, *effect.writes, *effect.adds, *effect.updates, *effect.frees)
            seen |= {slot.kind: slot_words(slot.kind, table) for slot in slots}
        words = {unit_words(unit) for unit in table.parameters.values()}
        assert len(words) == len(table.parameters)
        assert not any(internal in text for text in words for internal in ("folded", "counted"))
    assert len(seen) > 25
    assert seen["greturned"] == "gradient of answers back at their tokens"
    assert seen["routed"] == "tokens sent to experts"
