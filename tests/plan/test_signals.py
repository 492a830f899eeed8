"""Signals that ask a run to stop or to save, and what the documentation says of the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from threed.base.requests import Requests, StopRequests
from threed.base.signals import ASKS, SAVES, STOPS


@pytest.fixture
def requests():
    before = {number: signal.getsignal(number) for number in ASKS}
    yield Requests()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ASKS)
def test_what_a_rank_is_asked_for(number, requests):
    os.kill(os.getpid(), number)
    assert requests.take() == (number in STOPS, number in SAVES)


def test_what_batch_systems_send():
    """Slurm, PBS and HTCondor: SIGTERM; LSF: SIGINT, SIGTERM, and SIGUSR2 at a limit; Grid Engine: SIGUSR1,
    SIGUSR2 and SIGXCPU; submitit: SIGUSR2; a lost terminal: SIGHUP."""
    assert {number.name for number in STOPS} == {"SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU"}
    assert {number.name for number in SAVES} == {"SIGUSR1", "SIGUSR2"}


def test_the_kernel_repeats_a_limit_of_processor_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr("threed.base.requests.time.monotonic", lambda: now)
    asked, taken = StopRequests(), []
    for number in (signal.SIGXCPU, signal.SIGXCPU, signal.SIGTERM, signal.SIGXCPU):
        taken.append(asked.again(number))
        now += 1.5
    assert taken == [True, False, True, False] and asked.times == 2


def test_each_signal_is_documented():
    """Where it saves, it is named as one that does."""
    text = (Path(__file__).parents[2] / "docs/faults.md").read_text()
    rows = [line for line in text.partition("## Stop")[2].partition("\n\nA request")[0].splitlines()
            if line.startswith("| SIG")]
    effects = {name: row for row in rows for name in row.split("|")[1].replace(",", " ").split()
               if name.startswith("SIG")}
    assert all("ends after the step under way" in effects[number.name] for number in STOPS)
    assert all("saves a checkpoint and continues" in effects[number.name] for number in SAVES)
    assert "all others" in rows[-1] and "ends the run at once" in rows[-1]
    assert not {"SIGQUIT", "SIGTSTP", "SIGPIPE", "SIGALRM", "SIGKILL"} - effects.keys()
