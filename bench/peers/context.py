"""Measure the steps of context parallelism beside the same model in plain torch.

Two blocks in fp32 on 4 processes over gloo, which share each sequence of 4,096 tokens. In plain torch (DDP,
with zig-zag chunks, too) keys and values are gathered by an autograd function, or go round a ring
(context_peers.py). All take turns in the same processes: see bench/peers/turns.py.

    gathered       keys and values are gathered, and attention has a mask
    ring           keys and values go round, and outputs are merged by their log-sum-exps
    threed keys    parallel.cp_form=keys on the engine, from a checked plan
    threed heads   parallel.cp_form=heads

Targets are of processor time: ranks share processors, and what they wait for each other is not theirs.

    python -m bench.peers.context --help
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bench.common import make_config
from bench.peers.context_peers import GatheredKeys, Ring, peer
from bench.peers.turns import Case, Target, chosen, compare, parsed, parser_of, sizes
from bench.peers.zero_peers import Step
from bench.peers.zero_peers import threed as on_threed
from threed.comm.group import Comm
from threed.comm.process import ProcessComm
from threed.schema import Config

BASE, RING, RANKS = "gathered", "ring", 4
FORMS = ("keys", "heads")
TARGETS = tuple(Target(f"threed {form}", (BASE, RING), 1.0, processor=True) for form in FORMS)


def threed(config: Config, comm: Comm, form: str) -> Step:
    return on_threed(replace(config, parallel=replace(config.parallel, cp_form=form)), comm, stage=0)


MAKERS = {BASE: peer(GatheredKeys), RING: peer(Ring),
          **{f"threed {form}": partial(threed, form=form) for form in FORMS}}


def make(config: Config, comm: ProcessComm, only: Sequence[str]) -> dict[str, Step]:
    return {name: MAKERS[name](config, comm) for name in chosen(MAKERS, only, BASE)}


def case(args: argparse.Namespace) -> Case:
    config = make_config(sizes(args), 1, "model.position=rotary", f"parallel.cp={RANKS}")
    return Case(f"cp {RANKS}", config, partial(make, only=args.only), BASE, TARGETS)


def main(argv: Sequence[str]) -> None:
    parser = parser_of(__doc__ or "", BASE, layers=2, hidden=256, heads=4, seq_len=4096, micro_batch=1,
                       repeat=9)
    args = parsed(parser, argv)
    compare("Context parallelism", [case(args)], args, argv, "Beside plain torch")


if __name__ == "__main__":
    main(sys.argv[1:])
