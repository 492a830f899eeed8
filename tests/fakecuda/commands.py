"""What tests of whole processes call in a fork of a process with fake GPUs (server.py): a command line, a
script, ranks as torchrun starts them. Each returns the exit status; what it prints goes to a file."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import threed
import threed.cli.main
import threed.launcher.agents
import threed.launcher.local
import threed.torchrun
import threed.training.trainer  # (imported once, before the forks)
from tests.fakecuda.server import LIMIT_S
from threed.engine import engine
from threed.tensor import fused as pieces
from threed.tensor.pieces import Separate
from threed.training import setup
from threed.training.hooks import Callback


def apart(log: Path, env: dict[str, str], body: Callable[[], object]) -> int:
    """Start a process that prints to a file and calls `body`. Returns its number."""
    # A fork inherits the lock of the server's timer, not its thread: whoever sets it there waits for ever.
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(LIMIT_S)  # ends this process in its place
    child = os.fork()
    if child:
        return child
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(env)
    os._exit(_status(body))


def exits(child: int) -> int:
    """The exit status of a process that `apart` has started."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _status(body: Callable[[], object]) -> int:
    """As Python would exit."""
    try:
        body()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return getattr(error, "status", 1)
    return 0


def _main(argv: Sequence[str]) -> None:
    sys.argv = ["threed", *argv]
    threed.cli.main.main()


def command(log: Path, argv: Sequence[str], env: dict[str, str]) -> int:
    """`threed ARGV ...`."""
    return exits(apart(log, env, partial(_main, argv)))


def beside(log: Path, argv: Sequence[str], env: dict[str, str]) -> int:
    """`threed ARGV ...`, whose ranks compute on a stream that is not the default one, as with
    run.cuda_graphs."""
    made = engine.Engine.__init__

    def init(self: engine.Engine, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)

    engine.Engine.__init__ = init
    return command(log, argv, env)


def fused(log: Path, argv: Sequence[str], env: dict[str, str], failing: Sequence[int]) -> int:
    """`threed ARGV ...`, where pieces are "compiled" to separate operations, until in the second step one of
    them fails on some ranks."""
    calls = 0

    def gelu(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 10 and torch.distributed.get_rank() in failing:
            raise RuntimeError("no space left on device")
        return Separate.gelu(*given)

    made = types.SimpleNamespace(**{**vars(Separate), "gelu": gelu})
    for module in (engine, setup):
        module.compiles = lambda *_: True
    pieces._compiled, pieces._kernels = (lambda body: body), lambda: made  # pyright: ignore
    pieces.Fused.kernels = lambda *_: None
    return command(log, argv, env)


def script(log: Path, path: Path, argv: Sequence[str], env: dict[str, str]) -> int:
    """`python PATH ARGV ...`, a script that imports threed, and asks whether there is a GPU."""
    def body() -> None:
        assert torch.cuda.is_available()
        sys.argv = [str(path), *argv]
        runpy.run_path(str(path), run_name="__main__")

    return exits(apart(log, env, body))


def starts(log: Path, path: Path, env: dict[str, str]) -> int:
    """As `script`, but it asks before it imports threed, which sets this variable."""
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    return script(log, path, [], env)


def torchrun(log: Path, argv: Sequence[str], envs: Sequence[dict[str, str]],
             env: dict[str, str]) -> list[int]:
    """`threed ARGV ...` by a process a rank, with its variables."""
    return list(map(exits, [apart(log, {**env, **own}, partial(_main, argv)) for own in envs]))


def agents(log: Path, argv: Sequence[str], envs: Sequence[dict[str, str]], env: dict[str, str]) -> list[int]:
    """`python -m threed.torchrun ARGV ...` by a process a node, with its variables."""
    def body() -> None:
        sys.exit(threed.torchrun.main(list(argv)))

    return list(map(exits, [apart(log, {**env, **own}, body) for own in envs]))


class Dies(Callback):
    """Rank 1 is killed after a step, once."""

    def on_step_end(self, trainer, step):
        if trainer.rank == 1 and step.number == 3 and os.environ["THREED_RESTARTS"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def killed(log: Path, config: str, overrides: list[str], env: dict[str, str]) -> int:
    """A run whose rank 1 is killed in its first start."""
    return exits(apart(log, env, lambda: threed.train(config, overrides, callbacks=[Dies()])))
