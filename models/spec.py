"""What a model is made of, without torch: layers, their parameters, their work and what they keep for backward.

A model is a list of layers: the embedding, the transformer blocks, the head (final norm, projection, loss). The modules
in `gpt` have exactly these parameters (a test compares them), so parameter counts, memory and the plan need no torch.

Parameters replicated over tp have `tp_dim` None; the others are cut along `tp_dim`, and rank r holds the r-th part.
Two layouts make that cut independent of tp, so that a checkpoint fits any mesh:
  attention.qkv   rows by kv head: the queries that share it, then its key, then its value (as in Megatron-LM)
  mlp.up          with swiglu, stacked: [2, ffn, hidden], gate and up, of which tp cuts dim 1

With tiling (`models/tiling.py` says how much) a layer becomes several, which are cut, and cut over tp, along the same dim:
  embedding  a tile is a run of the vocabulary's rows, and adds what it finds of the tokens
  attention  a run of kv heads with their queries: qkv, the core, out; added to the residual stream
  mlp        a run of the hidden layer: up, the activation, down; added to the residual stream
  head       a run of the vocabulary; what goes from tile to tile is a running softmax
The first tile of each but the embedding has the norm, whose output all of them read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from threed.schema import ModelConfig

TIED = "embedding.word.weight"  # the parameter that embedding and head share when model.tie_embeddings


@dataclass(frozen=True)
class Parameter:
    name: str  # global: the same on every mesh
    shape: tuple[int, ...]  # of the whole parameter, all tiles together
    tp_dim: int | None = None  # the dim that is cut over tp
    std: float = 0.0  # initial values: normal with this std, or the constant `fill` where std is 0
    fill: float = 0.0
    unpadded: int | None = None  # length of dim 0 without vocabulary padding
    stacked: bool = False  # dim 0 counts products of one input: modules see their rows one after the other
    tile: int = 0  # this is one of `tiles` equal runs along tp_dim
    tiles: int = 1

    @property
    def numel(self) -> int:
        """Of this tile, all tp ranks together."""
        return math.prod(self.shape) // self.tiles

    @property
    def key(self) -> str:
        """The name, and which tile of it: the same on every mesh, but not under every tiling."""
        return self.name if self.tiles == 1 else f"{self.name}[{self.tile}]"

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices, not to biases and norms (as in Megatron-LM)."""
        return len(self.shape) - self.stacked > 1

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Of a tp rank's part of this tile."""
        return tuple(size // (tp * self.tiles) if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

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
    under sequence parallelism), `*_cut` where it is always cut by tp, `operand_whole` where it never is, and `operand_gathered`
    where sequence parallelism makes a copy of what an earlier tile has counted.
    """

    kind: str  # embedding, block, attention, mlp (a branch of a block that is a layer of its own), head
    name: str
    parameters: tuple[Parameter, ...]
    forward_flops: int  # matrix products of a sequence, all tp ranks together
    saved: tuple[Saved, ...]
    operand_full: int
    operand_whole: int
    operand_cut: int
    columns: int  # column-parallel products that read the residual stream: each costs tp traffic in backward
    rows: int  # row-parallel products that write it: each costs tp traffic in forward
    operand_gathered: int = 0
    operand_saved: bool = False  # all of its backward is put off: what is saved stays too
    has_loss: bool = False  # ends in the vocab-parallel cross entropy: three numbers a token over tp
    uses_tied: bool = False
    block: int = -1  # of which it is, or is a part of
    tile: int = 0
    tiles: int = 1

    @property
    def shares(self) -> bool:
        """Whether it is a tile of several that read one norm's output."""
        return self.tiles > 1 and self.kind != "embedding"

    @property
    def adds(self) -> bool:
        """Whether it adds to its input without looking at it: the gradient passes as it is."""
        return self.tile > 0 and self.kind != "head"

    @property
    def running(self) -> bool:
        """Whether its output is a running softmax, two fp32 numbers a token, not the residual stream."""
        return self.kind == "head" and not self.has_loss


class Tiling(NamedTuple):
    """How many tiles each layer is cut into; whether blocks are cut into their two branches."""

    embedding: int = 1
    attention: int = 1
    mlp: int = 1
    head: int = 1
    branches: bool = False


WHOLE = Tiling()


def layers(model: ModelConfig, tiling: Tiling = WHOLE) -> list[Layer]:
    """The layers of a model, first to last."""
    found = [_embedding(model, tile, tiling.embedding) for tile in range(tiling.embedding)]
    for index in range(model.layers):
        if tiling.branches:
            found += [_attention(model, index, tile, tiling.attention) for tile in range(tiling.attention)]
            found += [_mlp(model, index, tile, tiling.mlp) for tile in range(tiling.mlp)]
        else:
            found.append(_block(_attention(model, index), _mlp(model, index)))
    return found + [_head(model, tile, tiling.head) for tile in range(tiling.head)]


def tied_parameter(model: ModelConfig) -> Parameter | None:
    """The word embedding where the head uses it too, else None."""
    return _word_embedding(model) if model.tie_embeddings else None


def parameter_count(model: ModelConfig, padded: bool = False) -> int:
    """Parameters of the whole model, tied ones once; with or without the rows that pad the vocabulary."""
    parameters = [parameter for layer in layers(model) for parameter in layer.parameters]
    tied = tied_parameter(model)
    return sum(parameter.numel if padded or parameter.unpadded is None
               else parameter.numel * parameter.unpadded // parameter.shape[0]
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


def _cut(parameters: list[Parameter], tile: int, tiles: int) -> list[Parameter]:
    """A tile's part of linear layers. What is not cut, the bias of a row-parallel product, belongs to the last tile."""
    return [p if p.tp_dim is None else replace(p, tile=tile, tiles=tiles) for p in parameters
            if p.tp_dim is not None or tile == tiles - 1]


def _named(name: str, tile: int, tiles: int) -> str:
    return name if tiles == 1 else f"{name} {tile + 1}/{tiles}"


def _embedding(model: ModelConfig, tile: int, tiles: int) -> Layer:
    parameters = [] if model.tie_embeddings else _cut([_word_embedding(model)], tile, tiles)
    if model.position == "learned" and tile == 0:
        parameters.append(Parameter("embedding.position.weight", (model.seq_len, model.hidden), None, model.init_std))
    saved = (Saved("token ids", model.seq_len, "never", 8), *_dropped(model))
    return Layer("embedding", _named("embedding", tile, tiles), tuple(parameters), forward_flops=0, saved=saved,
                 operand_full=0 if tile else model.seq_len * model.hidden, operand_whole=0, operand_cut=0, operand_saved=True,
                 columns=0, rows=1, uses_tied=model.tie_embeddings, tile=tile, tiles=tiles)


def _block(attention: Layer, mlp: Layer) -> Layer:
    """Both branches as one layer."""
    sums = {name: getattr(attention, name) + getattr(mlp, name) for name in (
        "parameters", "saved", "forward_flops", "operand_full", "operand_whole", "operand_cut", "columns", "rows")}
    return Layer("block", f"blocks.{attention.block}", block=attention.block, **sums)


def _branch(model: ModelConfig, name: str, index: int, tiles: tuple[int, int], linears: list[Parameter],
            **costs: Any) -> Layer:
    """A branch of block `index`, or a tile of it: (which, of how many). `costs` are of the whole branch."""
    tile, count = tiles
    stream = model.seq_len * model.hidden
    norm = _norm(model, f"blocks.{index}.{name}_norm") if tile == 0 else []
    saved = tuple(kept._replace(elements=kept.elements // count) for kept in costs["saved"])
    # The output's gradient, which its product keeps, is the same tensor for all tiles, unless dropout makes each its own.
    own = tile == 0 or model.dropout > 0
    return Layer(name, _named(f"blocks.{index}.{name}", *tiles), (*norm, *_cut(linears, *tiles)),
                 forward_flops=costs["flops"] // count,
                 saved=(*_saved_by_norm(model, name, "norm", tiles), *_dropped(model), *saved),
                 # Of each product its input and its output's gradient: the latter gathered where rows were scattered.
                 operand_full=stream if tile == 0 else 0, operand_whole=stream if own else 0,
                 operand_gathered=0 if own else stream, operand_cut=costs["operand_cut"] // count,
                 columns=1, rows=1, block=index, tile=tile, tiles=count)


def _residual_std(model: ModelConfig) -> float:
    """GPT-2: projections onto the residual stream start smaller by sqrt(number of residual branches)."""
    return model.init_std / math.sqrt(2 * model.layers)


def _attention(model: ModelConfig, index: int, tile: int = 0, tiles: int = 1) -> Layer:
    name, seq, hidden = f"blocks.{index}.attention", model.seq_len, model.hidden
    kv = model.num_kv_heads * model.head_dim
    linears = [*_linear(model, f"{name}.qkv", (hidden + 2 * kv, hidden), 0, model.init_std),
               *_linear(model, f"{name}.out", (hidden, hidden), 1, _residual_std(model))]
    matrices = hidden * (hidden + 2 * kv) + hidden * hidden
    return _branch(model, "attention", index, (tile, tiles), linears, flops=seq * (2 * matrices + 4 * seq * hidden),
                   saved=_saved_by_attention(model), operand_cut=seq * (2 * hidden + 2 * kv))


def _mlp(model: ModelConfig, index: int, tile: int = 0, tiles: int = 1) -> Layer:
    name, seq, hidden, ffn = f"blocks.{index}.mlp", model.seq_len, model.hidden, model.num_ffn_hidden
    gated = model.activation == "swiglu"
    up = 2 * ffn if gated else ffn
    linears = [*_linear(model, f"{name}.up", *(((2, ffn, hidden), 1) if gated else ((ffn, hidden), 0)), model.init_std),
               *_linear(model, f"{name}.down", (hidden, ffn), 1, _residual_std(model))]
    return _branch(model, "mlp", index, (tile, tiles), linears, flops=seq * 2 * (hidden * up + ffn * hidden),
                   saved=_saved_by_mlp(model), operand_cut=seq * (up + ffn))


def _saved_by_attention(model: ModelConfig) -> list[Saved]:
    """What autograd keeps of it, between its norm and its dropout (tests/loopback/test_saved.py measures it)."""
    seq, hidden = model.seq_len, model.hidden
    kv = model.num_kv_heads * model.head_dim
    grouped, rotary = model.heads > model.num_kv_heads, model.position == "rotary"
    found = [Saved("queries, keys and values as projected", seq * (hidden + 2 * kv), "always")]
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
    return [*found, Saved("attention's output", seq * hidden, "always")]


def _saved_by_mlp(model: ModelConfig) -> list[Saved]:
    size = model.seq_len * model.num_ffn_hidden
    if model.activation == "swiglu":
        return [Saved("gate and up", 2 * size, "always"), Saved("opened gate", size, "always", None, "mlp_act"),
                Saved("gated", size, "always", None, "mlp_act")]
    return [Saved("up", size, "always"), Saved("activated", size, "always", None, "mlp_act")]


def _saved_by_norm(model: ModelConfig, name: str, piece: str | None, tiles: tuple[int, int]) -> list[Saved]:
    """Its input, its statistics in fp32, and its output, which the product after it reads. Tiles share the output, which is a
    slot of its own then (`normed`)."""
    tile, count = tiles
    found = [Saved(f"{name} norm's input", model.seq_len * model.hidden, "sp"),
             Saved(f"{name} norm's statistics", model.seq_len * (2 if model.norm == "layernorm" else 1), "sp", 4),
             Saved(f"{name} norm's output", model.seq_len * model.hidden, "sp", None, piece)]
    return [] if tile else found if count == 1 else found[:2]


def _dropped(model: ModelConfig) -> list[Saved]:
    return [Saved("dropout mask", model.seq_len * model.hidden, "sp", 1)] if model.dropout else []


def _head(model: ModelConfig, tile: int, tiles: int) -> Layer:
    parameters = _norm(model, "head.norm") if tile == 0 else []
    if not model.tie_embeddings:
        output = Parameter("head.output.weight", (model.padded_vocab, model.hidden), 0, model.init_std, unpadded=model.vocab)
        parameters += _cut([output], tile, tiles)
    size = model.seq_len * model.padded_vocab // tiles
    labels = 9 if tiles == 1 else 25 if tile else 13  # bytes of a token, with the running softmax
    return Layer("head", _named("head", tile, tiles), tuple(parameters),
                 forward_flops=2 * model.hidden * size,
                 saved=(*_saved_by_norm(model, "head", None, (tile, tiles)), Saved("softmax", size, "always", 4),
                        Saved("labels", model.seq_len, "never", labels)),
                 operand_full=0 if tile else model.seq_len * model.hidden, operand_whole=0, operand_cut=size,
                 columns=1, rows=0, has_loss=tile == tiles - 1, uses_tied=model.tie_embeddings, tile=tile, tiles=tiles)
