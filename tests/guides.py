"""The guides in docs/extending: their code, and their schedule and pass added to threed as a reader would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENDING = ROOT / "docs" / "extending"


def blocks(page: Path, language: str) -> list[str]:
    """The contents of a page's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", page.read_text(), re.DOTALL | re.MULTILINE)


def code(guide: str) -> list[str]:
    """A guide's blocks of Python."""
    return blocks(EXTENDING / f"{guide}.md", "python")


def add_schedule() -> None:
    """Add the guide's schedule, for the rest of this process."""
    for block in code("schedule"):
        exec(block, globals())


@contextmanager
def added_pass(change: tuple[str, str] = ("", "")) -> Iterator[None]:
    """Edit threed/features/activation/plan.py and threed/planner/passes.py as the guide says; undone at the
    end. `change`: replace the first text by the second in the function."""
    from threed.features.activation import plan as activation
    from threed.planner import passes

    function, row, *_ = code("pass")
    assert change[0] in function
    before = passes.STEP
    exec(function.replace(*change), activation.__dict__)
    (line,) = eval(f"({row})", passes.__dict__)
    place = [each.name for each in before].index("recompute") + 1
    passes.STEP = (*before[:place], line, *before[place:])  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        passes.STEP = before  # pyright: ignore[reportAttributeAccessIssue]
        delattr(activation, "recompute_half")
