"""Box reader: boxes of parameters from a checkpoint's files, and no more bytes than the boxes need."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from threed.checkpoint.format import Manifest, Stored, Unusable, file_name, patiently, read_line
from threed.checkpoint.proof import MASK, checksum
from threed.checkpoint.shard_file import read
from threed.features.zero.boxes import Box, overlap

_OPEN = 64  # files open at a time: a small mesh may read what thousands of ranks wrote
_RUN = 16 << 10  # bytes: shorter runs of a file are read together with the bytes between them


class Overlap(NamedTuple):
    """The overlap of one stored box with a wanted box."""

    stored: Stored
    target: tuple[slice, ...]  # the overlap, in the wanted box
    spans: list[tuple[int, int]]  # to be read of the stored box: (first element, number of elements)
    shape: tuple[int, ...]  # of the elements of all spans
    cut: tuple[slice, ...]  # the overlap, in this shape

    @property
    def num_bytes(self) -> int:
        return 4 * sum(size for _, size in self.spans)

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == 4 * math.prod(self.stored.shape)


class BoxReader:
    """Reads boxes: the index lines of this rank's parameters, and the needed bytes of the files."""

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._manifest = path, manifest
        # once set, `read` raises Unusable: no rank needs this checkpoint any more
        self.stop = threading.Event()
        self.last_s = time.monotonic()  # when something was read
        self._lines: dict[str, list[Stored]] = {}
        self._files: dict[int, int] = {}  # rank -> descriptor
        # (parameter, kind) -> by how much rounding to 16 bits lowered its checksum
        self.rounded: dict[tuple[str, str], int] = {}

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def plan(self, kind: str, box: Box) -> list[Overlap]:
        """The parts to be read for a box. Unusable where they do not cover the box."""
        if box.name not in self._lines:
            self._lines[box.name] = read_line(self._path, self._manifest, box.name)
        self.last_s = time.monotonic()
        parts, missing = [], math.prod(box.shape)
        for stored in self._lines[box.name]:
            target = overlap(box.offset, box.shape, stored.offset, stored.shape)
            source = overlap(stored.offset, stored.shape, box.offset, box.shape)
            if target is None or source is None or kind not in stored.pieces:
                continue
            lengths = tuple(part.stop - part.start for part in source)
            missing -= math.prod(lengths)
            spans = _runs(stored.shape, source)
            if spans is not None:
                parts.append(Overlap(stored, target, spans, lengths, ()))
            else:  # the runs are short: whole rows of the first dim are read, and cut in memory
                row = math.prod(stored.shape[1:])
                span = source[0].start * row, lengths[0] * row
                parts.append(Overlap(stored, target, [span], (lengths[0], *stored.shape[1:]),
                                     (slice(None), *source[1:])))
        if missing:
            raise Unusable(self._path,
                           f"is incomplete: {missing} elements of {kind} {box.name} are in no file")
        return parts

    def read(self, kind: str, box: Box, into: torch.Tensor) -> None:
        """Fill `into`, which has the box's shape."""
        wide = into if into.dtype == torch.float32 else torch.empty(box.shape)
        with torch.no_grad():
            for part in self.plan(kind, box):
                values = self._read(kind, box.name, part).view(part.shape)[part.cut]
                wide[part.target] = values.to(wide.device)
            if wide is not into:
                into.copy_(wide)
                key, lost = (box.name, kind), checksum(wide.view(-1), box) - checksum(into.view(-1), box)
                self.rounded[key] = (self.rounded.get(key, 0) + lost) & MASK

    def _read(self, kind: str, name: str, part: Overlap) -> torch.Tensor:
        """The elements of all spans. A stored box that is read whole is compared with its checksum here; a
        part of one is checked with the whole tensor, when all ranks have read (load.py)."""
        rank, (at, want) = part.stored.rank, part.stored.pieces[kind]
        values = torch.empty(part.num_bytes // 4, dtype=torch.float32)
        data, done, crc = values.numpy().data.cast("B"), 0, 0
        try:
            descriptor = self._open(rank)
            for start, size in part.spans:
                for piece in read(descriptor, at + 4 * start, 4 * size):
                    if self.stop.is_set():
                        raise Unusable(self._path, "is not read to its end")
                    self.last_s = time.monotonic()
                    data[done:done + len(piece)] = piece
                    done += len(piece)
                    crc = zlib.crc32(piece, crc) if part.is_whole else want
        except OSError as error:
            raise Unusable(self._path,
                           f"cannot be read: {file_name(rank)}: {error.strerror or error}") from None
        if crc != want:
            raise Unusable(self._path, f"is damaged: {kind} {name} in {file_name(rank)} does not have the "
                                       f"checksum of the index")
        return values

    def _open(self, rank: int) -> int:
        if rank not in self._files:
            name = file_name(rank)
            if len(self._files) >= _OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[rank] = patiently(lambda: os.open(self._path / name, os.O_RDONLY))
            whole, size, crc = self._manifest.files[name]
            actual = os.fstat(self._files[rank]).st_size
            if actual != whole:
                raise Unusable(self._path, f"is damaged: {name} has {actual} bytes, not {whole}")
            if zlib.crc32(b"".join(read(self._files[rank], 0, size))) != crc:
                raise Unusable(self._path,
                               f"is damaged: the head of {name} does not have the checksum of its manifest")
        return self._files[rank]


def _runs(shape: tuple[int, ...], source: tuple[slice, ...]) -> list[tuple[int, int]] | None:
    """(first element, number of elements) of each contiguous run of a part of a row-major array; None where
    the runs are short."""
    dim = len(shape) - 1
    while dim > 0 and source[dim].stop - source[dim].start == shape[dim]:
        dim -= 1
    inner = math.prod(shape[dim + 1:])
    size, begin = (source[dim].stop - source[dim].start) * inner, source[dim].start * inner
    outer = [range(part.start, part.stop) for part in source[:dim]]
    if 4 * size < _RUN and math.prod(map(len, outer)) > 1:
        return None
    strides = [math.prod(shape[at:]) for at in range(1, dim + 1)]
    return [(begin + sum(index * stride for index, stride in zip(place, strides, strict=True)), size)
            for place in itertools.product(*outer)]
