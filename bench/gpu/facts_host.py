"""Facts about the machine, and how processes come to a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl as cuda_nccl

from bench.gpu.apart import FORK
from bench.gpu.fact import LIMIT_S, At, Facts, Missing, of_cuda, took

FACTS = Facts()

# ---------------------------------------------------------------- the machine


@FACTS.add(gpu=False)
def versions(at: At) -> str:
    def of(package: str) -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"no {package}"

    has_nccl = torch.distributed.is_nccl_available()
    others = ", ".join(map(of, ("triton", "megatron-core", "omegaconf", "transformer-engine", "flash-attn")))
    return (f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
            f"cuDNN {torch.backends.cudnn.version()}, "
            f"NCCL {'.'.join(map(str, cuda_nccl.version())) if has_nccl else 'none'}, {others}")


@FACTS.add(gpu=False)
def host(at: At) -> str:
    gib = 1 << 30
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, "
            f"{int(info['MemAvailable'].split()[0]) / (1 << 20):.0f} GiB of memory available, /dev/shm "
            f"{shutil.disk_usage('/dev/shm').free / gib:.1f} GiB, {tempfile.gettempdir()} "
            f"{shutil.disk_usage(tempfile.gettempdir()).free / gib:.0f} GiB, locked memory "
            f"{'unlimited' if locked == resource.RLIM_INFINITY else f'{locked / gib:.2f} GiB'}")


@FACTS.add(gpu=False)
def compilers(at: At) -> str:
    """triton compiles a piece of C against Python's headers for each kernel."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found = ", ".join(f"{name} {shutil.which(name) or 'none'}" for name in ("gcc", "clang", "g++", "ninja"))
    return f"Python.h {'yes' if header.exists() else 'NO'}, {found}"


@FACTS.add(gpu=False)
def native(at: At) -> str:
    """AdamW and checksums on the host."""
    from threed.optim import native

    return "threed's native.c is there" if native.ADAMW is not None else f"none: {native.MISSING}"


@FACTS.add(gpu=False)
def start(at: At) -> str:
    """What a command costs before it does anything."""
    def seconds(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begin

    return f"import torch {seconds('import torch'):.1f} s, threed {seconds('import threed.cli.main'):.1f} s"


@FACTS.add()
def gpu(at: At) -> str:
    properties: Any = torch.cuda.get_device_properties(at.device)
    free, total = torch.cuda.mem_get_info(at.device)
    multiprocessors = getattr(properties, "multi_processor_count", "?")
    return (f"{torch.cuda.device_count()} x {properties.name}, compute capability "
            f"{properties.major}.{properties.minor}, {multiprocessors} multiprocessors, "
            f"{free / (1 << 30):.1f} GiB free of {total / (1 << 30):.1f}")


@FACTS.add()
def driver(at: At) -> str:
    if shutil.which("nvidia-smi") is None:
        raise Missing("no nvidia-smi")
    names = ("driver_version", "power.limit", "clocks.max.sm", "clocks.sm", "temperature.gpu",
             "ecc.mode.current", "mig.mode.current", "pcie.link.gen.current", "pcie.link.width.current")
    done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"],
                          text=True, capture_output=True, check=True, timeout=20)
    return ", ".join(f"{name} {value.strip()}" for name, value in
                     zip(names, done.stdout.splitlines()[0].split(","), strict=True))


@FACTS.add()
def numa_node(at: At) -> str:
    """Of the GPU, and whether this process may run there."""
    of_cuda()
    properties: Any = torch.cuda.get_device_properties(at.device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        node = Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text().strip()
    except OSError as error:
        raise Missing(f"/sys says nothing of {bus} ({type(error).__name__})") from None
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if node == "-1":
        return f"{bus} names none of {nodes}"
    cores = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip()
    return f"{bus} is at node {node} of {nodes}, cores {cores}; allowed {sorted(os.sched_getaffinity(0))}"


# ---------------------------------------------------------------- processes


def forked(at: At, first: Callable[[], object]) -> str:
    """As threed's launcher does it: `first` runs, then a process is forked, and that one uses the GPU."""
    import threed  # noqa: F401  (it sets what torch reads)

    first()
    child = FORK.Process(target=lambda: print("on the GPU:", torch.ones(1, device=at.device).item()))
    child.start()
    child.join(LIMIT_S / 2)
    if child.exitcode != 0:
        child.kill()
        raise RuntimeError("a child that was forked then cannot use the GPU" if child.exitcode else
                           "a child that was forked then hangs")
    return "a forked child uses the GPU"


@FACTS.add(alone=True)
def fork_after_count(at: At) -> str:
    return forked(at, lambda: (torch.cuda.is_available(), torch.cuda.device_count()))


@FACTS.add(alone=True)
def fork_after_fake_tensors(at: At) -> str:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def first() -> None:
        with FakeTensorMode():
            pass

    return forked(at, first)


@FACTS.add(alone=True)
def nccl(at: At) -> str:
    """One GPU shows no more of it."""
    if not torch.distributed.is_nccl_available():
        raise Missing("torch is built without NCCL")
    import torch.distributed as dist

    begin = time.perf_counter()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    group, x = dist.new_group([0], backend="nccl"), torch.ones(4, device=at.device, dtype=torch.float64)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert x.tolist() == [1.0] * 4, x
    return f"a communicator of one rank opens and sums in {time.perf_counter() - begin:.1f} s"


@FACTS.add(alone=True)
def expandable_segments(at: At) -> str:
    """Whether freed pieces serve a larger request, without and with them."""
    of_cuda()
    reserved, size = [], 1 << 30
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.10 on
    change = change or torch.cuda.memory._set_allocator_settings
    for setting in ("False", "True"):
        torch.cuda.empty_cache()
        change(f"expandable_segments:{setting}")
        pieces = [torch.empty(size, dtype=torch.uint8, device=at.device) for _ in range(4)]
        del pieces
        whole = torch.empty(4 * size, dtype=torch.uint8, device=at.device)
        reserved.append(torch.cuda.memory_reserved(at.device) / (1 << 30))
        del whole
    return f"4 x 1 GiB, freed, then 4 GiB: {reserved[0]:.1f} GiB reserved without, {reserved[1]:.1f} with"


@FACTS.add(alone=True)
def streams_at_once(at: At) -> str:
    """15 streams that each wait a while: with few queues they stand in line."""
    of_cuda()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    streams, cycles = [torch.cuda.Stream() for _ in range(15)], 10_000_000

    def all_of(streams: Sequence[torch.cuda.Stream]) -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)

    one, many = (took(lambda some=some: all_of(some), 3) for some in (streams[:1], streams))
    return f"15 streams take {many / one:.1f} times as long as one, with 8 queues"
