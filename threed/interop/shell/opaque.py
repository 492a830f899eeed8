"""Opaque texts: what stands in a word for a value that cannot be known."""

from __future__ import annotations

_FIRST, _MANY = 0xF000, 128


def hide(text: str) -> str:
    """The opaque text that stands for `text`, such as $HOME."""
    return "".join(chr(_FIRST + ord(each)) if ord(each) < _MANY else each for each in text)


def show(text: str) -> str:
    """A text for people: what was hidden is readable again."""
    return "".join(chr(ord(each) - _FIRST) if _is_hidden(each) else each for each in text)


def is_open(text: str) -> bool:
    """Whether any part of a text cannot be known."""
    return any(map(_is_hidden, text))


def is_opaque(text: str) -> bool:
    """Whether nothing of a text is known."""
    return bool(text) and all(map(_is_hidden, text))


def _is_hidden(character: str) -> bool:
    return _FIRST <= ord(character) < _FIRST + _MANY
