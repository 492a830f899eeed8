"""The reference: the same model, global batch and seed in one process, one unsharded graph, a plain
torch.optim.Optimizer.

It shares the layers of any family with threed (at tp=1, where they are plain products) and nothing else: no
plan, no engine, no flat buffers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from threed.base.mesh import GROUPS, Mesh
from threed.comm.process import initialized
from threed.engine.loopback import ThreadGroup, World
from threed.models.layers.base import Out
from threed.models.layers.experts import Collects, Experts, ExpertsConfig, Routes, SharedExpert
from threed.models.layers.handing import handing
from threed.models.layers.residual import Dropout
from threed.models.model import layers, parameters
from threed.optim.rate import learning_rate
from threed.schema import Config, OptimizerConfig
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


def newton_schulz(matrix: torch.Tensor, config: OptimizerConfig) -> torch.Tensor:
    """The direction of Muon's step, in the dtype of the matrix, word by word from Jordan et al. 2024."""
    a, b, c = config.turn_coefficients
    x = matrix if len(matrix) <= len(matrix.T) else matrix.T
    x = x / max(float(x.norm()), config.turn_eps)
    for _ in range(config.turns):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if len(matrix) <= len(matrix.T) else x.T


def polar_factor(matrix: torch.Tensor, config: OptimizerConfig) -> torch.Tensor:
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (left[:, values > 1e-3 * values[0]] @ right[values > 1e-3 * values[0]]).float()


class Turned(torch.optim.Optimizer):
    """Momentum of whole matrices, turned."""

    def __init__(self, matrices: list[nn.Parameter], turn, config: OptimizerConfig):
        super().__init__(matrices, {"lr": 1.0})
        self.turn, self.config = turn, config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        mu, config = self.config.momentum, self.config
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.copy_(mu * mean + (1 - mu) * weight.grad)
                update = (1 - mu) * weight.grad + mu * mean if config.nesterov else mean
                m, n = weight.shape
                size = 0.2 * max(m, n)**0.5 if config.turn_scale == "match_rms_adamw" else max(1, m / n)**0.5
                weight -= group["lr"] * (config.weight_decay * weight
                                         + size * self.turn(update.clone(), config))


def rows_of_matrices(config: Config, name: str, shape: torch.Size) -> list[torch.Tensor]:
    """The rows of each matrix of a parameter that is turned; none of the others."""
    of_layer = ".attention." in name or ".mlp." in name or ".shared." in name or ".experts." in name
    if not of_layer or len(shape) < 2 or name.endswith((".lora_A", ".lora_B")):
        return []
    rows, model = torch.arange(math.prod(shape[:-1])), config.model
    if not name.endswith("qkv.weight"):
        return [*rows.view(-1, shape[-2])]
    heads = rows.view(model.num_kv_heads, -1, model.head_size)  # of each key head: queries, key, value
    if config.optimizer.matrices == "heads":
        return [*heads.flatten(0, 1)]
    return [heads[:, :-2].flatten(), heads[:, -2].flatten(), heads[:, -1].flatten()]


class Matrices(torch.optim.Optimizer):
    """Each matrix by torch.optim.Muon, or by `Turned` where that has no such turn; the rest by AdamW."""

    def __init__(self, config: Config, groups: list[dict], names: Mapping[str, torch.Tensor],
                 rows_of: Callable[[Config, str, torch.Size], list[torch.Tensor]] = rows_of_matrices):
        self.config, mine = config.optimizer, config.optimizer
        self.parts: list[tuple[torch.Tensor, torch.Tensor, nn.Parameter]] = []
        for name, value in names.items():
            for rows in rows_of(config, name, value.shape):
                matrix = nn.Parameter(value.detach().reshape(-1, value.shape[-1])[rows].clone())
                self.parts.append((value, rows, matrix))
        matrices, turned = [matrix for *_, matrix in self.parts], [value for value, *_ in self.parts]
        for group in groups:
            group["params"] = [each for each in group["params"] if not any(each is value for value in turned)]
            if mine.adamw_weight_decay is not None and group["weight_decay"]:
                group["weight_decay"] = mine.adamw_weight_decay
        beside = torch.optim.AdamW(groups, lr=1.0, betas=(mine.betas[0], mine.betas[1]), eps=mine.eps)
        if mine.name == "muon" and mine.turn_dtype == "bf16":
            turner = torch.optim.Muon(
                matrices, lr=1.0, weight_decay=mine.weight_decay, momentum=mine.momentum,
                nesterov=mine.nesterov, ns_coefficients=tuple(mine.turn_coefficients),  # pyright: ignore
                eps=mine.turn_eps, ns_steps=mine.turns, adjust_lr_fn=mine.turn_scale)
        else:
            turner = Turned(matrices, newton_schulz if mine.name == "muon" else polar_factor, mine)
        self.beside, self.turner = beside, turner
        self.param_groups = [*beside.param_groups, *turner.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for value, rows, matrix in self.parts:
            assert value.grad is not None
            matrix.grad = value.grad.reshape(-1, value.shape[-1])[rows]
            matrix.copy_(value.view(-1, value.shape[-1])[rows])  # which `publish` may have rounded
        if self.config.adamw_lr is not None:
            for group in self.beside.param_groups:
                group["lr"] *= self.config.adamw_lr / self.config.lr
        self.beside.step()
        self.turner.step()
        for value, rows, matrix in self.parts:
            value.view(-1, value.shape[-1])[rows] = matrix


# (block, sample) -> experts of each of its tokens, [S][k]
Picks = dict[tuple[str, int], list[list[int]]]


@dataclass
class Result:
    losses: list[float]
    norms: list[float]
    first_grads: dict[str, torch.Tensor]  # before the first update, unclipped
    weights: dict[str, torch.Tensor]  # after the last
    evaluated: float = 0.0  # loss of the step after the last, forward only
    picks: Picks = field(default_factory=dict)
    margin: float = math.inf  # least difference of the last score that was chosen and the next


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


def _eight_bits(weight: float) -> float:
    mantissa, exponent = math.frexp(weight)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _far_apart(count: int) -> list[int]:
    """Numbers below `count`, in an order in which neighbours are spread evenly: one of each of as many equal
    runs as the least prime factor says, and so on within the runs."""
    prime = next((each for each in range(2, count + 1) if count % each == 0), None)
    if prime is None:
        return [0]
    inner = _far_apart(count // prime)
    return [first * (count // prime) + each for each in inner for first in range(prime)]


def _gap(falling: list[float], count: int) -> float:
    """From the last of the first `count` numbers to the next."""
    return falling[count - 1] - falling[count] if count < len(falling) else math.inf


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
        # Biases of routers -> the mean of rows of an expert in a step: their gradients are counts.
        self.counted = {p.name: p.counted * config.tokens_per_step for p in specs if p.counted and p.trains}
        self.live = {
            p.name: nn.Parameter(self.masters[p.name].detach().to(torch.float32 if p.counted else self.dtype)
                                 .view(p.module_shape({})), p.trains)
            for p in specs
        }
        self.layers = [layer.build(context, self.live) for layer in layers(model)]
        self.picks: list[tuple[str, torch.Tensor]] = []  # in a step: block, choice of each token
        self.choices: Picks = {}
        self.margin = math.inf
        self.publish()
        groups = [{"params": [self.masters[p.name] for p in specs
                              if p.decay == decay and p.trains and not p.counted],
                   "weight_decay": config.optimizer.weight_decay if decay else 0.0}
                  for decay in (True, False)]
        if config.optimizer.name in ("muon", "polar"):
            self.optimizer = Matrices(config, groups, self.trained)
        else:
            self.optimizer = self._elementwise(groups)
        # 16 bit: the same casts as threed's, micro-batch by micro-batch.
        self.micro = (
            config.train.global_batch_size if self.dtype == torch.float32 else config.train.micro_batch_size
        )

    def _elementwise(self, groups: list[dict]) -> torch.optim.Optimizer:
        config = self.config
        beta1, beta2 = config.optimizer.betas
        options = {"adamw": {"betas": (beta1, beta2), "eps": config.optimizer.eps},
                   "lion": {"betas": (beta1, beta2)}, "sgd": {}}
        make = {"adamw": torch.optim.AdamW, "lion": Lion, "sgd": torch.optim.SGD}[config.optimizer.name]
        return make(groups, lr=1.0, **options[config.optimizer.name])

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
                                            labels_BS=batch.labels_BS[row:row + 1, place],
                                            samples_B=samples[row:row + 1]))
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
            if isinstance(layer, SharedExpert | Experts | Collects):
                continue  # of a block that `_mixture` has computed
            out = (self._mixture(layer, x, batch) if isinstance(layer, Routes) and x is not None
                   else layer(x, batch, **{name: given[name] for name in handing(layer).reads}))
            out = out if isinstance(out, Out) else Out(out)
            came = {way.becomes: out.makes[name] for name, way in handing(layer).travels.items()
                    if name in out.makes}  # of this one rank
            x, given = out.x, {**given, **out.makes, **came}
            loss = loss if out.loss is None else loss + out.loss
            penalty = penalty if out.penalty is None else penalty + out.penalty
        assert isinstance(loss, torch.Tensor)
        return loss, penalty

    def _mixture(self, layer: Routes, x: torch.Tensor, batch: Batch) -> Out:
        """A block with experts, in a loop over them. It shares the attention, the norm and the shared expert
        with threed, and nothing of the experts."""
        model, name = layer.model, layer.name
        x = layer.attention(x, batch)
        normed = layer.norm(x)
        tokens = normed.flatten(0, 1)
        logits = tokens.float() @ self.live[f"{name}.router.weight"].float().t()
        scores = logits.softmax(-1) if model.router_score == "softmax" else logits.sigmoid()
        bias = self.live[f"{name}.router.bias"] if model.balance == "bias" else 0.0
        picks = self._picks(model, scores.detach() + bias, x.shape[1])
        self.picks.append((name, picks))
        of_samples = picks.view(-1, len(batch.samples_B), model.experts_per_token)
        for at, sample in enumerate(batch.samples_B.tolist()):  # one after the other, where it is documents
            self.choices.setdefault((name, sample), []).extend(of_samples[:, at].tolist())
        weights = scores.gather(1, picks)
        if model.normalize_top_k:
            weights = weights / weights.sum(1, keepdim=True)
        weights = weights * model.routed_scale
        kept = self._within_capacity(model, picks, weights, x.shape[1]) if batch.train else picks >= 0
        up, down = self.live[f"{name}.experts.up"], self.live[f"{name}.experts.down"]
        total = torch.zeros_like(tokens)
        for expert in range(model.experts):
            token, place = ((picks == expert) & kept).nonzero(as_tuple=True)
            rows = tokens[token]
            gate, value = rows @ up[expert, 0].t(), rows @ up[expert, 1].t()
            inner = nn.functional.silu(gate.float()) * value.float() * weights[token, place].unsqueeze(1)
            total = total.index_add(0, token, inner.to(rows.dtype) @ down[expert].t())
        total = total.view_as(normed)
        for shared in self.layers:
            if isinstance(shared, SharedExpert) and shared.name == f"{name}.shared":
                total = total + shared.mlp(normed, batch)
        out = x + Dropout(model, f"{name}.mlp").build(self.context, {})(total, batch)
        return Out(out, penalty=self._penalty(model, logits, scores, picks, batch))

    def _picks(self, model: ExpertsConfig, scores: torch.Tensor, sequences: int) -> torch.Tensor:
        """The choice of each token, by itself."""
        k, groups = model.experts_per_token, model.expert_groups
        if model.moe_route == "balanced":
            order = _far_apart(model.experts)
            return torch.tensor([[order[(t // sequences * k + j) % model.experts] for j in range(k)]
                                 for t in range(len(scores))])
        picks = []
        for row in scores.tolist():
            runs = [range(at, at + model.experts // groups)
                    for at in range(0, model.experts, model.experts // groups)]
            sums = {run: sum(sorted((row[e] for e in run), reverse=True)[:k // model.groups_per_token])
                    for run in runs}
            best = sorted(runs, key=lambda run: -sums[run])
            allowed = [e for run in best[:model.groups_per_token] for e in run]
            order = sorted(allowed, key=lambda e: (-row[e], e))
            picks.append(order[:k])
            self.margin = min(self.margin, _gap([sums[run] for run in best], model.groups_per_token),
                              _gap([row[e] for e in order], k))
        return torch.tensor(picks)

    @staticmethod
    def _within_capacity(model: ExpertsConfig, picks: torch.Tensor, weights: torch.Tensor,
                         sequences: int) -> torch.Tensor:
        """Which choices of each token are computed: by weights of 8 bits, as bf16 has them."""
        kept = torch.ones_like(picks, dtype=torch.bool)
        if model.moe_capacity is None:
            return kept
        length = len(picks) // sequences
        most = math.ceil(length * picks.shape[1] / model.experts * model.moe_capacity)
        for sequence in range(sequences):
            for expert in range(model.experts):
                mine = [(-_eight_bits(weights[token, place].item()), token, place)
                        for token in range(sequence, len(picks), sequences)
                        for place in range(picks.shape[1]) if picks[token, place] == expert]
                for _, token, place in sorted(mine)[most:]:
                    kept[token, place] = False
        return kept

    @staticmethod
    def _penalty(model: ExpertsConfig, logits: torch.Tensor, scores: torch.Tensor, picks: torch.Tensor,
                 batch: Batch) -> torch.Tensor | None:
        penalty, size = [], len(batch.tokens_BS)
        if model.z_loss:
            penalty += [model.z_loss * logit.exp().sum().log() ** 2 for logit in logits]
        for row in range(size if model.balance == "sequence" else 0):
            mine = scores[row::size]  # [S, E]
            mine = mine / mine.sum(1, keepdim=True)
            for expert in range(model.experts):
                share = (picks[row::size] == expert).sum() / len(mine) / model.experts_per_token
                penalty.append(model.balance_weight * model.experts * share * mine[:, expert].sum())
        return torch.stack(penalty).sum() / batch.num_tokens if penalty else None

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
                if name in self.counted:
                    continue
                assert grad is not None
                grads[name] = (
                    grads[name] + grad if name in grads else grad.to(DTYPES[self.precision.grad_dtype])
                )
        for name in grads:  # over dp each rank's part is rounded; here the sum
            value = self.trained[name]
            value.grad = grads[name].to(DTYPES[self.precision.reduce_dtype]).float().view_as(value) / scale
        for name in self.counted:  # of all micro-batches
            rows = [picks for block, picks in self.picks if name == f"{block}.router.bias"]
            self.trained[name].grad = torch.cat(rows).flatten().bincount(
                minlength=len(self.trained[name])).float()
        self.picks.clear()
        return total

    def run(self, steps: int, first: int = 0) -> Result:
        """So many steps, from the step `first` on."""
        config, result = self.config.optimizer, Result([], [], {}, {})
        for step in range(first, first + steps):
            result.losses.append(self.backward(step))
            if step == first:
                result.first_grads = {name: value.grad.clone() for name, value in self.trained.items()}  # pyright: ignore
            limit = config.clip_grad or float("inf")
            normed = [value for name, value in self.trained.items() if name not in self.counted]
            result.norms.append(float(torch.nn.utils.clip_grad_norm_(normed, limit)))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(config, step, self.config.train.steps)
            self.optimizer.step()
            with torch.no_grad():
                for name, mean in self.counted.items():
                    bias = self.trained[name]
                    assert bias.grad is not None
                    bias += config.balance_rate * torch.sign(mean - bias.grad)
            self.publish()
        result.weights = {name: value.detach() for name, value in self.masters.items()}
        with torch.no_grad():
            result.evaluated = sum(loss.item() for loss, _ in self.losses(first + steps, train=False))
        result.picks, result.margin = self.choices, self.margin
        return result
