"""Tests come in three sizes, each a target of make: what runs, and how long it may take.

    make test     core: tests/plan, tests/data, tests/*.py, and what is marked `core`; at every change
    make verify   what `make test` leaves out, but for `slow`; before a merge
                  (tests/loopback with fake GPUs, core or not; docs/fake-gpus.md). Of a test with more than
                  four cases (with fake GPUs, three) it runs four and an eighth of the others, always
                  the same
    make matrix   everything, with the full products that are marked `slow`; when plans or numbers change

A new test in another folder belongs to `make verify`. Mark it `core` if it guards what no core test guards,
in a second or two. Tests marked `cluster` run in none of the three.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

TESTS = Path(__file__).parent
CORE = (TESTS, TESTS / "plan", TESTS / "data")  # folders of which every test is core
# Of a whole tier, on CORES that do nothing else. Where that is less than its wall time, its processor time
# divided by CORES counts: other work on the machine is not the tests' fault.
BUDGET_S = {"test": 300, "verify": 35 * 60, "matrix": 3 * 3600}
CORES = 2
SHARE = 8  # of a test with many cases, one of so many runs


def runs(tier: str, core: bool) -> bool:
    """Whether a tier runs a test that is core, or is not."""
    return tier == "matrix" or core == (tier == "test")


def is_core(path: Path, marked: bool) -> bool:
    return marked or path.parent in CORE


def sample(items: Sequence[Any], cases: int) -> list[Any]:
    """Of pytest's items, `cases` of each test and one of SHARE of its others, always the same."""
    tests: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for each in tests.values():
        each.sort(key=lambda item: crc32(item.nodeid.encode()))
        chosen.update(each[:cases + max(0, len(each) - cases) // SHARE])
    return [item for item in items if item in chosen]


def over_budget(tier: str, wall_s: float, processor_s: float, cores: int) -> tuple[str, bool]:
    """The message about a whole tier's run that is over its budget ("" if it is not), and whether the run
    fails: never on fewer than CORES."""
    budget_s, elapsed_s = BUDGET_S[tier], min(wall_s, processor_s / CORES)
    if elapsed_s <= budget_s:
        return "", False
    text = (f"make {tier} took {elapsed_s:.0f} s; its budget is {budget_s} s (tests/tiers.py). Make the "
            "slowest tests cheaper, or leave them to the next larger tier")
    if cores >= CORES:
        return text, True
    return f"{text}. Not a failure here: the budget is for {CORES} cores", False


def processor_s() -> float:
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
