"""Measure offload: the optimizer's step on the host, files of the disk tier, and a whole offloaded training
step.

    adam   AdamW over fp32 weights and moments: threed's host step beside torch.optim.AdamW and
           DeepSpeedCPUAdam
    disk   files as large as a unit's state, through the lanes `write` and `read`, beside fio and dd past the
           page cache
    step   ZeRO-2 with the optimizer's state on the host, in bf16, on 2 ranks, beside DeepSpeed

In each all sides take turns, in an order that is drawn anew every round, on the same memory, files or data.

With --sleep all work sleeps, and what is measured is how computation hides the host's step and the copies:
see bench/peers/sleeping_offload.py.

    python -m bench.peers.offload --help
    python -m bench.peers.offload --sleep --help
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import AdamW

from bench.common import machine, processors, put_section
from bench.peers import sleeping_offload
from bench.peers.offload_disk import measure_disk
from bench.peers.offload_step import measure_step
from bench.peers.zero_peers import DEEPSPEED, DEEPSPEED_VERSION
from threed.base.quantity import show_count
from threed.comm.lanes import ThreadLane
from threed.optim import native
from threed.optim.base import Update, View
from threed.optim.step import step as threed_step
from threed.schema import OptimizerConfig

UNIT = 10_000_000  # parameters that are stepped at a time
LARGE, FEW_ROUNDS = 100_000_000, 8  # sizes above that get so many rounds: a pass takes long enough
NOISE = 1.02  # what is as fast to 2% is as fast


class Took(NamedTuple):
    seconds: float
    cpu_s: float  # processor time of all threads


class Section(NamedTuple):
    """A part of the results: lines of text, with the targets among them."""

    title: str
    lines: list[str]


# ---------------------------------------------------------------- AdamW


class Work(NamedTuple):
    """What every side does, in one pass or in passes of their own."""

    narrow: bool  # gradients are in bf16
    scale: float  # gradients are multiplied by this: clipping
    copy: bool  # a bf16 copy of the weights is wanted

    def __str__(self) -> str:
        dtype, scaled = "bf16" if self.narrow else "fp32", ", scaled" if self.scale != 1.0 else ""
        return f"{dtype} gradients{scaled}" + (", bf16 copy of the weights" if self.copy else "")


WORKS = (Work(False, 1.0, False), Work(False, 1.0, True), Work(True, 0.5, True))


class Memory:
    """Weights, gradients and moments of units, which all sides update in turn."""

    def __init__(self, numel: int):
        def units(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            return torch.zeros(numel, dtype=dtype).split(UNIT)

        self.weights, self.grads, self.narrow = (
            units(torch.float32),
            units(torch.float32),
            units(torch.bfloat16),
        )
        self.copies, self.exp_avg, self.exp_avg_sq = (
            units(torch.bfloat16),
            units(torch.float32),
            units(torch.float32),
        )
        values = torch.randn(min(UNIT, numel)) * 1e-2
        for unit, weight in enumerate(self.weights):
            weight.copy_(values[:len(weight)])
            self.grads[unit].copy_(weight)
            self.narrow[unit].copy_(weight)
            self.exp_avg[unit].copy_(weight)
            self.exp_avg_sq[unit].fill_(1e-4)


Side = Callable[[Work], None]


def threed_side(memory: Memory, options: OptimizerConfig) -> Side:
    """As the engine does it: on the host's lane, unit by unit, everything in one pass."""
    lane = ThreadLane("host", torch.device("cpu"))

    def side(work: Work) -> None:
        update = Update(options, options.lr, 10, True, work.scale)

        def job() -> None:
            for unit, weight in enumerate(memory.weights):
                grad = memory.narrow[unit] if work.narrow else memory.grads[unit]
                view = View(weight, grad, {"exp_avg": memory.exp_avg[unit],
                                           "exp_avg_sq": memory.exp_avg_sq[unit]})
                threed_step(update, view, memory.copies[unit] if work.copy else None)

        lane.submit(job).wait()

    return side


def peer_side(memory: Memory, options: OptimizerConfig, make: Callable[..., Any]) -> Side:
    """A torch-like optimizer over the same memory; the work that it does not do comes before and after, unit
    by unit."""
    parameters = [torch.nn.Parameter(weight) for weight in memory.weights]
    beta1, beta2 = options.betas
    optimizer = make(parameters, lr=options.lr, betas=(beta1, beta2), eps=options.eps,
                     weight_decay=options.weight_decay)
    for unit, parameter in enumerate(parameters):
        count = 10 if "DeepSpeed" in type(optimizer).__name__ else torch.tensor(10.0)
        optimizer.state[parameter] = {"step": count, "exp_avg": memory.exp_avg[unit],
                                      "exp_avg_sq": memory.exp_avg_sq[unit]}
        parameter.grad = memory.grads[unit]

    @torch.no_grad()
    def side(work: Work) -> None:
        for unit, grad in enumerate(memory.grads):
            if work.narrow:
                grad.copy_(memory.narrow[unit])
            if work.scale != 1.0:
                grad.mul_(work.scale)
        optimizer.step()
        if work.copy:
            for copy, parameter in zip(memory.copies, parameters, strict=True):
                copy.copy_(parameter)

    return side


def sides(memory: Memory, options: OptimizerConfig) -> dict[str, Side]:
    def adamw(**how: bool) -> Side:
        return peer_side(memory, options, lambda parameters, **rest: AdamW(parameters, **rest, **how))

    steps = {"threed": threed_side(memory, options), "torch, fused": adamw(fused=True),
             "torch, foreach": adamw(foreach=True),
             "torch, for-loop": adamw(foreach=False)}
    if DEEPSPEED is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]
        steps["DeepSpeedCPUAdam"] = peer_side(memory, options, DeepSpeedCPUAdam)
    return steps


def adam_body(numel: int, rounds: int, pipe: Any) -> None:
    """In a process of its own, whose number of threads the environment says: sends {work: {side: best}}."""
    try:
        memory, results = Memory(numel), {}
        everybody = sides(memory, OptimizerConfig())
        for work in WORKS:
            names = [name for name in everybody if work == WORKS[0]
                     or name not in ("torch, foreach", "torch, for-loop")]
            results[work] = best_of(rounds, {name: partial(everybody[name], work) for name in names})
        pipe.send(results)
    except BaseException:
        pipe.send(traceback.format_exc())


def best_of(rounds: int, jobs: dict[str, Callable[[], None]]) -> dict[str, Took]:
    """The least of each, after one turn that does not count."""
    order, took = random.Random(0), {name: [] for name in jobs}
    for number in range(rounds + 1):
        names = list(jobs)
        order.shuffle(names)
        for name in names:
            used, begin = time.process_time(), time.monotonic()
            jobs[name]()
            if number:
                took[name].append(Took(time.monotonic() - begin, time.process_time() - used))
    return {name: Took(min(t.seconds for t in each), min(t.cpu_s for t in each))
            for name, each in took.items()}


def measure_adam(args: argparse.Namespace, say: Callable[[str], None]) -> Section:
    lines = []
    for numel in args.parameters:
        for threads in sorted({1, os.cpu_count() or 1}):
            rounds = min(args.rounds, FEW_ROUNDS) if numel > LARGE else args.rounds
            say(f"AdamW, {show_count(numel)} parameters, {threads} thread{'s' * (threads > 1)}")
            for work, results in in_process(threads, numel, rounds).items():
                lines += [f"{show_count(numel)} parameters, {threads} thread{'s' * (threads > 1)}, {work}",
                          "", "| side | ms | of threed | cpu of threed |", "|---|---:|---:|---:|"]
                ours = results["threed"]
                lines += [f"| {name} | {1e3 * took.seconds:.1f} | {took.seconds / ours.seconds:.3f} | "
                          f"{took.cpu_s / ours.cpu_s:.3f} |" for name, took in results.items()]
                peers = [name for name in results if name != "threed"]
                peer = min(peers, key=lambda name: results[name].seconds)
                ratio, cpu = ours.seconds / results[peer].seconds, ours.cpu_s / results[peer].cpu_s
                lines += ["", verdict(ratio <= NOISE,
                                      f"threed at most {NOISE:g} x the best, {peer}: {ratio:.3f} (processor "
                                      f"time {cpu:.3f})"), ""]
    if DEEPSPEED is None:
        lines.append(f"DeepSpeed is not there: {DEEPSPEED_VERSION}")
    if native.ADAMW is None:
        lines.append(f"threed's kernel is torch's: {native.MISSING}")
    return Section("AdamW on the host", lines)


def in_process(threads: int, numel: int, rounds: int) -> dict[Work, dict[str, Took]]:
    context: Any = multiprocessing.get_context("spawn")  # OpenMP reads its environment once
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    ours, theirs = context.Pipe()
    process = context.Process(target=adam_body, args=(numel, rounds, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        message = ours.recv()
    except EOFError:
        message = f"it ended without a word; {show_count(numel)} parameters take {26 * numel / 2**30:.0f} GiB"
    finally:
        process.kill()
        process.join()
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    if isinstance(message, str):
        raise SystemExit(f"AdamW failed:\n{message}")
    return message


# ---------------------------------------------------------------- the bench


def verdict(met: bool, text: str) -> str:
    return f"`{'met   ' if met else 'missed'}`  {text}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("adam", "disk", "step"),
                        default=["adam", "disk", "step"])
    parser.add_argument("--parameters", type=float, nargs="+", default=[50e6, 500e6], metavar="N",
                        help="adam: sizes (default: 50e6 500e6, which takes 15 GiB)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(),
                        help="disk: where files are made (default: here)")
    parser.add_argument("--mib", type=int, default=96,
                        help="disk: of a file (default: 96, the state of 8M parameters)")
    parser.add_argument("--files", type=int, default=8, help="disk: files of a round (default: 8)")
    parser.add_argument("--layers", type=int, default=8, help="step: blocks (default: 8)")
    parser.add_argument("--hidden", type=int, default=512, help="step: width (default: 512)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every side that count (default: 7)")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write each section to this file, too, in place of an older one")
    args = parser.parse_args(argv)
    if args.quick:
        args.parameters, args.mib, args.files, args.layers, args.hidden, args.rounds = [5e6], 16, 2, 2, 256, 2
    args.parameters = [int(numel) for numel in args.parameters]
    if min(*args.parameters, args.mib, args.files, args.layers,
           args.rounds) < 1 or args.hidden % 64 or args.hidden < 64:
        parser.error("sizes, --files, --layers and --rounds must be at least 1, --hidden a multiple of 64")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if "--sleep" in argv:
        return sleeping_offload.main([each for each in argv if each != "--sleep"])
    args, begin = parse(argv), time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {text}", file=sys.stderr, flush=True)

    measures = {"adam": measure_adam, "disk": lambda args, say: Section(*measure_disk(args, say)),
                "step": lambda args, say: Section(*measure_step(args, say))}
    about = f"{machine()}" + (f", DeepSpeed {DEEPSPEED_VERSION}" if DEEPSPEED is not None else "")
    made = f"`python -m bench.peers.offload {' '.join(argv)}`, {time.strftime('%Y-%m-%d')}. {about}."
    for name in args.only:
        before, load = processors(), os.getloadavg()[0]
        section = measures[name](args, say)
        gc.collect()
        after = processors()
        busy = (after[0] - before[0]) / max(after[1] - before[1], 1e-9)
        text = (f"{made}\nThe machine's processors were {busy:.0%} busy, this bench included; load average "
                f"{load:.1f} at the start.\n\n" + "\n".join(section.lines).rstrip() + "\n")
        print(f"## {section.title}\n\n{text}")
        if args.markdown:
            put_section(args.markdown, section.title, text)


if __name__ == "__main__":
    main()
