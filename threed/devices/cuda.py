"""NVIDIA's GPUs, by torch.cuda. (AMD's have the same names in torch.)"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ClassVar

import torch

from threed.base.errors import InputError, RunError
from threed.base.quantity import many
from threed.devices import forks
from threed.devices.device import Device, Driver

DRIVER_S = 120  # how long a child may take to start CUDA: some seconds with eight GPUs that nothing else uses
# With this variable torch asks NVML, the driver's own library, whether there are GPUs: that starts nothing.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class CudaDriver(Driver):
    def available(self) -> bool:
        return torch.cuda.is_available()

    def count(self) -> int:
        return torch.cuda.device_count()

    def for_forks(self) -> int:
        """A forked process cannot use CUDA once its parent has started it, as the question how many GPUs
        there are does (`cuInit`): torch calls such a fork bad. So every question is asked in a child."""
        if not torch.cuda._is_compiled():
            return 0
        if forks.ask(torch.cuda._is_in_bad_fork, DRIVER_S):
            # no harm is left that the question could do
            if not torch.cuda.device_count():
                return 0
            raise InputError(
                "this process has started CUDA, so ranks that are forked from it could not use a GPU: "
                "torch.cuda.is_available() does so before `import threed`, and so do libraries that look for "
                f"a GPU when they are imported. Import threed first, or set {NVML_CHECK}=1 in the "
                "environment of the script, or start it with torchrun")
        answer = _ask(os.environ.get(VISIBLE))
        if answer is None:
            raise RunError("a process that asked CUDA how many GPUs there are died, or got no answer within "
                           f"{DRIVER_S} s: see whether nvidia-smi answers; run.device=cpu asks for none")
        listed, usable = answer
        if listed and not usable:
            raise InputError(
                f"the driver lists {many(listed, 'GPU')}, but a process that is forked from this one cannot "
                "use CUDA. Either a library has started CUDA in this process (then import it later, or start "
                "the script with torchrun), or this torch does not fit the driver (python -c 'import torch; "
                "torch.cuda.init()' says why); run.device=cpu uses no GPU")
        return listed

    def started(self) -> bool:
        return torch.cuda.is_initialized()


class Cuda(Device):
    driver: ClassVar[Driver] = CudaDriver()
    kind: ClassVar[str] = "cuda"
    asynchronous: ClassVar[bool] = True
    backend: ClassVar[str] = "nccl"
    triton: ClassVar[bool] = True
    rms_norm: ClassVar[bool] = True
    grouped_mm: ClassVar[bool] = True
    varlen: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    chunk: ClassVar[int] = 1 << 22
    visible: ClassVar[str] = VISIBLE
    lister: ClassVar[str] = "nvidia-smi"

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    def bus(self, index: int | None = None) -> str:
        gpu: Any = torch.cuda.get_device_properties(self.torch_device.index if index is None else index)
        try:
            return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        except AttributeError:
            return ""

    def memory_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def use(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def stream(self, first: bool = False) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device, priority=-1 if first else 0)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def in_use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream())

    def has_failed(self, error: Exception) -> bool:
        return "CUDA error" in str(error)

    def random_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: torch.Tensor | None) -> None:
        assert state is not None
        torch.cuda.set_rng_state(state, self.torch_device)

    def clock(self) -> CudaClock:
        return CudaClock()

    def recorder(self) -> CudaRecorder:
        return CudaRecorder()


@cache
def _ask(visible: str | None) -> tuple[int, bool] | None:
    """How many GPUs torch lists, of those that the variable names, and whether CUDA starts. Asked once: it
    takes seconds where the driver keeps no GPU ready."""
    def look() -> tuple[int, bool]:
        listed = torch.cuda.device_count()
        os.environ.pop(NVML_CHECK, None)  # so that torch asks CUDA, not NVML
        return listed, torch.cuda.is_available()

    answer = forks.ask(look, DRIVER_S)
    return answer and (answer[0], answer[1])


# ---------------------------------------------------------------- clocks


class CudaReader:
    at_once = False

    def __init__(self, marks: list[torch.cuda.Event], begin: torch.cuda.Event, end: torch.cuda.Event,
                 spare: list[torch.cuda.Event]):
        self._marks, self._begin, self._end, self._spare = marks, begin, end, spare

    def __enter__(self) -> Callable[[torch.cuda.Event], float]:
        self._end.synchronize()
        return lambda mark: self._begin.elapsed_time(mark) / 1e3

    def __exit__(self, *error: object) -> None:
        self._spare += self._marks
        self._marks = []


class CudaClock:
    """Events are kept from step to step: creating one costs more than recording it."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[torch.cuda.Event] = []  # since the last reader

    def mark(self) -> torch.cuda.Event:
        try:
            event = self._spare.pop()
        except IndexError:  # (threads of lanes mark, too: what was there a moment ago may be gone)
            event = torch.cuda.Event(enable_timing=True)
        self._marks.append(event)
        event.record()
        return event

    def reader(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> CudaReader:
        marks, self._marks = self._marks, []
        return CudaReader(marks, begin, end, self._spare)

    def passed(self, mark: torch.cuda.Event) -> bool:
        try:
            return mark.query()
        except RuntimeError:  # the device has failed: the next use of it raises the reason
            return True


# ---------------------------------------------------------------- graphs


class CudaPiece:
    def __init__(self, pool: Any):
        self._pool, self._graph = pool, torch.cuda.CUDAGraph()
        self.empty = False

    def begin(self) -> None:
        # relaxed: autograd's thread may end what this one has begun, and the threads of lanes go on
        self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")

    def end(self) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._graph.capture_end()
        self.empty = any("CUDA Graph is empty" in str(each.message) for each in said)

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    def __init__(self) -> None:
        # The default stream cannot be recorded: all computation of this rank goes to another. (Streams are
        # taken in turn from few: those of lanes and NCCL are others, because they have another priority.)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)

    def ready(self) -> None:
        """Give back the memory of the steps without graphs: the allocator does not hand it to graphs, nor
        gives it back while it records."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def piece_of(self, pool: Any) -> CudaPiece:
        return CudaPiece(pool)

    def fixed(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def fill(self, empty: torch.Tensor, value: torch.Tensor) -> None:
        """Nothing runs while a GPU records."""
