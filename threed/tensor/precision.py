"""The dtypes of a run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from threed.schema import PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PIECE = 1 << 20  # elements that are compared at a time


class Precision(NamedTuple):
    compute: torch.dtype  # weights as compute reads them, activations, messages
    grad: torch.dtype  # accumulated gradients
    reduce: torch.dtype  # gradients in messages over dp
    master: bool  # whether a 16-bit weight has an fp32 copy

    @classmethod
    def of(cls, config: PrecisionConfig) -> Precision:
        return cls(DTYPES[config.dtype], DTYPES[config.grad_dtype], DTYPES[config.reduce_dtype],
                   config.master == "fp32" and config.dtype != "fp32")


def has_bits_of(published: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether a flat tensor has the bits of the weights converted to its dtype. Compared a piece at a time on
    the tensor's device; the weights may be on another. All NaNs are equal: their bits depend on the
    device."""
    bits = {2: torch.int16, 4: torch.int32}[published.dtype.itemsize]
    for start in range(0, len(published), PIECE):
        piece = published[start:start + PIECE]
        want = weights[start:start + PIECE].to(piece.device, piece.dtype)
        same = (piece.view(bits) == want.view(bits)) | (piece.isnan() & want.isnan())
        if not same.all():
            return False
    return True
