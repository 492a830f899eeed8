"""Pipelines that compute, three ways: threed's engine, and torch's and DeepSpeed's over stages made of the
same layers.

All cut the model alike: as many blocks a stage, the embedding on the first and the head on the last. Each
executor takes one optimizer step a call, as those of zero_peers do, and with their optimizer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from bench.peers.zero_peers import DEEPSPEED, Step, adamw, deepspeed_engine, local, modules, on_engine, silent
from threed.comm.group import Comm
from threed.comm.process import ProcessComm
from threed.engine.loopback import channel_pairs
from threed.models.layers.base import Out
from threed.planner import make_plan
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.precision import Precision


def cut(blocks: int, stages: int) -> list[int]:
    """Layers of each stage. Every layer is a unit."""
    if blocks % stages:
        raise SystemExit(f"{blocks} blocks are not a multiple of {stages} stages: change --layers")
    counts = [blocks // stages] * stages
    counts[0] += 1
    counts[-1] += 1
    return counts


class Stage(nn.Module):
    """The layers of a stage. Each call takes the next micro-batch of `data`, and returns the residual stream,
    or the loss on the last stage."""

    def __init__(self, config: Config, comm: Comm, stage: int, stages: int):
        super().__init__()
        ends = [0, *accumulate(cut(config.model.layers, stages))]
        self.layers = modules(config, comm, slice(ends[stage], ends[stage + 1]))
        self.data: Iterator[Batch] = iter(())

    def forward(self, x: Any) -> Any:
        """`x`: the residual stream [S, B, D], or on the first stage token ids, which `data` has too."""
        batch = next(self.data)
        if not x.is_floating_point():
            x = None
        for layer in self.layers:
            x = layer(x, batch)
        return x.loss if isinstance(x, Out) else x


# ---------------------------------------------------------------- threed


def threed(config: Config, comm: ProcessComm, schedule: str, zero_stage: int) -> Step:
    counts = cut(config.model.layers, config.parallel.pp * (SCHEDULES[schedule].virtual or 1))
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, schedule=schedule, stage_units=counts),
        zero=dataclasses.replace(config.zero, stage=zero_stage))
    plan = make_plan(config)
    comm.open_channels(channel_pairs(plan))  # in place of those that earlier executors have opened
    return on_engine(config, plan, comm)


# ---------------------------------------------------------------- torch


def torch_1f1b(config: Config, comm: Comm, make: Callable[..., Any] | None = None) -> Step:
    """Schedule1F1B over a stage in DDP, which sends gradients during the last backward. `make`: as for adamw;
    it gets the dp group as process_group."""
    pp, dp, device = config.parallel.pp, config.dp, comm.device
    mesh = init_device_mesh(device.type, (pp, dp), mesh_dim_names=("pp", "dp"))
    number, group = mesh.get_local_rank("pp"), mesh.get_group("dp")
    stage = module = Stage(config, comm, number, pp)
    if dp > 1:
        module = DistributedDataParallel(stage, process_group=group, gradient_as_bucket_view=True,
                                         device_ids=[device] if device.type == "cuda" else None)
    optimizer = adamw(config, module, partial(make, process_group=group) if make else torch.optim.AdamW)
    tokens = torch.zeros(config.train.micro_batch_size, config.model.seq_len, dtype=torch.int64,
                         device=device)
    stream = torch.zeros(*reversed(tokens.shape), config.model.hidden, device=device, requires_grad=True,
                         dtype=Precision.of(config.precision).compute)
    first, last = number == 0, number == pp - 1
    # with examples of its tensors torch need not run a stage to see them
    schedule = Schedule1F1B(
        PipelineStage(module, number, pp, device, group=mesh.get_group("pp"),
                      input_args=tokens if first else stream,
                      output_args=torch.zeros((), device=device, requires_grad=True) if last else stream),
        config.num_microbatches, loss_fn=lambda output, target: output, scale_grads=False)

    def step(data: Sequence[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        stage.data, losses = (local(batch, dp) for batch in data), []
        inputs = [torch.cat([batch.tokens_BS for batch in data])] if first else []
        target = torch.cat([batch.labels_BS for batch in data]) if last else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).sum().item() if losses else 0.0

    return step


# ---------------------------------------------------------------- DeepSpeed


def deepspeed_pipeline(config: Config, comm: Comm, zero_stage: int) -> Step:
    """PipelineModule, whose schedule is 1F1B."""
    from deepspeed.pipe import LayerSpec, PipelineModule  # pyright: ignore[reportMissingImports]
    os.environ.setdefault("LOCAL_RANK", str(comm.rank))  # it asks for it
    pp = config.parallel.pp
    with silent():
        DEEPSPEED.init_distributed(dist_init_required=False)
        module = PipelineModule([LayerSpec(Stage, config, comm, stage, pp) for stage in range(pp)],
                                num_stages=pp, partition_method="uniform", loss_fn=lambda loss, labels: loss)
    engine = deepspeed_engine(config, module, adamw(config, module), {"stage": zero_stage})
    stage = next(each for each in module.modules() if isinstance(each, Stage))

    def step(data: Sequence[Batch]) -> float:
        stage.data = (local(batch, config.dp * config.num_microbatches) for batch in data)
        loss = engine.train_batch(iter([(batch.tokens_BS, batch.labels_BS) for batch in data]))
        return loss.item() / pp  # of all; other peers have it on the last stage alone

    return step
