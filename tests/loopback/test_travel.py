"""Tensors that go to other ranks between two units: a GPT whose MLPs work on rows of other ranks is GPT."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tests.harness import assert_contract, batches, loopback, same_bits, tiny
from tests.recorder import record_on_cpu
from threed.base.errors import PlanError, ThreedError
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.extend import layers_of, measured_cost
from threed.planner import make_mesh, make_plan
from threed.prediction import transient
from threed.prediction.transient import temporaries_of
from threed.program.analysis import Analysis
from threed.program.check import check
from threed.program.effects import effects
from threed.program.instruction import COMPUTE, Instruction, Op, Slot
from threed.program.traffic import sent_by
from threed.schedules.orders import SCHEDULES
from threed.schema import Config, ModelConfig
from threed.tensor import leaves

FAMILY = "model.family=tests/families/travelling.py:TRAVELLING"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=12", "parallel.dp=2"]
FULL, SP = ["activation.policy=full"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
ZB, BF16 = ["parallel.pp=2", "parallel.schedule=zb-h1"], ["precision.dtype=bf16"]
WAYS = ["counts", "equal", "gather", "again"]


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
        engine = Engine(Analysis(plan), comm)
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


@pytest.mark.parametrize("more", [[], FULL, ZB, ["zero.stage=3", *BF16]], ids=str)
def test_twice_is_once(more):
    """To the bit, in the same bytes and those of the second gather."""
    once, twice = (loopback(travelling(f"model.by={by}", *more)) for by in ("gather", "again"))
    if more != ["zero.stage=3", *BF16]:
        same_bits([once, twice])
    else:  # gradients of what comes twice are summed in fp32
        assert once.losses[0] == twice.losses[0]


def test_what_comes_twice_is_released_behind_its_forward():
    """And it is brought again while the backward before it computes: two at a time are there. Where that
    backward comes next, it stays."""
    plan = make_plan(travelling(*FULL, "train.eval_every=1", "model.by=again", *BF16, "model.layers=3"))
    table, items = plan.table, plan.programs["train"][0]
    kinds = [table.size(Slot(kind, 1)) for kind in ("sent", "came", "gsent", "gcame")]
    assert kinds == [kinds[0] * times for times in (1, 2, 2, 4)]
    gather = Instruction(Op.GATHER, 1, 0, "sent", group="dp")
    first, second = (index for index, item in enumerate(items) if item == gather)
    before = next(item for item in reversed(items[:second]) if item.op in COMPUTE)
    assert before == Instruction(Op.BACKWARD, 5, 0)  # of the block above
    frees = {item: effects(item, table, 0).frees for item in items}
    came, sent = Slot("came", 1, 0), Slot("sent", 1, 0)
    release = Instruction(Op.RELEASE, 1, 0, "came")
    assert [items[first + 1].op, items[first + 2]] == [Op.FORWARD, release] and frees[release] == (came,)
    assert not frees[gather] and sent in frees[Instruction(Op.BACKWARD, 1, 0)]
    assert release._replace(unit=3) in items and release._replace(unit=5) not in items
    assert came in frees[Instruction(Op.BACKWARD_INPUT, 2, 0)]
    assert came not in frees[Instruction(Op.BACKWARD_WEIGHT, 2, 0)]
    alive = Analysis(plan).memory(0)
    assert alive.peak("came") == 2 * kinds[1] and alive.peak("gcame") == kinds[3]
    forward = effects(Instruction(Op.FORWARD, 2, 0, keep="none"), table, 0)
    assert {came, sent} <= {*forward.frees}


def test_a_backward_without_its_second_gather_is_refused():
    plan = make_plan(travelling("model.by=again"))
    items = list(plan.programs["train"][0])
    gather = Instruction(Op.GATHER, 1, 0, "sent", group="dp")
    del items[max(index for index, item in enumerate(items) if item == gather)]
    with pytest.raises(PlanError, match=r"reads 'came u1 m0', which is not alive\n(.*\n)* +> +\d+  BACKW"):
        check(replace(plan, programs={"train": [tuple(items)]}))


SPENT = """
from threed.extend import Embedding, Family, Head, added
from tests.families.travelling import Attends, Collects, Computes, TravellingConfig

class Spends(Collects):
    spent = {spent}

    def forward(self, x, batch, returned):
        rows = returned.unflatten(0, (-1, len(batch.samples_B)))
        return added(x, rows{square})

def layers(model):
    blocks = [(Attends(model, at), Computes(model, at), Spends(at)) for at in range(model.layers)]
    return [Embedding(model), *(layer for block in blocks for layer in block), Head(model)]

SPENT = Family(layers, TravellingConfig)
"""


def spending(folder: Path, spent: str, square: str, *more: str) -> Config:
    file = folder / f"spending_{len(spent)}_{len(square)}.py"
    file.write_text(SPENT.format(spent=spent, square=square))
    return tiny(*SMALL, f"model.family={file}:SPENT", *more)


@pytest.mark.parametrize("more", [[], FULL, ZB, ["train.eval_every=1"]], ids=str)
def test_what_is_used_up_is_freed_by_forward(more, tmp_path, references):
    """And its unit is not computed again, which would need it."""
    config = spending(tmp_path, "('returned',)", "", *more)
    plan = make_plan(config)
    items = [(position, item) for positions in plan.programs.values()
             for position, program in enumerate(positions) for item in program]
    assert {item.op for position, item in items for slot in effects(item, plan.table, position).frees
            if slot.kind == "returned"} == {Op.FORWARD}
    assert not [item for _, item in items if item.op == Op.RECOMPUTE
                and plan.table.units[item.unit].name.endswith("collect")]
    assert_contract(config, references)


@pytest.mark.parametrize("more", [[], FULL, ZB], ids=str)
def test_spent_but_needed(more, tmp_path):
    """A layer that needs the values after all: its numbers are right, and a measurement shows what it keeps.
    """
    squares = [spending(tmp_path, spent, " * rows", *more) for spent in ("()", "('returned',)")]
    same_bits([loopback(config) for config in squares])
    kept = [measured_cost(layers_of(config)[3], config).saved_bytes() for config in squares]
    assert kept[1] - kept[0] == 8 * 16 * 4


@pytest.mark.parametrize("rows", [0, 3])
def test_gradients_of_what_is_spent(rows):
    """They can be read as bits, also where no row came."""
    x, leaf = torch.randn(rows, 6), leaves.like(torch.empty(rows, 6))
    assert leaf.untyped_storage().nbytes() <= 4
    (leaves.spent(leaf, x) * 2).backward(torch.ones(rows, 6))
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.full((rows, 6), 2.0))
    assert leaf.grad[:, 2:].view(torch.int16).shape == (rows, 8)


@pytest.mark.parametrize("by", ["equal", "again"])
@pytest.mark.parametrize("more", [FULL, ZB], ids=["full", "zb-h1"])
def test_graphs(by, more, monkeypatch, references):
    """CUDA graphs hold the computation, and what travels is outside them."""
    made = record_on_cpu(monkeypatch)
    assert_gpt(travelling(f"model.by={by}", *more, "run.cuda_graphs=true", "zero.stage=2"), references)
    assert all(each.made for each in made)


BAD = {
    "no reader": ("reads = ()", r"layer a sends 'rows', which becomes 'came', but no later layer reads"),
    "two readers": ("third = ('came',)", r"2 layers read 'came', which layer a sends"),
    "no such group": ("over = 'xp'", r"layer a: 'rows' travels over 'xp', which is no group inside a "
                                     r"pipeline position; there are tp, cp, keys, dp, shard"),
    "across positions": ("over = 'tie'", r"travels over 'tie', which is no group inside a pipeline position"),
    "messages": ("over = 'pp'", r"travels over 'pp', which is no group inside"),
    "what left": ("reads = ('rows',)", r"layer b reads 'rows', which leaves for other ranks: let it"),
    "not made": ("made = ('other',)", r"layer a: 'rows' travels, but `makes` does not name it"),
    "one count": ("gives = 'n'", r"`gives` and `takes` name the rows for each rank and of each; give both"),
    "no counts": ("gives = takes = 'n'", r"by the counts 'n', which no layer up to it makes"),
    "counts with gradients": ("made, gives, takes = ('rows', 'n'), 'n', 'n'",
                              r"by the counts 'n', which is not int64 without a gradient: make it"),
    "its own counts": ("gives = takes = 'rows'", r"'rows' travels over 'dp' by counts that it is itself"),
    "its own name": ("becomes = 'rows'", r"'rows' becomes 'rows', which is the name of another tensor"),
    "spent, not read": ("spent = ('rows',)", r"layer b: `spent` names 'rows', but it may name only what"),
    "spent, and again": ("spent, again = ('came',), True", r"`spent` names 'came', which comes again for"),
    "again, without gradient": ("again, without = True, {'rows': 'int64'}",
                                r"layer a: 'rows' travels over 'dp' twice, and has no gradient"),
    "no bytes": ("sizes = {'came': 0}", r"layer a: `makes` says 0 bytes of 'came', which comes from other"),
    "one unit": ("", r"layers a and b are one unit, and 'came' cannot travel between them: set "
                     r"parallel\.layers_per_unit=1"),
}
FILE = """
from threed.extend import Embedding, Exchanged, Family, Gathered, Head, Layer, Out

reads, third, made, over, gives, takes = ("came",), (), ("rows",), "dp", "", ""
becomes, sizes, spent, again, without = "came", {{}}, (), False, {{}}
{change}

class A(Layer):
    name, without_grad = "a", without
    travels = {{"rows": Gathered(becomes, over, True) if again else Exchanged(becomes, over, gives, takes)}}

    def makes(self, share):
        return dict.fromkeys(made, 8) | sizes

class B(Layer):
    name, reads, spent = "b", reads, spent

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


WRONG = {
    "not divisible": ("x.flatten(0, 1)[:-1]", "None",
                      r"layer a sends 'rows' over dp, equally many rows .*\n  7 rows"),
    "no sum": ("x.flatten(0, 1)", "[1, 1]",
               r"over dp, but not as many .*\n  8 rows, and \[1, 1\] for the ranks are 2,"),
    "below 0": ("x.flatten(0, 1)", "[9, -1]",
                r"by the counts 'n', which must be 2 whole numbers .*\n  they are \[9, -1\]"),
    "one": ("x.flatten(0, 1)", "[8]",
            r"by the counts 'n', which must be 2 whole numbers .*\n  they are \[8\]"),
    "a number": ("x.sum()", "None", r"layer a sends 'rows' over dp, but it is a number .*\n  [-0-9.e]+"),
}
SENDS = """
from threed.extend import Embedding, Exchanged, Family, Head, Layer, Out, added, torch

counts = {counts}

class A(Layer):
    name, without_grad = "a", {{"n": "int64"}} if counts else {{}}
    travels = {{"rows": Exchanged("came", "dp", *(("n", "n") if counts else ()))}}

    def makes(self, share):
        return {{"rows": 8, **({{"n": 8}} if counts else {{}})}}

    def forward(self, x, batch):
        return Out(x, {{"rows": {rows}, **({{"n": torch.tensor(counts)}} if counts else {{}})}})

class B(Layer):
    name, adds, reads = "b", True, ("came",)

    def forward(self, x, batch, came):
        return x

SENDS = Family(lambda model: [Embedding(model), A(), B(), Head(model)])
"""


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_cannot_be_sent(name, tmp_path):
    """The layer that sends them is named, and not the one that waits for them, with rank and micro-batch; the
    first line is the same on all ranks."""
    rows, counts, message = WRONG[name]
    file = tmp_path / "sends.py"
    file.write_text(SENDS.format(rows=rows, counts=counts))
    where = r"on rank [01] \(pp0 dp[01] tp0\), in micro-batch 0$"
    with pytest.raises(ThreedError, match=rf"{message} {where}"):
        loopback(tiny(*SMALL, f"model.family={file}:SENDS"))


EARLIER = """
from threed.extend import Embedding, Family, Head, gpt
from {travelling} import Attends, Collects, Computes, TravellingConfig

class Counts(Attends):  # the block before has made and sent them
    def __init__(self, model, index):
        super().__init__(model, index)
        del self.travels["gives"]
        self.without_grad = {{}}

    def makes(self, share):
        return {{"sent": super().makes(share)["sent"]}}

    def forward(self, x, batch):
        out = super().forward(x, batch)
        return out._replace(makes={{"sent": out.makes["sent"]}})

def layers(model):
    first, second = ([kind(model, index), Computes(model, index), Collects(index)]
                     for index, kind in enumerate((Attends, Counts)))
    return [Embedding(model), *first, gpt.block(model, 2), *second, gpt.block(model, 3), Head(model)]

EARLIER = Family(layers, TravellingConfig)
"""


@pytest.mark.parametrize("more", [[], ["parallel.pp=2"], [*FULL, "zero.stage=3"]], ids=str)
def test_counts_of_an_earlier_unit(more, tmp_path, references):
    """They keep its units on one stage, in plans, short plans and measurements."""
    file = tmp_path / "earlier.py"
    file.write_text(EARLIER.format(travelling="tests.families.travelling"))
    config = tiny(*SMALL, f"model.family={file}:EARLIER", "model.layers=4", *more)
    plan = make_plan(config)
    counts = [made.counts for unit in plan.table.units for made in unit.makes
              if made.name == "sent" and made.over]
    assert counts == [(("gives", 0), ("takes", 0)), (("gives", 4), ("takes", 4))]
    check(replace(plan, table=plan.table))
    temporaries_of(plan)
    assert_contract(config, references)


def test_measured_anew_for_what_is_new(monkeypatch):
    """Blocks whose tensors travel are measured once, whatever their number."""
    measured, measure, counts = [], transient._measure, []
    monkeypatch.setattr(transient, "_measure", lambda *what: measured.append(what[2]) or measure(*what))
    for layers in (2, 6):
        temporaries_of(make_plan(travelling(f"model.layers={layers}")))
        counts.append(len(measured))
    assert counts[1] == 2 * counts[0] > 0


def test_graphs_refuse_counts():
    with pytest.raises(ThreedError, match=r"layer blocks\.0 shapes depend on how many rows of 'came' come"):
        make_plan(travelling("run.cuda_graphs=true"))


def test_halves_hold_what_came():
    """It is an operand of weights' gradients: it is freed by their half."""
    table = make_plan(travelling(*ZB)).table
    first, second = (effects(Instruction(op, 2, 0), table, 0).frees
                     for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    assert Slot("came", 1, 0) not in first and Slot("came", 1, 0) in second


def test_costs_are_measured():
    for layer in layers_of(travelling("model.by=equal"))[1:-1]:
        assert measured_cost(layer, travelling("model.by=equal")).flops >= 0


def test_an_instruction_that_takes_nothing_is_refused():
    plan = make_plan(travelling())
    good = Instruction(Op.EXCHANGE, 1, 0, "sent", group="dp")
    for change in ({"kind": "act"}, {"unit": 99}, {"group": "tp"}, {"op": Op.GATHER}, {"microbatch": -1},
                   {"op": Op.GATHER, "kind": ""}, {"op": Op.REDUCE, "kind": "gcame"}):
        bad = good._replace(**change)
        with pytest.raises(KeyError, match="no such tensor travels"):
            effects(bad, plan.table, 0)
    assert good._replace(peer=1).strays() == ["peer"]
