"""Two hosts (network namespaces), a torchrun on each: hosts that go off or freeze, agents and ranks that are
killed, people who stop one of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil

from tests.chaos.faults import kind
from tests.chaos.faults.processes import STOPPED
from tests.chaos.sister import STEPS, Sister
from tests.chaos.trial import Fault, Instant, Trial, send

SISTERS = ("dp2", "dp2 zero2", "dp2 zero3", "pp2", "tp2 pp2", "dp2 pp2 zero2")  # half of the ranks on each
TWO_EACH = ("tp2 pp2", "dp2 pp2 zero2")
STOP_S = 10.0  # within which all have saved and ended, after one launcher was asked to stop
# run.timeout_s: less than the silence after which a host has gone, or more
SHORT, LONG = 20, 45


def instant(trial: Trial) -> Instant:
    """A random moment; one in eight about the end, when some have done their work."""
    if trial.rng.random() < 0.125:
        return Instant(STEPS, trial.rng.uniform(0.0, 1.0))
    return trial.instant()


def once(after: Instant, do: Callable[[Sister], object]) -> Callable[[Trial, Sister], None]:
    """Act at an instant of the first run, if it lasts until then."""
    def act(trial: Trial, run: Sister) -> None:
        if trial.wait(run, after):
            trial.strike()
            do(run)

    return act


def mend(trial: Trial) -> None:
    assert trial.hosts is not None
    for host in trial.hosts.all:
        host.link(True)


def limits(trial: Trial) -> None:
    """How long nodes wait for each other, and ranks."""
    trial.more += ["run.connect_timeout_s=15", f"run.timeout_s={trial.rng.choice([SHORT, LONG])}"]


def gone(which: int, after: Instant) -> str:
    """What the other host says of one that has gone without a word."""
    if after.step == STEPS:  # the work may be done
        return ""
    seen = (r"host2 has gone: no sign of life" if which else
            r"rank 0's host, or the launcher there, has gone: the store|cannot meet the others")
    hang = rf"no answer within run\.timeout_s=.*on host{which + 1}"
    early = r"1 of 2 nodes came within|node 0 did not answer|did not come|has gone" if not after.step else ""
    return "|".join(filter(None, [seen, hang, early]))


@kind("a host: off", 2, sisters=SISTERS)
def off(trial: Trial) -> Fault:
    """It comes back once the other has given up."""
    which, after = trial.rng.randrange(2), instant(trial)
    host = trial.use_hosts()[which]
    limits(trial)
    return Fault(f"{host.name} goes off {after}", gone(which, after), act=once(after, lambda run: host.off()),
                 between=mend)


@kind("a host: its processes are killed", 1, sisters=SISTERS)
def killed(trial: Trial) -> Fault:
    """Its agent and its ranks at once; its kernel still answers."""
    which, after = trial.rng.randrange(2), instant(trial)
    host = trial.use_hosts()[which]
    limits(trial)
    return Fault(f"SIGKILL of all processes of {host.name} {after}", broken(which, after),
                 act=once(after, lambda run: host.kill_all()))


@kind("a host: frozen", 1, sisters=SISTERS)
def frozen(trial: Trial) -> Fault:
    """Its processes stop, and are killed once the other has given up."""
    which, after = trial.rng.randrange(2), instant(trial)
    host = trial.use_hosts()[which]
    limits(trial)

    def act(trial: Trial, run: Sister) -> None:
        if not trial.wait(run, after):
            return
        trial.strike()
        for process in host.processes():
            send(process.pid, signal.SIGSTOP)
        trial.until(run, lambda: not run.launchers[1 - which].is_alive())
        if run.launchers[1 - which].is_alive():
            trial.hangs(run)
        host.kill_all()

    return Fault(f"SIGSTOP of all processes of {host.name} {after}", gone(which, after), act=act)


def broken(which: int, after: Instant) -> str:
    """What the other host says of one whose processes have ended without a word."""
    if after.step == STEPS:
        return ""
    lost = "rank 0's host, or the launcher there, has gone|the store in which all ranks meet has gone"
    words = [rf"the connection to another rank is gone|host{which + 1} has gone", "" if which else lost]
    early = [] if after.step else ["1 of 2 nodes came within", "cannot meet the others", "did not come",
                                      "node 0 did not answer"]
    return "|".join(filter(None, [*words, *early]))


@kind("a host: its agent is killed", 3, sisters=SISTERS)
def agent(trial: Trial) -> Fault:
    """Its ranks end with it."""
    which, after = trial.rng.randrange(2), instant(trial)
    trial.use_hosts()
    limits(trial)
    return Fault(f"SIGKILL of host{which + 1}'s agent {after}", broken(which, after),
                 act=once(after, lambda run: send(run.pids[which], signal.SIGKILL)))


@kind("a host: its agent is killed and started again", 2, sisters=SISTERS)
def agent_again(trial: Trial) -> Fault:
    """As by a job manager; the other agent waits for it, where it serves the store."""
    which, after = trial.rng.randrange(2), instant(trial)
    wait_s = trial.rng.choice([0.0, 1.0, 5.0])
    trial.use_hosts()
    trial.restarts = True
    limits(trial)

    def kill(run: Sister) -> None:
        send(run.pids[which], signal.SIGKILL)
        trial.sleep(run, wait_s)
        run.start_again(which)

    return Fault(f"SIGKILL of host{which + 1}'s agent {after}, started again {wait_s:g} s later",
                 broken(which, after) if after.step else "", act=once(after, kill))


@kind("a host: a rank is killed", 3, sisters=SISTERS)
def rank(trial: Trial) -> Fault:
    return _kill_rank(trial)


@kind("a host: one of its two ranks is killed", 3, sisters=TWO_EACH)
def one_of_two(trial: Trial) -> Fault:
    return _kill_rank(trial)


def _kill_rank(trial: Trial) -> Fault:
    """Both hosts say which it was, once ranks have met."""
    which, after, share = trial.rng.randrange(2), instant(trial), trial.rng.random()
    trial.use_hosts()
    limits(trial)

    def kill(run: Sister) -> None:
        ranks = _children(run.pids[which])
        if ranks:
            send(ranks[int(share * len(ranks))].pid, signal.SIGKILL)

    def act(trial: Trial, run: Sister) -> None:
        if not trial.wait(run, after):
            return
        trial.until(run, lambda: _children(run.pids[which]))
        if run.alive():
            trial.strike()
            kill(run)

    return Fault(f"SIGKILL of a rank of host{which + 1} {after}",
                 rf"(rank \d+|a rank) on host{which + 1} was killed by SIGKILL" if after.step < STEPS else "",
                 act=act, everywhere=bool(after.step))


def _children(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
        return sorted((child for child in children if child.status() != psutil.STATUS_ZOMBIE),
                      key=lambda child: child.pid)
    except psutil.NoSuchProcess:
        return []


@kind("a host: SIGTERM to its agent", 3, sisters=SISTERS)
def stop(trial: Trial) -> Fault:
    """All save, and end with status 0."""
    which, after = trial.rng.randrange(2), trial.instant()
    number = trial.rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    trial.use_hosts()
    limits(trial)

    def act(trial: Trial, run: Sister) -> None:
        if not trial.wait(run, after):
            return
        trial.strike()
        begin = time.monotonic()
        send(run.pids[which], number)
        if not after.step:
            return
        if trial.sleep(run, STOP_S):
            trial.verdicts["late"] = f"still running {time.monotonic() - begin:.0f} s after {number.name}"
        elif run.statuses() != [0, 0]:
            trial.verdicts["status"] = f"exit statuses {run.statuses()} after {number.name}, not 0"

    return Fault(f"{number.name} to host{which + 1}'s agent {after}", STOPPED, act=act)
