"""Sums and conditions of bash: whole numbers in $((...)), and what [ ... ] and [[ ... ]] say.

A result that depends on what cannot be known is None.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from threed.interop.shell.opaque import is_open

Lookup = Callable[[str], str | None]
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
           ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
           ast.BitAnd: operator.and_, ast.BitOr: operator.or_}
_CALLS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "round": round, "max": max, "min": min,
                                         "abs": abs, "ceil": math.ceil, "floor": math.floor}
_COMPARE = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
            ast.Gt: operator.gt, ast.GtE: operator.ge}
_NUMBERS = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
            "-gt": operator.gt, "-ge": operator.ge}
_TEXTS = {"<": operator.lt, ">": operator.gt}
_UNARY = ("-z", "-n", "-f", "-d", "-e", "-s", "-r", "-w", "-x", "-v", "-L", "-h", "-p", "-t")
_POWER = 64  # a larger exponent is no size of a run
_FAILS = (SyntaxError, KeyError, AttributeError, TypeError, ValueError, ArithmeticError, RecursionError)


def computed(text: str, lookup: Lookup = lambda _: None, is_whole: bool = True) -> int | float | None:
    """What a sum is; `lookup` gives the values of names. With `is_whole`, as in bash, a quotient is cut to a
    whole number; else / and // are Python's, and so are int(...) and its kin."""
    def divided(left: Any, right: Any, is_floor: bool) -> Any:
        if is_whole:
            return int(left / right) if abs(left) < 2**53 else left // right
        return left // right if is_floor else left / right

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > _POWER:
                raise ValueError
            return divided(left, right, isinstance(node.op, ast.FloorDiv)) if isinstance(node.op, (
                ast.Div, ast.FloorDiv)) else _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp):
            inner = value(node.operand)
            return int(not inner) if isinstance(node.op, ast.Not) else -inner if isinstance(
                node.op, ast.USub) else inner
        if isinstance(node, ast.BoolOp):
            each = [bool(value(part)) for part in node.values]
            return int(all(each) if isinstance(node.op, ast.And) else any(each))
        if isinstance(node, ast.Compare):
            return int(_COMPARE[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        if isinstance(node, ast.IfExp):
            return value(node.body) if value(node.test) else value(node.orelse)
        if isinstance(node, ast.Name):
            found = lookup(node.id)
            result = None if found is None else computed(found, lookup, is_whole)
            if result is None:
                raise KeyError
            return result
        if isinstance(node, ast.Call) and not (is_whole or node.keywords):
            return _CALLS[ast.unparse(node.func).removeprefix("math.")](*map(value, node.args))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        raise TypeError

    text = re.sub(r"(?<![\w.])0+(?=\d)", "", text.replace("&&", " and ").replace("||", " or "))
    text = re.sub(r"!(?!=)", " not ", text.replace("\n", " ")).strip()
    if choice := re.fullmatch(r"([^?:]+)\?([^?:]+):([^?:]+)", text):
        text = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
    try:
        return None if is_open(text) else value(ast.parse(text, mode="eval").body)
    except _FAILS:
        return None


def holds(tokens: Sequence[tuple[str, bool]], exists: Callable[[str], bool | None],
          has_patterns: bool) -> bool | None:
    """Whether a condition holds. `tokens`: (word, whether it is an operator). `exists`: whether a file does.
    `has_patterns`: as [[ does, and [ does not, == takes a pattern."""
    return _Condition(list(tokens), exists, has_patterns).either()


class _Condition:
    def __init__(self, tokens: list[tuple[str, bool]], exists: Callable[[str], bool | None],
                 has_patterns: bool):
        self.tokens, self.exists, self.has_patterns = tokens, exists, has_patterns

    def _next_is(self, *words: str) -> bool:
        return bool(self.tokens) and self.tokens[0][1] and self.tokens[0][0] in words

    def either(self) -> bool | None:
        result = self.both()
        while self._next_is("||", "-o"):
            self.tokens.pop(0)
            other = self.both()
            result = True if True in (result, other) else None if None in (result, other) else False
        return result

    def both(self) -> bool | None:
        result = self.one()
        while self._next_is("&&", "-a"):
            self.tokens.pop(0)
            other = self.one()
            result = False if False in (result, other) else None if None in (result, other) else True
        return result

    def one(self) -> bool | None:
        if not self.tokens:
            return None
        word, is_operator = self.tokens.pop(0)
        if is_operator and word == "!":
            result = self.one()
            return None if result is None else not result
        if is_operator and word == "(":
            result = self.either()
            if self._next_is(")"):
                self.tokens.pop(0)
            return result
        if is_operator and word in _UNARY and self.tokens:
            return self.about(word, self.tokens.pop(0)[0])
        if self.tokens and self.tokens[0][1] and self.tokens[0][0] not in ("&&", "||", "-a", "-o", ")"):
            sign = self.tokens.pop(0)[0]
            right = self.tokens.pop(0)[0] if self.tokens else ""
            return self.between(word, sign, right)
        return None if is_open(word) else bool(word)

    def about(self, sign: str, word: str) -> bool | None:
        if sign in ("-z", "-n"):
            return None if is_open(word) else bool(word) == (sign == "-n")
        return None if is_open(word) else self.exists(word)

    def between(self, left: str, sign: str, right: str) -> bool | None:
        if is_open(left) or is_open(right):
            return None
        if sign in _NUMBERS:
            numbers = computed(left), computed(right)
            return None if None in numbers else _NUMBERS[sign](*numbers)
        if sign == "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return None
        if sign in _TEXTS:
            return _TEXTS[sign](left, right)
        same = fnmatchcase(left, right) if self.has_patterns else left == right
        return same if sign in ("=", "==") else not same if sign == "!=" else None
