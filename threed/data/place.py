"""Places: where a tokenizer lies, and what is written beside it.

`data.tokenizer` names a tokenizer.json, the folder of a model that has one, or the folder of a model in the
cache of Hugging Face's hub:

    models--org--name/refs/main                   -> a commit
    models--org--name/snapshots/<commit>/         the files of the model
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threed.data.kinds import HEAD_BYTES, kind_of
from threed.errors import InputError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
# File beside a tokenizer.json, and its field that names the end-of-text token, by its text or its id.
_ENDS = ((CONFIG, "eos_token"), ("special_tokens_map.json", "eos_token"),
         ("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id"))
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # of a model on the hub
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n[A-Za-z0-9+/]+=* \d+\r?\n")
PAGE = "docs/tokenizers.md"
GUIDE = f"{PAGE} says how to get a tokenizer.json"


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
    what = "its snapshots are " + ", ".join(map(str, there)) if there else "it has no snapshot: the download " \
        "did not end"
    raise InputError(f"{folder} is a model in the cache of Hugging Face's hub, and {what}; give the folder of "
                     "one snapshot")


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


def missing(path: Path) -> str:
    """Why there is no tokenizer.json at a path, and how to get one."""
    folder = path.parent
    if path.name == TOKENIZER and folder.is_dir():
        for names, what, how in _OTHERS:
            there = [file.name for name in names if (file := next(iter(folder.glob(name)), None)) is not None]
            if len(there) == len(names):
                return f"{folder} has no {TOKENIZER}, but {' and '.join(there)}, {what}; {how(folder)}"
        return f"{folder} has no {TOKENIZER}; {GUIDE}"
    if os.path.islink(path):
        return f"it is a link to {os.readlink(path)}, which does not exist"
    name = str(path)
    if not _NAME.fullmatch(name):
        return f"{path} cannot be read as a tokenizer: No such file or directory; give a {TOKENIZER} on this " \
            "machine, the folder of a model that has one, or data.tokenizer=bpe"
    cached = _cache_of_the_hub() / f"models--{name.replace('/', '--')}"
    if cached.is_dir():
        return f"there is no such file, but a model of that name in the hub's cache: set data.tokenizer={cached}"
    return (f"there is no such file. If it is the name of a model on Hugging Face, fetch its tokenizer first "
            f"(threed downloads nothing): hf download {name} {TOKENIZER} {CONFIG} --local-dir {name}; then "
            f"data.tokenizer={name} is that folder ({PAGE})")


def _cache_of_the_hub() -> Path:
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def other_kind(path: Path, content: bytes) -> str | None:
    """What a file is that is no tokenizer.json, and how to get one; None where that is not known."""
    if not content.strip():
        return f"{path} is empty, no tokenizer.json: the download or copy did not end; fetch it again"
    if _is_sentencepiece(content):
        return f"{path} is a SentencePiece model, not a tokenizer.json; {_convert(path.parent)}"
    if _TIKTOKEN.match(content):
        return f"{path} is a tiktoken vocabulary, not a tokenizer.json; {_convert(path.parent)}"
    if (kind := kind_of(content[:HEAD_BYTES])) is not None:
        return f"{path} is {kind.what}, not a tokenizer.json; {kind.advice}"
    beside = f"give {path.with_name(TOKENIZER)}, which lies beside it" \
        if path.name != TOKENIZER and path.with_name(TOKENIZER).is_file() else None
    try:
        value = json.loads(content)
    except ValueError as error:
        if path.suffix != ".json" and beside:
            return f"{path} is not a tokenizer.json; {beside}"
        if path.name == "merges.txt" or content.startswith(b"#version"):
            return f"{path} holds the merges of a BPE, not a tokenizer.json; {_convert(path.parent)}"
        if path.name == "vocab.txt":
            return f"{path} is a word list of BERT, not a tokenizer.json; {_convert(path.parent)}"
        return f"{path} is not JSON ({error}), so no tokenizer.json: it is damaged or cut short; {GUIDE}"
    if not isinstance(value, dict) or "model" in value and "added_tokens" in value:
        return None
    if value and all(isinstance(number, int) for number in value.values()):
        what = "a vocabulary alone, whose merges are in another file"
    elif {"tokenizer_class", "eos_token", "added_tokens_decoder", "model_max_length"} & value.keys():
        what = "the settings of a tokenizer, not the tokenizer"
    elif {"architectures", "hidden_size", "model_type"} & value.keys():
        what = "the config of a model"
    elif {"config", "vocab", "special_tokens"} <= value.keys():
        what = "a tokenizer of Mistral's (tekken)"
    else:
        return None
    return f"{path} is {what}, not a tokenizer.json; {beside or _convert(path.parent)}"


def _is_sentencepiece(content: bytes) -> bool:
    """Whether a content begins as a model of SentencePiece: message 1, a piece: its text, then its score or
    type."""
    if len(content) < 6 or content[0] != 10 or content[2] != 10:
        return False
    end = 4 + content[3]
    return end <= 2 + content[1] and content[end:end + 1] in (b"\x15", b"\x18", b"\x0a", b"")


def _convert(folder: Path) -> str:
    return (f"transformers writes one: python -c \"from transformers import AutoTokenizer as T; "
            f"T.from_pretrained('{folder}').save_pretrained('OUT')\", then data.tokenizer=OUT ({PAGE})")


# Files by which a tokenizer is known that has no tokenizer.json -> what they are, and how to get one.
_OTHERS: tuple[tuple[tuple[str, ...], str, Callable[[Path], str]], ...] = (
    (("tokenizer.model*",), "of SentencePiece or tiktoken", _convert),
    (("*.tiktoken",), "a tiktoken vocabulary", _convert),
    (("tekken.json",), "a tokenizer of Mistral's", _convert),
    (("vocab.json", "merges.txt"), "the two parts of a BPE", _convert),
    (("vocab.txt",), "a word list of BERT", _convert),
    (("*.model",), "most likely of SentencePiece", _convert))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}
