"""Paths: what `~` and `$NAME` in a path stand for, and `$$` for a `$`. A key that holds a path names the
function that expands it (`threed.schema`).

A path is relative to the folder in which the command runs. Addresses of a store (s3://BUCKET/RUN) are left as
they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from threed.base.address import is_store
from threed.base.errors import InputError

VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|\$)")


def expanded(text: str) -> str:
    """A path with the values of the environment. ValueError, with the reason, where there is none."""
    if is_store(text):
        return text

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            return "$"
        if name not in os.environ:
            raise ValueError(f"the environment has no variable {name}")
        return os.environ[name]

    text = VARIABLE.sub(value, text)
    if not text.startswith("~"):
        return text
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"there is no user {text[1:].partition('/')[0]}; for a file of this name write "
                         f"./{text}")
    return path


def of_file(text: str) -> str:
    """'file:PATH'; other values are names."""
    return f"file:{expanded(text[5:])}" if text.startswith("file:") else text


def of_family(text: str) -> str:
    """'FILE.py:NAME'; other values are names."""
    file, colon, name = text.rpartition(":")
    return f"{expanded(file)}:{name}" if colon and file.endswith(".py") else text


def of_mix(entries: Any) -> Any:
    """['WEIGHT SOURCE', ...]."""
    if not isinstance(entries, list | tuple):
        return entries
    parts = [entry.strip().partition(" ") if isinstance(entry, str) else entry for entry in entries]
    return [f"{part[0]} {expanded(part[2].strip())}" if isinstance(part, tuple) else part for part in parts]


# options of commands that take a path; a command's first argument is one, too
OPTIONS = ("-o", "--output", "--checkpoint", "--config", "--costs", "--data", "--folder", "--hardware",
           "--like", "--svg", "--tokenizer", "--write")


def argument(text: str) -> str:
    """A path that a command was given. InputError where it cannot be expanded."""
    try:
        return expanded(text)
    except ValueError as error:
        raise InputError(f"{text}: {error}") from None


def arguments(words: Sequence[str]) -> list[str]:
    """The words of a command line, with paths expanded: a shell does not expand `--output=~/x`, nor what is
    in quotes. Overrides are left to the config."""
    found = list(words)
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in OPTIONS and equals:
            found[index] = f"{option}={argument(value)}"
        elif index and (words[index - 1] in OPTIONS or (index == 1 and not (word.startswith("-") or equals))):
            found[index] = argument(word)
    return found
