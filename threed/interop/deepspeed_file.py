"""DeepSpeed's config as a text: read as DeepSpeed reads it, by hjson: JSON that may have comments, commas at
the end, keys without quotes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import hjson

from threed.base.errors import InputError

_FORMATS = ("threed convert takes a JSON of DeepSpeed, or with --megatron Megatron-LM's arguments: a list of "
            "them, a log that begins with them, or a YAML")


def read(path: Path) -> dict[str, Any]:
    """{dotted key: value} of a file; of a section that is switched off only the switch. InputError where it
    cannot be read, or is no such config."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text.strip():
        raise InputError(f"{path} is empty")
    if path.suffix not in (".json", ".hjson"):
        _check_kind(path, text)
    try:
        try:
            values = json.loads(text, object_pairs_hook=_once)  # knows Infinity, too
        except json.JSONDecodeError:
            values = hjson.loads(text, object_pairs_hook=_once)
    except hjson.HjsonDecodeError as error:
        raise InputError(f"{path} is not JSON, with which DeepSpeed allows comments: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must be an object of keys, such as train_batch_size, not a "
                         f"{type(values).__name__}")
    return _flat(values)


def _check_kind(path: Path, text: str) -> None:
    """InputError where a file is of another kind by its name and by what it holds."""
    if path.suffix == ".toml" or _is_toml(text):
        raise InputError(f"{path} is TOML, such as torchtitan's, which is not converted: {_FORMATS}. threed "
                         f"check {path if path.suffix == '.toml' else 'FILE.toml'} names our key for each of "
                         "torchtitan's; see also docs/coming-from.md#torchtitan")
    begin = text.lstrip()[:1]
    if path.suffix in (".yaml", ".yml") or begin not in ("{", "#", "/"):
        raise InputError(f"{path} is not JSON: {_FORMATS}; for those write threed convert --megatron FILE")


def _is_toml(text: str) -> bool:
    try:
        return any(isinstance(value, dict) for value in tomllib.loads(text).values())
    except tomllib.TOMLDecodeError:
        return False


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{twice} is given twice in one section: leave one of them out")
    return dict(pairs)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and _flag("enabled", value.get("enabled")) is False:
            flat[f"{prefix}{key}.enabled"] = False
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _flag(key, value)
    return flat


def _flag(key: str, value: Any) -> Any:
    """A value, with what DeepSpeed takes for true and false as such: "true", "False", and 1 of what is
    enabled."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return bool(value) if key == "enabled" and value in (0, 1) else value
