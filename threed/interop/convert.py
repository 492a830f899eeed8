"""Convert: a config of DeepSpeed, or arguments of Megatron-LM, into a config."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.base.quantity import show_count
from threed.config import load as configs
from threed.config.keys.deepspeed import CLIPS_SINCE, DEEPSPEED
from threed.config.keys.megatron import MEGATRON
from threed.config.keys.megatron_experts import notes as of_experts
from threed.config.keys.megatron_values import ends
from threed.config.values import get
from threed.interop.arguments import arguments
from threed.interop.converted import Converted, convert, inline, shown
from threed.interop.deepspeed_file import read
from threed.interop.deepspeed_option import take_file
from threed.models.model import num_parameters

NEWEST = CLIPS_SINCE
_WIDTH = 110


def deepspeed(path: Path, overrides: list[str], devices: int | None = None,
              version: str | None = None) -> Converted:
    """A DeepSpeed config file. `version`: of DeepSpeed, for which the defaults are. InputError where the file
    is no such config, contradicts itself, or what comes out cannot run."""
    values = read(path)
    done = convert(DEEPSPEED, values, str(path), overrides, devices, _version(version)).finish()
    done.notes.insert(0, "DeepSpeed's file does not describe the model and the data: set model.* and data.*")
    if "optimizer.name" not in done.values:
        done.notes.append("the file names no optimizer of threed: optimizer.* are threed's defaults")
    elif "optimizer.schedule" not in done.values:
        done.notes.append("the file has no schedule of the learning rate: optimizer.schedule is threed's "
                          "default; write constant if the script has none either")
    return done


def megatron(text: str, overrides: list[str], devices: int | None = None) -> Converted:
    """Arguments of Megatron-LM, or a file that has them. InputError as in `deepspeed`."""
    given = arguments(text)
    notes = [*given.notes, *ends(given.found), *of_experts(given.found)]
    done = convert(MEGATRON, given.found, given.source, overrides, devices)
    for name in given.usual:  # a dump has them all
        for reasons in (done.dropped, done.refused):
            reasons.pop(shown(MEGATRON, name), None)
    if "deepspeed_config" in given.found:
        take_file(done, given, overrides)
    done.finish().notes += notes
    chosen = configs.overrides_of(overrides)
    done.refused |= {shown(MEGATRON, name): reason for name, reason in given.unknown.items()
                     if (row := MEGATRON.row(name)) is None or row.key not in chosen}
    return done


def _version(text: str | None) -> tuple[int, ...]:
    if text is None:
        return NEWEST
    try:
        return tuple(int(part) for part in text.split("+")[0].split(".")[:3])
    except ValueError:
        raise InputError(f"--deepspeed-version {text}: give a version such as 0.18.2") from None


# ---------------------------------------------------------------- text


def document(done: Converted) -> dict[str, Any]:
    """The document of `threed convert --json`."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in done.values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return {"config": sections, "dropped": done.dropped, "refused": done.refused, "notes": done.notes,
            "not_found": done.missing,
            "parameters": num_parameters(done.config.model)}


def show(done: Converted) -> str:
    """The config as YAML, and comments after it: notes, and options that were refused or dropped."""
    has_model = any(key.startswith("model.") for key in done.values)
    size = f" The model has {show_count(num_parameters(done.config.model))} parameters." if has_model else ""
    lines = [f"# Converted from {done.source} ({done.framework.name}).{size}",
             "# What is not here is said at the end."]
    if done.missing:
        defaults = ", ".join(f"{key} {inline(get(done.config, key))}" for key in done.missing)
        lines += textwrap.wrap(f"NOT FOUND in it, so the default counts: {defaults}", _WIDTH,
                               initial_indent="# ", subsequent_indent="# ")
    sections = list(done.config.to_dict())
    for section in sections:
        mine = [key for key in configs.known_keys(done.config) if key in done.values
                and key.startswith(f"{section}.")]
        lines += ["", f"{section}:"] if mine else []
        for key in mine:
            remark = f"  # {done.why[key]}" if key in done.why else ""
            lines.append(f"  {key.split('.')[1]}: {inline(done.values[key])}{remark}")
    for title, reasons in (("Notes", {note: "" for note in done.notes}),
                           ("Refused: threed does not have this, and trains otherwise", done.refused),
                           ("Dropped: nothing is lost without it", done.dropped)):
        lines += ["", f"# {title}"] if reasons else []
        for key, reason in reasons.items():
            lines += textwrap.wrap(f"{key}: {reason}" if reason else key, _WIDTH, initial_indent="#   ",
                                   subsequent_indent="#     ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)
