"""How a tensor that a layer hands on travels to other ranks before later layers read it.

    GATHER    all ranks' tensors, one after the other along dim 0; of their gradients' sum each gets its part
    EXCHANGE  rows (dim 0) go to the ranks that need them: an all-to-all; so do the rows of the gradient
"""

from __future__ import annotations

from typing import NamedTuple

# Bytes of a row of a token for an expert, behind its numbers: its weight in fp32, and what keeps rows on a
# multiple of 16 bytes, as products of groups of rows need it
ROW_EXTRA = 16


class Gathered(NamedTuple):
    """All ranks of a group get all parts, which have equally many rows."""

    becomes: str  # the tensor that later layers read
    over: str  # the group, one inside a pipeline position, such as "dp"
    # Twice: what leaves stays. What comes may be freed behind its reader's forward, and gathered again before
    # the reader's backward. Its gradient is summed in fp32, whatever its dtype.
    again: bool = False

    by = "GATHER"
    gives = takes = ""
    extra = 0

    def bytes(self, size: int, ranks: int) -> int:
        """Of what it becomes, where the layer's `makes` does not say."""
        return size * ranks


class Exchanged(NamedTuple):
    """Each rank of a group gives rows to each, itself included: first those for rank 0.

    `gives`, `takes`: tensors handed on without a gradient, [ranks of the group, ...], int64: the rows for
    each rank, and of each; what is of one rank is added up. Both empty: all ranks get equally many, and the
    rows are a multiple of the ranks.
    `extra`: bytes behind the numbers of each row that are numbers in fp32, whatever the dtype of the rows.
    """

    becomes: str
    over: str
    gives: str = ""
    takes: str = ""
    extra: int = 0

    by, again = "EXCHANGE", False

    def bytes(self, size: int, ranks: int) -> int:
        return size
