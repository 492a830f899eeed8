"""Two hosts (network namespaces) and what lies between them: cables that are pulled, packets that are lost,
hosts that go off."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable

from tests.chaos.faults import kind
from tests.chaos.sister import Sister
from tests.chaos.trial import Fault, Instant, Skip, Trial, send

SISTERS = ("dp2", "dp2 zero2", "dp2 zero3", "pp2", "tp2 pp2")  # half of the ranks on each host
GONE = r"has gone"


def _once(after: Instant, do: Callable[[Sister], object]) -> Callable[[Trial, Sister], None]:
    """Act at an instant of the first run, if it lasts until then."""
    def act(trial: Trial, run: Sister) -> None:
        if trial.wait(run, after):
            trial.strike()
            do(run)

    return act


def _mend(trial: Trial) -> None:
    assert trial.hosts is not None
    for host in trial.hosts.all:
        host.link(True)


@kind("link: down for a while", 2, sisters=SISTERS)
def down_for_a_while(trial: Trial) -> Fault:
    """Too short to be noticed; about as long as limits are; longer: both sides give up, and meet again where
    they may restart."""
    host = trial.rng.choice(trial.use_hosts())
    after, seconds = trial.instant(), trial.rng.choice([0.3, 2.0, 5.0, 15.0, 38.0])
    trial.more.append("run.connect_timeout_s=15")

    def pull(run: Sister) -> None:
        host.link(False)
        trial.sleep(run, seconds)
        host.link(True)

    return Fault(f"{host.name}'s cable is pulled {after}, for {seconds:.1f} s", act=_once(after, pull),
                 between=_mend)


@kind("link: down for ever", 1, sisters=SISTERS)
def down(trial: Trial) -> Fault:
    host, after = trial.rng.choice(trial.use_hosts()), trial.instant()
    trial.more.append("run.connect_timeout_s=15")

    return Fault(f"{host.name}'s cable is pulled {after}, until both have ended",
                 rf"{GONE}|did not answer|no answer within",
                 act=_once(after, lambda run: host.link(False)), between=_mend)


@kind("link: lost packets", 1, sisters=SISTERS)
def lost_packets(trial: Trial) -> Fault:
    percent = trial.rng.choice([1, 5, 15])
    if shutil.which("nft") is None:
        raise Skip("nft (package nftables) is missing: no packet is lost")
    for host in trial.use_hosts():
        host.lossy(percent)
    return Fault(f"{percent}% of all packets are lost", act=lambda trial, run: trial.strike())


@kind("link: slow", 1, sisters=SISTERS)
def slow(trial: Trial) -> Fault:
    host, rate = trial.rng.choice(trial.use_hosts()), trial.rng.choice(["1mbit", "4mbit"])
    host.slow(rate)
    return Fault(f"{host.name} sends {rate}/s", act=lambda trial, run: trial.strike())


@kind("a host: off", 1, sisters=SISTERS)
def off(trial: Trial) -> Fault:
    """It comes back once the other has given up."""
    host, after = trial.rng.choice(trial.use_hosts()), trial.instant()
    trial.more.append("run.connect_timeout_s=15")

    return Fault(f"{host.name} goes off {after}", rf"{GONE}|did not answer|came within|no answer within",
                 act=_once(after, lambda run: host.off()), between=_mend)


@kind("a host: its launcher is killed", 1, sisters=SISTERS)
def launcher(trial: Trial) -> Fault:
    which, after = trial.rng.randrange(2), trial.instant()
    trial.use_hosts()
    trial.more.append("run.connect_timeout_s=15")

    return Fault(f"SIGKILL of host{which + 1}'s launcher {after}", rf"{GONE}|did not answer|came within",
                 act=_once(after, lambda run: send(run.pids[which], signal.SIGKILL)))
