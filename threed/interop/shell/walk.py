"""Walk: through the statements of a script, to the commands that it would run.

A condition that is known chooses its branch. Where it cannot be known, all branches are walked in turn, and
what they set is remembered to depend on it. A loop over unknown words is walked once; one over the script's
own arguments is not, since they are not known. `exit` and `return` end nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from os.path import basename
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from threed.interop.shell import slurm
from threed.interop.shell.opaque import hide, is_open, show
from threed.interop.shell.parts import (
    Command,
    Streams,
    arms,
    cases,
    first_error,
    inner_text,
    ranges,
    redirected,
    take,
    text_of,
    tokens_of,
)
from threed.interop.shell.programs import is_pure, output
from threed.interop.shell.sums import holds
from threed.interop.shell.words import Words, fits, of_node

_BASH = Language(tree_sitter_bash.language())
_DEEPEST, _MOST_TURNS = 12, 16
_ARGUMENTS = re.compile(r"\$\{?[#@*1-9]|getopts?")
_REMARK = re.compile(r"`\s*#[^`\n]*`")  # `# a remark`, the way to put one between lines that go on
_ASKS = re.compile(r"\[|(test|grep|egrep|command|which|type|hash|cmp|diff|pgrep|nvidia-smi)\b")
_READS = ("read", "mapfile", "readarray")
_PREFIXES = ("time", "command", "exec", "builtin", "nohup")


class ScriptWalk:
    """A walk of one script, and of what it sources. `path` is None for a text that is no file."""

    def __init__(self, path: Path | None = None):
        self.words = Words(self._capture, str(path or "bash"))
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self.files: dict[str, str] = {}  # that the script writes
        self.sourced: set[Path] = set()
        self._functions: dict[str, Node] = {}
        self._called: set[str] = set()
        self._folder = path.parent if path is not None else Path()
        self._depth, self._line = 0, 0  # _line: of the outermost script, while an inner text is walked
        self._before: list[str] = []
        self._stdin: str | None = None
        self._stdout: list[str | None] | None = None

    # ------------------------------------------------------------ texts

    def script(self, text: str) -> None:
        """The whole script; then the functions that nothing called, if no command came of the rest."""
        for name, value in slurm.variables(text).items():
            self.words.values[name] = value
        self.text(text)
        if not any(sum(word.startswith("--") for word in command.words) > 1 for command in self.commands):
            for name in [name for name in self._functions if name not in self._called]:
                self._statement(self._functions[name])

    def text(self, text: str, line: int = 0) -> bool | None:
        """A text of commands, which begins after `line` lines of the script."""
        text = re.sub(r"\\\s*\Z", "\n", text.replace("\r\n", "\n"))  # a last line that goes on is no error
        text = _REMARK.sub(lambda match: " " * len(match[0]), text)
        tree = Parser(_BASH).parse(text.encode())
        if tree.root_node.has_error:
            number = line + first_error(tree.root_node)
            self.notes.append(f"line {number} cannot be read as bash: what it sets or runs may be left out")
        return self._inside(lambda: self._block(tree.root_node), line)

    def _inside(self, walk: Callable[[], bool | None], line: int | None = None) -> bool | None:
        before = self._line
        self._depth, self._line = self._depth + 1, before if line is None else line
        try:
            return walk() if self._depth < _DEEPEST else None
        finally:
            self._depth -= 1
            self._line = before

    def read(self, name: str) -> str | None:
        """The text of a file that the script writes, or that lies beside it."""
        if is_open(name):
            return None
        if name in self.files:
            return self.files[name]
        return next((text for place in (self._folder / name, Path(name))
                     if (text := text_of(place)) is not None), None)

    # ------------------------------------------------------------ statements

    def _block(self, node: Node) -> bool | None:
        return self._all(node.named_children)

    def _statement(self, node: Node) -> bool | None:
        """Walks a statement; whether it succeeds, where that is known."""
        match node.type:
            case "variable_assignment":
                self.words.assign(node)
                return True
            case "variable_assignments" | "declaration_command":
                return self._declare(node)
            case "command":
                return self._command(node)
            case "test_command":
                return self._test(node)
            case "redirected_statement":
                return self._redirected(node)
            case "pipeline":
                return self._pipeline(node)
            case "list":
                return self._list(node)
            case "negated_command":
                result = self._block(node)
                return None if result is None else not result
            case "if_statement":
                return self._if(node)
            case "case_statement":
                return self._case(node)
            case "for_statement":
                return self._for(node)
            case "while_statement" | "c_style_for_statement":
                return self._while(node)
            case "function_definition":
                name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
                if name is not None and body is not None:
                    self._functions[of_node(name)] = body
                return True
            case "compound_statement" if of_node(node).startswith("(("):
                return self._sum(node)
            case "subshell":
                kept = dict(self.words.values)
                result = self._block(node)
                self.words.values = kept
                return result
            case "unset_command":
                for child in node.named_children:
                    self.words.values.pop(of_node(child), None)
                return True
            case "comment" | "word" | "variable_name" | "number":
                return None
        return self._block(node)

    def _declare(self, node: Node) -> bool:
        is_table = False
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.words.assign(child)
            elif child.type == "word" and of_node(child).startswith("-"):
                is_table = "A" in of_node(child)
            elif child.type == "variable_name" and is_table:
                self.words.values.setdefault(of_node(child), {})
        return True

    def _maybe(self, node: Node, condition: str, walk: Callable[[], bool | None]) -> None:
        """What may or may not run."""
        branch = (self._line or node.start_point.row + 1, " ".join(condition.split()))
        before = self.words.branches
        self.words.branches = (*before, branch)
        try:
            walk()
        finally:
            self.words.branches = before

    def _list(self, node: Node) -> bool | None:
        left, sign, right = node.children[0], of_node(node.children[1]), node.children[-1]
        first = self._outcome(left)
        if first is None:
            return self._maybe(left, of_node(left), lambda: self._statement(right))
        return self._outcome(right) if first == (sign == "&&") else first

    def _outcome(self, node: Node) -> bool | None:
        """Whether a statement succeeds: a program that is no question is taken to."""
        result = self._statement(node)
        asks = node.type not in ("command", "redirected_statement", "pipeline") or _ASKS.match(of_node(node))
        return result if result is not None or asks else True

    def _all(self, nodes: list[Node]) -> bool | None:
        result: bool | None = True
        for node in nodes:
            result = self._statement(node)
        return result

    def _if(self, node: Node) -> None:
        is_known, shown = True, ""
        for condition, body in arms(node):
            verdict = True if condition is None else self._statement(condition)
            shown = of_node(condition) if condition is not None else f"not {shown}"
            if verdict is False:
                continue
            if is_known and verdict:
                self._all(body)
                return
            self._maybe(node, shown, lambda b=body: self._all(b))
            if verdict:
                return
            is_known = False

    def _case(self, node: Node) -> None:
        subject = node.named_children[0]
        value = self.words.text(subject)
        for patterns, body in cases(node):
            if is_open(value):
                shown = f"{of_node(subject)} is {'|'.join(map(of_node, patterns))}"
                self._maybe(node, shown, lambda b=body: self._all(b))
            elif any(fits(value, self.words.text(pattern)) for pattern in patterns):
                self._all(body)
                return

    def _for(self, node: Node) -> bool | None:
        name = of_node(node.named_children[0])
        body = node.child_by_field_name("body")
        values = [each for child in node.named_children[1:] if child != body and child.type != "comment"
                  for each in ranges(self.words.fields(child))]
        if body is None:
            return None
        if not values or len(values) > _MOST_TURNS:
            values = values[:1] or [hide(f"${name}")]
        for value in values:
            self.words.seen = set()
            self.words.set(name, value)
            self._block(body)
        return None

    def _while(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body") or node.children[-1]
        if node.type == "c_style_for_statement":
            return self._block(body)
        condition = node.named_children[0]
        if _ARGUMENTS.search(of_node(condition)) and self.words.positional is None:
            return None
        if self._statement(condition) is not (node.children[0].type == "until"):
            self._block(body)
        return None

    # ------------------------------------------------------------ conditions

    def _test(self, node: Node) -> bool | None:
        text = of_node(node)
        if text.startswith("(("):
            return self._sum(node)
        return holds(tokens_of(node, self.words), self._exists, text.startswith("[["))

    def _sum(self, node: Node) -> bool | None:
        value = self.words.computed(self.words.span(node, node.start_byte, node.end_byte)[2:-2])
        return None if value is None else bool(value)

    def _exists(self, name: str) -> bool | None:
        return True if name in self.files else None

    # ------------------------------------------------------------ output and input

    def _capture(self, node: Node) -> str | None:
        """What the commands of a node print."""
        text = of_node(node)
        if re.fullmatch(r"\$\(\s*<\s*\S+\s*\)", text):
            return self.read(text[2:-1].strip(" <\"'"))
        return self._printed(lambda: self._block(node), self._stdin)

    def _printed(self, walk: Callable[[], bool | None], stdin: str | None) -> str | None:
        before = self._stdin, self._stdout
        lines: list[str | None] = []
        self._stdin, self._stdout = stdin, lines
        try:
            self._inside(walk)
        finally:
            self._stdin, self._stdout = before
        return None if None in lines or not lines else "".join(line for line in lines if line is not None)

    def _pipeline(self, node: Node) -> bool | None:
        *first, last = [child for child in node.named_children if child.type != "comment"]
        text = self._stdin
        for child in first:
            text = self._printed(lambda c=child: self._statement(c), text)
        before, self._stdin = self._stdin, text
        result = self._statement(last)
        self._stdin = before
        return result if not first else None

    def _redirected(self, node: Node) -> bool | None:
        streams = redirected(node, self.words, self.read, self._stdin)
        return self._with_streams(node.child_by_field_name("body"), streams)

    def _with_streams(self, body: Node | None, streams: Streams) -> bool | None:
        results: list[bool | None] = []

        def walk() -> bool | None:
            results.append(None if body is None else self._statement(body))
            return results[-1]

        name = streams.target
        if name is None and not streams.after:
            before, self._stdin = self._stdin, streams.stdin
            result = walk()
            self._stdin = before
            return result
        text = self._printed(walk, streams.stdin)
        for each in streams.after:
            text = self._printed(lambda e=each: self._statement(e), text)
        if name is not None and text is not None:
            self.files[name] = (self.files.get(name, "") if streams.does_append else "") + text
        return results[0]

    # ------------------------------------------------------------ commands

    def _command(self, node: Node) -> bool | None:
        values = self.words.values
        given = [child for child in node.named_children if child.type == "variable_assignment"]
        kept = {name: values.get(name) for name in (of_node(child).partition("=")[0] for child in given)}
        for child in given:
            self.words.assign(child)
        self.words.seen = set()
        nodes = [child for child in node.named_children if child.type not in (
            "variable_assignment", "comment", "file_redirect", "herestring_redirect", "heredoc_redirect")]
        strings = [child for child in node.named_children if child.type == "herestring_redirect"]
        before = self._stdin
        if strings:
            self._stdin = self.words.text(strings[0].named_children[0]) + "\n"
        fields = self.words.fields(*nodes)
        result = self._run(fields, node) if fields else True
        self._stdin = before
        for name, value in kept.items():
            values.pop(name, None) if value is None else values.update({name: value})
        return result

    def _run(self, fields: list[str], node: Node) -> bool | None:
        while fields[1:] and fields[0] in _PREFIXES:
            fields = fields[1:]
        name, rest = basename(fields[0]), fields[1:]
        line = self._line or node.start_point.row + 1
        if name in (":", "true", "false"):
            return name != "false"
        if name in ("test", "["):
            tokens = [(word, word in ("!", "(", ")", "=", "==", "!=")
                       or (word.startswith("-") and not word[1:].isdigit())) for word in rest if word != "]"]
            return holds(tokens, self._exists, False)
        if name in self._functions:
            self._called.add(name)
            return self._with_arguments(rest, lambda: self._statement(self._functions[name]))
        if name in ("set", "shift", "let", *_READS, "eval", "source", "."):
            return self._builtin(name, rest, line)
        if is_pure(name):
            text = output(fields, self._stdin, self.read)
            if name == "printf" and rest[:1] == ["-v"]:
                self.words.set(rest[1], hide(f"${rest[1]}") if text is None else text)
                return None
            if name == "tee" and text is not None:
                self.files.update(dict.fromkeys([word for word in rest if word[:1] != "-"], text))
            self._prints(text)
            return None
        if self._walk_inner(fields, line):
            return None
        self._prints(output(fields, self._stdin, self.read) if name != "cd" else "")
        if name not in ("exit", "return", "cd", "export", "trap", "wait", "break", "continue"):
            self.commands.append(Command(fields, line, list(self._before),
                                         {*self.words.seen, *self.words.branches}))
        return None

    def _prints(self, text: str | None) -> None:
        if self._stdout is not None:
            self._stdout.append(text)

    def _with_arguments(self, arguments: list[str], walk: Callable[[], bool | None]) -> bool | None:
        before, self.words.positional = self.words.positional, list(arguments)
        try:
            return self._inside(walk)
        finally:
            self.words.positional = before

    def _builtin(self, name: str, rest: list[str], line: int) -> bool | None:
        if name == "set" and "--" in rest:
            self.words.positional = rest[rest.index("--") + 1:]
        elif name == "shift" and self.words.positional is not None:
            count = int(rest[0]) if rest and rest[0].isdigit() else 1
            self.words.positional = self.words.positional[count:]
        elif name == "let":
            for each in rest:
                self.words.computed(each)
        elif name in _READS:
            take(name, rest, self._stdin, self.words)
        elif name == "eval":
            return self.text(" ".join(rest), line)
        elif name in ("source", ".") and rest:
            self._source(rest[0], line)
        return True

    def _source(self, name: str, line: int) -> None:
        text = self.read(name)
        if text is None and re.search(r"(^|/)(\.bashrc|\.profile|activate|conda\.sh|init\.sh|setvars\.sh|"
                                      r"modules\.sh|bash)$", name):
            return
        if text is None:
            self.notes.append(f"line {line}: {show(name)} is not there, so what it sets is not known")
            return
        self._inside(lambda: self.text(text, line))

    def _walk_inner(self, fields: list[str], line: int) -> bool:
        """Walks the script or the commands that a command has among its words; whether there were any."""
        inner = inner_text(fields, self._stdin, self.read)
        if inner is None:
            return False
        before, self._before = self._before, [*self._before, *inner.before]
        run = lambda: self.text(inner.text, line)  # noqa: E731
        run() if inner.arguments is None else self._with_arguments(inner.arguments, run)
        self._before = before
        return True
