"""The report of `threed predict CONFIG`: step time, bubbles, memory over time and bytes, from a plan and the
costs of its instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from threed.base.quantity import many, show_bytes, show_count, show_seconds
from threed.base.texttable import render, wrapped
from threed.prediction.contention import PricedPlan, step
from threed.prediction.hardware import Hardware
from threed.prediction.peak import Peak, peaks, temporaries_of
from threed.prediction.peak import show as show_peak
from threed.program.analysis import Analysis
from threed.program.forms import Form
from threed.program.instruction import COMPUTE, Op
from threed.program.link import Links, joined
from threed.program.names import SNAPSHOT, VERIFY
from threed.program.order import simulated
from threed.program.seam import seam_of
from threed.program.show import timeline
from threed.program.summary import sent_over, stages
from threed.program.traffic import moved_by
from threed.program.walk import Cost, Mode, Walk, walk

SAMPLES = 50  # points of memory over time


def report(priced: PricedPlan, machine: Hardware, verify_every: int = 0) -> dict[str, Any]:
    """The document of `threed predict --json`.

    Times are of one train step, and bytes of one rank of a position, by tier: device, host, disk; on a
    device, `peak_bytes` are those of `prediction.peak`, and `peak` says what they are made of.
    A position is busy while it computes, by the clock: where ranks share processors, each takes longer.
    Offloaded values keep their memory on the host and on disk all the time. `exposed_transfer_s`: how much
    longer the step is than if moves between tiers were free; `exposed_host_s`: than if the host's steps were
    free, too. `verify`: how much longer a step takes that is computed twice, and a step on average (without
    checksums)."""
    plan, cost = priced.plan, priced.cost
    analysis, links = priced.analysis, priced.analysis.simulated("train")
    seconds, (when, total) = priced.seconds, priced.step
    from threed.prediction.transient import working  # torch

    held, temporaries = stages(analysis), temporaries_of(plan)
    slower = total / when.total_s if when.total_s else 1.0  # ranks that share processors take turns
    rows = []
    for position, peak in enumerate(peaks(analysis, machine, temporaries, held)):
        took = [end - start for start, end in zip(when.start[position], when.end[position], strict=True)]
        busy = slower * sum(_seconds(links[position], took, _works))
        kept, mine = working(analysis, position, temporaries), held[position]
        rows.append({
            "bubble": max(0.0, 1.0 - busy / total) if total else 0.0, "busy_s": busy,
            "peak_bytes": {"device": peak.total, "disk": mine.disk_bytes,
                           "host": mine.host_bytes + mine.snapshot_bytes},
            "peak": peak._asdict(),
            "transfer_s": _transfers(links[position], seconds[position]),
            "host_s": sum(_seconds(links[position], seconds[position], _steps_on_host)),
            "memory": [{"seconds": slower * when.start[position][i],
                        "device": peak.fixed_bytes + kept[i] + peak.taken_bytes}
                       for i in highest(kept, SAMPLES)],
            **mine.document(),
        })
    bubble = sum(row["bubble"] for row in rows) / len(rows)
    longer = {"exposed_transfer_s": 0.0, "exposed_host_s": 0.0}
    if any(row["transfer_s"] for row in rows):
        on_host = [{unit for unit in plan.table.stepped(position) if plan.table.shards.away(unit)}
                   for position in range(len(rows))]
        without: dict[str, Cost] = {
            "exposed_transfer_s": lambda at, item: 0.0 if item.op in _BETWEEN_TIERS else cost(at, item),
            "exposed_host_s": lambda at, item: 0.0 if item.op in _BETWEEN_TIERS or (
                item.op == Op.STEP and item.unit in on_host[at]) else cost(at, item)}
        longer = {name: total - step(analysis, free, priced.hardware).total_s
                  for name, free in without.items()}
    return {"step_time": total, "bubble": bubble, **longer,
            "costs": priced.source, "digest": analysis.digest,
            "checkpoint": _checkpoint(analysis, cost, when), "stages": rows, "slower": slower,
            **_verifying(analysis, cost, verify_every, slower)}


def highest(values: Sequence[float], most: int) -> list[int]:
    """The index of the highest of each run of values, where about `most` runs cover all: so a curve of few
    points keeps its peak."""
    every = max(1, len(values) // most)
    return [max(range(first, min(first + every, len(values))), key=values.__getitem__)
            for first in range(0, len(values), every)]


def _checkpoint(analysis: Analysis, cost: Cost, when: Walk) -> dict[str, float] | None:
    """For a checkpoint that is written while the run goes on: bytes a rank, seconds of the copy to the host,
    and the delay of the next step, whose STEPs wait for the copy. None where the plan makes no such copy.
    `when`: the walk of a step."""
    table, copies = analysis.table, analysis.plan.programs.get(SNAPSHOT)
    if copies is None:
        return None
    both = [joined(*links) for links in zip(analysis.links(SNAPSHOT), analysis.links("train"), strict=True)]
    links = [simulated(links, table, seam_of(table, position), analysis.buffers(position))
             for position, links in enumerate(both)]
    copied = timeline(analysis, SNAPSHOT, cost)
    longer = 0.0
    if any(_late(linked, *times) for linked, *times in zip(links, copied.end, when.start, strict=True)):
        longer = walk([linked.program for linked in links], links, Mode.BUFFERED, cost).total_s - when.total_s
    return {"bytes": max(sum(moved_by(table, item) for item in copy) for copy in copies),
            "copy_s": max(sum(cost(position, item) for item in copy) for position, copy in enumerate(copies)),
            "blocked_s": max(0.0, longer)}


def _late(links: Links, copied: Sequence[float], begun: Sequence[float]) -> bool:
    """Whether copies end after something of the step that waits for them, or for their lane, has begun.
    `links`: of the copies and then of the step."""
    count = len(copied)
    waits = [pair for pairs in links.pairs() for pair in zip(*pairs, strict=True)
             if pair[0] < count <= pair[1]]
    lanes = {form.effect.lane: index for index, form in enumerate(links.forms[:count])}  # the last of each
    waits += [(lanes[form.effect.lane], index) for index, form in enumerate(links.forms)
              if index >= count and form.effect.lane in lanes]
    return any(copied[first] > begun[then - count] for first, then in waits)


def _verifying(analysis: Analysis, cost: Cost, every: int, slower: float) -> dict[str, Any]:
    if not every:
        return {}
    rehearsal_s = slower * timeline(analysis, VERIFY, cost).total_s
    return {"verify": {"every": every, "rehearsal_s": rehearsal_s, "step_s": rehearsal_s / every}}


_BETWEEN_TIERS = (Op.OFFLOAD, Op.FETCH)


def _transfers(links: Links, seconds: Sequence[float]) -> dict[str, float]:
    """Seconds that a position's links between tiers are busy."""
    lanes = dict.fromkeys(form.effect.lane for form in dict.fromkeys(links.forms)
                          if form.item.op in _BETWEEN_TIERS)
    return {lane: sum(_seconds(links, seconds, lambda form, lane=lane: form.item.op in _BETWEEN_TIERS
                               and form.effect.lane == lane)) for lane in lanes}


def _works(form: Form) -> bool:
    """Whether the device computes. A step on the host is not its work."""
    return form.item.op in COMPUTE or (form.item.op == Op.STEP and form.effect.lane == "compute")


def _steps_on_host(form: Form) -> bool:
    return form.item.op == Op.STEP and form.effect.lane != "compute"


def _seconds(links: Links, seconds: Sequence[float], chosen: Callable[[Form], bool]) -> list[float]:
    """Seconds of the instructions of some forms."""
    forms = {form for form in dict.fromkeys(links.forms) if chosen(form)}
    return [took for form, took in zip(links.forms, seconds, strict=True) if form in forms]


def _speeds(values: dict[str, Any]) -> Iterator[str]:
    for counted in ("tokens", "samples"):
        if (rate := values.get(f"{counted}_per_s")) is not None:
            yield f"{show_count(rate)} {counted}/s"
    if values.get("mfu") is not None:
        yield f"MFU {values['mfu']:.1%}"


def _idle(values: dict[str, Any]) -> str:
    """What makes a device wait: without a pipeline, traffic that no computation hides."""
    return "bubble" if len(values["stages"]) > 1 else "exposed traffic"


def _peaks(values: dict[str, Any], columns: int | None) -> Iterator[str]:
    """What the highest peak is made of, and a warning where a device has not that much."""
    yield wrapped(show_peak([Peak(**row["peak"]) for row in values["stages"]]), columns)
    if values.get("too_much"):
        room = show_bytes(values["memory_bytes"]).replace(" ", "")
        yield (f"warning: {values['too_much']}; threed check --memory {room} looks for settings that fit, "
               "threed search for another mesh")
    if values.get("host_too_much"):
        yield wrapped(f"warning: {values['host_too_much']}", columns)


def show_costs(costs: str, is_usual: bool, columns: int | None = None) -> list[str]:
    """Whose prices times are. `is_usual`: of the machine that nobody has asked for."""
    usual = "(by default; for another machine --hardware NAME|FILE, for this one's processors run.device=cpu)"
    return [f"costs: {costs}", *([wrapped(usual, columns)] if is_usual else [])]


def show(values: dict[str, Any], columns: int | None = None) -> str:
    """The report as a table. `columns`: of a terminal, if it is to fit."""
    rows, axes = [], sent_over(values["stages"])
    for position, row in enumerate(values["stages"]):
        peak, moving = row["peak_bytes"]["device"], row["activation_peak_bytes"]
        rows.append((f"pp{position}", show_seconds(row["busy_s"]), f"{row['bubble']:.1%}", show_bytes(peak),
                     show_bytes(row["peak"]["fixed_bytes"]), show_bytes(moving),
                     *(show_bytes(row["sent_bytes"].get(axis, 0)) for axis in axes)))
    is_usual = values.get("default_hardware") and not values.get("processors")
    lines = [*show_costs(values["costs"], bool(is_usual), columns),
             f"step {show_seconds(values['step_time'])}, {_idle(values)} {values['bubble']:.1%}"
             + "".join(f", {text}" for text in _speeds(values)),
             render(("a rank of", "busy", "bubble", "peak", "fixed", "activations",
                     *(f"sends {axis}" for axis in axes)), rows, columns)]
    lines += _peaks(values, columns)
    if values["slower"] > 1:
        lines.append(wrapped(f"{values['devices']} ranks share "
                             f"{many(values['processors'], 'processor')}: what one computes takes "
                             f"{values['slower']:.1f} times as long, which is no bubble", columns))
    for position, row in enumerate(values["stages"]):
        if row["moved_bytes"]:
            links = ", ".join(f"{lane} {show_bytes(size)} in {show_seconds(row['transfer_s'].get(lane, 0.0))}"
                              for lane, size in sorted(row["moved_bytes"].items()))
            links += f"; the host steps in {show_seconds(row['host_s'])}" if row["host_s"] else ""
            lines.append(wrapped(f"pp{position} holds {show_bytes(row['host_bytes'])} on the host and "
                                 f"{show_bytes(row['disk_bytes'])} on disk; moves a step: {links}",
                                 columns))
    if saved := values["checkpoint"]:
        lines.append(wrapped(f"a checkpoint copies {show_bytes(saved['bytes'])} a rank to the host in "
                             f"{show_seconds(saved['copy_s'])}, beside the next step, which takes "
                             f"{show_seconds(saved['blocked_s'])} longer", columns))
    if any(row["moved_bytes"] for row in values["stages"]):
        moves, both = (show_seconds(max(0.0, values[f"exposed_{what}_s"])) for what in ("transfer", "host"))
        on_host = any(row["host_s"] for row in values["stages"])
        steps = f", and with the host's steps {both}" if on_host else ""
        lines.append(f"moving between tiers makes the step {moves} longer than if it were free{steps}")
    if (verify := values.get("verify")) is not None:
        lines.append(wrapped(f"every {verify['every']} steps one is computed twice: "
                             f"{show_seconds(verify['rehearsal_s'])} longer, "
                             f"{show_seconds(verify['step_s'])} a step on average, without checksums",
                             columns))
    if (whole := values.get("training")) is not None:
        money = f", {whole['dollars']:,.0f} dollars" if whole["dollars"] else ""
        lines.append(f"{show_count(whole['tokens'])} tokens take {whole['days']:,.1f} days, "
                     f"{whole['device_hours']:,.0f} device-hours{money}")
    return "\n".join(lines)
