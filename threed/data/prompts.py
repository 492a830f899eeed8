"""Prompts: the beginnings of texts that a model continues, as it has seen texts begin.

    data.loss_mask=chat      a prompt is what a user says: the chat template writes it, and the answer's head
    data.prepend_bos         the tokens with which the tokenizer begins a text stand before it

A text ends at the end-of-text token and, of a chat, at the token with which the template ends a turn.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from threed.base.errors import InputError
from threed.data.chat import BESIDE, CONFIG, ChatTemplate, templates
from threed.data.run_tokenizer import home_of
from threed.data.sampling import TOKENIZER
from threed.data.tokenizer import Tokenizer, keep_end
from threed.data.tokenizer_files import SPECIAL, tokenizer_file
from threed.schema import DataConfig, ModelConfig


class Prompts(NamedTuple):
    """Prompts as tokens, and what may follow them."""

    ids: list[list[int]]
    vocab: int  # ids below it may be chosen
    ends: tuple[int, ...]  # a text ends at one of these


def encode(tokenizer: Tokenizer, prompts: Sequence[str], data: DataConfig, model: ModelConfig) -> Prompts:
    """Tokens of prompts. An empty one is what begins a document. InputError where a prompt is too long, or is
    not of the model's vocabulary."""
    tokenizer.read_special_tokens()  # as a person who types one means it
    texts, ends = list(prompts), [] if tokenizer.eod is None else [tokenizer.eod]
    is_chat = data.loss_mask == "chat"
    if (template := _template(data, is_chat)) is not None:
        texts = [template.asked(text) for text in texts] if is_chat else texts
        end = tokenizer.special(template.end_of_turn())
        ends += [end] if end is not None and end not in ends else []
    encoded = [tokenizer.begun(ids) if data.prepend_bos else ids for ids in tokenizer.encode_batch(texts)]
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        shown = f"prompt {number} ({prompt[:20]!r}{' ...' if len(prompt) > 20 else ''})"
        if not ids:
            if tokenizer.eod is None:
                raise InputError(f"{shown} has no tokens, and the tokenizer has no end-of-text token with "
                                 "which a text could begin: give a prompt")
            ids.append(tokenizer.eod)
        if len(ids) > model.seq_len:
            raise InputError(f"{shown} has {len(ids)} tokens, and the model sees model.seq_len="
                             f"{model.seq_len}: shorten it")
        if max(ids) >= model.vocab:
            raise InputError(f"{shown} has token {max(ids)}, but model.vocab={model.vocab} allows 0 to "
                             f"{model.vocab - 1}: the tokenizer is not the one of the run's data")
    return Prompts(encoded, min(model.vocab, tokenizer.vocab_size), tuple(ends))


def _template(data: DataConfig, needed: bool) -> ChatTemplate | None:
    """The chat template of a run's data. InputError where it is needed and there is none."""
    if not needed and not templates(data):
        return None
    try:
        return ChatTemplate(data)
    except InputError:
        if needed:
            raise
        return None


def added(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens that were added to a prompt. (Decoded together: a character may have tokens on both
    sides.)"""
    before, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *ids])
    return whole[len(before):] if whole.startswith(before) else tokenizer.decode(list(ids))


def keep_tokenizer(file: Path | None, data: DataConfig, folder: Path) -> list[str]:
    """Copy the tokenizer of a run's data, and its chat template, to the folder of the run, which then can
    write text wherever it is moved. Another tokenizer that is there stays. Returns warnings."""
    if file is None:
        return []
    special = tokenizer_file(data.tokenizer).with_name(SPECIAL) if data.tokenizer != "bpe" else None
    known = {SPECIAL: special} if special is not None and special.is_file() else {}  # which a template names
    files, said = {TOKENIZER: file, **known, **templates(data)}, []
    try:
        if (home := home_of(file, folder)) != folder:
            said = [] if home.is_dir() else [f"{folder / TOKENIZER} is of the run's older checkpoints, and "
                                             f"stays; that of those from here on is kept in {home}"]
            folder = home
        for name in (TOKENIZER, BESIDE, CONFIG, SPECIAL):
            kept, source = folder / name, files.get(name)
            if source is None:
                kept.unlink(missing_ok=True)
            elif name != TOKENIZER or not kept.exists():  # what is there is the same tokenizer
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, kept.with_name(f"{name}.tmp"))
                kept.with_name(f"{name}.tmp").replace(kept)  # no reader sees half of it
        if file is not None and data.tokenizer != "bpe":
            with contextlib.suppress(InputError):  # it is another one since the data were prepared by it
                keep_end(Path(data.tokenizer).expanduser(), folder / TOKENIZER)
    except OSError as error:
        return [f"{folder / TOKENIZER} was not written: {error}; threed generate will need --tokenizer"]
    return said
