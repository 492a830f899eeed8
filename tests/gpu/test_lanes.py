"""Lanes on a GPU: streams wait for what a job names, and the host waits for neither."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from threed.comm.lanes import CopyLane, StreamLane, ThreadLane, copy, so_far

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LONG = 200_000_000  # cycles: a tenth of a second


@pytest.fixture
def device():
    return torch.device("cuda", 0)


def test_a_stream_waits_for_the_computation_that_a_job_names(device):
    """And for no later one."""
    lane, x, y = StreamLane(device), torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(LONG)
    x.fill_(1)
    needed = so_far(device)
    torch.cuda._sleep(10 * LONG)
    begin = time.monotonic()
    handle = lane.submit(lambda: y.copy_(x), [needed])
    issued_s = time.monotonic() - begin
    handle.block()
    copied_s = time.monotonic() - begin
    torch.cuda.synchronize()
    assert y.eq(1).all() and issued_s < 0.02
    assert copied_s < 0.5 * (time.monotonic() - begin), "the copy has waited for later work"


def test_through_the_host_and_back(device):
    """Down, a step on the host, and up again, each on its lane: what comes back is what was stepped."""
    down, up, host = CopyLane("d2h", device), CopyLane("h2d", device), ThreadLane("host", device)
    x, away = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, pin_memory=True)
    back = torch.zeros_like(x)
    torch.cuda._sleep(LONG)
    x.fill_(1)
    lowered = down.submit(lambda: copy(away, x), [so_far(device)])
    stepped = host.submit(lambda: away.add_(1), [lowered])
    raised = up.submit(lambda: copy(back, away), [stepped])
    raised.wait()
    assert (back * 2).eq(4).all()
    for lane in (down, up, host):
        lane.close()


def test_a_copy_that_waits_does_not_hold_up_the_host(device):
    read, up, begin = ThreadLane("read", device), CopyLane("h2d", device), threading.Event()
    away, x = torch.ones(1 << 20, pin_memory=True), torch.zeros(1 << 20, device=device)
    fetched = read.submit(lambda: begin.wait(10))
    raised = up.submit(lambda: copy(x, away), [fetched])
    assert not raised.done()
    begin.set()
    raised.wait()
    assert x.eq(1).all()
    read.close()
    up.close()
