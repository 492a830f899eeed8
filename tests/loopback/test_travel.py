"""Tensors that go to other ranks between two units: a GPT whose MLPs work on rows of other ranks is GPT."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.harness import assert_contract, batches, tiny
from tests.recorder import record_on_cpu
from threed.base.errors import ThreedError
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan
from threed.program.effects import effects
from threed.program.instruction import Instruction, Op, Slot
from threed.program.traffic import sent_by
from threed.schedules.orders import SCHEDULES
from threed.schema import Config, ModelConfig

FAMILY = "model.family=tests/families/travelling.py:TRAVELLING"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=12", "parallel.dp=2"]
FULL, SP = ["activation.policy=full"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
ZB, BF16 = ["parallel.pp=2", "parallel.schedule=zb-h1"], ["precision.dtype=bf16"]
WAYS = ["counts", "equal", "gather"]


def travelling(*overrides: str) -> Config:
    return tiny(*SMALL, FAMILY, *overrides)


def plain(config: Config) -> Config:
    """The GPT that a config computes."""
    model = {field.name: getattr(config.model, field.name) for field in fields(ModelConfig)}
    return replace(config, model=ModelConfig(**{**model, "family": "gpt"}))


def assert_gpt(config: Config, references) -> None:
    """The contract, against a GPT on one rank, where nothing travels."""
    assert_contract(config, lambda same, steps: references(plain(same), steps))


MORE = {
    "alone": ["parallel.dp=1"], "full": FULL, "zb-h1": ZB, "sp": SP,
    "bf16-full-zero-3": [*BF16, *FULL, "zero.stage=3"],
    "fp16": ["precision.dtype=fp16", "precision.loss_scale=1024"], "tp": ["parallel.tp=2", *FULL],
    "kept-on-host": [*FULL, "activation.offload=cpu", *ZB],
    "arena": [*FULL, "activation.contiguous=true"],
    "partition": [*FULL, "activation.partition=true", "parallel.tp=2"],
    "selective": ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]", *SP],
    "offload": ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu", *FULL],
    "evaluate": ["train.eval_every=1", *ZB, "zero.stage=2"],
    "verify": ["run.verify_every=1", "zero.stage=2"],
    "dp-4-in-groups": ["parallel.dp=4", "zero.shard_size=2", "zero.stage=3"],
}


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("more", MORE)
def test_it_computes_gpt(by, more, references):
    assert_gpt(travelling(f"model.by={by}", *MORE[more]), references)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_and_stage(schedule, stage, references):
    two = ["parallel.virtual_stages=2"] if SCHEDULES[schedule].virtual is None else []
    config = travelling(f"parallel.schedule={schedule}", f"zero.stage={stage}", "parallel.pp=2", *two,
                        *(FULL if stage % 2 else []))
    assert_gpt(config, references)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("more", [[], [*SP, *FULL], ["parallel.dp=4"]], ids=["dp", "sp", "dp-4"])
def test_bytes_counted_are_the_plans(by, more):
    """Of rows by counts: those that leave, there and back, of values and of gradients."""
    config = travelling(f"model.by={by}", "zero.stage=0", "model.tie_embeddings=false", *more)
    plan, dp = make_plan(config), config.dp
    program = plan.programs["train"][0]

    def work(comm: Comm) -> tuple[int, int]:
        engine = Engine(config, plan, comm)
        before = comm.sent["dp"]
        engine.train_step(batches(config, comm, 0))
        layer, group = engine.pipeline.layers[1][0], comm.groups["dp"]
        rows = config.model.seq_len // (config.parallel.tp if config.parallel.sequence_parallel else 1)
        away = rows - int(layer.counts(rows)[group.rank()]) if by == "counts" else 0
        return comm.sent["dp"] - before, away

    sent, away = zip(*run_loopback(plan, make_mesh(config), work), strict=True)
    sums = [sum(sent_by(plan.table, item).get("dp", 0) for item in program if item.of_slot == travels)
            for travels in (False, True)]
    if by != "counts":
        assert set(sent) == {sum(sums)} and sums[1]
        return
    times = config.model.layers * config.num_microbatches
    rows = 4 * sum(away) * config.model.hidden * 4 + len(sent) * (dp - 1) * 8
    assert sum(sent) == len(sent) * sums[0] + times * rows


def test_what_travels_is_freed():
    """What has left at once, what has come by its reader's backward; recomputation makes neither again."""
    plan = make_plan(travelling(*FULL, "train.eval_every=1", "parallel.dp=4", "model.by=gather"))
    table, items = plan.table, plan.programs["train"][0]
    size = table.size(Slot("sent", 1))
    assert table.size(Slot("came", 1)) == table.size(Slot("gcame", 1)) == 4 * size
    leave, back = (Instruction(op, 1, 0, kind, group="dp")
                   for op, kind in ((Op.GATHER, "sent"), (Op.REDUCE, "gcame")))
    assert str(leave) == "GATHER sent u1 m0 (dp)" and str(back) == "REDUCE gcame u1 m0 (dp)"
    at = {item: index for index, item in enumerate(items)}
    assert items[at[leave] - 1] == Instruction(Op.FORWARD, 1, 0, keep="input")
    assert items[at[back] - 1] == Instruction(Op.BACKWARD, 2, 0)
    frees = {item: effects(item, table, 0).frees for item in items}
    assert frees[leave] == (Slot("sent", 1, 0),) and frees[back] == (Slot("gcame", 1, 0),)
    assert Slot("came", 1, 0) in frees[Instruction(Op.BACKWARD, 2, 0)]
    again = effects(Instruction(Op.RECOMPUTE, 1, 0), table, 0)
    assert not {slot.kind for slot in (*again.writes, *again.updates)} & {"sent", "came"}
    assert Slot("came", 1, 0) in effects(Instruction(Op.FORWARD, 2, 0, keep="none"), table, 0).frees


def test_graphs(monkeypatch, references):
    """CUDA graphs hold the computation, and what travels is outside them."""
    made = record_on_cpu(monkeypatch)
    assert_gpt(travelling("model.by=equal", *FULL, "run.cuda_graphs=true", "zero.stage=2"), references)
    assert all(each.made for each in made)


BAD = {
    "no reader": ("reads = ()", r"layer a sends 'rows', which becomes 'came', but no later layer reads"),
    "two readers": ("third = ('came',)", r"2 layers read 'came', which layer a sends"),
    "no such group": ("over = 'ep'", r"layer a: 'rows' travels over 'ep', which is no group inside a "
                                     r"pipeline position; there are tp, dp, shard"),
    "across positions": ("over = 'tie'", r"travels over 'tie', which is no group inside a pipeline position"),
    "messages": ("over = 'pp'", r"travels over 'pp', which is no group inside"),
    "what left": ("reads = ('rows',)", r"layer b reads 'rows', which leaves for other ranks: let it"),
    "not made": ("made = ('other',)", r"layer a: 'rows' travels, but `makes` does not name it"),
    "one count": ("gives = 'n'", r"`gives` and `takes` name the rows for each rank and of each; give both"),
    "no counts": ("gives = takes = 'n'", r"by the counts 'n', which no layer up to it makes"),
    "counts with gradients": ("gives = takes = 'rows'", r"by the counts 'rows', which is not int64 without"),
    "one unit": ("", r"layers a and b are one unit, and 'came' cannot travel between them: set "
                     r"parallel\.layers_per_unit=1"),
}
FILE = """
from threed.extend import Embedding, Exchanged, Family, Head, Layer, Out

reads, third, made, over, gives, takes = ("came",), (), ("rows",), "dp", "", ""
{change}

class A(Layer):
    name, travels = "a", {{"rows": Exchanged("came", over, gives, takes)}}

    def makes(self, share):
        return dict.fromkeys(made, 8)

class B(Layer):
    name, reads = "b", reads

class C(Layer):
    name, reads = "c", third

BAD = Family(lambda model: [Embedding(model), A(), B(), C(), Head(model)])
"""


@pytest.mark.parametrize("name", BAD)
def test_bad_families(name, tmp_path):
    change, message = BAD[name]
    file = tmp_path / "bad.py"
    file.write_text(FILE.format(change=change))
    per_unit = ["parallel.layers_per_unit=3"] if name == "one unit" else []
    with pytest.raises(ThreedError, match=message):
        make_plan(tiny(*SMALL, f"model.family={file}:BAD", *per_unit))


def test_an_instruction_that_takes_nothing_is_refused():
    plan = make_plan(travelling())
    good = Instruction(Op.EXCHANGE, 1, 0, "sent", group="dp")
    for change in ({"kind": "act"}, {"unit": 99}, {"group": "tp"}, {"op": Op.GATHER}, {"microbatch": -1},
                   {"op": Op.GATHER, "kind": ""}, {"op": Op.REDUCE, "kind": "gcame"}):
        bad = good._replace(**change)
        with pytest.raises(KeyError, match="no such tensor travels"):
            effects(bad, plan.table, 0)
    assert good._replace(peer=1).strays() == ["peer"]
