"""Save: every rank writes what it owns while the run goes on; the checkpoint becomes visible only when it is
whole.

    begin       [snapshot of weights and optimizer state, beside the next forward]      all ranks
    WRITING     tensors -> rank-NNNNN.safetensors, checksummed, to the disk, read back  a thread of each rank
    CLEARING    the disk was full: older checkpoints are removed; then WRITING again    a thread of rank 0
    PUBLISHING  index, manifest, rename: it is saved. `latest`; older ones are removed  a thread of rank 0
    UNDOING     something failed: what there is of the checkpoint is removed            a thread of rank 0

Ranks tell each other how far they are with the numbers of each step (`status`), so all of them go from stage
to stage after the same step (`advance`), and no thread talks to another rank. Where a disk is full, older
checkpoints of the run make room, all but the newest. What goes wrong after the rename is a warning.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threed.checkpoint.boxes import boxes
from threed.checkpoint.format import (
    FORMAT,
    INDEX,
    LATEST,
    MANIFEST,
    Report,
    file_name,
    folder,
    index_of,
    name_of,
    replace_text,
    seal,
    sync,
    unseal,
)
from threed.checkpoint.lineage import Lineage, own, write_latest
from threed.checkpoint.write import Item, write
from threed.engine.engine import Engine
from threed.schema import Config
from threed.zero.shard import counts
from threed.zero.state import UnitState

POLL_S = 0.1  # between two exchanges of ranks that have nothing to do but write
BUSY, DONE, FAILED, FULL = 0.0, 1.0, 2.0, 3.0  # what a rank says of its work
REMOVED, REPLACED = ".removed.tmp", ".replaced.tmp"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Stage(Enum):
    IDLE = "nothing is being saved"
    WRITING = "each rank writes its file"
    CLEARING = "the disk was full: rank 0 removes older checkpoints"
    PUBLISHING = "rank 0 makes the checkpoint visible"
    UNDOING = "it has failed: rank 0 removes what there is of it"


class Outcome(NamedTuple):
    """How a save ended, the same on all ranks."""

    path: Path
    problem: str | None  # why there is no checkpoint
    written_s: float  # from its begin


class Saver:
    """One rank's part in the run's checkpoints. All ranks call `begin` and `advance` after the same steps."""

    def __init__(self, engine: Engine, lineage: Lineage, synced: Callable[[], None],
                 proved: Path | None = None,
                 being_copied: Callable[[], Path | None] = lambda: None,
                 say: Callable[[str], None] = lambda line: None):
        """`synced` is called on rank 0 before a checkpoint becomes visible: what else must be on the disk
        then. `proved`: the checkpoint that the run goes on from. `being_copied` says which one stays until
        its copy is over; `say` is told on rank 0 what is done with older ones."""
        self._engine, self._comm, self._config = engine, engine.comm, engine.config
        self._lineage, self._synced, self._being_copied, self._say = lineage, synced, being_copied, say
        self._proved = proved  # the newest that this run has read, or read back, whole
        self._prunes = True  # whether older checkpoints may go
        self._warned: set[str] = set()
        # nobody else writes into a folder of this name
        self._attempt = self._comm.broadcast(uuid.uuid4().hex[:8])
        self.stage = Stage.IDLE
        self.waits_for: list[int] = []  # ranks that are not done with the stage
        self._thread: threading.Thread | None = None
        self._result: Any = None  # of the thread's work
        self._status = DONE
        self._cleared = False  # whether older checkpoints have made room for this one
        self._problem = ""  # why there will be no checkpoint
        self._begun_s = 0.0
        self._manifest: dict[str, Any] = {}
        self._items: list[Item] = []

    @property
    def step(self) -> int:
        """Of the checkpoint under way, or of the last one."""
        return self._manifest["step"]

    @property
    def _final(self) -> Path:
        return folder(self._config) / name_of(self.step)

    @property
    def _aside(self) -> Path:
        return self._final.with_suffix(f".{self._attempt}.tmp")

    def begin(self, counters: dict[str, Any]) -> None:
        """Save the run as it is after this step. `counters`: what the loop counts."""
        assert self.stage is Stage.IDLE
        self._begun_s, self._cleared, self._prunes = time.monotonic(), False, True
        zero, mesh = self._engine.zero, self._comm.mesh
        self._manifest = {
            "format": FORMAT, "step": zero.step_number, "updates": zero.updates,
            "loss_scaler": zero.scaler.state(),
            "waiting": asdict(zero.waiting) if zero.waiting else None, **counters,
            "plan": self._engine.plan.digest,
            "lineage": self._lineage, "mesh": {**mesh.sizes, "order": list(mesh.order)},
            "torch": torch.__version__, "config": zero.config.to_dict(),
        }
        self._engine.snapshot()
        self._items = list(itertools.chain.from_iterable(map(self._of_unit, zero.states.values())))
        self._start(Stage.WRITING, self._write)

    def _of_unit(self, state: UnitState) -> list[Item]:
        """What this rank writes of a parameter unit."""
        place = self._comm.here.on
        if not state.writes:
            return []
        values = state.to_save(self._engine.zero.waiting is not None)
        first = state.shard[0]
        return [Item(kind, box, lambda take=take, box=box: take(box.start - first, box.stop - first))
                for kind, take in values.items() for box in boxes(state.layout, place, *state.shard)
                if counts(box.axes, place)]

    @property
    def status(self) -> float:
        """How far this rank is with the stage's work."""
        return BUSY if self._thread is not None and self._thread.is_alive() else self._status

    def advance(self, statuses: Sequence[float]) -> Outcome | None:
        """All ranks' statuses, by rank -> the next stage; how the save ended, if it has."""
        if self.stage is Stage.IDLE:
            return None
        asked = statuses if self.stage is Stage.WRITING else statuses[:1]
        self.waits_for = [rank for rank, status in enumerate(asked) if status == BUSY]
        if self.waits_for:
            return None
        worst = max(asked)
        if self.stage is Stage.UNDOING:
            return self._end(self._problem)
        if worst != DONE:
            self._problem = self._first_problem()
            if FAILED not in asked and self._config.checkpoint.keep and self._prunes and not self._cleared:
                self._cleared = True
                self._start(Stage.CLEARING, self._clear, only_first=True)
            else:  # all hear of it once it is done: they may write into the same folder again at once
                self._start(Stage.UNDOING, self._undo, only_first=True)
        elif self.stage is Stage.WRITING:
            reports = self._comm.gather(self._result)
            self._start(Stage.PUBLISHING, lambda: self._publish(reports or []), only_first=True)
        elif self.stage is Stage.CLEARING:
            self._start(Stage.WRITING, self._write)
        else:
            return self._end(None)
        return None

    def drain(self, most_s: float = math.inf, prunes: bool = True) -> Outcome | None:
        """Do nothing else until the save under way has ended, or for about so many seconds: then None.
        `prunes`: whether older checkpoints may go for it from now on."""
        assert self.stage is not Stage.IDLE
        self._prunes, polls = prunes, 0
        while polls * POLL_S < most_s:  # a count, on which ranks agree, not a clock
            polls += 1
            if self._thread is not None:
                self._thread.join(POLL_S)
            outcome = self.advance(self._comm.exchange(self.status))
            if outcome is not None:
                return outcome
        return None

    # ---- the stages' work

    def _start(self, stage: Stage, work: Callable[[], Any], only_first: bool = False) -> None:
        """Enter a stage. The work runs on a thread: a disk may be slow, and a rank that stops answering is
        noticed."""
        self.stage, self._result, self._status, self._thread = stage, None, DONE, None
        if only_first and self._comm.rank != 0:
            return

        def body() -> None:
            try:
                self._result = work()
            except Exception as error:  # said by whoever collects the results
                no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
                self._status = FULL if no_room else FAILED
                self._result = f"rank {self._comm.rank} cannot write to {self._aside}: {_said_of(error)}"

        self._thread = threading.Thread(target=body, daemon=True, name="save")
        self._thread.start()

    def _write(self) -> Report:
        self._aside.parent.mkdir(parents=True, exist_ok=True)
        # `exist_ok` hides other failures, too, where another rank was faster
        with contextlib.suppress(FileExistsError):
            self._aside.mkdir()
        if self._comm.rank == 0:
            self._sweep()
        for state in self._engine.states.values():
            if state.snapshot is not None:
                state.snapshot.wait()
        return write(self._aside / file_name(self._comm.rank), self._comm.rank, self._items)

    def _clear(self) -> None:
        """Older checkpoints of the lineage make room, all but the newest: the one that this run has read, or
        read back. `latest` may name a damaged one."""
        mine = self._own()
        proved = [path for path in mine if self._proved is not None
                  and path.resolve() == self._proved.resolve()]
        stays = [*(proved or mine[:1]), self._being_copied()]
        older = [path for path in mine if path not in stays]
        names = ", ".join(path.name for path in older)
        self._say(f"warning: {self._problem}: " + (f"{names} make room for the checkpoint of step {self.step}"
                                                   if older else
                                                   "no older checkpoint can make room; it is tried once "
                                                   "more"))
        self._remove(older)

    def _publish(self, reports: list[Report]) -> None:
        aside, final = self._aside, self._final
        index, parameters = index_of(reports)
        (aside / INDEX).write_bytes(index)
        sync(aside / INDEX)
        files = {file_name(rank): [report.size, *report.header] for rank,
                 report in enumerate(reports) if report.size}
        replace_text(aside / MANIFEST, seal({**self._manifest, "parameters": parameters, "files": files}))
        for name, (size, *_) in files.items():
            if (aside / name).stat().st_size != size:
                raise OSError(f"{name} has {(aside / name).stat().st_size} bytes, and its rank wrote {size}")
        if (aside / INDEX).read_bytes() != index or unseal(aside)["parameters"] != parameters:
            raise OSError(f"{INDEX} or {MANIFEST} reads back otherwise than it was written")
        self._synced()
        sync(aside)
        older = final.with_suffix(REPLACED)
        if final.exists():  # a step that is run again after a resume from an older checkpoint
            shutil.rmtree(older, ignore_errors=True)
            os.replace(final, older)
        os.replace(aside, final)
        sync(final.parent)
        self._proved = final  # it is saved, whatever fails from here on
        with self._warns(f"{final.parent / LATEST} does not name {final.name}, which is saved, and which a "
                         f"resume takes"):
            write_latest(self._config, final.name, self._lineage)
        with self._warns(f"older checkpoints in {final.parent} stay beyond checkpoint.keep"):
            keep = self._config.checkpoint.keep
            self._remove(self._own()[keep:] if keep and self._prunes else [])
        self._sweep()

    def _own(self) -> list[Path]:
        """The run's checkpoints, the newest first. Of others nothing is known that would allow to remove
        them."""
        return own(self._config, self._lineage, self.step,
                   lambda path, why: self._warn(f"{path.name} is left alone, whatever checkpoint.keep says",
                                                why))

    def _remove(self, older: list[Path]) -> None:
        """Where one cannot be removed, the new one is there all the same, and the next save tries again."""
        for path in older:
            if path != self._being_copied():
                with self._warns(f"{path} was not removed at once, and is tried again after the next save"):
                    remove(path)

    def _sweep(self) -> None:
        """What could not be removed when it was to go: of failed saves of this start, and of older
        checkpoints."""
        here = folder(self._config)
        with self._warns(f"what is to go from {here} is still there"):
            for aside in [*here.glob(f"*.{self._attempt}.tmp"), *here.glob(f"*{REMOVED}"),
                          *here.glob(f"*{REPLACED}")]:
                replaced = aside.name.endswith(REPLACED)
                if aside != self._aside and not (replaced and not _whole(aside).exists()):
                    _remove_all(aside)

    @contextlib.contextmanager
    def _warns(self, what: str) -> Iterator[None]:
        """A failure of what follows is a line, once, and no more."""
        try:
            yield
        except Exception as error:
            self._warn(what, _said_of(error))

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._say(f"warning: {what}: {why}")

    def _undo(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            tidy(self._config)

    def _first_problem(self) -> str:
        """Of the first rank that has one, on all ranks, which call it together."""
        problems = self._comm.exchange(self._result if self._status in (FAILED, FULL) else None)
        problem = next((each for each in problems if each is not None), None)
        assert problem is not None, "a rank has failed, and says nothing"
        return problem

    def _end(self, problem: str | None) -> Outcome:
        self.stage, self._items, self._thread, self._result = Stage.IDLE, [], None, None
        return Outcome(self._final, problem, time.monotonic() - self._begun_s)


def _said_of(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _whole(replaced: Path) -> Path:
    """The checkpoint that took the place of one."""
    return replaced.with_name(replaced.name.removesuffix(REPLACED))


def remove(path: Path) -> None:
    """Under another name first: what is killed in the middle of it leaves nothing that looks like a
    checkpoint."""
    aside = path.with_suffix(REMOVED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    _remove_all(aside)


def _remove_all(path: Path) -> None:
    """Remove all of a folder that can be removed; OSError of the first that could not."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def tidy(config: Config) -> None:
    """Remove what a killed run has left half made or half removed; bring back what it was about to
    replace."""
    for aside in folder(config).glob("*.tmp"):
        if aside.name.endswith(REPLACED) and not _whole(aside).exists():
            os.replace(aside, _whole(aside))
        elif aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
