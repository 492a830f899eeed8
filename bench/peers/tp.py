"""Measure what backward hides of tensor parallelism's collectives when their link is slow.

Ranks of one tp group run threed's engine over gloo, and a bench's group lengthens each collective: issuing it
returns at once, and waiting for it ends no earlier than it would over a link of some speed, which carries one
collective after the other. A delay of d ms is the link over which an all-reduce of the residual stream takes
d ms; to gather or to reduce-scatter it sends half as much, and takes half of that.

    overlapped   as threed does it
    blocking     the same engine, but every collective is waited for where it is issued

A turn is a step of both and the products alone, with sequence parallelism off or on and one delay; the order
of turns, and of the two steps, is drawn anew every round. What should be hidden is computed from the
products' times (see `hidden_s`).

    python -m bench.peers.tp --help
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from bench.common import (
    TIMEOUT_S,
    Sizes,
    answer,
    batches,
    machine,
    make_config,
    on_ranks,
    processors,
    start_together,
)
from bench.peers.slow_link import Alone, Products, Ran, SlowGroup, Spent, Stepper, is_block
from threed.base.quantity import show_bytes
from threed.comm.process import ProcessComm, ProcessGroup, file_store
from threed.planner import make_mesh, make_plan
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.hardware import Hardware
from threed.program.instruction import Op
from threed.program.traffic import sent_by
from threed.schema import Config
from threed.tensor.context import Batch

PARTS = "backward of the blocks", "the whole step"


class Case(NamedTuple):
    sp: bool  # sequence parallelism
    delay_s: float  # of an all-reduce of the residual stream


# ---------------------------------------------------------------- on every rank


class Turn(NamedTuple):
    """What one rank says of a case in a round."""

    ran: dict[bool, Ran]  # blocking or not -> its step, in the order in which they ran
    products: dict[str, Products]  # by linear, alone
    cpu_s: float  # processor time that the rank used
    busy_s: float  # and all that the machine used
    had_s: float  # of so much


def serve(rank: int, store: str, args: argparse.Namespace, pipe: Any) -> None:
    """Body of a process: sends each turn with its case, or the traceback of a failure."""
    torch.set_num_threads(1)
    try:
        configs = {sp: config_of(args, sp) for sp in (False, True)}
        comm = ProcessComm(make_mesh(configs[False]), rank, torch.device("cpu"), TIMEOUT_S,
                           file_store(store, args.tp))
        group = comm.groups["tp"]
        assert isinstance(group, ProcessGroup)
        comm.groups["tp"] = link = SlowGroup(group, comm)
        steppers = {sp: Stepper(config, comm, link) for sp, config in configs.items()}
        alone, order = Alone(configs[False]), random.Random(0)
        for number in range(1 + args.repeat):
            data, cases = batches(configs[False], number, 0, comm.device), cases_of(args)
            order.shuffle(cases)
            for case in cases:
                link.s_per_byte = case.delay_s / all_reduce_bytes(args)
                both = order.sample((True, False), 2)
                pipe.send((case, take_turn(steppers[case.sp], link, data, both, alone)))
        comm.close()
    except BaseException:
        pipe.send(traceback.format_exc())


def take_turn(stepper: Stepper, link: SlowGroup, data: Sequence[Batch], both: Sequence[bool],
              alone: Alone) -> Turn:
    (busy_s, had_s), cpu_s, ran = processors(), time.process_time(), {}
    for link.blocking in both:
        start_together(stepper.comm)
        ran[link.blocking] = stepper.step(data)
    start_together(stepper.comm)
    products, after = alone.time(), processors()
    return Turn(ran, products, time.process_time() - cpu_s, after[0] - busy_s, after[1] - had_s)


# ---------------------------------------------------------------- the prediction


def hidden_s(products: Products, sp: bool, all_reduce_s: float) -> float:
    """How much of its collectives backward of one column-parallel linear hides, if it runs in the order that
    tests/loopback/test_tensor_order.py asserts:

        off    x's gradient | weight's gradient           on    x's gradient | weight's gradient
                            | all-reduce                        gather x     | reduce-scatter

    Each collective is beside one product, and has ended before the next begins. All others are waited for:
    those of forward, and the gathers in backward of row-parallel linears and of the embedding. This neglects
    that gloo's threads need the processor, too.
    """
    if not sp:
        return min(all_reduce_s, products.weight)
    half_s = all_reduce_s / 2
    return min(half_s, products.input) + min(half_s, products.weight)


def analytic_s(config: Config, part: str, s_per_byte: float) -> float:
    """Seconds of tp collectives in a part of the step, as `threed predict` adds them."""
    plan = make_plan(config)
    gbps = 8e-9 / s_per_byte if s_per_byte else math.inf
    free = Hardware(tflops=math.inf, tflops_fp32=math.inf, memory_gbps=math.inf, kernel_us=0.0, launch_us=0.0)
    cost = analytic_cost(plan, replace(free, node_gbps=gbps, node_efficiency=1.0, node_us=0.0))
    items = [item for item in plan.programs["train"][0] if sent_by(plan.table, item).get("tp")]
    if part == PARTS[0]:
        items = [item for item in items if item.op == Op.BACKWARD
                 and is_block(plan.table.units[item.unit].name)]
    return sum(cost(0, item) for item in items)


# ---------------------------------------------------------------- the bench


class Row(NamedTuple):
    """One part of the step in one case: medians over its turns."""

    part: str
    case: Case
    sent: int  # bytes of a rank over tp
    link_s: float  # all of its collectives, one after the other
    blocking_s: float
    overlapped_s: float
    predicted_s: float
    hidden: float  # share of link_s, measured: blocking less overlapped, within a turn
    hides: float  # share of link_s, predicted
    analytic_s: float  # by `threed predict`, with the computation as measured


class Result(NamedTuple):
    ranks: int
    products: dict[str, Products]
    rows: list[Row]
    others: list[float]  # share of the processors that was busy with other work, in each turn that counts


def config_of(args: argparse.Namespace, sp: bool) -> Config:
    sizes = Sizes(args.layers, args.hidden, args.hidden // 64, args.vocab, args.seq_len, args.micro_batch, 1)
    return make_config(sizes, 1, f"parallel.tp={args.tp}", f"parallel.sequence_parallel={str(sp).lower()}",
                       "optimizer.eps=1e-2")  # an update that does not enlarge what is rounded differently


def cases_of(args: argparse.Namespace) -> list[Case]:
    return [Case(sp, delay_ms / 1e3) for sp in (False, True) for delay_ms in args.delays]


def all_reduce_bytes(args: argparse.Namespace) -> float:
    """Bytes that a rank sends in an all-reduce of the residual stream."""
    return 2 * 4 * args.seq_len * args.micro_batch * args.hidden * (args.tp - 1) / args.tp


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    with on_ranks(args.tp, serve, args) as pipes:
        return measure(pipes, args, say)


def measure(pipes: Sequence[Any], args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    turns: dict[Case, list[list[Turn]]] = {case: [] for case in cases_of(args)}  # by round and rank
    for number in range(1 + args.repeat):
        losses: dict[bool, list[float]] = {False: [], True: []}
        for _ in turns:
            answers = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
            case, turn = answers[0]
            losses[case.sp] += [ran.loss for ran in turn.ran.values()]
            if number > 0:
                turns[case].append([turn for _, turn in answers])
        agree(losses[False], losses[True])
        say(f"round {number} of {args.repeat}" + (
            f", others {median(others(each[-1]) for each in turns.values()):.0%}" if number else ""))
    # On a machine that is not idle, half of the turns: those beside the least other work.
    quiet = {case: sorted(each, key=others)[:(len(each) + 1) // 2] for case, each in turns.items()}
    counted = [turn for each in quiet.values() for turn in each]
    products = {name: Products(*(median(mean(getattr(rank.products[name], field) for rank in turn)
                                        for turn in counted) for field in Products._fields))
                for name in counted[0][0].products}
    rows = [row_of(part, case, quiet, products, args) for part in PARTS for case in quiet]
    return Result(args.tp, products, rows, [others(turn) for turn in counted])


def others(turn: Sequence[Turn]) -> float:
    """Share of the machine's processors that was busy with other work, by all ranks' turns."""
    return max(0.0, turn[0].busy_s - sum(rank.cpu_s for rank in turn)) / max(turn[0].had_s, 1e-9)


def agree(off: Sequence[float], on: Sequence[float]) -> None:
    """Sequence parallelism changes no loss: the first, second, ... steps of the two engines in a round have
    the same."""
    if not all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(off, on, strict=True)):
        raise SystemExit(f"losses without and with sequence parallelism differ, so nothing is compared: {off}"
                         f" and {on}")


def together(part: str, ran: Sequence[Ran]) -> Spent:
    """Backward: the mean over the ranks. The step: from the first rank's begin to the last one's end."""
    if part == PARTS[0]:
        return Spent(mean(each.backward.took_s for each in ran), mean(each.backward.slept_s for each in ran),
                     ran[0].backward.sent)
    took_s = max(each.begin + each.step.took_s for each in ran) - min(each.begin for each in ran)
    return Spent(took_s, mean(each.step.slept_s for each in ran), ran[0].step.sent)


def row_of(part: str, case: Case, turns: Mapping[Case, Sequence[Sequence[Turn]]],
           products: Mapping[str, Products], args: argparse.Namespace) -> Row:
    def steps(case: Case, blocking: bool) -> list[Spent]:
        return [together(part, [rank.ran[blocking] for rank in turn]) for turn in turns[case]]

    # What is no wait for the link where every collective is waited for: gloo's own work is over by then.
    compute_s = median(each.took_s - each.slept_s for other in turns if other.sp == case.sp and other.delay_s
                       for each in steps(other, True))
    blocking, overlapped = steps(case, True), steps(case, False)
    sent, s_per_byte = blocking[0].sent, case.delay_s / all_reduce_bytes(args)
    link_s = sent * s_per_byte
    counts = {"qkv": args.layers, "up": args.layers, "head": int(part != PARTS[0])}
    hides_s = sum(count * hidden_s(products[name], *case) for name, count in counts.items())
    gained = [slow.took_s - fast.took_s for slow, fast in zip(blocking, overlapped)]
    return Row(part, case, sent, link_s, median(each.took_s for each in blocking),
               median(each.took_s for each in overlapped), compute_s + link_s - hides_s,
               median(gained) / link_s if link_s else math.nan, hides_s / link_s if link_s else math.nan,
               compute_s + analytic_s(config_of(args, case.sp), part, s_per_byte))


HEAD = ("sequence parallel", "delay ms", "collectives ms", "blocking ms", "overlapped ms", "predicted ms",
        "ratio", "hidden", "predicted hidden", "threed predict ms", "bytes sent")


def named(case: Case) -> tuple[str, str]:
    return "on" if case.sp else "off", f"{1e3 * case.delay_s:g}"


def cells(row: Row) -> list[str]:
    shares = [f"{share:.0%}" if row.link_s else "-" for share in (row.hidden, row.hides)]
    return [*named(row.case), *(f"{1e3 * seconds:.1f}" for seconds in (
        row.link_s, row.blocking_s, row.overlapped_s, row.predicted_s)),
        f"{row.overlapped_s / row.predicted_s:.3f}", *shares, f"{1e3 * row.analytic_s:.1f}",
        show_bytes(row.sent)]


def table_text(rows: Sequence[Row]) -> str:
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    first, *others = widths
    texts = ["| " + " | ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) + " |"
             for line in lines]
    rule = "|" + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)]) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


def report(result: Result, target: float) -> str:
    products = ", ".join(f"{name} {1e3 * each.input:.1f} + {1e3 * each.weight:.1f}"
                         for name, each in result.products.items())
    lines = [f"{result.ranks} ranks; products of x's and of the weight's gradient, ms: {products}; others "
             f"{median(result.others):.0%}, at most {max(result.others):.0%}"]
    for part in PARTS:
        rows = [row for row in result.rows if row.part == part]
        table = table_text(rows)
        rows = [row for row in rows if row.case.delay_s]
        slow = [" ".join(named(row.case)) for row in rows if row.overlapped_s > target * row.predicted_s]
        lines += [f"{part[0].upper()}{part[1:]}:", table,
                  f"overlapped within {target} of its prediction: {len(rows) - len(slow)} of {len(rows)}"
                  + (f"; missed: {', '.join(slow)}" if slow else "")]
    return "\n\n".join(lines) + "\n"


def about(args: argparse.Namespace) -> str:
    return (f"{machine()}, gloo; {args.layers} blocks of width {args.hidden} in fp32, a micro-batch of "
            f"{args.micro_batch} x {args.seq_len} tokens, {args.repeat} rounds")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, text in (("tp", 2, "ranks, a process each"), ("layers", 2, "blocks"),
                              ("hidden", 1024, "width, a multiple of 64"),
                              ("vocab", 1024, "tokens of the vocabulary"),
                              ("seq-len", 256, "tokens of a sequence"),
                              ("micro-batch", 1, "sequences of a micro-batch"),
                              ("repeat", 20, "rounds, after one that does not count")):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N",
                            help=f"{text} (default: {value})")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 10.0, 20.0, 40.0], metavar="MS",
                        help="of an all-reduce of the residual stream (default: 0 10 20 40); 0: gloo alone")
    parser.add_argument("--target", type=float, default=1.05,
                        help="most that overlapped / predicted may be (default: 1.05)")
    parser.add_argument("--quick", action="store_true", help="one block of width 512, one delay, two rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the tables here too, and how they were made")
    args = parser.parse_args(argv)
    if args.quick:
        args.layers, args.hidden, args.delays, args.repeat = 1, 512, [0.0, 10.0], 2
    if args.tp < 2 or min(args.layers, args.repeat, args.micro_batch) < 1 or args.hidden % 64:
        parser.error("--tp must be at least 2, --layers, --repeat and --micro-batch at least 1, and --hidden "
                     "a multiple of 64")
    if min(args.delays) < 0 or not max(args.delays) > 0:
        parser.error("--delays must not be negative, and one must be above 0: the computation is measured "
                     "where gloo's own work is over before a collective may end")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    begin = time.monotonic()
    print(about(args), file=sys.stderr, flush=True)
    result = run(args, lambda text: print(f"{time.monotonic() - begin:4.0f} s  {text}", file=sys.stderr,
                                          flush=True))
    text = report(result, args.target)
    print(text, end="")
    if args.markdown:
        command = " ".join(["python -m bench.peers.tp", *(argv or sys.argv[1:])])
        args.markdown.write_text(f"# Tensor parallelism\n\n`{command}`, {time.strftime('%Y-%m-%d')}. "
                                 f"{about(args)}.\nWhat the columns are is in [../README.md](../README.md)."
                                 f"\n\n{text}")
    if args.json:
        args.json.write_text(json.dumps({"about": about(args), **result._asdict(), "rows": [
            row._asdict() for row in result.rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
