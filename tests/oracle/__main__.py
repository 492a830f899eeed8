"""Cells one after the other, with ORACLE_SEED or that of the day, and what they differ by:

    python -m tests.oracle 17 23        these cells
    python -m tests.oracle 0-199        these, too
    python -m tests.oracle --faults     each of FAULTS in a few cells of those in which it does anything
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.oracle import report
from tests.oracle.cells import draw
from tests.oracle.comparison import compare
from tests.oracle.faults import FAULTS
from tests.oracle.seeds import seed_of_the_day


def cells(numbers: Sequence[int]) -> int:
    """Run cells; how many of them are wrong."""
    seed, rows, wrong = seed_of_the_day(), [], 0
    for number in numbers:
        start_s = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                compared = compare(seed, number, Path(folder))
        except Exception:  # as a test would: the next cell is another matter
            traceback.print_exc()
            print(f"{number} FAILED", flush=True)
            wrong += 1
            continue
        rows.append(report.row(compared))
        worst = "  ".join(f"{what} {value:.1e}" for what, value in compared.worst.items())
        print(f"{number} {compared.cell.family} {compared.cell.values['dtype']}  {worst}  "
              f"{time.monotonic() - start_s:.1f} s", flush=True)
        if problems := compared.problems():
            print(f"{number} FAILED: {problems}\n{compared.cell}", flush=True)
            wrong += 1
    print("\n".join(report.lines(rows)))
    return wrong


def faults(tries: int = 4) -> int:
    """Put each fault into some cells; how many faults went unseen in any."""
    seed, unseen = seed_of_the_day(), 0
    for name, fault in FAULTS.items():
        seen = {}
        for number in [number for number in range(200) if fault.does(draw(seed, number))][:tries]:
            with tempfile.TemporaryDirectory() as folder:
                seen[number] = fault.seen(seed, number, Path(folder))
        unseen += not all(seen.values())
        print(f"{name}: seen in {sum(map(bool, seen.values()))} of {len(seen)}", *(
            f"  {number}: {text[:150] or 'NOT SEEN'}" for number, text in seen.items()), sep="\n", flush=True)
    return unseen


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if sys.argv[1:] == ["--faults"]:
        sys.exit(faults() > 0)
    sys.exit(cells([number for word in sys.argv[1:] for first, _, last in [word.partition("-")]
                    for number in range(int(first), int(last or first) + 1)]) > 0)
