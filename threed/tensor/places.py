"""Places: which tokens of each sequence a rank has.

Ranks that share a sequence (parallel.cp) cut it into twice as many equal chunks, in zig-zag order:

    rank      0 1 2 3 3 2 1 0        4 ranks, 8 chunks

A token attends to itself and to those before it, so that each rank's two chunks have as many keys as another
rank's. Under sequence parallelism the residual stream of a tp rank has one run of these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Runs = tuple[range, ...]  # places in the whole sequence


class Places(NamedTuple):
    """The tokens of a rank."""

    length: int  # of the whole sequence
    index: int = 0  # of the rank among those that share the sequence
    count: int = 1
    part: int = 0  # of the residual stream, among the ranks of tp that cut it
    parts: int = 1
    by_heads: bool = False  # it attends with all tokens, of some of the heads (parallel.cp_form=heads)

    def of(self, index: int) -> Runs:
        """The tokens of one of the ranks that share the sequence."""
        if self.count == 1:
            return (range(self.length),)
        chunk = self.length // (2 * self.count)
        return tuple(range(at * chunk, (at + 1) * chunk) for at in (index, 2 * self.count - 1 - index))

    @property
    def own(self) -> Runs:
        """The tokens of this rank."""
        return self.of(self.index)

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
    def runs(self) -> Runs:
        """The tokens of its residual stream."""
        first, stop, runs = self.stream.start, self.stream.stop, list[range]()
        for run in self.own:
            if part := run[max(first, 0):max(stop, 0)]:
                runs.append(part)
            first, stop = first - len(run), stop - len(run)
        return tuple(runs)

    def local(self, place: int) -> int | None:
        """Where this rank has a token; None: another rank has it."""
        before = 0
        for run in self.own:
            if place in run:
                return before + place - run.start
            before += len(run)
        return None


def numbers(runs: Runs, device: torch.device, width: int = 1) -> torch.Tensor:
    """The places of tokens, int64; or those of all their elements, `width` of which each token has, in
    order."""
    parts = [torch.arange(run.start * width, run.stop * width, device=device) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def taken(whole: torch.Tensor, runs: Runs, dim: int = 1) -> torch.Tensor:
    """Some tokens of a tensor of whole sequences."""
    return torch.cat([whole.narrow(dim, run.start, len(run)) for run in runs], dim)


def in_order(parts: Sequence[torch.Tensor], places: Sequence[Runs], dim: int) -> torch.Tensor:
    """Tensors of all ranks as one of whole sequences."""
    shape = list(parts[0].shape)
    shape[dim] = sum(len(run) for runs in places for run in runs)
    whole = parts[0].new_empty(shape)
    for part, runs in zip(parts, places, strict=True):
        for piece, run in zip(part.split([len(run) for run in runs], dim), runs, strict=True):
            whole.narrow(dim, run.start, len(run)).copy_(piece)
    return whole
