"""Random edits of programs: `check` refuses each one, or it trains exactly as the plan that was not edited.

This is what makes the checker worth having: none may be accepted and wrong, and none accepted may hang or
fail. A communication may end when it is issued or only when somebody waits for it. Loopback always does the
latter, which hides faults; here each does one or the other at random. What runs beside the computation runs
at once, beside it, or late.
"""

from __future__ import annotations

import difflib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.harness import Ranks, assert_parity, batches, collect, drive, tiny, why_refused
from threed.base import mesh
from threed.base.errors import PlanError
from threed.comm import group as comm
from threed.comm.group import Comm
from threed.comm.lanes import Handle, Job, Lane, ThreadLane
from threed.engine import loopback
from threed.engine.engine import Engine
from threed.planner import make_mesh, make_plan
from threed.program import instruction
from threed.program.analysis import Analysis
from threed.program.check import check_programs
from threed.program.instruction import COLLECTIVES, FIELDS, MOVES, Instruction, Op, Tier
from threed.program.plan import Plan
from threed.schema import Config

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

    def config(self, path: Path | None = None) -> Config:
        """`path` is the folder of files, if the case needs any."""
        needs_files = any(text.endswith("=nvme") for text in self.others)
        files = [f"offload.nvme_path={path or '/disk'}"] if needs_files else []
        return tiny(*SMALL, *files, f"model.layers={self.layers}", f"parallel.pp={self.pp}",
                    f"parallel.dp={self.dp}",
                    f"parallel.tp={self.tp}", f"train.global_batch_size={self.dp * self.microbatches}",
                    *self.others)


UNTIED, GPIPE, SP = "model.tie_embeddings=false", "parallel.schedule=gpipe", "parallel.sequence_parallel=true"
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.virtual_stages=2")
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (f"zero.stage={stage}" for stage in range(4))
GROUPS, STAGE = "zero.shard_size=2", "zero.residency=stage"
LATER = "offload.overlap=none"
CPU, NVME = "offload.optimizer=cpu", "offload.optimizer=nvme"
HOST = "offload.gradients=host"

FULL, PARTITION, KEPT_CPU = ("activation.policy=full",), "activation.partition=true", "activation.offload=cpu"
TRAVEL = "model.family=tests/families/travelling.py:TRAVELLING"
OVERLAP = ("parallel.cp=2", "parallel.cp_overlap=true")
AGAIN = "model.by=again"  # gathered twice
IN_PARTS = "parallel.split_messages=on"
TILES = ("model.tile_linears=256", "model.heads=4")
EXPERTS = ("model.family=moe", "model.experts=4", "model.expert_ffn_hidden=8", "parallel.ep=2")
MUON = ("optimizer.name=muon", "optimizer.turn_dtype=fp32")
SHARED, BALANCED = "model.shared_expert_ffn=8", ("model.balance=bias", "optimizer.balance_rate=0.05")


def ahead(uses: int) -> str:
    return f"zero.prefetch={uses}"


CASES = {
    "alone": Case(240, 1, 1),
    "accumulate": Case(420, 1, 3, dp=2, others=(UNTIED,)),
    "accumulate-zero0": Case(300, 1, 2, dp=2, others=(ZERO_0,)),
    "tied": Case(600, 2, 3, dp=2),
    "tied-zero0": Case(420, 2, 2, dp=2, others=(ZERO_0,)),
    "three": Case(360, 3, 4, others=(UNTIED,)),
    "four-gpipe": Case(360, 4, 2, others=(GPIPE,)),
    "one-unit-stages": Case(300, 4, 4, others=(UNTIED, ZERO_0)),
    "sequence-parallel": Case(180, 2, 2, tp=2, others=(SP,)),
    "interleaved": Case(150, 2, 3, others=INTERLEAVED),
    "breadth-first": Case(120, 2, 2,
                          others=("parallel.schedule=breadth-first", "parallel.virtual_stages=2", UNTIED)),
    "zb-h1": Case(200, 2, 3, others=("parallel.schedule=zb-h1",)),
    "zb-h2": Case(150, 2, 4, others=("parallel.schedule=zb-h2", UNTIED)),
    "zb-v": Case(200, 2, 3, others=("parallel.schedule=zb-v",)),
    "zb-v-sequence-parallel": Case(100, 2, 2, tp=2, others=("parallel.schedule=zb-v", SP)),
    "dualpipe-v": Case(150, 2, 4, others=("parallel.schedule=dualpipe-v",)),
    "file": Case(150, 2, 2, others=(f"parallel.schedule=file:{Path(__file__).with_name('order.csv')}",
                                    UNTIED)),
    "auto": Case(150, 2, 4, others=("parallel.schedule=auto", "parallel.activation_limit=1.5x")),
    "zero2": Case(80, 2, 3, dp=2, others=(ZERO_2,)),
    "zero2-accumulate": Case(80, 1, 4, dp=2, others=(ZERO_2, UNTIED, "zero.reduce_every=2")),
    "zero2-every-2": Case(60, 2, 3, dp=2, others=(ZERO_2, "zero.reduce_every=2")),
    "zero2-sequence-parallel": Case(80, 1, 3, dp=2, tp=2, others=(ZERO_2, SP)),
    "zero3": Case(80, 2, 3, dp=2, others=(ZERO_3, ahead(0))),
    "zero3-ahead": Case(80, 1, 3, layers=3, dp=2, others=(ZERO_3, ahead(2), "zero.residency=2", UNTIED)),
    "zero3-stage": Case(60, 2, 3, dp=2, others=(ZERO_3, ahead(1), STAGE, GPIPE, UNTIED)),
    "zero3-persist": Case(60, 2, 2, dp=2, others=(ZERO_3, ahead(1), "zero.persist_below=100")),
    "zero3-zb-v": Case(60, 2, 3, dp=2, others=(ZERO_3, "parallel.schedule=zb-v")),
    "zero3-zb-v-untied": Case(60, 2, 3, dp=2,
                              others=(ZERO_3, "parallel.schedule=zb-v", UNTIED, "zero.reduce_every=2")),
    "zero3-zb-h1": Case(60, 2, 3, dp=2, others=(ZERO_3, "parallel.schedule=zb-h1", "zero.residency=2")),
    "zero3-zb-h1-sequence-parallel": Case(60, 2, 2, dp=2, tp=2,
                                          others=(ZERO_3, "parallel.schedule=zb-h1", UNTIED, SP)),
    "zero3-interleaved": Case(60, 2, 3, dp=2, others=(ZERO_3, *INTERLEAVED, STAGE)),
    "zero3-interleaved-untied": Case(60, 2, 2, dp=2, others=(ZERO_3, *INTERLEAVED, UNTIED, ahead(2))),
    "full": Case(80, 2, 3, others=FULL),
    "full-zb-h1": Case(80, 2, 3, others=(*FULL, "parallel.schedule=zb-h1")),
    "full-zero3": Case(60, 2, 3, dp=2, others=(*FULL, ZERO_3, ahead(1))),
    "partition": Case(60, 2, 3, tp=2, others=(*FULL, PARTITION)),
    "partition-zb-h1-zero3": Case(60, 2, 2, dp=2, tp=2,
                                  others=(*FULL, PARTITION, "parallel.schedule=zb-h1", ZERO_3)),
    "partition-cpu": Case(60, 1, 3, tp=2, others=(*FULL, PARTITION, KEPT_CPU, UNTIED)),
    "cpu": Case(80, 2, 3, others=(*FULL, KEPT_CPU)),
    "cpu-zb-h1-zero3": Case(60, 2, 3, dp=2, others=(*FULL, KEPT_CPU, "parallel.schedule=zb-h1", ZERO_3)),
    "arena": Case(60, 2, 3, others=(*FULL, "activation.contiguous=true", GPIPE)),
    "tiles": Case(100, 2, 2, layers=1, others=(*TILES, UNTIED)),
    "tiles-tied-full-zb-h1": Case(100, 2, 2, layers=1,
                                  others=("model.tile_linears=512", *FULL, "parallel.schedule=zb-h1")),
    "tiles-full-zero3": Case(100, 1, 2, layers=1, dp=2, others=(*TILES, *FULL, ZERO_3, UNTIED)),
    "groups-zero1": Case(60, 2, 2, dp=4, others=(ZERO_1, GROUPS)),
    "groups-zero2": Case(60, 2, 2, dp=4, others=(ZERO_2, GROUPS)),
    "groups-zero3": Case(60, 1, 3, dp=4, others=(ZERO_3, GROUPS, UNTIED)),
    "cpu-zero0": Case(100, 1, 3, dp=2, others=(ZERO_0, CPU, UNTIED)),
    "cpu-zero1": Case(150, 1, 3, dp=2, others=(ZERO_1, CPU, UNTIED)),
    "cpu-zero2-tied": Case(100, 2, 3, dp=2, others=(ZERO_2, CPU)),
    "cpu-half-zero2": Case(80, 1, 3, dp=2, others=(ZERO_2, CPU, UNTIED, "offload.ratio=0.5")),
    "cpu-zero3-zb-h1": Case(100, 2, 3, dp=2,
                            others=(ZERO_3, CPU, "offload.parameters=cpu", "parallel.schedule=zb-h1")),
    "cpu-zero3-recompute": Case(80, 2, 2, dp=2,
                                others=(ZERO_3, CPU, "offload.parameters=cpu", UNTIED, ahead(2),
                                        "activation.policy=full", "activation.offload=cpu")),
    "nvme-zero1": Case(100, 2, 2, dp=2, others=(ZERO_1, NVME, UNTIED)),
    "nvme-zero3": Case(100, 1, 3, dp=2, others=(ZERO_3, NVME, "offload.parameters=nvme", UNTIED)),
    "cpu-zero1-no-overlap": Case(100, 1, 2, dp=2, others=(ZERO_1, CPU, UNTIED, LATER)),
    "cpu-zero0-tied": Case(80, 2, 2, others=(ZERO_0, CPU)),
    "nvme-zero3-no-overlap": Case(80, 1, 3, dp=2, others=(ZERO_3, NVME, UNTIED, LATER)),
    "cpu-zero2-gradients": Case(80, 1, 3, dp=2, others=(ZERO_2, CPU, HOST, UNTIED)),
    "cpu-zero3-gradients-tied": Case(80, 2, 2, dp=2, others=(ZERO_3, CPU, HOST, "offload.parameters=cpu",
                                                             "offload.ratio=0.5")),
    "nvme-zero3-tied": Case(80, 2, 2, dp=2,
                            others=(ZERO_3, NVME, "offload.parameters=nvme", "zero.residency=2")),
    "travel": Case(100, 1, 2, dp=2, others=(TRAVEL, UNTIED)),
    "travel-equal-zb-h1-zero3": Case(60, 2, 2, dp=2, others=(TRAVEL, "model.by=equal", ZERO_3,
                                                             "parallel.schedule=zb-h1")),
    "travel-gathered-full": Case(80, 1, 2, dp=2, others=(TRAVEL, "model.by=gather", *FULL, ZERO_2, UNTIED)),
    "parts": Case(100, 2, 3, tp=2, others=(IN_PARTS,)),
    "parts-interleaved": Case(60, 2, 3, tp=2, others=(IN_PARTS, *INTERLEAVED, UNTIED)),
    "parts-partition-zb-v-zero3": Case(60, 2, 2, dp=2, tp=2, others=(
        IN_PARTS, *FULL, PARTITION, "parallel.schedule=zb-v", ZERO_3)),
    "experts": Case(120, 1, 2, layers=1, dp=2, others=(*EXPERTS, SHARED)),
    "experts-full-zero2": Case(80, 1, 2, layers=1, dp=2, others=(*EXPERTS, *FULL, *BALANCED, ZERO_2)),
    "experts-folded-1f1b": Case(60, 2, 2, tp=2, dp=2, others=(*EXPERTS, SP, "parallel.ep=4", ZERO_1)),
    "experts-zb-h1-zero3": Case(80, 2, 2, dp=2, others=(*EXPERTS, SHARED, "parallel.schedule=zb-h1", ZERO_3)),
    "experts-zb-v-cpu-full": Case(60, 2, 2, dp=2, others=(*EXPERTS, *BALANCED, "parallel.schedule=zb-v", CPU,
                                                          *FULL, KEPT_CPU)),
    "again": Case(80, 2, 2, dp=2, others=(TRAVEL, AGAIN, ZERO_2)),
    "again-full": Case(80, 1, 2, dp=2, others=(TRAVEL, AGAIN, *FULL, UNTIED)),
    "again-zb-h1-zero3": Case(60, 2, 3, dp=2, others=(TRAVEL, AGAIN, "parallel.schedule=zb-h1", ZERO_3)),
    "overlap": Case(60, 2, 2, others=(*OVERLAP, UNTIED)),
    "overlap-full-zb-h1-zero3": Case(60, 2, 2, others=(*OVERLAP, *FULL, "parallel.schedule=zb-h1", ZERO_3)),
    "overlap-pair": Case(60, 1, 4, others=(*OVERLAP, UNTIED, "parallel.pair=true", "parallel.schedule=zb-v",
                                           ZERO_2)),
    "experts-pair": Case(60, 2, 3, dp=2, others=(*EXPERTS, SHARED, "parallel.pair=true", ZERO_2)),
    "experts-pair-zb-v-full-zero3": Case(60, 2, 3, dp=2, others=(
        *EXPERTS, *FULL, "parallel.schedule=zb-v", "parallel.pair=true", ZERO_3)),
    "muon-zero0": Case(100, 1, 2, dp=2, others=(*MUON, ZERO_0, UNTIED)),
    "muon-zero1-tied": Case(120, 2, 2, dp=2, others=(*MUON, ZERO_1)),
    "muon-zero2-sequence-parallel": Case(80, 1, 2, dp=2, tp=2, others=(*MUON, ZERO_2, SP, UNTIED)),
    "muon-zero3-zb-h1": Case(80, 2, 2, dp=2, others=(*MUON, ZERO_3, "parallel.schedule=zb-h1")),
    "muon-experts": Case(80, 1, 2, layers=1, dp=4, others=(*MUON, *EXPERTS, GROUPS, ZERO_1, UNTIED)),
    "muon-cpu-zero2": Case(100, 1, 2, layers=1, dp=2, others=(*MUON, ZERO_2, CPU, UNTIED)),
    "muon-nvme-zero1-tied": Case(80, 2, 2, dp=2, others=(*MUON, ZERO_1, NVME)),
    "experts-groups-zero3": Case(60, 1, 2, layers=1, dp=4, others=(*EXPERTS, GROUPS, ZERO_3, UNTIED)),
}


# Moves more often than the rest: most of what is accepted is another order.
KINDS = ("delete", "duplicate", "swap", "move", "move", "nudge", "nudge", "nudge", "unit", "microbatch",
         "peer", "word", "word", "op", "more", "more")
ZERO = (Op.GATHER, Op.RELEASE, Op.REDUCE, Op.EXCHANGE, Op.CLIP, Op.STEP, *MOVES)
WORDS = {**instruction.WORDS, "tier": tuple(Tier), "group": ("", *mesh.GROUPS),
         "kind": ("", "act", "grad", "param", "gshard", "gprev", "pshard", "state", "kept", "kpart",
                  "actpart", "gradpart", "sent", "came", "gsent", "gcame", "gives", "takes", "answer",
                  "greturned", "update", "matrix", "turned", "direction")}


def change(program: list[Instruction], rng: random.Random) -> None:
    """One edit in place, of ZeRO's instructions and those for activations as often as of all the others,
    anywhere or where its unit is used."""
    kind = rng.choice(KINDS)
    i, j = rng.randrange(len(program)), rng.randrange(len(program))
    oftener = [index for index, item in enumerate(program) if item.op in (*ZERO, Op.RECOMPUTE, *MOVES)]
    if oftener and rng.random() < 0.5:
        i = rng.choice(oftener)
    if rng.random() < 0.5:
        j = rng.choice([index for index, item in enumerate(program) if item.unit == program[i].unit])
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
    elif kind == "more":
        more(program, i, j, rng)
    elif kind == "op":
        program[i] = program[i]._replace(op=rng.choice(list(Op)))
    elif kind == "word":
        fields = [field for field in FIELDS[program[i].op] if field in WORDS] or list(WORDS)
        field = rng.choice(fields)
        own = sorted({item.kind for item in program} - {*WORDS["kind"]}) if field == "kind" else ()
        program[i] = program[i]._replace(**{field: rng.choice((*WORDS[field], *own))})
    else:
        program[i] = program[i]._replace(**{kind: rng.randint(-1, 7)})


def more(program: list[Instruction], i: int, j: int, rng: random.Random) -> None:
    """Another GATHER and RELEASE of a unit, or RELEASE and GATHER, around some instructions or none; or what
    reduces a unit's gradient once more, and takes it down; or a way to another tier and back: edits that take
    several of the others, and may well be right."""
    item = program[i]
    if item.op == Op.REDUCE:
        groups = list(dict.fromkeys(other.group for other in program
                                    if (other.op, other.unit) == (item.op, item.unit)))
        down = [other for other in program if other == Instruction(Op.OFFLOAD, item.unit, kind="gshard")][:1]
        program[j:j] = [*(item._replace(group=group) for group in groups[:groups.index(item.group) + 1]),
                        *down]
    elif item.op in MOVES:
        first, then = rng.sample([item._replace(op=op) for op in (Op.OFFLOAD, Op.FETCH)], 2)
        program.insert(j, first)
        program.insert(rng.choice((j + 1, rng.randint(j + 1, len(program)))), then)
    elif item.op in (Op.GATHER, Op.RELEASE):
        pair = {Op.GATHER: item, Op.RELEASE: item}
        for other in program:
            if (other.unit, other.kind) == (item.unit, item.kind) and other.op in pair:
                pair[other.op] = other
        first, then = rng.sample(list(pair.values()), 2)
        program.insert(j, first)
        program.insert(rng.choice((j + 1, rng.randint(j + 1, len(program)))), then)


def edited(plan: Plan, rng: random.Random) -> tuple[str, list[tuple[Instruction, ...]]]:
    """A program of the plan with one to three edits in one position's part."""
    trains = [name for name in plan.programs if name != "evaluate"]
    name = rng.choice((*trains, *trains, *trains, "evaluate") if len(trains) == 1
                      else (*trains, *trains, "evaluate"))
    programs = list(plan.programs[name])
    position = rng.choice([index for index, each in enumerate(programs) if each])  # `settle` may be empty
    program = list(programs[position])
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        if program:  # an edit before may have taken the last of it out
            change(program, rng)
    programs[position] = tuple(program)
    return name, programs


def run(config: Config, plan: Plan) -> Ranks:
    """An evaluation (its loss comes first), then two steps, or three where updates come with the next: then
    each program runs, the last one last."""

    def work(here: Comm):
        engine = Engine(Analysis(plan), here)
        evaluated, _ = engine.run("evaluate", batches(config, here, 7))
        losses, *rest = drive(config, engine, here, 2 + plan.table.update.overlap)
        return [evaluated.loss, *losses], *rest

    return collect(config, loopback.run_loopback(plan, make_mesh(config), work))


LANES = ("at once", "beside", "late")  # when a lane's jobs run; all of a run's are alike
LATE = ("dp", "ep", "keys", "owners", "d2h", "h2d", "read", "write", "host")


class LateLane(ThreadLane):
    """Begins a job after a pause."""

    def __init__(self, name: str, device: torch.device, pause: Callable[[], None]):
        self._pause = pause
        super().__init__(name, device)

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        def late() -> None:
            self._pause()
            job()

        return super().submit(late, after)


class Haste:
    """Ends communications early, or begins and ends those of lanes late, at random."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int):
        self.rng, self.lanes = random.Random(seed), "beside"
        monkeypatch.setattr(loopback.ThreadChannel, "recv", self.any_time(loopback.ThreadChannel.recv))
        monkeypatch.setattr(loopback.ThreadGroup, "_call", self.any_time(loopback.ThreadGroup._call))
        monkeypatch.setattr(comm, "ThreadLane", self.lane)

    def lane(self, name: str, device: torch.device) -> Lane:
        return (
            Lane(device)
            if self.lanes == "at once"
            else LateLane(name, device, self.pause)
            if self.lanes == "late"
            else ThreadLane(name, device)
        )

    def any_time(self, call: Callable[..., Handle]) -> Callable[..., Handle]:
        def issue(*arguments) -> Handle:
            self.pause()
            handle = call(*arguments)
            self.pause()
            if self.rng.random() < 0.5:
                handle.wait()
            return handle

        return issue

    def pause(self) -> None:
        """In a late lane: pause, so that a reader which should wait for the lane's job, and does not, comes
        before it."""
        if self.lanes == "late" and threading.current_thread().name in LATE:
            time.sleep(self.rng.choice((0, 0, 0.001)))


def hunt(case: Case, seed: int, haste: Haste, path: Path, tell: Callable[[str], None]) -> Counter[str]:
    config, rng = case.config(path), random.Random(seed)
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
            haste.lanes = LANES[len(seen) % len(LANES)]
            try:
                assert_parity(run(config, replace(plan, programs={**plan.programs, name: programs})), right)
            except Exception as error:
                verdict = "wrong"
                tell(f"{name}: {difference(plan.programs[name], programs)}\n{type(error).__name__}: {error}")
        counts[verdict] += 1
    return counts


def difference(before: list[tuple[Instruction, ...]], after: list[tuple[Instruction, ...]]) -> str:
    position = next(p for p, (a, b) in enumerate(zip(before, after)) if a != b)
    lines = difflib.unified_diff(list(map(str, before[position])), list(map(str, after[position])),
                                 f"pp{position}", "edited", lineterm="")
    return "\n".join(lines)


def check(case: Case, seed: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many edits were rejected and right; none is wrong."""
    monkeypatch.setattr(loopback, "TIMEOUT_S", 30.0)
    wrong: list[str] = []
    counts = hunt(case, seed, Haste(monkeypatch, seed + 1), path, wrong.append)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("rejected", "right", "wrong")))
    assert not wrong, "\n\n".join(wrong[:5])
    assert counts["rejected"] > counts["right"]
    return counts


def of_trips(program: Sequence[Instruction]) -> Iterator[tuple[bool, list[Instruction]]]:
    """Each instruction that takes a tensor to other ranks left out, twice, or of another micro-batch; and in
    the place of another, or anywhere. And whether the edit may be right: it only changes the order."""
    places = [index for index, item in enumerate(program) if item.op in COLLECTIVES and item.of_slot]
    for i in places:
        item, before, behind = program[i], program[:i], program[i + 1:]
        for instead in ([], [item, item], [item._replace(microbatch=1 - item.microbatch)]):
            yield False, [*before, *instead, *behind]
        for j in places:
            swapped = list(program)
            swapped[i], swapped[j] = program[j], item
            yield True, swapped
        rest = [*before, *behind]
        yield from ((True, [*rest[:j], item, *rest[j:]]) for j in range(len(program)))


def of_turns(program: Sequence[Instruction]) -> Iterator[tuple[bool, list[Instruction]]]:
    """Each part of a step of matrices, and each exchange and move of them, left out, twice, of another unit,
    as another part, kind or group; and in the place of another, or anywhere. And whether the edit may be
    right."""
    begin = next(index for index, item in enumerate(program) if item.op == Op.CLIP)
    places = [index for index in range(begin, len(program))
              if program[index].op in (Op.STEP, Op.EXCHANGE, *MOVES)]
    units = {program[index].unit for index in places}
    for i in places:
        item, before, behind = program[i], program[:i], program[i + 1:]
        others = [item._replace(**{field: word}) for field, words in (
            ("part", WORDS["part"]), ("kind", ("", "update", "matrix", "turned", "direction")),
            ("group", ("", "dp", "owners", "tp")), ("unit", units), ("tier", WORDS["tier"]),
            ("op", MOVES if item.op in MOVES else ())) for word in words]
        for instead in ([], [item, item], *([other] for other in others if other != item)):
            yield False, [*before, *instead, *behind]
        rest = [*before, *behind]
        yield from ((True, [*rest[:j], item, *rest[j:]]) for j in range(begin - 6, len(program)))


@pytest.mark.parametrize("name", ["muon-zero0", "muon-zero2-sequence-parallel", "muon-cpu-zero2"])
def test_every_turn(name, monkeypatch):
    """Few of these edits are accepted, each of another order; they train as the plan does."""
    accepted_edits(name, of_turns, monkeypatch)


@pytest.mark.parametrize("name", ["experts", "experts-full-zero2", "experts-zb-h1-zero3", "again",
                                  "again-full", "again-zb-h1-zero3", "overlap"])
def test_every_trip(name, monkeypatch):
    """Few of these edits are accepted, each of another order; they train as the plan does."""
    accepted_edits(name, of_trips, monkeypatch)


Edits = Callable[[Sequence[Instruction]], Iterator[tuple[bool, list[Instruction]]]]


def accepted_edits(name: str, edits: Edits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "TIMEOUT_S", 30.0)
    config, haste = CASES[name].config(), Haste(monkeypatch, 1)
    plan = make_plan(config)
    program, *others = plan.programs["train"]
    right, accepted = run(config, plan), {program}
    for may_be_right, edit in edits(program):
        if (changed := tuple(edit)) in accepted:
            continue
        try:
            check_programs("train", [changed, *others], plan.table)
        except PlanError:
            continue
        assert may_be_right, difference([program], [changed])
        accepted.add(changed)
        haste.lanes = LANES[len(accepted) % len(LANES)]
        other = replace(plan, programs={**plan.programs, "train": [changed, *others]})
        assert_parity(run(config, other), right)
    assert len(accepted) > 4


FEW = 36  # edits of a case in `make test`
# Of these cases several of the few edits are right: a checker that refuses everything does not pass.
SOME_RIGHT = ("cpu-zb-h1-zero3", "zero3-zb-v", "nvme-zero3-tied", "full-zb-h1", "full-zero3")


CORE = {*SOME_RIGHT, *list(CASES)[::8]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.core] * (name in CORE))
                                  for name in CASES])
def test_no_edit_is_accepted_and_wrong(name, monkeypatch, tmp_path):
    """An edit that gets past `check` and then gives other numbers, raises or hangs: a rule is missing in
    `effects`."""
    counts = check(CASES[name]._replace(edits=FEW), 2, tmp_path, monkeypatch)
    assert counts["right"] or name not in SOME_RIGHT


@pytest.mark.parametrize("name", CASES)
def test_more_edits(name, monkeypatch, tmp_path):
    """The same, with other edits, and more where more can be edited."""
    case = CASES[name]
    check(case._replace(edits=case.edits // 3), 1, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_edits(name, monkeypatch, tmp_path):
    """The same, with three times as many: some are right in each case."""
    assert check(CASES[name], 1, tmp_path, monkeypatch)["right"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_edits(name, monkeypatch, tmp_path):
    """The same, with 1,000 other edits."""
    check(CASES[name]._replace(edits=1000), 11, tmp_path, monkeypatch)


def test_there_are_enough_edits():
    """Fewer than 2,000 edits would say little."""
    assert FEW * len(CASES) >= 2000 and min(case.edits for case in CASES.values()) > FEW


def test_nothing_is_added_to_a_sum_over_tp():
    """It lies in the gradient's buffer until it is reduced over dp: a backward in between would be summed
    over tp never."""

    def edit(program: list[Instruction]) -> None:
        reduce = program.index(Instruction(Op.REDUCE, 1, group="dp"))
        backward = program.index(Instruction(Op.BACKWARD, 1, 1))
        program.insert(backward, program.pop(reduce))

    case = Case(0, 1, 3, dp=2, tp=2, others=(ZERO_2, SP, UNTIED))
    assert "adds to 'wgrad p1' after it was used" in why_refused(make_plan(case.config()), edit)


def test_no_copy_is_there_while_its_shard_is_stepped():
    """A GATHER that is still on its way would write the old shard over the new one."""

    def edit(program: list[Instruction]) -> None:
        step = program.index(Instruction(Op.STEP, 1))
        program[step:step + 1] = [Instruction(Op.GATHER, 1, group="dp"), program[step],
                                  Instruction(Op.RELEASE, 1)]

    plan = make_plan(Case(0, 1, 2, dp=2, others=(UNTIED,)).config())
    assert "updates 'pshard p1' while 'param p1'" in why_refused(plan, edit)


def test_a_gradient_goes_down_once():
    """Below ZeRO-2 it lies in the whole gradient's buffer, which the next backward would write while it goes
    down."""

    def edit(program: list[Instruction]) -> None:
        down = program.index(Instruction(Op.OFFLOAD, 1, kind="gshard"))
        program.insert(down, program[down])

    case = Case(0, 1, 3, dp=2, others=(ZERO_1, CPU, UNTIED, LATER))
    assert "reads 'gshard p1', which is not alive" in why_refused(make_plan(case.config()), edit)


def test_what_is_stepped_in_place_is_not_gathered_then(monkeypatch):
    """A host whose memory is the device's steps the shard where it is: it waits for a GATHER that nobody
    reads, and which would write the old shard over the new one; a GATHER behind it waits for it."""
    config = Case(0, 1, 2, layers=1, dp=2, others=(ZERO_2, CPU, UNTIED, LATER)).config()
    plan, haste = make_plan(config), Haste(monkeypatch, 5)
    (program,), right = plan.programs["train"], run(config, plan)
    clip, step = (next(index for index, item in enumerate(program) if item.op == op)
                  for op in (Op.CLIP, Op.STEP))
    haste.lanes = "late"
    for at in (clip + 1, step + 1):
        unit = program[step].unit
        edit = (*program[:at], Instruction(Op.GATHER, unit, group="dp"), Instruction(Op.RELEASE, unit),
                *program[at:])
        check_programs("train", [edit], plan.table)
        for _ in range(4):
            assert_parity(run(config, replace(plan, programs={**plan.programs, "train": [edit]})), right)
