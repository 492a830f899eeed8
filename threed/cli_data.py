"""The verb of the command line that prepares data, lists what is prepared, and removes it."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from threed import config as configs
from threed.data import cache
from threed.early import STOPS, handle
from threed.engine.watch import say
from threed.errors import InputError
from threed.schema import Config, DataConfig
from threed.verbs import keys

ConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG", show_default=False,
                                                   help="YAML file, or one that ships: configs/toy.yaml")]
Overrides = Annotated[list[str] | None,
                      typer.Argument(metavar="[KEY=VALUE]...", help="overrides, such as parallel.tp=4",
                                     autocompletion=keys)]
Listed = Annotated[bool, typer.Option("--list", help="list the prepared data in the cache, those used last "
                                                     "first; without CONFIG in the default one")]
Age = Annotated[str | None, typer.Option("--clean", metavar="AGE", help="remove the prepared data that were "
                                         "not used for so long, such as 30d or 12h (0: all not in use)")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else")]


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
    from threed.data.tokens import prepare

    if config.model.own_layers:
        raise InputError(f"model.family={config.model.family}: data of your own layers are not prepared")
    handle(STOPS, _stop)
    try:
        prepared = prepare(config.data, config.model, lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        say(f"stopped by {signal.Signals(number).name}; nothing is left half-written")
        os._exit(128 + number)  # a library's threads may still work
    training, validation = open_splits(config, prepared)
    for line in report(config, training, validation):
        print(line, file=sys.stderr)
    return {"prefix": str(prepared.prefix),
            "tokenizer": str(prepared.tokenizer) if prepared.tokenizer else None,
            "documents": prepared.num_documents, "tokens": prepared.num_tokens,
            "vocab": prepared.vocab_size, "cached": prepared.cached,
            "train_samples": training.num_windows, "validation_samples": validation.num_windows,
            "notes": list(prepared.notes)}


def _stop(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)  # what is half-written is removed on the way out


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


def _plain(entry: cache.Entry) -> dict[str, Any]:
    return {**asdict(entry), "folder": str(entry.folder)}
