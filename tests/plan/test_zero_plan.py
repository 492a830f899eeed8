"""ZeRO as a pass: the window of resident parameters, the reductions, the buffers, and the traffic that comes
of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed.config.load import load
from threed.config.validate import validate
from threed.features.zero.plan import window as insert
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.instruction import COMPUTE, Instruction, Op, Slot
from threed.program.plan import Plan
from threed.program.table import Table
from threed.program.traffic import sent_by
from threed.schema import Config, ModelConfig, ParallelConfig, TrainConfig, ZeroConfig

BASE = ["model.layers=6", "model.hidden=16", "model.heads=4", "model.vocab=64", "model.vocab_multiple=32",
        "model.seq_len=8"]


def plan_of(*overrides: str) -> Plan:
    return make_plan(load(None, [*BASE, *overrides]))


# ---------------------------------------------------------------- the window alone

Uses = list[tuple[int, list[int]]]


def window(uses: Uses, capacity: int, prefetch: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    gathers: dict[int, list[int]] = defaultdict(list)
    releases: dict[int, list[int]] = defaultdict(list)
    insert(uses, capacity, prefetch, gathers, releases)
    return gathers, releases


def fewest(uses: Uses, capacity: int) -> int:
    """The fewest gathers of all ways to choose the units that stay resident, by trying all of them."""

    @cache
    def from_here(use: int, resident: frozenset[int]) -> int:
        if use == len(uses):
            return 0
        needed = frozenset(uses[use][1])
        room = max(0, capacity - len(needed))
        kept = [frozenset(some) for count in range(room + 1)
                for some in combinations(sorted(resident - needed), count)]
        return len(needed - resident) + min(from_here(use + 1, needed | some) for some in kept)

    return from_here(0, frozenset())


def least_recently_used(uses: Uses, capacity: int) -> int:
    order: list[int] = []
    count = 0
    for _, units in uses:
        for unit in units:
            count += unit not in order
            order = [other for other in order if other != unit][-(capacity - 1):] if capacity > 1 else []
            order.append(unit)
    return count


@st.composite
def sequences(draw: st.DrawFn, longest: int, most: int = 4) -> Uses:
    """Uses with other instructions between them; now and then one that reads two units."""
    units = st.lists(st.integers(0, most), min_size=1, max_size=2, unique=True)
    steps = draw(st.lists(st.tuples(st.integers(1, 3), units), min_size=1, max_size=longest))
    uses, index = [], -1
    for step, needed in steps:
        index += step
        uses.append((index, needed))
    return uses


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(sequences(40, 9), st.integers(1, 6), st.integers(0, 5))
def test_window_is_legal(uses, capacity, prefetch):
    """A use of a unit that is not resident, a unit gathered twice or never released, or more memory than was
    asked for."""
    gathers, releases = window(uses, capacity, prefetch)
    needed = dict(uses)
    widest = max(map(len, needed.values()))
    resident: set[int] = set()
    for index in range(max(needed) + 1):
        for unit in gathers[index]:
            assert unit not in resident
            resident.add(unit)
        assert resident >= set(needed.get(index, ()))
        assert len(resident) <= max(capacity, widest) + prefetch * widest
        for unit in releases[index]:
            resident.remove(unit)
    assert not resident and max(releases) <= max(needed)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(sequences(10), st.integers(1, 4))
def test_no_window_gathers_less(uses, capacity):
    """Room is made by releasing another unit than the one whose next use is furthest away: traffic that a
    better choice saves. Compared with all choices."""
    gathers, _ = window(uses, capacity, 0)
    assert sum(map(len, gathers.values())) == fewest(uses, capacity)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(sequences(30, 6), st.integers(1, 4), st.integers(1, 6))
def test_prefetch_moves_gathers_and_adds_none(uses, capacity, prefetch):
    """A prefetched gather that adds traffic, or one that comes later than without prefetch."""
    plain, early = (window(uses, capacity, ahead)[0] for ahead in (0, prefetch))
    when = [{unit: sorted(index for index, units in chosen.items() for u in units if u == unit)
             for unit in range(7)}
            for chosen in (plain, early)]
    for unit in range(7):
        assert len(when[0][unit]) == len(when[1][unit])
        assert all(b <= a for a, b in zip(when[0][unit], when[1][unit]))


# ---------------------------------------------------------------- gathers of whole plans

FOUR_STAGES = ["model.layers=30", "model.tie_embeddings=false", "model.position=learned", "parallel.pp=4",
               "parallel.dp=2",
               "train.global_batch_size=32", "zero.stage=3"]


def gathers(*overrides: str) -> int:
    """A step on stage 0 of 4, of 8 units each, 16 micro-batches."""
    program = plan_of(*FOUR_STAGES, *overrides).programs["train"][0]
    assert sum(item.op in COMPUTE for item in program) == 256
    return sum(item.op == Op.GATHER for item in program)


@pytest.mark.parametrize("residency, count", [("1", 231), ("2", 198), ("stage", 8), ("step", 8)])
def test_gathers_of_1f1b(residency, count):
    """256 uses. A unit that was used last is used first when a forward turns into a backward or back, 25
    times: 231. With two units 206 if the least recently used makes room, 198 if what is used last does; once
    each if all may stay."""
    assert gathers("parallel.stage_units=[8,8,8,8]", f"zero.residency={residency}") == count
    program = plan_of(*FOUR_STAGES, "parallel.stage_units=[8,8,8,8]").programs["train"][0]
    uses = [(index, [item.unit]) for index, item in enumerate(program) if item.op in COMPUTE]
    assert least_recently_used(uses, 1) == 231 and least_recently_used(uses, 2) == 206


@pytest.mark.parametrize("virtual, residency, count",
                         [(8, "1", 15), (8, "2", 14), (4, "2", 14), (8, "step", 8)])
def test_gathers_of_breadth_first(virtual, residency, count):
    """All micro-batches pass a stage before the next is needed: each unit is gathered once forward and once
    backward, but for those at the turn. So with stages of one unit, or of as many as may be resident."""
    size = 8 // virtual
    assert gathers("parallel.schedule=breadth-first", f"parallel.virtual_stages={virtual}",
                   f"zero.residency={residency}",
                   f"parallel.stage_units=[{','.join([str(size)] * 4 * virtual)}]") == count


def test_stage_residency_counts_what_comes_and_goes():
    """Small parameters that stay whole took the places of large ones: twice as many units as a stage has were
    resident."""
    plan = plan_of(*FOUR_STAGES, "parallel.schedule=interleaved", "parallel.virtual_stages=2",
                   "zero.residency=stage",
                   "zero.prefetch=0", "zero.persist_below=100",
                   f"parallel.stage_units={[4] * 8}".replace(" ", ""))
    assert any(unit.name.endswith(", small") and unit.whole for unit in plan.table.parameters.values())
    for program in plan.programs["train"]:
        assert max(len(resident) for _, resident in residents(program, plan.table)) == 4


def residents(program: tuple[Instruction, ...], table: Table) -> list[tuple[Instruction, set[int]]]:
    """Each instruction of a program, with the units that are being gathered and those that are resident while
    it runs."""
    alive: set[int] = set()
    rows = []
    for item in program:
        if item.op == Op.GATHER and not table.parameters[item.unit].whole:
            assert item.unit not in alive
            alive.add(item.unit)
        rows.append((item, set(alive)))
        if item.op == Op.RELEASE:
            alive.discard(item.unit)
    assert not alive
    return rows


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "breadth-first")


def draw(rng: random.Random) -> Config:
    """A random valid config with ZeRO."""
    while True:
        stage, dp, tp, pp, schedule = (rng.choice((1, 2, 3, 3)), rng.choice((2, 4)), rng.choice((1, 1, 2)),
                                       rng.choice((1, 2, 3, 4)), rng.choice(SCHEDULES))
        zero = ZeroConfig(stage, rng.choice((1, 2, dp)))
        if stage >= 2:
            zero.reduce_every = rng.choice((1, 2, 3, 7, "step"))
        if stage == 3:
            zero.residency, zero.prefetch = rng.choice((1, 2, 3, "stage", "step")), rng.choice((0, 1, 2, 4))
            zero.persist_below = rng.choice((0, 0, 100))
        config = Config(
            ModelConfig(layers=6, hidden=16, heads=4, vocab=64, vocab_multiple=32, seq_len=8,
                        tie_embeddings=rng.random() < 0.5),
            ParallelConfig(dp, tp, pp, schedule, 2 if schedule in ("interleaved", "breadth-first") else None,
                           sequence_parallel=tp > 1 and rng.random() < 0.5), zero,
            train=TrainConfig(global_batch_size=dp * rng.choice((1, 2, 5, 8, 9)),
                              eval_every=rng.choice((0, 1))))
        if not validate(config) and (schedule != "dualpipe-v" or config.num_microbatches >= 2 * pp):
            return config


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Config, Plan]]:
    rng = random.Random(11)
    return [(config, make_plan(config)) for config in (draw(rng) for _ in range(240))]


def test_every_use_has_its_gather(drawn):
    """A unit that is read while it is not resident, gathered while it is, or left resident at the end; by the
    instructions alone, not by `effects`."""
    for _, plan in drawn:
        for position, program in ((position, program) for programs in plan.programs.values()
                                  for position, program in enumerate(programs)):
            table, resident = plan.table, set()
            for item in program:
                if item.op == Op.GATHER:
                    assert item.unit not in resident and position in table.parameters[item.unit].positions
                    resident.add(item.unit)
                elif item.op in COMPUTE and item.op != Op.BACKWARD_WEIGHT:
                    assert resident >= set(table.units[item.unit].parameters)
                elif item.op == Op.RELEASE:
                    resident.remove(item.unit)
            assert not resident


def test_no_more_units_than_asked_for(drawn):
    """More resident units than residency and prefetch allow: memory that was not planned for."""
    seen = Counter()
    for config, plan in drawn:
        zero, table = config.zero, plan.table
        if zero.stage < 3 or zero.residency == "step":
            continue
        for position, program in enumerate(plan.programs["train"]):
            widest, of_stage = 0, defaultdict(set)
            for unit in map(table.units.__getitem__, table.units_of(position)):
                windowed = {p for p in unit.parameters if not table.parameters[p].whole}
                widest = max(widest, len(windowed))  # 2: the head, with the tied embedding
                of_stage[unit.stage] |= windowed
            allowed = max(map(len, of_stage.values())) if zero.residency == "stage" else zero.residency
            most = max(len(resident) for _, resident in residents(program, table))
            assert most <= max(allowed, widest) + zero.prefetch * max(1, widest)
            seen[most == max(allowed, widest) + zero.prefetch] += 1
    assert min(seen[True], seen[False]) > 20, "a limit that nothing comes near says nothing"


def test_the_weights_half_needs_no_parameter():
    """A split backward that keeps or gathers a unit for its second half, which multiplies activations by
    gradients alone."""
    plan = plan_of("parallel.schedule=zb-h1", "parallel.pp=2", "parallel.dp=2", "train.global_batch_size=8",
                   "zero.stage=3", "zero.prefetch=0")
    absent = 0
    for position, program in enumerate(plan.programs["train"]):
        for item, resident in residents(program, plan.table):
            if item.op == Op.BACKWARD_WEIGHT:
                assert not [slot for slot in effects(item, plan.table, position).reads
                            if slot.kind == "param"]
                absent += not resident & set(plan.table.units[item.unit].parameters)
    assert absent > 5


# ---------------------------------------------------------------- reductions

OFTEN = [(m, k) for m, k in product((1, 3, 4, 8), (1, 2, 3, 7, "step"))]
PLACES = {
    "pp": ["parallel.pp=2"], "pp1-tied": ["parallel.pp=1"],
    "split": ["parallel.pp=2", "parallel.schedule=zb-h1"],
    "v-tied": ["parallel.pp=2", "parallel.schedule=zb-v"],
    "groups": ["parallel.pp=2", "parallel.dp=4", "zero.shard_size=2"],
    "sp": ["parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true"],
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_number_of_reductions(place, stage):
    """ceil(m / k) over the ranks that share a unit, for any k and m, and once what then remains: copies of
    other groups, the other end of a tied embedding. A tied embedding on one position gets two gradients a
    micro-batch and is reduced as often."""
    config = load(None, [*BASE, "model.layers=4", "parallel.dp=2", "train.global_batch_size=4",
                         f"zero.stage={stage}",
                         *PLACES[place]])
    for m, k in OFTEN:
        config.train.global_batch_size, config.zero.reduce_every = m * config.dp, k
        assert not validate(config)
        plan = make_plan(config)
        times = 1 if k == "step" else -(-m // int(k))
        for position, program in enumerate(plan.programs["train"]):
            reduced = Counter((item.unit, item.group) for item in program if item.op == Op.REDUCE)
            often = ("tp", "dp", "shard")
            expected = {(p, step.group): times if step.group in often else 1
                        for p in plan.table.held(position) for step in plan.table.shards.reductions(p)}
            assert reduced == Counter(expected), (m, k)


def test_no_reduction_waits_longer_than_it_should(drawn):
    """Gradients of more than k micro-batches in one reduction: whole gradients that live longer than asked
    for."""
    for config, plan in drawn:
        for position, program in enumerate(plan.programs["train"]):
            added: dict[int, int] = Counter()
            for item in program:
                if item.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                    added.update(plan.table.units[item.unit].parameters)
                elif item.op == Op.REDUCE and item.group == plan.table.parameters[item.unit].shard_group:
                    users = sum(item.unit in plan.table.units[u].parameters
                                for u in plan.table.units_of(position))
                    assert 0 < added.pop(item.unit) <= config.reduce_every * users
            assert not added


@pytest.mark.parametrize("m, k", [(1, 1), (4, 1), (4, 2), (4, 4), (5, 2), (8, 3)])
def test_traffic_of_zero_2(m, k):
    """(m/k + 1) Psi (N-1)/N elements a step, and at stage 1 twice Psi (N-1)/N: what ZeRO-2 costs with
    accumulation."""
    for stage, times in ((1, 1), (2, -(-m // k))):
        often = [f"zero.reduce_every={k}"] if stage == 2 else []
        plan = plan_of("parallel.dp=4", f"train.global_batch_size={4 * m}", f"zero.stage={stage}", *often)
        sent = sum(sent_by(plan.table, item).get("dp", 0) for item in plan.programs["train"][0])
        psi = sum(unit.numel for unit in plan.table.parameters.values())
        assert sent == (times + 1) * psi * 4 * 3 // 4


# ---------------------------------------------------------------- buffers


def test_buffers_are_enough_and_no_more(drawn):
    """A pool that runs dry in the middle of a step, or one with buffers that nobody ever takes. Played from
    the instructions, as the handlers take and give: a GATHER takes and a RELEASE gives; a gradient is taken
    when the first is added and given when its reduction is issued."""
    for config, plan in drawn:
        table, analysis = plan.table, Analysis(plan)
        for position in range(config.parallel.pp):
            numel = {p: table.parameters[p].numel for p in table.held(position)}
            times = {"param": [], "grad": []}  # sizes of what is taken, after each instruction
            for programs in plan.programs.values():
                holds = {"param": set(), "grad": set()}
                for item in programs[position]:
                    if item.op == Op.GATHER and not table.parameters[item.unit].whole:
                        holds["param"].add(item.unit)
                    elif item.op == Op.RELEASE:
                        holds["param"].discard(item.unit)
                    elif item.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) and config.zero.stage >= 2:
                        holds["grad"].update(table.units[item.unit].parameters)
                    elif item.op == Op.REDUCE and item.group == table.parameters[item.unit].shard_group:
                        holds["grad"].discard(item.unit)
                    for kind, units in holds.items():
                        times[kind].append([numel[p] for p in units])
            pools = analysis.buffers(position)
            for kind, sizes, spare in (("param", pools.params, 0), ("grad", pools.grads, 1)):
                ends, separate = sorted(sizes), Counter()
                for taken in times[kind]:
                    separate |= Counter(taken)
                # a buffer is for sizes above the next smaller one's
                for below, end in zip([0, *ends], ends, strict=False):
                    most = max(sum(below < size <= end for size in taken) for taken in times[kind])
                    num_units = sum(below < size <= end for size in numel.values())
                    assert sizes[end] == min(most + spare, num_units) > 0
                assert max(separate, default=0) == max(ends, default=0)
                own = sum(size * min(count + spare, Counter(numel.values())[size])
                          for size, count in separate.items())
                assert sum(size * count for size, count in sizes.items()) <= own
            times = 2 if config.precision.reduce_dtype != config.precision.grad_dtype else 1
            assert pools.staging == max(numel.values(), default=0) * 4 * times


def test_bytes_by_stage():
    """Slots whose sizes do not go down with the stage: full gradients or parameters that are held, but not in
    the plan."""
    sizes = {}
    for stage in range(4):
        table = plan_of("parallel.dp=4", f"zero.stage={stage}", "train.global_batch_size=4").table
        psi = sum(unit.numel for unit in table.parameters.values())
        sizes[stage] = {kind: sum(table.size(Slot(kind, p)) for p in table.parameters) / psi
                        for kind in ("param", "pshard", "state", "wgrad", "gshard")}
    assert [sizes[stage]["state"] for stage in range(4)] == [8, 2, 2, 2]
    assert [sizes[stage]["gshard"] for stage in range(4)] == [4, 1, 1, 1]
    assert [sizes[stage]["pshard"] for stage in range(4)] == [0, 0, 0, 1]
