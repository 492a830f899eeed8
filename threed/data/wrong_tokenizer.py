"""Wrong tokenizer: what was given in place of a tokenizer.json, and how to get one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from threed.data.file_types import HEAD_BYTES, kind_of
from threed.data.sampling import TOKENIZER
from threed.data.tokenizer_files import CONFIG

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # of a model on the hub
_FILES = {".json", ".model", ".tiktoken", ".txt", ".vocab"}  # ends of a file's name, and of no model's
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n[A-Za-z0-9+/]+=* \d+\r?\n")
_TIKTOKEN_NAMES = ("r50k_base", "p50k_base", "cl100k_base", "o200k_base", "o200k_harmony")
PAGE = "docs/tokenizers.md"
GUIDE = f"{PAGE} says how to get a tokenizer.json"


def missing(path: Path) -> str:
    """Why there is no tokenizer.json at a path, and how to get one."""
    folder = path.parent
    if os.path.islink(path):
        return f"{path} is a link to {os.readlink(path)}, which does not exist; copy or download it again"
    if path.name == TOKENIZER and folder.is_dir():
        for names, what in _OTHERS:
            there = [file.name for name in names if (file := next(iter(folder.glob(name)), None)) is not None]
            if len(there) == len(names):
                return f"{folder} has no {TOKENIZER}, but {' and '.join(there)}, {what}; {_convert(folder)}"
        return f"{folder} has no {TOKENIZER}; {GUIDE}"
    name = str(path)
    if not _NAME.fullmatch(name) or path.suffix in _FILES:
        return (f"{path} cannot be read as a tokenizer: No such file or directory; give a {TOKENIZER} on "
                "this machine, the folder of a model that has one, or data.tokenizer=bpe")
    if name in _TIKTOKEN_NAMES:
        return f"there is no such file, and {name} is a vocabulary of tiktoken; {GUIDE}"
    cached = _cache_of_the_hub() / f"models--{name.replace('/', '--')}"
    if cached.is_dir():
        return ("there is no such file, but a model of that name in the hub's cache: set "
                f"data.tokenizer={cached}")
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
        do = "unpack it" if kind.what.startswith("packed") else kind.advice  # no name helps
        return f"{path} is {kind.what}, not a tokenizer.json; {do}"
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
    if not isinstance(value, dict):
        return f"{path} is JSON, but {json.dumps(value)[:40]} is no object, so no tokenizer.json; " \
            f"{beside or GUIDE}"
    if "model" in value:
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
        fields = ", ".join(value) or "none"
        return f"{path} is JSON, but no tokenizer.json: it has no model (the fields are: {fields[:200]}); " \
            f"{beside or GUIDE}"
    return f"{path} is {what}, not a tokenizer.json; {beside or _convert(path.parent)}"


def _is_sentencepiece(content: bytes) -> bool:
    """Whether a content begins as a model of SentencePiece: message 1, a piece: its text, then its score or
    type."""
    if len(content) < 6 or content[0] != 10 or content[2] != 10:
        return False
    end = 4 + content[3]
    return end <= 2 + content[1] and content[end:end + 1] in (b"\x15", b"\x18", b"\x0a", b"")


def _convert(folder: Path) -> str:
    return ("transformers, with sentencepiece, protobuf and tiktoken installed, writes one: python -c \"from "
            "transformers import AutoTokenizer as T; "
            f"T.from_pretrained('{folder}').save_pretrained('OUT')\", then data.tokenizer=OUT ({PAGE})")


# Files by which a tokenizer is known that has no tokenizer.json -> what they are, and how to get one.
_OTHERS = (
    (("tokenizer.model*",), "of SentencePiece or tiktoken"),
    (("*.tiktoken",), "a tiktoken vocabulary"),
    (("tekken.json",), "a tokenizer of Mistral's"),
    (("vocab.json", "merges.txt"), "the two parts of a BPE"),
    (("vocab.txt",), "a word list of BERT"),
    (("*.model",), "most likely of SentencePiece"))
