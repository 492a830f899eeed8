"""Text tables: numbers in columns, as wide as a terminal. Rows that are alike are one row; a table that is
too wide is cut into groups of columns, one below the other."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

GAP = "  "  # between columns
ALIKE = 3  # neighbouring rows with the same cells, from which on they are one row


def terminal() -> int | None:
    """The columns of the terminal on which this process prints (COLUMNS wins); None where it prints to a file
    or a pipe, whose lines may be of any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None


def render(head: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None = None,
           fold: bool = True) -> str:
    """Rows below a head. The first column is of names and aligned to the left, the others to the right.
    `columns`: most characters of a line; None: any. `fold`: three or more neighbouring rows that differ in
    the name alone are one row, named by the first and the last."""
    lines = [tuple(head), *(_folded(rows) if fold else map(tuple, rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if columns is not None and widths[0] + len(GAP) + max(widths[1:], default=0) > columns:
        widths[0] = max(1, columns // 3)  # names that leave no room for a number stand on a line of their own
    groups = _groups(widths, columns)
    if fold and len(groups) > 1:  # rows that differ in one part may be alike in another
        return "\n\n".join(render(_of(head, group), [_of(row, group) for row in rows], columns)
                           for group in groups)
    return "\n\n".join("\n".join(_line(cells, widths, group) for cells in lines) for group in groups)


def _of(cells: Sequence[str], group: Sequence[int]) -> list[str]:
    return [cells[0], *(cells[column] for column in group)]


def _groups(widths: Sequence[int], columns: int | None) -> list[list[int]]:
    """The columns of each part of the table, without the first, which stands in all."""
    groups, used = [[]], widths[0]
    for column, width in enumerate(widths[1:], 1):
        used += len(GAP) + width
        if columns is not None and used > columns and groups[-1]:
            groups.append([])
            used = widths[0] + len(GAP) + width
        groups[-1].append(column)
    return groups


def _line(cells: Sequence[str], widths: Sequence[int], group: Sequence[int]) -> str:
    name, first = cells[0], ""
    if len(name) > widths[0]:
        name, first = "", f"{name}\n"
    numbers = (GAP + cells[column].rjust(widths[column]) for column in group)
    return first + (name.ljust(widths[0]) + "".join(numbers)).rstrip()


def _folded(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    first = 0
    while first < len(rows):
        last = first
        while last + 1 < len(rows) and list(rows[last + 1][1:]) == list(rows[first][1:]):
            last += 1
        if last - first + 1 >= ALIKE:
            yield (f"{rows[first][0]} to {rows[last][0]}", *rows[first][1:])
        else:
            yield from (tuple(row) for row in rows[first:last + 1])
        first = last + 1


def wrapped(text: str, columns: int | None, indent: str = GAP) -> str:
    """A line that goes on below itself, indented, where it is too long."""
    if columns is None or len(text) <= columns:
        return text
    return textwrap.fill(text, max(columns, 20), subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)
