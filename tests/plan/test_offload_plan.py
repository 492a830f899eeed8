"""Offload as a pass: what lives where, what is on its way at a time, the buffers for it, and the bytes that
move."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.base.errors import ConfigError
from threed.base.quantity import ALIGNMENT, round_up
from threed.config.load import load
from threed.config.validate import validate
from threed.features.offload.plan import homes
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.buffers import lowered
from threed.program.effects import effects
from threed.program.instruction import Instruction, Op, Tier
from threed.program.names import APPLIES_WAITING, LEAVES_WAITING
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.program.table import Table
from threed.program.traffic import moved_by
from threed.schema import (
    Config,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)

BASE = ["model.layers=6", "model.hidden=16", "model.heads=4", "model.vocab=64", "model.vocab_multiple=32",
        "model.seq_len=8"]
CPU, NVME = ["offload.optimizer=cpu"], ["offload.optimizer=nvme", "offload.nvme_path=/disk"]


def plan_of(*overrides: str) -> Plan:
    return make_plan(load(None, [*BASE, *overrides]))


# ---------------------------------------------------------------- what lives where


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.floats(0.01, 1))
def test_ratio(sizes, ratio):
    """An offloaded share that one unit more or less would bring nearer to the ratio, or that is off by more
    than half a unit."""
    units = dict(enumerate(sizes))
    home = homes(units, ratio, Tier.HOST)
    offloaded = sum(size for unit, size in units.items() if home[unit] == "host")
    goal = ratio * sum(sizes)
    assert abs(offloaded - goal) <= max(sizes) / 2
    assert all(abs(offloaded + size - goal) >= abs(offloaded - goal)
               for unit, size in units.items() if home[unit] == "device")


def test_ratio_of_equal_units():
    for count in range(1, 9):
        for away in range(1, count + 1):
            assert list(homes(dict.fromkeys(range(count), 7), away / count,
                              Tier.DISK).values()).count(Tier.DISK) == away


@pytest.mark.parametrize("ratio", [0.3, 0.5, 1])
def test_ratio_of_a_model(ratio):
    """A position that offloads nothing because the others do; two ends of a tied embedding with different
    homes; offloaded parameters whose optimizer state is not offloaded, or which every rank holds whole."""
    table = plan_of(*CPU, f"offload.ratio={ratio}", "offload.parameters=cpu", "parallel.pp=2",
                    "parallel.dp=2", "zero.stage=3",
                    "train.global_batch_size=4", "zero.persist_below=20").table
    for position in (0, 1):
        mine = {p: unit for p, unit in table.parameters.items() if unit.positions[0] == position}
        away = sum(unit.numel for unit in mine.values() if unit.state_home == "host")
        sizes = [unit.numel for unit in mine.values()]
        assert abs(away - ratio * sum(sizes)) <= max(sizes) / 2
        for unit in mine.values():
            assert unit.weight_home == ("device" if unit.whole else unit.state_home)
    assert any(unit.whole for unit in table.parameters.values())


# ---------------------------------------------------------------- whole plans

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "breadth-first")


def draw(rng: random.Random) -> Config:
    """A random valid config with offload."""
    while True:
        stage, dp, tp, pp, schedule = (rng.choice((0, 1, 2, 3, 3, 3)), rng.choice((1, 2, 4)),
                                       rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice(SCHEDULES))
        zero = ZeroConfig(stage, rng.choice((1, 2, dp)) if stage else None)
        if stage >= 2:
            zero.reduce_every = rng.choice((1, 2, "step"))
        if stage == 3:
            zero.residency, zero.prefetch = rng.choice((1, 2, "stage", "step")), rng.choice((0, 1, 3))
            zero.persist_below = rng.choice((0, 100))
        offload = OffloadConfig(rng.choice(("cpu", "nvme")), rng.choice((0.3, 0.5, 1.0)),
                                rng.choice(("none", "cpu", "nvme")) if stage == 3 else "none")
        offload.overlap = rng.choice(("auto", "next", "none"))
        offload.gradients = rng.choice(("auto", "device", "host") if stage >= 2 else ("auto", "device"))
        if "nvme" in (offload.optimizer, offload.parameters):
            offload.nvme_path = "/disk"
        config = Config(
            ModelConfig(layers=6, hidden=16, heads=4, vocab=64, vocab_multiple=32, seq_len=8,
                        tie_embeddings=rng.random() < 0.5),
            ParallelConfig(dp, tp, pp, schedule, 2 if schedule in ("interleaved", "breadth-first") else None,
                           sequence_parallel=tp > 1 and rng.random() < 0.5), zero, offload=offload,
            precision=PrecisionConfig(rng.choice(("fp32", "bf16"))),
            train=TrainConfig(global_batch_size=dp * rng.choice((1, 2, 5, 8)), eval_every=rng.choice((0, 1))))
        if not validate(config) and (schedule != "dualpipe-v" or config.num_microbatches >= 2 * pp):
            return config


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Config, Plan]]:
    rng = random.Random(5)
    return [(config, make_plan(config)) for config in (draw(rng) for _ in range(160))]


class Tiers:
    """A program played by its instructions alone: which units' state and weights are away from home or on the
    device, and what the handlers take from the pools and return."""

    def __init__(self, table: Table, position: int, name: str):
        self.table, self.position, self.name = table, position, name
        self.states: set[int] = set()  # of units that live on disk, on the host now
        self.weights: set[int] = set()  # on the host, on their way up or down
        self.up: set[int] = set()  # parts of offloaded parameters on the device, for a GATHER
        self.gradients: set[int] = set()  # that stream, reduced and not yet down
        self.sums: set[int] = set()  # on the host, of gradients that stream
        self.down: set[int] = set()  # gradients that came down for their STEP
        self.waits: set[int] = set()  # gradients that wait for the next program

        if name in APPLIES_WAITING:  # the program before has left them
            self.sums = set(filter(table.shards.streams, self._waiting()))
            self.waits = self._waiting() - self.sums

    def _waiting(self) -> set[int]:
        return {slot.unit for slot in self.table.waiting(self.position)}

    def end(self) -> None:
        """What it leaves is what the next program takes."""
        left = self._waiting() if self.name in LEAVES_WAITING else set[int]()
        assert self.sums | self.waits == left
        assert not any((self.states, self.weights, self.up, self.gradients, self.down))

    def play(self, item: Instruction) -> None:
        unit = self.table.parameters.get(item.unit)
        if (
            item.op == Op.REDUCE
            and self.table.shards.streams(item.unit)
            and item.group == self.table.parameters[item.unit].shard_group
        ):
            add(self.gradients, item.unit)
        elif item.op == Op.CLIP and item.gradients == "wait":
            self.waits |= self._waiting() - self.sums
        elif item.op == Op.STEP and unit is not None and unit.state_home != "device":
            assert unit.state_home == "host" or item.unit in self.states
            (self.sums if self.table.shards.streams(item.unit) else self.down).remove(item.unit)
            if unit.weight_home != "host":
                add(self.weights, item.unit)
        elif item.op == Op.GATHER and unit is not None and unit.weight_home != "device":
            self.up.remove(item.unit)
        elif item.op in (Op.FETCH, Op.OFFLOAD) and unit is not None:
            self._move(item)

    def _move(self, item: Instruction) -> None:
        unit, fetch = self.table.parameters[item.unit], item.op == Op.FETCH
        if item.kind in ("gshard", "gprev"):
            assert not fetch and unit.state_home != "device"
            if item.kind == "gprev":
                self.waits.remove(item.unit)
            if self.table.shards.streams(item.unit):
                self.gradients.remove(item.unit)
                self.sums.add(item.unit)
            else:
                add(self.down, item.unit)
        elif (item.kind, item.tier) == ("state", Tier.HOST):
            assert unit.state_home == "disk"
            add(self.states, item.unit) if fetch else self.states.remove(item.unit)
        elif (item.kind, item.tier) == ("pshard", Tier.HOST):
            assert unit.weight_home == "disk"
            add(self.weights, item.unit) if fetch else self.weights.remove(item.unit)
        else:
            assert fetch and item.kind == self.table.shards.weight(item.unit).kind
            if unit.weight_home != "host":
                self.weights.remove(item.unit)
            if unit.weight_home != "device":
                add(self.up, item.unit)


def add(units: set[int], unit: int) -> None:
    assert unit not in units
    units.add(unit)


def test_everything_comes_home(drawn):
    """A FETCH without its OFFLOAD, or twice; a step without its gradient or its state; weights that are not
    brought up."""
    for _, plan in drawn:
        for name, programs in plan.programs.items():
            for position, program in enumerate(programs):
                tiers = Tiers(plan.table, position, name)
                for item in program:
                    tiers.play(item)
                tiers.end()


def test_few_units_are_on_their_way(drawn):
    """A host that must hold the state of half the model at a time, which the disk was to save, or pinned
    gradients of all of it."""
    seen: dict[str, Counter[int]] = {"states": Counter(), "down": Counter()}
    for config, plan in drawn:
        for name in plan.programs.keys() & {"train", "settle"}:
            for position, program in enumerate(plan.programs[name]):
                tiers = Tiers(plan.table, position, name)
                for item in program:
                    tiers.play(item)
                    assert len(tiers.states) <= 3 and len(tiers.weights) <= 3 and len(tiers.down) <= 3
                    assert len(tiers.up) <= (1 + (config.zero.prefetch or 0)) * 2
                    for kind, counts in seen.items():
                        counts[len(getattr(tiers, kind))] += 1
    assert seen["states"][3] > 100 and seen["down"][2] > 100, "a limit that nothing comes near says nothing"


@pytest.mark.parametrize("overlap, name", [("next", "train"), ("next", "settle"), ("none", "train")])
def test_steps_of_disk_and_device_overlap(overlap, name):
    """While one unit is stepped the next is read: in a program where each waits for the previous one nothing
    overlaps."""
    for program in plan_of(*NVME, f"offload.overlap={overlap}").programs[name]:
        steps = [item for item in program if item.op == Op.STEP]
        assert len(steps) == 8
        down = "gprev" if overlap == "next" else "gshard"
        for before, step in zip(steps, steps[1:]):
            for comes in (Instruction(Op.FETCH, step.unit, kind="state", tier=Tier.HOST),
                          Instruction(Op.OFFLOAD, step.unit, kind=down)):
                assert program.index(comes) < program.index(before)


def rooms_of(table: Table) -> dict[str, Callable[[int], int]]:
    """The size of a unit's buffer as its pool counts it: elements, or bytes; whole blocks if a file is read
    into it."""
    part, itemsize = table.shards.numel, table.elements.param
    return {"states": lambda p: round_up(part(p) * 12, ALIGNMENT), "up": part, "gradients": part,
            "down": part, "weights": lambda p: round_up(part(p) * itemsize, ALIGNMENT) // itemsize}


def test_buffers_are_enough_and_no_more(drawn):
    """A pool that runs dry in the middle of a step, or one with buffers that nobody ever takes."""
    for _, plan in drawn:
        table, analysis = plan.table, Analysis(plan)
        for position in range(table.num_positions):
            rooms = rooms_of(table)
            most: dict[str, Counter[int]] = {name: Counter() for name in rooms}
            for name, programs in plan.programs.items():
                tiers = Tiers(table, position, name)
                for item in programs[position]:
                    tiers.play(item)
                    for kind, room in rooms.items():
                        most[kind] |= Counter(map(room, getattr(tiers, kind)))
            pools = analysis.buffers(position)
            of_size = Counter(map(table.shards.numel, table.held(position)))
            for kind, pool in (("states", pools.host_states), ("weights", pools.host_weights),
                               ("up", pools.pshards)):
                assert pool == most[kind], kind
            for kind, pool in (("gradients", pools.gshards), ("down", pools.host_grads)):
                assert pool == {numel: min(count + 1, of_size[numel])
                                for numel, count in most[kind].items()}, kind
            times = lowered(plan.table, plan.programs["train"][position])
            several = {numel for unit, count in times.items() if count > 1
                       for numel in [table.shards.numel(unit)]}
            assert pools.adding == 2 * max(several, default=0) and several <= pools.gshards.keys()


# ---------------------------------------------------------------- bytes


def moved(plan: Plan) -> list[tuple[Counter[str], int]]:
    """Of each position: bytes by lane in a step, and elements of a rank's shards."""
    of_positions, rows = [], stages(Analysis(plan))
    for position, program in enumerate(plan.programs["train"]):
        lanes: Counter[str] = Counter()
        for item in program:
            if item.op in (Op.OFFLOAD, Op.FETCH):
                lanes[effects(item, plan.table, position).lane] += moved_by(plan.table, item)
        of_positions.append((lanes, sum(plan.table.shards.numel(p) for p in plan.table.held(position))))
        assert rows[position].moved_bytes == lanes
    return of_positions


SHAPE = ["parallel.pp=2", "parallel.dp=2", "train.global_batch_size=8"]


@pytest.mark.parametrize("dtype, weight", [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("overlap", ["next", "none"])
def test_bytes_of_a_step(overlap, tier, stage, dtype, weight):
    """4 bytes an element of the shard down, weights up; from and to disk 12 each: however often gradients are
    reduced, no part of one goes down before the last. Where the host adds them each part goes down, and none
    comes up again."""
    common = [*SHAPE, *(CPU if tier == "cpu" else NVME), f"zero.stage={stage}", f"precision.dtype={dtype}",
              f"offload.overlap={overlap}"]
    disk = 12 * (tier == "nvme")
    for often in ([], ["zero.reduce_every=1"], ["zero.reduce_every=step"]) if stage >= 2 else ([],):
        for lanes, numel in moved(plan_of(*common, *often)):
            expected = Counter({"d2h": 4 * numel, "h2d": weight * numel, "read": disk * numel,
                                "write": disk * numel})
            assert +lanes == +expected
    for every, times in ((1, 4), (2, 2), (3, 2), ("step", 1)) if stage >= 2 else ():
        streamed = plan_of(*common, "model.tie_embeddings=false", "offload.gradients=host",
                           f"zero.reduce_every={every}")
        for lanes, numel in moved(streamed):  # of 4 micro-batches
            assert lanes["d2h"] == 4 * numel * times and lanes["h2d"] == weight * numel


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_bytes_of_parameters(where):
    """With the parameters away, too, a part comes up for each GATHER and not after the step."""
    files = ["offload.nvme_path=/disk"] if where == "nvme" else []
    plan = plan_of(*SHAPE, *CPU, *files, f"offload.parameters={where}", "zero.stage=3",
                   "precision.dtype=bf16",
                   "zero.reduce_every=step")
    for (lanes, numel), program in zip(moved(plan), plan.programs["train"], strict=True):
        up = sum(2 * plan.table.shards.numel(item.unit) for item in program if item.op == Op.GATHER)
        assert lanes["h2d"] == up > 2 * numel
        assert (lanes["read"], lanes["write"]) == ((up, 2 * numel) if where == "nvme" else (0, 0))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("overrides, words", [
    (["offload.parameters=cpu", *CPU, "zero.stage=2"],
     "offload.parameters needs zero.stage=3: below it every device"),
    (["offload.parameters=cpu", "zero.stage=3"],
     "offload.parameters needs offload.optimizer=cpu or nvme: what lives on"),
    (["offload.optimizer=nvme"], "needs offload.nvme_path, a folder on a fast disk"),
    (["offload.optimizer=nvme", "offload.nvme_path="], "needs offload.nvme_path, a folder on a fast disk"),
    ([*CPU, "offload.parameters=nvme", "zero.stage=3"], "needs offload.nvme_path, a folder on a fast disk"),
    ([*CPU, "offload.nvme_path=/disk"],
     "offload.nvme_path=/disk needs offload.optimizer or offload.parameters to be nvme"),
    (["offload.nvme_path=/disk"],
     "offload.nvme_path=/disk needs offload.optimizer or offload.parameters to be nvme"),
    (["offload.overlap=next"], "offload.overlap=next needs offload.optimizer=cpu or nvme: with the "
                               "optimizer on the device there is no delay to overlap"),
    ([*CPU, "offload.overlap=always"], "offload.overlap=always: must be one of"),
    ([*CPU, "offload.overlap=true"], "offload.overlap=True: must be one of"),
    (["offload.gradients=host"], "offload.gradients=host needs offload.optimizer=cpu or nvme: a gradient "
                                 "goes to the host where it is stepped there"),
    (["offload.gradients=device"], "offload.gradients=device needs offload.optimizer=cpu or nvme"),
    ([*CPU, "offload.gradients=host"], "offload.gradients=host needs zero.stage of at least 2, and it is 1"),
    ([*CPU, "offload.gradients=host", "zero.stage=0"], "needs zero.stage of at least 2, and it is 0: below"),
    ([*CPU, "offload.gradients=disk", "zero.stage=2"], "offload.gradients=disk: must be one of"),
    ([*CPU, "offload.delayed_update=true"], "offload.delayed_update=True: the key is gone: "
                                            "offload.overlap=auto, the default, hides"),
    ([*CPU, "offload.warmup=10"], "offload.warmup=10: the key is gone with offload.delayed_update"),
    ([*CPU, "offload.ratio=0"], "offload.ratio=0.0: must be above 0 and at most 1"),
    ([*CPU, "offload.ratio=2"], "offload.ratio=2.0: must be above 0 and at most 1"),
    ([*CPU, "offload.ratio=-0.5"], "offload.ratio=-0.5: must be above 0 and at most 1"),
    ([*CPU, "offload.ratio=.nan"], "offload.ratio=nan: must be above 0 and at most 1"),
    (["offload.ratio=0.5"], "offload.ratio=0.5 needs offload.optimizer=cpu or nvme"),
    ([*CPU, "precision.dtype=bf16", "precision.master=none"],
     "with precision.master=none: the host steps fp32 weights"),
    (["offload.optimizer=gpu"], "offload.optimizer=gpu: must be one of none, cpu, nvme"),
    ([*CPU, "offload.parameters=disk", "zero.stage=3"],
     "offload.parameters=disk: must be one of none, cpu, nvme"),
])
def test_refused(overrides, words):
    """A setting that would do nothing, or something else than it says; once, with the reason."""
    with pytest.raises(ConfigError) as caught:
        load(None, [*BASE, *overrides])
    assert words in str(caught.value) and str(caught.value).startswith("1 problem"), str(caught.value)


def test_keys_that_are_gone_and_ask_for_nothing():
    """Configs that checkpoints and run folders of earlier versions hold have every key of their time."""
    config = load(None, [*BASE, *CPU, "offload.delayed_update=false", "offload.warmup=0"])
    assert config.to_dict() == load(None, [*BASE, *CPU]).to_dict()
