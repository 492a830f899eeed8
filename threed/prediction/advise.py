"""Advise: compare a config with its neighbours. What does another setting save, and what does it cost?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from threed.base.errors import ThreedError
from threed.base.mesh import FOLDS
from threed.base.quantity import divisors, show_bytes, show_seconds
from threed.base.remember import remembering
from threed.base.texttable import render, wrapped
from threed.config.validate import validate
from threed.models.tiling import folds_of
from threed.planner import analyse
from threed.prediction import host
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.prediction.memory import at_stage
from threed.prediction.peak import Peak, fullest, peaks, plan_room
from threed.prediction.peak import show as show_peak
from threed.prediction.transient import temporaries_of
from threed.program.costs import load_costs
from threed.program.summary import stages
from threed.schema import ActivationConfig, Config, OffloadConfig

Changes = dict[str, Any]  # dotted key -> value


def neighbours(config: Config) -> Iterator[Changes]:
    """Other values of one setting or a few. ZeRO is left out where shard_size is 1: it changes nothing
    there."""
    for stage in range(4) if config.shard_size > 1 else ():
        yield {"zero.stage": stage}
        for every in (1, "step") if stage >= 2 else ():
            for residency in (1, 2, "stage", "step") if stage == 3 else (None,):
                yield {"zero.stage": stage, "zero.reduce_every": every,
                       **({"zero.residency": residency} if residency else {})}
    yield {"activation.policy": "none"}
    yield {"activation.policy": "selective"}
    yield {"activation.policy": "full"}
    yield {"activation.policy": "full", "activation.partition": True}
    yield {"activation.policy": "full", "activation.offload": "cpu"}
    yield {"offload.optimizer": "none"}
    for tier in ("cpu", *(("nvme",) if config.offload.nvme_path else ())):
        yield {"offload.optimizer": tier}
        yield {"zero.stage": 3, "offload.optimizer": tier, "offload.parameters": tier}
        yield {"zero.stage": 3, "offload.optimizer": tier, "offload.parameters": tier,
               "activation.policy": "full"}
    for axis in () if config.model.own_layers else folds_of(config):
        ranks = math.prod(config.axis_sizes[each] for each in FOLDS[axis].axes)
        yield from ({f"parallel.{axis}": size} for size in divisors(ranks))
        yield {"parallel.pair": not config.parallel.pair}
    if config.precision.dtype != "fp32":
        yield {"precision.grad_dtype": config.precision.dtype}
        yield {"precision.reduce_dtype": config.precision.dtype}


def change(config: Config, changes: Changes) -> Config:
    """A copy of a config with some settings changed."""
    other = at_stage(config, changes["zero.stage"]) if "zero.stage" in changes else copy.deepcopy(config)
    if "activation.policy" in changes:
        other.activation = ActivationConfig()
    if "offload.optimizer" in changes:  # all defaults, but the folder, which has no default
        other.offload = OffloadConfig(nvme_path=config.offload.nvme_path
                                      if changes["offload.optimizer"] == "nvme" else None)
    for key, value in changes.items():
        section, name = key.split(".")
        setattr(getattr(other, section), name, value)
    return other


@dataclass(frozen=True)
class Needs:
    """What a config needs and takes, by its plan."""

    peaks: list[Peak]  # of a device, by position
    host: host.HostUse
    dp_bytes: int  # the most that a rank sends over dp
    step_s: float

    @property
    def peak(self) -> Peak:
        """Of the fullest rank."""
        return fullest(self.peaks)

    def document(self) -> dict[str, Any]:
        most = self.peak
        return {"host": self.host._asdict(), "fixed_bytes": most.fixed_bytes,
                "planned_bytes": most.fixed_bytes + most.activation_bytes,
                "taken_bytes": most.taken_bytes, "peak_bytes": most.total,
                "peaks": [row._asdict() for row in self.peaks], "dp_bytes": self.dp_bytes,
                "step_s": self.step_s}


def measure(config: Config, hardware: Hardware, memory: int | None = None) -> Needs:
    """`memory`: bytes of a device; None: the hardware's."""
    analysis = analyse(config, room=plan_room(hardware, config, memory))
    plan, rows = analysis.plan, stages(analysis)
    cost = analytic_cost(plan, hardware, load_costs(config.parallel.costs) if config.parallel.costs else None)
    return Needs(peaks(analysis, hardware, temporaries_of(plan), rows),
                    host.use_of(config, hardware, rows), max(row.sent_bytes["dp"] for row in rows),
                    step(analysis, cost, None if config.parallel.costs else hardware).total_s)


class Setting(NamedTuple):
    """A neighbour that was measured, or the config itself."""

    text: str
    changes: Changes
    needs: Needs
    fits: bool

    def document(self) -> dict[str, Any]:
        return {"setting": self.text, "changes": self.changes, **self.needs.document(), "fits": self.fits}


@remembering()
def advise(config: Config, hardware: Hardware, memory: int | None = None,
           progress: Callable[[str], None] = lambda _: None,
           holds_host: bool = False) -> list[Setting]:
    """The config, then its neighbours: first those that fit into `memory` bytes of a device, the fastest
    first, then the others by peak. `holds_host`: whether they must fit into the host's memory, too."""
    limit = math.inf if memory is None else hardware.usable_bytes(memory)

    def setting(text: str, changes: Changes, other: Config) -> Setting:
        needs = measure(other, hardware, memory)
        enough = not holds_host or host.fits(needs.host, hardware)
        return Setting(text, changes, needs, memory is None or (needs.peak.total <= limit and enough))

    progress("temporaries of each kind of unit")
    rows, seen = [setting("as configured", {}, config)], {repr(config.to_dict())}
    for changes in neighbours(config):
        other = change(config, changes)
        # A setting at its default gives the same plan as one without it: only the first of them is tried.
        key = repr(_spelled_out(other).to_dict())
        if key in seen or key == repr(_spelled_out(config).to_dict()) or validate(other) or _idle(other):
            continue
        seen.add(key)
        text = " ".join(f"{name}={value}" for name, value in changes.items())
        progress(text)
        with suppress(ThreedError):  # a limit in the config, such as activation_limit, refuses this neighbour
            rows.append(setting(text, changes, other))
    return [rows[0], *sorted(rows[1:], key=lambda row: (
        not row.fits, row.needs.step_s if row.fits else row.needs.peak.total))]


def _idle(config: Config) -> bool:
    """Whether a setting has no effect under this mesh."""
    return config.activation.partition and (config.parallel.tp == 1 or config.parallel.sequence_parallel)


def _spelled_out(config: Config) -> Config:
    """A copy of a config in which ZeRO's null settings have the values that null means."""
    other = copy.deepcopy(config)
    zero = other.zero
    if zero.stage < 2:
        zero.reduce_every = None
    if zero.stage >= 2 and zero.reduce_every in (None, "auto"):
        zero.reduce_every = "step" if config.reduce_every == config.num_microbatches else config.reduce_every
    if zero.stage >= 3:
        zero.residency = 1 if zero.residency is None else zero.residency
    return other


def show(rows: list[Setting], memory: int | None = None, columns: int | None = None) -> str:
    """The config's peak, then the rows as a table, which where there is room compares each setting with the
    config in words, too. `columns`: of a terminal, if it is to fit."""
    here = rows[0].needs
    limited = memory is not None
    lines = render(("setting", "peak", "sends dp", "step", *["fits"] * limited), [
        (row.text, show_bytes(row.needs.peak.total), show_bytes(row.needs.dp_bytes),
         show_seconds(row.needs.step_s), *["yes" if row.fits else "no"] * limited) for row in rows],
        columns, fold=False).splitlines()
    words = ["", "", *(_against(row.needs, here) for row in rows[1:])]  # none for the head and the config
    if len(lines) == len(words):
        longer = [f"{line}  {text}".rstrip() for line, text in zip(lines, words, strict=True)]
        lines = longer if columns is None or max(map(len, longer)) <= columns else lines
    return "\n".join([wrapped(show_peak(here.peaks), columns), *lines])


def _against(other: Needs, here: Needs) -> str:
    kept, sent = other.peak.total - here.peak.total, other.dp_bytes - here.dp_bytes
    memory = f"{'saves' if kept < 0 else 'takes'} {show_bytes(abs(kept))}" if kept else "the same memory"
    if not sent:
        return f"{memory}, the same traffic"
    return f"{memory}, {'adds' if sent > 0 else 'saves'} {show_bytes(abs(sent))} of traffic a step"
