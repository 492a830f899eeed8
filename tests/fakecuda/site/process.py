"""What makes a whole process run on fake GPUs, from its start to its report at the end.

    FAKE_CUDA_REPORT=FILE    a process that has used a fake GPU adds a line of JSON to this file when it ends:
                             its rank, how many operations it launched there, and each race that was found

A rank that is killed writes nothing, so a test counts the lines.
"""

from __future__ import annotations

import atexit
import json
import os
from typing import Any, NoReturn

from tests.fakecuda import shim


def begin() -> None:
    device = shim.install(shim.asked())  # before torch is imported
    import torch

    from tests.fakecuda.site.collectives import OverGloo
    from tests.fakecuda.site.driver import Driver

    over = OverGloo(device)
    _see(torch, device, Driver())
    over.install()
    _report_at_exit(device, over)


def _see(torch: Any, device: Any, driver: Any) -> None:
    """Let torch ask this driver: the shim knows one process alone, and no forks."""
    for name in ("_cuda_getDeviceCount", "_cuda_isInBadFork"):
        setattr(torch._C, name, getattr(driver, name))
    # the compiler's interface to a device imports it where torch was built for CUDA
    torch._C._cuda_getCurrentRawStream = lambda index: torch.cuda.current_stream(index).stream_id
    torch.cuda._is_in_bad_fork = driver._cuda_isInBadFork
    for name in ("_device_count_nvml", "is_available", "device_count", "is_initialized", "_lazy_init"):
        setattr(torch.cuda, name, getattr(driver, name))
    torch.cuda.init = driver._lazy_init
    # kernels are the CPU's, and draw from its generator
    torch.cuda.default_generators = (torch.default_generator,) * device.DEVICES
    shims = torch.cuda.set_device

    def set_device(wanted: Any) -> None:
        driver._lazy_init()
        shim.gpus = len(driver.visible())
        shims(wanted)

    def get_device_properties(wanted: Any = None) -> Any:
        index = wanted if isinstance(wanted, int) else torch.device(wanted or "cuda").index
        return driver.get_device_properties(device.current_device() if index is None else index)

    torch.cuda.set_device, torch.cuda.get_device_properties = set_device, get_device_properties


def _report_at_exit(device: Any, over: Any) -> None:
    def report() -> None:
        launches, races = device.counts().get("launches", 0), device.races()
        if launches and (path := os.environ.get("FAKE_CUDA_REPORT")):
            line = json.dumps({"rank": over.rank, "launches": launches, "races": races})
            with open(path, "a") as file:
                file.write(f"{line}\n")

    leave = os._exit

    def report_and_leave(status: int) -> NoReturn:
        report()
        leave(status)

    os._exit = report_and_leave
    atexit.register(report)
