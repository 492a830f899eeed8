"""Options in a text: a command line of Megatron-LM, or a shell script that holds one.

A script is read, never run: its arrays, quotes, comments and line ends are understood, variables that it sets
itself (NAME=value, NAME=${1:-default}, NAME=$((4 * N)), NAME=" --option value") and, in a YAML file of
Megatron-LM's tests, MODEL_ARGS. Branches are not: the options of all of them count.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from threed.doors.megatron import MEGATRON
from threed.errors import InputError

TYPED = "the options given"
_SET = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)=(?!\()(.*)", re.DOTALL)
_USE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d)(?::?-([^}]*))?\}|([A-Za-z_]\w*|\d))")
_ARRAY = re.compile(r"\w+\+?=\(")
_COMMAND = re.compile(r"\$\((?!\()[^()\n]*\)|`[^`\n]*`")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.floordiv, ast.Mod: operator.mod}
_ENDS = {")", ";", "fi", "else", "then", "done", "|", "&&", "||", "\\", "&"}
_MARKS = ("=(", "[[", "[@]", "[*]")  # in words of a shell that are no value of an option
_MANY = ("data_path", "recompute_modules", "profile_ranks")
_LONGEST = 4096  # characters of a path


def options(text: str) -> tuple[dict[str, Any], str, list[str], dict[str, str]]:
    """Options (with _ for -, and without the dashes) -> values, of a text or of the file that it names; what
    the text is called; notes; and options whose values cannot be known -> what stands for them.

    Values are numbers where they look like some, True for an option without one, and a list for those that
    take several. InputError where there is no option, or where one has too many values.
    """
    source = TYPED
    if not text.lstrip().startswith("-") and len(text) < _LONGEST and "\n" not in text:
        path = Path(text)
        if path.is_file() or " " not in text.strip():
            try:
                text, source = path.read_text(), str(path)
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise InputError(f"--megatron {path} cannot be read: {why}; "
                                 "give a file, or the options in quotes, as one text") from None
    if source.endswith((".yaml", ".yml")):
        text = _of_yaml(text, source)
    text = _COMMAND.sub("$_", text.replace("\\\n", " "))  # what a command prints comes from outside
    text = _SUM.sub(lambda match: match[0].replace(" ", ""), text)
    try:
        tokens = _resolved(shlex.split(text, comments=True))
    except ValueError as error:
        raise InputError(f"{source} cannot be read as a command: {error}") from None
    found: dict[str, Any] = {}
    notes, unknown = [], {}
    for name, words in _groups(tokens):
        row, open_ = MEGATRON.row(name), any("$" in word or word.startswith("<") for word in words)
        if open_ and row is not None and row.key is not None:
            unknown[name] = " ".join(words)
            continue
        value = _value(name, words)
        if name in found and found[name] != value:
            notes.append(f"--{name.replace('_', '-')} is given as {found[name]} and {value}: the last "
                         "is taken")
        unknown.pop(name, None)
        found[name] = value
    if not found:
        raise InputError(f"{source} has no option: give Megatron-LM's, such as --num-layers 24")
    return found, source, notes, {name: text for name, text in unknown.items() if name not in found}


def _of_yaml(text: str, source: str) -> str:
    """MODEL_ARGS of a YAML file, as a command."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    given = values.get("MODEL_ARGS", values) if isinstance(values, dict) else {}
    words = [] if not isinstance(given, dict) else [
        [name] if value is True else [name, str(value)] for name, value in given.items()
        if str(name).startswith("--") and value is not False]
    return shlex.join(word for each in words for word in each)


def _resolved(tokens: list[str]) -> list[str]:
    """The tokens, with the values of variables that the text sets; a quoted option and its value are two.
    Options in a variable count where it is set, and nowhere else."""
    values: dict[str, str] = {}
    out: list[str] = []
    for token in tokens:
        begins = _ARRAY.match(token)
        if begins:  # NAME=(--option
            out.append(begins[0])
        filled = _fill(token[begins.end():] if begins else token, values)
        is_set = _SET.fullmatch(filled)
        if is_set and not filled.startswith("-"):
            words = shlex.split(is_set[2]) if "--" in is_set[2] else []
            holds = any(word.startswith("--") for word in words)
            values[is_set[1]] = "" if holds else is_set[2]
            out += [";", *words, ";"] if holds else []
        elif filled.startswith("--") and " " in filled:
            out += shlex.split(filled)
        else:
            out.append(filled)
    return out


def _fill(token: str, values: dict[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in values and "$" not in values[name]:
            return values[name]
        return match[2] if match[2] is not None else match[0]

    return _SUM.sub(lambda match: _computed(match, values), _USE.sub(one, token))


def _computed(match: re.Match[str], values: dict[str, str]) -> str:
    """What $((...)) is, of whole numbers; as it stands where it cannot be known."""
    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return int(values[node.id])
        return int(node.value)  # pyright: ignore

    try:
        return str(value(ast.parse(match[1], mode="eval").body))
    except (SyntaxError, KeyError, AttributeError, TypeError, ValueError, ZeroDivisionError):
        return match[0]


def _groups(tokens: list[str]) -> list[tuple[str, list[str]]]:
    """(option, words after it), in order."""
    groups: list[tuple[str, list[str]]] = []
    is_open = False
    for token in filter(str.strip, tokens):
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.rstrip(")").partition("=")
            groups.append((name[2:].replace("-", "_"), [value] if equals else []))
            is_open = not token.endswith(")")
        elif token in _ENDS or token.endswith(".py") or any(mark in token for mark in _MARKS):
            is_open = False
        elif is_open and groups:
            groups[-1][1].append(token.rstrip(");") if token.endswith((");", ")", ";")) else token)
            is_open = not token.endswith((")", ";"))
    return groups


def _value(name: str, words: list[str]) -> Any:
    row = MEGATRON.row(name)
    if name in _MANY:
        return [_number(word) for word in words]
    if row is not None and row.key is not None and row.switch is None and not words:
        raise InputError(f"--{name.replace('_', '-')} needs a value")
    if row is not None and row.key is not None and len(words) > 1:
        raise InputError(f"--{name.replace('_', '-')} has more than one value: {' '.join(words)}")
    return _number(" ".join(words)) if words else True


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
