"""Words: variables of a script, and what its words become: fields of a command, or one text.

An expansion makes fragments: a LITERAL text, a text to SPLIT at blanks, and BREAKs between the elements of an
array. `fields` joins them as bash does.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable

from tree_sitter import Node

from threed.interop.shell.opaque import hide, is_opaque, is_open, show
from threed.interop.shell.programs import cut
from threed.interop.shell.sums import computed

LITERAL, SPLIT, BREAK = "literal", "split", "break"
Fragment = tuple[str, str]
Value = str | list[str] | dict[str, str]
Branch = tuple[int, str]  # line and condition of what may or may not run
_HEAD = re.compile(r"\$\{([!#]?)(\w+|[@*?$!#-])(\[[^]]*\])?")
_SIGN = re.compile(r":?[-=+?](?!\d*\})|:[-=+?]|##?|%%?|//?|\^\^?|,,?|:|@")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPE_IN_STRING = re.compile(r'\\([$`"\\\n])')
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "a": "\a", "0": "\0"}
_DOLLARS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
_BEFORE = re.compile(r"^[\s\\]+(?=[$`])")
_EXPANDS = (*_DOLLARS, "string", "raw_string", "ansi_c_string", "translated_string", "concatenation",
            "process_substitution")


def of_node(node: Node) -> str:
    """The text of a node. The parser gives the blanks and line ends before a $ in a string to its node."""
    text = (node.text or b"").decode(errors="replace")
    return _BEFORE.sub("", text) if node.type in _DOLLARS else text


class Words:
    """`capture(node)` gives the output of a command substitution; None where it cannot be known."""

    def __init__(self, capture: Callable[[Node], str | None], script: str):
        self.values: dict[str, Value] = {}
        self.taint: dict[str, frozenset[Branch]] = {}  # of variables that branches of unknown conditions set
        self.positional: list[str] | None = None  # None: what the script is called with
        self.branches: tuple[Branch, ...] = ()  # that are being walked
        self.seen: set[Branch] = set()  # that the variables read since it was cleared depend on
        self.read: set[str] = set()  # names of all variables read
        self.capture, self._script = capture, script

    # ------------------------------------------------------------ variables

    def get(self, name: str) -> Value | None:
        self.read.add(name)
        self.seen |= self.taint.get(name, frozenset())
        return self.values.get(name)

    def set(self, name: str, value: Value, does_append: bool = False, key: str | None = None) -> None:
        old = self.values.get(name)
        if self.branches and isinstance(old, str) and isinstance(value, str) and is_open(value) and not (
                is_open(old) or does_append):
            return  # what a branch may set to something unknown keeps the value that is known
        taint = frozenset(self.branches) | self.seen
        does_keep = does_append or bool(self.branches)
        self.taint[name] = taint | self.taint.get(name, frozenset()) if does_keep else taint
        if key is not None:
            table = dict(old) if isinstance(old, dict) else dict(enumerate_(old))
            table[key] = (table.get(key, "") if does_append else "") + str(value)
            value = table
        elif does_append and isinstance(value, list):
            value = [*elements(old), *value]
        elif does_append and isinstance(value, str):
            first, *others = elements(old) or [""]
            value = [first + value, *others] if isinstance(old, list) else first + value
        self.values[name] = value

    def assign(self, node: Node) -> None:
        """A variable_assignment."""
        target, *_, value = node.children
        does_append = any(child.type == "+=" for child in node.children)
        key = None
        if target.type == "subscript":
            name, key = of_node(target.children[0]), self.span(target, target.children[1].end_byte,
                                                               target.end_byte - 1)
        else:
            name = of_node(target)
        self.seen = set()
        if value.type in ("=", "+="):
            self.set(name, "", does_append, key)
        elif value.type == "array":
            self.set(name, self._array(value, self.values.get(name)), does_append)
        else:
            text = self.text(value)
            is_named = is_opaque(text) and not re.fullmatch(r"\$[A-Za-z_]\w*", show(text))
            self.set(name, hide(f"${name}") if is_named else text, does_append, key)

    def _array(self, node: Node, old: Value | None) -> Value:
        table: dict[str, str] = {}
        fields: list[str] = []
        for child in node.named_children:
            if child.type == "comment":
                continue
            match = re.match(r"\[([^]]*)\]=", self.text(child)) if child.type in ("concatenation",
                                                                                   "word") else None
            if match:
                table[match[1].strip("\"'")] = self.text(child)[match.end():]
            else:
                fields += self.fields(child)
        return table or ({} if isinstance(old, dict) and not fields else fields)

    # ------------------------------------------------------------ words

    def fields(self, *nodes: Node) -> list[str]:
        """The fields of words."""
        out: list[str] = []
        for node in nodes:
            out += _joined(self.fragments(node))
        return out

    def text(self, node: Node) -> str:
        """A word as one text, as on the right of an assignment."""
        return "".join(" " if kind == BREAK else text for kind, text in self.fragments(node))

    def fragments(self, node: Node, is_quoted: bool = False) -> list[Fragment]:
        text = of_node(node)
        match node.type:
            case "string" | "translated_string":
                begin = text.index('"') + 1
                inner = self._within(node, node.start_byte + begin, node.end_byte - 1, True)
                return inner or [(LITERAL, "")] * (len(text) == begin + 1)
            case "raw_string":
                return [(LITERAL, text[1:-1])]
            case "ansi_c_string":
                return [(LITERAL, _ESCAPE.sub(lambda match: _ANSI.get(match[1], match[1]), text[2:-1]))]
            case "concatenation" | "command_name":
                return self._within(node, node.start_byte, node.end_byte, is_quoted)
            case "simple_expansion":
                return self._of_value(self._named(text[1:]), text, is_quoted, text[1:])
            case "expansion":
                return self._expansion(node, is_quoted)
            case "command_substitution":
                if text.startswith("$((") and text.endswith("))"):  # the parser's, in a here-document
                    value = self.computed(self.span(node, node.end_byte - len(text.encode()) + 3,
                                                    node.end_byte - 2))
                    if value is not None:
                        return [(LITERAL, str(value))]
                output = self.capture(node)
                return [(LITERAL if is_quoted else SPLIT, _opaque(text) if output is None
                         else output.rstrip("\n"))]
            case "arithmetic_expansion":
                inner = self.span(node, node.end_byte - len(text.encode()), node.end_byte)
                value = self.computed(inner[3:-2] if inner.startswith("$((") else inner[2:-1])
                return [(LITERAL, _opaque(text) if value is None else str(value))]
            case "process_substitution":
                return [(LITERAL, _opaque(text))]
        return [(LITERAL, text if is_quoted else _ESCAPE.sub(
            lambda match: "" if match[1] == "\n" else match[1], text))]

    def span(self, node: Node, start: int, end: int) -> str:
        """The text between two bytes of a node, with its expansions."""
        return "".join(" " if kind == BREAK else text for kind, text in self._within(node, start, end, True))

    def _within(self, node: Node, start: int, end: int, is_quoted: bool) -> list[Fragment]:
        out: list[Fragment] = []
        for piece in _pieces(node, start, end):
            if isinstance(piece, Node):
                out += self.fragments(piece, is_quoted)
            elif piece:
                text = _ESCAPE_IN_STRING.sub(lambda match: "" if match[1] == "\n" else match[1], piece) if (
                    is_quoted) else _ESCAPE.sub(lambda match: "" if match[1] == "\n" else match[1], piece)
                out.append((LITERAL, text))
        return out

    def computed(self, text: str) -> int | float | None:
        def lookup(name: str) -> str | None:
            value = self.get(name)
            return value if isinstance(value, str) else None

        if step := re.fullmatch(r"\s*(?:(\w+)\s*(\+\+|--)|(\+\+|--)\s*(\w+))\s*", text):
            text = f"{step[1] or step[4]} {(step[2] or step[3])[0]}= 1"
        assigned = re.fullmatch(r"\s*(\w+)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL)
        if assigned and not assigned[1].isdigit():
            sum_ = f"{assigned[1]} {assigned[2]} ({assigned[3]})" if assigned[2] else assigned[3]
            value = computed(sum_, lookup)
            self.set(assigned[1], _opaque(f"$(({text}))") if value is None else str(value))
            return value
        return computed(text, lookup)

    # ------------------------------------------------------------ expansions

    def _named(self, name: str) -> Value | None:
        if name == "0":
            return self._script
        if name in ("@", "*"):
            return self.positional
        if name == "#":
            return None if self.positional is None else str(len(self.positional))
        if name.isdigit():
            number = int(name)
            return None if self.positional is None else (
                self.positional[number - 1] if number <= len(self.positional) else "")
        return self.get(name)

    def _of_value(self, value: Value | None, shown: str, is_quoted: bool, index: str = "") -> list[Fragment]:
        """Fragments of a variable; `index`: @ or * where all elements of an array are meant."""
        kind = LITERAL if is_quoted else SPLIT
        if value is None:
            return [(kind, _opaque(shown))]
        if isinstance(value, str):
            return [(kind, value)]
        if index == "*" and is_quoted:
            return [(LITERAL, " ".join(elements(value)))]
        if index in ("@", "*"):
            return [each for element in elements(value) for each in ((BREAK, ""), (kind, element))][1:]
        first = elements(value)[:1] or [""]
        return [(kind, first[0])]

    def _expansion(self, node: Node, is_quoted: bool) -> list[Fragment]:
        """${...}"""
        text = of_node(node)
        kind = LITERAL if is_quoted else SPLIT
        head = _HEAD.match(text)
        unknown = [(kind, _opaque(text))]
        if head is None:
            return unknown
        mark, name, index = head[1], head[2], (head[3] or "")[1:-1]
        if mark == "#":
            value = self._named(name)
            size = None if value is None or (isinstance(value, str) and is_open(value)) else len(
                elements(value) if index in ("@", "*") else elements(value)[0] if elements(value) else "")
            return unknown if size is None else [(kind, str(size))]
        value = self._named(name)
        if mark == "!" and index in ("@", "*"):
            keys = value if isinstance(value, dict) else None if value is None else map(
                str, range(len(elements(value))))
            return unknown if keys is None else self._of_value(list(keys), text, is_quoted, index)
        if mark == "!":
            value = self._named(value) if isinstance(value, str) and not is_open(value) else None
        if index and index not in ("@", "*"):
            value = self._element(value, index.strip("\"'"))
        all_ = index or (name if name in ("@", "*") else "")
        rest = text[head.end():-1]
        sign = _SIGN.match(rest)
        if not rest or sign is None:
            return self._of_value(value, text, is_quoted, all_)
        start = node.end_byte - len(text[head.end() + len(sign[0]):].encode())
        return self._modified(node, (name, value, all_), sign[0], start, is_quoted)

    def _element(self, value: Value | None, index: str) -> str | None:
        """One element of an array."""
        index = self._plain(index)
        if isinstance(value, dict):
            return value.get(index)
        number = self.computed(index)
        if not isinstance(number, int) or value is None:
            return None
        each = elements(value)
        return each[number] if -len(each) <= number < len(each) else ""

    def _plain(self, text: str) -> str:
        """A text with its simple variables."""
        def one(match: re.Match[str]) -> str:
            value = self.get(match[1])
            return value if isinstance(value, str) else match[0]

        return re.sub(r"\$\{?(\w+)\}?", one, text)

    def _modified(self, node: Node, named: tuple[str, Value | None, str], sign: str, start: int,
                  is_quoted: bool) -> list[Fragment]:
        """${NAME sign word}"""
        name, value, index = named
        kind = LITERAL if is_quoted else SPLIT
        shown = of_node(node)
        last = sign[-1]
        if last in "-=+?" and sign != "@":
            is_missing = value is None or (sign[0] == ":" and not "".join(elements(value)))
            if last == "?":
                return self._of_value(value, f"${name}" if value is None else shown, is_quoted, index)
            if last == "+":
                if value is None or is_opaque("".join(elements(value))):
                    return [(kind, _opaque(shown))]
                return [] if is_missing else self._default(node, start, is_quoted)
            if not is_missing:
                return self._of_value(value, shown, is_quoted, index)
            default = self._default(node, start, is_quoted)
            if last == "=":
                self.set(name, "".join(text for _, text in default))
            return default
        rest = self.span(node, start, node.end_byte - 1)
        if value is None or any(map(is_open, elements(value))):
            return [(kind, _opaque(shown))]
        if sign == ":":
            return self._sliced(value, rest, is_quoted, index, shown)
        changed = [_changed(each, sign, rest) for each in elements(value)]
        result = changed if index in ("@", "*") else (changed or [""])[0]
        return self._of_value(result, shown, is_quoted, index)

    def _default(self, node: Node, start: int, is_quoted: bool) -> list[Fragment]:
        inner = self._within(node, start, node.end_byte - 1, is_quoted)
        has_quotes = any(isinstance(piece, Node) and "string" in piece.type
                         for piece in _pieces(node, start, node.end_byte - 1))
        return [(SPLIT if kind == LITERAL and not is_quoted and not has_quotes else kind, text)
                for kind, text in inner] or [(LITERAL if is_quoted else SPLIT, "")]

    def _sliced(self, value: Value, rest: str, is_quoted: bool, index: str, shown: str) -> list[Fragment]:
        numbers = [self.computed(part) for part in rest.split(":")]
        if not all(isinstance(number, int) for number in numbers):
            return [(LITERAL if is_quoted else SPLIT, _opaque(shown))]
        first, *count = [int(number or 0) for number in numbers]
        whole = elements(value) if index in ("@", "*") else elements(value)[0] if elements(value) else ""
        if index in ("@", "*") and value is self.positional:
            first = max(first - 1, 0)
        part = whole[first:]
        part = part[:count[0]] if count else part
        return self._of_value(part, shown, is_quoted, index)


def elements(value: Value | None) -> list[str]:
    """The elements of a variable, of which a scalar is one."""
    return [] if value is None else [value] if isinstance(value, str) else (
        list(value.values()) if isinstance(value, dict) else list(value))


def enumerate_(value: Value | None) -> Iterable[tuple[str, str]]:
    return ((str(index), each) for index, each in enumerate(elements(value)))


def _pieces(node: Node, start: int, end: int) -> list[str | Node]:
    """What lies between two bytes of a node: texts, and children that expand."""
    source, offset = node.text or b"", node.start_byte
    out: list[str | Node] = []
    at = start
    for child in node.children:
        if child.start_byte < at or child.end_byte > end or child.end_byte <= child.start_byte:
            continue
        if child.type in _EXPANDS:
            begin = child.end_byte - len(of_node(child).encode())
            out += [source[at - offset:begin - offset].decode(errors="replace"), child]
            at = child.end_byte
        elif child.child_count and child.type not in ("string_content",):
            inner = _pieces(child, child.start_byte, child.end_byte)
            out += [source[at - offset:child.start_byte - offset].decode(errors="replace"), *inner]
            at = child.end_byte
    return [*out, source[at - offset:end - offset].decode(errors="replace")]


def _joined(fragments: list[Fragment]) -> list[str]:
    out: list[str] = []
    current: str | None = None
    for kind, text in fragments:
        if kind == BREAK:
            out += [] if current is None else [current]
            current = None
        elif kind == LITERAL:
            current = (current or "") + text
        elif text:
            parts = text.split()
            if text[0].isspace() and current is not None:
                out.append(current)
                current = None
            for index, part in enumerate(parts):
                if index:
                    out += [] if current is None else [current]
                    current = None
                current = (current or "") + part
            if text[-1].isspace() and current is not None:
                out.append(current)
                current = None
    return out if current is None else [*out, current]


def _changed(value: str, sign: str, rest: str) -> str:
    if sign[0] in "#%":
        return cut(value, sign, rest)
    if sign[0] == "^":
        return value.upper() if sign == "^^" else value[:1].upper() + value[1:]
    if sign[0] == ",":
        return value.lower() if sign == ",," else value[:1].lower() + value[1:]
    if sign[0] == "/":
        pattern, _, new = rest.partition("/")
        regex = fnmatch.translate(pattern).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
        return re.sub(regex, lambda _: new, value, count=0 if sign == "//" else 1)
    return value


def fits(value: str, pattern: str) -> bool:
    """Whether a value has the form of a pattern of case."""
    return fnmatch.fnmatchcase(value, pattern)


def _opaque(text: str) -> str:
    return hide(" ".join(text.split()))
