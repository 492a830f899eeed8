"""Inside a save: a process dies, stops or waits at one system call, or the call fails."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

from tests.chaos import tensors
from tests.chaos.faults import kind
from tests.chaos.faults.processes import KILLED
from tests.chaos.interposer import Site, Strike, preloaded
from tests.chaos.sister import Sister, in_ranks
from tests.chaos.trial import Fault, Skip, Trial, send

ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]


def _strike(trial: Trial, strike: Strike, says: str) -> Fault:
    def body(rank: int) -> None:
        if rank == strike.site.rank:
            strike.arm(trial.run_dir, trial.marker)

    text = {"fail": f"{errno.errorcode.get(strike.amount)} x {strike.times}",
            "sleep": f"{strike.amount} ms of waiting"}
    return Fault(f"{text.get(strike.what, strike.what)} at {strike.site}", says, hook=lambda: in_ranks(body),
                 site=strike.site)


def _site(trial: Trial, sites: list[Site] | None = None) -> Site:
    if not preloaded() or not trial.reference.sites:
        raise Skip("system calls are interposed by a library that wants gcc")
    return trial.rng.choice(sites if sites is not None else trial.reference.sites)


@kind("save: kill at a call", 22, walks=True)
def kill(trial: Trial) -> Fault:
    """The next of all calls; once all had their turn, any."""
    site = _site(trial)
    if trial.index < len(trial.reference.sites):
        site = trial.reference.sites[trial.index]
    what = trial.rng.choice(["kill", "kill", "kill node"])
    return _strike(trial, Strike(site, what), KILLED if what == "kill" else "")


@kind("save: a write is cut by a kill", 3)
def tear(trial: Trial) -> Fault:
    site = _site(trial, [site for site in trial.reference.sites if site.op == "write"])
    return _strike(trial, Strike(site, "tear"), KILLED)


@kind("save: a call fails", 8)
def fail(trial: Trial) -> Fault:
    number = trial.rng.choice(ERRORS)
    site = _site(trial, [site for site in trial.reference.sites if site.changes])
    return _strike(trial, Strike(site, "fail", number), os.strerror(number))


@kind("save: a read fails", 1)
def read_fails(trial: Trial) -> Fault:
    """What was written is read back, where it is."""
    site = _site(trial, [site for site in trial.reference.sites if site.op in ("open", "read")])
    return _strike(trial, Strike(site, "fail", errno.EIO), os.strerror(errno.EIO))


@kind("save: all calls fail for a while", 3)
def broken(trial: Trial) -> Fault:
    number = trial.rng.choice(ERRORS)
    site = _site(trial, [site for site in trial.reference.sites if site.changes])
    return _strike(trial, Strike(site, "fail", number, trial.rng.choice([3, 10, 30, 1000])),
                   os.strerror(number))


@kind("save: a call is slow", 2)
def slow(trial: Trial) -> Fault:
    return _strike(trial, Strike(_site(trial), "sleep", trial.rng.choice([100, 500, 2000, 5000])), "")


@kind("save: stop at a call", 2)
def stop(trial: Trial) -> Fault:
    fault, seconds = _strike(trial, Strike(_site(trial), "stop"), ""), trial.rng.uniform(0.1, 3.0)

    def act(trial: Trial, run: Sister) -> None:
        trial.until(run, trial.marker.exists)
        time.sleep(seconds)
        for child in trial.family(run):
            send(child.pid, signal.SIGCONT)

    fault.text, fault.act = f"{fault.text}, SIGCONT after {seconds:.1f} s", act
    return fault


@kind("resume: a call fails or kills", 4)
def load(trial: Trial) -> Fault:
    """The power goes, and the next start meets a bad call while it reads."""
    _site(trial)
    rng, after = trial.rng, trial.rng.uniform(0.0, 0.3)
    site = Site(rng.randrange(trial.size), rng.choice(["open", "read", "read"]), "checkpoints/step-*",
                rng.randrange(6))
    newest: list[Path] = []
    strike = rng.choice([Strike(site, "fail", errno.EIO), Strike(site, "kill"), Strike(site, "kill node")])

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_saved(run, 1) and trial.sleep(run, after):
            for pid in (run.pid, *(child.pid for child in trial.family(run))):
                send(pid, signal.SIGKILL)

    def body(rank: int) -> None:
        if rank == site.rank:
            strike.arm(trial.run_dir, trial.marker)

    def end(trial: Trial) -> None:
        if strike.what == "fail" and newest and f"resumed from {newest[0]} " in trial.output:
            fault.says = ""  # it was read at the second attempt

    says = {"fail": os.strerror(errno.EIO), "kill": KILLED, "kill node": ""}[strike.what]
    fault = Fault(f"SIGKILL of all; on the next start {strike.what} at {site}", says, act=act, end=end,
                  between=lambda trial: newest.extend(tensors.checkpoints(trial.run_dir)[-1:]),
                  later=lambda: in_ranks(body))
    return fault
