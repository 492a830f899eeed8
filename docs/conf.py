"""The site, which `make docs` builds with Sphinx from every Markdown page of the repository.

A broken link is an error (-W). The sources are relative to the root of the repository, so that links between
README, docs/ and bench/ are checked like any other, and work in an editor and on a code host as well.
"""

import re
from importlib import import_module
from types import ModuleType
from typing import Any

import threed

project = "threed"
author = "the threed authors"
version = release = threed.__version__
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
include_patterns = ["*.md", "docs/**", "bench/**"]
exclude_patterns = [".*", "build", "dist", "runs", "docs/_site", "**/__pycache__"]
myst_heading_anchors = 4  # anchors of headings, as code hosts make them

html_theme = "furo"
html_title = "threed"
html_extra_path = ["_site"]  # index.html at the root of the site, which leads to docs/index.html
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# what is resolved when it is asked for; a package that is a verb
for _name in getattr(threed, "__all__", ()):
    _thing = getattr(threed, _name)
    if isinstance(_thing, ModuleType):
        _thing = getattr(import_module(f"threed.{threed._HOMES[_name]}"), _name)
    setattr(threed, _name, _thing)


def _as_rest(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: `name` is code; an indented block, or one that begins with >>>, an
    example."""
    text, lines[:] = list(lines), []
    for before, line in zip(["", *text], text):
        if line.startswith("  ") and not before.strip():
            lines += [".. code-block:: text", ""]
        lines.append(line if line.startswith(("  ", ">>>", "...")) else _escape(line))


def _escape(line: str) -> str:
    parts = line.split("`")
    plain = [re.sub(r"([\\*|_])", r"\\\1", part) for part in parts[::2]]
    code = [f"\\ ``{part}``\\ " for part in parts[1::2]]
    return "".join(map("".join, zip(plain, [*code, ""])))


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_rest)
