"""python -m tests.chaos --faults N --seed S: the campaign, its progress, its table, and the command that
repeats what failed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as threed sets it, before torch is imported

from tests.chaos import interposer

LOST = ("lost", "wrong")
LIMIT_S = 1800  # for one trial, of several starts, each of which `trial` ends when it hangs


def main(faults: Annotated[int, typer.Option(help="how many trials")] = 100,
         seed: Annotated[int, typer.Option(help="of everything that is drawn")] = 1,
         jobs: Annotated[int, typer.Option(help="trials at a time; 0: one for two cores")] = 0,
         only: Annotated[str,
                         typer.Option(help="kinds whose names have this regular expression; of --faults "
                                           "trials, those that are")] = "",
         trial: Annotated[list[int] | None, typer.Option(help="these numbers alone")] = None,
         minutes: Annotated[float, typer.Option(help="begin no trial after so long")] = math.inf,
         report: Annotated[Path | None, typer.Option(help="all results as JSON")] = None,
         sites: Annotated[bool, typer.Option(help="list each call of a save and what became of it")] = False,
         verbose: Annotated[bool, typer.Option(help="print what failed trials printed")] = False) -> None:
    """Inject faults into small runs, one each, and see that nothing is lost. Exit status 1 where something
    is."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 180)  # tables are for a file, too
    with interposer.in_front(), tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        base = Path(folder)
        from tests.chaos import campaign, sister

        kinds = itertools.islice(campaign.kinds(seed), faults)
        chosen = [(number, *pair) for number, pair in enumerate(kinds)]
        chosen = [entry for entry in chosen
                  if re.search(only, entry[1].name) and (not trial or entry[0] in trial)]
        begin = time.monotonic()
        with _Pool(jobs or max(1, (os.cpu_count() or 2) // 2), base) as pool:
            names = set().union(*(campaign.wanted(seed, number, kind) for number, kind, _ in chosen))
            references = pool.references(sorted(names))
            console.print(f"{len(references)} undisturbed runs in {time.monotonic() - begin:.0f} s, "
                          f"{min(r.seconds for r in references.values()):.1f} to "
                          f"{max(r.seconds for r in references.values()):.1f} s each")
            tasks = [(seed, number, kind.name, index) for number, kind, index in chosen]
            results = pool.trials(_until(begin + 60 * minutes, tasks), references, len(tasks), console,
                                  verbose)
    console.print(_table(results))
    if sites and sister.FIRST in references:
        console.print(_sites(results, references[sister.FIRST].sites), markup=False)
    _failures(results, console)
    if report:
        report.write_text(json.dumps([asdict(result) for result in results], indent=1))
    sys.exit(any(result.verdicts for result in results))


class _Pool:
    """Processes that make trials, each forked from this one, which has imported everything."""

    def __init__(self, jobs: int, base: Path):
        from tests.chaos import campaign, sister

        self.base, self.data = base, sister.make_corpus(base / "corpus")
        gc.collect()
        gc.freeze()
        context = multiprocessing.get_context("fork")
        self.campaign, self.sister = campaign, sister
        self.workers: dict[Connection, BaseProcess] = {}
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            self.workers[ours] = context.Process(target=self._work, args=(theirs,))
            self.workers[ours].start()
            theirs.close()

    def _work(self, pipe: Connection) -> None:
        interposer.adopt()
        interposer.die_with_parent()
        from tests.chaos.faults import KINDS

        while (task := pipe.recv()) is not None:
            try:
                if isinstance(task, str):
                    pipe.send(self.sister.make_reference(task, self.base, self.data))
                else:
                    seed, number, kind, index, references = task
                    pipe.send(self.campaign.make(seed, number, KINDS[kind], index, references, self.base,
                                                 self.data))
            except BaseException:
                pipe.send(traceback.format_exc())

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, worker in self.workers.items():
            with contextlib.suppress(OSError):
                pipe.send(None)
            worker.join(10)
            worker.kill()

    def _results(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """As they come. Each worker has one task at a time."""
        waiting, busy = iter(tasks), {}

        def give(pipe: Connection) -> None:
            if (task := next(waiting, None)) is not None:
                pipe.send(task)
                busy[pipe] = self.workers[pipe].sentinel

        for pipe in self.workers:
            give(pipe)
        while busy:
            ready = connection.wait([*busy, *busy.values()], LIMIT_S)
            done = [pipe for pipe in busy if pipe in ready]
            if not done:
                ended = [worker.exitcode for worker in self.workers.values() if not worker.is_alive()]
                raise SystemExit(f"the campaign itself failed: a worker ended with status {ended[0]}" if ended
                                 else f"the campaign itself failed: no trial ended for {LIMIT_S} s")
            for pipe in done:
                del busy[pipe]
                result = pipe.recv()
                if isinstance(result, str):
                    raise SystemExit(f"the campaign itself failed:\n{result}")
                give(pipe)
                yield result

    def references(self, names: list[str]) -> dict[str, Any]:
        # The first prepares the data.
        runs = [*self._results(names[:1]), *self._results(names[1:])]
        return {reference.name: reference for reference in runs}

    def trials(self, tasks: Iterable[tuple[Any, ...]], references: dict[str, Any], total: int,
               console: Console, verbose: bool) -> list[Any]:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
                   TextColumn("{task.description}"))
        results = []
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=total)
            for result in self._results((*task, references) for task in tasks):
                results.append(result)
                failed = sum(bool(result.verdicts) for result in results)
                progress.update(bar, advance=1, description=f"{failed} not as they must be")
                if result.verdicts:
                    console.print(_line(result))
                    if verbose:
                        console.print("    " + result.output.replace("\n", "\n    "), markup=False)
        return sorted(results, key=lambda result: result.number)


def _until(moment: float, tasks: Iterable[Any]) -> Iterator[Any]:
    """Tasks, until a moment of the monotonic clock."""
    return itertools.takewhile(lambda _: time.monotonic() < moment, tasks)


def _line(result: Any) -> str:
    seen = "; ".join(f"{name}: {text.splitlines()[0] if text else ''}"
                     for name, text in result.verdicts.items())
    return f"trial {result.number} ({result.kind}) {result.text}\n    {seen}".replace("[", r"\[")


def _table(results: list[Any]) -> Table:
    table = Table("fault", "tried", "survived", "lost", "hangs", "other", "recovered in", "steps repeated",
                  "skipped")
    for column in table.columns[1:]:
        column.justify = "right"
    groups = {kind: [result for result in results if result.kind == kind]
              for kind in sorted({r.kind for r in results})}
    for kind, group in {**groups, "all": results}.items():
        done = [result for result in group if not result.skipped]
        lost = sum(any(name in result.verdicts for name in LOST) for result in done)
        hangs = sum("hang" in result.verdicts for result in done)
        other = Counter(name for result in done for name in result.verdicts if name not in (*LOST, "hang"))
        times = [result.recovery_s for result in done if result.recovery_s is not None]
        if kind == "all":
            table.add_section()
        table.add_row(kind, str(len(done)), str(sum(not result.verdicts for result in done)), str(lost),
                      str(hangs),
                      ", ".join(f"{count} {name}" for name, count in other.items()) or "0",
                      f"{statistics.median(times):.1f} s" if times else "",
                      str(sum(result.repeated for result in done)),
                      str(len(group) - len(done) or ""))
    return table


def _sites(results: list[Any], sites: list[Any]) -> str:
    """Each call of a save of the first sister: what was done there, and how many trials survived it."""
    lines = []
    for site in sites:
        struck = [result for result in results if result.site == site and result.kind.startswith("save: ")]
        kinds = Counter(result.kind.removeprefix("save: ") for result in struck)
        lines.append(f"{site!s:<100}  survived {sum(not result.verdicts for result in struck)} of "
                     f"{len(struck)}:  "
                     + ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())))
    never = sum("survived 0 of 0" in line for line in lines)
    return "\n".join([f"\n{len(lines)} calls of a save, of which {never} were not struck:", *lines])


def _failures(results: list[Any], console: Console) -> None:
    for reason, count in Counter(result.skipped for result in results if result.skipped).items():
        console.print(f"{count} skipped: {reason}", markup=False)
    failed = [result for result in results if result.verdicts]
    if not failed:
        return
    console.print(f"\n{len(failed)} trials were not as they must be. One of them again, with all it prints:")
    for result in failed:
        console.print(f"  make chaos ARGS='--faults {result.number + 1} --seed {result.seed} --trial "
                      f"{result.number} --verbose'  "
                      f"# {result.kind}: {', '.join(result.verdicts)}", markup=False)


if __name__ == "__main__":
    typer.run(main)
