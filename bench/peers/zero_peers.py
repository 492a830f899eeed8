"""Data parallelism five ways: threed's engine, and torch's and DeepSpeed's over one plain module of the same
layers.

Each executor takes one optimizer step a call, on micro-batches that are made before, and returns the loss of
this rank's tokens (a peer) or of all (threed). Loss is the mean over tokens; AdamW, fused, without clipping;
decay on matrices only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.models.layers.base import Layer
from threed.models.model import layers
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.plan import Plan
from threed.schema import Config, OffloadConfig
from threed.tensor.context import Batch, Context
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import Precision
from threed.tensor.random import initial_values


def import_deepspeed() -> tuple[Any, str]:
    """DeepSpeed's module and version, or None and the reason why it is missing."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)  # it talks a lot
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
        return deepspeed, deepspeed.__version__
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)


DEEPSPEED, DEEPSPEED_VERSION = import_deepspeed()


Step = Callable[[Sequence[Batch]], float]  # one optimizer step; the loss


# ---------------------------------------------------------------- threed


def threed(config: Config, comm: Comm, offload: OffloadConfig | None = None, **zero: Any) -> Step:
    config = dataclasses.replace(config, zero=dataclasses.replace(config.zero, **zero),
                                 offload=offload or config.offload)
    return on_engine(config, make_plan(config), comm)


def on_engine(config: Config, plan: Plan, comm: Comm) -> Step:
    engine = Engine(Analysis(plan), comm)
    return lambda data: engine.train_step(lambda microbatch: data[microbatch])[0].loss


# ---------------------------------------------------------------- the peers


class Wrapped(nn.Module):
    """A layer as a module of torch, which peers wrap."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.layer, self.held = layer, nn.ModuleList(layer.modules())

    def forward(self, x: torch.Tensor | None, batch: Batch) -> Any:
        return self.layer(x, batch)


def modules(config: Config, comm: Comm, which: slice = slice(None),
            context: Context | None = None) -> nn.ModuleList:
    """Layers of threed at tp=1 as torch's modules, with the initial values that threed draws. `context`: what
    they are built with; None: that of a rank with whole sequences."""
    dtype, chosen = Precision.of(config.precision).compute, layers(config.model)[which]
    context = context or Context(config.model, comm.groups, False, dtype, WeightGrads())
    weights = {}
    for p in dict.fromkeys(p for layer in chosen for p in layer.parameters()):
        values = initial_values(p, {}, {}, config.train.seed).view(p.module_shape({}))
        weights[p.key] = nn.Parameter(values.to(comm.device, dtype))
    return nn.ModuleList(Wrapped(layer.build(context, weights)) for layer in chosen)


class Gpt(nn.Module):
    """All layers as one module."""

    def __init__(self, config: Config, comm: Comm, context: Context | None = None):
        super().__init__()
        self.layers = modules(config, comm, context=context)

    def forward(self, batch: Batch) -> torch.Tensor:
        x: Any = None
        for layer in self.layers:
            x = layer(x, batch)
        return x.loss


def adamw(config: Config, module: nn.Module, make: Callable[..., Any] = torch.optim.AdamW) -> Any:
    options = config.optimizer
    groups = [{"params": [p for p in module.parameters() if (p.dim() > 1) == decay],
               "weight_decay": options.weight_decay if decay else 0.0} for decay in (True, False)]
    beta1, beta2 = options.betas
    return make(groups, lr=options.lr, betas=(beta1, beta2), eps=options.eps, fused=True)


def local(batch: Batch, parts: int) -> Batch:
    """Its loss is divided by the tokens of one of `parts`: the peers take means over what we sum."""
    return dataclasses.replace(batch, num_tokens=batch.num_tokens // parts)


def stepper(config: Config, module: nn.Module, optimizer: Any, quiet: Callable[[bool], Any]) -> Step:
    """`quiet`: the context of a micro-batch, which says whether it is the last: the others need not send
    anything."""
    def step(data: Sequence[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=data[0].tokens_BS.device)
        for number, batch in enumerate(data):
            with quiet(number == len(data) - 1):
                loss = module(local(batch, config.data_ranks))
                loss.backward()
            total += loss.detach()
        optimizer.step()
        return total.item()

    return step


def ddp(config: Config, comm: Comm, make: Callable[..., Any] = torch.optim.AdamW) -> Step:
    devices = [comm.device] if comm.device.type == "cuda" else None
    module = DistributedDataParallel(Gpt(config, comm), device_ids=devices, gradient_as_bucket_view=True)
    optimizer = adamw(config, module, make)
    return stepper(config, module, optimizer, lambda last: contextlib.nullcontext() if last
                   else module.no_sync())


def sharded_adamw(groups: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)


def zero_redundancy(config: Config, comm: Comm) -> Step:
    return ddp(config, comm, sharded_adamw)


def fsdp2(config: Config, comm: Comm, reshard: bool) -> Step:
    """A group a layer, and gradients reduced in every micro-batch, as threed's ZeRO-3 does by default."""
    module: Any = Gpt(config, comm)
    mesh = init_device_mesh(comm.device.type, (config.dp,))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return stepper(config, module, adamw(config, module), lambda last: contextlib.nullcontext())


@contextlib.contextmanager
def silent() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def cpu_adam(groups: Any, fused: bool, **options: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]
    return DeepSpeedCPUAdam(groups, **options)


def deepspeed(config: Config, comm: Comm, stage: int) -> Step:
    os.environ.setdefault("LOCAL_RANK", str(comm.rank))  # it asks for it
    module, zero, make = Gpt(config, comm), {"stage": stage}, torch.optim.AdamW
    if config.offload.optimizer == "cpu":
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": comm.device.type == "cuda"}}
        make = cpu_adam
    engine = deepspeed_engine(config, module, adamw(config, module, make), zero)

    def step(data: Sequence[Batch]) -> float:
        total = torch.zeros((), device=comm.device)
        for batch in data:
            loss = engine(local(batch, config.dp * config.num_microbatches))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / config.num_microbatches
        return total.item()

    return step


def deepspeed_engine(config: Config, module: nn.Module, optimizer: Any, zero: dict[str, Any]) -> Any:
    """`zero`: the section zero_optimization of its configuration."""
    with silent():
        return DEEPSPEED.initialize(model=module, optimizer=optimizer, dist_init_required=False, config={
            "train_micro_batch_size_per_gpu": config.train.micro_batch_size, "steps_per_print": 10**9,
            "gradient_accumulation_steps": config.num_microbatches, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0, "zero_optimization": zero,
            "bf16": {"enabled": config.precision.dtype == "bf16"}})[0]


def executors() -> dict[str, Callable[[Config, Comm], Step]]:
    """Name -> function that makes the executor."""
    makers: dict[str, Callable[[Config, Comm], Step]] = {
        "DDP": ddp, "ZeroRedundancyOptimizer": zero_redundancy,
        "FSDP2, reshard": partial(fsdp2, reshard=True),
        "FSDP2, keep": partial(fsdp2, reshard=False),
        **{f"threed {stage}": partial(threed, stage=stage) for stage in range(4)},
        "threed 2, host": partial(threed, stage=2, offload=OffloadConfig(optimizer="cpu")),
        "threed 3, step": partial(threed, stage=3, residency="step")}
    if DEEPSPEED is not None:
        makers |= {f"DeepSpeed {stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)}
    return makers
