"""Which trial has which kind of fault, and one trial from its drawing to its result; what needs no
terminal."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos import verdicts
from tests.chaos.faults import KINDS, Kind
from tests.chaos.sister import FIRST, Reference, read_steps
from tests.chaos.trial import Fault, Result, Skip, Trial, another_mesh

ATTEMPTS = 3


def kinds(seed: int) -> Iterator[tuple[Kind, int]]:
    """For trial 0, 1, ...: its kind, and how many of that kind came before. Each block of trials has each
    kind by its weight."""
    block, count = [kind for kind in KINDS.values() for _ in range(kind.weight)], dict.fromkeys(KINDS, 0)
    number = 0
    while True:
        order = random.Random(f"{seed}/{number}").sample(block, len(block))
        for kind in order:
            yield kind, count[kind.name]
            count[kind.name] += 1
        number += 1


def draw(seed: int, number: int, kind: Kind, attempt: int = 1) -> tuple[random.Random, str]:
    """A trial's random numbers and the name of its sister. (A kind that walks through the calls of the first
    sister's saves takes that sister.)"""
    rng = random.Random(f"{seed}, {number}")
    name = rng.choice(list(kind.sisters))
    return (rng if attempt == 1 else random.Random(f"{seed}, {number}, {attempt}")), name


def wanted(seed: int, number: int, kind: Kind) -> set[str]:
    """Sisters whose references a trial may need."""
    return {draw(seed, number, kind)[1], *([FIRST] if kind.walks else [])}


def make(seed: int, number: int, kind: Kind, index: int, references: dict[str, Reference], base: Path,
         data: list[str]) -> Result:
    """Run a trial, and again if the run was over before the fault could strike."""
    begin = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        rng, name = draw(seed, number, kind, attempt)
        reference = references[FIRST if kind.walks and index < len(references[FIRST].sites) else name]
        trial = Trial(rng, reference, data, base / f"trial-{number}", index)
        result = _make(trial, kind, Result(seed, number, kind.name, attempts=attempt))
        if result.struck or result.skipped or result.verdicts:
            break
    result.seconds = time.monotonic() - begin
    return result


def _make(trial: Trial, kind: Kind, result: Result) -> Result:
    try:
        fault = kind.draw(trial)
        if trial.planned is None:
            trial.planned = another_mesh(trial.rng, trial.reference.name)
        trial.run(fault)
        result.verdicts = verdicts.judge(trial, fault)
        result.text = (
            f"{trial.reference.name}{', restarts by itself' if trial.restarts else ''}: {fault.text}"
        )
        result.starts = len(trial.runs)
        _measure(trial, fault, result)
    except Skip as reason:
        result.skipped = str(reason)
    finally:
        result.output = trial.output
        trial.clean()
    return result


def _measure(trial: Trial, fault: Fault, result: Result) -> None:
    """What the fault struck, and the seconds until the run was again at the step it had reached."""
    steps = read_steps(trial.folder)
    result.repeated = len(steps) - len({step for _, step in steps})
    if not trial.marker.exists():
        return
    moment, _, result.struck = trial.marker.read_text().strip().partition("\t")
    result.site = fault.site if trial.reference.name == FIRST else None
    before = max((step for at, step in steps if at <= float(moment)), default=0)
    result.recovery_s = next((at - float(moment) for at, step in steps
                              if at > float(moment) and step > before), None)
