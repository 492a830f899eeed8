"""The verb `threed calibrate`: measure this machine, fit the constants of Hardware, and write them down."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean
from typing import Any

from threed.calibration.grid import Grid, grid
from threed.calibration.points import Computed, Point, Sent, errors, fit
from threed.calibration.rank import Measured, Task, measure
from threed.children import CONTEXT, be_rank, end_all, signals_wait, start
from threed.errors import InputError, RunError
from threed.launcher import local_world_size
from threed.prediction.cost import write_whole
from threed.prediction.hardware import OF_CPUS, Hardware, load, names
from threed.quantity import show_bytes

MOST_RANKS = 8  # of a CPU, unless asked for more


def calibrate(output: Path, ranks: int | None = None, quick: bool = False, folder: Path = Path("."),
              device: str = "auto", say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure this machine with `ranks` processes (default: one a GPU or processor), and write a hardware
    file for `--hardware`.

    `folder`: of which disk the speed is measured. `say` gets a line for each part. Returns {"hardware",
    "errors": kind -> (mean, largest, points)}. InputError for bad arguments, RunError where a rank fails.
    """
    cuda = _cuda(device)
    processors = len(os.sched_getaffinity(0))
    ranks = ranks if ranks is not None else (local_world_size("cuda") or 1) if cuda else min(MOST_RANKS, processors)
    _check(output, ranks, folder, cuda)
    chosen = grid(cuda, quick)
    _check_room(folder, chosen, ranks)
    begin = time.monotonic()
    task = Task(chosen, ranks, processors, cuda, str(folder))
    measured = _start(task, lambda text: say(f"{time.monotonic() - begin:5.0f} s  {text}"))
    say(f"{time.monotonic() - begin:5.0f} s  fit")
    hardware, points = _fitted(measured, task)
    found = errors(points, hardware)
    write_whole(output, _text(hardware, found, task))
    return {"hardware": hardware, "errors": found, "points": points}


def _cuda(device: str) -> bool:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: give auto, cpu or cuda")
    gpus = local_world_size(device) or 0
    if device == "cuda" and not gpus:
        raise InputError("--device cuda: torch sees no GPU here; use --device cpu")
    return gpus > 0


def _check(output: Path, ranks: int, folder: Path, cuda: bool) -> None:
    if ranks < 1:
        raise InputError(f"--ranks {ranks}: give at least 1")
    if cuda and ranks > (gpus := local_world_size("cuda") or 0):
        raise InputError(f"--ranks {ranks}: there are {gpus} GPUs; give as many, or use --device cpu")
    if output.is_dir() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise InputError(f"-o {output}: no file can be written there; give a file in a folder that exists and "
                         "may be written to")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--folder {folder}: not a folder that may be written to; give one on the disk that "
                         "runs will use")


def _check_room(folder: Path, chosen: Grid, ranks: int) -> None:
    free = os.statvfs(folder)
    needed, there = ranks * chosen.disk, free.f_bavail * free.f_frsize
    if there < 1.1 * needed:
        raise InputError(f"--folder {folder}: {show_bytes(there)} are free, and {show_bytes(needed)} are written "
                         "for a moment; give another folder, or use --quick")


def _start(task: Task, say: Callable[[str], None]) -> list[Measured]:
    """Start the ranks, and collect what each has measured."""
    meeting, parent = os.memfd_create("threed-store"), os.getpid()
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(task.ranks)]
    ranks: list[Any] = []
    try:
        with signals_wait():
            body = [partial(measure, rank, task, f"/proc/self/fd/{meeting}", pipe[1])
                    for rank, pipe in enumerate(pipes)]
            ranks = [CONTEXT.Process(target=be_rank, args=(parent, each), name=f"rank {rank}")
                     for rank, each in enumerate(body)]
            start(ranks)
        for _, theirs in pipes:
            theirs.close()
        return _collect([ours for ours, _ in pipes], say)
    finally:  # also after Ctrl-C
        end_all(ranks)
        os.close(meeting)


def _collect(pipes: Sequence[Any], say: Callable[[str], None]) -> list[Measured]:
    """What each rank sends in the end. RunError where one fails."""
    found: dict[int, Measured] = {}
    while len(found) < len(pipes):
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in found]):
            try:
                what, value = pipe.recv()  # pyright: ignore[reportAttributeAccessIssue]
            except EOFError:
                raise RunError(f"rank {pipes.index(pipe)} has ended before it had measured all; nothing was "
                               "written") from None
            if what == "failed":
                raise RunError(f"{value}\nnothing was written")
            if what == "say":
                say(value)
            else:
                found[pipes.index(pipe)] = value
    return [found[rank] for rank in range(len(pipes))]


# ---------------------------------------------------------------- from points to constants


def _fitted(measured: Sequence[Measured], task: Task) -> tuple[Hardware, list[Point]]:
    """The constants, and the points that they were fitted to: means over the ranks."""
    ours = [each for each in measured if each.computed]
    computed = [row[0]._replace(seconds=fmean(point.seconds for point in row))
                for row in zip(*(each.computed for each in ours), strict=True)]
    sent = [row[0]._replace(seconds=fmean(point.seconds for point in row))
            for row in zip(*(each.sent for each in measured), strict=True)]
    rates = {name: fmean(each.rates[name] for each in measured if name in each.rates)
             for name in {name for each in measured for name in each.rates}}
    hardware = replace(_begin(computed, task), host_gbps=_gbps(rates["step"]), link_gbps=_gbps(rates["link"]),
                       read_gbps=_gbps(rates["read"]), write_gbps=_gbps(rates["write"]),
                       launch_us=rates["launch"] * 1e6)
    hardware = _fit_compute(computed, hardware, task.cuda)
    if not task.cuda:
        hardware = replace(hardware, host_us=_host_us([rest for each in ours for rest in each.rests], hardware),
                           context_gb=rates["context"] / 1e9)
    if sent:
        hardware = replace(hardware, contention=rates["contention"], node_us=_least(sent) * 1e6,
                           node_gbps=_gbps(max(point.size / point.seconds for point in sent)), node_efficiency=0.9)
        hardware = fit(sent, hardware, ("node_efficiency", "node_us"))
    return _rounded(hardware), [*computed, *sent]


def _begin(computed: Sequence[Computed], task: Task) -> Hardware:
    """The file that a calibration begins from, with the peaks of this machine."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    moved = max(point.kernels[0].forward / point.seconds for point in computed
                if point.kind == "element-wise")  # pyright: ignore[reportAttributeAccessIssue]
    peak, narrow = (max(point.kernels[0].flops / point.seconds for point in computed if point.kind == kind) / 1e12
                    for kind in ("products", "products in 16 bits"))
    if task.cuda:
        import torch

        named = torch.cuda.get_device_name(0)
        known = next((name for name in names() if name.split("-")[0].upper() in named.split()), None)
        hardware = load(known) if known else Hardware(tflops=narrow / 0.7, tflops_fp32=peak / 0.7,
                                                      memory_gbps=_gbps(moved / 0.8))
        return replace(hardware, name=named, host_memory_gb=pages / 1e9)
    return replace(load(OF_CPUS), name=f"{_processor()}, {task.processors} cores", tflops=narrow, tflops_fp32=peak,
                   efficiency=0.8, half_dim=8.0, memory_gbps=_gbps(moved), devices=task.processors,
                   memory_gb=pages / 1e9 / task.processors, host_memory_gb=pages / 1e9)


def _fit_compute(computed: Sequence[Computed], hardware: Hardware, cuda: bool) -> Hardware:
    narrow = [point for point in computed if point.kind == "products in 16 bits"]
    rest = [point for point in computed if point.kind != "products in 16 bits"]
    if cuda:  # the peaks are known, and efficiency is for 16 bits
        wide = [point for point in rest if point.kind == "products"]
        hardware = fit(narrow, hardware, ("efficiency",))
        hardware = fit(wide, hardware, ("tflops_fp32",))
        others = [point for point in rest if point.kind != "products"]
        return fit(others, hardware, ("memory_efficiency", "attention_efficiency"))
    # On a CPU all that a layer computes takes from one clock: everything is fitted together.
    hardware = fit(rest, hardware, ("efficiency", "half_dim", "memory_efficiency", "attention_efficiency",
                                    "launch_us"))
    return fit(narrow, hardware, ("tflops",))


def _host_us(rests: Sequence[Any], hardware: Hardware) -> float:
    """Of an instruction: what is left of a step without computation and optimizer."""
    each = [(rest.seconds - rest.stepped * 8 / (hardware.host_gbps * 1e9)) / rest.instructions for rest in rests]
    return max(0.0, fmean(each)) * 1e6


def _least(sent: Sequence[Sent]) -> float:
    return min(point.seconds for point in sent)


def _gbps(rate: float) -> float:
    return rate * 8 / 1e9


def _rounded(hardware: Hardware) -> Hardware:
    return replace(hardware, **{item.name: float(f"{value:.3g}") for item in fields(Hardware)
                                if isinstance(value := getattr(hardware, item.name), float)})


def _processor() -> str:
    """What the kernel calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.machine())


# ---------------------------------------------------------------- the file


def _text(hardware: Hardware, found: dict[str, tuple[float, float, int]], task: Task) -> str:
    """A hardware file."""
    lines = [f"# Measured by threed calibrate on {time.strftime('%Y-%m-%d')} with {task.ranks} ranks on "
             f"{'GPUs' if task.cuda else 'a CPU'}, which measured at the same time.",
             "# How far the prices are from what they were fitted to:",
             *(f"#   {line}" for line in show_errors(found).splitlines()),
             "# adapter_* and dollars are not measured."]
    if "collectives" not in found:
        lines.append("# One rank has no peers: node_* and contention are not measured.")
    for item in fields(Hardware):
        value = getattr(hardware, item.name)
        text = f"{value:g}" if isinstance(value, float) else json.dumps(value)
        lines.append(f"{item.name}: {text}")
    return "\n".join(lines) + "\n"


def show_errors(found: dict[str, tuple[float, float, int]]) -> str:
    """A line a kind of points."""
    return "\n".join(f"{kind:20} {mean:6.1%} on average, {most:6.1%} at most, of {count}"
                     for kind, (mean, most, count) in found.items())
