"""Measure the steps of ZeRO beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

One GPT in fp32 on n data-parallel ranks: over gloo on CPUs, over NCCL where there are n GPUs. All executors
live in the same processes and take turns, step by step, in an order that is drawn anew every round, so that
what else the machine does hits all of them. First all train the same few steps: where losses differ, nothing
is compared.

    threed n         ZeRO stage n, on the engine, from a checked plan; stage 3 gathers a unit at every use
    threed 3, step   stage 3, gathered once a step (zero.residency=step)
    FSDP2            fully_shard of every layer; reshard: reshard_after_forward=True; keep: False
    DeepSpeed n      ZeRO stage n, where it is installed

    python bench/zero.py --help
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from pipeline import machine, processors, start_together
from zero_peers import DEEPSPEED, DEEPSPEED_VERSION, Sizes, Step, batches, executors, make_config

from threed.comm import ProcessComm, file_store
from threed.models.model import layers
from threed.planner import make_mesh
from threed.quantity import show_bytes, show_count
from threed.schema import Config

TIMEOUT_S = 300.0
BASE = "DDP"
# (threed's executor, the peer that it must not exceed, times how much)
TARGETS = (("threed 0", BASE, 1.05), ("threed 1", BASE, 1.05), ("threed 2", "DeepSpeed 2", 1.0),
           ("threed 3", "FSDP2, reshard", 1.0), ("threed 3, step", "FSDP2, keep", 1.0),
           ("threed 3", "DeepSpeed 3", 1.0))


# ---------------------------------------------------------------- on every rank


class Ran(NamedTuple):
    """A step of one rank: its begin and end by the clock that all processes of a machine share, its processor
    time (of all its threads), and the bytes that it sent."""

    begin: float
    end: float
    cpu_s: float
    sent: int


class Round(NamedTuple):
    """A step of every executor, on one rank."""

    ran: dict[str, Ran]
    cpu_s: float  # processor time of this rank since its start


def serve(rank: int, store: str, config: Config, args: argparse.Namespace, pipe: Any) -> None:
    """Body of a process: sends the losses it checked, then each round, or the traceback of a failure."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of the names that torch's own collectives go by
    try:
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= config.dp
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        comm = ProcessComm(make_mesh(config), rank, device, TIMEOUT_S, file_store(store, config.dp))
        steps = {name: make(config, comm) for name, make in executors().items() if chosen(name, args)}
        pipe.send({name: check(step, name, config, comm, args.check) for name, step in steps.items()})
        order = random.Random(0)
        for number in range(args.check, args.check + args.warmup + args.repeat):
            names = list(steps)
            order.shuffle(names)
            pipe.send(Round({name: timed(steps[name], config, comm, number) for name in names},
                            time.process_time()))
        comm.close()
    except BaseException:
        pipe.send(traceback.format_exc())


def check(step: Step, name: str, config: Config, comm: ProcessComm, count: int) -> list[float]:
    """Losses of the first steps, over all ranks."""
    losses = torch.tensor([step(batches(config, number, comm.rank, comm.device)) for number in range(count)],
                          dtype=torch.float64)
    if not name.startswith("threed"):
        losses /= config.dp
        comm.groups["world"].all_reduce(losses).wait()
    return losses.tolist()


def timed(step: Step, config: Config, comm: ProcessComm, number: int) -> Ran:
    data = batches(config, number, comm.rank, comm.device)
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
    ratio: float  # to DDP
    cpu_ratio: float  # of processor time
    sent: int  # bytes a rank a step; 0 for peers, which are not counted
    steps_s: list[float]
    cpu_s: list[float]


class Result(NamedTuple):
    ranks: int
    rows: list[Row]
    others: float  # share of the machine's processors that was busy with other work

    def compare(self, name: str, peer: str) -> tuple[float, float] | None:
        """The medians of the rounds' ratios, of time and of processor time; None if one of the two is
        missing."""
        by_name = {row.name: row for row in self.rows}
        if name not in by_name or peer not in by_name:
            return None
        ours, theirs = by_name[name], by_name[peer]
        return (median(a / b for a, b in zip(ours.steps_s, theirs.steps_s)),
                median(a / b for a, b in zip(ours.cpu_s, theirs.cpu_s)))


def chosen(name: str, args: argparse.Namespace) -> bool:
    return name == BASE or not args.only or any(name.startswith(only) for only in args.only)


def run(ranks: int, args: argparse.Namespace, begin: float) -> Result:
    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {ranks} ranks: {text}", file=sys.stderr, flush=True)

    config = make_config(sizes(args), ranks)
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        pipes, processes = [], []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, daemon=True,
                                          args=(rank, str(Path(scratch) / "store"), config, args, theirs))
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return measure(ranks, pipes, args, say)
        finally:
            for process in processes:
                process.kill()
                process.join()


def measure(ranks: int, pipes: Sequence[Any], args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    losses, *_ = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
    agree(losses, say)
    rounds: list[dict[str, Ran]] = []  # from the first rank's begin to the last one's end
    cpu_s, busy = [], []  # of the ranks and of the machine, after each round
    for number in range(1, args.warmup + args.repeat + 1):
        of_ranks: list[Round] = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        cpu_s.append(sum(each.cpu_s for each in of_ranks))
        busy.append(processors())
        together = {name: join([each.ran[name] for each in of_ranks]) for name in of_ranks[0].ran}
        rounds.append(together)
        seconds = {name: ran.end - ran.begin for name, ran in together.items()}
        say(f"round {number} of {args.warmup + args.repeat}, DDP {1e3 * seconds[BASE]:.0f} ms; times that: "
            f"" + ", ".join(
            f"{name} {took / seconds[BASE]:.2f}" for name, took in sorted(seconds.items()) if name != BASE))
    others = max(0.0, busy[-1][0] - busy[0][0] - cpu_s[-1] + cpu_s[0]) / max(busy[-1][1] - busy[0][1], 1e-9)
    return sum_up(ranks, rounds[args.warmup:], others)


def join(ranks: Sequence[Ran]) -> Ran:
    """From the first rank's begin to the last one's end; the processor time of all; the bytes of one."""
    return Ran(min(ran.begin for ran in ranks), max(ran.end for ran in ranks),
               sum(ran.cpu_s for ran in ranks), ranks[0].sent)


def agree(losses: dict[str, list[float]], say: Callable[[str], None]) -> None:
    """All losses agree to 1e-5; otherwise nothing is compared."""
    base = losses[BASE]
    far = {name: max(abs(a - b) / abs(b) for a, b in zip(each, base)) for name, each in losses.items()}
    say(f"losses {', '.join(f'{loss:.6f}' for loss in base)}; furthest from DDP: "
        f"{max(far, key=far.__getitem__)}, by "
        f"{max(far.values()):.1e}")
    if wrong := {name: losses[name] for name, distance in far.items() if not distance <= 1e-5}:
        raise SystemExit(f"these do not train the model that DDP trains (losses {base}), so nothing is "
                         f"compared: {wrong}")


def sum_up(ranks: int, rounds: Sequence[dict[str, Ran]], others: float) -> Result:
    rows = []
    for name in sorted(rounds[0], key=list(executors()).index):
        ours, base = [each[name] for each in rounds], [each[BASE] for each in rounds]
        took = [ran.end - ran.begin for ran in ours]
        ratio = median(a / (b.end - b.begin) for a, b in zip(took, base))
        cpu_ratio = median(a.cpu_s / b.cpu_s for a, b in zip(ours, base))
        rows.append(Row(name, median(took), ratio, cpu_ratio, ours[0].sent, took,
                        [ran.cpu_s for ran in ours]))
    return Result(ranks, rows, others)


def answer(rank: int, pipe: Any) -> Any:
    if not pipe.poll(TIMEOUT_S + 60):
        raise SystemExit(f"rank {rank} does not answer")
    try:
        message = pipe.recv()
    except EOFError:
        message = "it ended without a word"
    if isinstance(message, str):
        raise SystemExit(f"rank {rank} failed:\n{message}")
    return message


HEAD = ("executor", "ms", "of DDP", "cpu of DDP", "bytes sent")


def table_text(result: Result) -> str:
    lines = [HEAD, *((row.name, f"{1e3 * row.step_s:.0f}", f"{row.ratio:.3f}", f"{row.cpu_ratio:.3f}",
                      show_bytes(row.sent) if row.sent else "-") for row in result.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    first, *others = widths
    texts = ["| " + " | ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) + " |"
             for line in lines]
    rule = "|" + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)]) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


def verdicts(result: Result) -> str:
    lines = []
    for name, peer, limit in TARGETS:
        if ratios := result.compare(name, peer):
            ratio, cpu_ratio = ratios
            lines.append(f"{'met   ' if ratio <= limit else 'missed'}  {name} at most {limit:g} x {peer}: "
                         f"{ratio:.3f} (processor time {cpu_ratio:.3f})")
    return "\n".join(lines)


def report(result: Result) -> str:
    head = f"{result.ranks} ranks; others {result.others:.0%}"
    return f"{head}\n\n{table_text(result)}\n\n```\n{verdicts(result)}\n```\n"


def about(args: argparse.Namespace) -> str:
    size, config = sizes(args), make_config(sizes(args), 1)
    parameters = sum(p.numel for layer in layers(config.model) for p in layer.own_parameters())
    lacks = "" if DEEPSPEED else f"; DeepSpeed {DEEPSPEED_VERSION} could not be imported"
    has = f", DeepSpeed {DEEPSPEED_VERSION}" if DEEPSPEED else ""
    return (f"{machine()}{has}; {show_count(parameters)} parameters, {size.num_microbatches} micro-batch"
            f"{'es' if size.num_microbatches > 1 else ''} of {size.micro_batch} x {size.seq_len} tokens a "
            f"rank{lacks}")


def markdown_head(args: argparse.Namespace, argv: Sequence[str]) -> str:
    return (f"# ZeRO\n\n`python bench/zero.py {' '.join(argv)}`, {time.strftime('%Y-%m-%d')}. "
            f"{about(args)}.\n"
            f"What the columns are is in [../README.md](../README.md).\n")


def sizes(args: argparse.Namespace) -> Sizes:
    return Sizes(args.layers, args.hidden, args.heads, args.vocab, args.seq_len, args.micro_batch,
                 args.micro_batches)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes (default: 2 4)")
    parser.add_argument("--only", nargs="+", metavar="NAME",
                        help="executors whose names begin so, and DDP (default: all)")
    for name, value, text in (("layers", 8, "blocks"), ("hidden", 384, "width"),
                              ("heads", 6, "attention heads"),
                              ("vocab", 2048, "tokens of the vocabulary"),
                              ("seq-len", 128, "tokens of a sequence"),
                              ("micro-batch", 2, "sequences of a micro-batch"),
                              ("micro-batches", 1, "a rank and step"),
                              ("check", 4, "steps whose losses are compared"),
                              ("warmup", 1, "rounds not counted"),
                              ("repeat", 15, "rounds counted")):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N",
                            help=f"{text} (default: {value})")
    parser.add_argument("--quick", action="store_true", help="two steps checked, four rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the tables here too, and how they were made")
    args = parser.parse_args(argv)
    if args.quick:
        args.check, args.repeat = 2, 4
    if min(args.ranks) < 2 or min(args.check, args.repeat, args.micro_batches) < 1 or args.warmup < 0:
        parser.error("--ranks must be at least 2, --check, --repeat and --micro-batches at least 1, --warmup "
                     "not negative")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    begin = time.monotonic()
    print(about(args), file=sys.stderr, flush=True)
    results = []
    for ranks in args.ranks:
        results.append(run(ranks, args, begin))
        print(report(results[-1]), flush=True)
    if args.markdown:
        args.markdown.write_text(f"{markdown_head(args, argv or sys.argv[1:])}\n"
                                 + "\n".join(map(report, results)))
    if args.json:
        args.json.write_text(json.dumps({"about": about(args), "results": [
            {"ranks": result.ranks, "others": result.others, "rows": [row._asdict() for row in result.rows]}
            for result in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
