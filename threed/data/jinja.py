"""Jinja: chat templates as transformers compiles them: the same settings, functions and tags.

What a template writes between {% generation %} and {% endgeneration %} is what the assistant says. It stands
here between BEGIN and END.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from threed.data.messages import BEGIN, END


class Compiled(NamedTuple):
    render: Callable[..., str]
    marks: bool  # whether it marks what the assistant says


class _Generation(Extension):
    tags: ClassVar = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def compiled(text: str) -> Compiled:
    """jinja2.TemplateError where a text is no template."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    # Today's date would make other data each day.
    environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime(2024, 7, 26).strftime}
    marks = any(isinstance(block.call.node, nodes.ExtensionAttribute)
                for block in environment.parse(text).find_all(nodes.CallBlock))
    return Compiled(environment.from_string(text).render, marks)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)
