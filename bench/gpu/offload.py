"""The largest GPT that one device trains, with and without offload, its tokens a second, and what of the
copies is hidden.

A GPT of a fixed width gets as many blocks as the plan of each setting allows in the device's memory, and
trains. Then the largest one that needs no setting trains with each of them: what a setting costs where it is
not needed.

On a GPU the memory is the GPU's. Without one it is a number of bytes (--memory) that plans are held against,
and host and device are the same memory: sizes are true of the plan, times say nothing of a GPU.

    python -m bench.gpu.offload --help
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from bench.common import Sizes, batches, machine, make_config, processors
from threed.base.errors import RunError
from threed.base.quantity import parse_bytes, show_bytes, show_count
from threed.comm.group import HOST_LANES, Comm
from threed.comm.lanes import Handle, Job, Lane
from threed.comm.process import ProcessComm, file_store
from threed.devices import device_of
from threed.engine.device import set_up
from threed.engine.engine import Engine
from threed.models.model import layers
from threed.planner import analyse, make_mesh, make_plan
from threed.program.instruction import COMPUTE
from threed.program.summary import stages
from threed.program.trace import Trace
from threed.schema import Config
from threed.tensor.random import draw_in_place

RECOMPUTE, OPTIMIZER = ["activation.policy=full"], ["zero.stage=2", "offload.optimizer=cpu"]
PARAMETERS = ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"]
SETTINGS = {
    "nothing": [],
    "recompute": RECOMPUTE,
    "optimizer": OPTIMIZER,
    "optimizer, recompute": [*OPTIMIZER, *RECOMPUTE],
    "parameters": PARAMETERS,
    "parameters, recompute": [*PARAMETERS, *RECOMPUTE],
    "parameters, activations": [*PARAMETERS, *RECOMPUTE, "activation.offload=cpu"],
}
LANES = ("d2h", "h2d", "host")
Intervals = list[tuple[float, float]]  # seconds from a step's begin


# One block, of which a setting gets as many as fit.
LARGE, SMALL = Sizes(1, 4096, 32, 50304, 2048, 1, 8, "bf16"), Sizes(1, 128, 4, 512, 64, 2, 4)


class Measured(NamedTuple):
    """A setting at a number of blocks. Bytes are the plan's, but for `peak`."""

    layers: int
    parameters: int
    device: int
    host: int
    peak: int  # 0 where nothing tells
    step_s: float
    tokens_per_s: float
    lanes: dict[str, tuple[float, float]]  # lane -> (seconds at work, share of them during which the device
    # computed)


class TimedLane(Lane):
    """A lane that notes when each of its jobs ran."""

    def __init__(self, lane: Lane, mark: Callable[[], Any]):
        super().__init__(lane.device)
        self._lane, self._mark = lane, mark
        self.marks: list[tuple[Any, Any]] = []

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        def timed() -> None:
            begin = self._mark()
            job()
            self.marks.append((begin, self._mark()))

        return self._lane.submit(timed, after)

    def close(self) -> None:
        self._lane.close()


def event() -> Any:
    """A mark in the current stream."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def watch_lanes(comm: Comm) -> dict[str, TimedLane]:
    """Put a TimedLane around each lane of LANES. The host's lanes tell the host's time, whatever the
    device."""
    lanes = {}
    for name in LANES:
        streams = comm.device.type == "cuda" and name not in HOST_LANES
        lanes[name] = comm._lanes[name] = TimedLane(comm.lane(name), event if streams else time.monotonic)
    return lanes


def overlap(intervals: Intervals, others: Intervals) -> float:
    """Seconds of `intervals` inside `others`; neither has two at the same time."""
    return sum(max(0.0, min(end, stop) - max(begin, start))
               for begin, end in intervals for start, stop in others)


# ---------------------------------------------------------------- one setting


def config_of(size: Sizes, blocks: int, setting: str) -> Config:
    return make_config(size._replace(layers=blocks), 1, "model.position=rotary", *SETTINGS[setting])


def needs(size: Sizes, blocks: int, setting: str) -> tuple[int, int]:
    """(device, host) bytes of the plan."""
    row = stages(analyse(config_of(size, blocks, setting)))[0]
    return row.fixed_bytes + row.activation_peak_bytes, row.host_bytes


def largest(size: Sizes, setting: str, device: int, host: int, most: int) -> int:
    """The most blocks, up to `most`, whose plan fits; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        needed = needs(size, middle, setting)
        low, high = (middle, high) if needed[0] <= device and needed[1] <= host else (low, middle)
    return low


def train(size: Sizes, blocks: int, setting: str, comm: Comm, steps: int) -> Measured:
    """Train a step that does not count, and `steps` that do; the fastest of them."""
    config = config_of(size, blocks, setting)
    set_up(config)
    device, host = needs(size, blocks, setting)
    cuda = comm.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(comm.device)
    engine = Engine(config, make_plan(config), comm, draw_in_place)
    comm._lanes.clear()
    lanes, best = watch_lanes(comm), None
    for number in range(steps + 1):
        for lane in lanes.values():
            lane.marks.clear()
        begin, origin = time.monotonic(), event() if cuda else None
        data = batches(config, number, 0, comm.device)
        _, trace = engine.train_step(lambda microbatch, data=data: data[microbatch])
        if number and (best is None or trace.total_s < best[0]):
            program = engine.plan.programs["train"][0]
            best = trace.total_s, {name: hidden(lane, trace, program, begin, origin)
                                   for name, lane in lanes.items()}
    assert best is not None
    for lane in lanes.values():
        lane.close()
    comm._lanes.clear()
    engine.close()
    numel = sum(p.numel for layer in layers(config.model) for p in layer.own_parameters())
    return Measured(blocks, numel, device, host, device_of(comm.device).peak_bytes() if cuda else 0, best[0],
                    config.tokens_per_step / best[0], best[1])


def hidden(lane: TimedLane, trace: Trace, program: Sequence[Any], begin: float,
           origin: Any) -> tuple[float, float]:
    """Seconds at work, and the share of them during which the device computed."""
    def since(mark: Any) -> float:
        return mark - begin if isinstance(mark, float) else origin.elapsed_time(mark) / 1e3

    jobs = [(since(start), since(stop)) for start, stop in lane.marks]
    computes = [(trace.started[i], trace.ended[i]) for i, item in enumerate(program) if item.op in COMPUTE]
    busy = sum(stop - start for start, stop in jobs)
    return busy, overlap(jobs, computes) / busy if busy else 0.0


def attempt(size: Sizes, blocks: int, setting: str, comm: Comm, args: argparse.Namespace) -> Measured:
    """`train`, with fewer blocks where the device has less memory than the plan needs."""
    while True:
        try:
            return train(size, blocks, setting, comm, args.steps)
        except (RunError, torch.OutOfMemoryError) as error:
            if "out of memory" not in str(error).lower() or blocks == 1:
                raise
            print(f"  {blocks} blocks are too many for {setting}", file=sys.stderr)
        blocks = max(1, min(blocks - 1, int(blocks * 0.95)))
        comm._lanes.clear()
        gc.collect()
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- the bench


def table(rows: dict[str, Measured], base: Measured) -> list[str]:
    head = ["setting", "blocks", "parameters", "of nothing", "device", "measured", "host", "tokens/s",
            "of nothing", *(f"{lane}: ms, hidden" for lane in LANES)]
    out = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, row in rows.items():
        spent = [f"{1e3 * busy:.0f}, {share:.0%}" if busy else "-" for busy, share in row.lanes.values()]
        cells = [name, str(row.layers), show_count(row.parameters), f"{row.parameters / base.parameters:.2f}",
                 show_bytes(row.device), show_bytes(row.peak) if row.peak else "-", show_bytes(row.host),
                 f"{row.tokens_per_s:.0f}", f"{row.tokens_per_s / base.tokens_per_s:.2f}", *spent]
        out.append("| " + " | ".join(cells) + " |")
    return out


def measure(args: argparse.Namespace, device: torch.device, memory: int,
            say: Callable[[str], None]) -> list[str]:
    size, host = args.size, int(0.8 * psutil.virtual_memory().available)
    blocks = {}
    for setting in args.settings:
        blocks[setting] = largest(size, setting, memory, host, args.most)
        say(f"{setting}: {blocks[setting]} blocks fit")
    if not blocks["nothing"]:
        raise SystemExit(f"not even one block fits into {show_bytes(memory)}: give more --memory, or a "
                         f"smaller --hidden")
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        comm = ProcessComm(make_mesh(config_of(size, 1, "nothing")), 0, device, 60.0,
                           file_store(str(Path(scratch) / "store"), 1))
        measured: list[dict[str, Measured]] = [{}, {}]
        try:
            for which, of in enumerate((lambda setting: blocks[setting],
                                        lambda setting: measured[0]["nothing"].layers)):
                for setting in args.settings:
                    if which and blocks[setting] == of(setting):  # that was the first
                        measured[1][setting] = measured[0][setting]
                        continue
                    measured[which][setting] = attempt(size, of(setting), setting, comm, args)
                    say(f"{setting}, {measured[which][setting].layers} blocks: "
                        f"{measured[which][setting].tokens_per_s:.0f} tokens/s")
        finally:
            comm.close()
    base = measured[0]["nothing"]
    at_most = [name for name, num_blocks in blocks.items() if num_blocks == args.most]
    most = [f"--most {args.most} ends the search of: {'; '.join(at_most)}", ""]
    return ["## The largest that fits", "", *table(measured[0], base), "",
            *(most if args.most in blocks.values() else []),
            "## The largest that needs nothing, with each setting", "",
            *table(measured[1], measured[1]["nothing"])]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", help="bytes that the device has (default: 95%% of what a GPU has free; "
                                         "24MiB without one)")
    parser.add_argument("--hidden", type=int, help="width (default: 4096 on a GPU, 128 without one)")
    parser.add_argument("--most", type=int, help="blocks at most (default: 1000 on a GPU, 48 without one)")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), metavar="NAME", default=[],
                        help=f"these, and nothing (default: all of {'; '.join(SETTINGS)})")
    parser.add_argument("--steps", type=int, default=3, help="steps of which the fastest counts (default: 3)")
    parser.add_argument("--quick", action="store_true",
                        help="the size that is used without a GPU, and one step")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the tables here too, and how they were made")
    args = parser.parse_args(argv)
    small = args.quick or not torch.cuda.is_available()
    args.size, args.steps = SMALL if small else LARGE, 1 if args.quick else args.steps
    args.settings = [name for name in SETTINGS if name in ("nothing", *(args.settings or SETTINGS))]
    args.most = args.most or (48 if small else 1000)
    args.memory = args.memory or ("24MiB" if small else None)
    if args.hidden:
        args.size = args.size._replace(hidden=args.hidden)
    if min(args.most, args.steps, args.size.hidden) < 1 or args.size.hidden % args.size.heads:
        parser.error(f"--most and --steps must be at least 1, --hidden a multiple of {args.size.heads}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, begin = parse(argv), time.monotonic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    memory = parse_bytes(args.memory) if args.memory else int(0.95 * torch.cuda.mem_get_info(device)[0])

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {text}", file=sys.stderr, flush=True)

    before, size = processors(), args.size
    lines = measure(args, device, memory, say)
    after = processors()
    busy = (after[0] - before[0]) / max(after[1] - before[1], 1e-9)
    text = "\n".join([
        "# Offload: the largest model", "",
        f"`python -m bench.gpu.offload {' '.join(argv or sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}. "
        f"{name}; {machine()}; processors {busy:.0%} busy, this bench included.",
        f"GPT of width {size.hidden} in {size.dtype}, {size.num_microbatches} micro-batches of "
        f"{size.micro_batch} x {size.seq_len} tokens, {show_bytes(memory)} of device memory.",
        *([] if device.type == "cuda" else [
            "Without a GPU memory is a limit that plans are held against, and copies are within the host: "
            "the times say nothing of a GPU."]),
        "What the columns are is in [../README.md](../README.md).", "", *lines, ""])
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
