"""Frequencies of rotary positions (Su et al. 2021), and their scaling to longer sequences."""

from __future__ import annotations

import math

import torch

from threed.schema import ModelConfig


def frequencies(model: ModelConfig) -> torch.Tensor:
    """Radians a token of each pair of a head's numbers, fp64, [E/2]: theta^(-2i/E), scaled by
    model.rope_scaling."""
    size = model.head_size
    plain = model.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return plain if model.rope_scaling is None else _scaled(plain, *model.rope_scaling)


def _scaled(plain: torch.Tensor, factor: float, low: float, high: float, before: float) -> torch.Tensor:
    """Llama 3's scaling (Dubey et al. 2024; the code of Llama 3.1): waves longer than before/low tokens are
    stretched by `factor`, those shorter than before/high stay, and between them the share that is stretched
    falls linearly with the number of waves in `before` tokens."""
    waves = before * plain / (2 * math.pi)
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / factor
