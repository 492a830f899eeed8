"""Older: the older checkpoints of a run, and their removal. The new one is saved, whatever fails here: each
failure is a warning."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from threed.checkpoint.format import REPLACED, folder, foreign
from threed.checkpoint.lineage import Lineage, own
from threed.schema import Config

REMOVED = ".removed.tmp"


class OlderCheckpoints:
    """What rank 0 removes. `step` is that of the checkpoint under way."""

    def __init__(self, config: Config, lineage: Lineage, attempt: str, proved: Path | None,
                 being_copied: Callable[[], Path | None], say: Callable[[str], None]):
        """As Saver's. `attempt`: part of the names of this start's temporary folders."""
        self._config, self._lineage, self._attempt = config, lineage, attempt
        self._being_copied, self._say = being_copied, say
        self.proved = proved  # the newest checkpoint that this run has read, or read back, whole
        self._warned: set[str] = set()

    def own(self, step: int) -> list[Path]:
        """The checkpoints of this run's lineage, the newest first. Only these may be removed."""
        def warn(path: Path, why: str) -> None:
            self._warn(f"{path.name} is left alone, whatever checkpoint.keep says", why)

        return own(self._config, self._lineage, step, warn)

    def make_room(self, step: int, why: str) -> None:
        """Remove older checkpoints of the lineage, all but the newest that this run has read, or read back.
        (`latest` may name a damaged one.)"""
        mine = self.own(step)
        proved = [path for path in mine if self.proved is not None
                  and path.resolve() == self.proved.resolve()]
        kept = [*(proved or mine[:1]), self._being_copied()]
        older = [path for path in mine if path not in kept]
        names = ", ".join(path.name for path in older)
        room = (f"{names} make room for the checkpoint of step {step}" if older
                else "no older checkpoint can make room; it is tried once more")
        self._say(f"warning: {why}: {room}")
        self.remove(older)

    def remove(self, older: list[Path]) -> None:
        """Remove older checkpoints. A failure is a warning, and the next save tries again."""
        for path in older:
            if path != self._being_copied():
                with self.warns(f"{path} was not removed at once, and is tried again after the next save"):
                    remove(path)

    def keep_foreign(self, final: Path, older: Path) -> None:
        """Rename the folder that a checkpoint has replaced where it has files that no save has written."""
        if found := foreign(older):
            beside = older.with_name(f"{final.name}.found-{uuid.uuid4().hex[:8]}")
            os.replace(older, beside)
            self._warn(f"{final} was there, with what no save has written; it is now {beside}",
                       ", ".join(found))

    def sweep(self, now: Path) -> None:
        """Try again to remove folders that could not be removed before: of failed saves of this start, and of
        older checkpoints. `now`: the folder of the save under way."""
        here = folder(self._config)
        with self.warns(f"temporary folders in {here} could not be removed"):
            for aside in [*here.glob(f"*.{self._attempt}.tmp"), *here.glob(f"*{REMOVED}"),
                          *here.glob(f"*{REPLACED}")]:
                replaced = aside.name.endswith(REPLACED)
                if aside != now and not (replaced and not _whole(aside).exists()):
                    _remove_all(aside)

    @contextlib.contextmanager
    def warns(self, what: str) -> Iterator[None]:
        """A failure inside prints a warning, once for each `what`, and is not raised."""
        try:
            yield
        except Exception as error:
            self._warn(what, said_of(error))

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._say(f"warning: {what}: {why}")


def said_of(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _whole(replaced: Path) -> Path:
    """The checkpoint that replaced this older one."""
    return replaced.with_name(replaced.name.removesuffix(REPLACED))


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a process killed meanwhile leaves no folder that
    looks like a checkpoint."""
    aside = path.with_suffix(REMOVED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    _remove_all(aside)


def _remove_all(path: Path) -> None:
    """Remove as much of a folder as possible; OSError of the first failure."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def tidy(config: Config) -> None:
    """Remove what a killed run left half written or half removed; restore the checkpoint that it was about to
    replace."""
    for aside in folder(config).glob("*.tmp"):
        if aside.name.endswith(REPLACED) and not _whole(aside).exists():
            os.replace(aside, _whole(aside))
        elif aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
