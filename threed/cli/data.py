"""The verb of the command line that prepares data, lists what is prepared, and removes it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from threed.base.console import put_error
from threed.base.errors import InputError
from threed.cli.options import Json, Overrides
from threed.config import load as configs
from threed.data import cache
from threed.schema import Config, DataConfig

ConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG", show_default=False,
                                                   help="YAML file, or one that ships: configs/toy.yaml")]
Listed = Annotated[bool, typer.Option("--list", help="list the prepared data in the cache, those used last "
                                                     "first; without CONFIG in the default one")]
Age = Annotated[str | None, typer.Option("--clean", metavar="AGE", help="remove the prepared data that were "
                                         "not used for so long, such as 30d or 12h (0: all not in use)")]


def data(config: ConfigPath = None, overrides: Overrides = None, listed: Listed = False, age: Age = None,
         as_json: Json = False) -> None:
    """Prepare a config's data ahead of a run: read the source, train or load the tokenizer, tokenize the text
    and cache the tokens. Or look after what is cached."""
    loaded = None if config is None else configs.load(config, overrides)
    if listed and age is not None:
        raise InputError("--list and --clean exclude each other: leave one of them out")
    if listed or age is not None:
        root = cache.cache_root(loaded.data if loaded is not None else DataConfig())
        _list(root, as_json) if age is None else _clean(root, age, as_json)
        return
    if loaded is None:
        raise InputError("give the CONFIG whose data are to be prepared, or --list or --clean AGE")
    values = _prepare(loaded)
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        print("\n".join(f"{name:20}{value}" for name, value in values.items() if name != "notes"))


def _prepare(config: Config) -> dict[str, Any]:
    from threed.data.mix import open_splits, report
    from threed.launcher.processes import prepare_apart

    if config.model.own_layers:
        raise InputError(f"model.family={config.model.family}: data of your own layers are not prepared")
    prepared = prepare_apart(config, put_error)
    training, validation = open_splits(config, prepared)
    for line in report(config, training, validation):
        put_error(line)
    return {"prefix": str(prepared.prefix),
            "tokenizer": str(prepared.tokenizer) if prepared.tokenizer else None,
            "documents": prepared.num_documents, "tokens": prepared.num_tokens,
            "vocab": prepared.vocab_size, "cached": prepared.cached,
            "train_samples": training.num_windows, "validation_samples": validation.num_windows,
            "notes": list(prepared.notes)}


def _list(root: Path, as_json: bool) -> None:
    found = cache.entries(root)
    if as_json:
        print(json.dumps([_plain(entry) for entry in found], indent=1))
    else:
        print(cache.show(root, found))


def _clean(root: Path, age: str, as_json: bool) -> None:
    removed, kept = cache.clean(root, cache.parse_age(age))
    if as_json:
        print(json.dumps({"removed": [_plain(entry) for entry in removed],
                          "in_use": [_plain(entry) for entry in kept]}, indent=1))
        return
    print(cache.show_cleaned(root, removed, kept))


def _plain(entry: cache.CacheEntry) -> dict[str, Any]:
    return {**asdict(entry), "folder": str(entry.folder)}
