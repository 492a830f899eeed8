"""Tensors: safetensors files that are read and written a piece at a time.

The safetensors library maps whole files into memory and writes whole tensors; here a piece of a tensor is in
memory, whatever its size. Headers are kept as text, so that a file can be written again to the bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from threed.base.errors import InputError
from threed.interop.hf.places import SINGLE, weight_files
from threed.interop.hf.slices import TensorPart, blocks

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # ours -> theirs
WORDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # in config.json
_TYPES = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 4 << 20  # bytes that are read or written at a time
_LOST = 0.01  # share of a tensor's numbers that may become 0 without a word
_MOST = 100 << 20  # bytes of a header: what the safetensors library allows


class TensorEntry(NamedTuple):
    """A tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    size: int  # bytes


def entries_of(file: str, header: str) -> dict[str, TensorEntry]:
    """The tensors that a header names. ValueError, KeyError, TypeError or AttributeError where it is none."""
    base, entries = 8 + len(header.encode()), {}
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
            entries[name] = TensorEntry(file, entry["dtype"], shape, base + first, last - first)
            wide = DTYPES[entry["dtype"]].itemsize if entry["dtype"] in DTYPES else None
            if first < 0 or (wide is not None and math.prod(shape) * wide != last - first):
                raise ValueError(f"{name} has {last - first} bytes, not those of its shape")
    return entries


class Fit:
    """Whether values fit the dtype to which they are cast: no number becomes infinite without a word.
    `asked`: the option or key that asks for the dtype."""

    def __init__(self, asked: str):
        self._asked = asked
        self._largest: dict[str, tuple[float, torch.dtype]] = {}  # what does not fit -> its largest value
        self._strange: dict[str, int] = {}  # tensor -> its numbers that are not finite
        self._lost: dict[str, list[int]] = {}  # tensor -> its numbers that become 0, and all that were not 0

    def cast(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values of a tensor, in another dtype."""
        low, high = values.aminmax() if values.numel() else (values.new_zeros(()),) * 2
        if not (low.isfinite() and high.isfinite()):
            finite = values.isfinite()
            self._strange[name] = self._strange.get(name, 0) + int((~finite).sum())
            low, high = torch.where(finite, values, 0.0).aminmax()
        largest = max(-low, high)
        if not largest.to(dtype).isfinite():
            before, _ = self._largest.get(name, (0.0, dtype))
            self._largest[name] = max(before, float(largest)), dtype
        cast = values.to(dtype)
        if dtype == torch.float16 and values.dtype != dtype:
            before, after = int(values.count_nonzero()), int(cast.count_nonzero())
            lost = self._lost.setdefault(name, [0, 0])
            lost[0] += before - after
            lost[1] += before
        return cast

    def check(self) -> None:
        """InputError where values did not fit."""
        if not self._largest:
            return
        shown = list(self._largest.items())[:5]
        lines = "".join(f"\n  - {name}: up to {value:.4g}, and {WORDS[_TYPES[dtype]]} ends at "
                        f"{torch.finfo(dtype).max:.4g}" for name, (value, dtype) in shown)
        more = f"\n  and {len(self._largest) - 5} more" if len(self._largest) > 5 else ""
        dtypes = {dtype for _, dtype in self._largest.values()}
        wider = "bf16 or fp32" if dtypes == {torch.float16} else "fp32"
        raise InputError(f"{self._asked}: values would become infinite; take {wider}:{lines}{more}")

    def notes(self) -> list[str]:
        """Lines to say: what is not finite already, and what is lost below the least number of fp16."""
        found = []
        for name, count in list(self._strange.items())[:1]:
            more = f", and of {len(self._strange) - 1} more" if len(self._strange) > 1 else ""
            found.append(f"{count} {'number' if count == 1 else 'numbers'} of {name}{more} are not finite "
                         "(NaN or infinite): they are written as they are")
        lost = {name: share for name, (count, whole) in self._lost.items()
                if whole and (share := count / whole) > _LOST}
        for name in [max(lost, key=lost.__getitem__)] if lost else []:
            more = f", and some of {len(lost) - 1} more" if len(lost) > 1 else ""
            found.append(f"{lost[name]:.0%} of the numbers of {name}{more} become 0 in float16, which has "
                         "nothing below 6e-8: bf16 and fp32 keep them")
        return found


class Files:
    """The safetensors files of a model's folder, to read. `headers`: file -> the text of its header."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.headers: dict[str, str] = {}
        self.entries: dict[str, TensorEntry] = {}
        for name in weight_files(folder):
            self.headers[name] = header = _header(folder / name)
            try:
                found = entries_of(name, header)
                end = max((entry.start + entry.size for entry in found.values()), default=0)
                if end > (folder / name).stat().st_size:
                    raise ValueError("it ends before its last tensor")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{folder / name} is not a whole safetensors file: {error}; fetch it "
                                 "again") from None
            if twice := found.keys() & self.entries.keys():
                raise InputError(f"{folder}: two files have a tensor {min(twice)}")
            self.entries.update(found)
        if strange := [name for name, entry in self.entries.items() if entry.dtype not in DTYPES]:
            raise InputError(f"{folder}: {strange[0]} is of type {self.entries[strange[0]].dtype}; threed "
                             f"reads {', '.join(DTYPES)}")

    def read(self, name: str, part: TensorPart, fit: Fit, dtype: torch.dtype) -> None:
        """Fill a part of our parameter with a tensor, which is to fit `dtype`."""
        for piece, values in self.pieces(name, tuple(part.values.shape)):
            part.values[piece].copy_(values)
            fit.cast(name, values, dtype)

    def differs(self, name: str, part: TensorPart) -> bool:
        """Whether a tensor has other values than a part of our parameter."""
        return any(not torch.equal(part.values[piece], values.to(part.values.dtype))
                   for piece, values in self.pieces(name, tuple(part.values.shape)))

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """(where, values) of the pieces of a tensor, seen in a shape with as many elements."""
        entry = self.entries[name]
        dtype, at = DTYPES[entry.dtype], entry.start
        with (self.folder / entry.file).open("rb", buffering=0) as file:
            for offset, size in blocks(shape, PIECE // dtype.itemsize):
                data = bytearray(math.prod(size) * dtype.itemsize)
                done = 0
                while done < len(data):
                    count = os.preadv(file.fileno(), [memoryview(data)[done:]], at + done)
                    if not count:
                        raise InputError(f"{self.folder / entry.file} has become shorter")
                    done += count
                at += len(data)
                if data:
                    yield _where(offset, size), torch.frombuffer(data, dtype=dtype).view(size)


def _header(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= _MOST:
                raise InputError(f"{path} is not a safetensors file: its header has {size} bytes")
            return file.read(size).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _where(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))


# ---------------------------------------------------------------- out


class FileWriter:
    """Safetensors files with given headers, whose tensors are written in any order. `asked`: the option or
    key that asks for their dtype."""

    def __init__(self, folder: Path, headers: dict[str, str], asked: str):
        self._folder = folder
        self._fit = Fit(asked)
        self.entries: dict[str, TensorEntry] = {}
        self._missing: set[str] = set()
        for name, header in headers.items():
            data = header.encode()
            found = entries_of(name, header)
            end = max((entry.start + entry.size for entry in found.values()), default=8 + len(data))
            with (folder / name).open("wb") as file:
                file.write(len(data).to_bytes(8, "little") + data)
                file.truncate(end)
            self.entries.update(found)
        self._missing = set(self.entries)

    def write(self, name: str, part: TensorPart) -> None:
        entry = self.entries[name]
        assert entry.shape == part.shape, f"{name} has {entry.shape}, and is given {part.shape}"
        dtype, at = DTYPES[entry.dtype], entry.start
        with (self._folder / entry.file).open("r+b", buffering=0) as file:
            for offset, size in blocks(tuple(part.values.shape), PIECE // dtype.itemsize):
                values = self._fit.cast(name, part.values[_where(offset, size)], dtype).contiguous()
                data = values.view(-1).view(torch.uint8).numpy().data
                done = 0
                while done < len(data):
                    done += os.pwrite(file.fileno(), data[done:], at + done)
                at += len(data)
        self._missing.discard(name)

    def close(self) -> list[str]:
        """Sync the files to the disk. Lines to say; InputError where values did not fit."""
        assert not self._missing, f"never written: {sorted(self._missing)[:3]}"
        self._fit.check()
        for name in {entry.file for entry in self.entries.values()}:
            with (self._folder / name).open("rb") as file:
                os.fsync(file.fileno())
        return self._fit.notes()


def headers_of(shapes: dict[str, tuple[int, ...]], dtypes: Mapping[str, str], most: int) -> dict[str, str]:
    """Headers of files of at most `most` bytes (or of one tensor), in the order of `shapes`: file ->
    header."""
    shards, sizes = [[]], [0]
    for name, shape in shapes.items():
        size = math.prod(shape) * DTYPES[dtypes[name]].itemsize
        if sizes[-1] and sizes[-1] + size > most:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    headers = {}
    for index, names in enumerate(shards):
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in sorted(names):
            size = math.prod(shapes[name]) * DTYPES[dtypes[name]].itemsize
            entries[name] = {"dtype": dtypes[name], "shape": shapes[name], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(entries, separators=(",", ":"))
        file = SINGLE if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        headers[file] = text + " " * (-len(text.encode()) % 8)
    return headers


def index_text(headers: dict[str, str]) -> str:
    """model.safetensors.index.json."""
    entries = {name: entry for file, header in headers.items()
               for name, entry in entries_of(file, header).items()}
    sizes = {"total_parameters": sum(math.prod(entry.shape) for entry in entries.values()),
             "total_size": sum(entry.size for entry in entries.values())}
    weight_map = {name: entries[name].file for name in sorted(entries)}
    return json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2) + "\n"
