"""The host: how much memory this process may have, by the machine and by its control groups (a container, a
job); and flat memory in large pages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

SYSFS = Path("/sys")
GROUPS = Path("/proc/self/cgroup")
LARGE = 1 << 21  # bytes of a large page of x86-64, and of arm64 with small pages of 4 KiB


def memory_bytes(sysfs: Path = SYSFS) -> int:
    """Bytes of memory that this process and the others of its control group may have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in group_files("memory", "memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((sysfs / path).read_text()))
    return min(limits)


def group_files(kind: str, current: str, older: str) -> Iterator[str]:
    """Below /sys, the files of this process's control groups that say one thing of a kind (cpuset, memory),
    of version 2 (`current`) and of version 1 (`older`), those of the innermost group first. In a container
    the path may be the one outside; then the mounted root is its own."""
    try:
        rows = [line.split(":", 2) for line in GROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, kinds, path in (row for row in rows if len(row) == 3):
        if kinds and kind not in kinds.split(","):
            continue
        root, name = (f"fs/cgroup/{kind}", older) if kinds else ("fs/cgroup", current)
        for group in (Path(path), *Path(path).parents):
            yield f"{root}{str(group).rstrip('/')}/{name}"


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat zeros of the host that no device copies from or to. Large pages are asked for where the system has
    them on request: a step over gigabytes then looks up fewer addresses."""
    size = numel * dtype.itemsize
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(numel, dtype=dtype)
    pages = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % LARGE  # what is beside is never touched
    return torch.frombuffer(pages, dtype=dtype, count=numel, offset=start)
