"""A block with experts (MoE): some of many MLPs compute a token, and their outputs are summed by weights.

It is several layers of one stage, so that what travels between ranks does so between units:

    Routes     attention; the norm; the choice of experts; rows of tokens, in the order of the experts
                   counts -> arriving, routed -> arrived     to the ranks that have the experts
    SharedExpert   an MLP of all tokens, if there is one: it computes while rows travel
    Experts    the MLPs of this rank's experts
                   answers -> returned                       back to the ranks of the tokens
    Collects   the sum of each token's rows

Shapes: T tokens of this rank in a micro-batch (s x B), k experts a token, E experts, D hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threed.base.later import F, torch
from threed.base.quantity import ring
from threed.models.layers.attention import Attention
from threed.models.layers.base import Layer, Out
from threed.models.layers.block import Branch
from threed.models.layers.mlp import Mlp
from threed.models.layers.parts import Held
from threed.models.layers.residual import Dropout, Norm, added
from threed.schema import ModelConfig
from threed.schema.keys import key
from threed.spec.kernels import FROZEN, Moved, Product
from threed.spec.parameter import SEQUENCE, Cost, Cut, Parameter, Saved, Share, Traffic, each_of
from threed.spec.travel import ROW_EXTRA as EXTRA
from threed.spec.travel import Exchanged

if TYPE_CHECKING:
    from threed.tensor.context import Batch

EP, TP = "ep", "tp"


@dataclass
class ExpertsConfig(ModelConfig):
    """The keys of a model with experts."""

    experts: int = key(8, "experts of a block", least=1)
    experts_per_token: int = key(2, "experts that compute a token", least=1)
    expert_ffn_hidden: int | None = key(None, "hidden layer of an expert; null: ffn_hidden", least=1)
    shared_expert_ffn: int = key(0, "hidden layer of an expert that computes all tokens; 0: none", least=0)
    router_score: str = key("softmax", "of an expert for a token, over the router's logits", choices={
        "softmax": "over all experts", "sigmoid": "of each alone"})
    normalize_top_k: bool = key(True, "a token's weights add up to 1, before routed_scale")
    routed_scale: float = key(1.0, "factor of a token's weights", above=0)
    expert_groups: int = key(1, "groups of neighbouring experts; those of the best groups alone can be "
                             "chosen", least=1)
    groups_per_token: int = key(1, "of expert_groups, for a token", least=1)
    moe_every: int = key(1, "after first_dense, every N-th block has experts, beginning with the first",
                         least=1)
    first_dense: int = key(0, "first blocks without experts", least=0)
    moe_room: float = key(2.0, "rows for which memory is planned on a rank, times those of balanced "
                          "experts", least=1, free=True)
    moe_capacity: float | None = key(None, "most tokens of an expert in a sequence, over those of balanced "
                                           "experts; the others are dropped in training. null: no limit",
                                     above=0, free=True)
    moe_route: str = key("learned", "the choice of experts", choices={
        "learned": "", "balanced": "each expert gets equally many rows, whatever the scores: for "
                                   "benchmarks"}, free=True)
    balance: str = key("none", "what keeps experts balanced", choices={
        "none": "", "bias": "of the choice, which moves by optimizer.balance_rate a step",
        "sequence": "an auxiliary loss, of each sequence by itself"})
    balance_weight: float = key(1e-3, "of the auxiliary loss", least=0, free=True)
    z_loss: float = key(0.0, "weight of the mean squared log of the router's sum of exponentials", least=0,
                        free=True)

    @property
    def capacity(self) -> int:
        """The most tokens of an expert in a sequence."""
        most = self.seq_len * self.experts_per_token * (self.moe_capacity or 0.0) / self.experts
        return self.seq_len if self.moe_capacity is None else min(self.seq_len, math.ceil(most))

    @property
    def room(self) -> float:
        """Rows for which memory is planned on a rank, times those of balanced experts."""
        most = self.capacity * self.experts / (self.seq_len * self.experts_per_token)
        return min(self.moe_room, max(1.0, most))

    def arriving(self, share: Share) -> int:
        """Rows that come to a rank's experts, as plans count them."""
        leaving = share.bytes(self.seq_len * self.experts_per_token, SEQUENCE, 1)
        return math.ceil(leaving * self.room) if share.over(EP) > 1 else leaving

    @property
    def inner(self) -> int:
        """The hidden layer of an expert."""
        return self.num_ffn_hidden if self.expert_ffn_hidden is None else self.expert_ffn_hidden

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts."""
        return block >= self.first_dense and (block - self.first_dense) % self.moe_every == 0


class Router(Held):
    """x [T, D] -> logits [T, E] in fp32. Its bias has a part in the choice alone."""

    def __init__(self, model: ExpertsConfig, name: str):
        self.model = model
        self.held = {"weight": Parameter(f"{name}.weight", (model.experts, model.hidden), std=model.init_std)}
        if model.balance == "bias":
            self.held["bias"] = Parameter(f"{name}.bias", (model.experts,),
                                          counted=model.experts_per_token / model.experts)

    def cost(self, share: Share) -> Cost:
        tokens = share.bytes(self.model.seq_len, SEQUENCE, 1)
        return Cost((Product(tokens, self.model.experts, self.model.hidden, weight=self.learns or FROZEN),),
                    operands=4 * self.model.experts * (tokens + (self.model.balance == "bias")) * self.learns)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.context.experts.logits(x_TD, self.compute.weight, self.context.weight_grads)


class Routes(Layer):
    """Attention, and the rows of tokens for the experts. `picks`, the choice, is made once: what is computed
    again reads it."""

    def __init__(self, model: ExpertsConfig, index: int):
        self.model, self.name = model, f"blocks.{index}"
        attention = f"{self.name}.attention"
        self.attention = Branch(attention, Norm(model, f"{attention}_norm"), Attention(model, attention))
        self.norm = Norm(model, f"{self.name}.mlp_norm")
        self.router = Router(model, f"{self.name}.router")
        self.loss = model.balance == "sequence" or model.z_loss > 0
        self.without_grad = {"picks": "int64", "counts": "int64"}
        self.travels = {"counts": Exchanged("arriving", EP),
                        "routed": Exchanged("arrived", EP, "counts", "arriving", EXTRA)}

    def makes(self, share: Share) -> dict[str, int]:
        model, rows = self.model, self.model.seq_len * self.model.experts_per_token
        normed = share.bytes(model.seq_len * model.hidden, SEQUENCE) if model.shared_expert_ffn else 0
        row = model.hidden * share.element + EXTRA
        return {"picks": share.bytes(rows, SEQUENCE, 8), "counts": 8 * model.experts,
                "routed": share.bytes(rows, SEQUENCE, row), "arrived": model.arriving(share) * row,
                **({"normed": normed} if normed else {})}

    def cost(self, share: Share) -> Cost:
        model, k = self.model, self.model.experts_per_token
        tokens = share.bytes(model.seq_len, SEQUENCE, 1)
        row, scores = model.hidden * share.element, 4 * tokens * model.experts
        moved = Moved("scores and choice", 8 * scores, 3 * scores, (6, 4), exponentials=(scores // 4, 0))
        rows = Moved("rows of tokens", 2 * tokens * k * (row + EXTRA), 2 * tokens * k * (row + EXTRA), (4, 4))
        kept = (Saved("output of the norm", 0 if model.shared_expert_ffn else tokens * row),
                Saved("scores", scores), Saved("order of rows", 8 * tokens * k),
                Saved("weights of experts", 4 * tokens * (k + 1) if model.normalize_top_k else 0))
        return (super().cost(share) + Cost((moved, rows), kept, tokens * row * self.router.learns)
                + self._penalty_cost(share, tokens) + self._capacity_cost(share, tokens))

    def _capacity_cost(self, share: Share, tokens: int) -> Cost:
        picks = 8 * tokens * self.model.experts_per_token
        if self.model.moe_capacity is None:
            return Cost()
        numbers = 2 * self.model.seq_len * self.model.experts_per_token
        sent = {("once", "cp"): share.gathered(numbers, "cp", element=4)} if share.over("cp") > 1 else {}
        if TP in share.sequence:
            sent["once", TP] = share.sent(numbers, TP, 1, 4)
        return Cost((Moved("capacity", 8 * picks, 0, (16, 0)),), (Saved("choices", picks),), sent=sent)

    def _penalty_cost(self, share: Share, tokens: int) -> Cost:
        model, scores = self.model, 4 * tokens * self.model.experts
        if not self.loss:
            return Cost()
        sent = {("forward", TP): Traffic(2 * ring(4, share.over(TP)), 2)} if TP in share.sequence else {}
        saved, moved = 0, 0
        if model.z_loss:
            saved, moved = saved + scores + 4 * tokens, moved + 2 * scores
        if model.balance == "sequence":
            saved += 4 * model.experts * share.sequences + 4 * tokens * (model.router_score == "sigmoid")
            moved += 3 * scores
            for axis in (axis for axis in (*share.sequence, "cp") if share.over(axis) > 1):  # the counts
                counts = Traffic(2 * ring(4 * model.experts * share.sequences, share.over(axis)), 2)
                sent["forward", axis] = sent.get(("forward", axis), Traffic()) + counts
        return Cost((Moved("penalty", moved, moved, (8, 8)),), (Saved("of the penalty", saved),), sent=sent)

    def forward(self, x_sBD: torch.Tensor, batch: Batch, picks: torch.Tensor | None = None,
                counts: torch.Tensor | None = None, **keys: torch.Tensor) -> Out:
        """`keys`: as of `Block`."""
        model, experts = self.model, self.context.experts
        x_sBD = self.attention(x_sBD, batch, **keys)
        normed_sBD = self.norm(x_sBD)
        normed_TD = normed_sBD.flatten(0, 1)
        logits = self.router(normed_TD)
        scores = experts.scores_of(logits, model.router_score)
        if picks is None or counts is None:
            picks = self._choice(scores, batch)
            if model.moe_capacity is not None and batch.train:
                picks = self._within_capacity(picks, scores, batch)
            counts = experts.count(picks, model.experts).view(self.context.groups[EP].size(), -1)
        weights = self._weights(scores, picks)
        if model.balance == "bias":
            weights = experts.counted(weights, self.router.compute.bias, picks, self.context.weight_grads)
        rows = experts.rows_of(counts) if model.moe_capacity is not None else None
        order = experts.RowOrder.of(picks.flatten(), rows)
        routed = experts.routed(normed_TD, weights, order)
        penalty = self._penalty(logits, scores, picks, batch) if self.loss else None
        made = {"routed": routed, "picks": picks, "counts": counts}
        if model.shared_expert_ffn:
            made["normed"] = normed_sBD
        return Out(x_sBD, made, penalty=penalty)

    def _choice(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        model, experts = self.model, self.context.experts
        if model.moe_route == "balanced":
            rows = self.context.places(batch.documents).runs
            places_BS = self.context.numbers(rows, scores.device).expand(len(batch.samples_B), -1)
            return experts.balanced(places_BS.t().flatten(), model.experts_per_token, model.experts)
        bias = self.router.compute.bias.detach() if model.balance == "bias" else None
        return experts.choose(scores, model.experts_per_token, model.expert_groups, model.groups_per_token,
                              bias)

    def _weights(self, scores: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        model = self.model
        chosen = picks if model.moe_capacity is None else picks % model.experts
        return self.context.experts.weights_of(scores, chosen, model.normalize_top_k, model.routed_scale)

    def _within_capacity(self, picks: torch.Tensor, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The picks, with those that are dropped. Where ranks divide a sequence, they exchange theirs."""
        model, weights = self.model, self._weights(scores, picks).detach()
        each = torch.cat([picks.float(), weights], -1)  # one call for both
        whole, mine = self.context.whole(each.unflatten(0, (-1, len(batch.samples_B))), batch.documents)
        picks, weights = whole.chunk(2, -1)
        within = self.context.experts.within(picks.long(), weights, model.experts, model.capacity)
        return within[mine].flatten(0, 1)

    def _penalty(self, logits: torch.Tensor, scores: torch.Tensor, picks: torch.Tensor,
                 batch: Batch) -> torch.Tensor:
        """The auxiliary loss of each sequence (DeepSeek-V3, equations 17 to 20), times its tokens, and the
        z-loss of each token (Zoph et al. 2022), over the tokens of the global batch."""
        model, size = self.model, len(batch.samples_B)
        total = logits.new_zeros(())
        if model.z_loss:
            total = total + model.z_loss * logits.logsumexp(-1).square().sum()
        if model.balance == "sequence":
            if model.router_score == "sigmoid":
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            chosen = F.one_hot(picks % model.experts, model.experts).sum(1).view(-1, size, model.experts)
            counts_BE = self.context.summed(chosen.sum(0).float())
            share_BE = counts_BE * model.experts / (model.experts_per_token * model.seq_len)
            mean_BE = scores.view(-1, size, model.experts).sum(0)  # times the tokens of a sequence
            total = total + model.balance_weight * (share_BE * mean_BE).sum()
        return self.context.total(total) / batch.num_tokens


class SharedExpert(Layer):
    """An MLP of all tokens, whose output is added."""

    adds, reads = True, ("normed",)

    def __init__(self, model: ExpertsConfig, index: int):
        self.model, self.name = model, f"blocks.{index}.shared"
        self.mlp = Mlp(model, self.name, inner=model.shared_expert_ffn)
        self.dropout = Dropout(model, f"blocks.{index}.mlp")

    def cost(self, share: Share) -> Cost:
        size, gathers = self.model.seq_len * self.model.hidden, self.mlp.axis in share.sequence
        stream = share.bytes(size, SEQUENCE)
        operands = share.bytes(size) if gathers else stream * (self.model.dropout > 0)
        return super().cost(share) + Cost((Moved("sum", 3 * stream, 3 * stream),), operands=operands)

    def forward(self, x_sBD: torch.Tensor | None, batch: Batch, normed: torch.Tensor) -> torch.Tensor:
        return added(x_sBD, self.dropout(self.mlp(normed, batch), batch))


class ExpertWeights(Held):
    """The matrices of all experts, cut over ep: gate and up, and down."""

    def __init__(self, model: ExpertsConfig, name: str):
        experts, cut, used = model.experts, (Cut(0, EP),), (model.experts_per_token, model.experts)
        self.held = {
            "up": Parameter(f"{name}.up", (experts, 2, model.inner, model.hidden), cut, model.init_std,
                            used=used, matrices=each_of(2 * experts)),
            "down": Parameter(f"{name}.down", (experts, model.hidden, model.inner), cut, model.residual_std,
                              used=used, matrices=each_of(experts))}


class Experts(Layer):
    """The MLPs of this rank's experts, of the rows that have arrived."""

    adds, reads, without_grad = True, ("arrived", "arriving"), {"arriving": "int64"}

    def __init__(self, model: ExpertsConfig, index: int):
        self.model, self.name = model, f"blocks.{index}.experts"
        self.weights = ExpertWeights(model, self.name)
        self.travels = {"answers": Exchanged("returned", EP, "arriving", "counts")}

    def makes(self, share: Share) -> dict[str, int]:
        model, row = self.model, self.model.hidden * share.element
        return {"answers": model.arriving(share) * row,
                "returned": share.bytes(model.seq_len * model.experts_per_token, SEQUENCE, row)}

    def cost(self, share: Share) -> Cost:
        model, element, learns = self.model, share.element, self.weights.learns
        balanced = share.bytes(model.seq_len * model.experts_per_token, SEQUENCE, 1)
        mine, rows = model.experts // share.over(EP), model.arriving(share)
        each = -(-balanced // mine)
        inner = balanced * model.inner * element
        products = (Product(each, 2 * model.inner, model.hidden, mine, learns or FROZEN),
                    Product(each, model.hidden, model.inner, mine, learns or FROZEN))
        moved = Moved("swiglu and weights of rows", 12 * inner, 24 * inner, (6, 14))
        sorts = share.over(EP) > 1 and mine > 1
        order = (Moved("order of rows", 4 * balanced * model.hidden * element,
                       6 * balanced * model.hidden * element, (4, 4)),) if sorts else ()
        return super().cost(share) + Cost(
            (*products, moved, *order),
            (Saved("gate and up", 2 * rows * model.inner * element),
             Saved("order of rows", 16 * rows * sorts)),
            rows * ((3 * model.inner + model.hidden) * element + 16 * sorts) if learns else 0)

    def forward(self, x_sBD: torch.Tensor | None, batch: Batch, arrived: torch.Tensor,
                arriving: torch.Tensor) -> Out:
        weights = self.weights.compute
        answers = self.context.experts.compute(arrived, arriving, weights.up, weights.down,
                                               self.context.weight_grads)
        return Out(x_sBD, {"answers": answers})


class Collects(Layer):
    """Adds up the rows of each token."""

    adds, reads, without_grad = True, ("returned", "picks"), {"picks": "int64"}
    spent = ("returned",)  # the gradient of a sum is a copy

    def __init__(self, model: ExpertsConfig, index: int):
        self.model, self.name = model, f"blocks.{index}.collect"
        self.dropout = Dropout(model, f"blocks.{index}.mlp")

    def cost(self, share: Share) -> Cost:
        stream = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        rows, k = share.bytes(self.model.seq_len * self.model.experts_per_token, SEQUENCE, 8), stream
        read = stream * self.model.experts_per_token
        return super().cost(share) + Cost((Moved("sum of rows", 3 * k + 3 * read, read + k, (5, 1)),),
                                          (Saved("order of rows", rows),))

    def forward(self, x_sBD: torch.Tensor | None, batch: Batch, returned: torch.Tensor,
                picks: torch.Tensor) -> torch.Tensor:
        experts = self.context.experts
        order = experts.RowOrder.of(picks.flatten(), len(returned))
        whole = experts.summed(returned, order, self.model.experts_per_token)
        return added(x_sBD, self.dropout(whole.unflatten(0, (-1, len(batch.samples_B))), batch))


def block(model: ExpertsConfig, index: int) -> list[Layer]:
    """The layers of a block with experts."""
    shared = [SharedExpert(model, index)] if model.shared_expert_ffn else []
    return [Routes(model, index), *shared, Experts(model, index), Collects(model, index)]
