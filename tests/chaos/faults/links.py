"""What lies between two hosts: cables that are pulled, packets that are lost."""

from __future__ import annotations

import shutil

from tests.chaos.faults import kind
from tests.chaos.faults.hosts import SISTERS, gone, instant, limits, mend, once
from tests.chaos.sister import Sister
from tests.chaos.trial import Fault, Skip, Trial


@kind("link: down for a while", 2, sisters=SISTERS)
def down_for_a_while(trial: Trial) -> Fault:
    """Too short to be noticed; about as long as limits are; longer: both sides give up, and meet again where
    they may restart."""
    host = trial.rng.choice(trial.use_hosts())
    after, seconds = instant(trial), trial.rng.choice([0.3, 2.0, 5.0, 15.0, 38.0])
    limits(trial)

    def pull(run: Sister) -> None:
        host.link(False)
        trial.sleep(run, seconds)
        host.link(True)

    return Fault(f"{host.name}'s cable is pulled {after}, for {seconds:.1f} s", act=once(after, pull),
                 between=mend)


@kind("link: down for ever", 2, sisters=SISTERS)
def down(trial: Trial) -> Fault:
    """Each host says that the other has gone."""
    host, after = trial.rng.choice(trial.use_hosts()), instant(trial)
    limits(trial)

    return Fault(f"{host.name}'s cable is pulled {after}, until both have ended",
                 "|".join(filter(None, [gone(0, after), gone(1, after)])), everywhere=bool(after.step),
                 act=once(after, lambda run: host.link(False)), between=mend)


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
