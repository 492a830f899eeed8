"""Lanes: jobs wait for what they name, and for nothing else; a failure stops a lane. CUDA's are tried on a
double, which records what each stream does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from threed.comm import lanes
from threed.comm.lanes import DONE, CopyLane, Handle, Lane, StreamLane, ThreadLane, in_order

CPU = torch.device("cpu")


@pytest.fixture
def lane():
    lane = ThreadLane("test", CPU)
    yield lane
    lane.close()


def test_jobs_run_in_order(lane):
    said: list[int] = []
    for number in range(20):
        last = lane.submit(lambda number=number: said.append(number))
    last.wait()
    assert said == list(range(20)) and last.done()


def test_a_lane_waits_for_a_lane(lane):
    """Not so the thread that submits."""
    other, begin, said = ThreadLane("other", CPU), threading.Event(), []
    first = other.submit(lambda: begin.wait(10) and said.append("first"))
    then = lane.submit(lambda: said.append("then"), [first])
    assert not then.done() and not said
    begin.set()
    then.wait()
    assert said == ["first", "then"]
    other.close()


def test_after_a_failure_nothing_runs(lane):
    """A later job may need what the failed one should have made. Whoever waits hears of it, on any lane."""
    other, said = ThreadLane("other", CPU), []

    def fail() -> None:
        raise OSError("the disk is gone")

    failed = lane.submit(fail)
    handles = [lane.submit(lambda: said.append(1)), other.submit(lambda: said.append(2), [failed])]
    for handle in (failed, *handles):
        with pytest.raises(OSError, match="the disk is gone"):
            handle.wait()
        assert handle.done()
    assert not said
    other.close()


def test_a_lane_without_peers_runs_at_once():
    said: list[str] = []
    handle = Lane(CPU).submit(lambda: said.append("job"), [Handle(lambda: said.append("waited"))])
    assert said == ["waited", "job"] and handle is DONE


# ---------------------------------------------------------------- a double of CUDA


class Stream:
    """Work that has been issued, in order: names of jobs, and the events that are waited for."""

    def __init__(self, device=None, priority: int = 0) -> None:
        self.issued: list[str] = []

    def wait_event(self, event: Event) -> None:
        assert event.after is not None, "an event is waited for that nobody has recorded"
        self.issued.append(f"wait({event.after})")


class Event:
    def __init__(self) -> None:
        self.after: str | None = None  # the last work on the stream that recorded it

    def record(self) -> None:
        issued = Cuda.current().issued
        self.after = issued[-1] if issued else "nothing"

    def synchronize(self) -> None:
        Cuda.blocked.append(str(self.after))

    def query(self) -> bool:
        return False


class Cuda:
    """torch.cuda, as lanes use it."""

    Stream, Event = Stream, Event
    blocked: ClassVar[list[str]] = []  # what the host waited for
    _local = threading.local()
    main = Stream()

    @classmethod
    def current(cls) -> Stream:
        return getattr(cls._local, "stream", cls.main)

    current_stream = current

    @classmethod
    @contextmanager
    def stream(cls, stream: Stream):
        before = cls.current()
        cls._local.stream = stream
        yield
        cls._local.stream = before

    devices: ClassVar[list[torch.device]] = []  # that threads have taken

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        assert threading.current_thread() is not threading.main_thread()
        cls.devices.append(device)

    @classmethod
    def on(cls, stream: Stream) -> None:
        """This thread's work goes to the stream from now on."""
        cls._local.stream = stream


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(lanes.torch, "cuda", Cuda)
    Cuda.main, Cuda.blocked, Cuda.devices, Cuda._local = Stream(), [], [], threading.local()
    return torch.device("cuda")


def work(name: str):
    return lambda: Cuda.current().issued.append(name)


def streams(lane: StreamLane | CopyLane) -> list[str]:
    stream: Any = lane._stream if isinstance(lane, StreamLane) else lane._stream._stream
    return stream.issued


def test_a_stream_waits_for_what_a_job_names(cuda):
    """And not for all that the computation has issued."""
    work("forward")()
    forward = lanes.so_far(cuda)
    work("backward")()
    dp, d2h = StreamLane(cuda), CopyLane("d2h", cuda)
    reduce = dp.submit(work("reduce"), [forward])
    down = d2h.submit(work("down"), [reduce])
    assert streams(dp) == ["wait(forward)", "reduce"] and streams(d2h) == ["wait(reduce)", "down"]
    assert Cuda.main.issued == ["forward", "backward"] and not Cuda.blocked
    down.wait()
    assert Cuda.main.issued == ["forward", "backward", "wait(down)"] and not Cuda.blocked
    d2h.close()


def test_the_host_waits_for_a_device_in_a_lanes_thread(cuda):
    """The optimizer's step on the host needs the copy of the gradient."""
    d2h, host, done = CopyLane("d2h", cuda), ThreadLane("host", cuda), []
    down = d2h.submit(work("down"))
    host.submit(lambda: done.append(list(Cuda.blocked)), [down]).wait()
    assert done == [["down"]]
    host.close()
    d2h.close()


def test_a_copy_that_waits_for_the_host_is_issued_by_a_thread(cuda):
    """What comes after it on its lane is issued after it."""
    read, h2d, begin = ThreadLane("read", cuda), CopyLane("h2d", cuda), threading.Event()
    fetched = read.submit(lambda: begin.wait(10))
    up, then = h2d.submit(work("up"), [fetched]), h2d.submit(work("then"))
    assert streams(h2d) == [] and not up.ready()
    begin.set()
    then.wait()
    assert streams(h2d) == ["up", "then"] and Cuda.main.issued == ["wait(then)"]
    assert h2d.submit(work("last")).ready() and streams(h2d)[-1] == "last"
    read.close()
    h2d.close()


def test_a_rank_alone_works_where_it_computes(cuda):
    """Whoever needs that work waits for it, though nobody else does."""
    alone, d2h = Lane(cuda), CopyLane("d2h", cuda)
    d2h.submit(work("down"), [alone.submit(work("reduce"))])
    assert Cuda.main.issued == ["reduce"] and streams(d2h) == ["wait(reduce)", "down"]
    d2h.close()


def test_a_thread_comes_after_the_one_that_it_serves(cuda):
    """It reads what that one has written, on the same GPU; and what it writes is there when it has ended."""
    work("step")()
    write = in_order(cuda, lambda: (work("down")(), "read")[1])
    work("forward")()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (Cuda.on(Stream()), write(), Cuda.blocked)[1:]).result() == (
            "read", ["step", "down"])
    assert Cuda.devices == [cuda] and Cuda.main.issued == ["step", "forward"]


def test_a_thread_on_a_cpu_has_nothing_to_wait_for():
    assert in_order(CPU, lambda: 3)() == 3
