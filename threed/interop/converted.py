"""Converted: one pass over the keys of another framework that were given and, by default, differ. Each is
taken, dropped or refused by its row of the table."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from math import prod
from typing import Any

import yaml

from threed.base.errors import ConfigError, InputError
from threed.config import load as configs
from threed.config.keys.deepspeed import CLIPS_SINCE
from threed.config.keys.megatron import MEGATRON
from threed.config.keys.table import Dropped, Framework, Key, Refused
from threed.config.named import joined
from threed.config.values import get
from threed.interop import arguments
from threed.models.families.registry import FAMILIES
from threed.schema import Config

_SLIP = 0.85  # how alike an unknown option and a slip of the pen are
_SURE = ("optimizer.lr", "train.steps", "model.seq_len")  # what every run says
_SIZES = ("model.layers", "model.hidden", "model.heads", "model.vocab")


@dataclass
class Converted:
    """The result of a conversion. `values`: our key -> its value. `why`: our key -> a remark, which is
    written on the line of the key. `dropped`, `refused`: their key -> the reason. `notes`: remarks on the
    conversion as a whole."""

    framework: Framework
    source: str
    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: Config = field(default_factory=Config)

    @property
    def missing(self) -> list[str]:
        """Keys that every run says, and that this one leaves to threed's defaults."""
        sizes = _SIZES if self.framework is MEGATRON and "model.name" not in self.values else ()
        return [key for key in (*_SURE, *sizes) if key not in self.values]

    def finish(self) -> Converted:
        """Itself, with the config of its values. InputError where they are no config."""
        try:
            self.config = configs.of_values(dict(self.values), "the converted config")
        except ConfigError as error:
            raise InputError(f"{error}\nadd KEY=VALUE to the command, which wins over {self.source}"
                             ) from None
        return self


def convert(framework: Framework, found: dict[str, Any], source: str, overrides: list[str],
             devices: int | None, version: tuple[int, ...] = ()) -> Converted:
    done = Converted(framework, source)
    rows = {key: framework.row(key) for key in found}
    if framework is not MEGATRON or source == arguments.TYPED:  # the others Megatron-LM has read itself
        _check_names(framework, [key for key, row in rows.items() if row is None])
    given = {row.theirs: found[key] for key, row in rows.items() if row is not None and found[key] != "auto"}
    given |= {"version": version, "dp": None}
    chosen = configs.overrides_of(overrides)
    if framework is MEGATRON:  # what overrides say counts for options that depend on others
        given |= {row.theirs: chosen[row.key] for row in framework.rows if row.key in chosen
                  and row.theirs not in given and row.take is None and row.switch is None}
    if devices is not None:
        sizes = {axis: chosen.get(key, _size(given, framework, key))
                 for axis, key in (("tp", "parallel.tp"), ("cp", "parallel.cp"), ("pp", "parallel.pp"))}
        others = prod(sizes.values())
        if devices < 1 or devices % others:
            axes = " x ".join(axis for axis in sizes if axis != "cp" or sizes[axis] > 1)
            raise InputError(f"--devices {devices}: must be a multiple of {axes} = {others}")
        given["dp"] = devices // others
    default = {name: value for name, value in framework.defaults(given).items() if name not in given}
    given |= default
    automatic = {row.theirs for key, row in rows.items() if row is not None and found[key] == "auto"}
    origin: dict[str, str] = {}
    for key, row in rows.items():
        _take(done, origin, shown(framework, _stem(key, row)), row, found[key], given)
    for name, value in default.items():
        if name in automatic:
            continue
        _take_default(done, name, framework.row(name), value, given)
    if given["dp"] is not None:
        done.values.setdefault("parallel.dp", given["dp"])
    done.values = joined(done.values, chosen)
    done.why = {key: text for key, text in done.why.items() if key not in chosen}
    if devices is None and "parallel.dp" not in chosen:
        _check_ranks(done.values, origin.get("parallel.ep", "parallel.ep"), source)
    return done


def _check_ranks(values: dict[str, Any], key: str, source: str) -> None:
    """InputError where more ranks hold all experts together than there are for sure. (Without --devices, what
    does not say how many there are counts as 1.) `key`: theirs, which says so."""
    ep, tp = values.get("parallel.ep", 1), values.get("parallel.tp", 1)
    whole = isinstance(ep, int) and isinstance(tp, int)  # what else it is, the config's checks say
    if values.get("parallel.dp", "auto") in ("auto", 1) and whole and ep > tp:
        raise InputError(f"{key}={ep}: {source} and the command do not say how many ranks there are; add "
                         "--devices N, or parallel.dp=N")


def _size(given: dict[str, Any], framework: Framework, key: str) -> int:
    """The size of an axis; 1 where nothing says another."""
    return next((given[row.theirs] for row in framework.rows if row.key == key and row.theirs in given
                 and row.take is None and row.asks(given[row.theirs])), 1)


def _check_names(framework: Framework, unknown: list[str]) -> None:
    """InputError where a key looks like a slip of the pen: each part of its name is nearly that of a row."""
    for key in unknown:
        likeness, near = max((_likeness(key, row.theirs), row.theirs) for row in framework.rows
                         if "*" not in row.theirs)
        if likeness >= _SLIP:
            raise InputError(f"{shown(framework, key)} is no key of {framework.name}; did you mean "
                             f"{shown(framework, near)}?")


def _likeness(key: str, theirs: str) -> float:
    names = theirs.split(".")
    parts = key.replace("-", "_").split(".")[-len(names):]
    return min(difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(
        parts, names, strict=True)) if len(parts) == len(names) else 0.0


def _stem(key: str, row: Key | None) -> str:
    """The section that a row with * stands for; of other keys the key."""
    if row is None or not row.theirs.endswith("*") or "." not in key or row.theirs.endswith(".*"):
        return key
    fixed = row.theirs.rstrip("*")
    section = key[:key.find(fixed) + len(fixed)]
    return section if key[len(section):].startswith(".") else key


def shown(framework: Framework, key: str) -> str:
    return arguments.shown(key) if framework is MEGATRON else key


def _take(done: Converted, origin: dict[str, str], key: str, row: Key | None, value: Any,
          given: dict[str, Any]) -> None:
    """One key that was given."""
    if row is None:
        done.refused[key] = f"threed does not know this key of {done.framework.name}"
        return
    if value == "auto":
        done.dropped[key] = ("auto is filled in later, by Hugging Face's Trainer or from the model"
                             + (f": set {row.key}" if row.key else ""))
        return
    try:
        taken = row.taken(value, given)
    except Dropped as reason:
        done.dropped[key] = str(reason)
        return
    except Refused as reason:
        done.refused[key] = str(reason)
        return
    except TypeError:
        raise InputError(f"{key}={value!r} is of type {type(value).__name__}, which {done.framework.name} "
                         "does not take there") from None
    for ours, converted in taken.items():
        if ours in done.values and done.values[ours] != converted:
            raise InputError(f"{origin[ours]} and {key} contradict each other: {ours} would be "
                             f"{done.values[ours]} and {converted}; leave one of them out")
        done.values[ours] = converted
        origin[ours] = key
        remark = row.ours.partition(" (")[2].rstrip(")")
        if row.key == ours and remark.startswith("there "):
            done.why[ours] = remark


def _take_default(done: Converted, name: str, row: Key | None, value: Any, given: dict[str, Any]) -> None:
    """One key that was not given, and whose default differs from ours."""
    assert row is not None, name
    try:
        taken = row.taken(value, given)
    except Dropped:
        return
    except Refused as reason:
        done.refused[shown(done.framework, name)] = f"not given, and {value} by default: {reason}"
        return
    for ours, converted in taken.items():
        usual = _usual(ours, done)
        by_version = name == "gradient_clipping"
        if ours not in done.values and (converted != usual or by_version):
            done.values[ours] = converted
            done.why[ours] = f"{done.framework.name}'s default" + (
                f": 1.0 since {'.'.join(map(str, CLIPS_SINCE))}, 0 before (--deepspeed-version)" if by_version
                else f"; threed's is {inline(usual)}")


def _usual(key: str, done: Converted) -> Any:
    """The default of a key of ours, which may be that of the family."""
    if not key.startswith("model."):
        return get(Config(), key)
    family = FAMILIES[done.values.get("model.family", Config().model.family)]
    return getattr(family.config(), key.removeprefix("model."))


def inline(value: Any) -> str:
    """A value as YAML, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
