"""Small programs for a device, each with one fault or none; what a fake GPU says of them is in
test_stand_in.py. They run in a process with fake GPUs."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from tests.fakecuda import shim
from threed.comm.lanes import copy, so_far


def gradients() -> list[float]:
    """The largest differences between a CPU's numbers and a device's: output, gradients."""
    torch.manual_seed(1)
    x, w = torch.randn(4, 8), torch.randn(16, 8)
    made = []
    for device in ("cpu", "cuda"):
        weight = w.to(device, copy=True).requires_grad_()
        out = torch.nn.functional.linear(x.to(device), weight)
        torch.nn.functional.gelu(out).square().mean().backward()
        assert weight.grad is not None
        made.append((out.detach().cpu(), weight.grad.cpu()))
    return [(a - b).abs().max().item() for a, b in zip(*made, strict=True)]


def two_streams(waits: bool) -> float:
    a, other = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    a.fill_(1)
    if waits:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        total = a.sum()
    if not waits:
        return math.nan
    torch.cuda.current_stream().wait_stream(other)
    return total.item()


def disjoint_parts() -> None:
    a, other = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    a[:500].fill_(1)
    with torch.cuda.stream(other):
        a[500:].fill_(2)


def reuse(recorded: bool) -> bool:
    """Whether memory that another stream reads was handed out again."""
    a, other = torch.ones(5000, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        a.sum()
        if recorded:
            a.record_stream(other)
    address = a.data_ptr()
    del a
    again = torch.ones(5000, device="cuda")
    return again.data_ptr() == address


def freed_memory() -> bool:
    """Whether memory that is made without content is no number."""
    address = torch.ones(100, device="cuda").data_ptr()
    again = torch.empty(100, device="cuda")
    return again.data_ptr() == address and bool(again.isnan().all().item())


def host_touches_device_memory() -> bytes:
    return ctypes.string_at(torch.ones(4, device="cuda").data_ptr(), 4)


def copy_down(waits: bool) -> float:
    """What the host reads of a copy."""
    target = torch.zeros(8, pin_memory=True)
    target.copy_(torch.ones(8, device="cuda"), non_blocking=True)
    if waits:
        so_far(torch.device("cuda")).block()
    return target.sum().item()


def copy_up(waits: bool) -> None:
    source = torch.ones(8, pin_memory=True)
    torch.empty(8, device="cuda").copy_(source, non_blocking=True)
    if waits:
        so_far(torch.device("cuda")).block()
    source.zero_()
    torch.cuda.synchronize()


def freed_pinned_memory() -> float:
    """torch keeps pinned memory until its copies have ended."""
    device = torch.full((8,), 3.0).pin_memory().to("cuda", non_blocking=True)
    torch.zeros(8).pin_memory()
    return device.sum().item()


def held_copy() -> bool:
    a, other = torch.ones(5000, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        copy(torch.empty(5000, pin_memory=True), a)
    address = a.data_ptr()
    del a
    return torch.ones(5000, device="cuda").data_ptr() == address


def devices_mixed() -> None:
    torch.ones(4, device="cuda:0").add(torch.ones(4, device="cuda:1"))


def host_and_device_mixed() -> None:
    torch.stack([torch.ones(4, device="cuda"), torch.ones(4)])


def time_of_an_event_that_nobody_waited_for() -> None:
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    first.elapsed_time(second)


def event_comes_late() -> list[bool]:
    event = torch.cuda.Event()
    event.record()
    return [event.query() for _ in range(6)]


def no_such_device() -> None:
    torch.cuda.set_device(16)


class Recording:
    """A graph of a stream that is not the default one."""

    def __init__(self, pool: Any = None):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        self.graph, self._pool = torch.cuda.CUDAGraph(), pool

    def __enter__(self) -> torch.cuda.CUDAGraph:
        self.graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        return self.graph

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.graph.capture_end()


def replayed() -> list[float]:
    """A graph adds three times an input to a sum: the sum while it is recorded, and after each replay."""
    recording = Recording()
    given, total = torch.ones(16, device="cuda"), torch.zeros((), device="cuda")
    with recording as graph:
        total.add_((given * 3).sum())
    said = [total.item()]
    for value in (1, 1, 2):
        given.fill_(value)
        graph.replay()
        said.append(total.item())
    return said


def pool_is_reused() -> tuple[bool, float]:
    """Whether a graph of a pool gets the memory that an earlier one has freed, and what it makes there."""
    recording = Recording()
    given = torch.ones(16, device="cuda")
    with recording as first:
        a = given * 2
        total = a.sum()
    address = a.data_ptr()
    del a
    second = torch.cuda.CUDAGraph()
    second.capture_begin(pool=first.pool(), capture_error_mode="relaxed")
    b = total + given
    second.capture_end()
    first.replay()
    second.replay()
    return b.data_ptr() == address, b[0].item()


def reads_what_was_freed() -> float:
    """A graph that reads the memory of the one before, after it was freed there: no number."""
    recording = Recording()
    given = torch.ones(16, device="cuda")
    with recording as first:
        a = given * 2
    b = torch._C._construct_storage_from_data_pointer(a.untyped_storage().data_ptr(), a.device, a.nbytes)
    view = torch.empty(0, device="cuda").set_(b, 0, a.shape, a.stride())  # pyright: ignore
    del a
    second, out = torch.cuda.CUDAGraph(), torch.zeros(16, device="cuda")
    second.capture_begin(pool=first.pool(), capture_error_mode="relaxed")
    out.copy_(view)
    second.capture_end()
    first.replay()
    second.replay()
    return out.sum().item()


def race_of_a_replay() -> None:
    recording = Recording()
    given = torch.ones(16, device="cuda")
    with recording as graph:
        given.add_(1)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    graph.replay()
    with torch.cuda.stream(other):
        given.sum()


def recorded_on_the_default_stream() -> None:
    torch.cuda.CUDAGraph().capture_begin(capture_error_mode="relaxed")


def number_read_in_a_graph() -> None:
    with Recording():
        torch.ones(4, device="cuda").sum().item()


def shape_by_data_in_a_graph() -> None:
    a = torch.ones(4, device="cuda")
    with Recording():
        a[a > 0]


def pageable_copy_in_a_graph() -> None:
    with Recording():
        torch.ones(4).to("cuda")


def host_waits_in_a_graph() -> None:
    with Recording():
        torch.cuda.synchronize()


def outside_event_in_a_graph() -> None:
    outside = torch.cuda.Stream()
    with Recording():
        torch.cuda.current_stream().wait_event(outside.record_event())


def spoilt_graph_ends() -> None:
    recording = Recording()
    recording.graph.capture_begin(capture_error_mode="relaxed")
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        recording.graph.capture_end()


def counted() -> dict[str, int]:
    shim.installed.reset()
    target, a = torch.zeros(8, pin_memory=True), torch.ones(8, device="cuda")
    target.copy_(a, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    a.copy_(target)
    a.sum().item()
    a.cpu()
    return shim.installed.counts()
