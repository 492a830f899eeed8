"""The context with which layers are built, and the data with which they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from threed.comm.group import Group
from threed.devices import device_of
from threed.schema import KEYS, ModelConfig
from threed.spec.deal import by_documents
from threed.spec.parameter import NOT_COUNTED, Tile
from threed.tensor import experts as expert_operations
from threed.tensor import fused_loss, pieces
from threed.tensor.documents import Documents, attend, outside, rotate_at
from threed.tensor.fused import Fused, rotate
from threed.tensor.fused_loss import CHUNK, Chunks, LossKernels
from threed.tensor.gathered import attend_to_gathered
from threed.tensor.heads import to_heads, to_tokens
from threed.tensor.keys import Shared, attend_to_all, keys_of_all
from threed.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightGrads,
    parallel_config,
    total,
    vocab_parallel_cross_entropy,
)
from threed.tensor.places import Places, in_order, numbers, taken
from threed.tensor.random import keep_mask
from threed.tensor.rotary import frequencies
from threed.tensor.saving import SavingPolicy
from threed.tensor.softmax import add_to_softmax, cross_entropy_of


@dataclass
class Batch:
    """A micro-batch of one rank."""

    tokens_BS: torch.Tensor  # input ids; empty where the rank does not need them
    labels_BS: torch.Tensor  # the token that follows each, or NOT_COUNTED
    samples_B: torch.Tensor  # global sample numbers, int64: keys of the dropout masks
    seed: int
    # Of the global batch: the loss is divided by it. A tensor (int64, no dims) where labels may be
    # NOT_COUNTED: then it is another in each step, and no graph may hold it as a constant.
    num_tokens: int | torch.Tensor
    train: bool = True  # dropout is on
    documents: Documents | None = None  # data.document_mask: attention stays inside them
    # The last token of each sequence: the head makes its logits in place of the loss. None: the loss.
    last_B: torch.Tensor | None = None  # (-1: another rank has it)
    # For user layers: trees of tensors, what their first layer and their loss are called with.
    inputs: Any = None
    targets: Any = None
    first: int = 0  # the global number of its first sample, known to the host

    @property
    def masked(self) -> bool:
        """Whether labels may be NOT_COUNTED."""
        return isinstance(self.num_tokens, torch.Tensor)

    def parts(self) -> dict[str, torch.Tensor]:
        """Its tensors, all int64, by name, without those of `inputs` and `targets`."""
        parts = {"tokens_BS": self.tokens_BS, "labels_BS": self.labels_BS, "samples_B": self.samples_B}
        if isinstance(self.num_tokens, torch.Tensor):
            parts["num_tokens"] = self.num_tokens
        if self.documents is not None:
            parts["positions_BS"] = self.documents.positions_BS
        if self.last_B is not None:
            parts["last_B"] = self.last_B
        return parts

    def at(self, places: Places) -> Batch:
        """The part of a rank. (Labels are shifted before: the label of a chunk's last token is of the next
        chunk.)"""
        own, documents, last_B = places.own, self.documents, self.last_B
        if documents is not None:
            documents = documents.at(taken(documents.positions_BS, places.attended.own))
        if last_B is not None:
            here = [places.local(last, sequence) for sequence, last in enumerate(last_B.tolist())]
            last_B = torch.tensor([-1 if last is None else last for last in here])
        tokens_BS, labels_BS = (taken(each, own) if each.numel() else each  # the ends of a pipeline have them
                                for each in (self.tokens_BS, self.labels_BS))
        return replace(self, tokens_BS=tokens_BS, labels_BS=labels_BS, documents=documents, last_B=last_B)

    def of(self, parts: Mapping[str, torch.Tensor]) -> Batch:
        """The same with other tensors, named as in `parts()`."""
        others = dict(parts)
        if self.documents is not None:
            others["documents"] = self.documents.at(others.pop("positions_BS"))  # pyright: ignore
        return replace(self, **others)  # pyright: ignore

    def to(self, device: torch.device) -> Batch:
        """The same on a device, in one copy from pinned memory, for which the host does not wait."""
        if self.samples_B.device.type == device.type:
            return self
        parts = self.parts()
        joined = torch.cat([part.reshape(-1) for part in parts.values()]).pin_memory()
        flat = joined.to(device, non_blocking=True).split([part.numel() for part in parts.values()])
        here = self.of({name: piece.view(part.shape)
                        for (name, part), piece in zip(parts.items(), flat, strict=True)})
        inputs, targets = (tree_map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), tree)
                           if tree is not None else None for tree in (self.inputs, self.targets))
        return replace(here, inputs=inputs, targets=targets)


@dataclass
class Context:
    """Sizes, groups, and the operations that depend on them, for every layer of a rank."""

    model: ModelConfig
    groups: Mapping[str, Group]
    sequence_parallel: bool  # the sequence of the residual stream is cut over tp
    dtype: torch.dtype
    weight_grads: WeightGrads
    saving: SavingPolicy = field(default_factory=SavingPolicy)
    fused: Fused = field(default_factory=Fused)
    varlen: bool = False  # one kernel attends to all documents
    # Of the run and the rank: user layers make their modules with them.
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tokens: tuple[int, int] = (0, 1)  # (index, count) of this rank among those that share a sequence
    by_heads: bool = False  # in attention each of these has all tokens, and some of the heads
    order: str = "zigzag"  # in which they do (parallel.cp_order)
    _rotary: dict[tuple[torch.device, bool], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    keep_mask = staticmethod(keep_mask)
    numbers = staticmethod(numbers)
    outside = staticmethod(outside)
    keys_of_all = staticmethod(keys_of_all)
    attend_to_gathered = staticmethod(attend_to_gathered)
    to_heads = staticmethod(to_heads)
    to_tokens = staticmethod(to_tokens)
    pieces: ClassVar[Any] = pieces
    experts: ClassVar[Any] = expert_operations  # of layers with experts

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As Fused.rms_norm, or torch's kernel."""
        if device_of(x.device).rms_norm and hasattr(torch, "_fused_rms_norm") and not self.fused.compile:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        return self.fused.rms_norm(x, weight, eps)

    @property
    def group(self) -> Group:
        """The tp group."""
        return self.groups["tp"]

    def column(self, inputs: int, outputs: int, bias: bool, axis: str = "tp") -> ColumnParallelLinear:
        return ColumnParallelLinear(inputs, outputs, bias, _core(self, axis), self.groups[axis],
                                    self.weight_grads)

    def row(self, inputs: int, outputs: int, bias: bool, axis: str = "tp") -> RowParallelLinear:
        return RowParallelLinear(inputs, outputs, bias, _core(self, axis), self.groups[axis],
                                 self.weight_grads)

    def table(self, vocab: int, hidden: int, tile: Tile) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(vocab, hidden, _core(self, "tp"), self.group, self.weight_grads,
                                      self.fused if self.model.fuses else None, tile)

    def cross_entropy(self, logits_SBV: torch.Tensor, labels_SB: torch.Tensor) -> torch.Tensor:
        """Loss of each token, [S, B]. It, or its backward, may overwrite the logits."""
        vocab, kernels = self.model.vocab, self._kernels(logits_SBV)
        if kernels is not None:
            return fused_loss.cross_entropy(logits_SBV, labels_SB, vocab, self.group, kernels)
        return vocab_parallel_cross_entropy(logits_SBV, labels_SB, vocab, self.group)

    def add_to_softmax(self, before: torch.Tensor | None, logits_SBV: torch.Tensor, labels_SB: torch.Tensor,
                       first: int) -> torch.Tensor:
        """The running softmax [2, S, B] after logits of the ids from `first` on. It, or its backward, may
        overwrite the logits."""
        kernels, vocab = self._kernels(logits_SBV), self.model.vocab
        if kernels is not None:
            return fused_loss.add_to_softmax(before, logits_SBV, labels_SB, first, vocab, kernels)
        return add_to_softmax(before, logits_SBV, labels_SB, first, vocab)

    def _kernels(self, logits: torch.Tensor) -> LossKernels | None:
        """What computes the loss and keeps the logits; None: it keeps their softmax in fp32. (Without kernels
        model.fused keeps what they would.)"""
        chunk = self.model.loss_chunk
        if self.model.fuses:
            return self.fused.kernels(logits.device) or Chunks(chunk or CHUNK)
        return Chunks(chunk, in_place=False) if chunk is not None else None

    def cross_entropy_of(self, running: torch.Tensor) -> torch.Tensor:
        """Loss of each token, [S, B]."""
        return cross_entropy_of(running, self.group)

    def of_token(self, logits_SBV: torch.Tensor, at_B: torch.Tensor) -> torch.Tensor:
        """The logits of one token of each sequence, [B, V of all tp ranks], in the order of the ids."""
        part = logits_SBV[at_B, torch.arange(len(at_B), device=at_B.device)].contiguous()
        gathered = part.new_empty(self.group.size(), *part.shape)
        self.group.all_gather(gathered, part).wait()
        return gathered.transpose(0, 1).flatten(1)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """A sum over the residual stream's tokens of all tp ranks. (Terms of the loss must be equal on all tp
        ranks.)"""
        return total(part, self.group) if self.sequence_parallel else part

    def summed(self, count: torch.Tensor) -> torch.Tensor:
        """A number without a gradient, summed over all tokens of the sequences."""
        for group in self._sharing:
            group.all_reduce(count := count.contiguous()).wait()
        return count

    def whole(self, part_sB: torch.Tensor, documents: Documents | None = None) -> tuple[torch.Tensor, Any]:
        """The values without a gradient, [s, B, ...], of all tokens of the sequences, [S, B, ...]; and an
        index of those of this rank. `documents`: of the sequences."""
        places, whole = self.places(documents), part_sB
        for group in self._sharing:
            part, whole = whole, whole.new_empty(group.size() * len(whole), *whole.shape[1:])
            group.all_gather(whole, part.contiguous()).wait()
        if places.count > 1:
            whole = in_order(whole.chunk(places.count), places.deals, 0, 1)
            return whole, (numbers(places.runs, whole.device).t(),
                           torch.arange(part_sB.shape[1], device=whole.device))
        return whole, places.stream

    @property
    def _sharing(self) -> list[Group]:
        """The groups over which the tokens of the residual stream are cut, innermost first."""
        cut = (("tp", self.sequence_parallel), ("cp", self.tokens[1] > 1))
        return [self.groups[name] for name, is_cut in cut if is_cut]

    def mean_loss(self, losses_SB: torch.Tensor, batch: Batch) -> torch.Tensor:
        """A micro-batch's part of the mean loss over the tokens that count in the global batch."""
        if batch.masked:
            losses_SB = losses_SB.masked_fill(batch.labels_BS.t() == NOT_COUNTED, 0.0)
        return losses_SB.sum() / batch.num_tokens

    def attend(self, q_BNSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor,
               batch: Batch) -> torch.Tensor:
        """Causal attention, inside documents where the batch has them, [B, N, S, E]."""
        if self.places().attended.count > 1:
            keep = self.saving.again(KEYS)
            return attend_to_all(q_BNSE, k_BKSE, v_BKSE, self.shared(batch), batch.documents, keep)
        if batch.documents is not None:
            return attend(q_BNSE, k_BKSE, v_BKSE, batch.documents, self.varlen)
        return F.scaled_dot_product_attention(q_BNSE, k_BKSE, v_BKSE, is_causal=True,
                                              enable_gqa=q_BNSE.shape[1] > k_BKSE.shape[1])

    def rotate(self, x_BNSE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Turn queries or keys by their rotary positions."""
        cos_SE, sin_SE = self.rotary(x_BNSE.device, batch.documents is not None)
        if batch.documents is not None:
            return rotate_at(x_BNSE, batch.documents.positions_BS, cos_SE, sin_SE, self.fused)
        if self.model.fuses:
            return self.fused.rotate(x_BNSE, cos_SE, sin_SE)
        return rotate(x_BNSE, cos_SE, sin_SE)

    def rotary(self, device: torch.device, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of rotary positions (Su et al. 2021), [S, E] each: pairs are (i, i + E/2). Of
        the tokens that it attends with, or of all positions (`whole`)."""
        attended = self.places().attended
        key = device, whole or attended.count == 1
        if key not in self._rotary:
            (runs,) = ((range(self.model.seq_len),),) if whole else attended.own
            angles = torch.outer(numbers((runs,), torch.device("cpu"))[0].double(),
                                 frequencies(self.model)).repeat(1, 2)
            self._rotary[key] = angles.cos().to(device, self.dtype), angles.sin().to(device, self.dtype)
        return self._rotary[key]

    def places(self, documents: Documents | None = None) -> Places:
        """Of this rank's tokens, in sequences with these documents."""
        part = (self.group.rank(), self.group.size()) if self.sequence_parallel else (0, 1)
        count, deals = self.tokens[1], ()
        if documents is not None and self.order == "documents":
            deals = tuple(by_documents(ends, count) for ends in documents.ends)
        return Places(self.model.seq_len, *self.tokens, *part, self.by_heads, deals)

    def shared(self, batch: Batch) -> Shared:
        """The ranks with which this one shares each sequence."""
        return Shared(self.groups["cp"], self.places(batch.documents), self.fused.rectangle)


def _core(context: Context, axis: str):
    """Megatron-core's config for layers that are cut over an axis."""
    return parallel_config(context.groups[axis], context.sequence_parallel and axis == "tp", context.dtype)
