"""What offload costs on one device: tokens a second of one model with each setting, beside those of nothing
and of the prediction; the memory of the host; and how fast the host steps.

With --largest, instead: a GPT of a fixed width gets as many blocks as the plan of each setting allows in the
device's memory, and trains.

On a GPU the memory is the GPU's. Without one it is a number of bytes (--memory) that plans are held against,
and host and device are the same memory: sizes are true of the plan, times say nothing of a GPU.

What is measured is written at once. A measurement that fails or dies is a row that says why.

    python -m bench.gpu.offload --help
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from bench.common import Sizes, batches, columns, machine, make_config, processors
from bench.gpu import host_step
from bench.gpu.apart import outcomes
from bench.gpu.side import alone
from bench.gpu.watched import LANES, event, hidden, watch_lanes
from threed.base.errors import RunError
from threed.base.quantity import parse_bytes, show_bytes, show_count
from threed.comm.group import Comm
from threed.devices import device_of
from threed.engine.device import set_up
from threed.engine.engine import Engine
from threed.planner import analyse
from threed.prediction.hardware import OF_CPUS, named_as
from threed.prediction.predict import predict
from threed.program.analysis import Analysis
from threed.program.summary import stages
from threed.schema import Config
from threed.tensor.random import draw_in_place


class Setting(NamedTuple):
    more: list[str]
    times: int = 1  # as many micro-batches


RECOMPUTE, OPTIMIZER = ["activation.policy=full"], ["zero.stage=2", "offload.optimizer=cpu"]
PARAMETERS = ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"]
VERTICAL = ["parallel.schedule=vertical"]
# In the order in which they are measured: what tells most comes first.
SETTINGS = {
    "nothing": Setting([]),
    "optimizer": Setting(OPTIMIZER),
    "optimizer, vertical": Setting([*OPTIMIZER, *VERTICAL]),
    "parameters, vertical": Setting([*PARAMETERS, *VERTICAL]),
    "optimizer, 4 x micro-batches": Setting(OPTIMIZER, 4),
    "optimizer, vertical, 4 x micro-batches": Setting([*OPTIMIZER, *VERTICAL], 4),
    "optimizer, overlap=none": Setting([*OPTIMIZER, "offload.overlap=none"]),
    "optimizer, ratio=0.5": Setting([*OPTIMIZER, "offload.ratio=0.5"]),
    "optimizer, bf16 gradients": Setting([*OPTIMIZER, "precision.grad_dtype=bf16",
                                          "precision.reduce_dtype=bf16"]),
    "parameters": Setting(PARAMETERS),
    "optimizer, gradients=host reduce_every=1": Setting([*OPTIMIZER, "offload.gradients=host",
                                                         "zero.reduce_every=1"]),
}
LARGEST = {
    "nothing": Setting([]),
    "recompute": Setting(RECOMPUTE),
    "optimizer": Setting(OPTIMIZER),
    "optimizer, recompute": Setting([*OPTIMIZER, *RECOMPUTE]),
    "parameters": Setting(PARAMETERS),
    "parameters, recompute": Setting([*PARAMETERS, *RECOMPUTE]),
    "parameters, activations": Setting([*PARAMETERS, *RECOMPUTE, "activation.offload=cpu"]),
}
LEAST_S = 15  # a row that would have less does not begin
STEPS_S = 25  # that a GPU's host has for its own steps, after the rows
# One block, of which a setting gets as many as fit.
LARGE, SMALL = Sizes(1, 4096, 32, 50304, 2048, 1, 8, "bf16"), Sizes(1, 128, 4, 512, 64, 2, 4)


class Device(NamedTuple):
    name: str
    memory: int  # bytes that plans may take
    hardware: str  # as `threed predict --hardware`


class Measured(NamedTuple):
    """A setting at a number of blocks. Bytes of `device` and `host` are the plan's."""

    layers: int
    parameters: int
    device: int
    host: int
    peak: int  # of the device; 0 where nothing tells
    resident: int  # bytes that the process has more in memory than before
    taken: int  # bytes by which the machine has less memory that is available
    step_s: float
    tokens_per_s: float
    predicted_per_s: float
    lanes: dict[str, tuple[float, float]]  # lane -> (seconds at work, share of them during which the device
    # computed)


# ---------------------------------------------------------------- one setting


def config_of(size: Sizes, blocks: int, setting: Setting) -> Config:
    sizes = size._replace(layers=blocks, num_microbatches=setting.times * size.num_microbatches)
    return make_config(sizes, 1, "model.position=rotary", "optimizer.clip_grad=1", *setting.more)


def needs(analysis: Analysis) -> tuple[int, int]:
    """(device, host) bytes of the plan."""
    row = stages(analysis)[0]
    return row.fixed_bytes + row.activation_peak_bytes, row.host_bytes


def room_of_host() -> int:
    return int(0.8 * psutil.virtual_memory().available)


def largest(size: Sizes, setting: Setting, device: Device, most: int) -> int:
    """The most blocks, up to `most`, whose plan fits; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        needed = needs(analyse(config_of(size, middle, setting), room=device.memory))
        low, high = (middle, high) if fits(needed, device) else (low, middle)
    return low


def fits(needed: tuple[int, int], device: Device) -> bool:
    return needed[0] <= device.memory and needed[1] <= room_of_host()


def empty(cuda: bool) -> tuple[int, int]:
    """Give back the memory of earlier runs; (resident, available) bytes of the host then."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()
    return psutil.Process().memory_info().rss, psutil.virtual_memory().available


def train(size: Sizes, blocks: int, setting: Setting, device: Device, steps: int) -> Measured | str:
    """Train two steps that do not count, before the first of which no update waits, and `steps` that do; the
    fastest of them. Or why the plan does not fit."""
    config = config_of(size, blocks, setting)
    analysis = analyse(config, room=device.memory)
    needed = needs(analysis)
    if not fits(needed, device):
        return (f"does not fit: {show_bytes(needed[0])} of the device and {show_bytes(needed[1])} of the "
                f"host are planned; there are {show_bytes(device.memory)} and {show_bytes(room_of_host())}")
    predicted = config.tokens_per_step / predict(analysis.plan, device.hardware)["step_time"]
    set_up(config)
    with alone(config) as comm:
        return trained(config, analysis, comm, steps)._replace(predicted_per_s=predicted)


def trained(config: Config, analysis: Analysis, comm: Comm, steps: int) -> Measured:
    cuda = comm.device.type == "cuda"
    resident, available = empty(cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats(comm.device)
    engine = Engine(analysis, comm, draw_in_place)
    lanes, best = watch_lanes(comm), None
    for number in range(steps + 2):
        for lane in lanes.values():
            lane.marks.clear()
        begin, origin = time.monotonic(), event() if cuda else None
        data = batches(config, number, 0, comm.device)
        _, trace = engine.train_step(lambda microbatch, data=data: data[microbatch])
        if number > 1 and (best is None or trace.total_s < best[0]):
            program = engine.plan.programs[trace.name][0]
            best = trace.total_s, {name: hidden(lane, trace, program, begin, origin)
                                   for name, lane in lanes.items()}
    assert best is not None
    now = psutil.Process().memory_info().rss, psutil.virtual_memory().available
    device, host = needs(analysis)
    engine.close()
    numel = sum(unit.numel for unit in analysis.table.parameters.values())
    return Measured(config.model.layers, numel, device, host,
                    device_of(comm.device).peak_bytes() if cuda else 0, max(0, now[0] - resident),
                    max(0, available - now[1]), best[0], config.tokens_per_step / best[0], 0.0, best[1])


# ---------------------------------------------------------------- in a process of its own


def look(memory: str | None, hardware: str) -> Device:
    """The device, and what of it plans may take."""
    if not torch.cuda.is_available():
        assert memory is not None
        return Device("no GPU", parse_bytes(memory), hardware or OF_CPUS)
    name = torch.cuda.get_device_name(0)
    free = int(0.95 * torch.cuda.mem_get_info(0)[0])
    return Device(name, parse_bytes(memory) if memory else free, hardware or named_as(name) or "")


def row_of(args: argparse.Namespace, device: Device, setting: Setting, end: float) -> Measured | str:
    """A setting's row; or why there is none: there would be too little time."""
    if end - time.monotonic() < LEAST_S:
        return f"left out: {max(0.0, end - time.monotonic()):.0f} s are left"
    blocks = largest(args.size, setting, device, args.most) if args.largest else args.blocks
    if not blocks:
        return f"not even one block fits into {show_bytes(device.memory)}"
    while True:
        try:
            return train(args.size, blocks, setting, device, args.steps)
        except (RunError, torch.OutOfMemoryError) as error:
            if not args.largest or "out of memory" not in str(error).lower() or blocks == 1:
                raise
            print(f"  {blocks} blocks are too many", file=sys.stderr)
        blocks = max(1, min(blocks - 1, int(blocks * 0.95)))


# ---------------------------------------------------------------- the bench


class Bench:
    """What is measured so far; written after each measurement."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str]):
        self.args, self.argv, self.begin, self.before = args, argv, time.monotonic(), processors()
        self.end = self.begin + args.seconds
        self.cuda = torch.cuda.is_available()  # (a GPU may be counted before a fork, but not used)
        self.device = Device("unknown", 0, "")
        self.rows: dict[str, Measured | str] = {}
        self.rates: list[host_step.Rate | str] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:4.0f} s  {text}", file=sys.stderr, flush=True)

    def run(self) -> None:
        def left() -> float:
            return max(1.0, self.end - time.monotonic())

        (found,) = outcomes([partial(look, self.args.memory, self.args.hardware)], left)
        if found.failure is not None:
            raise SystemExit(f"the device cannot be looked at: {found.failure}")
        self.device = found.value
        settings = {name: self.args.table[name] for name in self.args.settings}
        end = self.end - (STEPS_S if self.cuda and not self.args.largest else 0)
        calls = [partial(row_of, self.args, self.device, each, end) for each in settings.values()]
        for name, outcome in zip(settings, outcomes(calls, left), strict=True):
            row = outcome.value if outcome.failure is None else outcome.failure
            if outcome.failure is not None and time.monotonic() >= self.end:
                row = f"left out: stopped after {outcome.seconds:.0f} s, when the time was over"
            self.rows[name] = row
            self.write()
            said = row if isinstance(row, str) else (f"{row.layers} blocks, {row.tokens_per_s:.0f} tokens/s, "
                                                     f"{row.predicted_per_s:.0f} predicted")
            self.say(f"{name}: {said} ({outcome.seconds:.0f} s)")
        kinds = [] if self.args.largest else host_step.memories(self.cuda)
        steps = [partial(host_step.rates, kind, self.args.numel, host_step.threads_here(self.args.small), 3,
                         self.cuda) for kind in kinds]
        for kind, outcome in zip(kinds, outcomes(steps, left), strict=True):
            self.rates += outcome.value if outcome.failure is None else [f"{kind}: {outcome.failure}"]
            self.write()
            self.say(f"the host's step, {kind}: {outcome.failure or 'measured'} ({outcome.seconds:.0f} s)")

    def text(self) -> str:
        args, size, after = self.args, self.args.size, processors()
        busy = (after[0] - self.before[0]) / max(after[1] - self.before[1], 1e-9)
        what = "the largest that fits" if args.largest else f"{args.blocks} blocks"
        failed = [f"{name}: {row}" for name, row in self.rows.items() if isinstance(row, str)]
        rates = [rate for rate in self.rates if isinstance(rate, host_step.Rate)]
        failed += [rate for rate in self.rates if isinstance(rate, str)]
        steps = [f"## The host's step: AdamW over {show_count(args.numel)} parameters", "",
                 columns([host_step.HEAD, *map(host_step.cells, rates)]), ""]
        return "\n".join([
            "# Offload on one device", "",
            f"`python -m bench.gpu.offload {' '.join(self.argv)}`, {time.strftime('%Y-%m-%d')}. "
            f"{self.device.name}; {machine()}; processors {busy:.0%} busy, this bench included.",
            f"GPT of width {size.hidden} in {size.dtype}, {what}, {size.num_microbatches} micro-batches of "
            f"{size.micro_batch} x {size.seq_len} tokens, {show_bytes(self.device.memory)} of device memory; "
            f"predictions for `{self.device.hardware or 'a100-sxm'}`.",
            *([] if self.cuda else [
                "Without a GPU memory is a limit that plans are held against, and copies are within the "
                "host: the times say nothing of a GPU."]),
            "What the columns are is in [../README.md](../README.md).", "", table(self.rows), "",
            *(f"* {line}" for line in failed), *([""] if failed else []), *(steps if rates else [])])

    def write(self) -> None:
        if self.args.markdown:
            self.args.markdown.write_text(self.text())


HEAD = ("setting", "blocks", "parameters", "tokens/s", "of nothing", "predicted", "of predicted", "device",
        "measured", "host", "resident", "taken", *(f"{lane}: ms, hidden" for lane in LANES))


def table(rows: dict[str, Measured | str]) -> str:
    base = rows.get("nothing")
    nothing = base.tokens_per_s if isinstance(base, Measured) else 0.0
    lines = list[Sequence[str]]([HEAD])
    for name, row in rows.items():
        if isinstance(row, str):
            lines.append([name, *["-"] * (len(HEAD) - 1)])
            continue
        spent = [f"{1e3 * busy:.0f}, {share:.0%}" if busy else "-" for busy, share in row.lanes.values()]
        lines.append([name, str(row.layers), show_count(row.parameters), f"{row.tokens_per_s:.0f}",
                      f"{row.tokens_per_s / nothing:.2f}" if nothing else "-", f"{row.predicted_per_s:.0f}",
                      f"{row.tokens_per_s / row.predicted_per_s:.2f}", show_bytes(row.device),
                      show_bytes(row.peak) if row.peak else "-",
                      *(show_bytes(size) for size in (row.host, row.resident, row.taken)), *spent])
    return columns(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", action="store_true",
                        help="as many blocks as fit, with and without recomputation")
    parser.add_argument("--blocks", type=int, help="(default: 12 on a GPU, 4 without one)")
    parser.add_argument("--memory", help="bytes that the device has (default: 95%% of what a GPU has free; "
                                         "24MiB without one)")
    parser.add_argument("--hidden", type=int, help="width (default: 4096 on a GPU, 128 without one)")
    parser.add_argument("--most", type=int, help="--largest: blocks at most (default: 1000 on a GPU, 48 "
                                                 "without one)")
    parser.add_argument("--settings", nargs="+", metavar="NAME", default=[],
                        help=f"these, and nothing (default: all of {'; '.join(SETTINGS)}; with --largest of "
                             f"{'; '.join(LARGEST)})")
    parser.add_argument("--hardware", default="",
                        help="of the predictions, as threed predict takes it (default: the file for such a "
                             "GPU, or for a CPU core)")
    parser.add_argument("--steps", type=int, default=2, help="steps of which the fastest counts (default: 2)")
    parser.add_argument("--seconds", type=float,
                        help="all is over by then (default: 235; with --largest 3600)")
    parser.add_argument("--quick", action="store_true",
                        help="the size that is used without a GPU, and one step")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the tables here too, and how they were made")
    args = parser.parse_args(argv)
    small = args.small = args.quick or not torch.cuda.is_available()
    args.size, args.steps = SMALL if small else LARGE, 1 if args.quick else args.steps
    args.table = LARGEST if args.largest else SETTINGS
    if args.size.dtype == "fp32":  # and so are gradients
        args.table = {name: each for name, each in args.table.items() if "bf16" not in name}
    if unknown := [name for name in args.settings if name not in args.table]:
        parser.error(f"there is no setting {unknown[0]!r}; there are {'; '.join(args.table)}")
    args.settings = [name for name in args.table if name in ("nothing", *(args.settings or args.table))]
    args.most, args.blocks = args.most or (48 if small else 1000), args.blocks or (4 if small else 12)
    args.seconds = args.seconds or (3600 if args.largest else 235)
    args.numel = 10**6 if small else 200 * 10**6
    args.memory = args.memory or ("24MiB" if small else None)
    if args.hidden:
        args.size = args.size._replace(hidden=args.hidden)
    if min(args.most, args.steps, args.blocks, args.size.hidden) < 1 or args.size.hidden % args.size.heads:
        parser.error(f"--most, --steps and --blocks must be at least 1, --hidden a multiple of "
                     f"{args.size.heads}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """1 if a measurement failed, but for those that do not fit and those that are left out."""
    argv = sys.argv[1:] if argv is None else argv
    bench = Bench(parse(argv), argv)
    bench.run()
    print(bench.text())
    said = [each for each in (*bench.rows.values(), *bench.rates) if isinstance(each, str)]
    return int(any(not each.startswith(MILD) for each in said))


MILD = ("left out", "not even one", "does not fit")


if __name__ == "__main__":
    sys.exit(main())
