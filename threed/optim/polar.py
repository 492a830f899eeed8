"""Polar: Muon's update with the exact polar factor of each matrix, by its singular values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from threed.optim.base import MatrixOptimizer, Update

if TYPE_CHECKING:
    from torch import Tensor

    from threed.schema import OptimizerConfig


class Polar(MatrixOptimizer):
    def turn(self, matrix: Tensor, by: Update) -> Tensor:
        import torch

        left, values, right = torch.linalg.svd(matrix.float(), full_matrices=False)
        kept = values > 1e-3 * values[0]  # the directions of the others are noise
        return ((left * kept) @ right).to(matrix.dtype)

    def products(self, rows: int, columns: int, config: OptimizerConfig) -> Sequence[tuple[int, int, int]]:
        m, n = sorted((rows, columns))
        return [(m, n, 10 * m), (m, n, m)]  # about what an SVD takes
