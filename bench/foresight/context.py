"""How evenly attention is spread over ranks that share sequences, in both orders of parallel.cp_order.

    python -m bench.foresight.context         # in a minute; the toy's corpus is tokenized once, into a folder
                                              # of its own that is deleted

The busiest rank's work over the mean, of each sequence: in each layer all ranks wait for the busiest. Work is
pairs of a query and a key of its document, as spec/deal counts it. No attention is computed.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator
from statistics import mean

import torch

from bench.gpu.models import markdown
from threed.config.load import load
from threed.data.mix import open_splits
from threed.data.tokens import prepare
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


def main() -> None:
    found = [row for exponent in (0.8, 1.0, 1.2, 1.5)
             for row in rows(f"power law, exponent {exponent}", power_law(exponent, 0))]
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as cache:
        for seq_len in (2048, 8192, 32768):
            found += rows(f"the toy's corpus, {seq_len:,} tokens", of_the_toy(seq_len, cache))
    head = ["sequences", "documents", "cp", "zigzag, mean", "worst", "by documents, mean", "worst"]
    print("\n".join(markdown("Balance", head, found)))


if __name__ == "__main__":
    main()
