"""Save: every rank writes its part while the run goes on; the checkpoint becomes visible once it is complete.

    begin       [snapshot of weights and optimizer state, beside the next forward]      all ranks
    WRITING     tensors -> rank-NNNNN.safetensors with checksums, synced, read back     a thread of each rank
    CLEARING    the disk was full: older checkpoints are removed; then WRITING again    a thread of rank 0
    PUBLISHING  index, manifest, rename; then `latest`, and older ones are removed      a thread of rank 0
    UNDOING     something failed: the incomplete checkpoint is removed                  a thread of rank 0

Ranks send their progress with the numbers of each step (`status`), so all of them enter a stage after the
same step (`advance`), and no thread talks to another rank. Where the disk is full, older checkpoints of the
run are removed, all but the newest. A failure after the rename is only a warning: the checkpoint is saved.
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
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threed.base.files import sync, write_whole
from threed.checkpoint.format import (
    INDEX,
    LATEST,
    MANIFEST,
    POLL_S,
    REPLACED,
    FileEntry,
    Report,
    file_name,
    folder,
    index_of,
    name_of,
)
from threed.checkpoint.lineage import Lineage, write_latest
from threed.checkpoint.manifest import FORMAT, seal, unseal
from threed.checkpoint.older import OlderCheckpoints, said_of, tidy
from threed.checkpoint.shard_file import Item, write
from threed.comm.lanes import in_order
from threed.engine.engine import Engine
from threed.features.zero.boxes import boxes
from threed.features.zero.shard import counts
from threed.features.zero.units import UnitState

BUSY, DONE, FAILED, FULL = 0.0, 1.0, 2.0, 3.0  # a rank's status
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SaveStage(Enum):
    IDLE = "nothing is being saved"
    WRITING = "each rank writes its file"
    CLEARING = "the disk was full: rank 0 removes older checkpoints"
    PUBLISHING = "rank 0 makes the checkpoint visible"
    UNDOING = "it has failed: rank 0 removes the incomplete checkpoint"


class Outcome(NamedTuple):
    """How a save ended, the same on all ranks."""

    path: Path
    problem: str | None  # why there is no checkpoint
    written_s: float  # seconds since `begin`


class Saver:
    """Saves one rank's part of the checkpoints. All ranks call `begin` and `advance` after the same steps."""

    def __init__(self, engine: Engine, lineage: Lineage, synced: Callable[[], None],
                 proved: Path | None = None,
                 being_copied: Callable[[], Path | None] = lambda: None,
                 say: Callable[[str], None] = lambda line: None):
        """`synced` is called on rank 0 before a checkpoint becomes visible, to sync other files of the run.
        `proved`: the checkpoint that the run resumed from. `being_copied` returns the checkpoint that must
        not be removed before its copy has ended. `say` gets warnings about older checkpoints, on rank 0."""
        self._engine, self._comm, self._config = engine, engine.comm, engine.config
        self._lineage, self._synced = lineage, synced
        self._prunes = True  # whether older checkpoints may be removed
        # part of the temporary folder's name, so that no other run writes into it
        self._attempt = self._comm.broadcast(uuid.uuid4().hex[:8])
        self._older = OlderCheckpoints(self._config, lineage, self._attempt, proved, being_copied, say)
        self.stage = SaveStage.IDLE
        self.waits_for = torch.empty(0, dtype=torch.int64)  # ranks that have not finished the stage
        self._thread: threading.Thread | None = None
        self._result: Any = None  # of the thread's work
        self._status = DONE
        self._cleared = False  # whether older checkpoints were removed to make room for this one
        self._problem = ""  # why there will be no checkpoint
        self._begun_s = 0.0
        self._manifest: dict[str, Any] = {}  # what it is to say, but for parameters and files
        self.step = 0  # of the checkpoint under way, or of the last one
        self._items: list[Item] = []

    @property
    def _final(self) -> Path:
        return folder(self._config) / name_of(self.step)

    @property
    def _aside(self) -> Path:
        return self._final.with_suffix(f".{self._attempt}.tmp")

    def begin(self, counters: dict[str, Any]) -> None:
        """Save the run's state after this step. `counters`: the training loop's entries of the manifest."""
        assert self.stage is SaveStage.IDLE
        self._begun_s, self._cleared, self._prunes = time.monotonic(), False, True
        zero, mesh = self._engine.zero, self._comm.mesh
        self.step = zero.step_number
        self._manifest = {
            "format": FORMAT, "step": self.step, "updates": zero.updates,
            "loss_scaler": zero.scaler.state(),
            "waiting": None, **counters,
            "plan": self._engine.analysis.digest,
            "lineage": self._lineage, "mesh": {**mesh.sizes, "order": list(mesh.order)},
            "torch": torch.__version__, "config": zero.config.to_dict(),
        }
        self._engine.snapshot()
        self._items = list(itertools.chain.from_iterable(map(self._of_unit, zero.states.values())))
        self._start_writing()

    def _of_unit(self, state: UnitState) -> list[Item]:
        """The tensors of a parameter unit that this rank writes."""
        place = self._comm.here.on
        if not state.writes:
            return []
        values = state.to_save()
        first = state.part.shard[0]
        return [Item(kind, box, lambda take=take, box=box: take(box.start - first, box.stop - first))
                for kind, take in values.items() for box in boxes(state.part.layout, place, *state.part.shard)
                if counts(box.axes, place)]

    @property
    def status(self) -> float:
        """This rank's progress with the stage: BUSY, DONE, FAILED or FULL."""
        return BUSY if self._thread is not None and self._thread.is_alive() else self._status

    def advance(self, statuses: torch.Tensor) -> Outcome | None:
        """Enter the next stage if the statuses allow it (`statuses`: of all ranks, by rank, [ranks]). Returns
        how the save ended, once it has."""
        if self.stage is SaveStage.IDLE:
            return None
        asked = statuses if self.stage is SaveStage.WRITING else statuses[:1]
        self.waits_for = (asked == BUSY).nonzero().view(-1)
        if len(self.waits_for):
            return None
        worst = float(asked.max())
        if self.stage is SaveStage.UNDOING:
            return self._end(self._problem)
        if worst != DONE:
            self._problem = self._first_problem()
            only_full = not (asked == FAILED).any()
            if only_full and self._config.checkpoint.keep and self._prunes and not self._cleared:
                self._cleared = True
                self._start(SaveStage.CLEARING, lambda: self._older.make_room(self.step, self._problem),
                            only_first=True)
            else:  # an Outcome comes only after UNDOING: the next save may write into the same folder at once
                self._start(SaveStage.UNDOING, self._undo, only_first=True)
        elif self.stage is SaveStage.WRITING:
            reports = self._comm.gather(self._result)
            self._start(SaveStage.PUBLISHING, lambda: self._publish(reports or []), only_first=True)
        elif self.stage is SaveStage.CLEARING:
            self._start_writing()
        else:
            return self._end(None)
        return None

    def drain(self, most_s: float = math.inf, prunes: bool = True) -> Outcome | None:
        """Wait until the save under way has ended; None if it has not after about `most_s` seconds. `prunes`:
        whether older checkpoints may be removed from now on."""
        assert self.stage is not SaveStage.IDLE
        self._prunes, polls = prunes, 0
        while polls * POLL_S < most_s:  # all ranks have the same count, and not the same clock
            polls += 1
            if self._thread is not None:
                self._thread.join(POLL_S)
            outcome = self.advance(self._comm.numbers(self.status))
            if outcome is not None:
                return outcome
        return None

    # ---- the stages' work

    def _start(self, stage: SaveStage, work: Callable[[], Any], only_first: bool = False) -> None:
        """Enter a stage. Its work runs on a thread: a disk may be slow, and a rank that does not answer
        meanwhile ends the run."""
        self.stage, self._result, self._status, self._thread = stage, None, DONE, None
        if only_first and self._comm.rank != 0:
            return

        def body() -> None:
            try:
                self._result = work()
            except Exception as error:  # `_first_problem` collects the result
                no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
                self._status = FULL if no_room else FAILED
                self._result = f"rank {self._comm.rank} cannot write to {self._aside}: {said_of(error)}"

        self._thread = threading.Thread(target=body, daemon=True, name="save")
        self._thread.start()

    def _start_writing(self) -> None:
        """What no snapshot has is read from the device, after the step that is under way there."""
        self._start(SaveStage.WRITING, in_order(self._comm.device, self._write))

    def _write(self) -> Report:
        self._aside.parent.mkdir(parents=True, exist_ok=True)
        # Another rank may be faster. (`exist_ok` would hide other failures, too.)
        with contextlib.suppress(FileExistsError):
            self._aside.mkdir()
        if self._comm.rank == 0:
            self._older.sweep(self._aside)
        for state in self._engine.states.values():
            if state.snapshot is not None:
                state.snapshot.wait()
        return write(self._aside / file_name(self._comm.rank), self._comm.rank, self._items)

    def _publish(self, reports: list[Report]) -> None:
        aside, final = self._aside, self._final
        describe(aside, self._manifest, reports)
        self._synced()
        sync(aside)
        older = final.with_suffix(REPLACED)
        if final.exists():  # this step was run before: the run has resumed from an older checkpoint
            shutil.rmtree(older, ignore_errors=True)
            os.replace(final, older)
        os.replace(aside, final)
        sync(final.parent)
        others = self._older
        with others.warns(f"{older} could not be looked into"):
            others.keep_foreign(final, older)
        others.proved = final  # it is saved, even if anything below fails
        with others.warns(f"{final.parent / LATEST} does not name {final.name}, which is saved, and from "
                          "which a run resumes all the same"):
            write_latest(self._config, final.name, self._lineage)
        with others.warns(f"older checkpoints in {final.parent} were not removed as checkpoint.keep asks"):
            keep = self._config.checkpoint.keep
            others.remove(others.own(self.step)[keep:] if keep and self._prunes else [])
        others.sweep(aside)

    def _undo(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            tidy(self._config)

    def _first_problem(self) -> str:
        """The problem of the first rank that has one, on all ranks. All ranks call this together."""
        problems = self._comm.all_gather(self._result if self._status in (FAILED, FULL) else None)
        problem = next((each for each in problems if each is not None), None)
        assert problem is not None, "a rank has failed without a problem"
        return problem

    def _end(self, problem: str | None) -> Outcome:
        self.stage, self._items, self._thread, self._result = SaveStage.IDLE, [], None, None
        return Outcome(self._final, problem, time.monotonic() - self._begun_s)


def describe(aside: Path, manifest: dict[str, Any], reports: list[Report]) -> None:
    """Write the index and the manifest of a checkpoint whose ranks have written their files. OSError where
    something reads back otherwise than it was written."""
    index, parameters = index_of(reports)
    (aside / INDEX).write_bytes(index)
    sync(aside / INDEX)
    files = {file_name(rank): FileEntry(report.size, *report.header)
             for rank, report in enumerate(reports) if report.size}
    entries = {name: entry._asdict() for name, entry in parameters.items()}
    write_whole(aside / MANIFEST, seal({**manifest, "parameters": entries, "files": files}), lasting=True)
    for name, entry in files.items():
        if (size := (aside / name).stat().st_size) != entry.size:
            raise OSError(f"{name} has {size} bytes, and its rank wrote {entry.size}")
    if (aside / INDEX).read_bytes() != index or unseal(aside).parameters != parameters:
        raise OSError(f"{INDEX} or {MANIFEST} reads back otherwise than it was written")
