"""Forks: what processes that are forked from this one can do with torch, and how many GPUs they find.

A forked process cannot use CUDA once its parent has started it, as the question how many GPUs there are does
(`cuInit`): torch calls such a fork bad. So every question is asked in a child, which answers through a pipe:
whatever it starts ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from threed.base.errors import InputError, RunError
from threed.base.quantity import many

PRODUCT_S = 10  # how long a child may take for a small product on several threads
DRIVER_S = 120  # how long a child may take to start CUDA: some seconds with eight GPUs that nothing else uses
# With this variable torch asks NVML, the driver's own library, whether there are GPUs: that starts nothing.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)


def gpus() -> int:
    """How many GPUs processes that are forked from this one can use.

    Raises InputError where there are some, and such processes cannot use them: this process has started CUDA,
    or CUDA does not work here. RunError where the driver does not answer.
    """
    if not torch.cuda._is_compiled():
        return 0
    if ask(torch.cuda._is_in_bad_fork, DRIVER_S):
        # no harm is left that the question could do
        if not torch.cuda.device_count():
            return 0
        raise InputError(
            "this process has started CUDA, so ranks that are forked from it could not use a GPU: "
            "torch.cuda.is_available() does so before `import threed`, and so do libraries that look for a "
            f"GPU when they are imported. Import threed first, or set {NVML_CHECK}=1 in the environment of "
            "the script, or start it with torchrun")
    found = _found(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found is None:
        raise RunError("a process that asked CUDA how many GPUs there are died, or got no answer within "
                       f"{DRIVER_S} s: see whether nvidia-smi answers; run.device=cpu asks for none")
    listed, usable = found
    if listed and not usable:
        raise InputError(
            f"the driver lists {many(listed, 'GPU')}, but a process that is forked from this one cannot use "
            "CUDA. Either a library has started CUDA in this process (then import it later, or start the "
            "script with torchrun), or this torch does not fit the driver (python -c 'import torch; "
            "torch.cuda.init()' says why); run.device=cpu uses no GPU")
    return listed


@cache
def _found(visible: str | None) -> tuple[int, bool] | None:
    """How many GPUs torch lists, of those that CUDA_VISIBLE_DEVICES names, and whether CUDA starts. Asked
    once: it takes seconds where the driver keeps no GPU ready."""
    def look() -> tuple[int, bool]:
        listed = torch.cuda.device_count()
        os.environ.pop(NVML_CHECK, None)  # so that torch asks CUDA, not NVML
        return listed, torch.cuda.is_available()

    found = ask(look, DRIVER_S)
    return found and (found[0], found[1])


def computes() -> bool:
    """Whether a forked process can compute on several threads. OpenMP does not say; its threads are gone in
    the child, which waits for them for ever."""
    def product() -> bool:
        matrix = torch.ones(512, 512, device="cpu")
        return bool((matrix @ matrix).sum() > 0)

    return ask(product, PRODUCT_S) is True


def ask(question: Callable[[], Any], limit_s: int) -> Any:
    """What `question` returns in a child, as JSON carries it; None where the child dies, or takes longer than
    `limit_s`."""
    read, write = os.pipe()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # none of this process's handlers runs there
    child = os.fork()
    if not child:
        _answer(question, limit_s, write)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    with contextlib.suppress(ChildProcessError):  # where a script ignores SIGCHLD
        os.waitpid(child, 0)
    return json.loads(text) if text else None


def _answer(question: Callable[[], Any], limit_s: int, write: int) -> None:
    """Be the child, which an alarm ends."""
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        signal.alarm(limit_s)
        with contextlib.suppress(Exception):
            os.write(write, json.dumps(question()).encode())
    finally:
        os._exit(0)
