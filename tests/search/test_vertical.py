"""The schedule `vertical`: its order, how often a unit's parameters come to the device, what is refused, and
how large a group is chosen for a device's memory."""

from __future__ import annotations

import math
from collections import Counter

import pytest

import threed
from tests.harness import tiny
from threed.base.errors import ConfigError, Idle, InputError
from threed.config.validate import validate, warnings
from threed.layout_search.layout import schedules
from threed.layout_search.request import ask
from threed.planner import analyse, make_pipeline, make_plan
from threed.planner.auto import USUAL_ROOM, choices, decided, fitting
from threed.planner.passes import Pipeline
from threed.prediction.hardware import Hardware
from threed.prediction.peak import plan_room
from threed.program.instruction import Op
from threed.program.names import EVALUATE
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.schedules.complete import check_order
from threed.schedules.orders import SCHEDULES, breadth_first, can_run, in_groups, line, looped
from threed.schema import Config

VERTICAL = ["parallel.schedule=vertical", "parallel.dp=1"]
HOST = ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu", "model.tie_embeddings=false"]


def vertical(*overrides: str) -> Config:
    """Eight units and eight micro-batches."""
    return tiny(*VERTICAL, *overrides)


# ---------------------------------------------------------------- the order


def test_groups_pass_one_unit_after_the_other():
    order, place = make_pipeline(tiny(*VERTICAL, "model.layers=1", "train.global_batch_size=4",
                                      "parallel.group=2"))
    assert place == (0, 0, 0)
    assert " ".join(f"{kind}{stage}.{k}" for kind, stage, k in order[0]) == (
        "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 B1.0 B1.1 B0.0 B0.1 "
        "F0.2 F0.3 F1.2 F1.3 F2.2 F2.3 B2.2 B2.3 B1.2 B1.3 B0.2 B0.3")


def test_one_group_is_breadth_first():
    """With a stage a unit; and groups of one are 1F1B on one position."""
    assert in_groups(line(2, 3), 5, 5) == breadth_first(2, 5, 3)
    plans = [make_plan(tiny("parallel.dp=1", *HOST, "zero.residency=1", *others)).programs for others in (
        ["parallel.schedule=vertical", "parallel.group=8"],
        ["parallel.schedule=breadth-first", "parallel.virtual_stages=8"],
        ["parallel.schedule=vertical", "parallel.group=1"], ["parallel.schedule=1f1b"])]
    assert plans[0] == plans[1] and plans[2] == plans[3]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("units", [4, 5, 6, 7, 9])
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_every_task_once(p, units, group):
    """On any number of positions, which need not divide the units: the embedding is on the first, the head on
    the last, as tied weights need it."""
    place = looped(p, units)
    order = in_groups(place, 6, group)
    check_order("vertical", order, place, p, 6)
    assert can_run(order) and place[0] == 0 and place[-1] == p - 1
    counts = Counter(place)
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("overrides", [["parallel.pp=2"], ["parallel.pp=3", "model.layers=5"],
                                       ["parallel.pp=4", "parallel.group=2", "model.layers=7"],
                                       ["parallel.pp=2", "parallel.layers_per_unit=2", "parallel.group=4"]],
                         ids=" ".join)
def test_positions(overrides):
    """A plan of several positions is legal, with ZeRO-3 and tied embeddings, too."""
    for stage in (1, 3):
        plan = make_plan(tiny("parallel.schedule=vertical", "parallel.dp=2", f"zero.stage={stage}",
                              "train.global_batch_size=16", "train.eval_every=1",
                              "data.validation_fraction=0.1", *overrides))
        assert len(plan.programs["train"]) == plan.table.num_positions > 1


def test_tiles_stay_together():
    """The tiles of a layer are one stage."""
    units = make_plan(vertical("model.tile_linears=2KiB", "model.tie_embeddings=false",
                               "model.layers=2")).table.units
    found = {unit.name: unit.stage for unit in units if unit.name.endswith(("1/8", "8/8"))}
    assert found == {f"{layer} {tile}/8": stage for tile in (1, 8) for layer, stage in (
        ("embedding", 0), ("blocks.0.attention", 1), ("blocks.1.attention", 3), ("head", 5))}


# ---------------------------------------------------------------- trips of parameters


def trips(plan: Plan, op: Op, name: str = "train") -> list[int]:
    """Of each parameter unit: how often it is gathered, or its part fetched from the host."""
    found = Counter(item.unit for item in plan.programs[name][0] if item.op == op and (
        not item.of_slot or item.kind == "pshard"))
    return [found[unit] for unit in plan.table.parameters]


@pytest.mark.parametrize("op", [Op.GATHER, Op.FETCH])
@pytest.mark.parametrize("group, count", [("8", 1), ("4", 2), ("2", 4), ("1", 8)])
def test_parameters_come_once_a_pass_and_group(group, count, op):
    """Once forward and once backward; at the turn, where the head is, once for both, and from a group to the
    next the embedding as well. 1F1B takes as many trips as groups of one."""
    dp = ["parallel.dp=2", "train.global_batch_size=16"] if op == Op.GATHER else []
    found = trips(make_plan(vertical(*HOST, "zero.residency=1", f"parallel.group={group}", *dp)), op)
    assert len(found) == 8
    assert found == [count + 1, *[2 * count] * 6, count]


def test_evaluation_is_in_groups():
    """Each unit comes once a group."""
    for group, count in (("8", 1), ("2", 4)):
        plan = make_plan(vertical(*HOST, "zero.residency=1", f"parallel.group={group}",
                                  "train.eval_every=1", "data.validation_fraction=0.1"))
        assert plan.table.microbatches(EVALUATE) == 8
        assert trips(plan, Op.FETCH, EVALUATE) == [count] * 8


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("overrides, key, says", [
    (["parallel.group=3"], "parallel.group", "=3 does not divide the 8 micro-batches of a step: take one of "
                                             "1, 2, 4, 8, or auto"),
    (["parallel.group=16"], "parallel.group", "=16 does not divide the 8 micro-batches"),
    (["parallel.group=0"], "parallel.group", "=0: must be 'auto' or an integer of at least 1"),
    (["parallel.group=all"], "parallel.group", "=all: must be 'auto' or an integer of at least 1"),
    (["parallel.virtual_stages=4"], "parallel.virtual_stages", "=4: parallel.schedule=vertical makes each "
                                                               "unit a stage; leave it out"),
    (["parallel.stage_units=[8]"], "parallel.stage_units", "makes each unit a stage; leave it out"),
    (["parallel.schedule=1f1b", "parallel.group=4"], "parallel.group",
     "=4 needs parallel.schedule=vertical, and it is 1f1b, which has no groups; leave it out"),
    (["parallel.pp=16", "parallel.dp=1"], "parallel.pp", "makes 16 stages, more than the model's 8 units"),
])
def test_refused(overrides, key, says):
    with pytest.raises(ConfigError) as caught:
        vertical(*overrides)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert says in caught.value.problems[0].text


def test_pairs_are_refused():
    """A forward and a backward of different micro-batches are no neighbours."""
    with pytest.raises(ConfigError, match=r"parallel\.pair=true .* all of a group \(gpipe, breadth-first, "
                                          r"vertical\)"):
        threed.load("configs/toy-moe.yaml", ["parallel.pair=true", "parallel.schedule=vertical"])


def test_no_effect_is_idle():
    """A group of a schedule that has none is left out where a config is put together, as by --advise."""
    config = vertical("parallel.group=4")
    config.parallel.schedule = "gpipe"
    assert [type(problem) for problem in validate(config)] == [Idle]


# ---------------------------------------------------------------- the group that fits


def room_for(config: Config) -> int:
    """The least room into which a plan fits."""
    analysis = analyse(config)
    beside = max(unit.saved_bytes for unit in analysis.table.units)
    return max(row.fixed_bytes + row.activation_peak_bytes for row in stages(analysis)) + beside


@pytest.mark.parametrize("others", [[], HOST, ["activation.policy=full"], ["parallel.pp=2"]], ids=str)
def test_the_largest_group_that_fits(others):
    """One byte less, and the next smaller divisor is taken; where none fits, 1."""
    auto, taken = vertical("run.device=cuda", *others), []
    gradients = {"zero.reduce_every": "step", "offload.gradients": "device"} if others == HOST else {}
    for group in (1, 2, 4, 8):
        config = vertical("run.device=cuda", f"parallel.group={group}", *others)
        room = room_for(config)
        assert fitting(config, room) and not fitting(config, room - 1)
        assert choices(auto, room)["parallel.group"] == group
        if group > 1:
            assert choices(auto, room - 1) == {**gradients, "parallel.group": group // 2}
        taken.append(room)
    assert taken == sorted(set(taken))
    on_cpu = vertical("run.device=cpu", *others)
    assert choices(auto, math.inf) == choices(on_cpu) == {**gradients, "parallel.group": 8}
    assert choices(vertical("parallel.group=2"), 0) == {} == choices(tiny("parallel.dp=1"), 0)


def test_limits_of_the_config_count():
    """A group keeps within parallel.activation_limit and activation.budget, whatever the device has."""
    limit = max(row.activation_peak_bytes for row in stages(analyse(vertical("parallel.group=4"))))
    assert decided(vertical(f"parallel.activation_limit={limit}"), math.inf).parallel.group == 4
    assert decided(vertical(f"parallel.activation_limit={limit - 1}"), math.inf).parallel.group == 2
    least = max(row.activation_peak_bytes
                for row in stages(analyse(vertical("parallel.group=2", "activation.policy=full"))))
    budget = vertical("activation.policy=budget", f"activation.budget={least}")
    assert decided(budget, math.inf).parallel.group == 2


def test_a_plan_knows_what_was_chosen():
    """Its config has the number, so that who plans again, on another device, has the same plan."""
    config = vertical("run.device=cuda", "train.eval_every=1", "data.validation_fraction=0.1")
    room = room_for(vertical("run.device=cuda", "parallel.group=2"))
    analysis = analyse(config, room=room)
    chosen = analysis.plan.config
    assert chosen is not None and chosen.parallel.group == 2 and config.parallel.group == "auto"
    assert analyse(chosen).digest == analysis.digest != analyse(config).digest
    assert analyse(config, make_pipeline(config, room), room).digest == analysis.digest


def test_the_usual_room():
    """The figure of the planner is that of the hardware that `predict` takes by default."""
    config = vertical("run.device=cuda")
    assert plan_room(Hardware.parse(""), config) == USUAL_ROOM
    assert plan_room(Hardware.parse(""), vertical("run.device=cpu")) == math.inf
    assert plan_room(Hardware.parse("h200-sxm"), config) > plan_room(Hardware.parse(""), config)
    assert plan_room(Hardware.parse(""), config, 40 * 10**9) == 0.95 * 40e9 - 2.9e9


def test_commands_choose_for_their_machine():
    """`check` and `predict` say the group of the device that they are asked about."""
    large = threed.load("configs/llama3-8b.yaml", [
        *VERTICAL, "parallel.tp=1", "parallel.pp=1", "parallel.sequence_parallel=false", "run.device=cuda",
        "train.global_batch_size=16", "train.micro_batch_size=1", *HOST])
    usual = choices(large)["parallel.group"]
    more = choices(large, plan_room(Hardware.parse("h200-sxm"), large))["parallel.group"]
    assert 1 <= usual < more
    for room, group in ((None, usual), (plan_room(Hardware.parse("h200-sxm"), large), more)):
        assert threed.check(large, room)["chosen"][:1] == [
            f"parallel.group=auto: {group} of 16 micro-batches pass a unit together, the most that fit"]
    assert f"vertical, 16 micro-batches in groups of {usual} (" in threed.show(large)


def test_the_row_says_it():
    assert [name for name, row in SCHEDULES.items() if row.by_unit] == ["vertical"]
    assert Pipeline(SCHEDULES["vertical"].make(1, 4, 3), SCHEDULES["vertical"].place(1, 3)) == Pipeline(
        in_groups((0, 0, 0), 4, 4), (0, 0, 0))


@pytest.mark.parametrize("override, says", [
    ("parallel.schedule=vertical", "search compares named schedules that give positions equally many stages"),
    ("parallel.group=4", "it is of parallel.schedule=vertical, which search does not try")])
def test_search_leaves_it_out(override, says):
    """What a file says of it is left out; an override is refused."""
    with pytest.raises(InputError, match=says):
        ask("configs/toy.yaml", [override])
    assert "vertical" not in schedules()


def test_a_group_that_does_not_fill_the_pipeline():
    """A warning: each group fills and drains it."""
    def lines(*overrides: str) -> list[str]:
        return warnings(threed.load("configs/toy.yaml", ["parallel.schedule=vertical", "parallel.pp=4",
                                                         "parallel.dp=1", "parallel.tp=1",
                                                         "train.global_batch_size=16", *overrides]))

    assert any("parallel.group=2 is less than parallel.pp=4" in line for line in lines("parallel.group=2"))
    assert not any("parallel.group" in line for line in (*lines("parallel.group=4"), *lines()))
