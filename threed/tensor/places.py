"""Places: which tokens of each sequence a rank has.

Ranks that share a sequence (parallel.cp) have equally many of its tokens, as it was dealt (spec/deal). One
deal is for all sequences, or each has its own. Under sequence parallelism the residual stream of a tp rank
has one run of its rank's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from threed.spec.deal import Deal, Runs, zigzag

Rows = Sequence[Runs]  # of each sequence; or one, of all of them


class Places(NamedTuple):
    """The tokens of a rank."""

    length: int  # of the whole sequence
    index: int = 0  # of the rank among those that share the sequence
    count: int = 1
    part: int = 0  # of the residual stream, among the ranks of tp that cut it
    parts: int = 1
    by_heads: bool = False  # it attends with all tokens, of some of the heads (parallel.cp_form=heads)
    own_deals: tuple[Deal, ...] = ()  # of each sequence, where documents decide; none: all in zig-zag order

    @property
    def deals(self) -> tuple[Deal, ...]:
        """Of each sequence; or one, of all of them."""
        return self.own_deals or (zigzag(self.length, self.count),)

    @property
    def own(self) -> Rows:
        """The tokens of this rank, which its attention has."""
        return tuple(deal[self.index] for deal in self.deals)

    @property
    def attended(self) -> Places:
        """The tokens that its attention has."""
        return Places(self.length) if self.by_heads else self

    @property
    def size(self) -> int:
        """How many tokens its residual stream has."""
        return self.length // self.count // self.parts

    @property
    def stream(self) -> slice:
        """Which of them are in its residual stream."""
        return slice(self.part * self.size, (self.part + 1) * self.size)

    def streamed(self, attended_BS: torch.Tensor) -> torch.Tensor:
        """Of numbers of the tokens that its attention has, those of its residual stream."""
        own_BS = taken(attended_BS, self.own) if self.by_heads else attended_BS
        return own_BS[:, self.stream]

    @property
    def runs(self) -> Rows:
        """The tokens of its residual stream."""
        return tuple(_between(runs, self.stream) for runs in self.own)

    def local(self, place: int, sequence: int = 0) -> int | None:
        """Where this rank has a token of a sequence; None: another rank has it."""
        before = 0
        for run in runs_of(self.own, sequence):
            if place in run:
                return before + place - run.start
            before += len(run)
        return None


def runs_of(rows: Rows, sequence: int) -> Runs:
    """The runs of a sequence."""
    return rows[sequence if len(rows) > 1 else 0]


def _between(runs: Runs, part: slice) -> Runs:
    first, stop, found = part.start, part.stop, list[range]()
    for run in runs:
        if some := run[max(first, 0):max(stop, 0)]:
            found.append(some)
        first, stop = first - len(run), stop - len(run)
    return tuple(found)


def numbers(rows: Rows, device: torch.device, width: int = 1) -> torch.Tensor:
    """The places of tokens, int64 [B, s], or [1, s] of all sequences; or those of all their elements, `width`
    of which each token has, in order, [B, s x width]."""
    every = []
    for runs in rows:
        parts = [torch.arange(run.start * width, run.stop * width, device=device) for run in runs]
        every.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return every[0].unsqueeze(0) if len(every) == 1 else torch.stack(every)


def taken(whole: torch.Tensor, rows: Rows, dim: int = 1, sequences: int = 0) -> torch.Tensor:
    """Some tokens of a tensor of whole sequences. `dim` is that of tokens, `sequences` that of sequences."""
    every = [torch.cat([each.narrow(dim, run.start, len(run)) for run in runs], dim)
             for each, runs in _by_sequence(whole, rows, sequences)]
    return every[0] if len(every) == 1 else torch.cat(every, sequences)


def in_order(parts: Sequence[torch.Tensor], deals: Sequence[Deal], dim: int,
             sequences: int = 0) -> torch.Tensor:
    """Tensors of all ranks as one of whole sequences."""
    shape = list(parts[0].shape)
    shape[dim] *= len(parts)
    whole = parts[0].new_empty(shape)
    for rank, part in enumerate(parts):
        rows = [deal[rank] for deal in deals]
        for (into, runs), (given, _) in zip(_by_sequence(whole, rows, sequences),
                                            _by_sequence(part, rows, sequences), strict=True):
            for piece, run in zip(given.split([len(run) for run in runs], dim), runs, strict=True):
                into.narrow(dim, run.start, len(run)).copy_(piece)
    return whole


def _by_sequence(x: torch.Tensor, rows: Rows, dim: int) -> Iterator[tuple[torch.Tensor, Runs]]:
    """The sequences that have the same runs, and these."""
    return zip((x,) if len(rows) == 1 else x.split(1, dim), rows, strict=True)
