"""The optimizer on flat ranges, and the learning rate. Both are pure functions of their arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from threed import native
from threed.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up from lr / warmup_steps, then the schedule, then min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    stop = config.decay_steps if config.decay_steps is not None else total_steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        length = config.wsd_decay_steps if config.wsd_decay_steps is not None else max(1, stop // 10)
        start = max(start, stop - length)
    if step >= stop:
        return config.min_lr
    share = max(0.0, (step - start) / max(1, stop - start))
    if config.schedule == "cosine":
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * share))
    return config.lr + (config.min_lr - config.lr) * share


@dataclass
class Moments:
    """Optimizer state of a flat range."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Update(NamedTuple):
    """What a step is done with."""

    config: OptimizerConfig
    lr: float
    number: int  # 1 for the first update (Adam's bias correction)
    decay: bool
    scale: float  # of the gradients


# Elements that are taken at a time where 16 bits are read or written: on a CPU so few that they stay in its cache.
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 22}


def step(update: Update, weight: torch.Tensor, grad: torch.Tensor, moments: Moments, copy: torch.Tensor | None = None) -> None:
    """Update `weight` in place, and write what comes of it into `copy`, too; all are flat. `grad` may be scaled in place. 16-bit
    weights and gradients are taken through fp32, a chunk at a time.

    AdamW: Loshchilov and Hutter 2019; native.c on the host, else torch's fused kernel. SGD: without momentum, decay as an L2
    gradient.
    """
    if update.config.name == "adamw" and _on_host(update, weight, grad, moments, copy):
        return
    narrow = not weight.dtype == grad.dtype == torch.float32
    size = min(CHUNK[weight.device.type], len(weight)) if narrow or copy is not None else len(weight)
    scratch = torch.empty(2, size if narrow else 0, device=weight.device)
    for start in range(0, len(weight), max(1, size)):
        part = slice(start, start + size)
        wide = _wide(weight[part], scratch[0])
        _step(update, wide, _wide(grad[part], scratch[1]), Moments(moments.exp_avg[part], moments.exp_avg_sq[part]))
        if weight.dtype != torch.float32:
            weight[part] = wide
        if copy is not None:
            copy[part] = wide


def step_twice(update: Update, weight: torch.Tensor, grad: torch.Tensor, moments: Moments,
               copy: torch.Tensor | None = None) -> torch.Tensor:
    """`step`, and the same on copies first. How many elements differ."""
    state = weight, moments.exp_avg, moments.exp_avg_sq
    again, scratch = [tensor.clone() for tensor in state], torch.empty_like(copy) if copy is not None else None
    step(update, again[0], grad.clone(), Moments(*again[1:]), scratch)
    step(update, weight, grad, moments, copy)
    pairs = [*zip(again, state, strict=True), *([(scratch, copy)] if scratch is not None and copy is not None else [])]
    return torch.stack([((one != other) & ~(one.isnan() & other.isnan())).sum() for one, other in pairs]).sum()


def _on_host(update: Update, weight: torch.Tensor, grad: torch.Tensor, moments: Moments, copy: torch.Tensor | None) -> bool:
    """AdamW by native.c, with torch's number of threads. False, and nothing is done, for what it does not do."""
    state = (weight, moments.exp_avg, moments.exp_avg_sq)
    everything = (*state, grad, *(() if copy is None else (copy,)))
    if (native.ADAMW is None or any(tensor.dtype != torch.float32 for tensor in state)
            or any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in everything)):
        return False
    assert all(tensor.numel() == weight.numel() for tensor in everything)
    config, (beta1, beta2) = update.config, update.config.betas
    kinds = [native.KINDS[str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""] for tensor in (grad, copy)]
    numbers = native.Numbers(
        update.scale, beta1, 1 - beta1, beta2, 1 - beta2, 1 - update.lr * (config.weight_decay if update.decay else 0.0),
        update.lr / (1 - beta1**update.number), 1 / math.sqrt(1 - beta2**update.number), config.eps)
    native.ADAMW(native.Range(*(tensor.data_ptr() for tensor in (*state, grad)), copy.data_ptr() if copy is not None else None,
                              *kinds), weight.numel(), torch.get_num_threads(), numbers)
    return True


def _wide(tensor: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Itself if it is in fp32, else a copy."""
    return tensor if tensor.dtype == torch.float32 else scratch[:len(tensor)].copy_(tensor)


def _step(update: Update, weight: torch.Tensor, grad: torch.Tensor, moments: Moments) -> None:
    config, lr = update.config, update.lr
    weight_decay = config.weight_decay if update.decay else 0.0
    if config.name == "sgd":
        weight.mul_(1 - lr * weight_decay).add_(grad, alpha=-lr * update.scale)
        return
    beta1, beta2 = config.betas
    # The kernel itself: what torch.optim does around it takes longer than a chunk. It divides by its scale.
    count = torch.tensor(float(update.number), device=weight.device)
    divisor = torch.tensor(1 / update.scale, device=weight.device) if update.scale != 1.0 else None
    with torch.no_grad():
        torch._fused_adamw_([weight], [grad], [moments.exp_avg], [moments.exp_avg_sq], [], [count], amsgrad=False, lr=lr,
                            beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=config.eps, maximize=False,
                            grad_scale=divisor, found_inf=None)
