"""Read: boxes of parameters out of a checkpoint's files, and no more of these than the boxes need."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from threed.checkpoint.boxes import Box, overlap
from threed.checkpoint.format import Stored, Unusable, file_name, read_line
from threed.checkpoint.write import read

_RUN = 16 << 10  # bytes: shorter runs of a file are read together with what lies between them


class Reader:
    """Reads boxes: of the index the lines of this rank's parameters, and of files the bytes that are needed."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self._path, self._manifest = path, manifest
        self._lines: dict[str, list[Stored]] = {}
        self._files: dict[int, int] = {}  # rank -> descriptor
        self.num_bytes = 0  # of files, read so far

    @property
    def num_files(self) -> int:
        return len(self._files)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def read(self, kind: str, box: Box, into: torch.Tensor) -> None:
        """Fill `into`, which has the box's shape. Unusable where the checkpoint does not have all of it."""
        if box.name not in self._lines:
            self._lines[box.name] = read_line(self._path, self._manifest, box.name)
        missing = math.prod(box.shape)
        for stored in self._lines[box.name]:
            target = overlap(box.offset, box.shape, stored.offset, stored.shape)
            if target is None or kind not in stored.pieces:
                continue
            source = overlap(stored.offset, stored.shape, box.offset, box.shape)
            assert source is not None
            part = self._part(kind, box.name, stored, source)
            with torch.no_grad():
                into[target] = part.to(into.device)
            missing -= part.numel()
        if missing:
            raise Unusable(self._path, f"is incomplete: {missing} elements of {kind} {box.name} are in no file")

    def _part(self, kind: str, name: str, stored: Stored, source: tuple[slice, ...]) -> torch.Tensor:
        """A part of a stored box. Where it is all of it, its checksum is compared; a part is proved with the whole tensor."""
        at, crc = stored.pieces[kind]
        lengths = [part.stop - part.start for part in source]
        values = torch.empty(math.prod(lengths), dtype=torch.float32)
        data, done, seen = values.numpy().data.cast("B"), 0, 0
        everything = lengths == list(stored.shape)
        try:
            descriptor = self._open(stored.rank)
            runs = _runs(stored.shape, source)
            if runs is None:  # short ones: all rows are read, and cut in memory
                return self._slab(descriptor, at, stored.shape, source)
            for start, size in runs:
                for piece in read(descriptor, at + 4 * start, 4 * size):
                    data[done:done + len(piece)] = piece
                    done += len(piece)
                    seen = zlib.crc32(piece, seen) if everything else 0
        except OSError as error:
            raise Unusable(self._path, f"cannot be read: {file_name(stored.rank)}: {error.strerror or error}") from None
        self.num_bytes += done
        if everything and seen != crc:
            raise Unusable(self._path, f"is damaged: {kind} {name} in {file_name(stored.rank)} does not have the checksum of the "
                                       "index")
        return values.view(lengths)

    def _slab(self, descriptor: int, at: int, shape: tuple[int, ...], source: tuple[slice, ...]) -> torch.Tensor:
        """Rows of the first dim, whole."""
        row = math.prod(shape[1:])
        first = source[0]
        data = b"".join(read(descriptor, at + 4 * first.start * row, 4 * (first.stop - first.start) * row))
        self.num_bytes += len(data)
        rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, *shape[1:])
        return rows[(slice(None), *source[1:])]

    def _open(self, rank: int) -> int:
        if rank not in self._files:
            name = file_name(rank)
            self._files[rank] = os.open(self._path / name, os.O_RDONLY)
            _, size, crc = self._manifest["files"][name]
            if zlib.crc32(b"".join(read(self._files[rank], 0, size))) != crc:
                raise Unusable(self._path, f"is damaged: the head of {name} does not have the checksum of its manifest")
        return self._files[rank]


def _runs(shape: tuple[int, ...], source: tuple[slice, ...]) -> Iterator[tuple[int, int]] | None:
    """(first element, elements) of each contiguous run of a part of a row-major array; None where they are short."""
    dim = len(shape) - 1
    while dim > 0 and source[dim].stop - source[dim].start == shape[dim]:
        dim -= 1
    inner = math.prod(shape[dim + 1:])
    size, begin = (source[dim].stop - source[dim].start) * inner, source[dim].start * inner
    outer = [range(part.start, part.stop) for part in source[:dim]]
    if 4 * size < _RUN and math.prod(map(len, outer)) > 1:
        return None
    strides = [math.prod(shape[at + 1:]) for at in range(dim)]
    return ((begin + sum(index * stride for index, stride in zip(place, strides, strict=True)), size)
            for place in itertools.product(*outer))
