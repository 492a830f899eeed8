"""Measure how the host's step and copies hide behind computation: an offloaded model of which all of them
sleep, on the engine.

A GPT of 2.83B parameters on an H200, by the times of its instructions: the embedding, 12 blocks and the head
are a unit each. FORWARD and BACKWARD sleep, and on their lanes so do OFFLOAD, STEP and FETCH, beside what
they really do with tiny tensors. The plan, lanes, waits, rings and frees are the engine's. The computation is
a thread's, so that the engine runs ahead of it as on a GPU.

A step is predicted by the walk of `threed predict`, from each instruction's own time: see
bench/peers/pipeline.py, which does the same for pipelines.

    python -m bench.peers.offload --sleep --help
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from bench.common import TIMEOUT_S, columns, machine, processors, put_section
from bench.peers.sleeping_engine import (
    MOVED,
    SHAPE,
    Ran,
    Side,
    Threed,
    averaged,
    measured,
    nap,
    side,
    simulate,
)
from threed.comm.process import ProcessComm, file_store
from threed.config.load import load
from threed.planner import analyse, make_mesh
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.schema import Config

OPTIMIZER = ("zero.stage=2", "offload.optimizer=cpu")
PARAMETERS = ("zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu")
SMALL, LARGE = 8, 32  # micro-batches


class Case(NamedTuple):
    what: tuple[str, ...]  # settings
    m: int  # micro-batches
    group: int = 0  # that go through a unit together; 0: 1F1B
    overlap: str = "next"

    def __str__(self) -> str:
        order = "1f1b" if not self.group else f"vertical by {self.group}"
        what = "parameters" if self.what == PARAMETERS else "optimizer"
        return f"{what}, {self.m}, {order}, {self.overlap}"

    def over(self, parts: int) -> Case:
        """With so many times fewer micro-batches."""
        return self._replace(m=self.m // parts, group=self.group // parts)


CASES = tuple(Case(what, m, group, overlap) for m in (SMALL, LARGE) for what in (OPTIMIZER, PARAMETERS)
              for group in (0, m, *([m // 2] if m == LARGE else []))
              for overlap in (("next", "none") if what == OPTIMIZER and group in (0, m) else ("next",)))


class Times(NamedTuple):
    """Seconds: of a block, or of the head, and micro-batch; and of a unit."""

    forward: float
    backward: float
    step: float
    offload: float
    fetch: float


class Planned:
    """The plan of a case, and for how long its instructions sleep."""

    def __init__(self, case: Case, blocks: int, times: Times):
        self.config = config_of(case, blocks)
        self.analysis = analyse(self.config)
        self.plan = self.analysis.plan
        self._times = {Op.FORWARD: times.forward, Op.BACKWARD: times.backward, Op.STEP: times.step,
                       Op.OFFLOAD: times.offload, Op.FETCH: times.fetch}

    def sleeps(self, item: Instruction) -> tuple[float, ...]:
        embeds = item.op in COMPUTE and item.unit == 0
        return () if embeds else (self._times.get(item.op, 0.0),)

    def simulated(self, ran: Ran) -> tuple[float, float]:
        """Step time from each instruction's own time, and from the means over micro-batches."""
        programs, links = self.plan.programs["train"], self.analysis.simulated("train")
        own = measured(programs, [ran])
        return simulate(programs, links, own, 0.0), simulate(programs, links, averaged(own), 0.0)

    @cached_property
    def ideal_s(self) -> float:
        """The step, if all took what it is asked for."""
        programs, links = self.plan.programs["train"], self.analysis.simulated("train")
        asked = {(0, item): sum(self.sleeps(item)) for item in programs[0]
                 if item.op in COMPUTE or item.op in MOVED}
        return simulate(programs, links, asked, 0.0)


def config_of(case: Case, blocks: int) -> Config:
    """A tiny model in bf16 on one rank."""
    return load(None, [
        f"model.layers={blocks}", f"model.seq_len={SHAPE[0]}", f"model.hidden={SHAPE[2]}", "model.heads=4",
        "model.vocab=64", "model.vocab_multiple=64", "model.tie_embeddings=false", "precision.dtype=bf16",
        "parallel.dp=1", "run.device=cpu", f"train.global_batch_size={case.m * SHAPE[1]}",
        f"train.micro_batch_size={SHAPE[1]}", f"offload.overlap={case.overlap}", *case.what,
        *(["parallel.schedule=vertical", f"parallel.group={case.group}"] if case.group else [])])


# ---------------------------------------------------------------- the bench


class Row(NamedTuple):
    case: Case
    ideal_s: float
    threed: Side
    share: dict[Op | None, float]  # of the step in which a lane of MOVED was at work; None: the computation
    jobs: dict[Op, int]  # that slept on a lane, in a step
    others: float  # share of the machine's processors that was busy with other work


def measure(case: Case, blocks: int, times: Times, repeat: int, comm: ProcessComm) -> Row:
    """Steps, after two without sleeps, not counted: no update waits before the first, and what is set up at
    first use is set up."""
    before, used = processors(), time.process_time()
    planned = Planned(case, blocks, times)
    ours, steps = Threed(planned.config, planned.plan, comm, set(), planned.sleeps, ahead=True), list[Ran]()
    for number in range(2 + repeat):
        nap.on = number > 1
        steps.append(ours.step())
    nap.on = False
    ours.engine.close()
    worked, had = (now - then for now, then in zip(processors(), before, strict=True))
    others = max(0.0, worked - (time.process_time() - used)) / max(had, 1e-9)
    counted, kinds = steps[2:], {**dict.fromkeys(COMPUTE, None), **{op: op for op in MOVED}}
    busy: dict[Op | None, float] = dict.fromkeys((None, *MOVED), 0.0)
    for ran in counted:
        for item, took in zip(ours.program, ran.seconds, strict=True):
            if item.op in kinds:
                busy[kinds[item.op]] += took / (ran.end - ran.begin) / len(counted)
    jobs = {op: sum(len(each) for item, each in ours.lane_s.items() if item.op == op) for op in MOVED}
    return Row(case, planned.ideal_s, side([[ran] for ran in counted], lambda ran: planned.simulated(ran[0])),
               busy, jobs, others)


def run(cases: Sequence[Case], blocks: int, times: Times, repeat: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        comm = ProcessComm(make_mesh(config_of(cases[0], blocks)), 0, torch.device("cpu"), TIMEOUT_S,
                           file_store(str(Path(scratch) / "store"), 1))
        for case in cases:
            yield measure(case, blocks, times, repeat, comm)
        comm.close()


HEAD = ("offloaded, micro-batches, order, overlap", "ideal ms", "measured ms", "predicted ms", "ratio",
        "best", "of means", "of ideal", "computes", "steps", "down", "up", "others")


def cells(row: Row) -> list[str]:
    ours = row.threed
    shares = (*(row.share[lane] for lane in (None, Op.STEP, Op.OFFLOAD, Op.FETCH)), row.others)
    return [str(row.case), *(f"{1e3 * each:.0f}" for each in (row.ideal_s, ours.step_s, ours.simulated_s)),
            *(f"{each:.3f}" for each in (ours.ratio, ours.best_ratio, ours.ratio_to_means,
                                         ours.step_s / row.ideal_s)), *(f"{each:.0%}" for each in shares)]


def verdict(rows: Sequence[Row], target: float) -> str:
    slow = [f"{row.case} ({row.threed.ratio:.3f})" for row in rows if row.threed.ratio > target]
    return (f"`{'missed' if slow else 'met   '}`  measured at most {target:g} x predicted: "
            f"{len(rows) - len(slow)} of {len(rows)}" + (f"; not {'; '.join(slow)}" if slow else ""))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.peers.offload --sleep",
                                     description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="(default: 12)")
    parser.add_argument("--times", type=float, nargs=5, metavar=("F", "B", "STEP", "OFFLOAD", "FETCH"),
                        default=[1.5, 3.0, 46.0, 15.0, 7.0],
                        help="ms: forward and backward of a block, or of the head, for a micro-batch; the "
                             "host's step, a gradient's way down and a weight's way up, of a unit (default: "
                             "1.5 3 46 15 7)")
    parser.add_argument("--repeat", type=int, default=5, help="steps counted (default: 5)")
    parser.add_argument("--target", type=float, default=1.03,
                        help="most that measured / predicted may be (default: 1.03)")
    parser.add_argument("--quick", action="store_true", 
                        help="2 blocks, a quarter of the micro-batches, one step")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the section to this file, too, in place of an older one")
    args = parser.parse_args(argv)
    if min(args.blocks, args.repeat) < 1 or min(args.times) < 0:
        parser.error("--blocks and --repeat must be at least 1, --times at least 0")
    if args.quick:
        args.blocks, args.repeat = 2, 1
    return args


TITLE = "On an engine that sleeps"


def main(argv: Sequence[str]) -> None:
    """The bench. `argv`: without --sleep."""
    args, begin, load, rows = parse(argv), time.monotonic(), os.getloadavg()[0], list[Row]()
    cases = [case.over(4) for case in CASES] if args.quick else CASES
    times = Times(*(ms / 1e3 for ms in args.times))
    for row in run(cases, args.blocks, times, args.repeat):
        rows.append(row)
        print(f"{time.monotonic() - begin:4.0f} s  {row.case}: {1e3 * row.threed.step_s:.0f} ms, "
              f"{row.threed.ratio:.3f} of its prediction; jobs: "
              f"{', '.join(f'{op.name} {count}' for op, count in row.jobs.items())}; others {row.others:.0%}",
              file=sys.stderr, flush=True)
    forward, backward, *of_unit = (f"{ms:g}" for ms in args.times)
    real_time = hasattr(os, "SCHED_RR") and os.sched_getscheduler(0) == os.SCHED_RR
    first = "chrt --rr 1 python" if real_time else "python"
    command = " ".join([first, "-m bench.peers.offload --sleep", *argv])
    text = "\n\n".join([
        f"`{command}`, {time.strftime('%Y-%m-%d')}. {machine()}; load "
        f"average {load:.1f} at the start.\n{args.blocks} blocks, embedding and head; forward {forward} "
        f"and backward {backward} ms a block, or head, and micro-batch;\nSTEP, OFFLOAD and FETCH "
        f"{', '.join(of_unit)} ms a unit; {args.repeat} steps each.\n"
        "What the columns are is in [../README.md](../README.md).",
        columns([HEAD, *map(cells, rows)]), verdict(rows, args.target)])
    print(f"## {TITLE}\n\n{text}")
    if args.markdown:
        put_section(args.markdown, TITLE, text)
