"""The contract: which features work together, and why the others do not. From its table come the refusals of
a config, `threed matrix`, and the tests that run every cell.

A **cell** is one choice for each feature. If no rule refuses it, it works, and the case with its name in
`tests/loopback/test_contract.py` compares it with the single-process reference. A rule says why it refuses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from threed.base.errors import Idle, Problem
from threed.models.layers.experts import ExpertsConfig
from threed.schedules.orders import SCHEDULES
from threed.schema import Config


class Cell(NamedTuple):
    schedule: str
    stage: int  # of ZeRO
    offload: str  # tier of the optimizer's state: none (device), cpu, nvme; +parameters: of parameters, too
    activation: str  # activation policy, or what is done with kept inputs: partition (cut over tp), cpu
    precision: str
    sequence_parallel: bool
    tied: bool
    shard_groups: bool  # whether dp is cut into several shard groups
    # none, one (a rank has all experts of a block), ep (several ranks have them), pair (as ep, and a forward
    # and a backward are computed together)
    experts: str = "none"
    # none, or how ranks that share each sequence attend to all of it: keys, heads, overlap (keys that travel
    # between two units)
    context: str = "none"

    @property
    def id(self) -> str:
        """A name, in tests and in `threed matrix`."""
        words = [self.schedule, f"zero{self.stage}", self.offload, self.activation, self.precision]
        return "-".join([*words, "sp" if self.sequence_parallel else "nosp",
                         "tied" if self.tied else "untied",
                         "groups" if self.shard_groups else "nogroups", _EXPERTS[self.experts],
                         *_CONTEXT[self.context]])

    @property
    def test(self) -> str:
        return f"tests/loopback/test_contract.py::test_cell[{self.id}]"

    @classmethod
    def of(cls, config: Config) -> Cell:
        """The cell of a config."""
        parallel, activation = config.parallel, config.activation
        kept = "partition" if activation.partition else activation.policy
        if activation.offload == "cpu":
            kept = "cpu"
        experts = "one" if isinstance(config.model, ExpertsConfig) else "none"
        if parallel.ep > 1:
            experts = "ep"
        return cls("file" if parallel.schedule.startswith("file:") else parallel.schedule, config.zero.stage,
                   _offload(config), kept, config.precision.dtype, parallel.sequence_parallel,
                   config.model.tie_embeddings, config.shard_size < config.data_ranks,
                   "pair" if parallel.pair else experts, _context(config))


def _context(config: Config) -> str:
    """How ranks that share each sequence attend to all of it, if there are any."""
    parallel = config.parallel
    if parallel.cp == 1:
        return "none"
    return "overlap" if parallel.cp_overlap else parallel.cp_form


_CONTEXT = {"none": [], "keys": ["cp"], "heads": ["cp", "heads"], "overlap": ["cp", "overlap"]}
_EXPERTS = {"none": "dense", "one": "experts", "ep": "ep", "pair": "pair"}  # words of a cell's name


def _offload(config: Config) -> str:
    asked = config.offload
    return asked.optimizer + ("+parameters" if asked.parameters != "none" else "")


def axes() -> dict[str, tuple[object, ...]]:
    """The values of each axis. The rows of schedules are looked up at each call: a script may add one."""
    return {
        "schedule": (*SCHEDULES, "auto", "file"),
        "stage": (0, 1, 2, 3),
        "offload": ("none", "cpu", "nvme", "cpu+parameters", "nvme+parameters"),
        "activation": ("none", "full", "selective", "budget", "partition", "cpu"),
        "precision": ("fp32", "bf16", "fp16"),
        "sequence_parallel": (False, True),
        "tied": (False, True),
        "shard_groups": (False, True),
        "experts": tuple(_EXPERTS),
        "context": tuple(_CONTEXT),
    }


class Rule(NamedTuple):
    refuses: Callable[[Cell], bool]
    problem: Problem


def _has_pairs(schedule: str) -> bool:
    row = SCHEDULES.get(schedule)  # looked up at each call, as `axes` does
    return row is None or bool(row.paired)


_UNPAIRED = tuple(name for name, row in SCHEDULES.items() if not row.paired)
RULES = (
    Rule(lambda cell: cell.stage == 0 and cell.shard_groups, Idle.of(
        "zero.shard_size", " below parallel.dp needs zero.stage of at least 1: at stage 0 nothing is "
        "sharded, whole copies are everywhere; leave zero.shard_size out")),
    Rule(lambda cell: cell.offload == "none+parameters", Problem.of(
        "offload.parameters", " needs offload.optimizer=cpu or nvme: what lives on the host is stepped "
        "there")),
    Rule(lambda cell: cell.offload.endswith("+parameters") and cell.stage < 3, Problem.of(
        "offload.parameters", " needs zero.stage=3: below it every device holds whole parameters all the "
        "time")),
    Rule(lambda cell: cell.experts == "pair" and not _has_pairs(cell.schedule), Problem.of(
        "parallel.pair", "=true computes a forward and a backward together, and a schedule that runs all "
        f"forwards first, or all of a group ({', '.join(_UNPAIRED)}), has none that are neighbours; choose "
        "another parallel.schedule: zb-v and dualpipe-v gain most for the memory that they take")),
)


def refusal(cell: Cell) -> Problem | None:
    """Why a cell does not work; None where it does."""
    return next((rule.problem for rule in RULES if rule.refuses(cell)), None)


def cells() -> Iterator[Cell]:
    """All cells."""
    for values in itertools.product(*axes().values()):
        yield Cell(*values)  # pyright: ignore[reportArgumentType]


def show(refused: bool = False) -> str:
    """The contract as text: a table of ZeRO stages by schedule with how many cells work, and the rules that
    refuse."""
    every = list(cells())
    works = [cell for cell in every if refusal(cell) is None]
    counts: list[Counter[tuple[object, object]]] = [
        Counter((cell.schedule, cell.stage) for cell in chosen) for chosen in (works, every)]
    lines = [f"{len(works)} of {len(every)} cells work, and {len(every) - len(works)} are refused",
             *(f"  {axis.ljust(18)} {_values(values)}" for axis, values in axes().items()), "",
             "works".ljust(16) + "".join(f"zero{stage}".rjust(12) for stage in axes()["stage"])]
    for schedule in axes()["schedule"]:
        row = ["/".join(str(count[schedule, stage]) for count in counts) for stage in axes()["stage"]]
        lines.append(str(schedule).ljust(16) + "".join(entry.rjust(12) for entry in row))
    for rule in RULES:
        listed = [cell for cell in every if rule.refuses(cell)]
        lines += ["", f"{len(listed)} refused: {rule.problem}",
                  *(f"  {cell.id}" for cell in listed if refused)]
    return "\n".join(lines)


def _values(values: tuple[object, ...]) -> str:
    return ", ".join({False: "no", True: "yes"}[value] if isinstance(value, bool) else str(value)
                     for value in values)


def document(refused: bool = False) -> dict[str, Any]:
    """The document of `threed matrix --json`: the axes, and each cell (or each `refused` one alone) with its
    verdict, its reason and its test."""
    rows = [{**cell._asdict(), "verdict": "refused" if (problem := refusal(cell)) else "works",
             "reason": problem and problem.text, "test": cell.test} for cell in cells()]
    works = sum(row["verdict"] == "works" for row in rows)
    return {"axes": axes(), "works": works, "refused": len(rows) - works,
            "cells": [row for row in rows if not refused or row["verdict"] == "refused"]}
