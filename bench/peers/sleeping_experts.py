"""Measure how exchanges hide behind computation: a mixture of experts of which both sleep, on the engine.

Each schedule with and without `parallel.pair`, on 2 ranks a position, processes over gloo. Forward and the
halves of backward sleep for given times; so does each EXCHANGE, on its lane, in proportion to its bytes.
Passes, messages between positions, lanes and waits are the engine's, and the pass of pairs is told the times
that are slept. Router and attention take half of a block's computation, and its experts half.

A step is predicted by the walk of `threed predict`, from each instruction's own time and the measured time of
a message: see bench/peers/pipeline.py, which does the same for stages without exchanges. Hidden is 1 less
what the computation waits for exchanges over what these take on their lane, by the traces of the middle half
of each rank's step (`Steady`).

    python -m bench.peers.moe --sleep --help
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from bench.common import TIMEOUT_S, answer, columns, machine, on_ranks, processors, start_together
from bench.peers.sleeping_engine import (
    SHAPE,
    Ran,
    Seconds,
    Side,
    Threed,
    Times,
    averaged,
    measured,
    nap,
    ping_pong,
    side,
    simulate,
)
from threed.comm.process import ProcessComm, file_store
from threed.config.load import load
from threed.planner import make_mesh, make_pipeline, make_table
from threed.planner.passes import run_passes
from threed.program.analysis import Analysis
from threed.program.check import check
from threed.program.entries import ComputeUnit
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.pairs import cost_in_pair
from threed.program.plan import Plan
from threed.program.settings import PairSettings
from threed.program.table import Table
from threed.program.traffic import sent_by
from threed.program.trips import leaving
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.spec.kernels import Product

EP = 2  # ranks of a position: the least that exchange


class Case(NamedTuple):
    schedule: str
    pair: bool
    p: int
    m: int
    v: int  # stages a position
    blocks: int  # a position

    def __str__(self) -> str:
        return f"{self.schedule}{f' (v={self.v})' if self.v > 1 else ''}{', paired' if self.pair else ''}"


class Work(NamedTuple):
    """Of a position, for a micro-batch."""

    times: Times
    exchange: float  # seconds of all exchanges, forth and back, over those of all computation


class Planned:
    """The plan of a case, and for how long its instructions sleep."""

    def __init__(self, case: Case, work: Work):
        self.config = config_of(case)
        pipeline = make_pipeline(self.config)
        table = make_table(self.config, pipeline.place)
        units = tuple(_units(table, case, work.times))
        byte_s = work.exchange * sum(work.times) / _exchanged(table)
        table = replace(table, units=tuple(unit for unit, _ in units))
        self.costs = replace(table, pair=PairSettings(tuple(times for _, times in units), {"ep": byte_s}))
        self.plan: Plan = run_passes(self.config, pipeline, self.costs if case.pair else table)
        check(self.plan)

    @cached_property
    def analysis(self) -> Analysis:
        return Analysis(self.plan)

    def sleeps(self, item: Instruction) -> tuple[float, ...]:
        """Seconds of a computation, or of an exchange."""
        return (cost_in_pair(item, self.costs),)

    def simulated(self, *replicas: Seconds, transfer_s: float) -> float:
        """Step time. `replicas`: the times of each; they meet only at the step's end."""
        programs, links = self.plan.programs["train"], self.analysis.simulated("train")
        return max(simulate(programs, links, seconds, transfer_s) for seconds in replicas)

    @property
    def ideal_s(self) -> float:
        """The step, if all took what it is asked for, and messages nothing."""
        return self.simulated({(position, item): sum(self.sleeps(item))
                               for position, program in enumerate(self.plan.programs["train"])
                               for item in program if item.op in COMPUTE or item.of_slot},
                              transfer_s=0.0)


def config_of(case: Case) -> Config:
    """A tiny model. The first stage also has the embedding and the last the head, which take no time."""
    stages = case.p * case.v
    units = [case.blocks // case.v * 3] * stages  # of a block: router, experts, sum
    units[0] += 1
    units[-1] += 1
    return load(None, [
        "model.family=moe", "model.position=rotary", f"model.layers={case.p * case.blocks}", "model.heads=4",
        f"model.seq_len={SHAPE[0]}", f"model.hidden={SHAPE[2]}", "model.vocab=64", "model.vocab_multiple=64",
        "model.tie_embeddings=false", "model.experts=2", "model.expert_ffn_hidden=16",
        f"train.global_batch_size={EP * case.m * SHAPE[1]}", f"train.micro_batch_size={SHAPE[1]}",
        f"parallel.pp={case.p}", f"parallel.dp={EP}", f"parallel.ep={EP}",
        f"parallel.schedule={case.schedule}", f"parallel.stage_units={units}",
        f"parallel.virtual_stages={case.v if SCHEDULES[case.schedule].virtual is None else 'null'}",
        f"parallel.pair={str(case.pair).lower()}"])


def _units(table: Table, case: Case, times: Times) -> Iterator[tuple[ComputeUnit, Times]]:
    """Units, each with its seconds: those of the router and of the experts have half of a block's. Without
    pairs the planner goes by FLOPs."""
    half = times.over(2 * case.blocks)
    for unit in table.units:
        mine = half if any(each.leaves for each in unit.makes) else Times(0.0, 0.0, 0.0)
        product = Product(1, 1, round(1e6 * mine.forward))
        yield replace(unit, kernels=(product,) if product.k else ()), mine


def _exchanged(table: Table) -> int:
    """Bytes that a rank of position 0 sends in the exchanges of a micro-batch."""
    moves = [move for unit in table.units_of(0) for op in (Op.FORWARD, Op.BACKWARD)
             for move in leaving(Instruction(op, unit, 0), table)]
    return sum(sum(sent_by(table, move).values()) for move in moves)


# ---------------------------------------------------------------- on every rank


class Results(NamedTuple):
    """What a rank says of a case."""

    steps: list[Ran]
    transfers: list[float]  # seconds of a message, by round of ping-pong; of position 0 alone
    cpu_s: float  # processor time that the rank used


class Kind(NamedTuple):
    """What travels in a bench, and how it is measured."""

    ranks: int  # of a position
    config_of: Callable[[Case], Config]
    planned: Callable[[Case, Any], Planned]
    engine: type[Threed]


def serve(rank: int, store: str, kind: Kind, cases: Sequence[Case], work: Any, repeat: int,
          pipe: Any) -> None:
    """Body of a process: send the results of each case through `pipe`, or what went wrong."""
    torch.set_num_threads(1)
    try:
        mesh, opened = make_mesh(kind.config_of(cases[0])), set[tuple[int, int, str]]()
        comm = ProcessComm(mesh, rank, torch.device("cpu"), TIMEOUT_S, file_store(store, mesh.size))
        for case in cases:
            pipe.send(measure(kind, kind.planned(case, work), repeat, comm, opened))
        comm.close()
    except BaseException:
        pipe.send(traceback.format_exc())


def measure(kind: Kind, planned: Planned, repeat: int, comm: ProcessComm,
            opened: set[tuple[int, int, str]]) -> Results:
    """Steps, after one without sleeps, not counted, for what is set up at first use."""
    used = time.process_time()
    ours = kind.engine(planned.config, planned.plan, comm, opened, planned.sleeps)
    transfers, steps = ping_pong(comm), []
    for number in range(1 + repeat):
        nap.on = number > 0
        start_together(comm)
        steps.append(ours.step())
    return Results(steps[1:], transfers, time.process_time() - used)


# ---------------------------------------------------------------- the bench


class Steady(NamedTuple):
    """Of the middle half of a rank's time, from its first computation to its last: of the instructions that
    start there (of an EXCHANGE: that are given to its lane)."""

    span_s: float
    computed_s: float
    exchanged_s: float  # on the lane
    waited_s: float  # of the computation for exchanges

    @classmethod
    def of(cls, program: Sequence[Instruction], ran: Ran) -> Steady:
        trace = ran.trace
        assert trace is not None
        computes = [index for index, item in enumerate(program) if item.op in COMPUTE]
        begin, end = trace.started[computes[0]], trace.ended[computes[-1]]
        begin, end = begin + (end - begin) / 4, end - (end - begin) / 4
        inside = [begin <= started < end for started in trace.started]

        def took(*ops: Op) -> float:
            return sum(seconds for item, seconds, here in zip(program, ran.seconds, inside, strict=True)
                       if here and item.op in ops)

        waited = sum(wait.wait_s for wait in trace.waits if wait.index < len(program) and inside[wait.index]
                     and program[wait.source].op == Op.EXCHANGE and wait.source >= 0)
        return cls(end - begin, took(*COMPUTE), took(Op.EXCHANGE), waited)


class Row(NamedTuple):
    case: Case
    transfer_s: float
    ideal_s: float
    threed: Side
    hidden: float  # share of the exchanges that the computation does not wait for, in the middle half
    computes: float  # share of the middle half in which a rank computes
    bubble: float  # share of the step in which a rank does not
    others: float  # share of the machine's processors that was busy with other work


class Summary(NamedTuple):
    """Of a case, on all ranks."""

    transfer_s: float
    ideal_s: float
    threed: Side
    traced: list[tuple[Sequence[Instruction], Ran]]  # of each rank and step: its program, and what it took


def summary(planned: Planned, ranks: Sequence[Results]) -> Summary:
    mesh, programs = make_mesh(planned.config), planned.plan.programs["train"]
    transfer_s = median(ranks[0].transfers)

    def simulated(step: Sequence[Ran]) -> tuple[float, float]:
        replicas = [measured(programs, [step[rank] for rank in mesh.group("pp", first)])
                    for first in mesh.group("dp", 0)]
        return (planned.simulated(*replicas, transfer_s=transfer_s),
                planned.simulated(averaged(*replicas), transfer_s=transfer_s))

    ours = side(list(zip(*(rank.steps for rank in ranks), strict=True)), simulated)
    return Summary(transfer_s, planned.ideal_s, ours, [
        (programs[mesh.coordinate(rank).position], ran) for rank, result in enumerate(ranks)
        for ran in result.steps])


def row(case: Case, seen: Summary, busy: float) -> Row:
    """`busy`: share of the machine's processors."""
    middle = [Steady.of(program, ran) for program, ran in seen.traced]
    whole = [sum(took for item, took in zip(program, ran.seconds, strict=True) if item.op in COMPUTE)
             / (ran.end - ran.begin) for program, ran in seen.traced]
    return Row(case, seen.transfer_s, seen.ideal_s, seen.threed,
               1 - sum(each.waited_s for each in middle) / sum(each.exchanged_s for each in middle),
               fmean(each.computed_s / each.span_s for each in middle), 1 - fmean(whole), busy)


def summaries(kind: Kind, cases: Sequence[Case], work: Any,
              repeat: int) -> Iterator[tuple[Case, Summary, float]]:
    """Each case as it ends, and the share of the machine's processors that was busy with other work."""
    with on_ranks(kind.ranks * cases[0].p, serve, kind, cases, work, repeat) as pipes:
        for case in cases:
            before = processors()
            ranks: list[Results] = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
            worked, had = (now - then for now, then in zip(processors(), before, strict=True))
            others = max(0.0, worked - sum(rank.cpu_s for rank in ranks)) / max(had, 1e-9)
            yield case, summary(kind.planned(case, work), ranks), others


EXPERTS = Kind(EP, config_of, Planned, Threed)


def run(cases: Sequence[Case], work: Work, repeat: int) -> Iterator[Row]:
    return (row(*each) for each in summaries(EXPERTS, cases, work, repeat))


HEAD = ("schedule", "ideal ms", "measured ms", "predicted ms", "ratio", "best", "of means", "of unpaired",
        "hidden", "computes", "bubble", "others")


def cells(row: Row, unpaired: Row | None) -> list[str]:
    ours, times = row.threed, (row.ideal_s, row.threed.step_s, row.threed.simulated_s)
    of = f"{ours.step_s / unpaired.threed.step_s:.3f}" if unpaired is not None else "-"
    return [str(row.case), *(f"{1e3 * seconds:.1f}" for seconds in times), f"{ours.ratio:.3f}",
            f"{ours.best_ratio:.3f}", f"{ours.ratio_to_means:.3f}", of,
            *(f"{share:.0%}" for share in (row.hidden, row.computes, row.bubble, row.others))]


def table_text(rows: Sequence[Row]) -> str:
    lines = list[Sequence[str]]([HEAD])
    for before, row in pairwise([None, *rows]):
        assert row is not None
        after = before is not None and row.case.pair and before.case == row.case._replace(pair=False)
        lines.append(cells(row, before if after else None))
    return columns(lines)


def verdicts(rows: Sequence[Row], target: float, hidden: float) -> str:
    """`target`: most that measured over predicted may be; `hidden`: the least share that dualpipe-v hides."""
    def line(met: bool, text: str) -> str:
        return f"{'met   ' if met else 'missed'}  {text}"

    slow = [f"{row.case} ({row.threed.ratio:.3f})" for row in rows if row.threed.ratio > target]
    lines = [line(not slow, f"measured at most {target:g} x predicted: {len(rows) - len(slow)} of {len(rows)}"
                            + (f"; not {'; '.join(slow)}" if slow else ""))]
    lines += [line(row.hidden >= hidden, f"{row.case}: at least {hidden:.0%} of the exchanges hidden in the "
                                         f"middle half: {row.hidden:.1%}")
              for row in rows if row.case.schedule == "dualpipe-v" and row.case.pair]
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    schedules = [name for name, row in SCHEDULES.items() if row.paired]
    parser = argparse.ArgumentParser(prog="bench.peers.moe --sleep",
                                     description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", metavar="NAME", choices=schedules, default=schedules,
                        help=f"of {', '.join(schedules)} (default: all)")
    parser.add_argument("--p", type=int, default=4, help="pipeline positions, 2 processes each (default: 4)")
    parser.add_argument("--m", type=int, default=16, help="micro-batches a rank (default: 16)")
    parser.add_argument("--blocks", type=int, default=2, metavar="N",
                        help="blocks a position; a multiple of its stages, of which some schedules have 2 "
                             "(default: 2)")
    parser.add_argument("--times", type=float, nargs=3, metavar=("F", "B", "W"), default=[40.0, 40.0, 40.0],
                        help="ms of a position's forward, input and weight halves of backward "
                             "(default: 40 40 40)")
    parser.add_argument("--exchange", type=float, default=0.9, metavar="X",
                        help="all exchanges, over all computation (default: 0.9)")
    parser.add_argument("--repeat", type=int, default=4,
                        help="steps counted, after one that is not (default: 4)")
    parser.add_argument("--target", type=float, default=1.03,
                        help="most that measured / predicted may be (default: 1.03)")
    parser.add_argument("--hidden", type=float, default=0.85, metavar="X",
                        help="the least share of the exchanges that dualpipe-v is to hide (default: 0.85)")
    parser.add_argument("--quick", action="store_true", help="one step of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the table here too, and how it was made")
    args = parser.parse_args(argv)
    if args.quick:
        args.repeat = 1
    if min(args.p, args.blocks) < 2 or args.blocks % 2 or min(args.m, args.repeat) < 1:
        parser.error("--p must be at least 2, --blocks an even number, --m and --repeat at least 1")
    if min(args.times) <= 0 or args.exchange <= 0:
        parser.error("--times and --exchange must be above 0")
    least = {name: SCHEDULES[name].least(args.p) for name in args.schedule}
    if few := [f"{name} needs {count}" for name, count in least.items() if args.m < count]:
        parser.error(f"--m {args.m}: {', '.join(few)}")
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    return [Case(name, pair, args.p, args.m, SCHEDULES[name].virtual or 2, args.blocks)
            for name in args.schedule for pair in (False, True)]


def about(args: argparse.Namespace) -> str:
    times = " ".join(f"{ms:g}" for ms in args.times)
    return (f"{machine()}; {args.p} positions of {EP} ranks, {args.m} micro-batches; forward, input and "
            f"weight halves of {args.blocks} blocks: {times} ms; exchanges {args.exchange:g} of that")


def main(argv: Sequence[str]) -> None:
    """The bench. `argv`: without --sleep."""
    args = parse(argv)
    work = Work(Times(*(ms / 1e3 for ms in args.times)), args.exchange)
    begin, rows = time.monotonic(), list[Row]()
    print(about(args), file=sys.stderr, flush=True)
    for row in run(cases_of(args), work, args.repeat):
        rows.append(row)
        print(f"{time.monotonic() - begin:4.0f} s  {row.case}: {1e3 * row.threed.step_s:.0f} ms, "
              f"{row.threed.ratio:.3f} of its prediction, {row.hidden:.0%} hidden; a message "
              f"{1e3 * row.transfer_s:.2f} ms, others {row.others:.0%}", file=sys.stderr, flush=True)
    text = f"{table_text(rows)}\n\n```\n{verdicts(rows, args.target, args.hidden)}\n```\n"
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(f"{markdown_head(rows, args, argv)}\n{text}")
    if args.json:
        args.json.write_text(json.dumps({"about": about(args), "rows": [
            {**row._asdict(), "case": row.case._asdict(), "threed": row.threed._asdict()} for row in rows]},
            indent=1) + "\n")


def markdown_head(rows: Sequence[Row], args: argparse.Namespace, argv: Sequence[str]) -> str:
    return (f"# Exchanges behind computation\n\n`python -m bench.peers.moe --sleep {' '.join(argv)}`, "
            f"{time.strftime('%Y-%m-%d')}. {about(args)}.\nA message took "
            f"{1e3 * median(row.transfer_s for row in rows):.2f} ms. What the columns are is in "
            "[../README.md](../README.md).\n")
