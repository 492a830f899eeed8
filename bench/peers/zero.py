"""Measure the steps of ZeRO beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

One GPT in fp32 on n data-parallel ranks: over gloo on CPUs, over NCCL where there are n GPUs. All executors
live in the same processes and take turns, step by step, in an order that is drawn anew every round, so that
what else the machine does hits all of them. First all train the same few steps: where losses differ, nothing
is compared.

    threed n         ZeRO stage n, on the engine, from a checked plan; stage 3 gathers a unit at every use
    threed 2, host   stage 2 with optimizer state in host memory, stepped there (offload.optimizer=cpu)
    threed 3, step   stage 3, gathered once a step (zero.residency=step)
    FSDP2            fully_shard of every layer; reshard: reshard_after_forward=True; keep: False
    DeepSpeed n      ZeRO stage n, where it is installed

    python -m bench.peers.zero --help
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from bench.common import make_config
from bench.peers.turns import Case, Target, chosen, compare, parsed, parser_of, sizes
from bench.peers.zero_peers import Step, executors
from threed.comm.process import ProcessComm
from threed.schema import Config

BASE = "DDP"
TARGETS = (Target("threed 0", (BASE,), 1.05), Target("threed 1", (BASE,), 1.05),
           Target("threed 2, host", (BASE,), 1.20), Target("threed 2", ("DeepSpeed 2",), 1.0),
           Target("threed 3", ("FSDP2, reshard",), 1.0), Target("threed 3, step", ("FSDP2, keep",), 1.0),
           Target("threed 3", ("DeepSpeed 3",), 1.0))


def make(config: Config, comm: ProcessComm, only: Sequence[str]) -> dict[str, Step]:
    makers = executors()
    return {name: makers[name](config, comm) for name in chosen(makers, only, BASE)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", BASE)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes (default: 2 4)")
    args = parsed(parser, argv)
    if min(args.ranks) < 2:
        parser.error("--ranks must be at least 2")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    compare("ZeRO", [Case(f"{ranks} ranks", make_config(sizes(args), ranks), partial(make, only=args.only),
                          BASE, TARGETS) for ranks in args.ranks], args, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
