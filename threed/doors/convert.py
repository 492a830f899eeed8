"""Convert: a config of DeepSpeed, or options of Megatron-LM, into a config. One pass over the keys that were
given and, by default, differ: each is taken, dropped or refused by its row of the table."""

from __future__ import annotations

import difflib
import json
import textwrap
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import yaml

from threed import config as configs
from threed.doors.deepspeed import CLIPS_SINCE, DEEPSPEED
from threed.doors.megatron import MEGATRON
from threed.doors.script import TYPED, options
from threed.doors.table import NO_KEY, NOTHING, Dropped, Framework, Refused, Row
from threed.errors import ConfigError, InputError
from threed.models.model import num_parameters
from threed.quantity import show_count
from threed.schema import Config
from threed.values import get

NEWEST = CLIPS_SINCE
_SLIP = 0.85  # how alike an unknown option and a slip of the pen are
_WIDTH = 110


@dataclass
class Converted:
    """`values`: our keys. `why`: our key -> a remark, for the line of the key. `dropped`, `refused`: their
    keys -> the reason. `notes`: what the whole says."""

    framework: Framework
    source: str
    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: Config = field(default_factory=Config)


def deepspeed(path: Path, overrides: list[str], devices: int | None = None,
              version: str | None = None) -> Converted:
    """A DeepSpeed config file. `version`: of DeepSpeed, for which the defaults are. InputError where the file
    is no such config, contradicts itself, or what comes out cannot run."""
    try:
        values = json.loads(path.read_text(), object_pairs_hook=_once)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except json.JSONDecodeError as error:
        other = path.suffix != ".json"
        hint = "; for Megatron-LM's options write threed convert --megatron FILE" if other else ""
        raise InputError(f"{path} is not JSON: {error}{hint}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must be an object of keys, such as train_batch_size, not a "
                         f"{type(values).__name__}")
    done = _convert(DEEPSPEED, _flat(values), str(path), overrides, devices, _version(version))
    done.notes.insert(0, "DeepSpeed's file does not describe the model and the data: set model.* and data.*")
    if "optimizer.name" not in done.values:
        done.notes.append("the file has no optimizer that threed has: optimizer.* are threed's defaults")
    elif "optimizer.schedule" not in done.values:
        done.notes.append("the file has no schedule of the learning rate: optimizer.schedule is threed's "
                          "default; write constant if the script has none either")
    return done


def megatron(text: str, overrides: list[str], devices: int | None = None) -> Converted:
    """Options of Megatron-LM, or a file or a shell script that has them. InputError as in `deepspeed`."""
    given = options(text)
    done = _convert(MEGATRON, given.found, given.source, overrides, devices)
    done.notes += given.notes
    if "model.vocab" not in done.values:
        done.notes.append("the options do not say how large the vocabulary is: model.vocab is the default")
    done.refused |= {_shown(MEGATRON, name): f"its value, {value}, comes from outside the script"
                     for name, value in given.unknown.items()}
    return done


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{twice} is given twice in one section: leave one of them out")
    return dict(pairs)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects -> {dotted key: value}. Of a section that is switched off only the switch stays."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value.get("enabled") is False:
            flat[f"{prefix}{key}.enabled"] = False
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _version(text: str | None) -> tuple[int, ...]:
    if text is None:
        return NEWEST
    try:
        return tuple(int(part) for part in text.split("+")[0].split(".")[:3])
    except ValueError:
        raise InputError(f"--deepspeed-version {text}: give a version such as 0.18.2") from None


def _convert(framework: Framework, found: dict[str, Any], source: str, overrides: list[str],
             devices: int | None, version: tuple[int, ...] = ()) -> Converted:
    done = Converted(framework, source)
    rows = {key: framework.row(key) for key in found}
    if framework is not MEGATRON or source == TYPED:  # Megatron-LM has read a script's options itself
        _check_names(framework, [key for key, row in rows.items() if row is None])
    given = {row.theirs: found[key] for key, row in rows.items() if row is not None and found[key] != "auto"}
    given |= {"version": version, "dp": None}
    chosen = configs.overrides_of(overrides)
    if framework is MEGATRON:  # what overrides say counts for options that depend on others
        given |= {row.theirs: chosen[row.key] for row in framework.rows if row.key in chosen
                  and row.theirs not in given and row.take is None and row.switch is None}
    if devices is not None:
        others = prod(chosen.get(key, _size(given, framework, key)) for key in ("parallel.tp", "parallel.pp"))
        if devices < 1 or devices % others:
            raise InputError(f"--devices {devices}: must be a multiple of tp x pp = {others}")
        given["dp"] = devices // others
    default = {name: value for name, value in framework.defaults(given).items() if name not in given}
    given |= default
    automatic = {row.theirs for key, row in rows.items() if row is not None and found[key] == "auto"}
    origin: dict[str, str] = {}
    for key, row in rows.items():
        _take(done, origin, _shown(framework, _stem(key, row)), row, found[key], given)
    for name, value in default.items():
        if name in automatic:
            continue
        _take_default(done, name, framework.row(name), value, given)
    if given["dp"] is not None:
        done.values.setdefault("parallel.dp", given["dp"])
    done.values |= chosen
    done.why = {key: text for key, text in done.why.items() if key not in chosen}
    try:
        done.config = configs.of_values(dict(done.values), "the converted config")
    except ConfigError as error:
        raise InputError(f"{error}\nadd KEY=VALUE to the command, which wins over {source}") from None
    return done


def _size(given: dict[str, Any], framework: Framework, key: str) -> int:
    names = [row.theirs for row in framework.rows if row.key == key and row.theirs in given
             and row.take is None]
    return given[names[0]] if names else 1


def _check_names(framework: Framework, unknown: list[str]) -> None:
    names = {row.theirs.rpartition(".")[2]: row.theirs for row in framework.rows if "*" not in row.theirs}
    for key in unknown:
        near = difflib.get_close_matches(key.rpartition(".")[2].replace("-", "_"), list(names), 1, _SLIP)
        if near:
            raise InputError(f"{_shown(framework, key)} is no key of {framework.name}; did you mean "
                             f"{_shown(framework, names[near[0]])}?")


def _stem(key: str, row: Row | None) -> str:
    """The section that a row with * stands for; of other keys the key."""
    if row is None or not row.theirs.endswith("*") or "." not in key or row.theirs.endswith(".*"):
        return key
    fixed = row.theirs.rstrip("*")
    section = key[:key.find(fixed) + len(fixed)]
    return section if key[len(section):].startswith(".") else key


def _shown(framework: Framework, key: str) -> str:
    return "--" + key.replace("_", "-") if framework is MEGATRON else key


def _take(done: Converted, origin: dict[str, str], key: str, row: Row | None, value: Any,
          given: dict[str, Any]) -> None:
    """One key that was given."""
    if row is None:
        done.refused[key] = f"threed does not know this key of {done.framework.name}"
        return
    if value == "auto":
        done.dropped[key] = "auto is filled in by Hugging Face's Trainer" + (f": set {row.key}" if row.key
                                                                             else "")
        return
    try:
        taken = _taken(row, value, given)
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


def _taken(row: Row, value: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Our keys and values for one of their keys."""
    if row.take is None and row.key is None:
        if row.ours.startswith(NOTHING) and not row.asks(value):
            return {}
        raise (Dropped if row.ours.startswith(NO_KEY) else Refused)(row.ours.partition(": ")[2])
    assert row.key is not None or row.take is not None
    if row.switch is not None or row.off:
        if not row.asks(value):
            return {}
    if row.take is None:
        return {row.key: yaml.safe_load(row.switch) if row.switch is not None else value}  # pyright: ignore
    taken = row.take(value, given)
    return taken if isinstance(taken, dict) else {row.key: taken}  # pyright: ignore


def _take_default(done: Converted, name: str, row: Row | None, value: Any, given: dict[str, Any]) -> None:
    """One key that was not given, and whose default differs from ours."""
    assert row is not None, name
    try:
        taken = _taken(row, value, given)
    except Dropped:
        return
    except Refused as reason:
        done.refused[_shown(done.framework, name)] = f"not given, so {value}: {reason}"
        return
    for ours, converted in taken.items():
        usual = get(Config(), ours)
        by_version = name == "gradient_clipping"
        if ours not in done.values and (converted != usual or by_version):
            done.values[ours] = converted
            done.why[ours] = f"{done.framework.name}'s default" + (
                f": 1.0 since {'.'.join(map(str, CLIPS_SINCE))}, 0 before (--deepspeed-version)" if by_version
                else f"; threed's is {_inline(usual)}")


# ---------------------------------------------------------------- text


def document(done: Converted) -> dict[str, Any]:
    """The document of `threed convert --json`."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in done.values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return {"config": sections, "dropped": done.dropped, "refused": done.refused, "notes": done.notes,
            "parameters": num_parameters(done.config.model)}


def _inline(value: Any) -> str:
    """A value as YAML, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def show(done: Converted) -> str:
    """A YAML file, and after it, as comments, what it does not hold."""
    has_model = any(key.startswith("model.") for key in done.values)
    size = f" The model has {show_count(num_parameters(done.config.model))} parameters." if has_model else ""
    lines = [f"# Converted from {done.source} ({done.framework.name}).{size}",
             "# What is not here is said at the end."]
    sections = list(done.config.to_dict())
    for section in sections:
        mine = [key for key in configs.known_keys(done.config) if key in done.values
                and key.startswith(f"{section}.")]
        lines += ["", f"{section}:"] if mine else []
        for key in mine:
            remark = f"  # {done.why[key]}" if key in done.why else ""
            lines.append(f"  {key.split('.')[1]}: {_inline(done.values[key])}{remark}")
    for title, reasons in (("Notes", {note: "" for note in done.notes}),
                           ("Refused: threed cannot do this, and what trains differs", done.refused),
                           ("Dropped: nothing is lost without it", done.dropped)):
        lines += ["", f"# {title}"] if reasons else []
        for key, reason in reasons.items():
            lines += textwrap.wrap(f"{key}: {reason}" if reason else key, _WIDTH, initial_indent="#   ",
                                   subsequent_indent="#     ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)
