"""Shard file: one rank's tensors into one safetensors file, with checksums, read back from the disk.

The safetensors library would copy all tensors before it writes the first; this code computes the checksum of
one piece at a time and writes the piece.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from threed.checkpoint.format import Report
from threed.checkpoint.proof import MASK, checksum
from threed.features.zero.boxes import Box

PIECE = 16 << 20  # bytes that are written or read at a time
Parts = list[tuple[int, int]]  # the parts of a file, in order: (bytes, CRC-32)


class Item(NamedTuple):
    """A tensor to be written: one kind of value of a parameter, in one box."""

    kind: str
    box: Box
    values: Callable[[], torch.Tensor]  # flat, fp32, on the host

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.box.name}@{','.join(map(str, self.box.offset))}"


class Extent(NamedTuple):
    """An item's bytes in its file, and their checksums."""

    start: int
    size: int  # bytes
    crc: int  # of these bytes
    checksum: int  # of the item's elements (proof.py)


def write(path: Path, rank: int, items: list[Item]) -> Report:
    """Write a file, sync it to the disk and read it back. OSError where one of these fails."""
    if not items:
        return Report()
    head = header(items)
    at, places = len(head), list[Extent]()
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), head)
        for item in items:
            places.append(_put(file.fileno(), item, at))
            at += places[-1].size
        os.fsync(file.fileno())
    check(path, [(len(head), zlib.crc32(head)), *((place.size, place.crc) for place in places)])
    return report_of(rank, head, items, places)


def _put(descriptor: int, item: Item, at: int) -> Extent:
    """Write an item's bytes, which begin at `at`. (A function of its own, so that no item's values are in
    memory when those of the next are made.)"""
    values = item.values()
    data, crc = values.numpy().data.cast("B"), 0
    for start in range(0, len(data), PIECE):
        piece = data[start:start + PIECE]
        crc = zlib.crc32(piece, crc)
        _write(descriptor, piece)
    return Extent(at, len(data), crc, checksum(values, item.box))


def report_of(rank: int, head: bytes, items: list[Item], places: list[Extent]) -> Report:
    """The report on a rank's file. `places`: one for each item, in the same order."""
    report = Report(places[-1].start + places[-1].size, (len(head), zlib.crc32(head)))
    boxes: dict[Box, dict[str, tuple[int, int]]] = {}
    for item, place in zip(items, places, strict=True):
        boxes.setdefault(item.box, {})[item.kind] = (place.start, place.crc)
        sums = report.sums.setdefault(item.box.name, {})
        sums[item.kind] = (sums.get(item.kind, 0) + place.checksum) & MASK
    for box, pieces in boxes.items():
        report.boxes.setdefault(box.name, []).append(json.dumps([rank, box.offset, box.shape, pieces]))
        report.shapes[box.name] = box.whole
    return report


def header(items: list[Item]) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON that names each tensor and its range of bytes
    after the header."""
    entries, at = {}, 0
    for item in items:
        size = 4 * (item.box.stop - item.box.start)
        entries[item.key] = {"dtype": "F32", "shape": item.box.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`: a disk that fills up takes a part before it refuses."""
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])


def check(path: Path, parts: Parts) -> None:
    """OSError where a file does not have the sizes and checksums of `parts`. The system is asked to drop its
    cached pages of the file first, so that the bytes come from the disk."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        actual, wanted, at = os.fstat(file.fileno()).st_size, sum(size for size, _ in parts), 0
        if actual != wanted:
            raise OSError(f"{path.name} has {actual} bytes, not {wanted}")
        for size, want in parts:
            crc = 0
            for piece in read(file.fileno(), at, size):
                crc = zlib.crc32(piece, crc)
            if crc != want:
                raise OSError(f"{path.name} reads back otherwise than it was written")
            at += size


def read(descriptor: int, start: int, size: int) -> Iterator[bytes]:
    """`size` bytes of a file from `start` on, a piece at a time. OSError where the file ends before."""
    at, stop = start, start + size
    while at < stop:
        piece = os.pread(descriptor, min(PIECE, stop - at), at)
        if not piece:
            raise OSError(f"the file ends at byte {at}, before {stop}")
        yield piece
        at += len(piece)
