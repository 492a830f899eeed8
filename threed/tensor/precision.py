"""The dtypes of a run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from threed.schema import PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(NamedTuple):
    compute: torch.dtype  # weights as compute reads them, activations, messages
    grad: torch.dtype  # accumulated gradients
    reduce: torch.dtype  # gradients in messages over dp
    master: bool  # whether a 16-bit weight has an fp32 copy

    @classmethod
    def of(cls, config: PrecisionConfig) -> Precision:
        return cls(DTYPES[config.dtype], DTYPES[config.grad_dtype], DTYPES[config.reduce_dtype],
                   config.master == "fp32" and config.dtype != "fp32")
