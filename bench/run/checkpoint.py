"""What a checkpoint costs a run: threed in the background, threed while the run waits,
torch.distributed.checkpoint's async_save.

The same tensors go to the same disk in the same processes. `blocked` is how long a rank's training stood
still: to begin, in STEPs that waited for a copy, and at the ends of steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench.common import TIMEOUT_S, Sizes, batches, make_config
from threed.base.quantity import show_bytes, show_count, show_seconds
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.save import Saver
from threed.comm.process import ProcessComm, file_store
from threed.engine.engine import Engine
from threed.models.model import layers, own_parameters
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config

COUNTERS = {"samples": 0, "skipped": 0, "wandb_id": None}
MODES = BACKGROUND, WAITING, PEER = "threed, in the background", "threed, the run waits", "torch's async_save"


class Cost(NamedTuple):
    blocked_s: float
    written_s: float
    steps_s: list[float]  # while it was written
    num_bytes: int  # of this rank


class Rank:
    def __init__(self, rank: int, store: str, args: argparse.Namespace):
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.args, self.config = args, config_of(args)
        self.comm = ProcessComm(make_mesh(self.config), rank, torch.device("cpu"), TIMEOUT_S,
                                file_store(store, args.ranks))
        self.engine = Engine(Analysis(make_plan(self.config)), self.comm)
        self.talk = dist.new_group(backend="gloo")  # async_save talks beside the training
        self.data = batches(self.config, 0, rank, self.comm.device)
        self.saver = Saver(self.engine, Lineage("bench-0"), lambda: None)

    def step(self) -> tuple[float, float]:
        """Seconds of a step, and those of it in which STEPs waited for a copy."""
        begin = time.monotonic()
        _, trace = self.engine.train_step(lambda microbatch: self.data[microbatch])
        return time.monotonic() - begin, sum(wait.wait_s for wait in trace.waits if wait.source < 0)

    def quiet(self) -> list[float]:
        return [self.step()[0] for _ in range(self.args.steps)]

    def background(self, waits: bool) -> Cost:
        states, steps = list(self.engine.states.values()), []
        copies = [state.snapshot for state in states]
        begin = time.monotonic()
        if waits:  # written from what the run has, without a copy
            for state in states:
                state.snapshot = None
        self.saver.begin(COUNTERS)
        blocked = time.monotonic() - begin
        outcome = self.saver.drain() if waits else None
        blocked = time.monotonic() - begin if waits else blocked
        while outcome is None:
            took, waited = self.step()
            steps.append(took)
            statuses = self.comm.numbers(self.saver.status)
            again = time.monotonic()
            outcome = self.saver.advance(statuses)
            blocked += waited + time.monotonic() - again
        for state, copy in zip(states, copies, strict=True):
            state.snapshot = copy
        assert outcome.problem is None, outcome.problem
        return Cost(blocked, outcome.written_s, steps, self._clear(outcome.path))

    def torch(self) -> Cost:
        tensors = {f"{self.comm.rank}.{unit}.{kind}": whole for unit, state in self.engine.states.items()
                   for kind, whole in state.kept().items()}
        path, steps = Path(self.config.run.dir) / "dcp", []
        begin = time.monotonic()
        future: Any = dcp.async_save(tensors, checkpoint_id=path, process_group=self.talk)
        blocked = time.monotonic() - begin
        while not all(self.comm.all_gather(future.done())):
            steps.append(self.step()[0])
        future.result()
        return Cost(blocked, time.monotonic() - begin, steps, self._clear(path))

    def _clear(self, path: Path) -> int:
        """Remove a checkpoint and return its bytes, so that the next mode does not write what this one
        left."""
        size = 0
        if self.comm.rank == 0:
            size = sum(file.stat().st_size for file in path.iterdir())
            shutil.rmtree(path)
            os.sync()
        self.comm.all_gather(None)
        return size

    def run(self, pipe: Any) -> None:
        self.step()
        ours = {"": self.quiet, BACKGROUND: lambda: self.background(False),
                WAITING: lambda: self.background(True)}
        # the peer makes copies of its own: ours must be gone, or memory is short
        for ways in (ours, {PEER: self.torch}):
            for _ in range(self.args.rounds):
                for name, way in ways.items():
                    self.comm.all_gather(None)
                    pipe.send((name, way()))
            for state in self.engine.states.values():
                state.snapshot = None
        pipe.send(None)


def config_of(args: argparse.Namespace) -> Config:
    return make_config(Sizes(args.layers, args.hidden, args.hidden // 64, 8192, 32, 1, 1, "fp32"), args.ranks,
                       "zero.stage=3", f"run.dir={args.dir}", "checkpoint.every=1", "checkpoint.keep=0")


def serve(rank: int, store: str, args: argparse.Namespace, pipe: Any) -> None:
    try:
        Rank(rank, store, args).run(pipe)
    except BaseException:
        pipe.send(traceback.format_exc())


def gather(pipes: list[Any]) -> list[Any] | None:
    """Every rank's answer; None at the end."""
    answers = [pipe.recv() for pipe in pipes]
    for each in answers:
        if isinstance(each, str):
            raise SystemExit(each)
    return None if answers[0] is None else answers


def lines(args: argparse.Namespace, seen: dict[str, list[list[Any]]]) -> list[str]:
    """Medians over rounds of the slowest rank."""
    numel = sum(p.numel for layer in layers(config_of(args).model) for p in own_parameters(layer))
    quiet = median(max(map(median, ranks)) for ranks in seen[""])
    out = [f"{show_count(numel)} parameters in fp32 on {args.ranks} ranks (dp, ZeRO-3), {args.rounds} "
           f"rounds; a step takes "
           f"{show_seconds(quiet)} when nothing is saved", "",
           "| | blocked | of a wait | written | a step meanwhile | of a quiet one | bytes |",
           "|---|--:|--:|--:|--:|--:|--:|"]
    wait = median(max(cost.blocked_s for cost in ranks) for ranks in seen[WAITING])
    for mode in MODES:
        blocked, written = (median(max(getattr(cost, key) for cost in ranks) for ranks in seen[mode])
                            for key in ("blocked_s", "written_s"))
        steps = [step for ranks in seen[mode] for step in ranks[0].steps_s]
        meanwhile = (show_seconds(median(steps)), f"{median(steps) / quiet:.2f}") if steps else ("", "")
        size = seen[mode][0][0].num_bytes
        out.append(f"| {mode} | {show_seconds(blocked)} | {blocked / wait:.3f} | {show_seconds(written)} | "
                   f"{' | '.join(meanwhile)} | {show_bytes(size)} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=2, help="quiet steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="on the disk to write to; a temporary folder otherwise")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    context: Any = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        args.dir = args.dir or str(Path(scratch) / "run")
        pipes, processes = [], []
        for rank in range(args.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, str(Path(scratch) / "store"), args, theirs),
                                      daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        seen: dict[str, list[list[Any]]] = {}
        try:
            while (answers := gather(pipes)) is not None:
                name, _ = answers[0]
                seen.setdefault(name, []).append([result for _, result in answers])
                print(name or "quiet", seen[name][-1][0], file=sys.stderr, flush=True)
        finally:
            for process in processes:
                process.kill()
    text = "\n".join(lines(args, seen))
    print(text)
    if args.markdown:
        command = " ".join(["python", "bench/run/checkpoint.py", *sys.argv[1:]])
        args.markdown.write_text(f"# What a checkpoint costs a run\n\n`{command}`, {os.cpu_count()} cores, "
                                 f"torch {torch.__version__}\n\n{text}\n")


if __name__ == "__main__":
    main()
