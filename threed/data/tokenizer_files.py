"""Tokenizer files: where a tokenizer lies, and what is written beside it.

`data.tokenizer` names a tokenizer.json, the folder of a model that has one, or the folder of a model in the
cache of Hugging Face's hub:

    models--org--name/refs/main                   -> a commit
    models--org--name/snapshots/<commit>/         the files of the model
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.data.sampling import TOKENIZER

CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
# File beside a tokenizer.json, and its field that names the end-of-text token, by its text or its id.
_ENDS = ((CONFIG, "eos_token"), (SPECIAL, "eos_token"),
         ("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id"))



def snapshot(folder: Path) -> Path:
    """The folder that holds the files of a model in the hub's cache; any other folder is itself. InputError
    where there are several snapshots and none is `main`, or there is none."""
    if folder.name == "snapshots":
        folder = folder.parent
    if not (folder / "snapshots").is_dir():
        return folder
    there = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    main = folder / "refs" / "main"
    if main.is_file() and (named := folder / "snapshots" / main.read_text().strip()) in there:
        return named
    if len(there) == 1:
        return there[0]
    what = f"its snapshots are {', '.join(map(str, there))}" if there else \
        "it has no snapshot: the download did not end"
    raise InputError(f"{folder} is a model in the cache of Hugging Face's hub, and {what}; give the folder "
                     "of one snapshot")


def tokenizer_file(given: str | Path) -> Path:
    """The file that `data.tokenizer` names, which need not exist: of a folder, its tokenizer.json. InputError
    as of `snapshot`."""
    path = Path(given).expanduser()
    return snapshot(path) / TOKENIZER if path.is_dir() else path


def named_ends(folder: Path) -> Iterator[str | int]:
    """The end-of-text tokens that the files in a tokenizer's folder name, by text or id, the first file
    first. InputError for a file that is not JSON."""
    for name, key in _ENDS:
        value = read_object(folder / name).get(key)
        for each in value if isinstance(value, list) else [value]:
            each = each.get("content") if isinstance(each, dict) else each
            if isinstance(each, str | int) and not isinstance(each, bool):
                yield each


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that chat templates name, such as bos_token: those that the files in a tokenizer's
    folder have, by their text."""
    found = {}
    for file in (CONFIG, SPECIAL):
        for name, value in read_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found.setdefault(name, text)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file, or no object. InputError if it is no JSON."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}
