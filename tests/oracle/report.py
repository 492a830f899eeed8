"""What is printed of cells: the worst differences, and what threed has refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tests.oracle.comparison import Compared

KEY = "oracle"  # of a test's properties


def row(compared: Compared) -> dict[str, Any]:
    """A cell, as a test's property."""
    cell = compared.cell
    return {"family": cell.family, "dtype": cell.values["dtype"], "lion": cell.values["optimizer"] == "lion",
            "number": cell.number, "seed": cell.seed, "worst": compared.worst, "near": compared.near,
            "refused": [each.text for each in compared.refused]}


def lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Of cells, by family and dtype: the largest difference of each quantity, and the cell that has it."""
    rows = list(rows)
    if not rows:
        return
    yield (f"{len(rows)} cells of seed {rows[0]['seed']} against the oracle: the largest differences, and "
           "the numbers of their cells")
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for each in rows:
        groups[each["family"], each["dtype"]].append(each)
    for (family, dtype), some in sorted(groups.items()):
        worst = []
        for what in ("loss", "norm", "weights", "updates"):
            value, number = max((each["worst"][what], each["number"]) for each in some)
            worst.append(f"{what} {value:.1e} ({number})")
        yield f"  {family.ljust(10)} {dtype}  {str(len(some)).rjust(3)} cells  {'  '.join(worst)}"
    lion = [each for each in rows if each["lion"]]
    if lion:
        later = [f"{what} {max(each['worst'][f'later {what}'] for each in lion):.1e}"
                 for what in ("loss", "norm")]
        yield f"  after Lion's first step: {', '.join(later)}"
    yield f"  choices of experts that rounding decided: {sum(each['near'] for each in rows)}"
    refused = [(each["number"], " ".join(text.split())[:200]) for each in rows for text in each["refused"]]
    yield f"  refused, and drawn again: {len(refused)}"
    for number, text in refused:
        yield f"    {number}: {text}"
