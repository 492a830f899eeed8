"""Fit: whether a plan fits into a device, and which other settings do. What `threed check` says with
--memory, --hardware and --advise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from threed.base.remember import remembering
from threed.base.texttable import wrapped
from threed.prediction import advise as advising
from threed.prediction import host, peak
from threed.prediction.predict import machine_of
from threed.prediction.report import show_costs
from threed.schema import Config


class FitRequest(NamedTuple):
    """`hardware`: as `predict` takes it; "": the default, whose memory is no limit. `memory`: bytes of a
    device; None: the hardware's. `columns`: of a terminal, if what is printed is to fit."""

    hardware: str
    memory: int | None
    advise: bool
    columns: int | None = None


def room_of(config: Config, asked: FitRequest) -> float:
    """Bytes of the device in question that a plan of the config may take."""
    return peak.plan_room(machine_of(asked.hardware, config), config, asked.memory)


@remembering()
def fit(config: Config, asked: FitRequest,
        progress: Callable[[str], None]) -> tuple[dict[str, Any], list[str], str | None]:
    """Values for the document of `check`, texts to print, and why the config does not fit (None: it does, or
    there is no limit)."""
    machine = machine_of(asked.hardware, config)
    limit = asked.memory if asked.memory is not None else (
        peak.memory_of(machine, config) if asked.hardware else None)
    values, texts = {}, []
    if asked.advise:
        rows = advising.advise(config, machine, limit, progress, bool(asked.hardware))
        values["advice"], here = [row.document() for row in rows], rows[0].needs
        costs, usual = config.parallel.costs, not asked.hardware and not machine.waits
        lines = show_costs(costs or machine.title, usual and costs is None, asked.columns)
        texts.append("\n".join([*lines, advising.show(rows, limit, asked.columns)]))
        values["costs"] = costs or machine.title
    else:
        here = advising.measure(config, machine, limit)
        texts.append(wrapped(peak.show(here.peaks), asked.columns))
    held, use = here.peaks, here.host
    if limit is None:
        return values, texts, None
    small, few = peak.too_much(held, machine, limit), None
    if small is None:
        texts[-1] += f"\n{peak.room(held, machine, limit)}"
    elif not asked.advise:
        small += "; --advise looks for settings that fit, threed search for another mesh"
    values |= peak.document(held, machine, limit)
    if asked.hardware:  # else nobody has said what the host is
        few = host.too_much(use, machine, config)
        values |= host.document(use, machine)
        if few is None and use.bytes:
            texts[-1] += f"\n{host.room(use, machine)}"
    return values, texts, "; and ".join(filter(None, (small, few))) or None
