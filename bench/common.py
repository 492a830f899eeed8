"""What benches share: a GPT's sizes, its config and micro-batches; the machine, and a common start."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch

from threed.comm.process import ProcessComm
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


def start_together(comm: ProcessComm) -> None:
    """A barrier that all leave at the same moment: processes of one machine read one monotonic clock."""
    start = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
    comm.groups["world"].all_reduce(start, "max").wait()
    time.sleep(max(0.0, start.item() - time.monotonic()))


def processors() -> tuple[float, float]:
    """Seconds since boot, over all processors: at work, and at work or idle. (0, 0) where the system does not
    say."""
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    # the fourth and fifth are idle and iowait
    return (sum(fields) - fields[3] - fields[4]) / tick, sum(fields) / tick


def machine() -> str:
    return f"{os.cpu_count()} cores, CPU, torch {torch.__version__}, Python {platform.python_version()}"
