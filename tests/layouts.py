"""Random layouts, and what short plans, the memory filter and the full plan say of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from threed.base.errors import ThreedError
from threed.config.validate import validate
from threed.layout_search.best_first import Search, SearchResult
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of, schedules
from threed.layout_search.memory_filter import MemoryFilter
from threed.layout_search.request import Question, ask
from threed.layout_search.short_plan import ShortPlans
from threed.models.tiling import folds_of
from threed.planner import make_plan
from threed.prediction.analytic import cost
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.program.analysis import Analysis
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.schedules.orders import SCHEDULES
from threed.schema import Config

TOY = "configs/toy.yaml"
H100 = Hardware.parse("h100-sxm")
QUIET = ["train.eval_every=0", "checkpoint.every=0"]


class Compared(NamedTuple):
    layout: Layout
    fast_s: float
    full_s: float
    fast_bytes: int  # without CUDA and NCCL
    full_bytes: int  # without temporaries, unless they are measured

    @property
    def error(self) -> float:
        return abs(self.fast_s / self.full_s - 1)


def short_s(config: Config, hardware: Hardware) -> float:
    """A step by short plans."""
    return ShortPlans(config, hardware).step_s()


def full_s(config: Config, hardware: Hardware) -> float:
    """A step by the full plan."""
    plan = make_plan(config)
    return step(Analysis(plan), cost(plan, hardware), hardware).total_s


def draw(rng: random.Random, bounds: Bounds) -> Layout:
    tp, dp, pp = rng.choice((1, 1, 2, 4, 8)), rng.choice((1, 2, 4, 8, 16)), rng.choice((1, 2, 3, 4))
    schedule = rng.choice(schedules()) if pp > 1 else "1f1b"
    stage, policy = rng.randrange(4) if dp > 1 else 1, rng.choice(("none", "selective", "full"))
    tiles, reduced = bounds.units().tiles(tp), bounds.config.precision.dtype
    layout = Layout(
        tp, pp, dp, rng.choice(("pp-dp-tp", "dp-pp-tp")), schedule, SCHEDULES[schedule].virtual or 2,
        rng.choice((1, 2)), tp > 1 and rng.random() < 0.5, stage,
        dp // 2 if stage and dp > 2 and rng.random() < 0.25 else dp,
        rng.choice((1, "stage", "step")) if stage == 3 else None,
        rng.choice((1, "step")) if stage >= 2 else None, policy,
        offload_optimizer=dp > 1 and rng.random() < 0.15,
        tile_linears=rng.choice(tiles) if tiles and rng.random() < 0.25 else None,
        reduce_dtype=reduced if dp > 1 and rng.random() < 0.25 else None)
    if not folds_of(bounds.config):
        return layout
    runs = [size for size in (1, 2, 4, 8) if tp * dp % size == 0]
    return layout._replace(ep=rng.choice(runs), sequence_parallel=tp > 1)


def compared(base: Config, hardware: Hardware, seed: int, count: int, most: int = 16,
             temporaries: bool = False) -> Iterator[Compared]:
    """So many layouts that can run, of at most `most` micro-batches. `temporaries`: they count, too."""
    rng, bounds = random.Random(seed), Bounds(base, hardware)
    memory_filter = MemoryFilter(bounds)
    while count:
        layout = draw(rng, bounds)
        config = config_of(layout, base)
        if validate(config) or not 1 <= config.num_microbatches <= most:
            continue
        try:
            plan = make_plan(config)
        except ThreedError:
            continue  # a schedule that needs more micro-batches, or more units
        count -= 1
        full = max(held(plan, temporaries))
        total_s = step(Analysis(plan), cost(plan, hardware), hardware).total_s
        yield Compared(layout, short_s(config, hardware), total_s,
                       memory_filter.bytes(layout) - memory_filter.taken(layout), full)


def held(plan: Plan, temporaries: bool = True) -> list[int]:
    """By position."""
    analysis = Analysis(plan)
    rows = stages(analysis)
    if not temporaries:
        return [row.fixed_bytes + row.activation_peak_bytes for row in rows]
    from threed.prediction.transient import peak_bytes, temporaries_of  # torch

    held = temporaries_of(plan)
    return [row.fixed_bytes + peak_bytes(analysis, position, held) for position, row in enumerate(rows)]


def searched(devices: int, *overrides: str, memory: float = 80e9,
             rounding: bool = False) -> tuple[Question, SearchResult]:
    """What is asked, and what a search finds for the toy on H100s."""
    asked = ask(TOY, ["run.device=auto", *overrides], rounding)
    return asked, Search(asked.base, H100, int(memory), rounding=rounding).run(devices, asked.fixed)
