"""Context parallelism in plain torch, twice, under DDP: keys and values are gathered by an autograd function,
or go round a ring and outputs are merged by their log-sum-exps.

All but attention is threed's layers as modules of torch (zero_peers), with the tokens of a rank in zig-zag
order: so that only attention over several ranks is another.

Shapes: B micro-batch, N heads, s the tokens of this rank (two chunks of s/2), S those of the sequence, E head
size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from bench.peers.zero_peers import Gpt, Step, adamw, stepper
from threed.comm.group import Comm
from threed.schema import Config
from threed.tensor.context import Batch, Context
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import Precision

_ops: Any = torch.ops.aten


def peer(attention: type[Context]):
    """The executor of layers whose context has another attention."""
    def make(config: Config, comm: Comm) -> Step:
        context = attention(config.model, comm.groups, False, Precision.of(config.precision).compute,
                            WeightGrads(), tokens=(comm.rank, comm.mesh.size))
        module = DistributedDataParallel(Gpt(config, comm, context), gradient_as_bucket_view=True)
        step = stepper(config, module, adamw(config, module), lambda last: contextlib.nullcontext() if last
                       else module.no_sync())
        return lambda data: step([batch.at(context.places()) for batch in data])

    return make


# ---------------------------------------------------------------- keys that are gathered


class _Gathered(torch.autograd.Function):
    """[B, N, s, E] of all ranks, in the order of the sequence, [B, N, S, E]. Its backward adds up."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor):
        own = torch.stack(parts)
        every = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(every, own)
        early, late = every.unflatten(0, (-1, len(own))).chunk(2, 4)
        return torch.cat([*early, *late.flip(0)], 3).unbind()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        early, late = torch.stack(grads).unflatten(3, (2 * dist.get_world_size(), -1)).chunk(2, 3)
        gives = torch.cat([early.movedim(3, 0), late.flip(3).movedim(3, 0)], 4)
        takes = torch.empty_like(gives)
        dist.all_to_all_single(takes, gives)
        return tuple(takes.sum(0).unbind())


class GatheredKeys(Context):
    def attend(self, q_BNSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor,
               batch: Batch) -> torch.Tensor:
        k, v = _Gathered.apply(k_BKSE, v_BKSE)
        parts = []
        for part, run in zip(q_BNSE.chunk(2, 2), self.places().own[0]):
            seen = torch.ones(len(run), run.stop, dtype=torch.bool).tril(run.start)
            parts.append(F.scaled_dot_product_attention(part, k[:, :, :run.stop], v[:, :, :run.stop], seen))
        return torch.cat(parts, 2)


# ---------------------------------------------------------------- a ring


@dataclass
class _Turn:
    """Keys and values of a rank, as this rank's queries see them: which of both, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


def _turns(rank: int, ranks: int, length: int) -> list[_Turn]:
    """Of own keys, and of those that come from each rank before."""
    everything, half = slice(None), length // 2
    turns = [_Turn(everything, everything, True)]
    for step in range(1, ranks):
        earlier = (rank - step) % ranks < rank
        turns.append(_Turn(everything, slice(half), False) if earlier else
                     _Turn(slice(half, None), everything, False))
    return turns


def _passed(tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """What the rank before has, once the works are done; the next rank gets this."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(tensor)
    return came, dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, (rank + 1) % ranks),
                                         dist.P2POp(dist.irecv, came, (rank - 1) % ranks)])


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        turns = _turns(dist.get_rank(), dist.get_world_size(), q.shape[2])
        held, out, log_sums = torch.stack([k, v]), torch.zeros_like(q), None
        for number, turn in enumerate(turns):
            came, works = _passed(held) if number + 1 < len(turns) else (held, [])
            keys, values = held[:, :, :, turn.keys].unbind()
            part, sums = _ops._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, turn.queries], keys, values, 0.0, turn.causal)
            if log_sums is None:
                out, log_sums = part, sums
            else:
                _merge(out[:, :, turn.queries], log_sums[:, :, turn.queries], part, sums)
            _wait(works)
            held = came
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.turns = turns
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        q, k, v, out, log_sums = ctx.saved_tensors
        held, of_q = torch.stack([k, v]), torch.zeros_like(q)
        sums = torch.zeros_like(held)
        for number, turn in enumerate(ctx.turns):
            came, works = _passed(held) if number + 1 < len(ctx.turns) else (held, [])
            keys, values = held[:, :, :, turn.keys].unbind()
            own = turn.queries
            of_own, *of_held = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                grads[0][:, :, own], q[:, :, own], keys, values, out[:, :, own],
                log_sums[:, :, own].contiguous(), 0.0, turn.causal)
            of_q[:, :, own] += of_own
            sums[0, :, :, turn.keys] += of_held[0]
            sums[1, :, :, turn.keys] += of_held[1]
            _wait(works)
            held = came
            sums, works = _passed(sums)  # with the keys that they are of, and in the end to their rank
            _wait(works)
        return of_q, *sums.unbind()


def _merge(out: torch.Tensor, log_sums: torch.Tensor, part: torch.Tensor, sums: torch.Tensor) -> None:
    """Softmaxes over some keys and over others, as one over all: in place of the first."""
    both = torch.logaddexp(log_sums, sums)
    out.mul_((log_sums - both).exp().unsqueeze(-1)).add_(part * (sums - both).exp().unsqueeze(-1))
    log_sums.copy_(both)


class Ring(Context):
    def attend(self, q_BNSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor,
               batch: Batch) -> torch.Tensor:
        return _Ring.apply(q_BNSE, k_BKSE, v_BKSE)  # pyright: ignore[reportReturnType]
