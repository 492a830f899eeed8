"""Thousands of configurations: each gives a plan that is legal, complete and free of deadlock, and one
digest."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from threed.base.errors import ConfigError
from threed.config.load import load
from threed.config.stages import stage_runs
from threed.config.validate import validate
from threed.planner import analyse, make_plan
from threed.program.instruction import COMPUTE, Op
from threed.program.plan import Plan
from threed.program.walk import Mode, walk
from threed.schema import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)


def draw(rng: random.Random) -> Config:
    """A random valid config."""
    while True:
        tp, pp, dp = rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 2, 3, 4, 6)), rng.choice((1, 2, 3))
        micro, count = rng.choice((1, 2)), rng.choice((1, 2, 3, 4, 7))
        heads = tp * rng.choice((1, 2))
        model = ModelConfig(
            layers=rng.randint(1, 8), heads=heads, hidden=heads * 8, seq_len=16, vocab=100, vocab_multiple=32,
            kv_heads=rng.choice((None, tp)), position=rng.choice(("rotary", "learned")),
            bias=rng.random() < 0.5,
            norm=rng.choice(("layernorm", "rmsnorm")), activation=rng.choice(("gelu", "swiglu")),
            ffn_hidden=64,
            tie_embeddings=rng.random() < 0.5)
        config = Config(
            model, ParallelConfig(dp, tp, pp, rng.choice(("gpipe", "1f1b")),
                                  sequence_parallel=tp > 1 and rng.random() < 0.5,
                                  layers_per_unit=rng.choice((1, 1, 2, 3))),
            ZeroConfig(rng.choice((0, 1))), precision=PrecisionConfig(rng.choice(("fp32", "bf16"))),
            data=DataConfig(),
            train=TrainConfig(global_batch_size=micro * dp * count, micro_batch_size=micro,
                              eval_every=rng.choice((0, 5))))
        units = sum(stage_runs(config))
        if pp <= units and rng.random() < 0.5:  # stages as uneven as can be
            cuts = [0, *sorted(rng.sample(range(1, units), pp - 1)), units]
            config.parallel.stage_units = [b - a for a, b in zip(cuts, cuts[1:])]
        if not validate(config):
            return config


@pytest.mark.parametrize("seed, count", [(7, 240), pytest.param(10, 2400, marks=pytest.mark.slow)])
def test_generated_configs(seed, count):
    """A combination of features that gives a plan that is refused, or one that cannot run in some mode."""
    rng, seen, digests = random.Random(seed), Counter(), {}
    for _ in range(count):
        config = draw(rng)
        plan = make_plan(config)  # which checks it
        digests.setdefault(plan.digest, set()).add(content(plan))
        seen.update((config.parallel.schedule, config.parallel.pp, f"zero {config.zero.stage}",
                     f"tied {config.model.tie_embeddings}", f"sp {config.parallel.sequence_parallel}",
                     f"uneven {config.parallel.stage_units is not None}", *plan.programs))
    assert all(len(contents) == 1 for contents in digests.values()), "one digest for two different plans"
    assert len(digests) > count * 0.7
    assert len(seen) == 17 and min(seen.values()) > count / 24, f"a feature is hardly drawn: {seen}"


def content(plan: Plan) -> str:
    return repr((plan.table, plan.programs))


def test_nothing_is_stuck_in_any_mode():
    """`check` that no longer walks: each mode is walked here once more, on a part of the configs."""
    rng = random.Random(8)
    for _ in range(200):
        analysis = analyse(draw(rng))
        for name, programs in analysis.plan.programs.items():
            links = analysis.links(name)
            for mode in Mode:
                when = walk(programs, links, mode, lambda *_: 1.0)
                assert when.stuck == []
                assert all(end > start for row in zip(when.start, when.end) for start, end in zip(*row))


def test_digest():
    """Two builds of one config that differ, or two configs with one digest: ranks would refuse to run equal
    plans, or run different ones."""
    rng = random.Random(9)
    for _ in range(50):
        config = draw(rng)
        assert make_plan(config).digest == make_plan(config).digest
    base = ["model.layers=4", "parallel.pp=2", "train.global_batch_size=4", "model.vocab=100"]
    changes = ["parallel.schedule=gpipe", "zero.stage=0", "parallel.dp=2", "parallel.tp=2",
               "model.tie_embeddings=false",
               "model.layers=5", "train.global_batch_size=8", "train.micro_batch_size=2",
               "train.eval_every=1",
               "parallel.stage_units=[1,5]", "precision.dtype=bf16", "model.seq_len=64", "model.hidden=256",
               "parallel.layers_per_unit=2", "model.position=learned", "model.bias=false"]
    digests = [make_plan(load(None, [*base, *extra])).digest
               for extra in [[], *([change] for change in changes)]]
    assert len(set(digests)) == len(digests)


def test_digest_does_not_depend_on_the_process():
    """A digest that depends on hash seeds: every run would stop at the first step."""
    code = ("from threed.config.load import load; from threed.planner import make_plan; "
            "print(make_plan(load(None, ['parallel.pp=4', 'train.eval_every=1'])).digest)")
    digests = {run(code, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert digests == {make_plan(load(None, ["parallel.pp=4", "train.eval_every=1"])).digest}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_each_pass_puts_in_what_it_should(stage, tied):
    """Too few collectives train wrongly, too many cost bandwidth: one GATHER and one REDUCE a unit and group
    a step."""
    plan = make_plan(load(None, ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2",
                                 "parallel.sequence_parallel=true",
                                 "train.global_batch_size=8", f"zero.stage={stage}", "train.eval_every=1",
                                 f"model.tie_embeddings={tied}"]))
    for position, program in enumerate(plan.programs["train"]):
        held = plan.table.held(position)
        gathers = [item.unit for item in program if item.op == Op.GATHER]
        assert sorted(gathers) == (sorted(held) if stage == 1 else [])
        reduces = Counter((item.unit, item.group) for item in program if item.op == Op.REDUCE)
        assert reduces == Counter((p, step.group) for p in held for step in plan.table.shards.reductions(p))
        assert [item.unit for item in program if item.op == Op.STEP] == list(held)
        ties = [item for item in program if item.group == "tie"]
        assert len(ties) == int(tied)
    for program in plan.programs["evaluate"]:
        assert not {item.op for item in program} & {Op.BACKWARD, Op.REDUCE, Op.STEP}
        assert all("none" in (item.keep, item.gradients) for item in program
                   if item.op in (Op.FORWARD, Op.CLIP))
        assert sum(item.op == Op.RELEASE for item in program) == sum(item.op == Op.GATHER for item in program)


def test_units_of_a_position_run_there_only():
    """A unit that runs where its parameters are not."""
    plan = make_plan(load(None, ["parallel.pp=3", "parallel.stage_units=[1,8,1]",
                                 "train.global_batch_size=4"]))
    for position, program in enumerate(plan.programs["train"]):
        assert {item.unit for item in program if item.op in COMPUTE} == set(plan.table.units_of(position))


def test_large_mesh_without_torch():
    """`check` and `show` of 4096 ranks on a laptop: seconds, and no import of torch."""
    code = """if True:
        import sys, time
        from threed.config.load import load
        from threed.planner import make_plan
        begin = time.monotonic()
        config = load(None, ["model.name=gpt3-175b", "parallel.dp=32", "parallel.tp=8", "parallel.pp=16",
                             "parallel.sequence_parallel=true", "train.global_batch_size=1536"], 4096)
        plan = make_plan(config)
        assert "torch" not in sys.modules and "megatron" not in sys.modules
        print(len(plan), time.monotonic() - begin)"""
    instructions, seconds = run(code).split()
    assert int(instructions) > 10_000 and float(seconds) < 10


def run(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True,
                          check=False,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_plan_needs_a_valid_config():
    """An invalid config never reaches the planner."""
    with pytest.raises(ConfigError):
        make_plan(load(None, ["parallel.pp=100"]))
