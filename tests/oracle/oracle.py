"""The oracle: models of transformers in fp64, and a step of training in plain torch.

It shares no code with threed, nor with tests/reference.py, so no mistake of theirs can be here as well
(test_oracle.py looks at the imports). It is given a cell, the rows of tokens that threed says it has read,
and the experts that threed's routers have chosen. It believes neither:

    corpus.py           the token file; a row must be one of its windows, each window once an epoch
    routers.py          choices and drops of experts must be its own, unless rounding alone decides
    oracle.py           gradient norm, clipping, AdamW, Lion, SGD, learning rate, biases of routers
    transformers        forward and backward, with a mask and positions for documents
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from tests.oracle.corpus import LEFT_OUT, Rows
from tests.oracle.routers import MARGIN, Mixture, Router

# A score may differ by so much after a step of Lion: where a router has no gradient, as with one expert a
# token whose weight is 1, rounding alone has moved each of its weights by the learning rate.
AFTER_LION = 3e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
           "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM",
           "qwen3_moe": "Qwen3MoeForCausalLM", "dots1": "Dots1ForCausalLM"}


def make_model(family: str, values: Mapping[str, Any], seed: int) -> Any:
    """A model of transformers with random weights, in fp32."""
    torch.manual_seed(seed)
    kind = CLASSES[family].replace("LMHeadModel", "").replace("ForCausalLM", "")
    config = getattr(transformers, f"{kind}Config")(**values)
    config._experts_implementation = "eager"  # its kernels have no fp64
    model = getattr(transformers, CLASSES[family])(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms and biases, too, each its own
            norm = weight.dim() == 1 and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.15 + (1.0 if norm else 0.0))
        for name, bias in model.named_buffers():
            if name.endswith("correction_bias"):
                bias.copy_(torch.randn_like(bias) * 0.1)
    return model



@dataclass
class Recipe:
    """How a cell is trained."""

    optimizer: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 0.0
    warmup: int = 0
    schedule: str = "constant"
    min_lr: float = 0.0
    steps: int = 3
    dtype: str = "fp32"
    balance_rate: float = 0.0  # of biases of routers; 0: they do not move

    def lr_of(self, update: int) -> float:
        """Of update 0, 1, ..."""
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        first = self.warmup
        if self.schedule == "wsd":  # the last tenth falls in a line
            first = max(first, self.steps - max(1, self.steps // 10))
        if update >= self.steps:
            return self.min_lr
        share = max(0.0, (update - first) / max(1, self.steps - first))
        fall = (1 + math.cos(math.pi * share)) / 2 if self.schedule == "cosine" else 1 - share
        return self.min_lr + (self.lr - self.min_lr) * fall


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    first: dict[str, torch.Tensor] = field(default_factory=dict)  # weights before the first step
    # Of Lion: elements whose direction is too small for its sign to be known
    unsure: dict[str, torch.Tensor] = field(default_factory=dict)
    near: int = 0  # choices that rounding has decided


class Oracle:
    """Trains a model of transformers. `mixture`: of a model with experts."""

    def __init__(self, model: Any, recipe: Recipe, mixture: Mixture | None = None):
        self.recipe = recipe
        self.model = model.double().train()
        # What the optimizer updates; the model has what compute reads of it.
        self.masters = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.masters}
        self.routers: dict[int, Router] = {}
        self.updates = 0
        self.result = Outcome(first={name: value.clone() for name, value in self.masters.items()})
        for block, layer in enumerate(getattr(getattr(self.model, "model", None), "layers", [])):
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                assert mixture is not None
                bias = getattr(gate, "e_score_correction_bias", None)
                self.routers[block] = Router(f"blocks.{block}", mixture, gate.num_experts,
                                             MARGIN[recipe.dtype], bias)
                gate.register_forward_hook(self.routers[block])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, value in self.model.named_parameters():
            value.copy_(self.masters[name].to(DTYPES[self.recipe.dtype]) if self.recipe.dtype != "fp32"
                        else self.masters[name])

    def step(self, rows: Rows, chosen: Mapping[int, torch.Tensor]) -> None:
        """One optimizer step. `chosen`: block -> the experts that threed has chosen, [G, S, k]."""
        count = max(1, int((rows.labels != LEFT_OUT).sum()))
        for block, router in self.routers.items():
            router.chosen = chosen[block]
            if self.recipe.optimizer == "lion" and self.result.losses:
                router.margin = max(router.margin, AFTER_LION)
        length = rows.tokens.shape[1]
        document = rows.starts.cumsum(1)
        places = torch.arange(length)
        positions = places - torch.where(rows.starts, places, 0).cummax(1).values
        mask = (document.unsqueeze(2) == document.unsqueeze(1)) & (places.unsqueeze(1) >= places)
        logits = self.model(rows.tokens, attention_mask=mask.unsqueeze(1), position_ids=positions,
                            use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=LEFT_OUT,
                               reduction="sum") / count
        penalty = sum(router.penalty for router in self.routers.values()) / count
        self.model.zero_grad()
        (loss + penalty).backward()
        self.result.losses.append(float(loss.detach()))
        grads = {name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
                 for name, value in self.model.named_parameters()}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        self.result.norms.append(norm)
        if self.recipe.clip and norm > self.recipe.clip:
            grads = {name: grad * (self.recipe.clip / norm) for name, grad in grads.items()}
        rows_of = {block: router.rows for block, router in self.routers.items() if router.rows is not None}
        self._update(grads, rows_of)
        self._publish()

    @torch.no_grad()
    def _update(self, grads: Mapping[str, torch.Tensor], rows_of: Mapping[int, torch.Tensor]) -> None:
        recipe, lr = self.recipe, self.recipe.lr_of(self.updates)
        self.updates += 1
        rules: dict[str, Callable[..., torch.Tensor]] = {
            "adamw": self._adamw, "lion": self._lion, "sgd": lambda name, grad, decay: grad + decay}
        for name, value in self.masters.items():
            decay = recipe.weight_decay * value if value.dim() > 1 else torch.zeros_like(value)
            value -= lr * rules[recipe.optimizer](name, grads[name], decay)
        for block, router in self.routers.items():
            if router.bias is not None and recipe.balance_rate:
                rows = rows_of[block].double()
                router.bias += recipe.balance_rate * torch.sign(rows.mean() - rows)

    def _adamw(self, name: str, grad: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        (beta1, beta2), state, n = self.recipe.betas, self.state[name], self.updates
        zeros = torch.zeros_like(grad)
        mean = state["mean"] = beta1 * state.get("mean", zeros) + (1 - beta1) * grad
        square = state["square"] = beta2 * state.get("square", zeros) + (1 - beta2) * grad ** 2
        return mean / (1 - beta1 ** n) / ((square / (1 - beta2 ** n)).sqrt() + self.recipe.eps) + decay

    def _lion(self, name: str, grad: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        (beta1, beta2), state = self.recipe.betas, self.state[name]
        mean = state.get("mean", torch.zeros_like(grad))
        direction = beta1 * mean + (1 - beta1) * grad
        state["mean"] = beta2 * mean + (1 - beta2) * grad
        small = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.03}[self.recipe.dtype]
        most = max(float(direction.abs().max()), 1e-3 * self.result.norms[-1] * (1 - beta1))
        unsure = direction.abs() < small * most
        self.result.unsure[name] = self.result.unsure.get(name, torch.zeros_like(unsure)) | unsure
        return direction.sign() + decay

    def finish(self) -> Outcome:
        """The outcome, with the names of transformers' state_dict."""
        result = self.result
        result.weights = dict(self.masters)
        for block, router in self.routers.items():
            result.near += router.near
            if router.bias is not None:
                result.weights[f"model.layers.{block}.mlp.gate.e_score_correction_bias"] = router.bias.clone()
        return result
