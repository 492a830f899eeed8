"""Measure the steps of Muon beside DDP with torch.optim.Muon on every rank.

One GPT in fp32 on n data-parallel ranks, over gloo on CPUs. The peer turns every matrix on every rank; threed
turns each on one, its owner. Both turn in fp32, so that losses can be compared: in bf16 an iteration moves by
1e-2 where its input is rounded otherwise. All take turns in the same processes: see bench/peers/turns.py.

    DDP          DDP, torch.optim.Muon on the split matrices, AdamW on the rest
    threed n     optimizer.name=muon at ZeRO stage n, on the engine, from a checked plan

    python -m bench.peers.muon --help
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.common import make_config
from bench.peers.turns import Case, Target, chosen, compare, parsed, parser_of, sizes
from bench.peers.zero_peers import Gpt, Step, stepper
from bench.peers.zero_peers import threed as on_threed
from threed.base.quantity import show_bytes
from threed.comm.group import Comm
from threed.comm.process import ProcessComm
from threed.models.layers.parts import Held, every
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.owned import owned
from threed.program.summary import stages
from threed.schema import Config

BASE = "DDP"
LIMITS = {2: 1.00, 4: 0.90}  # of a step beside the peer, by ranks


def turned(matrix: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """torch's turn, in the dtype of the matrix."""
    a, b, c = coefficients
    x = matrix.T.clone() if len(matrix) > len(matrix.T) else matrix.clone()
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        squares = x @ x.T
        x = torch.addmm(x, torch.addmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.T if len(matrix) > len(matrix.T) else x


class Both:
    """torch.optim.Muon on copies of the matrices, and AdamW."""

    def __init__(self, config: Config, layers: Sequence[Any]):
        options, rest = config.optimizer, list[nn.Parameter]()
        # (parameter, rows, a copy of them)
        self.matrices = list[tuple[nn.Parameter, torch.Tensor, nn.Parameter]]()
        for part in (part for layer in layers for part in every(layer) if isinstance(part, Held)):
            for name, spec in part.held.items():
                value, rows = getattr(part.compute, name), spec.shape[0]
                for each in spec.matrices:
                    index = torch.cat([torch.arange(*cell) for cell in each.cells(rows)])
                    self.matrices.append((value, index, nn.Parameter(value.detach()[index].clone())))
                rest += [] if spec.matrices else [value]
        beta1, beta2 = options.betas
        groups = [{"params": [p for p in dict.fromkeys(rest) if (p.dim() > 1) == decay],
                   "weight_decay": options.weight_decay if decay else 0.0} for decay in (True, False)]
        self.adamw = torch.optim.AdamW(groups, lr=options.lr, betas=(beta1, beta2), eps=options.eps,
                                       fused=True)
        self.muon = torch.optim.Muon([matrix for *_, matrix in self.matrices], lr=options.lr,
                                     weight_decay=options.weight_decay, momentum=options.momentum,
                                     adjust_lr_fn="match_rms_adamw")

    def zero_grad(self, set_to_none: bool) -> None:
        self.adamw.zero_grad(set_to_none)
        for value, *_ in self.matrices:
            value.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for value, index, matrix in self.matrices:
            assert value.grad is not None
            matrix.grad = value.grad[index]
        with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", turned):
            self.muon.step()
        for value, index, matrix in self.matrices:
            value[index] = matrix


def ddp(config: Config, comm: Comm) -> Step:
    gpt = Gpt(config, comm)
    module = DistributedDataParallel(gpt)
    optimizer = Both(config, [wrapped.layer for wrapped in gpt.layers])
    return stepper(config, module, optimizer, lambda last: contextlib.nullcontext() if last
                   else module.no_sync())


MAKERS: dict[str, Callable[[Config, Comm], Step]] = {
    BASE: ddp, **{f"threed {stage}": partial(on_threed, stage=stage) for stage in (1, 3)}}


def make(config: Config, comm: ProcessComm, only: Sequence[str]) -> dict[str, Step]:
    return {name: MAKERS[name](config, comm) for name in chosen(MAKERS, only, BASE)}


def case(args: argparse.Namespace, ranks: int) -> Case:
    config = make_config(sizes(args), ranks, "optimizer.name=muon", "optimizer.turn_dtype=fp32")
    targets = (Target("threed 1", (BASE,), LIMITS[ranks]),) if ranks in LIMITS else ()
    return Case(f"{ranks} ranks", config, partial(make, only=args.only), BASE, targets)


def planned(config: Config) -> None:
    """Say what the plan says of owners and bytes."""
    plan = make_plan(replace(config, zero=replace(config.zero, stage=1)))
    sent = sum(stages(Analysis(plan))[0].sent_bytes.values())
    print(f"the plan of stage 1: {next(owned(plan.table))}; {show_bytes(sent)} in all", flush=True)


def main(argv: Sequence[str]) -> None:
    parser = parser_of(__doc__ or "", BASE, layers=4, hidden=512, heads=8, seq_len=128, micro_batch=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes (default: 2 4)")
    args = parsed(parser, argv)
    cases = [case(args, ranks) for ranks in args.ranks]
    for each in cases:
        planned(each.config)
    compare("Muon", cases, args, argv, "Beside DDP")


if __name__ == "__main__":
    main(sys.argv[1:])
