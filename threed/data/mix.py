"""Mix: samples of several sources by weight (data.mix).

    weights 1/2 1/4 1/4     a b a c | a b a c | ...     a block of samples, over and over

The sample of an index is of a source that the weights and the index alone decide, and is the next one of that
source. So each block has exactly its share of each source, a run can go on from any sample, and nothing is
stored. Weights that need a block of more than MOST samples are rounded to such a block.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from threed.base.quantity import parse_weighted, show_count
from threed.data.packing import efficiency
from threed.data.samples import Sample, Split, splits
from threed.models.families.registry import family_of
from threed.schema import Config, DataConfig

if TYPE_CHECKING:
    from threed.data.tokens import Prepared

MOST = 10_000
_APART = 2**40  # between the seeds of two sources, so that each has an order of its own


def sources(data: DataConfig) -> list[tuple[Fraction, DataConfig]]:
    """(weight, the data of one source) of each source. InputError where an entry of data.mix is not "WEIGHT
    SOURCE"."""
    if data.mix is None:
        return [(Fraction(1), data)]
    return [(weight, replace(data, source=source, mix=None))
            for weight, source in map(parse_weighted, data.mix)]


class Mixture:
    """Several splits as one, with the methods of Split."""

    def __init__(self, parts: Sequence[Split], weights: Sequence[Fraction]):
        self.parts, self.shares = parts, _counts(weights)
        self._order = _order(self.shares)
        self._places = [np.flatnonzero(self._order == number).tolist() for number in range(len(parts))]
        self.num_windows = sum(part.num_windows for part in parts)
        self.num_tokens = sum(part.num_tokens for part in parts)

    def at(self, index: int) -> tuple[int, int]:
        """(number of the source, index of its sample) of sample `index`."""
        block, place = divmod(index, len(self._order))
        number = int(self._order[place])
        return number, block * self.shares[number] + bisect_left(self._places[number], place)

    def sample(self, index: int) -> Sample:
        number, own = self.at(index)
        return self.parts[number].sample(own)

    def positions(self, index: int) -> np.ndarray:
        number, own = self.at(index)
        return self.parts[number].positions(own)

    def counted(self, index: int) -> int:
        number, own = self.at(index)
        return self.parts[number].counted(own)

    def count(self, start: int, stop: int) -> int:
        return sum(map(self.counted, range(start, stop)))


class Trees(Protocol):
    """A data set whose samples are pytrees of tensors, not tokens (Family.samples)."""

    num_windows: int

    def batch(self, which: Iterable[int]) -> tuple[Any, Any]:
        """Inputs and targets of some samples, stacked."""
        ...

    def count(self, start: int, stop: int) -> int: ...


AnySplit = Split | Mixture
Splits = tuple[AnySplit | Trees, AnySplit | Trees]  # to train on, and to validate with


def _counts(weights: Sequence[Fraction]) -> list[int]:
    """Samples of each source in a block."""
    shares = [weight / sum(weights) for weight in weights]
    size = math.lcm(*(share.denominator for share in shares))
    if size <= MOST:
        return [int(share * size) for share in shares]
    counts = [max(1, int(share * MOST)) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda number: counts[number] - shares[number] * MOST)
    for number in by_rest[:max(0, MOST - sum(counts))]:
        counts[number] += 1
    return counts


def _order(counts: Sequence[int]) -> np.ndarray:
    """The source of each sample of a block: always the one that is most behind its share."""
    share, taken = np.array(counts, np.int64), np.zeros(len(counts), np.int64)
    size, order = int(share.sum()), []
    for place in range(1, size + 1):
        number = int((share * place - taken * size).argmax())
        taken[number] += 1
        order.append(number)
    return np.array(order)


def open_splits(config: Config, prepared: Prepared) -> Splits:
    """The training and the validation split of a config's data."""
    samples = family_of(config.model.family).samples
    if samples is not None:
        return samples(config)
    pairs = [splits(each.prefix, config.model.seq_len, config.train.seed + number * _APART,
                    config.data.validation_fraction, config.model.vocab, config.data)
             for number, each in enumerate(prepared.parts)]
    if len(pairs) == 1:
        return pairs[0]
    weights = [weight for weight, _ in sources(config.data)]
    training, validation = (Mixture(parts, weights) for parts in zip(*pairs, strict=True))
    return training, validation


def report(config: Config, split: AnySplit | Trees, held_out: AnySplit | Trees | None = None) -> list[str]:
    """What a person should know of a training split, and of the one to validate with: what is padded, cut or
    left out, and how often it is seen."""
    if not isinstance(split, Split | Mixture):
        return []
    parts = split.parts if isinstance(split, Mixture) else [split]
    samples, lines = config.train.steps * config.train.global_batch_size, []
    if isinstance(split, Mixture):
        block = sum(split.shares)
        for part, share, (_, data) in zip(parts, split.shares, sources(config.data), strict=True):
            lines.append(f"data.mix: {share / block:.2%} of samples from {data.source}, "
                         f"{_seen(part.num_windows, samples * share / block)} in train.steps")
    else:
        lines.append(f"data.source: {config.data.source}, {_seen(split.num_windows, samples)} in train.steps")
    if isinstance(held_out, Split | Mixture) and held_out.num_windows:
        lines.append(_held_out(config, split, held_out))
    if config.data.packing == "stream":
        rest = sum(part.num_tokens - part.num_windows * config.model.seq_len - 1 for part in parts)
        if rest * 100 > split.num_tokens:
            lines.append(f"warning: {show_count(rest)} of {show_count(split.num_tokens)} tokens are left "
                         f"over at the end: a window needs model.seq_len + 1 = {config.model.seq_len + 1}")
    if config.data.packing == "best-fit":
        lines.append(f"packed into {show_count(split.num_windows)} windows of {config.model.seq_len}: "
                     f"{efficiency([part.layout for part in parts]):.2%} of them is data, the rest padding")
    for what, number in (("cut off at the end of their window", sum(part.cut_off for part in parts)),
                         ("left out: their answers are beyond it", sum(part.dropped for part in parts)),
                         ("cut into several windows", sum(part.parted for part in parts))):
        if number:
            what_is = "documents" if config.data.loss_mask == "none" else "examples"
            lines.append(f"warning: {show_count(number)} {what_is} of more than model.seq_len + 1 = "
                         f"{config.model.seq_len + 1} tokens are {what}; raise model.seq_len to keep them")
    return lines


def _seen(windows: int, samples: float) -> str:
    """How often some windows are seen by a number of samples of them."""
    epochs = samples / windows
    return f"{show_count(windows)} windows, {epochs:.2f} epochs" if epochs >= 0.01 or not epochs else \
        f"{show_count(windows)} windows, {epochs:.1e} epochs"


def _held_out(config: Config, split: AnySplit, held_out: AnySplit) -> str:
    """How much is held out, and what of it an evaluation sees."""
    whole, train = split.num_tokens + held_out.num_tokens, config.train
    line = (f"held out for validation: {held_out.num_tokens / whole:.2%} of tokens, "
            f"{show_count(held_out.num_windows)} windows")
    seen = train.eval_batches * train.global_batch_size / held_out.num_windows
    return f"{line}, of which an evaluation sees {seen:.2f} epochs" if train.eval_every else line
