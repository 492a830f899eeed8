"""The driver of a process, as torch asks it: how many GPUs there are, which ones, and when a fork is bad.

    FAKE_CUDA=4              GPUs of the machine
    FAKE_CUDA_NVML=0         NVML cannot be used, as in some containers
    FAKE_CUDA_BROKEN=1       CUDA does not start, though NVML lists the GPUs: torch is too new for the driver
    CUDA_VISIBLE_DEVICES     the GPUs that this process sees, as CUDA reads it
"""

from __future__ import annotations

import os
import types
import uuid
import warnings

MEMORY = 8 << 30
BAD_FORK = ("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
            "use the 'spawn' start method")


class Driver:
    """One process's. Its methods have the names of what torch calls."""

    def __init__(self) -> None:
        self.started = False  # whether cuInit was called here, or in a parent before it forked
        self.bad_fork = False
        self.initialized = False  # whether torch works with GPUs
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.bad_fork = self.started

    def visible(self) -> list[int]:
        """The machine's numbers of the GPUs that this process sees."""
        everything = list(range(int(os.environ["FAKE_CUDA"])))
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is None:
            return everything
        return [int(number) for number in named.split(",") if number.strip() and int(number) in everything]

    def start(self) -> bool:
        """cuInit: whether CUDA can be used. From now on forks are bad."""
        self.started = True
        return not self.bad_fork and not os.environ.get("FAKE_CUDA_BROKEN")

    # -------- torch._C, and torch.cuda

    def _cuda_getDeviceCount(self) -> int:
        if self.start():
            return len(self.visible())
        warnings.warn("CUDA initialization: Unexpected error from cudaGetDeviceCount()", stacklevel=3)
        return 0

    def _cuda_isInBadFork(self) -> bool:
        return self.bad_fork

    def _device_count_nvml(self) -> int:
        return -1 if os.environ.get("FAKE_CUDA_NVML") == "0" else len(self.visible())

    def is_available(self) -> bool:
        if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1":
            return self.device_count() > 0
        return self._cuda_getDeviceCount() > 0

    def device_count(self) -> int:
        if self.initialized and not self.bad_fork:
            return self._cuda_getDeviceCount()
        listed = self._device_count_nvml()
        return self._cuda_getDeviceCount() if listed < 0 else listed

    def is_initialized(self) -> bool:
        return self.initialized and not self.bad_fork

    def _lazy_init(self) -> None:
        if self.is_initialized():
            return
        if self.bad_fork:
            raise RuntimeError(BAD_FORK)
        if not self.start() or not self.visible():
            raise RuntimeError("No CUDA GPUs are available")
        self.initialized = True

    def get_device_properties(self, index: int) -> types.SimpleNamespace:
        self._lazy_init()
        number = self.visible()[index]
        return types.SimpleNamespace(
            name="fake CUDA", total_memory=MEMORY, major=9, minor=0, uuid=str(uuid.UUID(int=number + 1)),
            pci_domain_id=0, pci_bus_id=0x10 * (number + 1), pci_device_id=0)
