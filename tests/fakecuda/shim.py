"""torch.cuda over the extension. All that the fake GPUs need of torch's insides in Python is here.

`install` comes before the first `import torch` of a process: torch asks once which hooks there are. Functions
of torch.cuda that ask the driver ask `GPUS` instead; those over streams, events and memory go to torch's own
generic ones (torch.Stream, torch.Event, torch.accelerator), whose guard the extension is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fakecuda import build

MEMORY = 8 << 30  # bytes of a GPU, as torch is told
NAME = "fake GPU"
installed: Any = None  # the extension
gpus = 0


def install(count: int = 16) -> Any:
    """Make this process one that sees `count` GPUs. Returns the extension. RuntimeError where torch is
    imported already."""
    global installed, gpus
    if installed is not None:
        gpus = count
        return installed
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: fake GPUs come first")
    path = build.extension()
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(build.torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # before torch looks for hooks and kernels
    import torch

    spec = importlib.util.spec_from_file_location("_fakecuda", path)
    assert spec is not None and spec.loader is not None
    installed, gpus = importlib.util.module_from_spec(spec), count
    spec.loader.exec_module(installed)
    for name, value in _functions(torch, installed).items():
        setattr(torch.cuda, name, value)
    torch.backends.cuda.is_built = lambda: True
    return installed


def _functions(torch: Any, device: Any) -> dict[str, Any]:
    """What replaces the functions and classes of torch.cuda."""

    def index(wanted: Any = None) -> int:
        if wanted is None:
            return device.current_device()
        number = wanted if isinstance(wanted, int) else torch.device(wanted).index
        return device.current_device() if number is None else number

    def of(wanted: Any = None) -> Any:
        return torch.device("cuda", index(wanted))

    def set_device(wanted: Any) -> None:
        if not 0 <= index(wanted) < gpus:
            raise torch.AcceleratorError(f"CUDA error: invalid device ordinal {index(wanted)}", 101)
        device.set_device(index(wanted))

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
            return super().__new__(cls, device=of(device), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
                    external: bool = False) -> Any:
            return super().__new__(cls, device=of(), enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(stream if stream is not None else current_stream())

        def wait(self, stream: Any = None) -> None:
            super().wait(stream if stream is not None else current_stream())

        def elapsed_time(self, other: Any) -> float:  # torch.Event's takes no event of a class of its own
            return device.elapsed_ms(self.event_id, other.event_id)

    def current_stream(wanted: Any = None) -> Any:
        return torch.accelerator.current_stream(of(wanted))

    @contextmanager
    def use_device(wanted: Any) -> Iterator[None]:
        before = device.current_device()
        device.set_device(index(wanted))
        try:
            yield
        finally:
            device.set_device(before)

    @contextmanager
    def use_stream(wanted: Any) -> Iterator[None]:
        if wanted is None:
            yield
            return
        with use_device(wanted.device):
            before = current_stream()
            torch._C._accelerator_setStream(wanted)
            try:
                yield
            finally:
                torch._C._accelerator_setStream(before)

    def properties(wanted: Any = None) -> Any:
        return types.SimpleNamespace(name=NAME, total_memory=MEMORY, major=9, minor=0,
                                     uuid=f"GPU-{index(wanted)}",
                                     multi_processor_count=132, pci_bus_id=index(wanted), pci_domain_id=0,
                                     pci_device_id=0)

    return {
        "Stream": Stream, "Event": Event, "CUDAGraph": _graph_class(device),
        "graph_pool_handle": device.new_pool, "is_current_stream_capturing": device.is_capturing,
        "current_stream": current_stream, "set_stream": torch._C._accelerator_setStream,
        "default_stream": lambda wanted=None: torch.Stream(stream_id=0, device_index=index(wanted),
                                                           device_type=of().type),
        "stream": use_stream, "StreamContext": use_stream, "device": use_device,
        "synchronize": lambda wanted=None: torch.accelerator.synchronize(of(wanted)),
        "is_available": lambda: gpus > 0, "device_count": lambda: gpus,
        "current_device": device.current_device, "set_device": set_device,
        "is_initialized": lambda: True, "_lazy_init": lambda: None, "init": lambda: None,
        "_is_in_bad_fork": lambda: False, "empty_cache": lambda: None,
        "memory_allocated": lambda wanted=None: device.memory_allocated(index(wanted)),
        "max_memory_allocated": lambda wanted=None: device.max_memory_allocated(index(wanted)),
        "reset_peak_memory_stats": lambda wanted=None: device.reset_peak_memory_stats(index(wanted)),
        "memory_stats": lambda wanted=None: {}, "host_memory_stats": dict,
        "mem_get_info": lambda wanted=None: (MEMORY - device.memory_allocated(index(wanted)), MEMORY),
        "get_device_name": lambda wanted=None: NAME, "get_device_properties": properties,
        "get_device_capability": lambda wanted=None: (9, 0),
        # kernels draw from the CPU's generator
        "get_rng_state": lambda wanted=None: torch.get_rng_state(),
        "set_rng_state": lambda state, wanted=None: torch.set_rng_state(state),
    }


def _graph_class(device: Any) -> type:
    class CUDAGraph:
        def __init__(self) -> None:
            self._graph = device.Graph()

        def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
            assert capture_error_mode == "relaxed", "the other modes watch calls that are not watched here"
            self._graph.begin(pool or 0)

        def capture_end(self) -> None:
            self._graph.end()
            if not len(self._graph):
                warnings.warn("The CUDA Graph is empty. This usually means that the graph was attempted to "
                              "be captured on wrong device or stream.", stacklevel=2)

        def replay(self) -> None:
            self._graph.replay()

        def pool(self) -> int:
            return self._graph.pool()

    return CUDAGraph


def asked() -> int:
    """How many fake GPUs the environment asks for (FAKE_CUDA)."""
    return int(os.environ.get("FAKE_CUDA", "16"))
