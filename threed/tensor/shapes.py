"""Shapes: tensors that have a shape, a dtype and a device, and no values and no memory."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode


class Shapes(FakeTensorMode):
    """Within this mode, new tensors have no memory. As torch's own mode, but it asks nothing about GPUs:
    torch's asks each time whether there is one, and a process that has asked cannot fork ranks that use it
    (see `forks`). What is measured here is on the CPU."""

    avoid_device_init = False  # where there is a GPU, torch's mode answers the same
