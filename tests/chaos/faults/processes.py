"""Processes die, stop and raise; people send signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.faults import kind
from tests.chaos.sister import EXPERTS, MATRICES, STEPS, Sister, in_ranks, patch
from tests.chaos.trial import Fault, Instant, Trial, send
from threed.engine.engine import Engine
from threed.features.travel.run import TravelRun
from threed.features.zero.turns import MatrixRun
from threed.program.instruction import Instruction, Op, Slot
from threed.program.slots import Slots
from threed.program.trips import Trip

KILLED = r"was killed by SIGKILL|was killed \(SIGKILL|exit status -9|ended with exit status 137"


@kind("kill a process", 7)
def kill_one(trial: Trial) -> Fault:
    after, which = trial.instant(), trial.rng.random()

    def act(trial: Trial, run: Sister) -> None:
        trial.wait(run, after)
        if family := trial.family(run):
            trial.strike()
            send(family[int(which * len(family))].pid, signal.SIGKILL)

    return Fault(f"SIGKILL of a process of the run {after}", KILLED, act=act)


@kind("kill all ranks", 3)
def kill_all(trial: Trial) -> Fault:
    after = trial.instant()

    def act(trial: Trial, run: Sister) -> None:
        trial.wait(run, after)
        if family := trial.family(run):
            trial.strike()
            for process in family:
                send(process.pid, signal.SIGKILL)

    return Fault(f"SIGKILL of all ranks {after}", KILLED, act=act)


@kind("kill the launcher", 4)
def kill_launcher(trial: Trial) -> Fault:
    after = trial.instant()

    def act(trial: Trial, run: Sister) -> None:
        if trial.wait(run, after):
            trial.strike()
            send(run.pid, signal.SIGKILL)

    return Fault(f"SIGKILL of the launcher {after}", act=act)


@kind("kill the node", 5)
def kill_node(trial: Trial) -> Fault:
    after = trial.instant()

    def act(trial: Trial, run: Sister) -> None:
        if trial.wait(run, after):
            trial.kill_node(run)

    return Fault(f"SIGKILL of launcher and ranks at once {after}", act=act)


@kind("kill again and again", 3)
def kill_often(trial: Trial) -> Fault:
    """Three times, each some steps after the one before."""
    steps = sorted(trial.rng.sample(range(1, STEPS), 3))
    which = trial.rng.random()

    def act(trial: Trial, run: Sister) -> None:
        for step in steps:
            if trial.until_step(run, step) and (family := trial.family(run)):
                trial.strike()
                send(family[int(which * len(family))].pid, signal.SIGKILL)

    return Fault(f"SIGKILL of a rank at steps {steps}", KILLED, act=act)


# ---------------------------------------------------------------- at an instruction


def at_instruction(trial: Trial, body: Callable[[Engine, Instruction, Slots], bool], text: str,
                   says: str) -> Fault:
    """Do something once, on one rank, after one instruction of one step: `body` says whether it could."""
    rank, step, share = trial.rng.randrange(trial.size), trial.rng.randrange(STEPS), trial.rng.random()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Engine, name: str, batch: Any) -> Any:
            if self.comm.rank == rank and self.zero.step_number == step and name != "evaluate":
                at, seen = int(share * len(self.plan.programs[name][self.position])), [0]

                def after(instruction: Instruction, slots: Slots) -> None:
                    seen[0] += 1
                    if seen[0] > at and not trial.marker.exists():
                        if body(self, instruction, slots):
                            trial.strike(str(instruction))

                self.after = after
            return original(self, name, batch)

        return run

    return Fault(f"{text} on rank {rank}, in step {step + 1}, after {share:.0%} of its instructions", says,
                 hook=lambda: in_ranks(lambda _: patch(Engine, "run", make)))


@kind("kill at an instruction", 7)
def kill_at_instruction(trial: Trial) -> Fault:
    def body(engine: Engine, instruction: Instruction, slots: Slots) -> bool:
        trial.strike(str(instruction))
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    return at_instruction(trial, body, "SIGKILL", KILLED)


@kind("kill in an exchange", 3, EXPERTS)
def kill_in_exchange(trial: Trial) -> Fault:
    """Of rows of experts."""
    def about(run: TravelRun, trip: Trip, op: Op, group: Any, *_: Any) -> tuple[str, str, Any]:
        return trip.source.kind, f"EXCHANGE {trip.source}", group

    kinds = ("counts", "routed", "answers", "greturned", "garrived")
    return _kill_in_exchange(trial, trial.rng.choice(kinds), (TravelRun, "_taken"), about)


@kind("kill in an exchange of matrices", 2, MATRICES)
def kill_in_exchange_of_matrices(trial: Trial) -> Fault:
    """On their way to owners, or back."""
    def about(run: MatrixRun, instruction: Instruction, slots: Slots) -> tuple[str, str, Any]:
        return instruction.kind, str(instruction), run.comm.groups[instruction.group]

    return _kill_in_exchange(trial, trial.rng.choice(("update", "turned")), (MatrixRun, "exchange"), about)


def _kill_in_exchange(trial: Trial, kind: str, method: tuple[type, str],
                      about: Callable[..., tuple[str, str, Any]]) -> Fault:
    """Before a rank's own call, or while that is under way. `method`: makes the call; `about`: the kind of
    what is exchanged, its text and the group, of what the method is given."""
    rng = trial.rng
    rank, step, inside = rng.randrange(trial.size), rng.randrange(STEPS), rng.random() < 0.5

    def taken(original: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: Any, *given: Any) -> Any:
            now, text, group = about(self, *given)
            here = step_of[0] == step and self.comm.rank == rank and now == kind
            if not here or trial.marker.exists():
                return original(self, *given)

            def die(*_: Any) -> None:
                trial.strike(text)
                os.kill(os.getpid(), signal.SIGKILL)

            if not inside:
                die()
            exchange = group._exchange
            group._exchange = lambda *given: die(exchange(*given))
            return original(self, *given)

        return take

    def trained(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(self: Engine, batch: Any) -> Any:
            step_of[0] = self.zero.step_number
            return original(self, batch)

        return train_step

    step_of = [-1]  # that is under way

    def hook(_: int) -> None:
        patch(method[0], method[1], taken)
        patch(Engine, "train_step", trained)

    return Fault(f"SIGKILL of rank {rank} in step {step + 1}, {'inside' if inside else 'before'} an exchange "
                 f"of {kind}", KILLED, hook=lambda: in_ranks(hook))


@kind("a rank raises", 4)
def raises(trial: Trial) -> Fault:
    def body(engine: Engine, instruction: Instruction, slots: Slots) -> bool:
        trial.strike(str(instruction))
        raise RuntimeError("the seventh seal")

    return at_instruction(trial, body, "an exception", "the seventh seal")


@kind("a rank leaves", 2)
def leaves(trial: Trial) -> Fault:
    def body(engine: Engine, instruction: Instruction, slots: Slots) -> bool:
        trial.strike(str(instruction))
        os._exit(7)

    return at_instruction(trial, body, "os._exit(7)", r"rank \d+ .*exit status 7")


@kind("loss not finite", 3)
def not_finite(trial: Trial) -> Fault:
    """The last position's loss: other ranks wait until there is one."""
    rng, step = trial.rng, trial.rng.randrange(STEPS)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Engine, name: str, batch: Any) -> Any:
            if self.zero.step_number == step and name != "evaluate":
                def after(instruction: Instruction, slots: Slots) -> None:
                    if Slot("loss") in slots and self.comm.here.on["tp"] == 0 and not trial.marker.exists():
                        trial.strike(str(instruction))
                        sums = slots.get(Slot("loss")).clone()
                        sums[0] = value
                        slots.put(Slot("loss"), sums)

                self.after = after
            return original(self, name, batch)

        return run

    import torch

    value = torch.tensor(rng.choice([float("nan"), float("inf")]), dtype=torch.float64)
    return Fault(f"a loss of {value.item()} in step {step + 1}", rf"step {step + 1}: not finite",
                 hook=lambda: in_ranks(lambda _: patch(Engine, "run", make)))


# ---------------------------------------------------------------- stops


@kind("stop a rank for a while", 3)
def stop_and_continue(trial: Trial) -> Fault:
    after, seconds, which = trial.instant(), trial.rng.uniform(0.1, 3.0), trial.rng.random()

    def act(trial: Trial, run: Sister) -> None:
        trial.wait(run, after)
        if family := trial.family(run):
            victim = family[int(which * len(family))]
            trial.strike()
            send(victim.pid, signal.SIGSTOP)
            time.sleep(seconds)
            send(victim.pid, signal.SIGCONT)

    return Fault(f"SIGSTOP of a rank {after}, SIGCONT after {seconds:.1f} s", act=act)


@kind("stop a rank for ever", 3)
def stop(trial: Trial) -> Fault:
    step, which = trial.rng.randrange(1, STEPS - 1), trial.rng.random()
    trial.more.append("run.timeout_s=6")

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_step(run, step) and (family := trial.family(run)):
            trial.strike()
            send(family[int(which * len(family))].pid, signal.SIGSTOP)

    return Fault(f"SIGSTOP of a rank after step {step}, for ever", r"no answer within run\.timeout_s",
                 act=act)


@kind("suspend the job", 2)
def suspend(trial: Trial) -> Fault:
    after, seconds = trial.instant(), trial.rng.uniform(0.1, 8.0)
    trial.more.append("run.timeout_s=6")

    def act(trial: Trial, run: Sister) -> None:
        if not trial.wait(run, after):
            return
        victims = [run.pid, *(child.pid for child in trial.family(run))]
        trial.strike()
        for pid in victims:
            send(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in victims:
            send(pid, signal.SIGCONT)

    return Fault(f"SIGSTOP of all processes {after}, SIGCONT after {seconds:.1f} s", act=act)


# ---------------------------------------------------------------- signals of people

STOPPED = r"stopped on request after step|stopped by SIG"


def _signal(trial: Trial, after: Instant, number: signal.Signals) -> Fault:
    def act(trial: Trial, run: Sister) -> None:
        if trial.wait(run, after):
            trial.strike()
            send(run.pid, number)

    said = STOPPED if number != signal.SIGUSR1 else ""
    return Fault(f"{number.name} to the launcher {after}", said, act=act)


def _drawn(trial: Trial) -> signal.Signals:
    return trial.rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])


@kind("signal in training", 6)
def signal_in_training(trial: Trial) -> Fault:
    return _signal(trial, Instant(trial.rng.randrange(1, STEPS - 1), trial.rng.uniform(0.0, 0.1)),
                   _drawn(trial))


@kind("signal at the start", 4)
def signal_at_start(trial: Trial) -> Fault:
    return _signal(trial, Instant(0, trial.rng.uniform(0.0, 0.5)), _drawn(trial))


PROGRAM = ("from threed import __main__ as t; begin = t.begin; "
           "t.begin = lambda: (begin(), open('{}', 'w').close()); t.main()")


@kind("signal during imports", 1)
def signal_in_imports(trial: Trial) -> Fault:
    """A fresh Python, as a shell would start it. What comes before its first lines of threed is not threed's
    to answer."""
    after, number = Instant(0, trial.rng.uniform(0.0, 6.0)), _drawn(trial)
    fault, file = _signal(trial, after, number), trial.folder / "log-of-a-fresh-start.txt"
    send_it = fault.act

    def act(trial: Trial, run: Sister) -> None:
        run.logs.append(file)
        send_it(trial, run)

    def hook() -> None:
        log = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(each, signal.SIG_DFL)
        os.chdir(Path(__file__).parents[3])
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM.format(trial.folder / "begun-0"), *trial.argv,
                                  f"run.dir={trial.run_dir}"])

    fault.text, fault.hook, fault.act = f"{number.name} to a fresh Python {after}", hook, act
    return fault
