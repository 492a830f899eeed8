"""Muon (Jordan et al. 2024; Liu et al. 2025): steps by momentum whose singular values an iteration of Newton
and Schulz has brought to about 1. Its numbers are those of torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from threed.optim.base import MatrixOptimizer, Update

if TYPE_CHECKING:
    from torch import Tensor

    from threed.schema import OptimizerConfig


class Muon(MatrixOptimizer):
    def turn(self, matrix: Tensor, by: Update) -> Tensor:
        import torch

        a, b, c = by.config.turn_coefficients
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.T if tall else matrix
        x.div_(x.norm().clamp(min=by.config.turn_eps))
        for _ in range(by.config.turns):
            squares = x @ x.T
            x = torch.addmm(x, torch.addmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x

    def products(self, rows: int, columns: int, config: OptimizerConfig) -> Sequence[tuple[int, int, int]]:
        m, n = sorted((rows, columns))
        return [(m, m, n), (m, m, m), (m, n, m)] * config.turns
