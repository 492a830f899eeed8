"""Traces: each rank's times of each traced step, a line a step, in `run.dir/trace/rank-00000.jsonl`.

The first line of a process is a header: the rank and its coordinate, the plan's digest, and the rank's
program, so that a file explains itself. A step's line holds, in seconds from the begin of the step, when each
instruction was issued, when its inputs were ready and when it ended; [instruction, instruction waited for,
seconds] of each wait; and [instruction, begin, seconds] of each copy between tiers and step on the host.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from threed.base.axes import AXES, QUIET
from threed.base.errors import InputError
from threed.base.mesh import Coordinate
from threed.base.quantity import many
from threed.devices import device_of
from threed.monitor.lines import cut
from threed.program.analysis import Analysis
from threed.program.costs import FILE as COSTS
from threed.program.costs import read_costs, save_costs
from threed.program.instruction import Instruction, Op, Tier
from threed.program.simulate import Costs
from threed.program.trace import Ran, Trace, Wait

if TYPE_CHECKING:
    from threed.comm.group import Comm

FOLDER = "trace"
COLUMNS = ("text", "lane", *Instruction._fields)
LISTS = ("issued", "started", "ended")


def rank_file(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank:05d}.jsonl"


def encode(step: int, trace: Trace) -> str:
    """The line of a step, with times in whole microseconds."""
    values: dict[str, Any] = {"step": step, "program": trace.name, "begin": round(trace.begin, 6),
                              "total_s": round(trace.total_s, 6)}
    values |= {name: [round(time, 6) for time in getattr(trace, name)] for name in LISTS}
    values["waits"] = [(index, source, round(wait_s, 6)) for index, source, wait_s in trace.waits]
    if trace.ran:
        values["ran"] = [(index, round(start_s, 6), round(ran_s, 6)) for index, start_s, ran_s in trace.ran]
    return json.dumps(values, separators=(",", ":")) + "\n"


class TraceWriter:
    """Writes one rank's traces; on rank 0 also costs.json. When the disk is full, tracing ends and the run
    goes on."""

    def __init__(self, run: Path, analysis: Analysis, comm: Comm, first_step: int):
        """`first_step`: of this process; it is slower than the others: memory is allocated, code is
        loaded."""
        self.path, self._first_step = rank_file(run, comm.rank), first_step
        self._analysis, self._comm = analysis, comm
        self._file: TextIO | None = None
        self._full = False
        self._costs_path = run / COSTS
        self._sums: dict[tuple[int, Op, int], float] = {}
        self._steps = 0
        self._cold = False  # whether the sums are of a first step alone

    def write(self, step: int, trace: Trace, costs: Costs) -> str | None:
        """Add a step. Returns a warning where it cannot be written."""
        if self._full:
            return None
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                cut(self.path, self._first_step - 1)  # the later steps are repeated
                self._file = self.path.open("a")
                self._file.write(self._header())
            self._file.write(encode(step, trace))
            self._file.flush()
            if self._comm.rank == 0:
                self._add_costs(step == self._first_step, costs)
        except OSError as error:
            self._full = True
            return f"rank {self._comm.rank} writes no more traces: {error}"
        return None

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _header(self) -> str:
        here = self._comm.here
        links = self._analysis.links_at("train", here.position)
        rows = [(str(item), form.effect.lane, *item)
                for item, form in zip(links.program, links.forms, strict=True)]
        axes = {axis: here.on[axis] for axis in here.shown or AXES}
        return json.dumps({"rank": self._comm.rank, **axes, "world_size": self._comm.mesh.size,
                           "digest": self._analysis.digest, "first_step": self._first_step,
                           "columns": COLUMNS, "train": rows}, separators=(",", ":")) + "\n"

    def _add_costs(self, cold: bool, costs: Costs) -> None:
        """Running means, over all processes of the run that ran the same plan."""
        if not self._steps and self._costs_path.exists():
            with contextlib.suppress(InputError):  # damaged: measured anew
                means, digest, steps = read_costs(self._costs_path)
                if digest == self._analysis.digest:
                    self._sums, self._steps = {key: mean * steps for key, mean in means.items()}, steps
        if cold and self._steps:
            return
        if self._cold:
            self._sums, self._steps = {}, 0
        self._cold = cold
        self._steps += 1
        for key, seconds in costs.items():
            self._sums[key] = self._sums.get(key, 0.0) + seconds
        save_costs(self._costs_path, {key: total / self._steps for key, total in self._sums.items()},
                   self._analysis.digest, self._steps, device_of(self._comm.device).name())


@dataclass
class RankTrace:
    """The content of a rank's file that belongs to one plan."""

    rank: int
    here: Coordinate
    program: list[Instruction]
    lanes: list[str]
    first_steps: set[int]  # of processes
    file: Path
    # step -> (line number, line), the latest if there are several
    lines: dict[int, tuple[int, str]] = field(default_factory=dict)

    def trace(self, step: int) -> Trace:
        number, line = self.lines[step]
        return _decode(line, len(self.program), f"{self.file}, line {number}")


@dataclass
class RunTrace:
    """The traces of all ranks of a run: of the plan that ran last, and of the steps that all ranks have."""

    run: Path
    digest: str
    ranks: list[RankTrace]
    steps: list[int]
    notes: list[str]  # what was left out, and why

    def pick(self, step: int | None) -> list[int]:
        """The steps to look at: one, or all."""
        if step is None:
            return self.steps
        if step not in self.steps:
            raise InputError(f"step {step} of {self.run} was not traced; these were: {_some(self.steps)}")
        return [step]


def read_run(run: Path, only: Sequence[int] | None = None) -> RunTrace:
    """Read the trace of a run: of all ranks, or of some. InputError: there is none, or it is damaged."""
    if not run.is_dir():
        raise InputError(f"{run}: there is no such run; give the folder that run.dir named")
    first = rank_file(run, 0)
    if not first.exists():
        raise InputError(f"{run}: there is no {FOLDER}/{first.name}. A run is traced where "
                         "monitor.trace_every > 0")
    header, notes, ranks = _last_header(first), [], []
    for rank in range(header.world_size) if only is None else only:
        file = rank_file(run, rank)
        if not file.exists():
            raise InputError(f"{file} is missing: the run had {many(header.world_size, 'rank')}")
        ranks.append(_read_rank(file, rank, header.digest, notes))
    steps = sorted(set.intersection(*(set(rank.lines) for rank in ranks)))
    if not steps:
        raise InputError(f"{run}: no step was traced by all ranks")
    return RunTrace(run, header.digest, ranks, steps, notes)


class _Header(NamedTuple):
    here: Coordinate
    program: list[Instruction]
    lanes: list[str]
    digest: str
    world_size: int
    first_step: int


def _last_header(file: Path) -> _Header:
    """The last header of a file."""
    last = None
    for number, line, is_header in _lines(file, []):
        if is_header:
            last = _header(line, f"{file}, line {number}")
    if last is None:
        raise InputError(f"{file} has no header: it is damaged")
    return last


def _read_rank(file: Path, rank: int, digest: str, notes: list[str]) -> RankTrace:
    trace: RankTrace | None = None
    current = False  # whether the lines here are of the plan that is asked for
    for number, line, is_header in _lines(file, notes):
        where = f"{file}, line {number}"
        if is_header:
            header = _header(line, where)
            current = header.digest == digest
            if current and trace is None:
                trace = RankTrace(rank, header.here, header.program, header.lanes, set(), file)
            if current and trace is not None:
                trace.first_steps.add(header.first_step)
        elif match := re.match(r'\{"step":(\d+),', line):
            if current and trace is not None:
                trace.lines[int(match.group(1))] = (number, line)
        else:
            raise InputError(f"{where} is damaged: neither a header nor a step")
    if trace is None:
        raise InputError(f"{file} is of another plan than rank 0's last one, {digest}: the ranks' files are "
                         "not of one run")
    return trace


def _lines(file: Path, notes: list[str]) -> Iterator[tuple[int, str, bool]]:
    """(line number, line, whether it is a header). Half a line at the end is what a kill leaves, and is left
    out."""
    try:
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith("\n"):
                    yield number, line, line.startswith('{"rank":')
                else:
                    notes.append(f"{file} ends in the middle of line {number}, which is left out")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _header(line: str, where: str) -> _Header:
    try:
        values = json.loads(line)
        if tuple(values["columns"]) != COLUMNS:
            raise ValueError("the columns are of another version of threed")
        rows = values["train"]
        shown = [axis for axis in AXES if axis in values or axis not in QUIET]
        on = {axis: int(values[axis]) if axis in shown else 0 for axis in AXES}
        return _Header(Coordinate(on, shown),
                       [_instruction(*fields) for _, _, *fields in rows], [str(lane) for _, lane, *_ in rows],
                       str(values["digest"]), int(values["world_size"]), int(values["first_step"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{where} is damaged: {type(error).__name__}: {error}") from None


def _instruction(op: str, *fields: Any) -> Instruction:
    read = Instruction(Op(op), *fields)
    return read._replace(tier=Tier(read.tier))


def _decode(line: str, count: int, where: str) -> Trace:
    try:
        values = json.loads(line)
        issued, started, ended = lists = [[float(time) for time in values[name]] for name in LISTS]
        waits = [Wait(int(index), int(source), float(wait_s)) for index, source, wait_s in values["waits"]]
        ran = [Ran(int(index), float(start), float(ran_s)) for index, start, ran_s in values.get("ran", ())]
        trace = Trace(values["program"], float(values["begin"]), issued, started, ended, waits,
                      float(values["total_s"]), ran)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{where} is damaged: {type(error).__name__}: {error}") from None
    if any(len(times) != count for times in lists):
        raise InputError(f"{where} is damaged: it has not one time for each of {count} instructions")
    numbers = (trace.begin, trace.total_s, *(wait.wait_s for wait in waits),
               *(time for times in lists for time in times))
    if not all(math.isfinite(number) for number in numbers):
        raise InputError(f"{where} is damaged: not all of its times are finite")
    if any(not (0 <= wait.index <= count and -1 <= wait.source < count) for wait in waits):
        raise InputError(f"{where} is damaged: a wait is of no instruction")
    return trace


def _some(steps: list[int]) -> str:
    if len(steps) <= 12:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:5]))} ... {steps[-1]}"
