"""A model with experts in plain torch: DDP for all but the experts, which are spread over ranks; rows travel
by `all_to_all_single` under autograd.

Attention, norms, embedding and head are threed's layers as modules of torch (zero_peers), so that only what a
mixture of experts adds is another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.parallel import DistributedDataParallel

from bench.peers.zero_peers import Step, Wrapped, adamw, stepper
from threed.comm.group import Comm
from threed.models.layers.experts import Experts, ExpertsConfig, Routes
from threed.models.model import layers
from threed.schema import Config
from threed.spec.parameter import Parameter
from threed.tensor.context import Batch, Context
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import Precision
from threed.tensor.random import initial_values


class Mlps(nn.Module):
    """Router and experts of a block: x [s, B, D] -> the same, without the residual stream."""

    def __init__(self, model: ExpertsConfig, weights: Mapping[str, nn.Parameter], group: dist.ProcessGroup):
        super().__init__()
        self.router, self.up, self.down = weights["router"], weights["up"], weights["down"]
        self.k, self.experts, self.group = model.experts_per_token, model.experts, group

    def forward(self, x_sBD: torch.Tensor) -> torch.Tensor:
        x, k, ranks, here = x_sBD.flatten(0, 1), self.k, self.group.size(), len(self.up)
        scores, picks = F.linear(x, self.router).softmax(-1).topk(k, -1)
        weights = (scores / scores.sum(-1, keepdim=True)).flatten()
        order = picks.flatten().argsort(stable=True)
        gives = torch.bincount(picks.flatten(), minlength=self.experts)
        takes = torch.empty_like(gives)
        dist.all_to_all_single(takes, gives, group=self.group)
        of_ranks = gives.view(ranks, here).sum(1).tolist(), takes.view(ranks, here).sum(1).tolist()
        rows = self._travel(x[order // k], *of_ranks)
        mine = torch.arange(here).repeat(ranks).repeat_interleave(takes).argsort(stable=True)
        parts = rows[mine].split(takes.view(ranks, here).sum(0).tolist())
        out = torch.cat([self._expert(part, up, down) for part, up, down in zip(parts, self.up, self.down)])
        back = torch.empty_like(out).index_copy(0, mine, out)
        answers = self._travel(back, *of_ranks[::-1]) * weights[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // k, answers).view_as(x_sBD)

    def _travel(self, rows: torch.Tensor, gives: list[int], takes: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(takes), rows.shape[1])
        return all_to_all_single(out, rows, takes, gives, group=self.group)

    @staticmethod
    def _expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = F.linear(x, up.flatten(0, 1)).chunk(2, -1)
        return F.linear(F.silu(gate) * value, down)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, norm: Wrapped, mlps: Mlps):
        super().__init__()
        self.attention, self.norm, self.mlps = attention, norm, mlps

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        x = self.attention(x, batch)
        return x + self.mlps(self.norm.layer(x))


class Model(nn.Module):
    def __init__(self, config: Config, comm: Comm, group: dist.ProcessGroup):
        super().__init__()
        model: Any = config.model
        dtype, each = Precision.of(config.precision).compute, layers(model)
        context = Context(model, comm.groups, False, dtype, WeightGrads())
        weights = {p.key: nn.Parameter(self._drawn(p, config, group).to(comm.device, dtype))
                   for p in dict.fromkeys(p for layer in each for p in layer.parameters())}
        self.layers = nn.ModuleList()
        for layer in each:
            if isinstance(layer, Routes):
                attention, norm = (Wrapped(part.build(context, weights))
                                   for part in (layer.attention, layer.norm))
                routes = layer
            elif isinstance(layer, Experts):
                of = {"router": weights[routes.router.held["weight"].key],
                      **{name: weights[p.key] for name, p in layer.weights.held.items()}}
                self.layers.append(Block(attention, norm, Mlps(model, of, group)))
            elif not layer.name.endswith("collect"):
                self.layers.append(Wrapped(layer.build(context, weights)))

    @staticmethod
    def _drawn(p: Parameter, config: Config, group: dist.ProcessGroup) -> torch.Tensor:
        values = initial_values(p, {}, {}, config.train.seed).view(p.module_shape({}))
        if any(cut.axis == "ep" for cut in p.cuts):
            return values.chunk(group.size())[group.rank()].clone()
        return values

    def forward(self, batch: Batch) -> torch.Tensor:
        x: Any = None
        for layer in self.layers:
            x = layer(x, batch)
        return x.loss


def plain(config: Config, comm: Comm) -> Step:
    """Experts' gradients are sums over the ranks of a run and, by hand, over the runs; DDP's are means."""
    ranks, ep = config.dp, config.parallel.ep
    runs = [dist.new_group(list(range(first, first + ep))) for first in range(0, ranks, ep)]
    same = [dist.new_group(list(range(place, ranks, ep))) for place in range(ep)]
    model = Model(config, comm, runs[comm.rank // ep])
    experts = {name: p for name, p in model.named_parameters() if name.endswith((".up", ".down"))}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*experts])
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(config, module)

    def reduce(*_: Any) -> None:
        for p in experts.values():
            p.grad /= ranks
            if ranks > ep:
                dist.all_reduce(p.grad, group=same[comm.rank % ep])

    optimizer.register_step_pre_hook(reduce)
    return stepper(config, module, optimizer, lambda last: contextlib.nullcontext() if last
                   else module.no_sync())
