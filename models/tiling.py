"""Memory-centric tiling: into how many tiles each layer is cut, so that no more of it than a tile need be in memory whole.

`model.tile_linears: BYTES` bounds what one unit gathers of linear layers: the matrices of a branch (qkv and out, or up, gate and
down), or of the head, or the table of the embedding, as one tp rank has them in the dtype of compute. A block whose two branches
are larger together is cut into its branches; a branch, head or embedding that is larger, into the fewest equal tiles that are
not. Tiles are whole kv heads, and equal on all tp ranks. Biases and norms are not counted. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from threed.errors import InputError
from threed.models.spec import WHOLE, Layer, Tiling, layers
from threed.quantity import parse_bytes, show_bytes

if TYPE_CHECKING:
    from threed.schema import Config


class Linear(NamedTuple):
    """What is cut together."""

    name: str
    size: int  # bytes on one tp rank
    parts: int  # that must stay whole, on one tp rank
    what: str  # such a part is


def layers_of(config: Config) -> list[Layer]:
    """The layers of a config, first to last: those of its model, cut into tiles."""
    return layers(config.model, tiling(config))


def tiling(config: Config) -> Tiling:
    """How a config's layers are cut. InputError where they cannot be cut small enough, or must not be cut."""
    if config.model.tile_linears is None:
        return WHOLE
    limit, linears = parse_bytes(config.model.tile_linears), _linears(config)
    asked = f"model.tile_linears={config.model.tile_linears}"
    if config.model.tie_embeddings and linears["head"].size > limit:
        raise InputError(f"{asked} would cut the word embedding of {show_bytes(linears['head'].size)}, which embedding and head "
                         "share whole; set model.tie_embeddings=false, or raise it")
    counts = {name: _fewest(linear.size, linear.parts, limit) for name, linear in linears.items()}
    if not all(counts.values()):
        least = {name: -(-linear.size // linear.parts) for name, linear in linears.items()}
        worst = max((name for name, count in counts.items() if not count), key=lambda name: least[name])
        raise InputError(f"{asked}: {worst} has {show_bytes(linears[worst].size)} a rank, and its smallest tile, one "
                         f"{linears[worst].what}, has {least[worst]} bytes ({show_bytes(least[worst])}): raise it to that, or "
                         "raise parallel.tp")
    embedding, attention, mlp, head = (counts[name] for name in ("embedding", "attention", "mlp", "head"))
    return Tiling(embedding, attention, mlp, head, linears["attention"].size + linears["mlp"].size > limit)


def _linears(config: Config) -> dict[str, Linear]:
    model, tp = config.model, config.parallel.tp
    element = 4 if config.precision.dtype == "fp32" else 2
    hidden, ffn, kv = model.hidden, model.num_ffn_hidden, model.num_kv_heads * model.head_dim
    products = 3 if model.activation == "swiglu" else 2
    sizes = {"attention": (2 * hidden * (hidden + kv), model.num_kv_heads, "kv head with its queries"),
             "mlp": (products * ffn * hidden, ffn, "number of model.ffn_hidden"),
             "head": (model.padded_vocab * hidden, model.padded_vocab, "token of the vocabulary")}
    sizes["embedding"] = sizes["head"]
    return {name: Linear(name, size * element // tp, parts // tp, what) for name, (size, parts, what) in sizes.items()}


@cache
def _fewest(size: int, parts: int, limit: int) -> int:
    """The fewest tiles, a divisor of `parts`, of at most `limit` bytes each; 0 where there are none."""
    for count in range(max(1, -(-size // limit)) if limit > 0 else parts + 1, parts + 1):
        if parts % count == 0:
            return count
    return 0


def together(model_layers: Sequence[Layer]) -> list[int]:
    """Lengths of the runs of layers that are on one stage: tiles of one layer hand on more than the residual stream."""
    found: list[int] = []
    for layer in model_layers:
        if layer.tile == 0:
            found.append(0)
        found[-1] += 1
    return found
