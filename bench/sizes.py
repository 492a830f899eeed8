"""A GPT's sizes, its config, and micro-batches for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from threed.config.load import load
from threed.schema import Config
from threed.tensor.context import Batch


class Sizes(NamedTuple):
    """The model and its batch."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    micro_batch: int
    num_microbatches: int
    dtype: str = "fp32"


def make_config(sizes: Sizes, ranks: int, *more: str) -> Config:
    return load(None, [
        f"model.layers={sizes.layers}", f"model.hidden={sizes.hidden}", f"model.heads={sizes.heads}",
        f"model.vocab={sizes.vocab}", f"model.seq_len={sizes.seq_len}", "model.position=learned",
        "model.tie_embeddings=false",
        f"parallel.dp={ranks}", f"train.micro_batch_size={sizes.micro_batch}",
        f"train.global_batch_size={sizes.micro_batch * sizes.num_microbatches * ranks}", "optimizer.lr=1e-3",
        "optimizer.clip_grad=0", "optimizer.schedule=constant", f"precision.dtype={sizes.dtype}", *more])


def batches(config: Config, step: int, rank: int, device: torch.device) -> list[Batch]:
    """The micro-batches of a rank: random tokens, the same for all executors."""
    model, micro = config.model, config.train.micro_batch_size
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, model.vocab, (config.train.global_batch_size, model.seq_len + 1),
                           generator=generator).to(device)
    micro_batches = []
    for number in range(config.num_microbatches):
        first = (number * config.dp + rank) * micro
        rows = slice(first, first + micro)
        samples = torch.arange(first, first + micro, device=device)
        micro_batches.append(Batch(tokens[rows, :-1], tokens[rows, 1:], samples, config.train.seed,
                           config.tokens_per_step))
    return micro_batches
