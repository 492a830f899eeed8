"""The reference: the same model, global batch and seed in one process, one unsharded graph, a plain
torch.optim.Optimizer.

It shares the layers of any family with threed (at tp=1, where they are plain products) and nothing else: no
plan, no engine, no flat buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from threed.base.mesh import GROUPS, Mesh
from threed.comm.process import initialized
from threed.engine.loopback import ThreadGroup, World
from threed.models.layers.base import Out
from threed.models.model import layers, parameters
from threed.optim.rate import learning_rate
from threed.schema import Config
from threed.spec.parameter import NOT_COUNTED
from threed.tensor.context import Batch, Context
from threed.tensor.layers import WeightGrads
from threed.tensor.random import initial_values

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Lion(torch.optim.Optimizer):
    """Lion, word by word from the paper's algorithm 2: beta1 for the direction, beta2 for the mean that is
    kept."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                direction = torch.sign(beta1 * mean + (1 - beta1) * weight.grad)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                mean.copy_(beta2 * mean + (1 - beta2) * weight.grad)


@dataclass
class Result:
    losses: list[float]
    norms: list[float]
    first_grads: dict[str, torch.Tensor]  # before the first update, unclipped
    weights: dict[str, torch.Tensor]  # after the last
    evaluated: float = 0.0  # loss of the step after the last, forward only


def tokens_of(config: Config, step: int) -> torch.Tensor:
    """Random token ids [G, S + 1] of the global batch of a step, uniform and independent."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (config.train.global_batch_size, config.model.seq_len + 1)
    return torch.randint(0, config.model.vocab, shape, generator=generator)


@dataclass
class Data:
    """The global batch of a step."""

    tokens_GS: torch.Tensor
    labels_GS: torch.Tensor  # NOT_COUNTED where a label does not count
    positions_GS: torch.Tensor | None  # with data.document_mask
    count: int  # labels that count

    def num_tokens(self, config: Config) -> int | torch.Tensor:
        return torch.tensor(self.count) if config.masked else self.count

    def documents(self, row: int) -> Iterator[slice]:
        """Where the documents of a sequence are; all of it is one where documents are not kept apart."""
        length = self.tokens_GS.shape[1]
        starts = [0]
        if self.positions_GS is not None:
            starts = (self.positions_GS[row] == 0).nonzero().flatten().tolist()
        yield from map(slice, starts, [*starts[1:], length])


def data_of(config: Config, step: int) -> Data:
    """Tokens as in `tokens_of`, in documents of random lengths, of which random tokens count."""
    tokens = tokens_of(config, step)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    generator, positions = torch.Generator().manual_seed(5000 + step), None
    if config.data.document_mask:
        starts = torch.rand(inputs.shape, generator=generator) < 0.25
        starts[:, 0] = True
        places = torch.arange(inputs.shape[1])
        positions = places - torch.where(starts, places, 0).cummax(1).values
        labels[:, :-1][starts[:, 1:]] = NOT_COUNTED  # the next token is of another document
    if config.data.loss_mask != "none":
        labels[torch.rand(inputs.shape, generator=generator) < 0.6] = NOT_COUNTED
        labels[0] = NOT_COUNTED  # a micro-batch of which nothing counts
    return Data(inputs, labels, positions, int((labels != NOT_COUNTED).sum()))


def run(config: Config, steps: int) -> Result:
    with initialized():
        return Reference(config).run(steps)


class Reference:
    def __init__(self, config: Config):
        self.config, self.precision, self.dtype = config, config.precision, DTYPES[config.precision.dtype]
        model = replace(config.model, loss_chunk=None, fused="off")
        alone = {name: ThreadGroup(name, (0,), 0, Counter(), World(Mesh())) for name in GROUPS}
        self.context = context = Context(model, alone, False, self.dtype, WeightGrads())
        specs = parameters(model)
        self.masters = {p.name: initial_values(p, {}, {}, config.train.seed).requires_grad_(p.trains)
                        for p in specs}
        self.trained = {p.name: self.masters[p.name] for p in specs if p.trains}
        self.live = {
            p.name: nn.Parameter(self.masters[p.name].detach().to(self.dtype).view(p.module_shape({})),
                                 p.trains)
            for p in specs
        }
        self.layers = [layer.build(context, self.live) for layer in layers(model)]
        self.publish()
        groups = [{"params": [self.masters[p.name] for p in specs if p.decay == decay and p.trains],
                   "weight_decay": config.optimizer.weight_decay if decay else 0.0}
                  for decay in (True, False)]
        beta1, beta2 = config.optimizer.betas
        options = {"adamw": {"betas": (beta1, beta2), "eps": config.optimizer.eps},
                   "lion": {"betas": (beta1, beta2)}, "sgd": {}}
        make = {"adamw": torch.optim.AdamW, "lion": Lion, "sgd": torch.optim.SGD}[config.optimizer.name]
        self.optimizer = make(groups, lr=1.0, **options[config.optimizer.name])
        # 16 bit: the same casts as threed's, micro-batch by micro-batch.
        self.micro = (
            config.train.global_batch_size if self.dtype == torch.float32 else config.train.micro_batch_size
        )

    @torch.no_grad()
    def publish(self) -> None:
        """Round the weights for compute. Without a master, what is rounded is all that is kept."""
        for name, value in self.live.items():
            value.copy_(self.masters[name].view_as(value))
            if self.precision.master == "none" or name not in self.trained:
                self.masters[name].copy_(value.view_as(self.masters[name]))

    def losses(self, step: int, train: bool = True) -> Iterator[tuple[torch.Tensor, torch.Tensor | float]]:
        """The loss of each micro-batch of a step, and its penalty."""
        data, size = data_of(self.config, step), self.config.train.global_batch_size
        count = data.num_tokens(self.config)
        for first in range(0, size, self.micro):
            rows = slice(first, first + self.micro)
            samples = torch.arange(step * size + first, step * size + first + self.micro)
            batch = Batch(data.tokens_GS[rows], data.labels_GS[rows], samples, self.config.train.seed, count,
                          train)
            if data.positions_GS is None:
                yield self.parts(batch)
            else:
                # One by one: nothing but the divisor knows of other documents.
                assert not self.config.model.dropout and not self.config.model.attention_dropout
                parts = [self.parts(replace(batch, tokens_BS=batch.tokens_BS[row:row + 1, place],
                                            labels_BS=batch.labels_BS[row:row + 1, place]))
                         for row in range(self.micro) for place in data.documents(first + row)]
                yield torch.stack([loss for loss, _ in parts]).sum(), sum(penalty for _, penalty in parts)

    def loss(self, batch: Batch) -> torch.Tensor:
        """The part of some sequences of one length."""
        return self.parts(batch)[0]

    def parts(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The same, and their penalty."""
        length = batch.tokens_BS.shape[1]
        if length != self.context.model.seq_len:
            self.context.model = replace(self.context.model, seq_len=length)
            self.context._rotary.clear()
        x, given, loss, penalty = None, {}, 0.0, 0.0
        for layer in self.layers:
            out = layer(x, batch, **{name: given[name] for name in layer.reads})
            out = out if isinstance(out, Out) else Out(out)
            came = {way.becomes: out.makes[name] for name, way in layer.travels.items()}  # of this one rank
            x, given = out.x, {**given, **out.makes, **came}
            loss = loss if out.loss is None else loss + out.loss
            penalty = penalty if out.penalty is None else penalty + out.penalty
        assert isinstance(loss, torch.Tensor)
        return loss, penalty

    def backward(self, step: int) -> float:
        """Gradients of the masters; the loss."""
        scale = self.config.loss_scale
        assert scale is not None, "a comparison needs a loss scale that stays"
        total, grads = 0.0, {}
        for loss, penalty in self.losses(step):
            total += loss.item()
            (loss + penalty).backward(torch.full_like(loss, scale))
            for name, value in ((name, self.live[name]) for name in self.trained):
                grad, value.grad = value.grad, None
                assert grad is not None
                grads[name] = (
                    grads[name] + grad if name in grads else grad.to(DTYPES[self.precision.grad_dtype])
                )
        for name, value in self.trained.items():  # over dp each rank's part is rounded; here the sum
            value.grad = grads[name].to(DTYPES[self.precision.reduce_dtype]).float().view_as(value) / scale
        return total

    def run(self, steps: int) -> Result:
        config, offload, result = self.config.optimizer, self.config.offload, Result([], [], {}, {})
        waiting: list[torch.Tensor | None] | None = None  # with delayed updates: the clipped gradients of the
        # step before
        updates = 0
        for step in range(steps):
            result.losses.append(self.backward(step))
            if step == 0:
                result.first_grads = {name: value.grad.clone() for name, value in self.trained.items()}  # pyright: ignore
            limit = config.clip_grad or float("inf")
            result.norms.append(float(torch.nn.utils.clip_grad_norm_(self.trained.values(), limit)))
            made = [value.grad for value in self.trained.values()]
            last = step == self.config.train.steps - 1
            due = [made]
            if offload.delayed_update and (waiting is not None or (step >= offload.warmup and not last)):
                due = [*([waiting] if waiting is not None else []), *([made] if last else [])]
                waiting = None if last else made
            for grads in due:
                for value, grad in zip(self.trained.values(), grads, strict=True):
                    value.grad = grad
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(config, updates, self.config.train.steps)
                self.optimizer.step()
                self.publish()
                updates += 1
        result.weights = {name: value.detach() for name, value in self.masters.items()}
        with torch.no_grad():
            result.evaluated = sum(loss.item() for loss, _ in self.losses(steps, train=False))
        return result
