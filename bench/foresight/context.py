"""Context parallelism before any run: how evenly attention is spread, and a published step.

    python -m bench.foresight.context         # in a minute; the toy's corpus is tokenized once, into a folder
                                              # of its own that is deleted

Balance is the busiest rank's work over the mean, of each sequence, in both orders of parallel.cp_order: in
each layer all ranks wait for the busiest. Work is pairs of a query and a key of its document, as spec/deal
counts it. No attention is computed.

Llama 3 405B (Grattafiori et al. 2024, table 4) is predicted with all activations kept,
interleaved with a unit a stage, at ZeRO-1. The paper does not say whether its FLOPs count attention whole,
as MFU does here, or halved for the causal mask; at 131,072 tokens that is 40% of them.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import NamedTuple

import torch

from bench.gpu.models import markdown
from threed.config.load import load
from threed.data.mix import open_splits
from threed.data.tokens import prepare
from threed.models.model import model_flops
from threed.planner import make_pipeline, make_plan
from threed.prediction.analytic import cost
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.spec.deal import by_documents, work, zigzag
from threed.tensor.documents import Documents

Ends = tuple[int, ...]  # where documents of a sequence end
RANKS = 2, 4, 8
LENGTH, SHORTEST, SEQUENCES = 131072, 200, 200


def power_law(exponent: float, seed: int) -> Iterator[Ends]:
    """Sequences of documents, of which (x / SHORTEST)^-exponent are longer than x."""
    drawn = random.Random(seed)
    for _ in range(SEQUENCES):
        ends, at = [], 0
        while at < LENGTH:
            at = min(LENGTH, at + int(SHORTEST * drawn.paretovariate(exponent)))
            ends.append(at)
        yield tuple(ends)


def of_the_toy(seq_len: int, cache: str) -> Iterator[Ends]:
    """Windows of the toy's corpus, in the order of training."""
    config = load("configs/toy.yaml", [f"model.seq_len={seq_len}", "data.document_mask=true",
                                       f"data.cache={cache}"])
    split = open_splits(config, prepare(config.data, config.model))[0]
    for index in range(min(SEQUENCES, split.num_windows)):
        yield Documents.of(torch.from_numpy(split.positions(index))[None]).ends[0]


def rows(what: str, sequences: Iterable[Ends]) -> Iterator[list[str]]:
    every = list(sequences)
    for count in RANKS:
        orders = [[_over(work(deal(ends, count), ends)) for ends in every]
                  for deal in (lambda ends, count: zigzag(ends[-1], count), by_documents)]
        assert all(dealt <= usual for usual, dealt in zip(*orders, strict=True))
        yield [what, f"{mean(map(len, every)):.0f}", str(count),
               *(f"{figure:.3f}" for each in orders for figure in (mean(each), max(each)))]


def _over(each: list[int]) -> float:
    return max(each) * len(each) / sum(each)


class Published(NamedTuple):
    """A row of table 4."""

    seq_len: int
    cp: int
    dp: int
    batch: int  # sequences
    tflops: float  # of a GPU


LLAMA = Published(8192, 1, 128, 2048, 400), Published(131072, 16, 8, 128, 380)


def step_s(row: Published, *overrides: str) -> tuple[Config, float]:
    """Its config, and the predicted step."""
    config = load(None, [
        "model.name=llama3.1-405b", f"model.seq_len={row.seq_len}", "model.fused=on", "precision.dtype=bf16",
        "parallel.tp=8", "parallel.pp=16", f"parallel.cp={row.cp}", f"parallel.dp={row.dp}",
        "parallel.sequence_parallel=true", "parallel.schedule=interleaved", "parallel.virtual_stages=8",
        "train.micro_batch_size=1", f"train.global_batch_size={row.batch}", *overrides])
    plan, hardware = make_plan(config, make_pipeline(config)), Hardware.parse("h100-sxm")
    return config, step(Analysis(plan), cost(plan, hardware), hardware).total_s


def tflops(config: Config, seconds: float, whole: bool) -> float:
    """Of a GPU. `whole`: attention's square counts whole, not halved."""
    model, size = config.model, config.train.global_batch_size
    half = 3 * 2 * model.layers * model.seq_len**2 * model.heads * model.head_size * size
    return (model_flops(model, size) - (0 if whole else half)) / seconds / config.world_size / 1e12


def llama() -> Iterator[list[str]]:
    want = LLAMA[1].tflops / LLAMA[0].tflops
    first, usual, hidden = *map(step_s, LLAMA), step_s(LLAMA[1], "parallel.cp_overlap=true")
    for what, second, whole in (("predicted, whole", usual, True), ("predicted, halved", usual, False),
                                ("predicted, halved, cp_overlap", hidden, False)):
        short, long = (tflops(*each, whole) for each in (first, second))
        yield [what, f"{short:.0f}", f"{long:.0f}", f"{long / short:.3f}", f"{long / short / want - 1:+.1%}"]
    yield ["published", *(f"{row.tflops:.0f}" for row in LLAMA), f"{want:.3f}", ""]


def main() -> None:
    found = [row for exponent in (0.8, 1.0, 1.2, 1.5)
             for row in rows(f"power law, exponent {exponent}", power_law(exponent, 0))]
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as cache:
        for seq_len in (2048, 8192, 32768):
            found += rows(f"the toy's corpus, {seq_len:,} tokens", of_the_toy(seq_len, cache))
    head = ["sequences", "documents", "cp", "zigzag, mean", "worst", "by documents, mean", "worst"]
    print("\n".join(markdown("Balance", head, found)))
    head = ["attention's FLOPs", "8,192 tokens, cp 1", "131,072 tokens, cp 16", "ratio", "error"]
    print("\n".join(markdown("Llama 3 405B, TFLOPS a GPU", head, list(llama()))))


if __name__ == "__main__":
    main()
