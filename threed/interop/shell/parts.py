"""Parts of commands: redirections, conditions, and scripts among their words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from os.path import basename
from pathlib import Path

from tree_sitter import Node

from threed.interop.shell.opaque import hide
from threed.interop.shell.words import Branch, Words, elements, of_node

Read = Callable[[str], str | None]
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_OF_READ, _OF_MAPFILE = "adinNptu", "dnOsuCc"  # flags that take a value
_OPERATORS = ("binary_expression", "unary_expression", "parenthesized_expression", "test_command",
              "ternary_expression", "postfix_expression", "negation")


@dataclass
class Command:
    """A command as it would run. `before`: the words of what starts its shell, such as srun's. `branches`:
    what its running, and its words, depend on and cannot be known."""

    words: list[str]
    line: int
    before: list[str]
    branches: set[Branch]


@dataclass
class Streams:
    """What a command reads, and where its output goes. `after`: what a here-document's line goes on with."""

    stdin: str | None
    target: str | None = None
    does_append: bool = False
    after: list[Node] = field(default_factory=list)


@dataclass
class Inner:
    """A text of commands that a command runs; `arguments` None: with those of the script. `before`: the words
    that start its shell."""

    text: str
    arguments: list[str] | None = None
    before: list[str] = field(default_factory=list)


def first_error(node: Node) -> int:
    """The line, from 1, of the first place that the parser cannot read."""
    while not (node.is_error or node.is_missing):
        node = next(child for child in node.children if child.has_error or child.is_missing)
    return node.start_point.row + 1


def redirected(node: Node, words: Words, read: Read, stdin: str | None) -> Streams:
    """The streams of a redirected_statement."""
    streams = Streams(stdin)
    body = node.child_by_field_name("body")
    stack = [child for child in node.children if child != body]
    while stack:
        child = stack.pop(0)
        if child.type == "heredoc_redirect":
            streams.stdin = _heredoc(child, words)
            inner = [each for each in child.named_children if not each.type.startswith("heredoc")]
            streams.after += [each for each in inner if each.type in ("pipeline", "command", "list")]
            stack += [each for each in inner if each.type in ("file_redirect", "herestring_redirect")]
        elif child.type == "herestring_redirect":
            streams.stdin = words.text(child.named_children[0]) + "\n"
        elif child.type == "file_redirect":
            place = words.text(child.named_children[-1]) if child.named_children else ""
            number = next((of_node(each) for each in child.named_children if each.type == "file_descriptor"),
                          "1")
            sign = next((of_node(each) for each in child.children if not each.is_named), "")
            if sign in (">", ">>", ">|", "&>", "&>>") and number == "1":
                streams.target, streams.does_append = place, sign.endswith(">>")
            elif sign == "<":
                inner = child.named_children[-1]
                streams.stdin = words.capture(inner) if inner.type == "process_substitution" else read(place)
    return streams


def _heredoc(node: Node, words: Words) -> str:
    body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
    start = next((of_node(child) for child in node.named_children if child.type == "heredoc_start"), "")
    if body is None:
        return ""
    is_raw = start[:1] in ("'", '"', "\\")
    text = of_node(body) if is_raw else words.span(body, body.start_byte, body.end_byte)
    return re.sub(r"(?m)^\t+", "", text) if any(child.type == "<<-" for child in node.children) else text


def arms(node: Node) -> list[tuple[Node | None, list[Node]]]:
    """(condition, statements) of an if_statement, in order; None for else."""
    out: list[tuple[Node | None, list[Node]]] = []
    for each in (node, *(child for child in node.named_children if child.type in ("elif_clause",
                                                                                  "else_clause"))):
        condition = None if each.type == "else_clause" else each.named_children[0]
        out.append((condition, [child for child in each.named_children if child != condition
                                and child.type not in ("elif_clause", "else_clause")]))
    return out


def cases(node: Node) -> list[tuple[list[Node], list[Node]]]:
    """(patterns, statements) of a case_statement."""
    out: list[tuple[list[Node], list[Node]]] = []
    for item in [child for child in node.named_children if child.type == "case_item"]:
        end = next((child.end_byte for child in item.children if child.type == ")"), item.start_byte)
        out.append(([child for child in item.named_children if child.end_byte <= end],
                    [child for child in item.named_children if child.start_byte >= end]))
    return out


def tokens_of(node: Node, words: Words) -> list[tuple[str, bool]]:
    """The words of a condition, each with whether it is an operator."""
    out: list[tuple[str, bool]] = []
    for child in node.children:
        if child.type in _OPERATORS:
            out += tokens_of(child, words)
        elif child.type in ("[", "]", "[[", "]]"):
            continue
        elif not child.is_named or child.type == "test_operator":
            out.append((of_node(child), True))
        else:
            out.append((words.text(child), False))
    return out


def inner_text(fields: list[str], stdin: str | None, read: Read) -> Inner | None:
    """The script or the commands that a command has among its words: bash -c TEXT, bash FILE, sbatch FILE,
    and TEXT for another machine; None where there are none."""
    shell = next((index for index, word in enumerate(fields) if basename(word) in _SHELLS), None)
    if shell is not None:
        before, rest = fields[:shell], fields[shell + 1:]
        if not rest and shell == 0 and stdin is not None:
            return Inner(stdin)
        while rest and rest[0].startswith("-"):
            flag = rest.pop(0)
            if re.fullmatch(r"-[a-z]*c", flag) and rest:
                return Inner(rest[0], rest[2:], before)
        text = read(rest[0]) if rest else None
        return None if text is None else Inner(text, rest[1:], before)
    if basename(fields[0]) == "sbatch":
        return _submitted(fields, stdin, read)
    text = next((word for word in fields[1:] if re.search(r"\s--\w", word) and (
        ".py" in word or " -m " in word)), None)
    if text is None and fields[0].endswith(".sh") and (found := read(fields[0])) is not None:
        return Inner(found, fields[1:])
    return None if text is None else Inner(text)


def _submitted(fields: list[str], stdin: str | None, read: Read) -> Inner | None:
    for index, word in enumerate(fields):
        name, equals, value = word.partition("=")
        if name == "--wrap":
            return Inner(value if equals else " ".join(fields[index + 1:index + 2]))
    for index, word in enumerate(fields[1:], 1):
        if not word.startswith("-") and (text := read(word)) is not None:
            return Inner(text, fields[index + 1:])
    return None if stdin is None else Inner(stdin)


def take(program: str, given: list[str], text: str | None, words: Words) -> None:
    """Sets what read and mapfile (readarray) take from standard input, `text`."""
    given, names, flags = list(given), [], {}
    valued = _OF_READ if program == "read" else _OF_MAPFILE
    while given:
        word = given.pop(0)
        flag = re.fullmatch(rf"-([a-zA-Z]*?)([{valued}])(.*)", word, re.DOTALL)
        if flag is not None:
            flags[flag[2]] = flag[3] or (given.pop(0) if given else "")
        elif re.fullmatch(r"[A-Za-z_]\w*", word):
            names.append(word)
    end, separators = flags.get("d", "\n")[:1], words.get("IFS")
    separators = " \t\n" if separators is None else "".join(elements(separators))
    if program != "read":
        names, values = (names or ["MAPFILE"])[-1:], [text and text.removesuffix(end).split(end or "\n")]
    elif "a" in flags:
        names, values = [flags["a"]], [text and _split(_line(text, end), separators, 0)]
    else:
        names = names or ["REPLY"]
        values = [] if text is None else _split(_line(text, end), separators, len(names))
    for name, value in zip(names, [*values, *[None if text is None else ""] * len(names)], strict=False):
        words.set(name, hide(f"${name}") if value is None else value or "")


def _line(text: str, end: str) -> str:
    return text.partition(end)[0] if end else text


def _split(line: str, separators: str, most: int) -> list[str]:
    """`most` fields, of which the last has the rest; with 0, as many as there are."""
    blanks = "".join(each for each in separators if each.isspace())
    line = line.strip(blanks) if blanks else line
    if not separators or most == 1:
        return [line]
    between = f"[{re.escape(separators)}]" + ("+" if blanks == separators else "")
    parts = re.split(between, line, maxsplit=max(most - 1, 0))
    return parts[:-1] if not most and parts[-1] == "" else parts


def text_of(path: Path) -> str | None:
    """The text of a file; None where there is none."""
    try:
        return path.read_text() if path.is_file() else None
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def ranges(fields: list[str]) -> list[str]:
    """Fields, with {1..4} spelt out."""
    out: list[str] = []
    for each in fields:
        match = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", each)
        out += map(str, range(int(match[1]), int(match[2]) + 1)) if match else [each]
    return out
