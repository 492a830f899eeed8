"""Measure the executor alone: a pipeline whose stages sleep, run by threed and by
torch.distributed.pipelining.

Forward, backward-input and backward-weight of a stage sleep for given times, so that p processes on a few
cores do not compete for them, and small tensors are really sent, over gloo. What a step takes longer than its
simulation is then the executor's own: waits of the host, the transport, time between instructions.

    threed   a checked plan, the real engine; only the handlers of FORWARD and BACKWARD* are replaced, by
             sleeps. GATHER, SEND, RECV, REDUCE, CLIP and STEP run as in training, and their time is part of
             the step.
    torch    PipelineStage and its schedules, over a module that sleeps. It has no optimizer step, and sends
             over one communicator, as it does by itself.

Both take turns, step by step, in the same processes, and are simulated by the same walk: threed's plan, and
torch's order as it was executed, with the op times as measured in that run and the measured time of a
message.

    python -m bench.peers.pipeline --help
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.common import TIMEOUT_S, answer, columns, machine, on_ranks, processors, start_together
from bench.peers.sleepers import PEERS, Case, Torch, make_case, seconds_of
from bench.peers.sleeping_engine import (
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
from threed.planner import make_mesh
from threed.prediction.schedule_only import bare_programs
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE
from threed.program.link import Links, Program, link
from threed.schedules.orders import SCHEDULES, Order

# ---------------------------------------------------------------- on every rank


class Results(NamedTuple):
    """What a rank says of a case."""

    threed: list[Ran]
    torch: list[Ran]
    transfers: list[float]  # seconds of a message, by round of ping-pong; of rank 0 alone
    cpu_s: float  # processor time that the rank used


def serve(rank: int, store: str, cases: Sequence[Case], times: Times, repeat: int, pipe: Any) -> None:
    """Body of a process: send the results of each case through `pipe`, or what went wrong."""
    torch.set_num_threads(1)
    try:
        config, _ = make_case(cases[0])
        comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), TIMEOUT_S,
                           file_store(store, cases[0].p))
        opened: set[tuple[int, int, str]] = set()
        for case in cases:
            pipe.send(measure(case, times, repeat, comm, opened))
        comm.close()
    except BaseException:
        pipe.send(traceback.format_exc())


def measure(case: Case, times: Times, repeat: int, comm: ProcessComm,
            opened: set[tuple[int, int, str]]) -> Results:
    """Steps of threed and of torch by turns, after one of each without sleeps, not counted, for what is set
    up at first use."""
    used = time.process_time()
    asked = seconds_of(case, times)
    ours = Threed(*make_case(case), comm, opened, lambda item: asked.get(item.op, ()))
    peers = Torch(case, times, comm.rank) if case.schedule in PEERS else None
    results = Results([], [], ping_pong(comm), 0.0)
    for number in range(1 + repeat):
        nap.on = number > 0
        start_together(comm)
        results.threed.append(ours.step())
        if peers is not None:
            start_together(comm)
            results.torch.append(peers.step())
    return Results(results.threed[1:], results.torch[1:], results.transfers, time.process_time() - used)


# ---------------------------------------------------------------- the simulation


def simulate_threed(analysis: Analysis, ranks: Sequence[Ran], transfer_s: float) -> tuple[float, float]:
    """A step of threed from each instruction's own time, and from means by op."""
    programs = analysis.plan.programs["train"]
    return _own_and_means(programs, analysis.simulated("train"), measured(programs, ranks), transfer_s)


def simulate_torch(case: Case, ranks: Sequence[Ran], transfer_s: float) -> tuple[float, float]:
    """The same of a step of torch: the order that it was seen to execute, with threed's messages."""
    order: Order = [list(ran.tasks) for ran in ranks]
    programs, table = bare_programs(order, SCHEDULES[case.schedule].place(case.p, case.v), case.m)
    seconds = {(position, item): took for position, ran in enumerate(ranks)
               for item, took in zip([item for item in programs[position] if item.op in COMPUTE], ran.seconds,
                                     strict=True)}
    links = [link(program, table, position, set()) for position, program in enumerate(programs)]
    return _own_and_means(programs, links, seconds, transfer_s)


def _own_and_means(programs: Sequence[Program], links: Sequence[Links], seconds: Seconds,
                   transfer_s: float) -> tuple[float, float]:
    own, means = (simulate(programs, links, each, transfer_s) for each in (seconds, averaged(seconds)))
    return own, means


# ---------------------------------------------------------------- the bench


class Row(NamedTuple):
    case: Case
    transfer_s: float
    ideal_s: float
    threed: Side
    torch: Side | None
    others: float  # share of the machine's processors that was busy with other work


def sum_up(case: Case, times: Times, ranks: Sequence[Results], busy: tuple[float, float]) -> Row:
    """`busy`: processor seconds that the machine used in the meantime, and that it had."""
    transfer_s = median(ranks[0].transfers)
    analysis = Analysis(make_case(case)[1])
    asked = seconds_of(case, times)
    programs = analysis.plan.programs["train"]
    exact = {(position, item): sum(asked.get(item.op, ()))
             for position, program in enumerate(programs) for item in program}
    ours = side(list(zip(*(rank.threed for rank in ranks))),
                lambda each: simulate_threed(analysis, each, transfer_s))
    peers = side(list(zip(*(rank.torch for rank in ranks))),
                 lambda each: simulate_torch(case, each, transfer_s)) \
        if ranks[0].torch else None
    return Row(case, transfer_s, simulate(programs, analysis.simulated("train"), exact, 0.0), ours, peers,
               max(0.0, busy[0] - sum(rank.cpu_s for rank in ranks)) / max(busy[1], 1e-9))


def run(cases: Sequence[Case], times: Times, repeat: int) -> Iterator[Row]:
    """The cases of one p, in processes forked once."""
    with on_ranks(cases[0].p, serve, cases, times, repeat) as pipes:
        for case in cases:
            before = processors()
            ranks: list[Results] = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
            busy = [now - then for now, then in zip(processors(), before)]
            yield sum_up(case, times, ranks, (busy[0], busy[1]))


HEAD = ("schedule", "p", "m", "ideal ms", "threed ms", "simulated ms", "ratio", "best", "torch ms",
        "torch's ratio", "best",
        "threed / torch", "others")


def cells(row: Row) -> list[str]:
    case, ours, peers = row.case, row.threed, row.torch
    name = f"{case.schedule} (v={case.v})" if case.v > 1 else case.schedule
    theirs = [_ms(peers.step_s), f"{peers.ratio:.3f}", f"{peers.best_ratio:.3f}",
              f"{ours.step_s / peers.step_s:.3f}"] \
        if peers else ["-"] * 4
    return [name, str(case.p), str(case.m), _ms(row.ideal_s), _ms(ours.step_s), _ms(ours.simulated_s),
            f"{ours.ratio:.3f}",
            f"{ours.best_ratio:.3f}", *theirs, f"{row.others:.0%}"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def table_text(rows: Sequence[Row]) -> str:
    return columns([HEAD, *map(cells, rows)])


def verdict(rows: Sequence[Row], target: float) -> str:
    slow = [f"{row.case} ({row.threed.ratio:.3f})" for row in rows if row.threed.ratio > target]
    behind = [f"{row.case} ({row.threed.step_s / row.torch.step_s:.3f})" for row in rows
              if row.torch and row.threed.step_s >= row.torch.step_s]
    compared = sum(row.torch is not None for row in rows)
    goals = ((f"threed within {target} of its simulation", len(rows), slow),
             ("threed below torch", compared, behind))
    return "\n".join(f"{what}: {total - len(missed)} of {total}"
                     + (f"; missed: {', '.join(missed)}" if missed else "") for what, total, missed in goals)


def to_json(rows: Sequence[Row], args: argparse.Namespace) -> dict[str, Any]:
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "markdown")}
    return {"machine": machine(), "settings": settings,
            "rows": [{**row.case._asdict(), "transfer_s": row.transfer_s, "ideal_s": row.ideal_s,
                      "others": row.others,
                      "threed": row.threed._asdict(), "torch": row.torch._asdict() if row.torch else None}
                     for row in rows]}


def markdown_head(rows: Sequence[Row], argv: Sequence[str]) -> str:
    message_ms = 1e3 * median(row.transfer_s for row in rows)
    return (f"# The executor alone\n\n`python -m bench.peers.pipeline {' '.join(argv)}`, "
            f"{time.strftime('%Y-%m-%d')}. {machine()}; "
            f"a message took {message_ms:.2f} ms.\nWhat the columns are is in "
            f"[../README.md](../README.md).\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", metavar="NAME", choices=SCHEDULES, default=list(PEERS),
                        help=f"of {', '.join(SCHEDULES)}; those torch lacks are run without it (default: "
                             f"{' '.join(PEERS)})")
    parser.add_argument("--p", type=int, nargs="+", default=[4, 8],
                        help="pipeline positions, a process each (default: 4 8)")
    parser.add_argument("--m", type=int, nargs="+", help="micro-batches (default: 2p and 4p)")
    parser.add_argument("--times", type=float, nargs=3, metavar=("F", "B", "W"), default=[20.0, 20.0, 20.0],
                        help="ms of a position's forward, input and weight halves of backward "
                             "(default: 20 20 20)")
    parser.add_argument("--virtual-stages", type=int, default=2, metavar="V",
                        help="stages a position of interleaved and breadth-first (default: 2)")
    parser.add_argument("--units", type=int, default=1, help="compute units a stage in threed (default: 1)")
    parser.add_argument("--repeat", type=int, default=4,
                        help="steps counted, after one that is not (default: 4)")
    parser.add_argument("--target", type=float, default=1.03,
                        help="most that step / simulated may be (default: 1.03)")
    parser.add_argument("--quick", action="store_true", help="p=4, m=8, one step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the table here too, and how it was made")
    args = parser.parse_args(argv)
    if args.quick:
        args.p, args.m, args.repeat = [4], [8], 1
    if min([*args.p, *(args.m or [1]), args.units,
            args.repeat]) < 1 or min(args.p) < 2 or min(args.times) < 0:
        parser.error("--p must be at least 2, --m, --units and --repeat at least 1, and no time negative")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    times = Times(*(ms / 1e3 for ms in args.times))
    begin, rows = time.monotonic(), []
    print(f"{machine()}; forward, input, weight: {' '.join(f'{ms:g}' for ms in args.times)} ms",
          file=sys.stderr)
    for p in args.p:
        cases = [Case(name, p, m, SCHEDULES[name].virtual or args.virtual_stages, args.units)
                 for name in args.schedule for m in args.m or (2 * p, 4 * p)]
        for row in run(cases, times, args.repeat):
            rows.append(row)
            theirs = f", torch {_ms(row.torch.step_s)} ({row.torch.ratio:.3f})" if row.torch else ""
            print(f"{time.monotonic() - begin:4.0f} s  {row.case}: {_ms(row.threed.step_s)} ms, "
                  f"{row.threed.ratio:.3f} of its "
                  f"simulation{theirs}; a message {1e3 * row.transfer_s:.2f} ms, others {row.others:.0%}",
                  file=sys.stderr, flush=True)
    text = f"{table_text(rows)}\n\n{verdict(rows, args.target)}\n"
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(f"{markdown_head(rows, argv or sys.argv[1:])}\n{text}")
    if args.json:
        args.json.write_text(json.dumps(to_json(rows, args), indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
