"""What benches share: a GPT's sizes, its config and micro-batches; the machine; processes, and a common
start; tables."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threed.comm.process import ProcessComm
from threed.config.load import load
from threed.schema import Config
from threed.tensor.context import Batch

TIMEOUT_S = 300.0  # of communication


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


@contextmanager
def on_ranks(count: int, serve: Callable[..., None], *args: Any, method: str = "fork") -> Iterator[list[Any]]:
    """So many processes, which are killed at the end, and a pipe to each. Their body is `serve(rank, file of
    a store, *args, pipe)`: it sends what `answer` returns, and as text the traceback of what went wrong."""
    context: Any = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        pipes, processes = [], []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, daemon=True,
                                          args=(rank, str(Path(scratch) / "store"), *args, theirs))
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            yield pipes
        finally:
            for process in processes:
                process.kill()
                process.join()


def answer(rank: int, pipe: Any) -> Any:
    """What a process of `on_ranks` has sent next."""
    if not pipe.poll(TIMEOUT_S + 60):
        raise SystemExit(f"rank {rank} does not answer")
    try:
        message = pipe.recv()
    except EOFError:
        message = "it ended without a word"
    if isinstance(message, str):
        raise SystemExit(f"rank {rank} failed:\n{message}")
    return message


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


def put_section(file: Path, title: str, text: str) -> None:
    """Write a section of a file of Markdown, in place of the one of this title if there is one, else at the
    end."""
    before = file.read_text() if file.exists() else ""
    sections = re.split(r"(?m)^(?=## )", before)
    new, old = f"## {title}\n\n{text.strip()}\n", [each.startswith(f"## {title}\n") for each in sections]
    if any(old):
        sections[old.index(True)] = new + "\n" * (not old[-1])
    else:
        sections.append(("\n" if before else "") + new)
    file.write_text("".join(sections))


def columns(lines: Sequence[Sequence[str]]) -> str:
    """A table of Markdown, its head first: the first column to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["| " + " | ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) + " |"
             for line in lines]
    rule = "|" + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)]) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])
