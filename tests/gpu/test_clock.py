"""Marks on a GPU: events in the stream, read after the step."""

from __future__ import annotations

import time

import pytest
import torch

from threed.devices import device_of
from threed.devices.clock import HostClock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_marks_tell_when_work_was_done():
    """The host runs ahead; the marks are where the work was, in order, and are used again."""
    clock = device_of(torch.device("cuda")).clock()
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.monotonic()
        marks = [clock.mark()]
        for _ in range(50):
            x = (x @ x).clamp(-1, 1)
            marks.append(clock.mark())
        host_s = time.monotonic() - started
        behind = not clock.passed(marks[-1])
        with clock.reader(marks[0], marks[-1]) as since:
            times = [since(mark) for mark in marks]
        assert times == sorted(times) and times[0] == 0 and clock.passed(marks[-1])
        assert times[-1] <= time.monotonic() - started + 1e-3
    assert behind and host_s < times[-1]
    assert not isinstance(clock, HostClock) and len(clock._spare) == 51  # pyright: ignore[reportAttributeAccessIssue]
