"""`threed.search`: the best layouts of a config on so many devices, as a document and as a table."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threed.base.errors import InputError, ThreedError, check_type
from threed.base.quantity import BYTES, many, parse_memory, show_bytes, show_count, show_seconds
from threed.base.texttable import wrapped
from threed.config.load import checked
from threed.layout_search.best_first import TRIES, Search, SearchResult, making_plans
from threed.layout_search.helps import helps
from threed.layout_search.layout import Layout, without_cp
from threed.layout_search.request import Question, ask, write
from threed.layout_search.short_plan import ShortPlans
from threed.layout_search.space import NO_MEMORY, in_full
from threed.models.model import model_flops
from threed.prediction.hardware import DEFAULT, OF_CPUS, Hardware

if TYPE_CHECKING:
    from threed.prediction.advise import Needs

_PLANNED = 10  # ideas about which the full plan decides
_BY_PLAN = "does not fit, or cannot run, by the full plan"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class RankedLayout:
    """A layout by its full plan."""

    layout: str  # in words
    step_s: float
    fast_s: float  # by short plans
    tokens_per_s: float
    mfu: float
    peak_bytes: int
    bubble: float  # share of the step
    exposed_s: float
    lost_s: dict[str, float]  # besides computation, by what costs it
    bottleneck: str
    helps: dict[str, float]  # what -> by which share a step (a sequence) would be shorter
    changes: dict[str, Any]  # dotted keys of its config

    @property
    def exchanges_s(self) -> float:
        return self.lost_s["exchanges"]


@dataclass(frozen=True)
class Ranking:
    """What a search returns: the best layout of each idea, the fastest first."""

    config: str
    devices: int
    hardware: str
    memory_bytes: int  # of a device
    usable_bytes: int
    fixed: dict[str, Any]  # field of a layout -> its only value
    rounding: bool
    considered: int
    timed: int
    seconds: float
    planned_seconds: float
    dropped: dict[str, int]  # reason -> layouts
    without_cp: str  # what there is with whole sequences on each rank, where the best has parts of them
    layouts: list[RankedLayout]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def search(path: str | Path, devices: int, overrides: list[str] | None = None, hardware: str = "",
           memory: str | int | None = None, progress: Progress = lambda _: None,
           rounding: bool = False) -> dict[str, Any]:
    """Search the best layout of a config's model and global batch on so many devices: mesh and the order of
    its axes, schedule, micro-batch, ZeRO, recomputation, sequence parallelism, offload, tiles.

    What `overrides` say of these stays as it is; what the file says of them is left out. `hardware`: as in
    `predict`. `memory`: of a device, such as "80GB"; None: that of the hardware; a share of it stays free, as
    in `predict` (`free_share`). `rounding`: compare gradients that are sent in 16 bits, too, which rounds
    their sums.

    Returns the document of `threed search --json`. `layouts` has the best layout of each idea
    (`Layout.idea`), the fastest first, with numbers of its full plan: `step_s`, `tokens_per_s`, `mfu`,
    `peak_bytes`, `bubble`; and `changes`, the keys of its config. `dropped`: reason -> number of layouts.
    Raises InputError if no layout fits; its message names the nearest one.

    >>> threed.search("configs/llama3-8b.yaml", 64, ["parallel.tp=4"], "h100-sxm")["layouts"][0]["layout"]
    """
    return ranked(path, devices, overrides, hardware, memory, progress, rounding).document()


def ranked(path: str | Path, devices: int, overrides: list[str] | None = None, hardware: str = "",
           memory: str | int | None = None, progress: Progress = lambda _: None,
           rounding: bool = False) -> Ranking:
    """What `search` makes its document of."""
    check_type("devices", devices, int, "the number of devices")
    if devices < 1:
        raise InputError(f"devices={devices}: must be at least 1")
    asked = ask(path, overrides, rounding)
    machine = Hardware.parse(hardware, OF_CPUS if asked.base.run.device == "cpu" else DEFAULT)
    room = parse_memory(str(memory)) if memory is not None else machine.memory_bytes
    limit = machine.usable_bytes(room)
    searched = Search(asked.base, machine, limit, _PLANNED, rounding)
    result = searched.run(devices, asked.fixed, progress)
    begin = time.monotonic()
    with making_plans():
        rows = _planned(asked, searched, result, progress)
    if not rows:
        raise InputError(_nothing(result, devices, limit, room))
    planned_s = time.monotonic() - begin
    return Ranking(str(path), devices, machine.title, room, limit, asked.fixed, rounding, result.considered,
                   len(result.timed), result.seconds, planned_s, dict(result.dropped.most_common()),
                   _without_cp(asked, searched, rows, devices, progress), rows)


def _without_cp(asked: Question, searched: Search, rows: list[RankedLayout], devices: int,
                progress: Progress) -> str:
    """What there is without context parallelism; empty where the best layout has none, or it is asked for."""
    fixed = without_cp(asked.fixed)
    if rows[0].changes.get("parallel.cp", 1) == 1 or fixed is None:
        return ""
    progress("the same without parallel.cp")
    result = searched.again(keep=1).run(devices, fixed, progress)
    if result.timed:
        best = result.timed[0]
        return (f"without parallel.cp: {_show_step(best.step_s)}, {best.layout.text()}; "
                f"{result.dropped[NO_MEMORY]} layouts do not fit")
    if result.nearest is None:
        return "without parallel.cp no layout can run"
    size, layout = result.nearest
    return f"without parallel.cp nothing fits: the nearest, {layout.text()}, needs {show_bytes(size)}"


def _planned(asked: Question, searched: Search, result: SearchResult,
             progress: Progress) -> list[RankedLayout]:
    """The best layouts by the full plan: of each idea the fastest that fits."""
    if not result.timed:
        return []
    from threed.prediction.advise import measure  # imports torch, for temporaries

    rows, tries, done = [], Counter[object](), set[object]()
    machine, limit = searched.hardware, searched.memory

    def measured(layout: Layout) -> Needs | None:
        config = asked.config(layout)
        config.train.eval_every = config.checkpoint.every = 0  # a step has no part in them
        try:
            values = measure(checked(config), machine)
        except ThreedError:
            return None
        return values if values.peak.total <= limit else None

    for each in result.timed:
        idea = each.layout.idea
        if idea in done or tries[idea] == TRIES:
            continue
        tries[idea] += 1
        progress(f"plan {len(rows) + 1}: {each.layout.text()}")
        best_s = min((row.step_s for row in rows), default=math.inf)
        layout, paired = in_full(each.layout, asked.fixed)
        values = measured(layout)
        if values is None:
            result.dropped[_BY_PLAN] += 1
            continue
        row = _row(asked, machine, layout, values)
        if paired and row.exchanges_s > 0 and row.step_s - row.exchanges_s < best_s:
            values = measured(paired)
            if values is not None and values.step_s < row.step_s:
                row = _row(asked, machine, paired, values)
        done.add(idea)
        rows.append(row)
        if len(rows) == _PLANNED:
            break
    return sorted(rows, key=lambda row: row.step_s)


def _row(asked: Question, machine: Hardware, layout: Layout, measured: Needs) -> RankedLayout:
    base = asked.base
    plans = ShortPlans(asked.config(layout), machine)
    parts = plans.parts()
    step_s, ranks = measured.step_s, layout.tp * layout.pp * layout.data_ranks
    peak = machine.peak(BYTES[base.precision.dtype])
    waits = parts.bubble * parts.step_s - parts.dp_s - parts.ep_s - parts.offload_s
    inside = "collectives over tp" + " and cp" * (asked.config(layout).token_ranks > 1)
    lost = {"bubble": max(0.0, waits), "recomputation": parts.again_s, inside: parts.tp_s,
            "traffic over dp": parts.dp_s, "exchanges": parts.ep_s, "offload": parts.offload_s}
    most = max(lost, key=lambda name: lost[name])
    return RankedLayout(
        layout.text(), step_s, parts.step_s, base.tokens_per_step / step_s,
        model_flops(base.model, base.train.global_batch_size) / step_s / ranks / peak, measured.peak.total,
        parts.bubble, parts.tp_s + parts.dp_s + parts.ep_s, lost,
        most if lost[most] > 0.03 * step_s else "computation", helps(plans),
        asked.values_of(layout))


def _nothing(result: SearchResult, devices: int, limit: int, room: int) -> str:
    """Why no layout can run, and what is nearest."""
    counts = "; ".join(f"{count} {reason}" + (f" ({result.examples[reason]})" if reason in result.examples
                                              else "")
                       for reason, count in result.dropped.most_common())
    if result.nearest is None:
        return f"no layout of {many(devices, 'device')} can run: {counts or 'tp x pp x dp is another number'}"
    size, layout = result.nearest
    fits = f"no layout of {many(devices, 'device')} fits into {show_bytes(limit)} of {show_bytes(room)}"
    if result.dropped[NO_MEMORY] and not result.timed:
        fits += f": the nearest, {layout.text()}, needs {show_bytes(size)}"
    return f"{fits}. Dropped: {counts}. Take more devices, or fix fewer keys"


def write_best(ranking: Ranking, file: Path) -> None:
    """Write the config of the fastest layout."""
    best = ranking.layouts[0]
    write(file, best.changes,
          f"The fastest of {many(ranking.considered, 'layout')} of {ranking.config} on "
          f"{many(ranking.devices, 'device')},\nby threed search: {best.layout}\n"
          f"{show_seconds(best.step_s)} a step, {show_bytes(best.peak_bytes)} on {ranking.hardware}")


def show(ranking: Ranking, top: int = 10, columns: int | None = None) -> str:
    """The document as a table of its `top` layouts. `columns`: of a terminal, if it is to fit."""
    fixed = ", ".join(f"{name}={value}" for name, value in ranking.fixed.items())
    lines = [wrapped(f"{ranking.config} on {ranking.devices} x {ranking.hardware}, "
                     f"{show_bytes(ranking.usable_bytes)} of {show_bytes(ranking.memory_bytes)} each"
                     + (f"; fixed: {fixed}" if fixed else ""), columns),
             f"{many(ranking.considered, 'layout')} in {ranking.seconds:.1f} s, {ranking.timed} timed, "
             f"{many(len(ranking.layouts), 'idea')} planned in full in {ranking.planned_seconds:.1f} s"]
    lines += ["gradients sent in 16 bits are rounded: they change a run's numbers"] * ranking.rounding
    lines += [f"{count:8d} dropped: {reason}" for reason, count in ranking.dropped.items()]
    lines += [wrapped(ranking.without_cp, columns)] if ranking.without_cp else []
    lines += ["", "".join(text.rjust(11) for text in ("step", "tokens/s", "MFU", "memory", "bubble",
                                                      "exposed")) + "  layout"]
    for row in ranking.layouts[:top]:
        cells = (_show_step(row.step_s), show_count(row.tokens_per_s), f"{row.mfu:.1%}",
                 show_bytes(row.peak_bytes), f"{row.bubble:.1%}", show_seconds(row.exposed_s))
        help_ = ", ".join(f"{words} -{gain:.0%}" for words, gain in [*row.helps.items()][:2])
        numbers = "".join(cell.rjust(11) for cell in cells)
        texts = (row.layout, f"{row.bottleneck}; would help: {help_ or 'nothing that is tried'}")
        if columns is None or len(numbers) + 2 + max(map(len, texts)) <= columns:
            lines += [f"{numbers}  {texts[0]}", f"{'':{len(numbers)}}  {texts[1]}"]
        else:
            lines += [numbers, *(wrapped(f"    {text}", columns, " " * 6) for text in texts)]
    return "\n".join(lines)


def _show_step(step_s: float) -> str:
    """With digits that tell layouts apart."""
    return f"{step_s:.4g} s" if step_s >= 1 else show_seconds(step_s)


