"""A training step with the optimizer on the host: threed beside DeepSpeed, ZeRO-2 in bf16, in the same
processes."""

from __future__ import annotations

import argparse
import dataclasses
import random
import traceback
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench.common import TIMEOUT_S, Sizes, answer, make_config, on_ranks
from bench.peers.turns import check, join, timed
from bench.peers.zero_peers import DEEPSPEED, DEEPSPEED_VERSION, Step, deepspeed, threed
from threed.base.quantity import show_count
from threed.comm.group import Comm
from threed.comm.process import ProcessComm, file_store
from threed.models.model import layers, own_parameters
from threed.planner import make_mesh
from threed.schema import Config, OffloadConfig

RANKS = 2
BASE = "threed"
NARROW = "threed, bf16 gradients"  # as DeepSpeed's are
RESIDENT = "threed, nothing offloaded"
PEER = "DeepSpeed"
TOLERANCE = 1e-2  # of losses: DeepSpeed's fp32 weights begin as the bf16 ones


def make_sizes(args: argparse.Namespace) -> Sizes:
    return Sizes(args.layers, args.hidden, args.hidden // 64, 8192, 128, 2, 1, "bf16")


def config_of(args: argparse.Namespace, *more: str) -> Config:
    return make_config(make_sizes(args), RANKS, "zero.stage=2", "offload.optimizer=cpu", *more)


def executors(args: argparse.Namespace, comm: Comm) -> dict[str, Step]:
    config = config_of(args)
    narrow = config_of(args, "precision.grad_dtype=bf16", "precision.reduce_dtype=bf16")
    resident = dataclasses.replace(config, offload=OffloadConfig())
    steps = {BASE: threed(config, comm), NARROW: threed(narrow, comm), RESIDENT: threed(resident, comm)}
    if DEEPSPEED is not None:
        steps[PEER] = deepspeed(config, comm, 2)
    return steps


def serve(rank: int, store: str, args: argparse.Namespace, pipe: Any) -> None:
    """Body of a process: sends losses, then the times of each round, or what went wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    try:
        config = config_of(args)
        comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), TIMEOUT_S, file_store(store, RANKS))
        steps, order = executors(args, comm), random.Random(0)
        pipe.send({name: check(step, name, config, comm, 2) for name, step in steps.items()})
        for number in range(2, args.rounds + 3):
            pipe.send({name: timed(steps[name], config, comm, number)
                       for name in order.sample(list(steps), len(steps))})
        comm.close()
    except BaseException:
        pipe.send(traceback.format_exc())


def measure_step(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[str, list[str]]:
    """A title, and lines of text."""
    with on_ranks(RANKS, serve, args) as pipes:
        losses, *_ = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        agree(losses)
        rounds = []
        for number in range(args.rounds + 1):
            of_ranks = [answer(rank, pipe) for rank, pipe in enumerate(pipes)]
            rounds.append({name: join([each[name] for each in of_ranks]) for name in of_ranks[0]})
            say(f"step, round {number} of {args.rounds}: " + ", ".join(
                f"{name} {1e3 * (ran.end - ran.begin):.0f} ms"
                for name, ran in sorted(rounds[-1].items())))
    return "A training step", lines(args, rounds[1:])


def agree(losses: dict[str, list[float]]) -> None:
    """Unless all train the same model, nothing is compared."""
    for name, of_ranks in losses.items():
        if any(abs(a - b) > TOLERANCE * b for a, b in zip(of_ranks, losses[BASE], strict=True)):
            raise SystemExit(f"{name} does not train the model that {BASE} trains: losses {of_ranks}, not "
                             f"{losses[BASE]}")


def lines(args: argparse.Namespace, rounds: list[dict[str, Any]]) -> list[str]:
    """Medians over the rounds; ratios within a round."""
    config = config_of(args)
    numel = sum(p.numel for layer in layers(config.model) for p in own_parameters(layer))
    out = [f"{show_count(numel)} parameters, {config.train.micro_batch_size} x {config.model.seq_len} tokens "
           f"a rank, {RANKS} ranks", "",
           "| executor | ms | of threed | cpu of threed |", "|---|---:|---:|---:|"]

    def seconds(name: str) -> list[float]:
        return [each[name].end - each[name].begin for each in rounds]

    def ratios(name: str, base: str) -> tuple[float, float]:
        return (median(mine / its for mine, its in zip(seconds(name), seconds(base))),
                median(each[name].cpu_s / each[base].cpu_s for each in rounds))

    for name in sorted(rounds[0], reverse=True):
        (ratio, cpu), step_s = ratios(name, BASE), median(seconds(name))
        out.append(f"| {name} | {1e3 * step_s:.0f} | {ratio:.3f} | {cpu:.3f} |")
    out.append("")
    if DEEPSPEED is None:
        return [*out, f"DeepSpeed is not there: {DEEPSPEED_VERSION}"]
    for name in (BASE, NARROW):
        ratio, cpu = ratios(name, PEER)
        out += [f"`{'met   ' if ratio < 1 else 'missed'}`  {name} faster than {PEER}: {ratio:.3f} of its "
                f"time (processor time {cpu:.3f})", ""]
    return out
