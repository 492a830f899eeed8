"""The CPU, on which the host itself computes."""

from __future__ import annotations

import platform
import resource
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

import torch

from threed.base.errors import InputError
from threed.devices import host
from threed.devices.clock import HostClock
from threed.devices.device import Device, Driver


class CpuDriver(Driver):
    def available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def for_forks(self) -> int:
        return 0

    def started(self) -> bool:
        return False


class Cpu(Device):
    driver: ClassVar[Driver] = CpuDriver()
    kind: ClassVar[str] = "cpu"
    asynchronous: ClassVar[bool] = False
    backend: ClassVar[str] = "gloo"
    triton: ClassVar[bool] = False
    rms_norm: ClassVar[bool] = False
    grouped_mm: ClassVar[bool] = False  # a loop is as fast
    varlen: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype] = torch.float32
    chunk: ClassVar[int] = 1 << 20  # few enough for its cache

    def name(self) -> str:
        return f"CPU {platform.machine()}"

    def uuid(self) -> str:
        return ""

    def bus(self, index: int | None = None) -> str:
        return ""

    def memory_bytes(self) -> int:
        return host.memory_bytes()

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def use(self) -> None:
        pass

    def stream(self, first: bool = False) -> NoReturn:
        raise AssertionError("a CPU has no streams")

    def current_stream(self) -> NoReturn:
        raise AssertionError("a CPU has no streams")

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> NoReturn:
        raise AssertionError("a CPU has no streams")

    def synchronize(self) -> None:
        pass

    def in_use(self, tensor: torch.Tensor) -> None:
        pass

    def has_failed(self, error: Exception) -> bool:
        return False

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: torch.Tensor | None) -> None:
        pass

    def clock(self) -> HostClock:
        return HostClock()

    def recorder(self) -> NoReturn:
        raise InputError(f"run.cuda_graphs=true needs a GPU, and this run's device is a "
                         f"{self.torch_device.type}; set it to false")
