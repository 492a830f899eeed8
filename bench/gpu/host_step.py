"""How fast the host steps AdamW: by threads, by the memory in which its state is, and beside copies that come
from the device."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from threed.optim import native
from threed.optim.base import Update, View
from threed.optim.step import step
from threed.schema import OptimizerConfig

MOVED = 30  # bytes a parameter: weight and moments read and written, the gradient read, bf16 weights written
THREADS = (4, 8, 12, 14, 16)
CHUNK, MOST = 64 << 20, 1000  # bytes of a copy, and copies at most
LINK = 64e9  # bytes a second: more than a link carries one way
LARGE_PAGE = 1 << 21


class Rate(NamedTuple):
    """Bytes a second."""

    memory: str
    threads: int
    alone: float
    beside: float  # the step, beside copies to the host; 0: there is no device
    copies: float  # those copies


def threads_here(small: bool) -> list[int]:
    """Numbers of threads that have a processor each."""
    mine = len(os.sched_getaffinity(0))
    return [each for each in ((1, 2) if small else THREADS) if each <= mine] or [mine]


def memories(cuda: bool) -> list[str]:
    """Kinds of memory: small pages, large ones, and what a device copies from (in pages of the driver's)."""
    advice = ["plain", "large pages"] if hasattr(mmap, "MADV_HUGEPAGE") else ["plain"]
    return [*advice, *(["pinned"] if cuda else [])]


def zeros(numel: int, memory: str) -> torch.Tensor:
    """Flat fp32 zeros in a kind of memory."""
    if memory == "pinned":
        return torch.zeros(numel, pin_memory=True)
    pages = mmap.mmap(-1, 4 * numel + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE if memory == "large pages" else mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start:start + 4 * numel].view(torch.float32).zero_()


class Copies:
    """A device that copies to the host, if there is one."""

    def __init__(self, cuda: bool, size: int):
        self.stream = torch.cuda.Stream() if cuda else None
        if self.stream is not None:
            self.of = torch.zeros(size, dtype=torch.uint8, device="cuda")
            self.into = torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def beside(self, work: Callable[[], None], about_s: float) -> tuple[float, float]:
        """Seconds of work that takes some `about_s` alone, and bytes a second of the copies beside it."""
        assert self.stream is not None
        ends, size = [], len(self.into)
        with torch.cuda.stream(self.stream):
            for _ in range(min(MOST, math.ceil(3 * about_s * LINK / size))):
                self.into.copy_(self.of, non_blocking=True)
                ends.append(torch.cuda.Event())
                ends[-1].record()
        begin = time.perf_counter()
        work()
        took = time.perf_counter() - begin
        done = sum(end.query() for end in ends)
        self.stream.synchronize()
        return took, done * size / took


def rates(memory: str, numel: int, threads: Sequence[int], rounds: int, cuda: bool) -> list[Rate]:
    """The fastest of some rounds. A step has a gradient and a bf16 copy of the weights, which cross the link:
    they are pinned where there is a device."""
    if native.ADAMW is None:
        raise RuntimeError(f"threed's kernel is not there: {native.MISSING}")
    before, copies = torch.get_num_threads(), Copies(cuda, min(CHUNK, numel))
    weight, exp_avg, exp_avg_sq = (zeros(numel, memory) for _ in range(3))
    grad = torch.full((numel,), 1e-3, pin_memory=cuda)
    narrow = torch.zeros(numel, dtype=torch.bfloat16, pin_memory=cuda)
    options, found = OptimizerConfig(), list[Rate]()
    update, view = Update(options, options.lr, 10, True, 0.5), View(
        weight, grad, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})

    def work() -> None:
        step(update, view, narrow)

    for number in threads:
        torch.set_num_threads(number)
        alone, beside = list[float](), list[tuple[float, float]]()
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            work()
            alone.append(time.perf_counter() - begin)
        if cuda:
            beside = [copies.beside(work, min(alone[1:])) for _ in range(rounds)]
        fastest = min(beside, default=(math.inf, 0.0))
        found.append(Rate(memory, number, MOVED * numel / min(alone[1:]), MOVED * numel / fastest[0],
                          fastest[1]))
    torch.set_num_threads(before)
    return found


HEAD = ("state in", "threads", "GB/s alone", "GB/s beside copies", "copies GB/s")


def cells(rate: Rate) -> list[str]:
    def gb(speed: float) -> str:
        return f"{speed / 1e9:.1f}" if speed else "-"

    return [rate.memory, str(rate.threads), gb(rate.alone), gb(rate.beside), gb(rate.copies)]
