"""The head: final norm, projection onto the vocabulary, loss.

A tile is a run of the vocabulary. The first tile has the norm, and all tiles read its output. A tile passes
on a running softmax instead of the residual stream, from which the last tile computes the loss.

Shapes: S sequence, s a rank's part of the sequence in the residual stream, B micro-batch, D hidden, V
vocabulary of this rank (and tile).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from threed.base.later import torch
from threed.models.layers.base import Layer, Out
from threed.models.layers.parts import WORD, Column, vocabulary
from threed.models.layers.residual import Norm
from threed.schema import ModelConfig
from threed.spec.kernels import Moved
from threed.spec.parameter import SEQUENCE, WHOLE, Cost, Outflow, Saved, Share, Tile, Traffic

if TYPE_CHECKING:
    from threed.tensor.context import Batch


# Kernels of the fused loss in forward and in backward: its own, and those on numbers of a token. Of the whole
# vocabulary; of a tile.
_FUSED, _FUSED_TILE = (7, 4), (11, 5)


class Logits(NamedTuple):
    """What a layer of the head sends and holds where it makes logits in place of a loss."""

    bytes: int  # of the logits of one token of each sequence of a micro-batch, all ranks' parts together
    sent: Mapping[str, int]  # axis -> bytes that a rank sends in that forward


@runtime_checkable
class Generates(Protocol):
    """A layer that makes logits in place of a loss where `batch.last_B` is set, to generate text; or none."""

    def logits(self, share: Share) -> Logits | None: ...


class Output(Column):
    """The projection onto the vocabulary. Its matrix may be the word embedding."""

    def __init__(self, model: ModelConfig, tile: Tile):
        self.model, self.axis, tied = model, "tp", model.tie_embeddings
        weight = vocabulary(model, WORD if tied else "head.output.weight", tile, tied)
        super(Column, self).__init__(weight, None)


class Head(Layer):
    """The last layer: norm, output projection and loss. The vocabulary is cut over tp."""

    kind, cell, axis = "head", "token of the vocabulary", "tp"

    def __init__(self, model: ModelConfig, tile: Tile = WHOLE):
        self.model, self.tile, self.name = model, tile, tile.of("head")
        self.cells, self.loss = model.padded_vocab, tile.last
        self.reads = ("normed",) if tile.index > 0 else ()
        self.norm = Norm(model, "head.norm") if tile.index == 0 else None
        self.output = Output(model, tile)

    def makes(self, share: Share) -> dict[str, int]:
        stream = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        return {"normed": stream} if self.tile.index == 0 < self.tile.count - 1 else {}

    def passes(self, share: Share) -> Outflow | None:
        running = share.bytes(2 * self.model.seq_len, element=4)
        return None if self.tile.last else Outflow(running, running, flat=False)

    def cost(self, share: Share) -> Cost:
        seq, stream = self.model.seq_len, share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        first, whole = self.tile.index == 0, self.tile.count == 1
        narrow = self.model.fuses or self.model.loss_chunk is not None  # logits are kept as they are
        logits = seq * self.model.padded_vocab // self.tile.count
        # Bytes a token: its id and a mask, or the largest logit and the sum of exponentials; in a tile also
        # its index there and shares of the running softmax.
        token = 8 + 1 + (0 if whole else 4 if first else 4 + 4 + 8)
        if narrow:
            token = 8 + 4 + 4 + (0 if whole else 4 + 4 * (not first) + 4 * self.tile.last)
        token += share.masked and self.tile.last  # whether it counts
        saved = (Saved("logits", share.bytes(logits, "tp")) if narrow else
                 Saved("softmax", share.bytes(logits, "tp", 4)),
                 Saved("labels", share.bytes(seq, element=token)),
                 *((Saved("output of the norm", stream),) if whole and self.output.keeps else ()))
        moved = self._moved(share.bytes(logits, "tp", 1), share.element)
        # Three all-reduces of one number a token.
        loss = {("forward", "tp"): share.sent(seq, "tp", 3 * 2, 4)} if self.tile.last else {}
        operands = stream if first and self.output.keeps else 0
        return super().cost(share) + Cost((moved,), saved, operands, loss)

    def logits(self, share: Share) -> Logits:
        """Each rank's part of the vocabulary is gathered over tp."""
        vocab = self.model.padded_vocab // self.tile.count
        sent = super().cost(share).sent.get(("forward", "tp"), Traffic()) + share.sent(vocab, "tp", 1)
        return Logits(share.bytes(vocab), {"tp": sent.bytes})

    def _moved(self, logits: int, own: int) -> Moved:
        """`logits`: their number on a rank; `own`: bytes of an element in the dtype of compute."""
        if self.model.fuses:  # read in forward, read and written in backward
            return Moved("loss", logits * own, 2 * logits * own,
                         _FUSED if self.tile.count == 1 else _FUSED_TILE, exponentials=(logits, logits),
                         fused=True)
        if self.model.loss_chunk is not None:
            chunk = self.model.loss_chunk
            chunks = -(-self.model.seq_len // chunk)
            return Moved("loss", logits * (2 * own + 16), logits * (own + 32), (8 * chunks, 12 * chunks),
                         exponentials=(logits, logits))
        cast, cut = (own + 4) * (own < 4), 2 * own * (self.model.padded_vocab > self.model.vocab)
        if self.tile.count == 1:
            return Moved("loss", logits * (32 + cast + cut), logits * (8 + cast + cut), (23, 11),
                         exponentials=(logits, 0))
        return Moved("loss", logits * (32 + cast), logits * (12 + cast), (16, 8), exponentials=(logits, 0))

    def tiled(self, tile: Tile) -> Head:
        return Head(self.model, tile)

    def forward(self, x: torch.Tensor, batch: Batch, normed: torch.Tensor | None = None) -> Out:
        """`x`: the residual stream, or from the second tile on the running softmax [2, S, B]."""
        labels_SB, context = batch.labels_BS.t(), self.context
        if batch.last_B is not None:
            return self._choose(x, batch.last_B, normed)
        if self.tile.count == 1:
            assert self.norm is not None
            losses_SB = context.cross_entropy(self.output(self.norm(x)), labels_SB)
            return Out(loss=context.mean_loss(losses_SB, batch))
        before = x
        if self.norm is not None:
            before, normed = None, self.norm(x)
        assert normed is not None
        logits_SBV = self.output(normed)
        width = logits_SBV.shape[-1]
        first = (self.tile.index * context.group.size() + context.group.rank()) * width  # of this rank's ids
        running = context.add_to_softmax(before, logits_SBV, labels_SB, first)
        if self.tile.last:
            return Out(loss=context.mean_loss(context.cross_entropy_of(running), batch))
        return Out(running, {"normed": normed} if self.norm is not None else {})

    def _choose(self, x: torch.Tensor, last_B: torch.Tensor, normed: torch.Tensor | None) -> Out:
        """The logits of one token of each sequence, as `forward` would compute them. A running softmax is
        passed on unchanged: nobody reads it."""
        if self.norm is not None:
            normed = self.norm(x)
        assert normed is not None
        logits_BV = self.context.of_token(self.output(normed), last_B)
        if self.tile.last:
            return Out(logits=logits_BV)
        if self.norm is None:
            return Out(x, logits=logits_BV)
        running = x.new_zeros(2, self.model.seq_len, x.shape[1], dtype=torch.float32)
        return Out(running, {"normed": normed}, logits=logits_BV)
