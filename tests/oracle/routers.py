"""Experts of the oracle: hooks on the routers of transformers, which have neither a capacity nor penalties of
each sequence. (No threed.)

A choice between scores that rounding alone tells apart is threed's. All others must be the oracle's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from tests.oracle.corpus import Wrong

# Scores and weights that differ by less may be told apart by rounding alone.
MARGIN = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}


@dataclass
class Mixture:
    """How experts are chosen and trained."""

    score: str  # softmax | sigmoid
    normalize: bool
    scale: float
    groups: int = 1
    groups_per_token: int = 1
    capacity: float | None = None
    sequence_weight: float = 0.0
    z_loss: float = 0.0


@dataclass
class Router:
    """The hook of one router."""

    name: str
    mixture: Mixture
    experts: int
    margin: float
    bias: torch.Tensor | None = None  # of the choice
    chosen: torch.Tensor | None = None  # by threed, [G, S, k]; one that is dropped has E added to its number
    penalty: Any = 0.0  # of the step, a sum over tokens
    rows: torch.Tensor | None = None  # tokens of each expert in the step, dropped ones included
    near: int = 0  # choices and drops that rounding has decided

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        """What the router returns instead of `output`: (logits, weights, picks)."""
        logits, theirs, best = output
        mixture, chosen = self.mixture, self.chosen
        assert chosen is not None
        scores = logits.softmax(-1) if mixture.score == "softmax" else logits.sigmoid()
        picks = self._settled(scores.detach(), best, chosen.flatten(0, 1) % self.experts)
        weights = scores.gather(1, picks)
        if mixture.normalize:
            weights = weights / weights.sum(1, keepdim=True)
        weights = weights * mixture.scale
        same = (picks.sort(1).values == best.sort(1).values).all(1)
        mine, own = weights.gather(1, picks.argsort(1)), theirs.gather(1, best.argsort(1))
        assert torch.allclose(mine[same].double(), own[same].double(), atol=1e-6), "not transformers' weights"
        if mixture.capacity is not None:
            weights = weights * self._within(picks, weights.detach(), chosen)
        self.rows = picks.flatten().bincount(minlength=self.experts)
        self.penalty = self._penalty(logits, scores, picks.view_as(chosen))
        return logits, weights.to(theirs.dtype), picks

    def _settled(self, scores: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The experts of each token, in threed's order: the best, or threed's where these are as good."""
        rated = scores if self.bias is None else scores + self.bias
        differ = (best.sort(1).values != chosen.sort(1).values).any(1)
        for token in differ.nonzero().flatten().tolist():
            if (gap := self._gap(rated[token])) > self.margin:
                raise Wrong(f"{self.name}: token {token} has {chosen[token].tolist()}, and its best experts "
                            f"are {best[token].tolist()}, by {gap:.1e}")
            self.near += 1
        return chosen

    def _gap(self, rated: torch.Tensor) -> float:
        """By how much the choice of a token is decided."""
        groups, of_token = self.mixture.groups, self.mixture.groups_per_token
        assert self.chosen is not None
        k, gap = self.chosen.shape[2], math.inf
        if groups > of_token:
            grouped = rated.view(groups, -1)
            sums, order = grouped.topk(k // of_token, -1).values.sum(-1).sort(descending=True)
            gap = float(sums[of_token - 1] - sums[of_token])
            rated = grouped[order[:of_token]].flatten()
        falling = rated.sort(descending=True).values
        return min(gap, float(falling[k - 1] - falling[k])) if k < len(falling) else gap

    def _within(self, picks: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """1 where a choice is computed, 0 where it is dropped. In a sequence an expert takes the tokens with
        the largest weights, and of those that are equal in bf16 the first."""
        size, length, k = chosen.shape
        most = min(length, math.ceil(length * k * (self.mixture.capacity or 0.0) / self.experts))
        kept = chosen.flatten(0, 1) < self.experts
        for row, expert in product(range(size), range(self.experts)):
            part = slice(row * length, (row + 1) * length)
            tokens, places = (picks[part] == expert).nonzero(as_tuple=True)
            mine, computed = weights[part][tokens, places], kept[part][tokens, places].tolist()
            order = mine.bfloat16().argsort(descending=True, stable=True).tolist()
            wrong = [number for rank, number in enumerate(order) if computed[number] != (rank < most)]
            if wrong and (sum(computed) != min(most, len(order))
                          or not self._unclear(mine[[*wrong, *order[most - 1:most + 1]]])):
                raise Wrong(f"{self.name}: expert {expert} takes {most} tokens of sequence {row}, those with "
                            f"the largest weights. Tokens {tokens.tolist()} chose it, with weights "
                            f"{mine.tolist()}; computed are {computed}")
            self.near += len(wrong)
        return kept.to(weights.dtype)

    def _unclear(self, weights: torch.Tensor) -> bool:
        """Whether rounding may decide which of these are larger: they are next to each other in bf16, and one
        is where bf16 may round up or down."""
        up, down = ((weights + by).bfloat16().double() for by in (self.margin, -self.margin))
        return bool((up != down).any() and down.max() - up.min() <= 2 ** -7 * up.max())

    def _penalty(self, logits: torch.Tensor, scores: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        """DeepSeek-V3's loss of each sequence, times its tokens, and the z-loss of each token."""
        mixture, (size, length, k) = self.mixture, picks.shape
        total = mixture.z_loss * logits.logsumexp(-1).square().sum()
        shares = (scores / scores.sum(-1, keepdim=True)).view(size, length, -1).sum(1)
        for row in range(size):
            load = picks[row].flatten().bincount(minlength=self.experts) * self.experts / (k * length)
            total = total + mixture.sequence_weight * (load * shares[row]).sum()
        return total
