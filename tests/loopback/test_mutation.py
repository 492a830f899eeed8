"""Random edits of programs: `check` refuses each one, or it trains exactly as the plan that was not edited.

This is what makes the checker worth having: none may be accepted and wrong, and none accepted may hang or fail.
A communication may end when it is issued or only when somebody waits for it. Loopback always does the latter, which
hides faults; here each does one or the other at random.
"""

from __future__ import annotations

import difflib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import Ranks, assert_parity, batches, collect, drive, tiny
from threed.comm import Comm, Handle
from threed.engine import loopback
from threed.engine.engine import Engine
from threed.errors import PlanError
from threed.planner import make_mesh, make_plan
from threed.program.check import check_programs
from threed.program.instruction import Instruction, Op
from threed.program.table import Plan
from threed.schema import Config
from threed.zero import run as zero_run

SMALL = ["model.hidden=8", "model.heads=2", "model.seq_len=8", "model.vocab=16", "model.vocab_multiple=16",
         "optimizer.lr=0.05", "train.eval_every=1"]


class Case(NamedTuple):
    edits: int
    pp: int
    microbatches: int
    layers: int = 2
    dp: int = 1
    tp: int = 1
    others: tuple[str, ...] = ()

    def config(self) -> Config:
        return tiny(*SMALL, f"model.layers={self.layers}", f"parallel.pp={self.pp}", f"parallel.dp={self.dp}",
                    f"parallel.tp={self.tp}", f"train.global_batch_size={self.dp * self.microbatches}", *self.others)


UNTIED, GPIPE, ZERO_0 = "model.tie_embeddings=false", "parallel.schedule=gpipe", "zero.stage=0"
CASES = {
    "alone": Case(480, 1, 1),
    "accumulate": Case(840, 1, 3, dp=2, others=(UNTIED,)),
    "accumulate-zero0": Case(600, 1, 2, dp=2, others=(ZERO_0,)),
    "tied": Case(1200, 2, 3, dp=2),
    "tied-zero0": Case(840, 2, 2, dp=2, others=(ZERO_0,)),
    "three": Case(720, 3, 4, others=(UNTIED,)),
    "four-gpipe": Case(720, 4, 2, others=(GPIPE,)),
    "one-unit-stages": Case(600, 4, 4, others=(UNTIED, ZERO_0)),
    "sequence-parallel": Case(360, 2, 2, tp=2, others=("parallel.sequence_parallel=true",)),
    "interleaved": Case(300, 2, 3, others=("parallel.schedule=interleaved", "parallel.virtual_stages=2")),
    "breadth-first": Case(240, 2, 2, others=("parallel.schedule=breadth-first", "parallel.virtual_stages=2", UNTIED)),
    "zb-h1": Case(400, 2, 3, others=("parallel.schedule=zb-h1",)),
    "zb-h2": Case(300, 2, 4, others=("parallel.schedule=zb-h2", UNTIED)),
    "zb-v": Case(400, 2, 3, others=("parallel.schedule=zb-v",)),
    "zb-v-sequence-parallel": Case(200, 2, 2, tp=2, others=("parallel.schedule=zb-v", "parallel.sequence_parallel=true")),
    "dualpipe-v": Case(300, 2, 4, others=("parallel.schedule=dualpipe-v",)),
    "file": Case(300, 2, 2, others=(f"parallel.schedule=file:{Path(__file__).with_name('order.csv')}", UNTIED)),
    "auto": Case(300, 2, 4, others=("parallel.schedule=auto", "parallel.activation_limit=1.5x")),
}


# Moves more often than the rest: most of what is accepted is another order.
KINDS = ("delete", "duplicate", "swap", "move", "move", "nudge", "nudge", "nudge", "unit", "microbatch", "peer",
         "group", "keep", "op")


def change(program: list[Instruction], rng: random.Random) -> None:
    """One edit in place."""
    kind = rng.choice(KINDS)
    i, j = rng.randrange(len(program)), rng.randrange(len(program))
    if kind == "delete":
        del program[i]
    elif kind == "duplicate":
        program.insert(j, program[i])
    elif kind == "swap":
        program[i], program[j] = program[j], program[i]
    elif kind == "move":
        program.insert(j, program.pop(i))
    elif kind == "nudge":
        program.insert(i + rng.choice((-1, 1)), program.pop(i))
    elif kind == "op":
        program[i] = program[i]._replace(op=rng.choice(list(Op)))
    elif kind == "group":
        program[i] = program[i]._replace(group=rng.choice(("", "dp", "tp", "tie", "shard", "world", "act", "grad")))
    elif kind == "keep":
        program[i] = program[i]._replace(keep=rng.choice(("all", "none", "input")))
    else:
        program[i] = program[i]._replace(**{kind: rng.randint(-1, 5)})


def edited(plan: Plan, rng: random.Random) -> tuple[str, list[tuple[Instruction, ...]]]:
    """A program of the plan with one to three edits in one position's part."""
    name = rng.choice(("train", "train", "train", "evaluate"))
    programs = list(plan.programs[name])
    position = rng.randrange(len(programs))
    program = list(programs[position])
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        change(program, rng)
    programs[position] = tuple(program)
    return name, programs


def run(config: Config, plan: Plan) -> Ranks:
    """An evaluation (its loss comes first), then two steps."""

    def work(comm: Comm):
        engine = Engine(config, plan, comm)
        evaluated, _ = engine.run("evaluate", batches(config, comm, 7))
        losses, *rest = drive(config, engine, comm, 2)
        return [evaluated.loss, *losses], *rest

    return collect(config, loopback.run_loopback(config, plan, make_mesh(config), work))


class Haste:
    """Ends communications early: single ones at random; the composite ones of ZeRO all or none of a run, since they
    communicate when they end, which all ranks must do alike."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int):
        self.rng, self.composite, recv = random.Random(seed), False, loopback.ThreadChannel.recv

        def early(channel, tensor) -> Handle:
            handle = recv(channel, tensor)
            if self.rng.random() < 0.5:
                handle.wait()
            return handle

        monkeypatch.setattr(loopback.ThreadChannel, "recv", early)
        monkeypatch.setattr(loopback.ThreadGroup, "_call", self.eager(loopback.ThreadGroup._call))
        monkeypatch.setattr(zero_run, "Handle", lambda wait: self.handle(wait, self.composite))

    def handle(self, wait: Callable[[], object], now: bool) -> Handle:
        made = Handle(wait)
        if now:
            made.wait()
        return made

    def eager(self, call: Callable[..., Handle]) -> Callable[..., Handle]:
        return lambda *arguments: self.handle(call(*arguments).wait, self.rng.random() < 0.5)


def hunt(case: Case, seed: int, haste: Haste, tell: Callable[[str], None]) -> Counter[str]:
    config, rng = case.config(), random.Random(seed)
    plan = make_plan(config)
    right, seen, counts = run(config, plan), set(), Counter()
    while sum(counts.values()) < case.edits:
        name, programs = edited(plan, rng)
        if programs == plan.programs[name]:
            continue
        try:
            check_programs(name, programs, plan.table)
        except PlanError:
            counts["rejected"] += 1
            continue
        verdict = "right"
        if (key := (name, tuple(programs))) not in seen:
            seen.add(key)
            haste.composite = len(seen) % 2 == 0
            try:
                assert_parity(run(config, Plan(plan.table, {**plan.programs, name: programs})), right)
            except Exception as error:
                verdict = "wrong"
                tell(f"{name}: {difference(plan.programs[name], programs)}\n{type(error).__name__}: {error}")
        counts[verdict] += 1
    return counts


def difference(before: list[tuple[Instruction, ...]], after: list[tuple[Instruction, ...]]) -> str:
    position = next(p for p, (a, b) in enumerate(zip(before, after)) if a != b)
    lines = difflib.unified_diff(list(map(str, before[position])), list(map(str, after[position])), f"pp{position}",
                                 "edited", lineterm="")
    return "\n".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_no_edit_is_accepted_and_wrong(name, monkeypatch):
    """An edit that gets past `check` and then gives other numbers, raises or hangs: a rule is missing in `effects`."""
    monkeypatch.setattr(loopback, "TIMEOUT_S", 10.0)
    found: list[str] = []
    counts = hunt(CASES[name], 1, Haste(monkeypatch, 2), found.append)
    print(f"\n{name}: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("rejected", "right", "wrong")))
    assert not found, "\n\n".join(found[:5])
    assert counts["rejected"] > counts["right"] > 0


def test_there_are_enough_edits():
    """Fewer than 2,000 edits would say little."""
    assert sum(case.edits for case in CASES.values()) >= 2000
