"""Programs: the output of those that scripts compute with. (words, standard input) -> standard output; None
where it cannot be known."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from threed.interop.shell.opaque import is_open
from threed.interop.shell.sums import computed

Read = Callable[[str], str | None]
_PRINT = re.compile(r"\s*(?:(?:import math|from math import [\w, ]+)\s*[;\n]\s*)?print\((.*)\)\s*")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def output(words: list[str], stdin: str | None, read: Read) -> str | None:
    """What a program prints. `read` gives the text of a file; None where there is none."""
    name, rest = os.path.basename(words[0]), words[1:]
    program = _PROGRAMS.get(name)
    return None if program is None else program(rest, stdin, read)


def _escaped(text: str) -> str:
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match[0]], text)


def _echo(words: list[str], _: str | None, __: Read) -> str:
    options = []
    while words and re.fullmatch(r"-[neE]+", words[0]):
        options.append(words.pop(0))
    text = " ".join(words)
    return (_escaped(text) if any("e" in each for each in options) else text) + (
        "" if any("n" in each for each in options) else "\n")


def _printf(words: list[str], _: str | None, __: Read) -> str | None:
    words = words[2:] if words[:1] == ["-v"] else words
    if not words:
        return None
    form, values, out = _escaped(words[0]), words[1:], ""
    while True:
        left = len(values)
        for part in re.split(r"(%%|%[-+ 0#]*\d*(?:\.\d+)?[sdifgeq])", form):
            if part == "%%":
                out += "%"
            elif part.startswith("%") and len(part) > 1:
                value = values.pop(0) if values else ""
                if part[-1] in "sq" or is_open(value):
                    out += value
                else:
                    number = computed(value or "0", is_whole=False)
                    if number is None:
                        return None
                    out += part % (int(number) if part[-1] in "di" else number)
            else:
                out += part
        if not values or len(values) == left:
            return out


def _cat(words: list[str], stdin: str | None, read: Read) -> str | None:
    files = [word for word in words if not word.startswith("-") or word == "-"]
    texts = [stdin if word == "-" else read(word) for word in files] or [stdin]
    return None if None in texts else "".join(text for text in texts if text is not None)


def _expr(words: list[str], _: str | None, __: Read) -> str | None:
    value = computed(" ".join(words))
    return None if value is None else f"{value}\n"


def _bc(words: list[str], stdin: str | None, _: Read) -> str | None:
    lines = [line for line in re.split(r"[;\n]", stdin or "") if line.strip()]
    scale = next((int(match[1]) for line in lines if (match := re.fullmatch(r"\s*scale\s*=\s*(\d+)\s*",
                                                                              line))),
                 20 if "-l" in words else 0)
    sums = [line for line in lines if "=" not in line]
    value = computed(sums[0].replace("^", "**"), is_whole=scale == 0) if len(sums) == 1 else None
    return None if value is None else (f"{value}\n" if isinstance(value, int) else f"{value:.{scale}f}\n")


def _sed(words: list[str], stdin: str | None, read: Read) -> str | None:
    """Only s/A/B/ with plain options."""
    edits, files = [], []
    while words:
        word = words.pop(0)
        if word in ("-e", "--expression") and words:
            edits.append(words.pop(0))
        elif word in ("-E", "-r"):
            continue
        elif word.startswith("-"):
            return None
        elif not edits:
            edits.append(word)
        else:
            files.append(word)
    text = _cat(files, stdin, read)
    for edit in [each.strip() for several in edits for each in re.split(r";\s*(?=s\W)", several)]:
        is_plain = len(edit) > len("s//") and edit[0] == "s"
        parts = re.split(rf"(?<!\\){re.escape(edit[1])}", edit[2:]) if is_plain else []
        if text is None or len(parts) != 3 or set(parts[2]) - set("gI"):
            return None
        new, count = parts[1].replace("\\" + edit[1], edit[1]), 0 if "g" in parts[2] else 1
        try:
            text = "\n".join(re.sub(parts[0], lambda _: new, line, count=count)  # noqa: B023
                             for line in text.split("\n"))
        except re.error:
            return None
    return text


def _basename(words: list[str], _: str | None, __: Read) -> str | None:
    if not words:
        return None
    name = os.path.basename(words[0].rstrip("/"))
    return (name.removesuffix(words[1]) if len(words) > 1 else name) + "\n"


def _dirname(words: list[str], _: str | None, __: Read) -> str | None:
    return f"{os.path.dirname(words[0]) or '.'}\n" if words else None


def _path(words: list[str], _: str | None, __: Read) -> str | None:
    paths = [word for word in words if not word.startswith("-")]
    return f"{paths[0]}\n" if paths else None


def _seq(words: list[str], _: str | None, __: Read) -> str | None:
    try:
        first, step, last = {1: (1, 1, int(words[0])), 2: (int(words[0]), 1, int(words[-1])),
                             3: tuple(map(int, words[:3]))}[len(words)]
        return "".join(f"{each}\n" for each in range(first, last + 1, step))
    except (IndexError, KeyError, ValueError):
        return None


def _python(words: list[str], _: str | None, __: Read) -> str | None:
    """python -c "print(4 * 1024)"."""
    match = _PRINT.fullmatch(words[1]) if words[:1] == ["-c"] and len(words) == 2 else None
    value = computed(match[1], is_whole=False) if match else None
    return None if value is None else f"{value}\n"


def _tr(words: list[str], stdin: str | None, _: Read) -> str | None:
    if stdin is None or not words:
        return None
    if words[0] == "-d" and len(words) == 2:
        return "".join(each for each in stdin if each not in _escaped(words[1]))
    pair = [{"[:upper:]": "A-Z", "[:lower:]": "a-z"}.get(word, _escaped(word)) for word in words]
    if pair == ["A-Z", "a-z"]:
        return stdin.lower()
    if pair == ["a-z", "A-Z"]:
        return stdin.upper()
    if len(pair) == 2 and len(pair[0]) == len(pair[1]) and "-" not in pair[0]:
        return stdin.translate(str.maketrans(*pair))
    return None


def _grep(words: list[str], stdin: str | None, read: Read) -> str | None:
    """Lines that have a pattern, or with -v those that have not; no other option than -E, -F, -i and -h."""
    flags = ""
    while words and words[0].startswith("-"):
        flags += words.pop(0)[1:]
    if not words or set(flags) - set("vEFih"):
        return None
    pattern, *files = words
    if "F" in flags:
        pattern = re.escape(pattern)
    elif "E" not in flags and re.search(r"[\\+?|(){}]", pattern):
        return None
    text = _cat(files, stdin, read)
    try:
        form = re.compile(pattern, re.IGNORECASE if "i" in flags else 0)
    except re.error:
        return None
    return None if text is None else "".join(f"{line}\n" for line in text.splitlines() if (
        form.search(line) is None) == ("v" in flags))


def _xargs(words: list[str], stdin: str | None, _: Read) -> str | None:
    return None if stdin is None or words else " ".join(stdin.split()) + "\n"


_PROGRAMS: dict[str, Callable[[list[str], str | None, Read], str | None]] = {
    "echo": _echo, "printf": _printf, "cat": _cat, "tee": lambda words, stdin, read: stdin,
    "envsubst": lambda words, stdin, read: stdin, "expr": _expr, "bc": _bc, "sed": _sed, "tr": _tr,
    "basename": _basename, "dirname": _dirname, "realpath": _path, "readlink": _path, "seq": _seq,
    "pwd": lambda words, stdin, read: ".\n", "python": _python, "python3": _python, "grep": _grep,
    "egrep": lambda words, stdin, read: _grep(["-E", *words], stdin, read), "xargs": _xargs}


def is_pure(word: str) -> bool:
    """Whether a program computes or prints, and starts nothing."""
    return os.path.basename(word) in _PROGRAMS and not os.path.basename(word).startswith("python")


def cut(value: str, sign: str, pattern: str) -> str:
    """${value#pattern} and its kin, by the sign: # ## % %%."""
    ends = range(len(value) + 1)
    if sign.startswith("#"):
        fits = [end for end in ends if fnmatchcase(value[:end], pattern)]
        return value[(max if sign == "##" else min)(fits):] if fits else value
    fits = [start for start in ends if fnmatchcase(value[start:], pattern)]
    return value[:(min if sign == "%%" else max)(fits)] if fits else value
