"""Provenance: whether a run that goes on from a checkpoint has the data and the tokenizer that it was trained
on. A manifest keeps their identity (data/identity): paths may change, content may not, unless
data.on_change=accept. Checkpoints of imports and of older versions do not know it.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from pathlib import Path
from typing import Any, NamedTuple

from threed.base.errors import InputError
from threed.checkpoint.format import Manifest
from threed.data.run_tokenizer import tokenizer_of
from threed.data.sampling import IMPORTED, TOKENIZER
from threed.schema import Config, DataConfig

# Keys that say which tokens the same content becomes: a note says that they have changed, and tokens cannot
# be compared then.
MAKE_TOKENS = ("append_eod", "prepend_bos", "loss_mask", "chat_template")
_OR_ORDER = ", or its files have other names, and so another order"


def check(path: Path, manifest: Manifest, data: dict[str, Any], config: Config,
          base: bool = False) -> None:
    """InputError where `data`, the identity of what the run would be trained on, are not those of the
    checkpoint, and data.on_change does not accept others. `base`: the checkpoint is the base of adapters,
    which are trained on other data, and with the same tokenizer."""
    found = changes(manifest, data, config.data, base)
    if not found or config.data.on_change == "accept":
        return
    digest = manifest.tokenizer
    kept = tokenizer_of(path.parent.parent, digest) or tokenizer_of(Path(config.run.dir), digest)
    same = f"data.tokenizer={kept}" if kept is not None else "the tokenizer.json that it was trained with"
    other = digest != data["tokenizer"]
    only = len(found) == 1 and found[0].startswith("data.tokenizer=")
    what = "with another tokenizer" if only else "on other data"
    give = f"give {same}" if only else "give the data that it was trained on"
    accept = f" (with {same}, tokens keep their meaning)" if other and not only else ""
    step = 1 if base else manifest.step + 1
    raise InputError(f"checkpoint {path} was trained {what}: {'; '.join(found)}. To go on as it was, {give}; "
                     f"to go on with what is given now, from step {step} on, set "
                     f"data.on_change=accept{accept}; or begin anew in another run.dir")


def check_named(path: Path, manifest: Manifest, data: dict[str, Any], now: DataConfig) -> None:
    """InputError where a run begins with weights that it has not trained, those of an import or of a base of
    adapters, with a source or a tokenizer by default: these would be other tokens to them. (Data that are
    tokens already need no tokenizer.)"""
    theirs = {} if manifest.weights_only else {**dataclasses.asdict(DataConfig()),
                                                **manifest.config.get("data", {})}
    left = [key for key in now.left_out if theirs.get(key) != getattr(now, key)
            and data.get({"tokenizer": "tokenizer", "source": "sources"}[key])]
    give = []
    if "tokenizer" in left:
        digest = manifest.tokenizer
        kept = tokenizer_of(path.parent.parent, digest) or imported(path)
        give = [f"data.tokenizer={kept}, which is that of these weights" if kept is not None else
                "data.tokenizer=PATH, the tokenizer.json with which these weights were trained (bpe trains a "
                "new one, whose tokens mean nothing to them)"]
    if "source" in left:
        give.append(f"data.source=PATH, what to train on (or {now.source}, by name)")
    if give:
        raise InputError(f"the run begins with the weights of {path}, without "
                         f"{' and '.join(f'data.{key}' for key in left)}: give {'; and '.join(give)}")


def imported(path: Path) -> Path | None:
    """The tokenizer.json that an import has left beside its checkpoint."""
    places = (folder / IMPORTED / TOKENIZER for folder in (path.parent, path.parent.parent))
    return next((file for file in places if file.is_file()), None)


def notes(path: Path, manifest: Manifest, data: dict[str, Any], config: Config,
          base: bool = False) -> list[str]:
    """A line about data that are not those of the checkpoint, or of which that is not known. `base`: as of
    `check`."""
    if data and not manifest.data and not base:
        return [f"{path.name} does not say which data it was trained on: they are not compared"]
    if not (found := changes(manifest, data, config.data, base)):
        return []
    return [f"data.on_change=accept: from step {manifest.step + 1} on the run has others than {path.name} "
            f"was trained on: {'; '.join(found)}"]


def changes(manifest: Manifest, data: dict[str, Any], now: DataConfig,
            base: bool = False) -> list[str]:
    """What is other about the data and the tokenizer than a checkpoint's manifest says, a text each; [] where
    nothing is, or one of them is not known. `base`: as of `check`."""
    before = manifest.data or {}
    if not before or not data:
        return []
    theirs = {**dataclasses.asdict(DataConfig()), **manifest.config.get("data", {})}
    first, second = before["tokenizer"], data["tokenizer"]
    retrained, found = not base and theirs["tokenizer"] == now.tokenizer == "bpe", []
    other = first is not None and second is not None and first != second
    if other and not retrained:
        found.append(f"data.tokenizer={now.tokenizer} is another tokenizer")
    if base:
        return found
    unlike = [key for key in MAKE_TOKENS if theirs[key] != getattr(now, key)]
    if not unlike and before.get("template") not in (None, data.get("template")):
        where = f"in data.chat_template={now.chat_template}" if now.chat_template else \
            f"of data.tokenizer={now.tokenizer}"
        found.append(f"the chat template {where} is another, and so are the tokens")
        unlike.append("chat_template")
    compared = not unlike and (retrained or not other)
    parts = _changes_of_sources(_sources(before), _sources(data), compared)
    if other and retrained:
        parts = parts or ["the content of data.source is another"]
        parts[-1] += ", and so is the tokenizer (data.tokenizer=bpe), which is trained on the data"
    return found + parts


class _Source(NamedTuple):
    name: str
    share: str
    tokens: str  # a digest


def _sources(data: dict[str, Any]) -> list[_Source]:
    return [_Source(each["source"], each["share"], each["tokens"]) for each in data["sources"]]


def _changes_of_sources(before: list[_Source], now: list[_Source], compared: bool) -> list[str]:
    """What is other about the sources. `compared`: whether tokens tell of a source's content."""
    found, left, order = [], list(now), []
    pairs: list[tuple[_Source, _Source]] = []
    rest = list(before)
    for alike in (lambda old, new: old.tokens == new.tokens,
                  lambda old, new: old.name == new.name,
                  lambda old, new: len(before) == len(now) == 1):
        for old in list(rest):
            if (new := next((each for each in left if alike(old, each)), None)) is not None:
                pairs.append((old, new))
                rest.remove(old)
                left.remove(new)
    found += [f"{old.name} is no longer a source" for old in rest]
    found += [f"{new.name} is a new source, with a share of {new.share}" for new in left]
    if not rest and not left:
        found += [f"the share of {new.name} was {old.share} and is {new.share}"
                  for old, new in pairs if old.share != new.share]
        order = [now.index(new) for _, new in sorted(pairs, key=lambda pair: before.index(pair[0]))]
    changed = [new.name for old, new in pairs if compared and old.tokens != new.tokens]
    if changed and not (rest or left):
        several = any(os.path.isdir(each) or glob.has_magic(each) for each in changed)
        found.append(f"the content of {', '.join(changed)} is another{_OR_ORDER if several else ''}")
    if not found and order != sorted(order):
        found.append("data.mix has its sources in another order, and so the samples")
    return found
