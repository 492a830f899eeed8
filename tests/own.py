"""User layers against plain torch: the same modules, one after the other, in one process, with
an optimizer of torch. It shares with threed how a module is made from a seed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.harness import Ranks, assert_contract, loopback
from tests.reference import DTYPES, Matrices, Result
from threed.api.initialize import initialize
from threed.comm.group import Comm
from threed.models.model import layers
from threed.models.own.model import OwnLayer, drawing
from threed.models.own.samples import Samples
from threed.optim.rate import learning_rate
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.random import seed_of

USUAL: dict[str, Any] = {
    "parallel.dp": 1, "train.global_batch_size": 8, "train.micro_batch_size": 1, "train.steps": 5,
    "optimizer.lr": 1e-3, "optimizer.eps": 1e-2, "optimizer.clip_grad": 0.0, "optimizer.schedule": "constant"}


def own(model: Any, *overrides: str, **others: Any) -> Config:
    return initialize(model, config={**USUAL, **others}, overrides=[*overrides])


def samples_of(config: Config) -> tuple[Samples, Samples]:
    first = layers(config.model)[0]
    assert isinstance(first, OwnLayer)
    return first.chain.samples(config)


def batches(config: Config, comm: Comm, step: int, train: bool = True) -> Callable[[int], Batch]:
    """As of trainer.batches_of."""
    micro, size, split = config.train.micro_batch_size, config.train.global_batch_size, samples_of(config)[0]

    def batch(microbatch: int) -> Batch:
        first = step * size + (microbatch * config.dp + comm.here.replica) * micro
        inputs, targets = split.batch(range(first, first + micro))
        empty = torch.empty(0, dtype=torch.int64)
        return Batch(empty, empty, torch.arange(first, first + micro), config.train.seed, size, train,
                     inputs=inputs, targets=targets, first=first)

    return batch


def run(config: Config, steps: int) -> Ranks:
    return loopback(config, steps, data=batches)


def assert_own(config: Config, steps: int | None = None) -> None:
    assert_contract(config, reference, run, steps)


def reference(config: Config, steps: int) -> Result:
    return Reference(config).run(steps)


class Reference:
    """In 16 bit with the same casts; micro-batch by micro-batch, since dropout is drawn for each."""

    def __init__(self, config: Config):
        self.config, self.dtype = config, DTYPES[config.precision.dtype]
        first = layers(config.model)[0]
        assert isinstance(first, OwnLayer)
        self.chain, self.split = first.chain, samples_of(config)[0]
        self.names: list[Mapping[str, str]] = []  # of each layer: path -> name of the parameter
        self.modules = []
        self.masters: dict[str, torch.Tensor] = {}
        self.live: dict[str, nn.Parameter] = {}
        self.turned: set[str] = set()  # matrices of linears, but those that a layer names for AdamW
        for index, spec in enumerate(self.chain.specs):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(config.train.seed, "initial values", self.chain.names[index]))
                module = spec.module("")
            for path, weight in list(module.named_parameters()):
                tied = spec.tied_as(path)
                name = f"{self.chain.names[index]}.{path}" if tied is None else f"tied.{tied}"
                if name not in self.live:
                    self.masters[name] = weight.detach().float().clone()
                    self.live[name] = nn.Parameter(self.masters[name].to(self.dtype))
                places = [(each, key) for each in module.modules() for key, value in each._parameters.items()
                          if value is weight]
                for each, key in places:
                    each._parameters[key] = self.live[name]
                if (all(type(each) is nn.Linear and key == "weight" for each, key in places)
                        and tied is None and path not in spec.adamw):
                    self.turned.add(name)
            self.modules.append(module)

    def loss(self, first: int, train: bool) -> tuple[torch.Tensor, float]:
        """Of a micro-batch: a sum, and the weight by whose sum over the global batch it is to be divided."""
        micro = self.config.train.micro_batch_size
        x, targets = self.split.batch(range(first, first + micro))
        for index, (spec, module) in enumerate(zip(self.chain.specs, self.modules, strict=True)):
            module.train(train)
            with drawing(self.config.train.seed, "forward", self.chain.names[index], first):
                x = spec.call(module, x)
        loss = self.chain.loss(x, targets)
        if isinstance(loss, tuple):
            return loss[0].float(), float(loss[1])
        return loss.float() * micro, micro

    @torch.no_grad()
    def whole(self, step: int, train: bool) -> float:
        """What a global batch weighs."""
        size, micro = self.config.train.global_batch_size, self.config.train.micro_batch_size
        return sum(self.loss(first, train)[1] for first in range(step * size, (step + 1) * size, micro))

    def run(self, steps: int) -> Result:
        config, result = self.config, Result([], [], {}, {})
        size, micro = config.train.global_batch_size, config.train.micro_batch_size
        beta1, beta2 = config.optimizer.betas
        groups = [{"params": [each for each in self.masters.values() if (each.dim() > 1) == decay],
                   "weight_decay": config.optimizer.weight_decay if decay else 0.0}
                  for decay in (True, False)]
        if config.optimizer.name == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(beta1, beta2), eps=config.optimizer.eps)
        else:
            optimizer = Matrices(config, groups, self.masters, lambda _, name, shape: [
                torch.arange(shape[0])] if name in self.turned else [])
        for step in range(steps):
            whole = self.whole(step, True)
            total, grads = 0.0, {name: torch.zeros_like(value) for name, value in self.masters.items()}
            for first in range(step * size, (step + 1) * size, micro):
                loss = self.loss(first, True)[0] / whole
                loss.backward()
                total += loss.item()
                for name, value in self.live.items():
                    assert value.grad is not None, name
                    grads[name] += value.grad.float()
                    value.grad = None
            for name, value in self.masters.items():
                value.grad = grads[name]
            if step == 0:
                result.first_grads = {name: grad.clone() for name, grad in grads.items()}
            limit = config.optimizer.clip_grad or float("inf")
            result.losses.append(total)
            result.norms.append(float(nn.utils.clip_grad_norm_(self.masters.values(), limit)))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optimizer, step, config.train.steps)
            optimizer.step()
            with torch.no_grad():
                for name, value in self.live.items():
                    value.copy_(self.masters[name])
        result.weights = dict(self.masters)
        with torch.no_grad():
            result.evaluated = sum(self.loss(first, False)[0].item()
                                   for first in range(steps * size, (steps + 1) * size, micro)
                                   ) / self.whole(steps, False)
        return result
