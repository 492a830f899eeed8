"""Executors that train the same model take turns, step by step, in the same processes, in an order that is
drawn anew every round, so that what else the machine does hits all of them.

First all train the same few steps: where losses differ, nothing is compared. Over gloo on CPUs, a thread a
process; over NCCL where there are as many GPUs as ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from bench.common import (
    TIMEOUT_S,
    Sizes,
    answer,
    batches,
    columns,
    machine,
    on_ranks,
    processors,
    put_section,
    start_together,
)
from bench.peers.zero_peers import DEEPSPEED, DEEPSPEED_VERSION, Step
from threed.base.quantity import show_bytes, show_count
from threed.comm.process import ProcessComm, file_store
from threed.models.model import layers, own_parameters
from threed.planner import make_mesh
from threed.schema import Config

TOLERANCE = 1e-5  # relative, of losses


class Target(NamedTuple):
    """An executor is to take at most `limit` times as long as the fastest of its peers; or as much processor
    time as the one of them that takes least."""

    name: str
    peers: tuple[str, ...]
    limit: float
    processor: bool = False


class Case(NamedTuple):
    """What one set of processes runs."""

    title: str
    config: Config  # of the mesh and the data
    make: Callable[[Config, ProcessComm], Mapping[str, Step]]  # the executors of a rank by name
    base: str  # the executor by which the others are measured
    targets: Sequence[Target]


# ---------------------------------------------------------------- on every rank


class Ran(NamedTuple):
    """A step of one rank: its begin and end by the clock that all processes of a machine share, its processor
    time (of all its threads), and the bytes that it sent."""

    begin: float
    end: float
    cpu_s: float
    sent: float


class Round(NamedTuple):
    """A step of every executor, on one rank."""

    ran: dict[str, Ran]
    cpu_s: float  # processor time of this rank since its start


def serve(rank: int, store: str, case: Case, args: argparse.Namespace, pipe: Any) -> None:
    """Body of a process: sends the losses it checked, then each round, or the traceback of a failure."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of the names that torch's own collectives go by
    try:
        config, mesh = case.config, make_mesh(case.config)
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= mesh.size
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        comm = ProcessComm(mesh, rank, device, TIMEOUT_S, file_store(store, mesh.size))
        steps = case.make(config, comm)
        pipe.send({name: check(step, name, config, comm, args.check) for name, step in steps.items()})
        order = random.Random(0)
        for number in range(args.check, args.check + args.warmup + args.repeat):
            names = order.sample(list(steps), len(steps))
            pipe.send(Round({name: timed(steps[name], config, comm, number) for name in names},
                            time.process_time()))
        comm.close()
    except BaseException:
        pipe.send(traceback.format_exc())


def check(step: Step, name: str, config: Config, comm: ProcessComm, count: int) -> list[float]:
    """Losses of the first steps, over all ranks."""
    losses = torch.tensor([step(batches(config, number, comm.here.replica, comm.device))
                           for number in range(count)], dtype=torch.float64)
    if not name.startswith("threed"):
        losses /= config.data_ranks
        comm.groups["world"].all_reduce(losses).wait()
    return losses.tolist()


def timed(step: Step, config: Config, comm: ProcessComm, number: int) -> Ran:
    data = batches(config, number, comm.here.replica, comm.device)
    start_together(comm)
    sent, used, begin = comm.sent.total(), time.process_time(), time.monotonic()
    step(data)
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    return Ran(begin, time.monotonic(), time.process_time() - used, comm.sent.total() - sent)


# ---------------------------------------------------------------- the bench


class Row(NamedTuple):
    """One executor: medians over the rounds. Ratios are within a round."""

    name: str
    step_s: float
    ratio: float  # to the base
    cpu_ratio: float  # of processor time
    sent: float  # bytes a rank a step; 0 for peers, which are not counted
    steps_s: list[float]
    cpu_s: list[float]


class Result(NamedTuple):
    case: Case
    rows: list[Row]
    others: float  # share of the machine's processors that was busy with other work

    def compare(self, name: str, peers: Sequence[str], processor: bool) -> tuple[str, float, float] | None:
        """The fastest of the peers (`processor`: the one with the least processor time), and the medians of
        the rounds' ratios to it, of time and of processor time; None if the executor or all peers are
        missing."""
        by_name = {row.name: row for row in self.rows}
        there = [by_name[peer] for peer in peers if peer in by_name]
        if name not in by_name or not there:
            return None
        ours = by_name[name]
        theirs = min(there, key=lambda row: median(row.cpu_s) if processor else row.step_s)
        return (theirs.name, median(a / b for a, b in zip(ours.steps_s, theirs.steps_s)),
                median(a / b for a, b in zip(ours.cpu_s, theirs.cpu_s)))


def run(case: Case, args: argparse.Namespace, begin: float) -> Result:
    """`begin`: of the bench, by the monotonic clock."""
    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {case.title}: {text}", file=sys.stderr, flush=True)

    method = "spawn" if torch.cuda.is_available() else "fork"
    with on_ranks(make_mesh(case.config).size, serve, case, args, method=method) as pipes:
        return measure(case, pipes, args, say)


def measure(case: Case, pipes: Sequence[Any], args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    losses, *_ = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
    agree(losses, case.base, say)
    rounds: list[dict[str, Ran]] = []  # from the first rank's begin to the last one's end
    cpu_s, busy = [], []  # of the ranks and of the machine, after each round
    for number in range(1, args.warmup + args.repeat + 1):
        of_ranks: list[Round] = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        cpu_s.append(sum(each.cpu_s for each in of_ranks))
        busy.append(processors())
        rounds.append({name: join([each.ran[name] for each in of_ranks]) for name in losses})
        seconds = {name: ran.end - ran.begin for name, ran in rounds[-1].items()}
        say(f"round {number} of {args.warmup + args.repeat}, {case.base} {1e3 * seconds[case.base]:.0f} ms; "
            f"times that: " + ", ".join(f"{name} {took / seconds[case.base]:.2f}"
                                        for name, took in seconds.items() if name != case.base))
    others = max(0.0, busy[-1][0] - busy[0][0] - cpu_s[-1] + cpu_s[0]) / max(busy[-1][1] - busy[0][1], 1e-9)
    return sum_up(case, rounds[args.warmup:], others)


def join(ranks: Sequence[Ran]) -> Ran:
    """From the first rank's begin to the last one's end; the processor time of all; the bytes of one, on
    average."""
    return Ran(min(ran.begin for ran in ranks), max(ran.end for ran in ranks),
               sum(ran.cpu_s for ran in ranks), mean(ran.sent for ran in ranks))


def agree(losses: dict[str, list[float]], name: str, say: Callable[[str], None]) -> None:
    """All losses agree with those of the executor `name`; otherwise nothing is compared."""
    base = losses[name]
    far = {name: max(abs(a - b) / abs(b) for a, b in zip(each, base)) for name, each in losses.items()}
    say(f"losses {', '.join(f'{loss:.6f}' for loss in base)}; furthest from {name}: "
        f"{max(far, key=far.__getitem__)}, by {max(far.values()):.1e}")
    if wrong := {name: losses[name] for name, distance in far.items() if not distance <= TOLERANCE}:
        raise SystemExit(f"these do not train the model that {name} trains (losses {base}), so nothing is "
                         f"compared: {wrong}")


def sum_up(case: Case, rounds: Sequence[dict[str, Ran]], others: float) -> Result:
    rows = []
    for name in rounds[0]:
        ours, base = [each[name] for each in rounds], [each[case.base] for each in rounds]
        took = [ran.end - ran.begin for ran in ours]
        ratio = median(a / (b.end - b.begin) for a, b in zip(took, base))
        cpu_ratio = median(a.cpu_s / b.cpu_s for a, b in zip(ours, base))
        rows.append(Row(name, median(took), ratio, cpu_ratio, ours[0].sent, took,
                        [ran.cpu_s for ran in ours]))
    return Result(case, rows, others)


# ---------------------------------------------------------------- words


def table_text(result: Result) -> str:
    base = result.case.base
    lines = [("executor", "ms", f"of {base}", f"cpu of {base}", "bytes sent"),
             *((row.name, f"{1e3 * row.step_s:.0f}", f"{row.ratio:.3f}", f"{row.cpu_ratio:.3f}",
                show_bytes(row.sent) if row.sent else "-") for row in result.rows)]
    return columns(lines)


def verdicts(result: Result) -> str:
    lines = []
    for name, peers, limit, processor in result.case.targets:
        if compared := result.compare(name, peers, processor):
            peer, ratio, cpu_ratio = compared
            took, rest = ((f"{cpu_ratio:.3f} of its processor time", f"time {ratio:.3f}") if processor
                          else (f"{ratio:.3f}", f"processor time {cpu_ratio:.3f}"))
            met = (cpu_ratio if processor else ratio) <= limit
            lines.append(f"{'met   ' if met else 'missed'}  {name} at most {limit:g} x {peer}: {took} "
                         f"({rest})")
    return "\n".join(lines)


def report(result: Result) -> str:
    head = f"{result.case.title}; others {result.others:.0%}"
    return f"{head}\n\n{table_text(result)}\n\n```\n{verdicts(result)}\n```\n"


def about(args: argparse.Namespace, config: Config) -> str:
    size = sizes(args)
    parameters = sum(p.numel for layer in layers(config.model) for p in own_parameters(layer))
    lacks = "" if DEEPSPEED else f"; DeepSpeed {DEEPSPEED_VERSION} could not be imported"
    has = f", DeepSpeed {DEEPSPEED_VERSION}" if DEEPSPEED else ""
    return (f"{machine()}{has}; {show_count(parameters)} parameters, {size.num_microbatches} micro-batch"
            f"{'es' if size.num_microbatches > 1 else ''} of {size.micro_batch} x {size.seq_len} tokens a "
            f"rank{lacks}")


def sizes(args: argparse.Namespace) -> Sizes:
    return Sizes(args.layers, args.hidden, args.heads, args.vocab, args.seq_len, args.micro_batch,
                 args.micro_batches)


def chosen(makers: Mapping[str, Callable[..., Step]], only: Sequence[str], base: str) -> list[str]:
    """The names that begin as one of `only`, and the base."""
    return [name for name in makers if name == base or name.startswith(tuple(only))]


def parser_of(description: str, base: str, **defaults: int) -> argparse.ArgumentParser:
    """The options that benches of executors share. `defaults` replace values of the numbers."""
    parser = argparse.ArgumentParser(description=description.split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""],
                        help=f"executors whose names begin so, and {base} (default: all)")
    for name, value, text in (("layers", 8, "blocks"), ("hidden", 384, "width"),
                              ("heads", 6, "attention heads"),
                              ("vocab", 2048, "tokens of the vocabulary"),
                              ("seq-len", 128, "tokens of a sequence"),
                              ("micro-batch", 2, "sequences of a micro-batch"),
                              ("micro-batches", 1, "a rank and step"),
                              ("check", 4, "steps whose losses are compared"),
                              ("warmup", 1, "rounds not counted"),
                              ("repeat", 15, "rounds counted")):
        value = defaults.get(name.replace("-", "_"), value)
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N",
                            help=f"{text} (default: {value})")
    parser.add_argument("--quick", action="store_true", help="two steps checked, four rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the tables here too, and how they were made")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.quick:
        args.check, args.repeat = 2, 4
    if min(args.check, args.repeat, args.micro_batches) < 1 or args.warmup < 0:
        parser.error("--check, --repeat and --micro-batches must be at least 1, --warmup not negative")
    return args


def compare(title: str, cases: Sequence[Case], args: argparse.Namespace, argv: Sequence[str],
            section: str = "") -> None:
    """Run the cases, print their tables, and write the files that were asked for: the file of Markdown whole,
    or a `section` of it."""
    begin, text, results = time.monotonic(), about(args, cases[0].config), []
    print(text, file=sys.stderr, flush=True)
    for case in cases:
        results.append(run(case, args, begin))
        print(report(results[-1]), flush=True)
    if args.markdown:
        written = (f"`python -m bench.peers.{Path(sys.argv[0]).stem} {' '.join(argv)}`, "
                   f"{time.strftime('%Y-%m-%d')}. {text}.\nWhat the columns are is in "
                   f"[../README.md](../README.md).\n\n") + "\n".join(map(report, results))
        if section:
            put_section(args.markdown, section, written)
        else:
            args.markdown.write_text(f"# {title}\n\n{written}")
    if args.json:
        args.json.write_text(json.dumps({"about": text, "results": [
            {"case": result.case.title, "others": result.others,
             "rows": [row._asdict() for row in result.rows]} for result in results]}, indent=1) + "\n")
