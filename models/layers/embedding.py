"""The embedding: token ids to the residual stream. A tile is a run of the vocabulary's rows: it adds the rows
of its tokens.

Shapes: S sequence, s a rank's part of the sequence in the residual stream, B micro-batch, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from threed.base.later import F
from threed.models.layers.base import Layer
from threed.models.layers.parts import WORD, Held, LookupTable, vocabulary
from threed.models.layers.residual import Dropout, added
from threed.schema import ModelConfig
from threed.spec.kernels import Moved
from threed.spec.parameter import SEQUENCE, WHOLE, Cost, Parameter, Saved, Share, Tile

if TYPE_CHECKING:
    import torch

    from threed.tensor.context import Batch


class Embedding(Layer):
    """The first layer: from tokens to the residual stream [s, B, D]. The vocabulary is cut over tp."""

    kind, cell, axis = "embedding", "token of the vocabulary", "tp"
    tokens = True

    def __init__(self, model: ModelConfig, tile: Tile = WHOLE):
        self.model, self.tile, self.name = model, tile, tile.of("embedding")
        self.cells, self.adds = model.padded_vocab, tile.index > 0
        self.word = LookupTable(model, vocabulary(model, WORD, tile, model.tie_embeddings))
        self.position = Positions(model) if model.position == "learned" and tile.index == 0 else None
        self.dropout = Dropout(model, "embedding")

    def cost(self, share: Share) -> Cost:
        """All of its backward is weight gradients: all that is saved is an operand of them."""
        tokens = Saved("token ids", share.bytes(self.model.seq_len, element=8))
        places = share.bytes(self.model.seq_len, element=8) if share.documents else (
            share.bytes(self.model.seq_len, SEQUENCE, 8) // share.sequences if share.tokens > 1 else 0)
        positions = Saved("positions", places if self.position is not None else 0)
        stream = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        sums = (self.position is not None) + self.adds
        added = Moved("sum", 3 * stream * sums, stream * sums, (sums, sums))
        cost = super().cost(share) + Cost((added,), (tokens, positions))
        if not self.word.learns:  # it has no backward
            kernels = tuple(kernel._replace(backward=0, kernels=(kernel.kernels[0], 0), scattered=0)
                            for kernel in cost.kernels if isinstance(kernel, Moved))
            return Cost(kernels, sent={where: size for where, size in cost.sent.items()
                                       if where[0] == "forward"})
        # All tiles share this tensor.
        return cost + Cost(operands=cost.saved_bytes() + (0 if self.adds else stream))

    def tiled(self, tile: Tile) -> Embedding:
        return Embedding(self.model, tile)

    def forward(self, x_sBD: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        part_sBD = self.word(batch.tokens_BS)
        if self.position is not None:
            part_sBD = part_sBD + self.position(batch)
        return added(x_sBD, self.dropout(part_sBD, batch))


class Positions(Held):
    """A learned vector for each position."""

    def __init__(self, model: ModelConfig):
        shape = model.seq_len, model.hidden
        self.held = {"weight": Parameter("embedding.position.weight", shape, std=model.init_std)}

    def forward(self, batch: Batch) -> torch.Tensor:
        """The vectors of this rank's part of the sequence, [s, 1, D], or [s, B, D] where documents give each
        token its own."""
        places, weight = self.context.places(batch.documents), self.compute.weight
        if batch.documents is not None:
            return F.embedding(places.streamed(batch.documents.positions_BS).t(), weight)
        if places.count == 1:
            ((run,),) = places.runs
            return weight[run.start:run.stop].unsqueeze(1)
        return F.embedding(self.context.numbers(places.runs, weight.device).t(), weight)
