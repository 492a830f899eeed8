"""Files: those of `data.source` that are read, and those that are not, with the reason."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from threed.base.errors import InputError
from threed.data.file_types import PACKED
from threed.data.rows import SUFFIXES, holds_rows, plain_suffix
from threed.data.tokenizer_files import snapshot

STDLIB = "python-stdlib"
EMPTY = "empty"
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".yaml", ".yml",
                 ".toml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java",
                 ".js", ".ts", ".sh")
_DATA_SUFFIXES = (*SUFFIXES, ".txt", ".text", ".csv", ".tsv")  # of files of which each may be a split
# The word in a name that says of which split a file is; the first is to train on.
_SPLIT = re.compile(r"(?<![a-z])(?:train(?:ing)?|(validation|valid|val|dev|devel|test|testing|eval|"
                    r"evaluation|(?:hold|held)[-_ ]?out))(?:[-_ ]?set)?(?![a-z])", re.IGNORECASE)
_NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


@dataclass
class LeftOut:
    """What is not used: why -> how many, and the first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, why: str, where: object) -> None:
        self.counts[why] = self.counts.get(why, 0) + 1
        self.first.setdefault(why, str(where))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """'3 .png (a.png), 1 dead link (b.txt)', the largest first."""
        order = sorted(self.counts, key=lambda why: -self.counts[why])
        return ", ".join(f"{self.counts[why]:,} {why} ({self.first[why]})" for why in order)


@dataclass
class Listing:
    files: list[Path]
    left_out: LeftOut
    named: bool  # the source is this one file


def list_files(source: str) -> Listing:
    """The files of a source, sorted; at least one. InputError where there is none, or a folder cannot be
    read."""
    path = os.path.expanduser(source)
    if os.path.isdir(os.path.join(path, "refs")):  # of a data set in the hub's cache; others may be older
        path = str(snapshot(Path(path)))
    if source == STDLIB:
        listing = _stdlib(Path(sysconfig.get_path("stdlib")))
        advice = f"this Python has no standard library in {sysconfig.get_path('stdlib')}; give a folder of " \
            "text instead"
    elif os.path.isdir(path):
        listing = _folder(Path(path))
        advice = ("the folder has no file with one of the suffixes "
                  f"{' '.join(TEXT_SUFFIXES + SUFFIXES)}; for other names give a glob, as in "
                  f"'{source}/*', and for Megatron's .bin/.idx their prefix")
    elif os.path.exists(path):
        if (why := _unusable(Path(path))) is not None:
            raise InputError(f"data.source={source} holds no text: it is {why}; copy or download it again, "
                             "or give another")
        return Listing([Path(path)], LeftOut(), True)
    elif os.path.islink(path):
        raise InputError(f"data.source={source} is a link to {os.readlink(path)}, which does not exist")
    elif glob.has_magic(path):
        listing = _glob(path)
        advice = "the glob matches no file; ** goes through folders"
    else:
        fetch = "; threed downloads nothing: fetch the data first" if "://" in source else ""
        raise InputError(f"data.source={source} does not exist; give {STDLIB}, or a folder, a glob, a text "
                         f"file, a .jsonl file or the prefix of a Megatron .bin/.idx pair{fetch}")
    if not listing.files:
        there = f"; there are: {listing.left_out}" if listing.left_out.total else ""
        raise InputError(f"data.source={source} holds no text: {advice}{there}")
    return listing


def _stdlib(root: Path) -> Listing:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = (name for name in folders if name not in _NOT_STDLIB)
        found += [Path(folder, name) for name in names if name.endswith(".py") and name not in _NOT_STDLIB]
    return Listing(_sorted((path for path in found if path.is_file()), root), LeftOut(), False)


def _folder(root: Path) -> Listing:
    """All files below a folder, through links, each folder once. Empty ones are listed, too: they have a part
    in the fingerprint."""
    found, left_out, seen = [], LeftOut(), {os.path.realpath(root)}

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror or error}; check its permissions")

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        folders.sort()
        for name in list(folders):
            path = Path(folder, name)
            if name.startswith("."):
                left_out.add("hidden", path)
            elif (real := os.path.realpath(path)) in seen:
                left_out.add("link to a folder that is read already", path)
            else:
                seen.add(real)
                continue
            folders.remove(name)
        for path in (Path(folder, name) for name in sorted(names)):
            if (why := _why_not(path)) is not None:
                left_out.add(why, path)
            if why is None or (why == EMPTY and _is_read(path)):
                found.append(path)
    for path in (held := dict.fromkeys(of_held_out(sorted(found)))):
        left_out.add("named as a validation or test split, which a glob reads", path)
    return Listing(_sorted((path for path in found if path not in held), root), left_out, False)


def held_out(names: Sequence[str]) -> bool:
    """Whether the last of some names that names a split is of one to validate or test with."""
    return bool(next((found[1] for name in reversed(names) if (found := _SPLIT.search(name))), None))


def of_held_out(paths: Sequence[Path]) -> list[Path]:
    """Files whose names, or folders below the one that all are in, say that they are to validate or test
    with; none where there are no others to train on."""
    root = os.path.commonpath(paths) if paths else ""
    data = [path for path in paths if plain_suffix(path) in _DATA_SUFFIXES]
    held = [path for path in data if held_out(path.relative_to(root).parts)]
    return held if len(held) < len(data) else []


def _why_not(path: Path) -> str | None:
    """Why a file of a folder is not read; None: it is."""
    if path.name.startswith("."):
        return "hidden"
    if (why := _unusable(path)) is not None:
        return why
    if _is_read(path):
        return None
    if path.suffix in (".bin", ".idx") and path.with_suffix(".bin").exists() and path.with_suffix(
            ".idx").exists():
        return "of Megatron's .bin/.idx pairs, which are given by their prefix"
    suffix = path.suffix.lower()
    return (plain_suffix(path) + suffix if suffix in PACKED else suffix) or "without a suffix"


def _is_read(path: Path) -> bool:
    return plain_suffix(path) in TEXT_SUFFIXES or holds_rows(path)


def _unusable(path: Path) -> str | None:
    if not path.exists():
        return "dead link"
    if not path.is_file():
        return "neither file nor folder"
    return None if path.stat().st_size else EMPTY


def _glob(pattern: str) -> Listing:
    files, left_out = [], LeftOut()
    named = glob.glob(pattern, recursive=True)
    for path in sorted(map(Path, named), key=lambda path: path.parts):  # as the files of a folder
        if path.is_dir():
            if "**" not in pattern:  # which goes through it
                left_out.add("folder", path)
            continue
        if (why := _unusable(path)) is not None:
            left_out.add(why, path)
        if why in (None, EMPTY):
            files.append(path)
    for name in sorted(set(glob.glob(pattern, recursive=True, include_hidden=True)) - set(named)):
        if os.path.isfile(name):
            left_out.add("hidden", name)
    return Listing(files, left_out, False)


def _sorted(paths, root: Path) -> list[Path]:
    # By the path's parts below the root: the order depends neither on the system nor on the root.
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def shown(paths: Sequence[object], most: int = 3) -> str:
    """'a, b, c and 4 more'."""
    rest = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(map(str, paths[:most])) + rest
