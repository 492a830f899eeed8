"""A fault on one of two hosts ends all ranks, with a message that names it, and nothing is left."""

from __future__ import annotations

import re
import signal
import time

import pytest

import threed.launcher.agents  # noqa: F401  (imported before the runs fork)
from tests.cluster.cluster import FOR_EVER
from tests.cluster.conftest import Clock
from tests.cluster.hosts import missing
from tests.running import losses

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.mark.parametrize(("number", "siblings", "rank"), [(1, 1, 1), (0, 2, 1), (1, 2, 3)])
def test_a_rank_is_killed(number, siblings, rank, two, measured):
    """With two ranks a host the second one: the first, which is no echo, lives on beside it."""
    runs = two.start(*FOR_EVER, env={"GPUS_PER_NODE": str(siblings)})
    two.reach(20)
    clock, words = Clock(), f"rank {rank} on host{number + 1} was killed by SIGKILL"
    runs[number].ranks()[-1].kill()
    for run in runs:
        run.wait_for(words)
    seconds = clock.seconds
    assert two.end() == [137, 137], two.output
    assert two.said(words), two.output
    of = f" ({siblings} ranks a host)" if siblings > 1 else ""
    measured(f"SIGKILL of rank {rank} on host {number + 1}{of}: until it is named", f"`{words}` on both",
             seconds)
    measured("... until all have ended", "both end with status 137", clock.seconds)


@pytest.mark.parametrize("number", [0, 1])
def test_an_agent_is_killed(number, two, measured):
    """No rank trains on unseen, and the folder is free."""
    runs = two.start(*FOR_EVER)
    two.reach(20)
    clock = Clock()
    runs[number].signal()
    two.gone(60)
    seconds, other = clock.seconds, runs[1 - number]
    lost, words = f"rank {number} on host{number + 1}", "the connection to another rank is gone"
    assert other.wait(5) == 1 and re.search(rf"with ({lost}|all ranks): {words}", other.output), two.output
    assert two.said("threed: ", other), two.output
    measured(f"SIGKILL of host {number + 1}'s agent", f"all end, no orphan; `with {lost}: {words}`", seconds)
    two.runs.clear()
    two.start("train.steps=21", "train.resume=never")
    assert two.end() == [0, 0], two.output


@pytest.mark.parametrize("fault", ["off", "cut"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_host_is_off_or_cut_off(fault, number, two, measured):
    runs = two.start(*FOR_EVER, "run.timeout_s=120")
    two.reach(20)
    clock = Clock()
    two.hosts[number].off() if fault == "off" else two.hosts[number].link(False)
    two.gone(60)
    seconds, other = clock.seconds, runs[1 - number]
    words = (
        "has gone: the store of the run has not answered for 20 s"
        if number == 0
        else "host2 has gone: no sign of life for 30 s"
    )
    assert other.wait(5) == 1 and two.said(words, other), two.output
    measured(f"host {number + 1} {'off' if fault == 'off' else 'cut off for ever'}", f"all end; `{words}`",
             seconds)


def test_the_link_is_down_for_a_moment(two, alone, measured):
    """Five seconds are not noticed."""
    first, _ = two.start(*FOR_EVER)
    two.reach(20)
    two.hosts[1].link(False)
    time.sleep(5)
    two.hosts[1].link(True)
    clock = Clock()
    two.reach(two.step + 20)
    measured("link down for 5 s", "goes on; seconds until 20 further steps were done", clock.seconds)
    first.signal(signal.SIGTERM)
    assert two.end() == [0, 0], two.output
    got = losses(two.folder / "run")
    assert [got[step] for step in range(1, 31)] == [alone[2][step] for step in range(1, 31)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_requested_stop(number, two, measured):
    """SIGUSR1 to one host's agent: all save and go on. SIGTERM: all save, and end with status 0."""
    runs = two.start(*FOR_EVER)
    two.reach(20)
    runs[number].signal(signal.SIGUSR1)
    runs[0].wait_for("saved ")
    two.reach(two.step + 5)
    clock = Clock()
    runs[number].signal(signal.SIGTERM)
    assert two.end(timeout_s=10) == [0, 0], two.output
    seconds = clock.seconds
    assert two.said("stopped on request after step", runs[0]), two.output
    assert (two.folder / "run" / "checkpoints" / f"step-{two.step:08d}").exists(), two.output
    measured(f"SIGTERM to host {number + 1}'s agent", "saved, both end with status 0", seconds)
