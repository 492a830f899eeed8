"""The program `generate`: what is in it, what it costs, and that edits of it are refused."""

from __future__ import annotations

import random

import pytest

import threed
from threed.base.errors import InputError, PlanError
from threed.config.load import load
from threed.models.layers.head import Head
from threed.planner import forward_plan, make_plan
from threed.program.check import check
from threed.program.effects import effects
from threed.program.instruction import Instruction, Op, Slot
from threed.program.names import EVALUATE, GENERATE
from threed.program.plan import Plan
from threed.program.seam import seam_of
from threed.program.traffic import sent_by

TINY = ["model.layers=3", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=60",
        "model.vocab_multiple=16", "train.global_batch_size=8", "train.sample_prompts=[a,b,c]"]
MESHES = {
    "one": [], "tp": ["parallel.tp=2"], "pp": ["parallel.pp=2"],
    "v": ["parallel.pp=2", "parallel.schedule=zb-v"],
    "zero-3": ["parallel.dp=2", "zero.stage=3"],
    "tiles": ["parallel.tp=2", "parallel.dp=2", "zero.stage=3", "model.tile_linears=1KiB",
              "model.tie_embeddings=false"],
}


def plan_of(*others: str) -> Plan:
    return forward_plan(load(None, [*TINY, *others]), GENERATE)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_head_makes_logits_for_each_micro_batch(mesh):
    """Enough micro-batches for the prompts, whatever a step has; the logits of each tile are left behind, and
    nothing else is."""
    plan = plan_of(*MESHES[mesh])
    table, programs = plan.table, plan.programs[GENERATE]
    dp = 2 if "parallel.dp=2" in MESHES[mesh] else 1
    assert table.microbatches(GENERATE) == (2 if dp == 2 else 3) and table.logits is not None
    left = {slot for position in range(len(programs))
            for slot in seam_of(table, position, GENERATE, end=True) - seam_of(table, position, GENERATE)}
    heads = [u for u, unit in enumerate(table.units) if unit.name.startswith("head")]
    assert left == {Slot("logits", u, m) for u in heads for m in range(table.microbatches(GENERATE))}
    tp = 2 if "parallel.tp=2" in MESHES[mesh] else 1
    for unit in heads:
        assert table.size(Slot("logits", unit, 0)) == 64 // len(heads) * 4
        item = Instruction(Op.FORWARD, unit, 0, keep="logits")
        assert effects(item, table, table.position(unit)).groups == (("tp",) if tp > 1 else ())
        assert sent_by(table, item) == {"tp": 64 // len(heads) * 4 * (tp - 1) // tp}
    assert not any(item.op == Op.CLIP for program in programs for item in program)


def test_a_plan_that_trains_has_it_where_asked():
    """With train.sample_every alone; and what it adds changes no other program."""
    without = make_plan(load(None, [*TINY, "parallel.pp=2"]))
    asked = make_plan(load(None, [*TINY, "parallel.pp=2", "train.sample_every=5"]))
    assert GENERATE not in without.programs and without.digest != asked.digest
    assert {**asked.programs, GENERATE: None} == {**without.programs, GENERATE: None}
    assert "FORWARD u4 m2 keep=logits" in threed.show(asked, rank=1, program=GENERATE)


def test_ranks_that_train_nothing():
    plan = forward_plan(load(None, TINY), EVALUATE)
    assert list(plan.programs) == [EVALUATE] and not plan.table.trains and plan.table.logits is None


def test_a_model_that_makes_no_logits(monkeypatch):
    monkeypatch.setattr(Head, "logits", lambda self, share: None)
    with pytest.raises(InputError, match="family=gpt: no layer of the model makes logits"):
        plan_of()


@pytest.mark.parametrize("mesh", MESHES)
def test_edits_of_the_program_are_refused(mesh):
    """Each instruction left out, and each FORWARD that keeps something else."""
    plan = plan_of(*MESHES[mesh])
    rng, tried = random.Random(1), 0
    for position, program in enumerate(plan.programs[GENERATE]):
        for index, item in rng.sample(list(enumerate(program)), min(25, len(program))):
            changed = [program[:index] + program[index + 1:]]
            if item.op == Op.FORWARD:
                changed += [(*program[:index], item._replace(keep=keep), *program[index + 1:])
                            for keep in ("all", "input", "none")]
            for edited in changed:
                programs = list(plan.programs[GENERATE])
                programs[position] = edited
                tried += 1
                with pytest.raises(PlanError):
                    check(Plan(plan.table, {GENERATE: programs}))
    assert tried > 25


def test_words_of_another_program():
    """Logits in a step, a loss in `generate`."""
    asked = make_plan(load(None, [*TINY, "parallel.pp=2", "train.sample_every=5", "train.eval_every=5"]))
    for name, others in ((EVALUATE, GENERATE), (GENERATE, EVALUATE)):
        with pytest.raises(PlanError, match=f"program '{name}'"):
            check(Plan(asked.table, {name: asked.programs[others]}))
    with_clip = [(*program, Instruction(Op.CLIP, gradients="none")) for program in asked.programs[GENERATE]]
    with pytest.raises(PlanError, match="there is no loss, so CLIP does not belong here"):
        check(Plan(asked.table, {GENERATE: with_clip}))


@pytest.mark.parametrize(("override", "message"), [
    ("train.sample_every=5", "train.sample_every=5 needs train.sample_prompts"),
    ("train.sample_tokens=0", "train.sample_tokens=0: must be at least 1"),
    ("train.sample_temperature=-1", "train.sample_temperature=-1.0: must be at least 0")])
def test_bad_values(override, message):
    with pytest.raises(InputError, match=message):
        load(None, [override])
