"""What an import keeps of a model's folder, and an export gives back: RUN/huggingface.

    config.json, generation_config.json, model.safetensors.index.json     as they were
    tokenizer.json and the other files of the tokenizer                   as they were
    layout.json                                                           file -> header of the safetensors
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.data.sampling import IMPORTED, TOKENIZER
from threed.interop.hf.places import CONFIG, INDEX, indexed
from threed.interop.hf.tensors import entries_of

FOLDER, LAYOUT = IMPORTED, "layout.json"
GENERATION = "generation_config.json"
_TOKENIZERS = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
               "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
               "chat_template.json")
_OTHERS = (GENERATION, "LICENSE", "LICENSE.txt", "NOTICE")


def keep(source: Path, into: Path, headers: dict[str, str] | None) -> None:
    """Copy what is kept. `headers`: of the safetensors files, where all their tensors are kept."""
    into.mkdir(parents=True)
    has_index = headers is not None and indexed(source) == sorted(headers)  # not one of other files
    for name in (CONFIG, *_TOKENIZERS, *_OTHERS, *([INDEX] if has_index else [])):
        if (source / name).is_file():
            shutil.copyfile(source / name, into / name)
    if headers is not None:
        (into / LAYOUT).write_text(json.dumps(headers, indent=1))


def give_back(kept: Path, into: Path) -> None:
    """Copy the files of the tokenizer and others that do not depend on the weights."""
    for name in (*_TOKENIZERS, *_OTHERS):
        if (kept / name).is_file():
            shutil.copyfile(kept / name, into / name)


def headers(kept: Path | None) -> dict[str, str] | None:
    """The headers of the safetensors files as they were; None where they are not kept."""
    if kept is None or not (kept / LAYOUT).is_file():
        return None
    try:
        found = json.loads((kept / LAYOUT).read_text())
        if not all(Path(name).name == name for name in found):
            raise ValueError("a name of a file has a folder")
        for name, header in found.items():
            entries_of(name, header)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{kept / LAYOUT} is not as an import writes it ({error}); remove it, and files are "
                         "laid out anew") from None
    return found


def text_of(values: dict[str, Any]) -> str:
    """JSON as transformers writes it."""
    return json.dumps(values, indent=2, sort_keys=True) + "\n"
