"""What a model is made of, without torch: layers, their parameters, their work and what they keep for backward.

A model is a list of layers: the embedding, the transformer blocks, the head (final norm, projection, loss). The modules
in `gpt` have exactly these parameters (a test compares them), so parameter counts, memory and the plan need no torch.

Parameters replicated over tp have `tp_dim` None; the others are cut along `tp_dim`, and rank r holds the r-th part.
Two layouts make that cut independent of tp, so that a checkpoint fits any mesh:
  attention.qkv   rows by kv head: the queries that share it, then its key, then its value (as in Megatron-LM)
  mlp.up          with swiglu, stacked: [2, ffn, hidden], gate and up, of which tp cuts dim 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from threed.schema import ModelConfig

TIED = "embedding.word.weight"  # the parameter that embedding and head share when model.tie_embeddings


@dataclass(frozen=True)
class Parameter:
    name: str  # global: the same on every mesh
    shape: tuple[int, ...]  # of the whole parameter
    tp_dim: int | None = None  # the dim that is cut over tp
    std: float = 0.0  # initial values: normal with this std, or the constant `fill` where std is 0
    fill: float = 0.0
    unpadded: int | None = None  # length of dim 0 without vocabulary padding
    stacked: bool = False  # dim 0 counts products of one input: modules see their rows one after the other

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices, not to biases and norms (as in Megatron-LM)."""
        return len(self.shape) - self.stacked > 1

    def local_shape(self, tp: int) -> tuple[int, ...]:
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    def module_shape(self, tp: int) -> tuple[int, ...]:
        """The shape of a tp rank's part inside the layer."""
        shape = self.local_shape(tp)
        return (shape[0] * shape[1], *shape[2:]) if self.stacked else shape


class Saved(NamedTuple):
    """A tensor that is kept from forward to backward, of one sequence."""

    what: str
    elements: int  # of all tp ranks together
    cut: str  # over tp: always, under sequence parallelism (sp), or never
    bytes: int | None = None  # of an element; None: the dtype of compute
    piece: str | None = None  # with this activation piece it is computed again instead

    def bytes_a_rank(self, element: int, tp: int, sequence_parallel: bool) -> int:
        """`element`: bytes of one in the dtype of compute."""
        share = tp if self.cut == "always" or (self.cut == "sp" and sequence_parallel) else 1
        return self.elements * (self.bytes or element) // share


@dataclass(frozen=True)
class Layer:
    """One layer. The tied word embedding belongs to neither layer that uses it: `uses_tied` says that it is used.

    Work and memory are of one sequence, all tp ranks together. `saved` is kept from forward to backward. `operand_*` counts
    elements kept from the input half of backward to the weights' half: `*_full` where every tp rank keeps all of it (cut by tp
    under sequence parallelism), `*_cut` where it is always cut by tp, `operand_whole` where it never is.
    """

    name: str
    parameters: tuple[Parameter, ...]
    forward_flops: int  # matrix products of a sequence, all tp ranks together
    saved: tuple[Saved, ...]
    operand_full: int
    operand_whole: int
    operand_cut: int
    columns: int  # column-parallel products that read the residual stream: each costs tp traffic in backward
    rows: int  # row-parallel products that write it: each costs tp traffic in forward
    operand_saved: bool = False  # all of its backward is put off: what is saved stays too
    has_loss: bool = False  # ends in the vocab-parallel cross entropy: three numbers a token over tp
    uses_tied: bool = False


def layers(model: ModelConfig) -> list[Layer]:
    """The layers of a model, first to last."""
    return [_embedding(model), *(_block(model, index) for index in range(model.layers)), _head(model)]


def tied_parameter(model: ModelConfig) -> Parameter | None:
    """The word embedding where the head uses it too, else None."""
    return _word_embedding(model) if model.tie_embeddings else None


def parameter_count(model: ModelConfig, padded: bool = False) -> int:
    """Parameters of the whole model, tied ones once; with or without the rows that pad the vocabulary."""
    parameters = [parameter for layer in layers(model) for parameter in layer.parameters]
    tied = tied_parameter(model)
    return sum(parameter.numel if padded or parameter.unpadded is None
               else parameter.numel // parameter.shape[0] * parameter.unpadded
               for parameter in [*parameters, *([tied] if tied else [])])


def model_flops(model: ModelConfig, sequences: int) -> int:
    """FLOPs of forward and backward of `sequences`, without recomputation: backward is twice forward.

    Narayanan et al. 2021, appendix, less the recomputed forward: 72 B s l h^2 (1 + s/(6h) + V/(12 l h)). Only matrix
    products count, and attention is counted whole (not halved for the causal mask), as is customary for MFU.
    """
    return 3 * sequences * sum(layer.forward_flops for layer in layers(model))


def _word_embedding(model: ModelConfig) -> Parameter:
    return Parameter(TIED, (model.padded_vocab, model.hidden), 0, model.init_std, unpadded=model.vocab)


def _norm(model: ModelConfig, name: str) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (model.hidden,), fill=1.0)
    return [weight] if model.norm == "rmsnorm" else [weight, Parameter(f"{name}.bias", (model.hidden,))]


def _linear(model: ModelConfig, name: str, shape: tuple[int, ...], tp_dim: int, std: float) -> list[Parameter]:
    """Weight and bias: [outputs, inputs], or [2, outputs, inputs] for two products of one input."""
    stacked = len(shape) == 3
    cut_rows = tp_dim < len(shape) - 1
    weight = Parameter(f"{name}.weight", shape, tp_dim, std, stacked=stacked)
    bias = Parameter(f"{name}.bias", shape[:-1], tp_dim if cut_rows else None, stacked=stacked)
    return [weight, bias] if model.bias else [weight]


def _embedding(model: ModelConfig) -> Layer:
    parameters = [] if model.tie_embeddings else [_word_embedding(model)]
    if model.position == "learned":
        parameters.append(Parameter("embedding.position.weight", (model.seq_len, model.hidden), None, model.init_std))
    saved = (Saved("token ids", model.seq_len, "never", 8), *_dropped(model))
    return Layer("embedding", tuple(parameters), forward_flops=0, saved=saved,
                 operand_full=model.seq_len * model.hidden, operand_whole=0, operand_cut=0, operand_saved=True,
                 columns=0, rows=1, uses_tied=model.tie_embeddings)


def _block(model: ModelConfig, index: int) -> Layer:
    name, seq, hidden, ffn = f"blocks.{index}", model.seq_len, model.hidden, model.num_ffn_hidden
    gated = model.activation == "swiglu"
    kv = model.num_kv_heads * model.head_dim
    up = 2 * ffn if gated else ffn
    # GPT-2: projections onto the residual stream start smaller by sqrt(number of residual branches).
    residual_std = model.init_std / math.sqrt(2 * model.layers)
    parameters = [
        *_norm(model, f"{name}.attention_norm"),
        *_linear(model, f"{name}.attention.qkv", (hidden + 2 * kv, hidden), 0, model.init_std),
        *_linear(model, f"{name}.attention.out", (hidden, hidden), 1, residual_std),
        *_norm(model, f"{name}.mlp_norm"),
        *_linear(model, f"{name}.mlp.up", *(((2, ffn, hidden), 1) if gated else ((ffn, hidden), 0)), model.init_std),
        *_linear(model, f"{name}.mlp.down", (hidden, ffn), 1, residual_std),
    ]
    matrices = hidden * (hidden + 2 * kv) + hidden * hidden + hidden * up + ffn * hidden
    return Layer(name, tuple(parameters),
                 forward_flops=seq * (2 * matrices + 4 * seq * hidden),
                 saved=_saved_by_block(model),
                 # Of each product its input and its output's gradient: the latter gathered where rows were scattered.
                 operand_full=seq * 2 * hidden, operand_whole=seq * 2 * hidden,
                 operand_cut=seq * (2 * hidden + 2 * kv + up + ffn),
                 columns=2, rows=2)


def _saved_by_block(model: ModelConfig) -> tuple[Saved, ...]:
    """What autograd keeps of a block (tests/loopback/test_saved.py measures it)."""
    seq, hidden, ffn = model.seq_len, model.hidden, model.num_ffn_hidden
    kv = model.num_kv_heads * model.head_dim
    grouped, rotary = model.heads > model.num_kv_heads, model.position == "rotary"
    found = [*_saved_by_norm(model, "attention", "norm"), *_saved_by_norm(model, "mlp", "norm"), *2 * _dropped(model)]
    found += [Saved("queries, keys and values as projected", seq * (hidden + 2 * kv), "always")]
    if model.attention_dropout:  # unfused
        squares = model.heads * seq * seq
        # Keys and values are kept for each query head. Queries that were turned or copied are kept so, and nothing as projected.
        instead = 2 * kv if rotary or grouped else 0
        found += [Saved("softmax of attention", squares, "always", 4, "attention"),
                  Saved("dropped attention", squares, "always", None, "attention"),
                  Saved("attention mask", squares, "always", 1, "attention"),
                  Saved("keys and values of each query", seq * (2 * hidden - instead), "always", None, "attention")]
    else:
        found += [Saved("queries", seq * hidden if rotary or grouped else 0, "always", None, "attention"),
                  Saved("keys", seq * kv if rotary else 0, "always", None, "attention"),
                  Saved("log of attention's sums", model.heads * seq, "always", 4, "attention")]
    found += [Saved("attention's output", seq * hidden, "always")]
    if model.activation == "swiglu":
        found += [Saved("gate and up", 2 * seq * ffn, "always"), Saved("opened gate", seq * ffn, "always", None, "mlp_act"),
                  Saved("gated", seq * ffn, "always", None, "mlp_act")]
    else:
        found += [Saved("up", seq * ffn, "always"), Saved("activated", seq * ffn, "always", None, "mlp_act")]
    return tuple(found)


def _saved_by_norm(model: ModelConfig, name: str, piece: str | None) -> list[Saved]:
    """Its input, its statistics in fp32, and its output, which the product after it reads."""
    return [Saved(f"{name} norm's input", model.seq_len * model.hidden, "sp"),
            Saved(f"{name} norm's statistics", model.seq_len * (2 if model.norm == "layernorm" else 1), "sp", 4),
            Saved(f"{name} norm's output", model.seq_len * model.hidden, "sp", None, piece)]


def _dropped(model: ModelConfig) -> list[Saved]:
    return [Saved("dropout mask", model.seq_len * model.hidden, "sp", 1)] if model.dropout else []


def _head(model: ModelConfig) -> Layer:
    parameters = _norm(model, "head.norm")
    if not model.tie_embeddings:
        parameters.append(Parameter("head.output.weight", (model.padded_vocab, model.hidden), 0, model.init_std,
                                    unpadded=model.vocab))
    saved = (*_saved_by_norm(model, "head", None), Saved("softmax", model.seq_len * model.padded_vocab, "always", 4),
             Saved("labels", model.seq_len, "never", 9))
    return Layer("head", tuple(parameters),
                 forward_flops=2 * model.seq_len * model.hidden * model.padded_vocab,
                 saved=saved,
                 operand_full=model.seq_len * model.hidden, operand_whole=0,
                 operand_cut=model.seq_len * model.padded_vocab,
                 columns=1, rows=0, has_loss=True, uses_tied=model.tie_embeddings)
