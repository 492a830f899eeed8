"""The reference: the same model, global batch and seed in one process, one unsharded graph, plain torch.optim.AdamW.

It shares the layers with threed (at tp=1, where they are plain products) and nothing else: no plan, no engine, no flat
buffers. `tests/loopback/test_gpt.py` checks the layers themselves against ones written out by hand.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from threed.engine.loopback import ThreadGroup, World, initialized
from threed.mesh import Mesh
from threed.models.gpt import Batch, Context, build_layer, parameter_names
from threed.models.spec import layers, tied_parameter
from threed.schema import Config
from threed.tensor.layers import WeightGrads
from threed.tensor.random import initial_values
from threed.zero.optimizer import learning_rate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Result:
    losses: list[float]
    norms: list[float]
    first_grads: dict[str, torch.Tensor]  # before the first update, unclipped
    weights: dict[str, torch.Tensor]  # after the last


def tokens_of(config: Config, step: int) -> torch.Tensor:
    """Random token ids [G, S + 1] of the global batch of a step, with structure that can be learned."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (config.train.global_batch_size, config.model.seq_len + 1)
    return torch.randint(0, config.model.vocab, shape, generator=generator)


def run(config: Config, steps: int) -> Result:
    with initialized():
        return _run(config, steps)


def _run(config: Config, steps: int) -> Result:
    model, dtype = config.model, DTYPES[config.precision.dtype]
    alone = ThreadGroup("tp", (0,), 0, Counter(), World(Mesh()))
    context = Context(model, alone, False, dtype, WeightGrads())
    modules = [build_layer(index, context) for index in range(model.layers + 2)]
    tied = tied_parameter(model)
    specs = [p for layer in layers(model) for p in layer.parameters] + ([tied] if tied else [])
    masters = {p.name: initial_values(p, 1, 0, config.train.seed).requires_grad_() for p in specs}
    live = {p.name: nn.Parameter(masters[p.name].detach().to(dtype).view(p.module_shape(1))) for p in specs}
    for index, module in enumerate(modules):
        for inside, name in parameter_names(index, module, model).items():
            path, _, last = inside.rpartition(".")
            setattr(module.get_submodule(path), last, live[name])
    decay = {p.name: p.decay for p in specs}
    groups = [{"params": [masters[n] for n in masters if decay[n] == flag],
               "weight_decay": config.optimizer.weight_decay if flag else 0.0} for flag in (True, False)]
    beta1, beta2 = config.optimizer.betas
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(beta1, beta2), eps=config.optimizer.eps)
    result = Result([], [], {}, {})
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    for step in range(steps):
        tokens = tokens_of(config, step)
        total = 0.0
        for value in masters.values():
            value.grad = torch.zeros_like(value)
        # 16 bit: the same casts as threed's, micro-batch by micro-batch, gradients added in fp32.
        for first in range(0, size, size if dtype == torch.float32 else micro):
            last = first + (size if dtype == torch.float32 else micro)
            samples = torch.arange(step * size + first, step * size + last)
            batch = Batch(tokens[first:last, :-1], tokens[first:last, 1:], samples, config.train.seed,
                          config.tokens_per_step)
            x = None
            for module in modules:
                x = module(x, batch)
            assert x is not None
            x.backward()
            total += x.item()
            for name, value in live.items():
                masters[name].grad += value.grad.float().view_as(masters[name])  # pyright: ignore
                value.grad = None
        result.losses.append(total)
        if step == 0:
            result.first_grads = {name: value.grad.clone() for name, value in masters.items()}  # pyright: ignore
        limit = config.optimizer.clip_grad or float("inf")
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, config.train.steps)
        optimizer.step()
        with torch.no_grad():
            for name, value in live.items():
                value.copy_(masters[name].view_as(value))
    result.weights = {name: value.detach() for name, value in masters.items()}
    return result
