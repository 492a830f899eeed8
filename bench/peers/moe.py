"""Measure the steps of a mixture of experts beside the same model in plain torch.

Some 20M parameters in fp32 on 4 processes over gloo, experts over 4 ranks, and over 2. In plain torch all
but the experts are in DDP, and rows travel by `all_to_all_single` under autograd (moe_peers.py). Both take
turns in the same processes: see bench/peers/turns.py.

    torch      the same model in plain torch
    threed n   ZeRO stage n, on the engine, from a checked plan

With --sleep computation and exchanges sleep, and what is measured is how the one hides the other: see
bench/peers/sleeping_experts.py.

    python -m bench.peers.moe --help
    python -m bench.peers.moe --sleep --help
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from bench.common import make_config
from bench.peers import sleeping_experts
from bench.peers.moe_peers import plain
from bench.peers.turns import Case, Target, chosen, compare, parsed, parser_of, sizes
from bench.peers.zero_peers import Step, threed
from threed.comm.process import ProcessComm
from threed.schema import Config

BASE, RANKS = "torch", 4
TARGETS = (Target("threed 0", (BASE,), 1.0), Target("threed 1", (BASE,), 1.0))
MAKERS = {BASE: plain, **{f"threed {stage}": partial(threed, stage=stage) for stage in range(3)}}


def make(config: Config, comm: ProcessComm, only: Sequence[str]) -> dict[str, Step]:
    return {name: MAKERS[name](config, comm) for name in chosen(MAKERS, only, BASE)}


def case(args: argparse.Namespace, ep: int) -> Case:
    config = make_config(sizes(args), RANKS, "model.family=moe", "model.position=rotary", f"parallel.ep={ep}",
                         f"model.experts={args.experts}", f"model.expert_ffn_hidden={args.inner}")
    return Case(f"ep {ep}, {RANKS} ranks", config, partial(make, only=args.only), BASE, TARGETS)


def main(argv: Sequence[str]) -> None:
    if "--sleep" in argv:
        return sleeping_experts.main([each for each in argv if each != "--sleep"])
    parser = parser_of(__doc__ or "", BASE, layers=4, hidden=384, micro_batch=4)
    parser.add_argument("--experts", type=int, default=8, metavar="N", help="of a block (default: 8)")
    parser.add_argument("--inner", type=int, default=448, metavar="N",
                        help="hidden layer of an expert (default: 448)")
    parser.add_argument("--ep", type=int, nargs="+", default=[4, 2], metavar="N",
                        help="ranks that hold all experts (default: 4 2)")
    args = parsed(parser, argv)
    compare("Mixture of experts", [case(args, ep) for ep in args.ep], args, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
