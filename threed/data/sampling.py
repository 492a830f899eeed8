"""Sampling: how tokens of a generated text are chosen. Plain numbers, no torch."""

from __future__ import annotations

import math
from typing import NamedTuple

from threed.base.errors import InputError

TOKENIZER = "tokenizer.json"  # in the folder of a run, and of a model of Hugging Face
IMPORTED = "huggingface"  # the folder in which an import keeps it


class Sampling(NamedTuple):
    """How `threed.generate` chooses tokens.

    >>> threed.generate("runs/toy", ["def "], threed.Sampling(tokens=100, temperature=0.8, top_p=0.95))
    """

    tokens: int = 64  # most tokens that are added to a prompt
    temperature: float = 1.0  # logits are divided by it; 0: always the most likely token
    top_p: float = 1.0  # among the most likely tokens that have this probability together
    seed: int = 1234

    def check(self) -> None:
        """InputError where a number makes no sense."""
        if not self.tokens >= 1:
            raise InputError(f"max_tokens={self.tokens}: must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature={self.temperature}: must be at least 0 (always the most likely "
                             "token); 1 is what the model says")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}: must be above 0 and at most 1 (all tokens)")
        if not self.seed >= 0:
            raise InputError(f"seed={self.seed}: must be at least 0")
