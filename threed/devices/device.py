"""Device: what the rest of threed asks of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from threed.devices.clock import Clock


class Driver(ABC):
    """Which devices of a kind there are for this process."""

    @abstractmethod
    def available(self) -> bool:
        """Whether this process can use one."""

    @abstractmethod
    def count(self) -> int:
        """How many this process sees."""

    @abstractmethod
    def for_forks(self) -> int:
        """How many can be used by processes that are forked from this one; 0 where there are none. InputError
        where there are some, and such processes cannot use them; RunError where the driver does not
        answer."""

    @abstractmethod
    def started(self) -> bool:
        """Whether this process has initialized one: a process forked from it cannot use one then."""


class Device(ABC):
    """A torch device, and what depends on its kind.

    A stream is a queue of work on the device, an event a point in it; both have the methods of torch.Stream
    and torch.Event. A device that is not `asynchronous` has none: work has ended when its call returns.
    """

    driver: ClassVar[Driver]
    kind: ClassVar[str]  # torch's name, and that in run.device
    asynchronous: ClassVar[bool]  # the host issues work to streams, and goes on; copies need pinned memory
    # of torch.distributed, for tensors on the device: "gloo", or one that connects at the first collective
    backend: ClassVar[str]
    triton: ClassVar[bool]  # torch compiles for it with triton, and threed has kernels in triton
    grouped_mm: ClassVar[bool]  # torch has a kernel for products of groups of rows, in bf16
    rms_norm: ClassVar[bool]  # torch has a kernel for RMSNorm, where its version has one
    varlen: ClassVar[bool]  # the same of attention for sequences of varying length
    dtype: ClassVar[torch.dtype]  # in which it is fastest
    chunk: ClassVar[int]  # elements that an optimizer's step converts at a time, where tensors have 16 bits
    visible: ClassVar[str] = ""  # the variable that says which devices of a machine a process sees
    lister: ClassVar[str] = ""  # the program that lists the devices of a machine

    def __init__(self, torch_device: torch.device):
        self.torch_device = torch_device

    # ------------------------------------------------------------ what it is

    @abstractmethod
    def name(self) -> str:
        """What its maker calls it."""

    @abstractmethod
    def uuid(self) -> str:
        """Its number in the world; "" of a CPU."""

    @abstractmethod
    def bus(self, index: int | None = None) -> str:
        """The PCI address of this device, or of the one with this index, such as 0000:3b:00.0; "" where
        there is none or torch does not say."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """All of its memory."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most memory that this process has had: the allocator's peak; of a CPU, the resident set's."""

    # ------------------------------------------------------------ work

    @abstractmethod
    def use(self) -> None:
        """From now on this thread works on this device. (A new thread works on the first.)"""

    @abstractmethod
    def stream(self, first: bool = False) -> Any:
        """A new stream. `first`: its work goes before that of other streams."""

    @abstractmethod
    def current_stream(self) -> Any: ...

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this thread issues its work to a stream."""

    @abstractmethod
    def record(self) -> Any:
        """An event after all work so far of the current stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of all streams has ended."""

    @abstractmethod
    def in_use(self, tensor: torch.Tensor) -> None:
        """The current stream uses this tensor: its memory is not used again before that work has ended."""

    @abstractmethod
    def has_failed(self, error: Exception) -> bool:
        """Whether an error is the device's: work that was issued earlier may have caused it."""

    @abstractmethod
    def random_state(self) -> torch.Tensor | None:
        """Of torch's generator on this device; None of a CPU, whose generator is the host's."""

    @abstractmethod
    def set_random_state(self, state: torch.Tensor | None) -> None: ...

    @abstractmethod
    def clock(self) -> Clock: ...

    @abstractmethod
    def recorder(self) -> Recorder:
        """For graphs of a rank's computation (engine/graphs). InputError where there are no graphs."""


class GraphPiece(Protocol):
    """One graph: kernels that are recorded once, and issued with one call after that."""

    empty: bool  # whether nothing was recorded, as between two collectives

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def replay(self) -> None: ...


class Recorder(Protocol):
    """Makes the graphs of a rank."""

    def ready(self) -> None:
        """Prepare for the first graph."""
        ...

    def pool(self) -> Any:
        """A set's memory."""
        ...

    def piece_of(self, pool: Any) -> GraphPiece:
        """A new graph. The tensors that it makes are allocated in this pool."""
        ...

    def fixed(self, like: torch.Tensor) -> torch.Tensor:
        """Memory outside of all sets, which graphs may read."""
        ...

    def fill(self, empty: torch.Tensor, value: torch.Tensor) -> None:
        """Give a tensor, made while a graph is recorded, the value that it will have."""
        ...
