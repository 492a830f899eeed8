"""Regret of `threed search`: layouts that it ranks, trained on the CPUs of this machine.

    python -m bench.foresight.regret --markdown bench/results/regret.md        # calibrates; half an hour
    python -m bench.foresight.regret --hardware my.yaml --layouts 8 --ranks 4  # a file of `threed calibrate`

The model of configs/toy.yaml is searched on 4 and on 8 processes. Of the layouts that the search has timed,
so many are drawn evenly, the fastest and the slowest among them, and each is trained with one thread a rank.
The step time of a layout is that of the faster of its runs (bench.foresight.measured). **Regret**: how much
longer a step of search's choice takes than that of the best layout that was measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.common import columns
from bench.foresight.measured import measured
from bench.foresight.published import spearman
from threed.layout_search.best_first import Search
from threed.layout_search.layout import Layout
from threed.layout_search.request import Question, ask, write
from threed.prediction.hardware import Hardware

TOY = "configs/toy.yaml"
_IDEAS = 40  # so many of the fastest; then there are slow layouts among those that are timed


class Row(NamedTuple):
    layout: Layout
    predicted_s: float
    measured_s: float

    @property
    def cells(self) -> list[str]:
        return [self.layout.text(), f"{1e3 * self.predicted_s:.1f}", f"{1e3 * self.measured_s:.1f}",
                f"{self.predicted_s / self.measured_s - 1:+.1%}"]


def drawn(asked: Question, machine: Hardware, ranks: int, count: int) -> list[tuple[Layout, float]]:
    """Layouts that search ranks, with their predicted seconds, the fastest first."""
    search = Search(asked.base, machine, machine.usable_bytes(machine.memory_bytes), _IDEAS)
    timed = search.run(ranks, asked.fixed).timed
    count = min(count, len(timed))
    return [(timed[at].layout, timed[at].step_s)
            for at in (round(number * (len(timed) - 1) / max(1, count - 1)) for number in range(count))]


def trained(asked: Question, some: Sequence[tuple[Layout, float]], repeat: int) -> Iterator[Row]:
    """Each layout so many times, in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder, best = Path(name), dict[Layout, float]()
        for turn in range(repeat):
            for number, (layout, predicted_s) in enumerate(some):
                file = folder / f"{number}.yaml"
                write(file, asked.values_of(layout), layout.text())
                seconds = measured([], folder / f"{number}-{turn}", str(file)).step_s
                best[layout] = min(seconds, best.get(layout, seconds))
                print(f"{layout.text()}: predicted {1e3 * predicted_s:.1f} ms, measured "
                      f"{1e3 * seconds:.1f} ms", file=sys.stderr, flush=True)
        yield from (Row(layout, predicted_s, best[layout]) for layout, predicted_s in some)


def section(ranks: int, rows: Sequence[Row]) -> str:
    """The table of so many ranks, with its regret."""
    choice, best = rows[0], min(rows, key=lambda row: row.measured_s)
    rank = spearman([row.measured_s for row in rows], [row.predicted_s for row in rows])
    table = columns([["layout", "predicted ms", "measured ms", "error"], *(row.cells for row in rows)])
    def milliseconds(row: Row) -> str:
        return f"{1e3 * row.measured_s:.1f} ms"

    slowest = max(rows, key=lambda row: row.measured_s)
    return (f"## {ranks} processes\n\n{table}\n\nSearch's choice takes {milliseconds(choice)}, the best of "
            f"{len(rows)} {milliseconds(best)} ({best.layout.text()}), the slowest {milliseconds(slowest)}: "
            f"**regret {choice.measured_s / best.measured_s - 1:.1%}**. Spearman's rank correlation "
            f"{rank:.3f}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0])
    parser.add_argument("--hardware", help="a file of threed calibrate; without it, this bench calibrates")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--layouts", type=int, default=24, help="of each number of ranks")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each layout")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hardware = args.hardware or f"{folder}/my.yaml"
        if not args.hardware:
            subprocess.run([sys.executable, "-m", "threed", "calibrate", "-o", hardware],
                           env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        machine, asked, texts = Hardware.parse(hardware), ask(TOY), []
        for ranks in args.ranks:
            rows = list(trained(asked, drawn(asked, machine, ranks, args.layouts), args.repeat))
            texts.append(section(ranks, rows))
            print(texts[-1], flush=True)
        if args.markdown is not None:
            text = "\n\n".join(texts)
            args.markdown.write_text("# Regret of a search\n\n`python -m bench.foresight.regret` on "
                                     f"{machine.title}; see [bench/README.md](../README.md).\n\n{text}\n")


if __name__ == "__main__":
    main()
