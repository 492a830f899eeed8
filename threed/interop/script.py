"""Options in a text: a command line of Megatron-LM, or a shell script that holds one.

A script is read, never run (`interop.shell`). Of the commands that it would run, the one that trains counts,
with the variables and arrays that it uses. A script without such a command, which only sets variables, gives
the options in them; so does MODEL_ARGS in a YAML file of Megatron-LM's tests.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from os.path import basename
from pathlib import Path
from typing import Any

import yaml

from threed.base.errors import InputError
from threed.config.keys.megatron import MEGATRON
from threed.config.keys.megatron_switches import is_switch, takes_several
from threed.interop.launchers import ranks, split
from threed.interop.shell.opaque import hide, is_opaque, is_open, show
from threed.interop.shell.parts import Command
from threed.interop.shell.walk import ScriptWalk
from threed.interop.shell.words import elements

TYPED = "the options given"
_LONGEST = 4096  # characters of a path
_PLACE = re.compile(r"(?<=[=\s\"'])<[A-Za-z](?:[\w ,./:()-]*[\w.)])?>(?=[\s\"'/_.]|$)")  # <Specify path>
_FROM_YAML = re.compile(r"\$\{?\w+\}?")
_TRAINS = re.compile(r"train|tune|megatron|gpt|llama|sft", re.IGNORECASE)
_RANKS = ("nproc_per_node", "nnodes", "num_gpus", "num_nodes", "num_processes")
_OUTSIDE = "its value, {}, comes from outside the script"
_FEW, _MOST_NOTES = 3, 6


@dataclass
class CommandLine:
    """`found`: options (with _ for -, and without the dashes) -> values: numbers where they look like some,
    True for an option without one, a list for those that take several. `source`: what the text is called.
    `unknown`: options whose values cannot be known -> why. `read`: the text of a file that
    the script writes, or that lies beside it; None where there is none."""

    source: str
    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    read: Callable[[str], str | None] = lambda _: None


@dataclass
class _Trainer:
    command: Command
    launcher: list[str]
    program: str
    words: list[str]

    @property
    def known(self) -> int:
        """How many of its options have a key here."""
        return sum(_has_key(word) for word in self.words)

    @property
    def rank(self) -> tuple[bool, int]:
        return bool(_TRAINS.search(basename(show(self.program)))), self.known

    @property
    def shown(self) -> str:
        return f"line {self.command.line} ({show(basename(self.program))})"


def options(text: str) -> CommandLine:
    """The options of a text, or of the file that it names. InputError where there is no option, or where one
    has too many values."""
    given, text, path = _text_of(text)
    if given.source.endswith((".yaml", ".yml")):
        _take(given, [_FROM_YAML.sub(lambda match: hide(match[0]), word)
                      for word in _of_yaml(text, given.source)])
    else:
        text = _PLACE.sub(lambda match: hide("".join(match[0].split())), text)
        first = next((line.strip() for line in text.splitlines()
                      if line.strip() and not line.lstrip().startswith("#")), "")
        walk = ScriptWalk(path)
        given.read = walk.read
        if first.startswith("-"):
            walk.text(f"OPTIONS=(\n{text}\n)", -1)
            if walk.notes:
                raise InputError(f"{given.source} cannot be read as a command: is a quote or a bracket open?")
            _take(given, elements(walk.words.values.get("OPTIONS")))
        else:
            walk.script(text)
            _of_script(given, walk)
    if not given.found and not given.unknown:
        raise InputError(f"{given.source} has no option: give Megatron-LM's, such as --num-layers 24"
                         + "".join(f"\n{note}" for note in given.notes))
    return given


def _text_of(text: str) -> tuple[CommandLine, str, Path | None]:
    if not text.lstrip().startswith("-") and len(text) < _LONGEST and "\n" not in text:
        path = Path(text)
        if path.suffix in (".json", ".toml"):
            raise InputError(f"--megatron {path}: Megatron-LM's options are a script, a list or a YAML, and "
                             f"no {path.suffix[1:].upper()}; threed convert {path} says what becomes of it")
        if path.is_file() or " " not in text.strip():
            try:
                return CommandLine(str(path)), path.read_text(), path
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise InputError(f"--megatron {path} cannot be read: {why}; "
                                 "give a file, or the options in quotes, as one text") from None
    return CommandLine(TYPED), text, None


def _of_yaml(text: str, source: str) -> list[str]:
    """MODEL_ARGS of a YAML file, or options that are its keys, as words."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    given = values.get("MODEL_ARGS", values) if isinstance(values, dict) else {}
    words: list[str] = []
    stack = list(given.items()) if isinstance(given, dict) else []
    while stack:
        name, value = str(stack[0][0]), stack.pop(0)[1]
        is_option = name.startswith("--") or MEGATRON.row(name) is not None
        if isinstance(value, dict):
            stack = [*value.items(), *stack]
        elif value is not None and value is not False and is_option:
            words.append(f"--{name.lstrip('-')}")
            words += [] if value is True else map(str, value if isinstance(value, list) else [value])
    return words


# ---------------------------------------------------------------- commands


def _of_script(given: CommandLine, walk: ScriptWalk) -> None:
    """Takes the options of the command that trains; else those in variables."""
    given.notes += walk.notes
    trainers = [_Trainer(command, *split(command.words)) for command in walk.commands]
    trainers = [each for each in trainers if each.known >= (1 if each.launcher else _FEW)
                or (each.launcher and each.rank[0])]
    best = max(trainers, key=lambda each: each.rank, default=None)
    variables = {name: _words_of(value) for name, value in walk.words.values.items()
                 if name not in walk.words.read}
    variables = {name: words for name, words in variables.items() if any(map(_has_key, words))}
    if best is None or (not best.rank[0] and best.known < sum(
            _has_key(word) for words in variables.values() for word in words)):
        _of_variables(given, walk)
        return
    if best.rank[0]:  # the first of those that are like it: what pretrains comes before what tunes
        best = next(each for each in trainers if each.rank[0] and 2 * each.known >= best.known)
    others = [each for each in trainers if each.rank[0] == best.rank[0] and each.words != best.words
              and 2 * each.known >= best.known]
    if others:
        mine = dict(_groups(best.words)[0])
        theirs = [dict(_groups(each.words)[0]) for each in others]
        names = [f"--{name.replace('_', '-')}" for name in dict.fromkeys([*mine, *(
            name for each in theirs for name in each)]) if any(each.get(name) != mine.get(name)
                                                               for each in theirs)]
        lines = list(dict.fromkeys(each.shown for each in others))[:_MOST_NOTES]
        given.notes.append(f"{1 + len(others)} commands train: {best.shown} is converted, and not "
                           f"{', '.join(lines)}, which differ in {', '.join(names[:_MOST_NOTES])}; for "
                           "another give its options alone")
    _lost(given, walk, variables)
    for line, condition in sorted(best.command.branches)[:_MOST_NOTES]:
        given.notes.append(f"line {line}: whether {show(condition)} holds is not known: what it sets or runs "
                           "counts")
    known, unknown = ranks([*best.command.before, *best.launcher], walk.words.values)
    _take(given, best.words)
    given.found |= {name: value for name, value in known.items() if name not in given.found}
    given.unknown |= {name: _OUTSIDE.format(value) for name, value in unknown.items()}


def _of_variables(given: CommandLine, walk: ScriptWalk) -> None:
    words = {name: _words_of(value) for name, value in walk.words.values.items()}
    words = {name: each for name, each in words.items() if any(word.startswith("--") for word in each)}
    if words:
        given.notes.append("the script has no command that trains: the options in its variables count, "
                           + ", ".join(words))
    _take(given, [word for each in words.values() for word in each])


def _lost(given: CommandLine, walk: ScriptWalk, variables: dict[str, list[str]]) -> None:
    """Notes about options that look as if they were meant, and that bash does not give to the command."""
    for command in walk.commands:
        if command.words[0].startswith("--") and len(command.words[0]) > 2:
            begin = show(" ".join(command.words[:2]))
            given.notes.append(f"line {command.line}: {begin} begins a command of its own, since the line "
                               "before does not go on (a comment, or no \\ at its end): bash does not pass "
                               "its options on, and they are left out")
    for name, words in variables.items():
        lost = [show(word) for word in words if _has_key(word)]
        given.notes.append(f"no command uses ${name}: {', '.join(lost[:_MOST_NOTES])} in it are left out")


def _words_of(value: Any) -> list[str]:
    if not isinstance(value, str):
        return elements(value)
    try:
        return shlex.split(value) if "--" in value else []
    except ValueError:
        return value.split()


def _has_key(word: str) -> bool:
    name = word.partition("=")[0]
    row = MEGATRON.row(name[2:].replace("-", "_")) if name.startswith("--") else None
    return row is not None and row.key is not None and row.theirs not in _RANKS


# ---------------------------------------------------------------- options


def _take(given: CommandLine, words: list[str]) -> None:
    """Takes the options of a command into `given`."""
    groups, lost = _groups(words)
    for word in lost:
        given.notes.append(f"what {word} holds is not known: options in it are left out")
    for name, values in groups:
        row = MEGATRON.row(name)
        if any(map(is_open, values)) and row is not None and (row.key is not None or is_file(name)):
            given.unknown[name] = _OUTSIDE.format(show(" ".join(values))) + (
                ", and DeepSpeed shards, clips, scales and cuts batches by that file: threed convert FILE, "
                "and take its keys over" if is_file(name) else "")
            continue
        if not values and given.source != TYPED and _needs_value(name):
            given.unknown[name] = "it has no value in the script"
            continue
        value = _value(name, [show(each) for each in values])
        if name in given.found and given.found[name] != value:
            given.notes.append(f"--{name.replace('_', '-')} is given as {given.found[name]} and {value}: the "
                               "last is taken")
        given.unknown.pop(name, None)
        given.found[name] = value
    given.unknown = {name: text for name, text in given.unknown.items() if name not in given.found}


def is_file(name: str) -> bool:
    """Whether an option names a file with more of the settings."""
    return name == "deepspeed_config"


def _groups(words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(option, its values), in order; and words that stand for options which cannot be known."""
    groups: list[tuple[str, list[str]]] = []
    lost: list[str] = []
    for word in _unquoted(words):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            groups.append((name.replace("-", "_"), [value] if equals else []))
            continue
        name, values = groups[-1] if groups else ("", [])
        takes = bool(name) and not is_switch(name) and not _switches(name)
        is_full = bool(values) and not takes_several(name)
        if is_opaque(word) and (not takes or is_full):
            lost.append(show(word))
        elif takes:
            values.append(word)
    return groups, list(dict.fromkeys(lost))


def _switches(name: str) -> bool:
    row = MEGATRON.row(name)
    return row is not None and row.switch is not None


def _unquoted(words: list[str]) -> list[str]:
    """Words, with a quoted text of several options as its words, and without what is left of a line's end."""
    out: list[str] = []
    for word in words:
        if word.startswith("--") and " " in word:
            try:
                out += shlex.split(word)
            except ValueError:
                out += word.split()
        elif word.strip() and word != "\\":
            out.append(word)
    return out


def _value(name: str, words: list[str]) -> Any:
    row, shown = MEGATRON.row(name), f"--{name.replace('_', '-')}"
    if takes_several(name) and row is not None:
        return [_number(word) for word in words]
    if _needs_value(name):
        if not words:
            raise InputError(f"{shown} needs a value")
        if len(words) > 1:
            raise InputError(f"{shown} has more than one value: {' '.join(words)}")
    return _number(" ".join(words)) if words else True


def _needs_value(name: str) -> bool:
    row = MEGATRON.row(name)
    return row is not None and row.key is not None and not _switches(name) and not is_switch(name)


def _number(word: str) -> Any:
    if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'":  # quotes inside a quoted variable
        word = word[1:-1]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
