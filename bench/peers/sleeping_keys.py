"""Measure how keys and values travel behind computation (parallel.cp_overlap), where both sleep, on the
engine.

Each schedule with and without `parallel.pair`, on 2 ranks a position, which share each sequence; processes
over gloo. Forward and the halves of backward sleep for given times; so does each GATHER and REDUCE of keys,
on its lane, in proportion to its bytes. Passes, messages between positions, lanes and waits are the engine's.
The norm and the projections of a block take a fifth of its computation, and what attends, with its MLP, the
rest.

A step is predicted as in bench/peers/sleeping_experts.py. Hidden is, in the middle half of each rank's time,
1 less what backward waits for gathers over what the gathers of backward take on their lane; the same of
reductions. In forward a block's gather has nothing beside it, unless a backward is computed with it (`pair`).

    python -m bench.peers.sleeping_keys --help
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import (
    columns,
    machine,
    put_section,
)
from bench.peers import sleeping_experts
from bench.peers.sleeping_engine import (
    SHAPE,
    Ran,
    Side,
    Threed,
    Times,
)
from bench.peers.sleeping_experts import Case, Kind, summaries
from threed.comm.lanes import Job
from threed.config.load import load
from threed.planner import make_pipeline, make_table
from threed.planner.passes import run_passes
from threed.program.check import check
from threed.program.entries import ComputeUnit
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.plan import Plan
from threed.program.settings import PairSettings
from threed.program.slots import Slots
from threed.program.table import Table
from threed.program.traffic import sent_by
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.spec.kernels import Product

CP = 2  # ranks of a position
PROJECT = 0.2  # share of a block's computation before its keys travel
TITLE = "Overlap"  # of the section of the results' file


class Work(NamedTuple):
    """Of a position, for a micro-batch."""

    times: Times
    gather: float  # seconds of a block's gather, over those of its forward


class Planned(sleeping_experts.Planned):
    """The plan of a case, and for how long its instructions sleep."""

    def __init__(self, case: Case, work: Work):
        self.config = config_of(case)
        pipeline = make_pipeline(self.config)
        table = make_table(self.config, pipeline.place)
        units = tuple(_units(table, work.times.over(case.blocks)))
        sent = sum(sent_by(table, Instruction(Op.GATHER, 1, 0, "kv", group="keys")).values())
        byte_s = work.gather * work.times.forward / case.blocks / sent
        table = replace(table, units=tuple(unit for unit, _ in units))
        self.costs = replace(table, pair=PairSettings(tuple(times for _, times in units), {"keys": byte_s}))
        self.plan: Plan = run_passes(self.config, pipeline, self.costs if case.pair else table)
        check(self.plan)


def config_of(case: Case) -> Config:
    """A tiny model. The first stage also has the embedding and the last the head, which take no time."""
    stages = case.p * case.v
    units = [case.blocks // case.v * 2] * stages
    units[0] += 1
    units[-1] += 1
    return load(None, [
        "model.position=rotary", f"model.layers={case.p * case.blocks}", "model.heads=4",
        f"model.seq_len={CP * SHAPE[0]}", f"model.hidden={SHAPE[2]}", "model.vocab=64",
        "model.vocab_multiple=64", "model.tie_embeddings=false",
        f"train.global_batch_size={case.m * SHAPE[1]}", f"train.micro_batch_size={SHAPE[1]}",
        f"parallel.pp={case.p}", "parallel.dp=1", f"parallel.cp={CP}", "parallel.cp_overlap=true",
        f"parallel.schedule={case.schedule}", f"parallel.stage_units={units}",
        f"parallel.virtual_stages={case.v if SCHEDULES[case.schedule].virtual is None else 'null'}",
        f"parallel.pair={str(case.pair).lower()}"])


def _units(table: Table, block: Times) -> Iterator[tuple[ComputeUnit, Times]]:
    """Units, each with its seconds. Without pairs the planner goes by FLOPs."""
    for unit in table.units:
        share = PROJECT if unit.makes else 1 - PROJECT if unit.reads else 0.0
        mine = Times(*(seconds * share for seconds in block))
        product = Product(1, 1, round(1e6 * mine.forward))
        yield replace(unit, kernels=(product,) if product.k else ()), mine


class Keys(Threed):
    """One rank of threed's engine, of which GATHER and REDUCE of keys sleep on their lane."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._of_units = {op: self.engine.handlers[op] for op in (Op.GATHER, Op.REDUCE)}
        self.engine.handlers |= dict.fromkeys(self._of_units, self.travel)

    def travel(self, item: Instruction, slots: Slots) -> Job | None:
        return self.exchange(item, slots) if item.of_slot else self._of_units[item.op](item, slots)


KIND = Kind(CP, config_of, Planned, Keys)


# ---------------------------------------------------------------- the bench


class Waited(NamedTuple):
    """Seconds of a kind of travel on its lane, and of the computation's waits for it."""

    lane_s: float
    waited_s: float


def waits(program: Sequence[Instruction], ran: Ran) -> dict[str, Waited]:
    """Of a rank's middle half: of the gathers of forward and of backward, and of the reductions."""
    trace = ran.trace
    assert trace is not None
    computes = [index for index, item in enumerate(program) if item.op in COMPUTE]
    begin, end = trace.started[computes[0]], trace.ended[computes[-1]]
    begin, end = begin + (end - begin) / 4, end - (end - begin) / 4
    kinds, seen = dict[int, str](), set[Instruction]()
    for index, item in enumerate(program):
        if item.of_slot:
            again = "backward" if item in seen else "forward"
            kinds[index] = "reduce" if item.op == Op.REDUCE else again
            seen.add(item)
    found = {kind: [0.0, 0.0] for kind in ("forward", "backward", "reduce")}
    for index, kind in kinds.items():
        if begin <= trace.started[index] < end:
            found[kind][0] += ran.seconds[index]
    for _, source, wait_s in trace.waits:
        if source in kinds and begin <= trace.started[source] < end:
            found[kinds[source]][1] += wait_s
    return {kind: Waited(*each) for kind, each in found.items()}


class Row(NamedTuple):
    case: Case
    transfer_s: float
    ideal_s: float
    threed: Side
    hidden: dict[str, float]  # the share that is not waited for, by kind as of `waits`
    others: float  # share of the machine's processors that was busy with other work


def run(cases: Sequence[Case], work: Work, repeat: int) -> Iterator[Row]:
    for case, seen, others in summaries(KIND, cases, work, repeat):
        found = [waits(program, ran) for program, ran in seen.traced]
        hidden = {kind: 1 - sum(each[kind].waited_s for each in found)
                  / sum(each[kind].lane_s for each in found) for kind in found[0]}
        yield Row(case, seen.transfer_s, seen.ideal_s, seen.threed, hidden, others)


HEAD = ("schedule", "ideal ms", "measured ms", "predicted ms", "ratio", "best", "of means", "hidden: forward",
        "backward", "reductions", "others")


def cells(row: Row) -> list[str]:
    ours, times = row.threed, (row.ideal_s, row.threed.step_s, row.threed.simulated_s)
    return [str(row.case), *(f"{1e3 * seconds:.1f}" for seconds in times), f"{ours.ratio:.3f}",
            f"{ours.best_ratio:.3f}", f"{ours.ratio_to_means:.3f}",
            *(f"{share:.0%}" for share in (*row.hidden.values(), row.others))]


def verdicts(rows: Sequence[Row], target: float, hidden: float) -> str:
    def line(text: str, missed: Sequence[str]) -> str:
        return (f"{'missed' if missed else 'met   '}  {text}: {len(rows) - len(missed)} of {len(rows)}"
                + (f"; not {'; '.join(missed)}" if missed else ""))

    slow = [f"{row.case} ({row.threed.ratio:.3f})" for row in rows if row.threed.ratio > target]
    seen = [f"{row.case} ({row.hidden['backward']:.1%})" for row in rows if row.hidden["backward"] < hidden]
    return "\n".join([line(f"measured at most {target:g} x predicted", slow),
                      line(f"at least {hidden:.0%} of the gathers of backward hidden", seen)])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    names = ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
    parser = argparse.ArgumentParser(prog="bench.peers.sleeping_keys",
                                     description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", metavar="NAME", choices=names, default=names,
                        help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--p", type=int, default=2, help="pipeline positions, 2 processes each (default: 2)")
    parser.add_argument("--m", type=int, default=8, help="micro-batches (default: 8)")
    parser.add_argument("--blocks", type=int, default=4, metavar="N", help="blocks a position (default: 4)")
    parser.add_argument("--times", type=float, nargs=3, metavar=("F", "B", "W"), default=[80.0, 80.0, 80.0],
                        help="ms of a position's forward, input and weight halves of backward "
                             "(default: 80 80 80)")
    parser.add_argument("--gather", type=float, default=0.5, metavar="X",
                        help="a block's gather, over its forward (default: 0.5)")
    parser.add_argument("--repeat", type=int, default=4,
                        help="steps counted, after one that is not (default: 4)")
    parser.add_argument("--target", type=float, default=1.03,
                        help="most that measured / predicted may be (default: 1.03)")
    parser.add_argument("--hidden", type=float, default=0.9, metavar="X",
                        help="the least share of backward's gathers to hide (default: 0.9)")
    parser.add_argument("--quick", action="store_true", help="one step of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help=f"write the section '{TITLE}' of this file anew")
    args = parser.parse_args(argv)
    if args.quick:
        args.repeat = 1
    if args.p < 2 or args.blocks % 2 or args.blocks < 2 or min(args.m, args.repeat) < 1:
        parser.error("--p must be at least 2, --blocks an even number, --m and --repeat at least 1")
    if min(args.times) <= 0 or args.gather <= 0:
        parser.error("--times and --gather must be above 0")
    return args


def about(args: argparse.Namespace) -> str:
    times = " ".join(f"{ms:g}" for ms in args.times)
    return (f"{machine()}; {args.p} positions of {CP} ranks, {args.m} micro-batches; forward, input and "
            f"weight halves of {args.blocks} blocks: {times} ms; a gather {args.gather:g} of a block's "
            "forward")


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    work = Work(Times(*(ms / 1e3 for ms in args.times)), args.gather)
    cases = [Case(name, pair, args.p, args.m, SCHEDULES[name].virtual or 2, args.blocks)
             for name in args.schedule for pair in (False, True)]
    rows = list[Row]()
    print(about(args), file=sys.stderr, flush=True)
    for row in run(cases, work, args.repeat):
        rows.append(row)
        print(f"{row.case}: {1e3 * row.threed.step_s:.0f} ms, {row.threed.ratio:.3f} of its prediction, "
              f"{row.hidden['backward']:.0%} of backward's gathers hidden; others {row.others:.0%}",
              file=sys.stderr, flush=True)
    text = f"{columns([HEAD, *map(cells, rows)])}\n\n```\n{verdicts(rows, args.target, args.hidden)}\n```\n"
    print(text, end="")
    if args.markdown:
        head = (f"`python -m bench.peers.sleeping_keys {' '.join(argv)}`, "
                f"{time.strftime('%Y-%m-%d')}. {about(args)}.\n"
                "What the columns are is in [../README.md](../README.md).\n")
        put_section(args.markdown, TITLE, f"{head}\n{text}")
    if args.json:
        args.json.write_text(json.dumps({"about": about(args), "rows": [
            {**row._asdict(), "case": row.case._asdict(), "threed": row.threed._asdict()} for row in rows]},
            indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
