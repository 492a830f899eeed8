"""Walk: through the statements of a script, to the commands that it would run.

A condition that is known chooses its branch. Where it cannot be known, all branches are walked in turn, and
what they set is remembered to depend on it. A loop over unknown words is walked once; one over the script's
own arguments is not, since they are not known. `exit` and `return` end nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from os.path import basename
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from threed.doors.shell.opaque import hide, is_open
from threed.doors.shell.programs import is_pure, output
from threed.doors.shell.sums import holds
from threed.doors.shell.words import Branch, Words, fits, of_node

_BASH = Language(tree_sitter_bash.language())
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_DEEPEST, _MOST_TURNS = 12, 16
_OPERATORS = ("binary_expression", "unary_expression", "parenthesized_expression", "test_command",
              "ternary_expression", "postfix_expression", "negation")
_ARGUMENTS = re.compile(r"\$\{?[#@*1-9]|getopts?")
_PREFIXES = ("time", "command", "exec", "builtin", "nohup")


@dataclass
class Command:
    """A command as it would run. `before`: the words of what starts its shell, such as srun's. `branches`:
    what its running, and its words, depend on and cannot be known."""

    words: list[str]
    line: int
    before: list[str]
    branches: set[Branch]


class Walk:
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
        for name, value in _of_header(text).items():
            self.words.values[name] = value
        self.text(text)
        if not any(_could_train(command) for command in self.commands):
            for name in [name for name in self._functions if name not in self._called]:
                self._statement(self._functions[name])

    def text(self, text: str, line: int = 0) -> bool | None:
        """A text of commands, which begins after `line` lines of the script."""
        tree = Parser(_BASH).parse(text.encode())
        if tree.root_node.has_error:
            self._say_errors(tree.root_node, line)
        return self._inside(lambda: self._block(tree.root_node), line)

    def _inside(self, walk: Callable[[], bool | None], line: int | None = None) -> bool | None:
        if self._depth >= _DEEPEST:
            return None
        self._depth += 1
        before, self._line = self._line, self._line if line is None else line
        try:
            return walk()
        finally:
            self._depth -= 1
            self._line = before

    def _say_errors(self, node: Node, line: int) -> None:
        stack = [node]
        while stack:
            each = stack.pop()
            if each.is_error or each.is_missing:
                self.notes.append(f"line {line + each.start_point.row + 1} cannot be read as bash: what it "
                                  "sets or runs may be left out")
                return
            stack += [child for child in reversed(each.children) if child.has_error or child.is_missing]

    def read(self, name: str) -> str | None:
        """The text of a file that the script writes, or that lies beside it."""
        if is_open(name):
            return None
        if name in self.files:
            return self.files[name]
        return next((text for place in (self._folder / name, Path(name))
                     if (text := _text_of(place)) is not None), None)

    # ------------------------------------------------------------ statements

    def _block(self, node: Node) -> bool | None:
        result: bool | None = True
        for child in node.named_children:
            result = self._statement(child)
        return result

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
                value = self.words.computed(self.words.span(node, node.start_byte, node.end_byte)[2:-2])
                return None if value is None else bool(value)
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

    def _maybe(self, node: Node, condition: str, walk: Callable[[], bool | None]) -> bool | None:
        """What may or may not run."""
        branch = (self._line or node.start_point.row + 1, " ".join(condition.split()))
        before = self.words.branches
        self.words.branches = (*before, branch)
        try:
            return walk()
        finally:
            self.words.branches = before

    def _list(self, node: Node) -> bool | None:
        left, sign, right = node.children[0], of_node(node.children[1]), node.children[-1]
        first = self._statement(left)
        if first is not None and first != (sign == "&&"):
            return first
        if first is not None:
            return self._statement(right)
        is_test = left.type in ("test_command", "list") or of_node(left).startswith("test ")
        if not is_test and sign == "&&":  # cd x && torchrun ...: a program is taken to succeed
            return self._statement(right)
        self._maybe(left, of_node(left), lambda: self._statement(right))
        return None

    def _if(self, node: Node) -> bool | None:
        condition = node.child_by_field_name("condition")
        result = None if condition is None else self._statement(condition)
        shown = of_node(condition) if condition is not None else ""
        bodies, clauses, is_body = [], [], False
        for child in node.children:
            if child.type == "then":
                is_body = True
            elif child.type in ("elif_clause", "else_clause"):
                clauses.append(child)
            elif is_body and child.is_named:
                bodies.append(child)
        if result is not False:
            run = lambda: [self._statement(body) for body in bodies][-1:] == [True]  # noqa: E731
            run() if result else self._maybe(node, shown, run)
        for clause in clauses if result is not True else []:
            known = result is False
            inner = clause.named_children[0] if clause.type == "elif_clause" else None
            if inner is None:
                (self._block(clause) if known else self._maybe(node, f"not {shown}",
                                                               lambda c=clause: self._block(c)))
                break
            verdict = self._statement(inner)
            rest = clause.named_children[1:]
            run = lambda r=rest: [self._statement(body) for body in r][-1:] == [True]  # noqa: E731
            if verdict is True and known:
                run()
                break
            if verdict is not False:
                self._maybe(clause, of_node(inner), run)
                result, shown = None, of_node(inner)
                if verdict is True:
                    break
        return None

    def _case(self, node: Node) -> bool | None:
        value = self.words.text(node.named_children[0])
        for item in [child for child in node.named_children if child.type == "case_item"]:
            ends = [child.end_byte for child in item.children if child.type == ")"][:1]
            body = [child for child in item.named_children if child.start_byte >= (ends or [0])[0]]
            patterns = [child for child in item.named_children if child.end_byte <= (ends or [0])[0]]
            texts = [self.words.text(pattern) for pattern in patterns]
            run = lambda b=body: [self._statement(each) for each in b][-1:] == [True]  # noqa: E731
            if is_open(value):
                shown = of_node(node.named_children[0])
                self._maybe(item, f"{shown} is {'|'.join(map(of_node, patterns))}", run)
            elif any(fits(value, text) for text in texts):
                return run()
        return None

    def _for(self, node: Node) -> bool | None:
        name = of_node(node.named_children[0])
        body = node.child_by_field_name("body")
        values = [each for child in node.named_children[1:] if child != body and child.type != "comment"
                  for each in _ranges(self.words.fields(child))]
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
        if self._statement(condition) is not False:
            self._block(body)
        return None

    # ------------------------------------------------------------ conditions

    def _test(self, node: Node) -> bool | None:
        text = of_node(node)
        if text.startswith("(("):
            value = self.words.computed(self.words.span(node, node.start_byte, node.end_byte)[2:-2])
            return None if value is None else bool(value)
        tokens: list[tuple[str, bool]] = []
        self._tokens(node, tokens)
        return holds(tokens, lambda name: True if name in self.files else None, text.startswith("[["))

    def _tokens(self, node: Node, out: list[tuple[str, bool]]) -> None:
        for child in node.children:
            if child.type in _OPERATORS:
                self._tokens(child, out)
            elif child.type in ("[", "]", "[[", "]]"):
                continue
            elif not child.is_named or child.type == "test_operator":
                out.append((of_node(child), True))
            else:
                out.append((self.words.text(child), False))

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
        body = node.child_by_field_name("body")
        stdin, target, does_append, after = self._stdin, None, False, []
        stack = [child for child in node.children if child != body]
        while stack:
            child = stack.pop(0)
            if child.type == "heredoc_redirect":
                stdin = self._heredoc(child)
                inner = [each for each in child.named_children if not each.type.startswith("heredoc")]
                after += [each for each in inner if each.type in ("pipeline", "command", "list")]
                stack += [each for each in inner if each.type in ("file_redirect", "herestring_redirect")]
            elif child.type == "herestring_redirect":
                stdin = self.words.text(child.named_children[0]) + "\n"
            elif child.type == "file_redirect":
                place = self.words.text(child.named_children[-1]) if child.named_children else ""
                number = next((of_node(each) for each in child.named_children
                               if each.type == "file_descriptor"), "1")
                sign = next((of_node(each) for each in child.children if not each.is_named), "")
                if sign in (">", ">>", ">|", "&>", "&>>") and number == "1":
                    target, does_append = place, sign.endswith(">>")
                elif sign == "<":
                    stdin = self.read(place)
        return self._with_streams(body, after, stdin, (target, does_append))

    def _with_streams(self, body: Node | None, after: list[Node], stdin: str | None,
                      target: tuple[str | None, bool]) -> bool | None:
        name, does_append = target
        if body is None and not after:
            return None
        results: list[bool | None] = []

        def walk() -> bool | None:
            results.append(None if body is None else self._statement(body))
            return results[-1]

        if name is None and not after:
            before, self._stdin = self._stdin, stdin
            result = walk()
            self._stdin = before
            return result
        text = self._printed(walk, stdin)
        for each in after:
            text = self._printed(lambda e=each: self._statement(e), text)
        if name is not None and text is not None:
            self.files[name] = (self.files.get(name, "") if does_append else "") + text
        return results[0]

    def _heredoc(self, node: Node) -> str:
        body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
        start = next((of_node(child) for child in node.named_children if child.type == "heredoc_start"), "")
        if body is None:
            return ""
        is_raw = start[:1] in "\"'\\" and bool(start)
        text = of_node(body) if is_raw else self.words.span(body, body.start_byte, body.end_byte)
        return re.sub(r"(?m)^\t+", "", text) if any(child.type == "<<-" for child in node.children) else text

    # ------------------------------------------------------------ commands

    def _command(self, node: Node) -> bool | None:
        kept = dict(self.words.values)
        given = [child for child in node.named_children if child.type == "variable_assignment"]
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
        if given:
            self.words.values = kept
        return result

    def _run(self, fields: list[str], node: Node) -> bool | None:
        while fields[1:] and fields[0] in _PREFIXES:
            fields = fields[1:]
        name, rest = basename(fields[0]), fields[1:]
        line = self._line or node.start_point.row + 1
        if name in (":", "true", "false"):
            return name != "false"
        if name in ("test", "["):
            tokens = [(word, word in ("!", "(", ")") or word.startswith("-") and not word[1:].isdigit()
                       or word in ("=", "==", "!=")) for word in rest if word != "]"]
            return holds(tokens, lambda path: True if path in self.files else None, False)
        if name in self._functions:
            self._called.add(name)
            return self._with_arguments(rest, lambda: self._statement(self._functions[name]))
        if name in ("set", "shift", "let", "read", "eval", "source", "."):
            return self._builtin(name, rest, line)
        if is_pure(name):
            text = output(fields, self._stdin, self.read)
            if name == "tee" and text is not None:
                self.files.update(dict.fromkeys([word for word in rest if word[:1] != "-"], text))
            self._prints(text)
            return None
        if self._inner(fields, line):
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
        elif name == "read":
            names = [word for word in rest if re.fullmatch(r"[A-Za-z_]\w*", word)]
            text = self._stdin
            for each in names[-1:]:
                self.words.set(each, hide(f"${each}") if text is None else (
                    text.rstrip("\n") if "-d" in rest else text.partition("\n")[0]))
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
            from threed.doors.shell.opaque import show
            self.notes.append(f"line {line}: {show(name)} is not there, so what it sets is not known")
            return
        self._inside(lambda: self.text(text, line))

    def _inner(self, fields: list[str], line: int) -> bool:
        """Walks the script or the commands that a command has as its words: bash -c TEXT, bash FILE, and
        TEXT for another machine. Whether there were any."""
        shell = next((index for index, word in enumerate(fields) if basename(word) in _SHELLS), None)
        text, arguments = None, None
        if shell is not None:
            rest = fields[shell + 1:]
            if not rest and shell == 0:
                text = self._stdin
            while rest and rest[0].startswith("-"):
                flag = rest.pop(0)
                if re.fullmatch(r"-[a-z]*c", flag) and rest:
                    text, arguments = rest[0], rest[2:]
                    break
            else:
                if rest and (text := self.read(rest[0])) is not None:
                    arguments = rest[1:]
        elif basename(fields[0]) == "sbatch":
            wrapped = next((word.partition("=")[2] or fields[index + 1] for index, word in enumerate(
                fields[:-1] if fields[-1] == "--wrap" else fields) if word.partition("=")[0] == "--wrap"), None)
            file = next((word for word in fields[1:] if not word.startswith("-") and self.read(word)), None)
            text = wrapped or (self.read(file) if file else self._stdin if len(fields) == 1 else None)
        else:
            text = next((word for word in fields[1:] if re.search(r"\s--\w", word) and (
                ".py" in word or " -m " in word)), None)
        if text is None:
            return False
        before, self._before = self._before, [*self._before, *fields[:shell]] if shell else self._before
        run = lambda: self.text(text, line)  # noqa: E731
        run() if arguments is None else self._with_arguments(arguments, run)
        self._before = before
        return True


def _could_train(command: Command) -> bool:
    return sum(word.startswith("--") for word in command.words) > 1


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text() if path.is_file() else None
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def _ranges(fields: list[str]) -> list[str]:
    """Fields, with {1..4} spelt out."""
    out: list[str] = []
    for field in fields:
        match = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", field)
        out += map(str, range(int(match[1]), int(match[2]) + 1)) if match else [field]
    return out


def _of_header(text: str) -> dict[str, str]:
    """Variables that Slurm sets by the #SBATCH lines of a script."""
    found: dict[str, str] = {}
    for line in re.findall(r"(?m)^#SBATCH\s+(.*)", text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        name, equals, value = words[0].partition("=") if words else ("", "", "")
        if re.fullmatch(r"-[a-zA-Z]\d+", name):
            name, value = name[:2], name[2:]
        elif not equals and len(words) > 1:
            value = words[1]
        found[name] = value
    nodes = found.get("--nodes") or found.get("-N") or ""
    tasks = found.get("--ntasks") or found.get("-n") or ""
    each = found.get("--ntasks-per-node") or ""
    gpus = re.search(r"(\d+)$", found.get("--gpus-per-node") or found.get("--gres") or "")
    if not tasks and nodes.isdigit() and each.isdigit():
        tasks = str(int(nodes) * int(each))
    values = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": tasks,
              "SLURM_NPROCS": tasks, "SLURM_NTASKS_PER_NODE": each, "SLURM_GPUS_ON_NODE":
              gpus[1] if gpus else "", "SLURM_GPUS_PER_NODE": gpus[1] if gpus else "",
              "SLURM_JOB_NAME": found.get("--job-name") or found.get("-J") or ""}
    return {name: value for name, value in values.items() if value}
