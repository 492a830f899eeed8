"""Random layouts, and what short plans and the full plan say of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from threed.base.errors import ThreedError
from threed.config.validate import validate
from threed.layout_search.best_first import Search, SearchResult
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of, schedules
from threed.layout_search.request import Question, ask
from threed.layout_search.short_plan import ShortPlans
from threed.models.tiling import folds_of
from threed.planner import make_plan
from threed.prediction.analytic import cost
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.prediction.peak import fullest, peaks
from threed.program.analysis import Analysis
from threed.schedules.orders import SCHEDULES
from threed.schema import Config

TOY = "configs/toy.yaml"
H100 = Hardware.parse("h100-sxm")
QUIET = ["train.eval_every=0", "checkpoint.every=0"]


class Compared(NamedTuple):
    layout: Layout
    fast_s: float
    full_s: float
    fast_bytes: int  # of the fullest rank
    full_bytes: int

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
    tiles, reduced = bounds.tiles(Layout(tp)), bounds.config.precision.dtype
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


def compared(base: Config, hardware: Hardware, seed: int, count: int, most: int = 16) -> Iterator[Compared]:
    """So many layouts that can run, of at most `most` micro-batches."""
    rng, bounds = random.Random(seed), Bounds(base, hardware)
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
        analysis, short = Analysis(plan), ShortPlans(config, hardware)
        total_s = step(analysis, cost(plan, hardware), hardware).total_s
        yield Compared(layout, short.step_s(), total_s, short.peak_bytes(),
                       fullest(peaks(analysis, hardware)).total)


def searched(devices: int, *overrides: str, memory: float = 80e9,
             rounding: bool = False) -> tuple[Question, SearchResult]:
    """What is asked, and what a search finds for the toy on H100s."""
    asked = ask(TOY, ["run.device=auto", *overrides], rounding)
    return asked, Search(asked.base, H100, int(memory), rounding=rounding).run(devices, asked.fixed)
