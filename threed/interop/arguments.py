"""Arguments of Megatron-LM in a text: a list of them, a launch line without variables, a YAML, or a log with
the dump that Megatron-LM prints at its start (`interop.dump`). A script is refused: what its variables hold
is known to a shell alone.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from os.path import basename
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.config.keys.megatron import MEGATRON
from threed.config.keys.megatron_names import OPTIONS, option_of
from threed.config.keys.megatron_switches import is_switch, takes_several
from threed.config.keys.megatron_values import RANKS
from threed.interop import dump

TYPED = "the list given"
_LONGEST = 4096  # characters of a path
_COMMENT = re.compile(r"""('[^']*'|"(?:[^"\\]|\\.)*"|\\.)|(?<!\S)#[^\n]*""", re.DOTALL)
_OF_SHELL = re.compile(r".*[$`]|.*;$|[&|]{1,2}$|\d?[<>&]+|\w+\+?=\(", re.DOTALL)
_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run", "torch.distributed.elastic", "deepspeed",
              "deepspeed.launcher.runner", "deepspeed.launcher.launch", "accelerate.commands.launch")
_WORDS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"),
                                                                             False)}
_SWIFT = ("megatron sft of ms-swift has defaults of its own: for what the command does not say, those of "
          "Megatron-LM count here")


@dataclass
class Given:
    """`found`: options (with _ for -, and without the dashes) -> values: numbers where they look like some,
    True for a switch, a list for what takes several. `usual`: those of a dump that have Megatron-LM's
    default. `unknown`: options whose values cannot be known -> why. `source`: what the text is called.
    `folder`: where a file that it names lies."""

    source: str
    folder: Path = field(default_factory=Path)
    found: dict[str, Any] = field(default_factory=dict)
    usual: set[str] = field(default_factory=set)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        """Takes an option. A switch that is off is as if it were not given."""
        name = OPTIONS.get(name, name)
        if value is False and MEGATRON.row(name) is not None:
            self.found.pop(name, None)
            return
        if name in self.found and self.found[name] != value:
            self.notes.append(f"{shown(name)} is given as {self.found[name]} and {value}: the last is taken")
        self.found[name] = value


def shown(name: str) -> str:
    return "--" + name.replace("_", "-")


def arguments(text: str) -> Given:
    """The arguments in a text, or in the file that it names. InputError where there are none, where one has
    too many values, and where the text is a script."""
    given, text = _text_of(text)
    if given.source.endswith((".yaml", ".yml")):
        _take_table(given, dump.of_yaml(text, given.source, given.notes))
    elif (values := dump.of_log(text, given.notes)) is not None:
        _take_table(given, values)
    else:
        _take_words(given, text)
    if not given.found and not given.unknown:
        raise InputError(f"{given.source} has no option: give Megatron-LM's, such as --num-layers 24")
    return given


def _text_of(text: str) -> tuple[Given, str]:
    if text.strip() and not text.lstrip().startswith("-") and len(text) < _LONGEST and "\n" not in text:
        path = Path(text)
        if os.path.isfile(text) or " " not in text.strip():  # False for what is too long for a name
            if path.suffix in (".json", ".toml"):
                raise InputError(f"--megatron {path}: Megatron-LM's arguments are a list, a log or a YAML, "
                                 f"and no {path.suffix[1:].upper()}; threed convert {path} says what becomes "
                                 "of it")
            try:
                return Given(str(path), path.parent), path.read_text(errors="replace")
            except OSError as error:
                raise InputError(f"--megatron {path} cannot be read: {error.strerror or error}; give a file, "
                                 "or -- and the arguments") from None
    return Given(TYPED), text


def _take_table(given: Given, values: dict[str, Any]) -> None:
    """Takes a table of arguments, in which every one may stand with its default. In a YAML a $ begins a
    variable, and a key may be another program's. InputError where most are."""
    is_yaml = given.source.endswith((".yaml", ".yml"))
    strange = [name for name in values if is_yaml and dump.is_strange(name)]
    if len(strange) > len(values) / 2 and not {"num_layers", "hidden_size"} & values.keys():
        raise InputError(f"{given.source} is no YAML of Megatron-LM, megatron.core or Megatron-Bridge: it "
                         f"has no num_layers and no hidden_size, but {', '.join(strange[:3])}. threed import "
                         f"takes a model of Hugging Face; threed check {given.source} names threed's keys "
                         "for those that it knows")
    if off := [name for name in strange if values[name] is False]:
        given.notes.append(f"{', '.join(off)}: false, and threed does not know what by that name is off")
    for name, value in values.items():
        row = MEGATRON.row(name)
        if is_yaml and isinstance(value, str) and "$" in value and (row is None or row.key is not None):
            given.unknown[name] = f"its value, {value}, comes from outside the file"
            continue
        option, setting, is_usual = dump.setting(name, value, values)
        if option:
            given.add(option, setting)
            given.usual |= {option} if is_usual else set()


# ---------------------------------------------------------------- words of a command


def _take_words(given: Given, text: str) -> None:
    words, is_script = _words_of(text, given.source)
    begin = _begin(words)
    if is_script or (begin is None and not any(word.startswith("--") for word in words)):
        if is_script or given.source != TYPED:
            raise InputError(
                f"{given.source} is no list of arguments: threed runs no script and knows none of its "
                "variables.\nPut echo in front of its launch line (echo torchrun ... pretrain_gpt.py ...), "
                "run it, and give what it prints: threed convert --megatron FILE\nOr give a log of the run: "
                "the arguments that Megatron-LM prints at its start are read from it")
        return
    if begin is None:
        raise InputError(f"{given.source}: no program stands before the options of {words[0]}: give a line "
                         "such as torchrun ... pretrain_gpt.py --num-layers 24, or the options alone")
    if begin:
        for name, value in _ranks(words[:begin]).items():
            given.add(name, value)
        if basename(words[begin - 2]) == "megatron":
            given.notes.append(_SWIFT)
    for name, values in _groups(words[begin:], given.source):
        given.add(*option_of(name, _value(name, values)))


def _words_of(text: str, source: str) -> tuple[list[str], bool]:
    """Words as a shell cuts them, without comments; and whether they are those of a script."""
    is_script = text.startswith("#!")
    text = _COMMENT.sub(lambda match: match[1] or "", text.replace("\r\n", "\n"))
    text = re.sub(r"\\[ \t]*\n", " ", text)
    try:
        words = shlex.split(text)
    except ValueError:
        raise InputError(f"{source} cannot be read as a command: is a quote open?") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    is_script = is_script or any(map(_OF_SHELL.match, words)) or any(
        not line.startswith("-") and not lines[0].startswith("-") for line in lines[1:])
    several = [shlex.split(word) if re.match(r"--[\w-]+ ", word) else [word] for word in words]
    return [word for each in several for word in each if word.strip() or not word], is_script


def _begin(words: list[str]) -> int | None:
    """The place of the first argument: 0, or behind the program that a launch line names. None where none
    is named."""
    if not words or words[0].startswith("-"):
        return 0
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word.endswith(".py") or (before == "-m" and word not in _LAUNCHERS) or (
                basename(before) == "megatron" and word in ("sft", "pt")):
            return index + 1
    return None


def _ranks(words: list[str]) -> dict[str, int]:
    """What a launcher's words, or the environment before it, say of the number of ranks."""
    text = " ".join(words)
    found = {name: re.search(rf"(?:^|\s)(?:--)?{name.replace('_', '[-_]')}[=\s](\d+)(?=\s|$)", text,
                             re.IGNORECASE) for names in RANKS for name in names if name}
    return {name: int(match[1]) for name, match in found.items() if match}


def _groups(words: list[str], source: str) -> list[tuple[str, list[str]]]:
    """(option, its values), in order."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            groups.append((name.replace("-", "_"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"{source}: {word} is no option: options begin with --")
    return groups


def _is_switch(name: str) -> bool:
    row = MEGATRON.row(name)
    return is_switch(name) or (row is not None and row.switch is not None)


def _value(name: str, words: list[str]) -> Any:
    row = MEGATRON.row(name)
    is_bool = len(words) == 1 and words[0].lower() in _WORDS
    if _is_switch(name):
        if words and not is_bool:
            raise InputError(f"{shown(name)} {' '.join(words)}: the option is a switch and takes no value, "
                             "or true or false")
        return _WORDS[words[0].lower()] if words else True
    if is_bool and words[0].lower() in ("true", "false"):
        return words[0].lower() == "true"
    if row is not None and row.key is not None:
        if not words:
            raise InputError(f"{shown(name)} needs a value")
        if len(words) > 1 and not takes_several(name):
            raise InputError(f"{shown(name)} has more than one value: {' '.join(words)} (a value with spaces "
                             "stands in quotes, and KEY=VALUE before --megatron)")
    if takes_several(name) and row is not None:
        return [_number(word) for word in words]
    return _number(" ".join(words)) if words else True


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
