"""Save: every rank writes what it owns while the run goes on; the checkpoint becomes visible only when it is whole.

    begin       [snapshot of weights and optimizer state, beside the next forward]      all ranks
    WRITING     tensors -> rank-NNNNN.safetensors, checksummed, to the disk, read back  a thread of each rank
    PUBLISHING  index, manifest, rename, `latest`; older checkpoints are removed        a thread of rank 0

Ranks tell each other how far they are with the numbers of each step (`status`), so all of them go from stage to stage after the
same step (`advance`), and no thread talks to another rank. Where a disk is full, older checkpoints make room, all but the
newest, and what was to be written is written again.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threed.checkpoint.boxes import boxes
from threed.checkpoint.format import (
    FORMAT,
    INDEX,
    MANIFEST,
    Report,
    checkpoints,
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


class Outcome(NamedTuple):
    """How a save ended, the same on all ranks."""

    path: Path
    problem: str | None  # why there is no checkpoint
    written_s: float  # from its begin


class Saver:
    """One rank's part in the run's checkpoints. All ranks call `begin` and `advance` after the same steps."""

    def __init__(self, engine: Engine, lineage: Lineage, synced: Callable[[], None], sound: Path | None = None,
                 held: Callable[[], Path | None] = lambda: None, say: Callable[[str], None] = lambda line: None):
        """`synced` is called on rank 0 before a checkpoint becomes visible: what else must be on the disk then. `sound`: the
        checkpoint that the run goes on from. `held` says which one is being copied elsewhere, and stays until that is over;
        `say` is told on rank 0 what is done with older ones."""
        self._engine, self._comm, self._config = engine, engine.comm, engine.config
        self.prunes = True
        self._lineage, self._synced, self._held, self._say = lineage, synced, held, say
        self._sound = sound  # the newest that was read whole by this run
        self._attempt = self._comm.broadcast(uuid.uuid4().hex[:8])  # nobody else writes into a folder of this name
        self.stage = Stage.IDLE
        self.waits_for: list[int] = []  # ranks that are not done with the stage
        self._thread: threading.Thread | None = None
        self._result: Any = None  # of the thread's work
        self._status = DONE
        self._cleared = False  # whether older checkpoints have made room for this one
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
        self._begun_s, self._cleared = time.monotonic(), False
        zero, mesh = self._engine.zero, self._comm.mesh
        self._manifest = {
            "format": FORMAT, "step": zero.step_number, "updates": zero.updates, "loss_scaler": zero.scaler.state(),
            "waiting": asdict(zero.waiting) if zero.waiting else None, **counters, "plan": self._engine.plan.digest,
            "lineage": self._lineage, "mesh": {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp, "order": list(mesh.order)},
            "torch": torch.__version__, "config": zero.config.to_dict(),
        }
        self._engine.snapshot()
        self._items = list(itertools.chain.from_iterable(map(self._of_unit, zero.states.values())))
        self._start(Stage.WRITING, self._write)

    def _of_unit(self, state: UnitState) -> list[Item]:
        """What this rank writes of a parameter unit."""
        here = self._comm.here
        if not state.writes:
            return []
        values = state.to_save(self._engine.zero.waiting is not None)
        first = state.shard[0]
        return [Item(kind, box, lambda take=take, box=box: take(box.start - first, box.stop - first))
                for kind, take in values.items() for box in boxes(state.layout, here.tp, *state.shard)
                if here.tp == 0 or not box.replicated]

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
        if worst == FULL and FAILED not in asked and self._config.checkpoint.keep and not self._cleared:
            self._cleared = True
            problem = self._problem()
            self._start(Stage.CLEARING, lambda: self._clear(problem), only_first=True)
        elif worst != DONE:
            return self._give_up()
        elif self.stage is Stage.WRITING:
            reports = self._comm.gather(self._result)
            self._start(Stage.PUBLISHING, lambda: self._publish(reports or []), only_first=True)
        elif self.stage is Stage.CLEARING:
            self._start(Stage.WRITING, self._write)
        else:
            return self._end(None)
        return None

    def drain(self, most_s: float = math.inf) -> Outcome | None:
        """Do nothing else until the save has ended, or for about so many seconds: then None."""
        polls = 0
        while polls * POLL_S < most_s:  # a count, on which ranks agree, not a clock
            polls += 1
            if self._thread is not None:
                self._thread.join(POLL_S)
            elif self._comm.rank == 0:
                time.sleep(POLL_S)
            outcome = self.advance(self._comm.exchange(self.status))
            if outcome is not None:
                return outcome
        return None

    # ---- the stages' work

    def _start(self, stage: Stage, work: Callable[[], Any], only_first: bool = False) -> None:
        """Enter a stage. The work runs on a thread: a disk may be slow, and a rank that stops answering is noticed."""
        self.stage, self._result, self._status, self._thread = stage, None, DONE, None
        if only_first and self._comm.rank != 0:
            return

        def body() -> None:
            try:
                self._result = work()
            except Exception as error:  # said by whoever collects the results
                no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
                self._status = FULL if no_room else FAILED
                what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._result = f"rank {self._comm.rank} cannot write to {self._aside}: {what}"

        self._thread = threading.Thread(target=body, daemon=True, name="save")
        self._thread.start()

    def _write(self) -> Report:
        self._aside.mkdir(parents=True, exist_ok=True)
        if self._comm.rank == 0:
            self._sweep()
        for state in self._engine.states.values():
            state.snapped()
        return write(self._aside / file_name(self._comm.rank), self._comm.rank, self._items)

    def _clear(self, problem: str | None) -> None:
        """All but the newest make room: the one that this run has read, or read back. `latest` may name a damaged one."""
        complete = checkpoints(self._config)
        sound = [path for path in complete if self._sound is not None and path.resolve() == self._sound.resolve()]
        older = [path for path in complete if path not in (sound or complete[:1])]
        if older:
            names = ", ".join(path.name for path in older)
            self._say(f"warning: {problem}: {names} make room for the checkpoint of step {self.step}")
        for path in older:
            remove(path)

    def _publish(self, reports: list[Report]) -> None:
        aside, final = self._aside, self._final
        index, parameters = index_of(reports)
        (aside / INDEX).write_bytes(index)
        sync(aside / INDEX)
        files = {file_name(rank): [report.size, *report.header] for rank, report in enumerate(reports) if report.size}
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
        write_latest(self._config, final.name, self._lineage)
        self._sound = final
        shutil.rmtree(older, ignore_errors=True)
        self._prune()
        self._sweep()

    def _prune(self) -> None:
        """Older checkpoints go. Where one cannot, the new one is there all the same, and the next save tries again."""
        keep = self._config.checkpoint.keep
        for path in own(self._config, self._lineage, self.step)[keep:] if keep and self.prunes else ():
            try:
                if path != self._held():
                    remove(path)
            except OSError as error:
                self._say(f"warning: {path} cannot be removed ({error.strerror}): it stays, beyond checkpoint.keep={keep}")

    def _sweep(self) -> None:
        """What could not be removed when it was to go: of failed saves of this start, and of older checkpoints."""
        for aside in [*folder(self._config).glob(f"*.{self._attempt}.tmp"), *folder(self._config).glob(f"*{REMOVED}")]:
            if aside != self._aside:
                shutil.rmtree(aside, ignore_errors=True)

    def _give_up(self) -> Outcome:
        problem = self._problem()
        if self._comm.rank == 0:  # before the others hear of it: they may write into the same folder again at once
            shutil.rmtree(self._aside, ignore_errors=True)
            with contextlib.suppress(OSError):
                tidy(self._config)
        return self._end(self._comm.broadcast(problem))

    def _problem(self) -> str | None:
        """The first rank's that has one, on rank 0. All ranks call it together."""
        problems = self._comm.gather(self._result if self._status in (FAILED, FULL) else None)
        return next((each for each in problems or () if each is not None), None)

    def _end(self, problem: str | None) -> Outcome:
        self.stage, self._items, self._thread, self._result = Stage.IDLE, [], None, None
        return Outcome(self._final, problem, time.monotonic() - self._begun_s)


def remove(path: Path) -> None:
    """Under another name first: what is killed in the middle of it leaves nothing that looks like a checkpoint."""
    aside = path.with_suffix(REMOVED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def tidy(config: Config) -> None:
    """Remove what a killed run has left half made or half removed; bring back what it was about to replace."""
    for aside in folder(config).glob("*.tmp"):
        whole = aside.with_suffix("").with_suffix("")
        if aside.name.endswith(REPLACED) and not whole.exists():
            os.replace(aside, whole)
        elif aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
