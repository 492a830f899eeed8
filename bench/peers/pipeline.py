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
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from bench.common import machine, processors, start_together
from bench.peers.sleepers import PEERS, SHAPE, Case, Ran, Threed, Times, Torch, make_case, nap
from threed.comm.process import ProcessComm, file_store
from threed.planner import make_mesh
from threed.prediction.schedule_only import bare_programs
from threed.program.instruction import COMPUTE, Instruction, Op, Slot
from threed.program.link import Program, link
from threed.program.plan import Plan
from threed.program.seam import seam_of
from threed.program.table import Table
from threed.program.walk import Mode, walk
from threed.schedules.orders import SCHEDULES, Order

TIMEOUT_S = 120.0
PINGS = 60
PAUSE_S = 0.005


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
    ours = Threed(case, times, comm, opened)
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


def ping_pong(comm: ProcessComm) -> list[float]:
    """Seconds of a message between ranks 0 and 1, one way, as half a round trip. As in a pipeline, the
    receiver waits already, and the sender has slept: the pauses are taken off."""
    start_together(comm)
    forth, back = (0, 1, "act"), (1, 0, "grad")
    value, seconds = torch.zeros(SHAPE), []
    for _ in range(PINGS if comm.rank < 2 else 0):
        mine, other = (forth, back) if comm.rank == 0 else (back, forth)
        if comm.rank == 1:
            comm.channels[other].recv(value).wait()
        before = time.monotonic()
        time.sleep(PAUSE_S)
        slept = torch.full(SHAPE, time.monotonic() - before)
        begin = time.monotonic()
        sent = comm.channels[mine].send(slept)
        if comm.rank == 0:
            comm.channels[other].recv(value).wait()
            seconds.append((time.monotonic() - begin - value.flatten()[0].item()) / 2)
        sent.wait()
    return seconds[PINGS // 6:]


# ---------------------------------------------------------------- the simulation


Seconds = dict[tuple[int, Instruction], float]  # (position, instruction) -> as measured


def simulate(programs: Sequence[Program], table: Table, seam: Callable[[int], set[Slot]], seconds: Seconds,
             transfer_s: float) -> float:
    """Step time of programs whose instructions take these times. Sends take `transfer_s`; the rest of
    communication nothing."""
    links = [link(program, table, position, seam(position)) for position, program in enumerate(programs)]
    taken = [[transfer_s if item.op == Op.SEND else seconds.get((position, item), 0.0) for item in program]
             for position, program in enumerate(programs)]
    return walk(programs, links, Mode.BUFFERED, taken).total_s


def averaged(seconds: Seconds) -> Seconds:
    """Each time replaced by the mean of its position, op and unit."""
    groups: dict[tuple[int, Op, int], list[float]] = {}
    for (position, item), took in seconds.items():
        groups.setdefault((position, item.op, item.unit), []).append(took)
    return {(position, item): mean(groups[position, item.op, item.unit]) for position, item in seconds}


def simulate_threed(plan: Plan, ranks: Sequence[Ran], transfer_s: float) -> tuple[float, float]:
    """A step of threed from each instruction's own time, and from means by op."""
    programs = plan.programs["train"]
    seconds = {(position, item): took for position, ran in enumerate(ranks)
               for item, took in zip(programs[position], ran.seconds, strict=True) if item.op in COMPUTE
               or item.op == Op.STEP}
    own, means = (simulate(programs, plan.table, partial(seam_of, plan.table), each, transfer_s)
                  for each in (seconds, averaged(seconds)))
    return own, means


def simulate_torch(case: Case, ranks: Sequence[Ran], transfer_s: float) -> tuple[float, float]:
    """The same of a step of torch: the order that it was seen to execute, with threed's messages."""
    order: Order = [ran.tasks for ran in ranks]
    programs, table = bare_programs(order, SCHEDULES[case.schedule].place(case.p, case.v), case.m)
    seconds = {(position, item): took for position, ran in enumerate(ranks)
               for item, took in zip([item for item in programs[position] if item.op in COMPUTE], ran.seconds,
                                     strict=True)}
    own, means = (simulate(programs, table, lambda _: set(), each, transfer_s)
                  for each in (seconds, averaged(seconds)))
    return own, means


# ---------------------------------------------------------------- the bench


class Side(NamedTuple):
    """One executor in one case: medians over the steps. A ratio is of a step to its own simulation."""

    step_s: float
    simulated_s: float
    ratio: float
    best_ratio: float
    ratio_to_means: float  # to the simulation from mean times by position, op and unit
    steps_s: list[float]


class Row(NamedTuple):
    case: Case
    transfer_s: float
    ideal_s: float
    threed: Side
    torch: Side | None
    others: float  # share of the machine's processors that was busy with other work


def side(steps: Sequence[Sequence[Ran]], simulated: Callable[[Sequence[Ran]], tuple[float, float]]) -> Side:
    """`steps[step][rank]`. A step begins with the first rank and ends with the last."""
    took = [max(ran.end for ran in ranks) - min(ran.begin for ran in ranks) for ranks in steps]
    own, means = zip(*map(simulated, steps))
    ratios = [t / s for t, s in zip(took, own)]
    return Side(median(took), median(own), median(ratios), min(ratios),
                median(t / s for t, s in zip(took, means)), took)


def sum_up(case: Case, times: Times, ranks: Sequence[Results], busy: tuple[float, float]) -> Row:
    """`busy`: processor seconds that the machine used in the meantime, and that it had."""
    transfer_s = median(ranks[0].transfers)
    _, plan = make_case(case)
    share = times.over(case.v * case.units)
    nominal = {Op.FORWARD: share.forward, Op.BACKWARD: share.input + share.weight,
               Op.BACKWARD_INPUT: share.input,
               Op.BACKWARD_WEIGHT: share.weight}
    programs = plan.programs["train"]
    exact = {(position, item): nominal.get(item.op, 0.0)
             for position, program in enumerate(programs) for item in program}
    ours = side(list(zip(*(rank.threed for rank in ranks))),
                lambda each: simulate_threed(plan, each, transfer_s))
    peers = side(list(zip(*(rank.torch for rank in ranks))),
                 lambda each: simulate_torch(case, each, transfer_s)) \
        if ranks[0].torch else None
    return Row(case, transfer_s, simulate(programs, plan.table, partial(seam_of, plan.table), exact, 0.0),
               ours, peers,
               max(0.0, busy[0] - sum(rank.cpu_s for rank in ranks)) / max(busy[1], 1e-9))


def run(cases: Sequence[Case], times: Times, repeat: int) -> Iterator[Row]:
    """The cases of one p, in processes forked once."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        pipes, processes = [], []
        try:
            for rank in range(cases[0].p):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, daemon=True,
                                          args=(rank, str(Path(scratch) / "store"), cases, times, repeat,
                                                theirs))
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            for case in cases:
                before = processors()
                ranks = [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
                busy = [now - then for now, then in zip(processors(), before)]
                yield sum_up(case, times, ranks, (busy[0], busy[1]))
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(rank: int, pipe: Any) -> Results:
    if not pipe.poll(TIMEOUT_S + 60):
        raise SystemExit(f"rank {rank} does not answer")
    try:
        message = pipe.recv()
    except EOFError:
        message = "it ended without a word"
    if not isinstance(message, Results):
        raise SystemExit(f"rank {rank} failed:\n{message}")
    return message


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
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    first, *others = widths
    texts = ["| " + " | ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) + " |"
             for line in lines]
    rule = "|" + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)]) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


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
