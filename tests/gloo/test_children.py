"""Processes that a launcher forks: signals that come early, ranks that cannot be killed, hang-ups that nohup
ignores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from threed.base import signals as early
from threed.base.requests import Requests
from threed.launcher import processes as children


@pytest.fixture
def handlers():
    """Handlers as they were, afterwards."""
    before = {number: signal.getsignal(number) for number in early.ASKS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_request_that_comes_before_a_rank_can_answer(handlers):
    """It waits; the launcher's own handler does not run in the rank."""
    early.handle(early.ASKS, lambda *_: os._exit(9))

    def body() -> int:
        time.sleep(0.5)  # the signal comes
        requests = Requests()
        return 42 if requests.stop and not requests.save else 7

    rank = children.CONTEXT.Process(target=children.be_rank, args=(os.getpid(), body))
    with children.signals_wait():
        children.start([rank])
    children.pass_on([rank], signal.SIGTERM)
    rank.join(20)
    assert rank.exitcode == 42
    children.pass_on([rank], signal.SIGTERM)  # it has ended: nobody is met


class Stuck:
    """A process in the kernel: SIGKILL waits."""

    name, pid, exitcode = "rank 3", 77, None

    def kill(self) -> None: ...
    def join(self, timeout: float) -> None: ...


def test_what_was_never_started():
    """Forking has failed for some."""
    ranks = [children.CONTEXT.Process(target=children.be_rank, args=(os.getpid(), lambda: time.sleep(60)))
             for _ in range(2)]
    with children.signals_wait():
        children.start(ranks[:1])
    children.end_all(ranks)
    assert ranks[0].exitcode == -signal.SIGKILL


def test_a_rank_that_cannot_be_killed(monkeypatch, capfd):
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(children.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        children.end_all([Stuck()], limit_s=0.0)
    assert ended.value.code == 1
    printed = capfd.readouterr().err
    assert "rank 3 (process 77) cannot be killed: stuck in the kernel" in printed


def test_whom_to_blame():
    """Who was killed, before who ended of it."""
    assert children.first_failure([None, 0, 1, -11]) == (3, -11) and children.first_failure([0, None]) is None
    assert children.ended_by(-11) == ("was killed by SIGSEGV", "SIGSEGV", 139)
    assert children.ended_by(-9) == ("was killed by SIGKILL", None,
                                     137), "from outside: it says nothing about the run"
    assert children.ended_by(3)[1:] == ("exit status 3", 3)


PROGRAM = """
import os, signal, sys
sys.argv = ["threed", "train"]
from threed.base.signals import begin
from threed.base.requests import Requests
begin()
requests = Requests()
os.kill(os.getpid(), signal.SIGHUP)
print(requests.stop)
"""


@pytest.mark.parametrize("nohup", [False, True])
def test_a_hang_up(nohup):
    """It asks to stop, but not under nohup."""
    argv = [*(["nohup"] if nohup else []), sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not nohup)


def test_imports_leave_nothing(tmp_path):
    """Not even where a process is killed after them."""
    program = "import os, sys, threed.launcher.local; assert 'megatron.core' in sys.modules; os._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
