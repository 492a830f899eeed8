"""Measure whole training steps of pipelines beside torch.distributed.pipelining and DeepSpeed.

One small GPT in fp32 on 4 processes: a pipeline of 4 stages, and one of 2 with 2 data-parallel ranks. All
executors compute the same layers, cut into the same stages, and step the same AdamW. They take turns in the
same processes: see bench/peers/turns.py. (bench/peers/pipeline.py measures the executors alone, with stages
that sleep.)

    threed NAME      the schedule on the engine, from a checked plan
    threed, ZeRO-n   1f1b with ZeRO stage n
    torch            Schedule1F1B; with data parallelism its stages are in DDP
    DeepSpeed        PipelineModule, whose schedule is 1F1B; ZeRO-1 with data parallelism

    python -m bench.peers.steps --help
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from bench.common import Sizes, make_config
from bench.peers.pipeline_peers import deepspeed_pipeline, threed, torch_1f1b
from bench.peers.turns import Case, Target, chosen, compare, parsed, parser_of, sizes
from bench.peers.zero_peers import DEEPSPEED, Step, sharded_adamw
from threed.comm.process import ProcessComm
from threed.schema import Config

BASE = "torch"
SHARDED = "torch, ZeroRedundancyOptimizer"
PEERS = (BASE, SHARDED, "DeepSpeed")
TARGETS = {"pp": (Target("threed 1f1b", (BASE,), 1.0),),
           "dp": (Target("threed, ZeRO-0", PEERS, 0.95), Target("threed, ZeRO-1", PEERS, 0.95))}

Maker = Callable[[Config, ProcessComm], Step]


def makers(dp: int) -> dict[str, Maker]:
    """Name -> function that makes the executor."""
    if dp > 1:
        found: dict[str, Maker] = {
            BASE: torch_1f1b, SHARDED: partial(torch_1f1b, make=sharded_adamw),
            **{f"threed, ZeRO-{stage}": partial(threed, schedule="1f1b", zero_stage=stage)
               for stage in (0, 1)}}
    else:
        found = {BASE: torch_1f1b, **{f"threed {name}": partial(threed, schedule=name, zero_stage=0)
                                      for name in ("1f1b", "zb-h1", "zb-v")}}
    if DEEPSPEED is not None:
        found["DeepSpeed"] = partial(deepspeed_pipeline, zero_stage=min(dp - 1, 1))
    return found


def make(config: Config, comm: ProcessComm, only: Sequence[str]) -> dict[str, Step]:
    found = makers(config.dp)
    return {name: found[name](config, comm) for name in chosen(found, only, BASE)}


def case(size: Sizes, pp: int, dp: int, only: Sequence[str]) -> Case:
    config = make_config(size, dp, f"parallel.pp={pp}")
    return Case(f"pp {pp} x dp {dp}", config, partial(make, only=only), BASE,
                TARGETS["dp" if dp > 1 else "pp"])


def main(argv: Sequence[str]) -> None:
    parser = parser_of(__doc__ or "", BASE, micro_batch=1, micro_batches=8)
    args = parsed(parser, argv)
    compare("Steps of pipelines", [case(sizes(args), pp, dp, args.only) for pp, dp in ((4, 1), (2, 2))], args,
            argv)


if __name__ == "__main__":
    main(sys.argv[1:])
