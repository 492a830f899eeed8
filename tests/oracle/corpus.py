"""Tokens of the oracle: it writes the file that threed reads, and knows each row that can come from it. (No
threed.)"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

LEFT_OUT = -100  # a label that does not count, as torch has it


class Wrong(AssertionError):
    """threed read other tokens, or chose other experts, than it may."""


def write_tokens(prefix: Path, documents: list[list[int]]) -> None:
    """PREFIX.bin and PREFIX.idx as Megatron-LM writes them, a sequence a document."""
    flat = np.concatenate([np.array(each, np.uint16) for each in documents])
    lengths = np.array([len(each) for each in documents], np.int32)
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    prefix.with_suffix(".bin").write_bytes(flat.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(documents), len(documents) + 1)
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + offsets.tobytes()
                                           + np.arange(len(documents) + 1, dtype=np.int64).tobytes())


@dataclass
class Rows:
    """The global batch of a step, [G, S] each."""

    tokens: torch.Tensor
    labels: torch.Tensor
    starts: torch.Tensor  # bool: where attention and positions begin anew


class Corpus:
    """What rows there can be: windows that follow each other (stream), or whole documents and padding."""

    def __init__(self, documents: list[list[int]], seq_len: int, packing: str, apart: bool):
        self.seq_len, self.packing, self.apart = seq_len, packing, apart
        self.seen: Counter[bytes] = Counter()
        stream = [token for each in documents for token in each]
        ends = np.cumsum([len(each) for each in documents]).tolist()
        self.by_inputs: dict[bytes, set[bytes]] = {}
        self.whole: Counter[bytes] = Counter()
        # tokens of a window -> the token after each, and the places before which a document has ended
        self.known: dict[bytes, tuple[list[int], set[int]]] = {}
        if packing == "best-fit":
            assert max(map(len, documents)) <= seq_len + 1
            for each in documents:
                self.whole[_key(each)] += 1
                self.by_inputs.setdefault(_key(each[:-1]), set()).add(_key(each))
            return
        for first in range(0, len(stream) - seq_len, seq_len):
            inside = {end - first for end in ends if first < end <= first + seq_len}
            self._know(stream[first:first + seq_len + 1], inside)

    def _know(self, tokens: list[int], inside: set[int]) -> None:
        """A window, with the places before which a document has ended."""
        key = _key(tokens[:-1])
        if key in self.known and self.known[key] != (tokens[1:], inside):
            raise ValueError("two windows of the same tokens go on in two ways: draw other tokens")
        self.known[key] = tokens[1:], inside
        self.whole[key] += 1

    def labels(self, tokens: torch.Tensor) -> Rows:
        """Labels and documents of the rows of a step, [G, S]. Raises Wrong where one is not of the file."""
        labels, starts = torch.full_like(tokens, LEFT_OUT), torch.zeros_like(tokens, dtype=torch.bool)
        for row, content in enumerate(tokens.tolist()):
            if self.packing == "best-fit":
                self._documents(content, labels[row], starts[row])
            else:
                self._window(content, labels[row], starts[row])
        if not self.apart:
            starts[:] = False
        starts[:, 0] = True
        return Rows(tokens, labels, starts)

    def _window(self, content: list[int], labels: torch.Tensor, starts: torch.Tensor) -> None:
        key = _key(content)
        if key not in self.known:
            raise Wrong(f"this row is no window of the file: {content}")
        self.seen[key] += 1
        following, inside = self.known[key]
        labels[:] = torch.tensor(following)
        for end in inside if self.apart else ():
            labels[end - 1] = LEFT_OUT  # the next token is of another document
            starts[end:end + 1] = True

    def _documents(self, content: list[int], labels: torch.Tensor, starts: torch.Tensor) -> None:
        """A row of whole documents, of each all tokens but the last."""
        documents = self._parsed(content)
        if documents is None:
            raise Wrong(f"this row is no list of documents: {content}")
        at = 0
        for key in documents:
            self.seen[key] += 1
            inside = torch.tensor(np.frombuffer(key, np.uint16).astype(np.int64))
            starts[at] = True
            labels[at:(at := at + len(inside) - 1)] = inside[1:]
        starts[at:at + 1] = True  # padding

    def _parsed(self, content: list[int]) -> list[bytes] | None:
        """The documents that a row is made of; behind them are zeros, which no document has. None: it is made
        of something else."""
        if not any(content):
            return []
        for size in range(len(content), 0, -1):
            for key in self.by_inputs.get(_key(content[:size]), ()):
                if (rest := self._parsed(content[size:])) is not None:
                    return [key, *rest]
        return None

    def check_epochs(self) -> None:
        """No window, or document, may be read once more before all were read."""
        rounds = [self.seen[key] / count for key, count in self.whole.items()]
        if max(map(math.ceil, rounds)) > min(map(math.floor, rounds)) + 1:
            raise Wrong("a window was read again before others were read")


def _key(tokens: list[int]) -> bytes:
    return np.array(tokens, np.uint16).tobytes()
