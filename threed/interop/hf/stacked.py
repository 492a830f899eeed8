"""Stacked: tensors of transformers that hold those of all experts of a block, one expert behind the other.

    experts.gate_up_proj [X, 2 F, D]    gate and up of expert 0, of expert 1, ...
    experts.down_proj    [X, D, F]

transformers 5 has them in memory, and writes a tensor an expert; some files have them all the same. Both cuts
are along the first dims, so that an expert's tensors are ranges of bytes in the file: they are listed as
tensors of their own, and everything else is as if the file had them. Nothing is read for that.
"""

from __future__ import annotations

import math

from threed.interop.hf.names import TensorRow
from threed.interop.hf.tensors import TensorEntry
from threed.schema import ModelConfig


def unstack(entries: dict[str, TensorEntry], rows: list[TensorRow], stored: tuple[int, ...],
            model: ModelConfig, cut: str) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Replace a tensor that stacks all experts, if there is one, by an entry for each expert's tensor.
    `stored`: the parameter's shape. `cut`: a prefix that the files' names lack. Returns the name of the
    tensor that was replaced, and the tensors that must be there now, with their shapes."""
    name = rows[0].also.removeprefix(cut)
    held = {theirs.removeprefix(cut): shape
            for row in rows for theirs, shape in row.shapes(stored, model).items()}
    entry, shape = entries.get(name), rows[0].stack(stored)
    if entry is None:
        return [], held
    if entry.shape != shape or held.keys() & entries.keys():
        return [], {name: shape}
    del entries[name]
    at, each = entry.start, entry.size // math.prod(shape)
    for theirs, part in held.items():
        size = each * math.prod(part)
        entries[theirs] = entry._replace(shape=part, start=at, size=size)
        at += size
    return [name], held
