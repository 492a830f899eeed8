"""`threed.search`: the best layouts of a config on so many devices, as a document and as a table."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threed.base.errors import InputError, ThreedError, check_type
from threed.base.quantity import BYTES, many, parse_memory, show_bytes, show_count, show_seconds
from threed.base.texttable import wrapped
from threed.config.load import checked
from threed.layout_search.best_first import TRIES, Search, SearchResult, making_plans
from threed.layout_search.helps import helps
from threed.layout_search.layout import Layout
from threed.layout_search.request import Question, ask, write
from threed.layout_search.short_plan import ShortPlans
from threed.layout_search.space import NO_MEMORY
from threed.models.model import model_flops
from threed.prediction.hardware import DEFAULT, OF_CPUS, Hardware

if TYPE_CHECKING:
    from threed.prediction.advise import Needs

_PLANNED = 12  # ideas about which the full plan decides
_BY_PLAN = "does not fit, or cannot run, by the full plan"
Progress = Callable[[str], None]


def search(path: str | Path, devices: int, overrides: list[str] | None = None, hardware: str = "",
           memory: str | int | None = None, progress: Progress = lambda _: None,
           rounding: bool = False) -> dict[str, Any]:
    """Search the best layout of a config's model and global batch on so many devices: mesh and the order of
    its axes, schedule, micro-batch, ZeRO, recomputation, sequence parallelism, offload, tiles.

    What `overrides` say of these stays as it is; what the file says of them is left out. `hardware`: as in
    `predict`. `memory`: of a device, such as "80GB"; None: that of the hardware; a share of it stays free, as
    in `predict` (`free_share`). `rounding`: compare gradients that are sent in 16 bits, too, which rounds
    their sums.

    Returns the document of `threed search --json`. `layouts` are the best of each idea, the fastest first,
    as priced by the full plan: `step_s`, `tokens_per_s`, `mfu`, `peak_bytes`, `bubble`, and `changes`: the
    keys of its config. `dropped`: reason -> number of layouts. Raises InputError where no layout fits, with
    what is nearest.

    >>> threed.search("configs/llama3-8b.yaml", 64, ["parallel.tp=4"], "h100-sxm")["layouts"][0]["layout"]
    """
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
    return {"config": str(path), "devices": devices, "hardware": machine.title, "memory_bytes": room,
            "usable_bytes": limit, "fixed": asked.fixed, "rounding": rounding,
            "considered": result.considered, "timed": len(result.timed), "seconds": result.seconds,
            "planned_seconds": time.monotonic() - begin, "dropped": dict(result.dropped.most_common()),
            "layouts": rows}


def _planned(asked: Question, searched: Search, result: SearchResult,
             progress: Progress) -> list[dict[str, Any]]:
    """The best layouts by the full plan: of each idea the fastest that fits."""
    if not result.timed:
        return []
    from threed.prediction.advise import measure  # imports torch, for temporaries

    rows, tries, done = [], Counter[object](), set[object]()
    machine, limit, fixed = searched.hardware, searched.memory, asked.fixed.get("pair")

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
        best_s = min((row["step_s"] for row in rows), default=math.inf)
        layout = each.layout._replace(pair=bool(fixed))
        values = measured(layout)
        if values is None:
            result.dropped[_BY_PLAN] += 1
            continue
        row = _row(asked, machine, layout, values)
        if fixed is None and _pairs_may_win(layout, row, best_s):
            paired = measured(layout._replace(pair=True))
            if paired is not None and paired.step_s < row["step_s"]:
                row = _row(asked, machine, layout._replace(pair=True), paired)
        done.add(idea)
        rows.append(row)
        if len(rows) == _PLANNED:
            break
    return sorted(rows, key=lambda row: row["step_s"])


def _pairs_may_win(layout: Layout, plain: dict[str, Any], best_s: float) -> bool:
    """Whether parallel.pair may make a layout the fastest. `plain`: its row without."""
    exchanges_s = plain["lost_s"]["exchanges"]
    return layout.can_pair and exchanges_s > 0 and plain["step_s"] - exchanges_s < best_s


def _row(asked: Question, machine: Hardware, layout: Layout, measured: Needs) -> dict[str, Any]:
    base = asked.base
    plans = ShortPlans(asked.config(layout), machine)
    parts = plans.parts()
    step_s, ranks = measured.step_s, layout.tp * layout.pp * layout.dp
    peak = machine.peak(BYTES[base.precision.dtype])
    waits = parts.bubble * parts.step_s - parts.dp_s - parts.ep_s - parts.offload_s
    lost = {"bubble": max(0.0, waits), "recomputation": parts.again_s, "collectives over tp": parts.tp_s,
            "traffic over dp": parts.dp_s, "exchanges": parts.ep_s, "offload": parts.offload_s}
    most = max(lost, key=lambda name: lost[name])
    return {"layout": layout.text(), "step_s": step_s, "fast_s": parts.step_s,
            "tokens_per_s": base.tokens_per_step / step_s,
            "mfu": model_flops(base.model, base.train.global_batch_size) / step_s / ranks / peak,
            "peak_bytes": measured.peak.total, "bubble": parts.bubble,
            "exposed_s": parts.tp_s + parts.dp_s + parts.ep_s, "lost_s": lost,
            "bottleneck": most if lost[most] > 0.03 * step_s else "computation",
            "helps": helps(base, machine, layout, plans), "changes": asked.values_of(layout)}


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


def write_best(values: dict[str, Any], file: Path) -> None:
    """Write the config of the fastest layout."""
    best = values["layouts"][0]
    write(file, best["changes"],
          f"The fastest of {many(values['considered'], 'layout')} of {values['config']} on "
          f"{many(values['devices'], 'device')},\nby threed search: {best['layout']}\n"
          f"{show_seconds(best['step_s'])} a step, {show_bytes(best['peak_bytes'])} on {values['hardware']}")


def show(values: dict[str, Any], top: int = 10, columns: int | None = None) -> str:
    """The document as a table of its `top` layouts. `columns`: of a terminal, if it is to fit."""
    rows = values["layouts"][:top]
    fixed = ", ".join(f"{name}={value}" for name, value in values["fixed"].items())
    lines = [wrapped(f"{values['config']} on {values['devices']} x {values['hardware']}, "
                     f"{show_bytes(values['usable_bytes'])} of {show_bytes(values['memory_bytes'])} each"
                     + (f"; fixed: {fixed}" if fixed else ""), columns),
             f"{many(values['considered'], 'layout')} in {values['seconds']:.1f} s, {values['timed']} timed, "
             f"{many(len(values['layouts']), 'idea')} planned in full in {values['planned_seconds']:.1f} s"]
    lines += ["gradients sent in 16 bits are rounded: they change a run's numbers"] * values["rounding"]
    lines += [f"{count:8d} dropped: {reason}" for reason, count in values["dropped"].items()]
    lines += ["", "".join(text.rjust(11) for text in ("step", "tokens/s", "MFU", "memory", "bubble",
                                                      "exposed")) + "  layout"]
    for row in rows:
        cells = (_show_step(row["step_s"]), show_count(row["tokens_per_s"]), f"{row['mfu']:.1%}",
                 show_bytes(row["peak_bytes"]), f"{row['bubble']:.1%}", show_seconds(row["exposed_s"]))
        help_ = ", ".join(f"{words} -{gain:.0%}" for words, gain in [*row["helps"].items()][:2])
        numbers = "".join(cell.rjust(11) for cell in cells)
        texts = (row["layout"], f"{row['bottleneck']}; would help: "
                                f"{help_ or 'nothing that is tried'}")
        if columns is None or len(numbers) + 2 + max(map(len, texts)) <= columns:
            lines += [f"{numbers}  {texts[0]}", f"{'':{len(numbers)}}  {texts[1]}"]
        else:
            lines += [numbers, *(wrapped(f"    {text}", columns, " " * 6) for text in texts)]
    return "\n".join(lines)


def _show_step(step_s: float) -> str:
    """With digits that tell layouts apart."""
    return f"{step_s:.4g} s" if step_s >= 1 else show_seconds(step_s)


