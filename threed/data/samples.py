"""Training samples: windows over a token stream, in an order that depends on the seed alone.

                 train                           validation
    |---w0---|---w1---|---w2---|-- ... --|.|---w0---|---w1---|..|     w: seq_len tokens; the token after them
    0                                      cut                  num_tokens                   is the last label

Sample i of the training split lies in epoch i // num_windows; inside an epoch, the windows come in a
permutation keyed by (seed, epoch). So sample i is a function of (seed, i): no mesh, batch size or number of
steps can move it, a resumed run needs no state but i, and nothing is stored, however long the stream.

So are the positions within documents and the number of labels that count: each rank finds them by itself,
from the index of the tokens, whether it reads tokens or not.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from threed.base.errors import InputError
from threed.base.hashing import shuffled
from threed.data.cache import use
from threed.data.file_types import HEAD_BYTES, stand_in
from threed.data.packing import BestFit, Runs, WindowStream, cut
from threed.schema import DataConfig
from threed.spec.parameter import NOT_COUNTED

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # Megatron's codes
# Part of a stream with a checksum of its own. A disk reads as much at once, so a check costs no more reading.
BLOCK_BYTES = 2**16


class Tokens:
    """A Megatron `.bin/.idx` pair, memory-mapped.

    `stream`: all tokens, [num_tokens]. `document_ends`: int64 [num_documents], ascending; document d ends
    before token `document_ends[d]`. `mask`: uint8 [num_tokens], 1 where a token counts as a label, or
    None (data.loss_mask). Raises InputError when a file is missing, damaged, or not of the other's
    size. A `.crc32` beside them holds the checksums of the stream's blocks, which `check` compares;
    Megatron's own data have none.
    """

    def __init__(self, prefix: str | Path):
        idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path, other in ((idx, bin_), (bin_, idx)):
            if not path.is_file():
                half = f"{other} is there, but " if other.is_file() else ""
                raw = "; tokens without an index, as other programs write them, are not read: give the " \
                    "text" if path == idx else ""
                raise InputError(f"{half}{path} is missing; a prefix of Megatron data needs both .bin and "
                                 f".idx{raw}")
        try:
            dtype, self.document_ends = _read_index(idx)
            num_tokens = int(self.document_ends[-1]) if len(self.document_ends) else 0
            want_bytes, have_bytes = num_tokens * dtype.itemsize, bin_.stat().st_size
            if want_bytes != have_bytes:
                _check_stand_in(bin_)
                how = "cut short" if have_bytes < want_bytes else "too long for its .idx"
                if num_tokens and have_bytes % num_tokens == 0 and have_bytes // num_tokens in (1, 2, 4, 8):
                    how = f"of another type, with {have_bytes // num_tokens} bytes a token, or {how}"
                raise InputError(f"{bin_} is {how}: {idx} tells of {num_tokens} tokens of {dtype}, "
                                 f"{want_bytes} bytes, and the file has {have_bytes}; prepare the data again")
            if not num_tokens:
                raise InputError(f"{bin_} holds no tokens; give other data")
            self.path, self.stream = bin_, np.memmap(bin_, dtype=dtype, mode="r")
            self._use = use(prefix)
            self.mask = _read_mask(Path(f"{prefix}.mask"), num_tokens)
            self._checksums = _read_checksums(Path(f"{prefix}.crc32"), want_bytes)
            self._checked = np.zeros(0 if self._checksums is None else len(self._checksums), bool)
        except OSError as error:
            raise InputError(f"{prefix}.bin/.idx cannot be read: {error.strerror or error}") from None

    def check(self, start: int, stop: int) -> None:
        """Compare the blocks that hold tokens [start, stop) with their checksums, each block once. InputError
        where one is damaged."""
        if self._checksums is None:
            return
        size = self.stream.itemsize
        for block in range(start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)):
            if not self._checked[block]:
                first, last = block * BLOCK_BYTES // size, min((block + 1) * BLOCK_BYTES // size,
                                                               self.num_tokens)
                if zlib.crc32(self.stream[first:last].data) != self._checksums[block]:
                    raise InputError(f"{self.path}: tokens {first} to {last - 1} do not have the checksum "
                                     f"that they were written with; delete the folder {self.path.parent} and "
                                     "start again")
                self._checked[block] = True

    @property
    def num_tokens(self) -> int:
        return len(self.stream)

    @property
    def num_documents(self) -> int:
        return len(self.document_ends)


def _read_mask(path: Path, num_tokens: int) -> np.ndarray | None:
    if not path.exists():
        return None
    if path.stat().st_size != num_tokens:
        raise InputError(f"{path} has {path.stat().st_size} bytes, and the stream {num_tokens} tokens; "
                         "prepare the data again")
    return np.memmap(path, np.uint8, "r")


def _read_checksums(path: Path, size: int) -> np.ndarray | None:
    """CRC-32 of each block of a stream of `size` bytes; None where the file does not exist."""
    if not path.exists():
        return None
    count, wanted = path.stat().st_size // 4, -(-size // BLOCK_BYTES)
    if count != wanted:
        raise InputError(f"{path} holds {count} checksums, and the stream has {wanted} blocks; prepare the "
                         "data again")
    return np.memmap(path, "<u4", "r")


def _check_stand_in(path: Path) -> None:
    """InputError where a file was not downloaded."""
    with path.open("rb") as file:
        if (kind := stand_in(file.read(HEAD_BYTES))) is not None:
            raise InputError(f"{path} is {kind.what}; {kind.advice}")


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray]:
    """Token dtype, and the token at which each document ends (int64 [documents]).

    Layout: header; int32 length of each sequence; int64 byte offset of each; int64 document bounds, from 0 up
    to the number of sequences. Here sequences follow each other, and so the offsets repeat the lengths.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if not header.startswith(_MAGIC):
            _check_stand_in(path)
            raise InputError(f"{path} is not a Megatron index: it starts with {header[:9]!r}, not {_MAGIC!r}")
        if len(header) < _HEADER.size:
            raise InputError(f"{path} is cut short: its header needs {_HEADER.size} bytes, and the file has "
                             f"{size}")
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            raise InputError(f"{path} is an index of version {version} and dtype code {code}; threed reads "
                             f"version 1 and integer tokens, codes {', '.join(map(str, _DTYPES))}")
        needed = _HEADER.size + sequences * (4 + 8) + bounds * 8
        if size < needed:
            raise InputError(f"{path} is cut short: {sequences} sequences in {max(0, bounds - 1)} documents "
                             f"need {needed} bytes, and the file has {size}; prepare the data again")
        if size > needed:
            raise InputError(f"{path} has {size - needed} bytes more than its {sequences} sequences need: "
                             "the data have pictures, which threed does not read, or it is damaged; prepare "
                             "the text alone")
        lengths = np.fromfile(file, np.int32, sequences)
        offsets = np.fromfile(file, np.int64, sequences)
        edges = np.fromfile(file, np.int64, bounds)
    if ((lengths < 0).any() or bounds < 1 or edges[0] != 0 or edges[-1] != sequences
            or (np.diff(edges) < 0).any()):
        raise InputError(f"{path} is damaged: its sequence lengths or document bounds are impossible; "
                         "prepare the data again")
    # first token of each sequence, and the end
    token_at = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    dtype = np.dtype(_DTYPES[code])
    if len(wrong := np.flatnonzero(offsets != token_at[:-1] * dtype.itemsize)):
        first = int(wrong[0])
        raise InputError(f"{path} lists its sequences in another order than they have in the .bin, "
                         f"leaves some out or is damaged: sequence {first} begins at byte {offsets[first]}, "
                         f"and those before it end at {token_at[first] * dtype.itemsize}; threed reads a "
                         ".bin from its beginning to its end: write the pair anew, in the order of the index")
    return dtype, token_at[edges[1:]]


class Sample(NamedTuple):
    """A window of `seq_len` inputs."""

    inputs: np.ndarray  # int64 [seq_len]
    labels: np.ndarray  # int64 [seq_len]: the token that follows each input, or NOT_COUNTED


class Split:
    """Tokens [start, stop) of a stream, as windows that do not overlap.

    `seed` None: windows in order (validation). Otherwise in a permutation of their own each epoch (training).
    `vocab`: all tokens must be below it. `data`: which tokens are in a window (`packing`), and which labels
    count (`document_mask`, `loss_mask`).
    """

    def __init__(self, tokens: Tokens, start: int, stop: int, seq_len: int, seed: int | None,
                 vocab: int | None = None, data: DataConfig | None = None):
        data = data or DataConfig()
        self.num_tokens = stop - start
        self._tokens, self._seq_len, self._seed, self._vocab = tokens, seq_len, seed, vocab
        self._apart = data.document_mask and data.packing == "stream"  # whether documents are cut here
        self._mask = tokens.mask if data.loss_mask != "none" else None
        self.cut_off = self.dropped = 0  # answers of which a part, or all, is beyond their window
        self.parted = 0  # documents of best-fit that are cut into windows
        self.layout = (WindowStream(start, stop, seq_len) if data.packing == "stream"
                       else self._packed(start, stop))
        self.num_windows = self.layout.num_windows

    def _packed(self, start: int, stop: int) -> BestFit:
        ends = np.unique(np.clip(self._tokens.document_ends, start, stop))
        ends = ends[ends > start]
        bounds = np.stack([np.concatenate([[start], ends[:-1]]), ends], 1) if len(ends) else np.empty((0, 2))
        bounds = bounds.astype(np.int64)
        keep = None
        if self._mask is not None:  # an example is not cut in two, of which one would have no prompt
            runs = cut(bounds, self._seq_len)
            keep = np.isin(runs[:, 0], bounds[:, 0])
            counts = _sums(self._mask, runs[:, 0] + 1, runs.sum(1) + 1)
            example = np.searchsorted(bounds[:, 0], runs[:, 0], "right")
            dropped = example[keep & (counts == 0)]
            self.cut_off = len(np.setdiff1d(example[~keep & (counts > 0)], dropped))
            self.dropped = len(dropped)
            keep &= counts > 0
        else:
            self.parted = int(np.count_nonzero(bounds[:, 1] - bounds[:, 0] - 1 > self._seq_len))
        return BestFit(bounds, self._seq_len, keep)

    def window(self, index: int) -> np.ndarray:
        """int64 [seq_len + 1], inputs [:-1] and labels [1:]: sample `index` of windows that follow each
        other, all of whose labels count."""
        inputs, labels = self.sample(index)
        return np.append(inputs, labels[-1:])

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0, however large. InputError where the tokens are damaged, or not below
        `vocab`."""
        inputs, labels = np.zeros(self._seq_len, np.int64), np.full(self._seq_len, NOT_COUNTED, np.int64)
        at = 0
        for first, count in self._runs(index).tolist():
            tokens = self._read(first, first + count + 1, index)
            place = slice(at, at := at + count)
            inputs[place], labels[place] = tokens[:-1], tokens[1:]
            if self._mask is not None:
                labels[place][self._mask[first + 1:first + count + 1] == 0] = NOT_COUNTED
            if self._apart and self._ends_at(first + count):
                labels[at - 1] = NOT_COUNTED  # it is the first token of another document
        return Sample(inputs, labels)

    def positions(self, index: int) -> np.ndarray:
        """The position of each input of a sample within its document, int64 [seq_len]. Padding is a document
        of its own. It reads no tokens."""
        sizes = self._runs(index)[:, 1].tolist()
        rest = self._seq_len - sum(sizes)
        return np.concatenate([np.arange(size) for size in (*sizes, rest)])

    def counted(self, index: int) -> int:
        """How many labels of a sample count."""
        total = 0
        for first, count in self._runs(index).tolist():
            if self._mask is not None:
                total += int(np.count_nonzero(self._mask[first + 1:first + count]))
                last = bool(self._mask[first + count])
            else:
                total, last = total + count - 1, True
            total += last and not (self._apart and self._ends_at(first + count))
        return total

    def count(self, start: int, stop: int) -> int:
        """How many labels of samples [start, stop) count."""
        return sum(map(self.counted, range(start, stop)))

    def _runs(self, index: int) -> Runs:
        assert self.num_windows, "this split holds no window"
        assert index >= 0, index
        epoch, place = divmod(index, self.num_windows)
        if self._seed is not None:
            place = shuffled(place, self.num_windows, self._seed, epoch)
        runs = self.layout.runs(place)
        if not self._apart:
            return runs
        ((first, count),) = runs.tolist()
        ends, stop = self._tokens.document_ends, first + count
        inside = ends[np.searchsorted(ends, first, "right"):np.searchsorted(ends, stop, "left")]
        edges = np.unique(np.concatenate([[first], inside, [stop]]))
        return np.stack([edges[:-1], np.diff(edges)], 1)

    def _ends_at(self, token: int) -> bool:
        """Whether a document ends before a token."""
        ends = self._tokens.document_ends
        place = int(np.searchsorted(ends, token))
        return place < len(ends) and int(ends[place]) == token

    def _read(self, first: int, stop: int, index: int) -> np.ndarray:
        self._tokens.check(first, stop)
        tokens = self._tokens.stream[first:stop].astype(np.int64)
        if self._vocab is not None and (tokens.min() < 0 or tokens.max() >= self._vocab):
            at = int(((tokens < 0) | (tokens >= self._vocab)).argmax())
            raise InputError(f"{self._tokens.path} holds token {tokens[at]} at position {first + at}, in "
                             f"sample {index}, but model.vocab={self._vocab} allows 0 to {self._vocab - 1}: "
                             "the data are damaged, or of another tokenizer")
        return tokens


def _sums(mask: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The sum of each range [first, stop) of a mask; the ranges ascend and do not overlap."""
    edges = np.stack([first, stop], 1).ravel()
    if not len(edges):
        return np.zeros(0, np.int64)
    if edges[-1] == len(mask):
        edges = edges[:-1]
    return np.add.reduceat(mask, edges, dtype=np.int64)[::2]


def stacked(samples: Iterable[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of several samples, [samples, seq_len] each."""
    inputs, labels = zip(*samples, strict=True)
    return np.stack(inputs), np.stack(labels)


def splits(prefix: str | Path, seq_len: int, seed: int, validation_fraction: float, vocab: int | None = None,
           data: DataConfig | None = None) -> tuple[Split, Split]:
    """Training and validation split of a Megatron prefix. Validation is the tail, about `validation_fraction`
    of it.

    The cut is at the end of a document, unless documents are so long that the tail would be less than half or
    more than twice its share; then it is inside a document. With fraction 0 validation has no windows. Raises
    InputError when either split is too short for one window.
    """
    tokens = Tokens(prefix)
    total = tokens.num_tokens
    cut = _cut(tokens.document_ends, total, validation_fraction)
    train = Split(tokens, 0, cut, seq_len, seed, vocab, data)
    validation = Split(tokens, cut, total, seq_len, None, vocab, data)
    wanted = ((train, "training", "lower"), (validation, "validation", "raise"))
    for split, name, change in wanted[:2 if validation_fraction else 1]:
        if not split.num_windows:
            fraction = f" or {change} data.validation_fraction={validation_fraction}"
            fraction = fraction if validation_fraction else ""
            if split.dropped:
                raise InputError(f"{prefix}: of the {split.dropped} examples for {name} none has a token of "
                                 f"an answer within model.seq_len + 1 = {seq_len + 1} tokens; raise "
                                 f"model.seq_len{fraction}")
            raise InputError(f"{prefix}: {split.num_tokens} of {total} tokens are for {name}, fewer than one "
                             f"window of model.seq_len + 1 = {seq_len + 1}; give more text in data.source, "
                             f"lower model.seq_len={seq_len}{fraction}")
    return train, validation


def _cut(document_ends: np.ndarray, total: int, fraction: float) -> int:
    """The token at which validation starts."""
    if not fraction:
        return total
    share = round(total * fraction)
    ends = document_ends[:-1]  # the last one leaves nothing
    if len(ends):
        cut = int(ends[np.abs(ends - (total - share)).argmin()])
        if share / 2 <= total - cut <= 2 * share:
            return cut
    return total - share
