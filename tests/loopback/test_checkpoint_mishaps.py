"""Checkpoints in loopback: what must not be lost, or be called saved, when several things go wrong at a
time."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loopback.test_checkpoint import COUNTERS, DP, TP, at, named, on_ranks, saved_after, step, take
from threed.base import files
from threed.base.errors import InputError
from threed.checkpoint import box_reader as reading
from threed.checkpoint import load as loading
from threed.checkpoint import older
from threed.checkpoint import save as saving
from threed.checkpoint.choose import begin_lineage
from threed.checkpoint.format import Manifest
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Outcome, Saver
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.features.zero.snapshot import Snapshot
from threed.schema import Config


def go_on(config: Config, steps: int = 1, prunes: bool = True, **how: Any) -> tuple[str | None, Outcome]:
    """Resume, train and save, as a run does: from where, and how the save ended. `how`: to the Saver."""
    def work(engine: Engine, comm: Comm) -> tuple[str | None, Outcome]:
        resumed = resume(config, engine.zero)
        if comm.rank == 0:
            begin_lineage(config, resumed.path, resumed.lineage)
        step(engine, comm, steps)
        saver = Saver(engine, resumed.lineage, lambda: None, resumed.path, **how)
        saver.begin(COUNTERS)
        outcome = saver.drain(prunes=prunes)
        assert outcome is not None
        return resumed.path.name if resumed.path else None, outcome

    return on_ranks(config, work)[0]


def no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("latest", ["of the damaged one", ""])
def test_room_is_not_made_of_the_last_good_one(latest, tmp_path, monkeypatch):
    """The newest is damaged, the run goes on from the one before it, and the disk is full: that one stays,
    whatever `latest` says."""
    config = at(tmp_path, *DP)
    for steps in (1, 2, 3):
        saved_after(config, steps)
    folder = tmp_path / "checkpoints"
    (folder / "step-00000003" / "rank-00001.safetensors").write_bytes(b"short")
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", no_room)
        if not latest:
            patch.setattr(saving, "write_latest", lambda *_: None)
            (folder / "latest").write_text("")
        origin, outcome = go_on(config, 2)
    assert origin == "step-00000002" and outcome.problem is not None
    assert take(config)[0] == "step-00000002"


def test_room_is_not_made_in_vain(tmp_path, monkeypatch):
    """One rank has no room, another cannot write at all: older checkpoints stay."""
    config = at(tmp_path, *DP)
    for steps in (1, 2):
        saved_after(config, steps)

    def fail(path: Path, rank: int, items: list) -> Any:
        raise OSError((28, 5)[rank], "it fails")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", fail)
        _, outcome = go_on(config)
    assert outcome.problem is not None
    left = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert left == {"step-00000001", "step-00000002"}


def names(path: Path) -> set[str]:
    return {each.name for each in (path / "checkpoints").iterdir()} - {"latest"}


def test_room_is_not_made_of_anothers(tmp_path, monkeypatch):
    """A start from a checkpoint that was named leaves newer ones behind on purpose: they are not its own to
    remove. The one that is being copied stays, too."""
    config = at(tmp_path, "checkpoint.keep=4")
    for steps in (1, 2, 5, 6):
        saved_after(config, steps)
    begun = named(config, tmp_path / "checkpoints" / "step-00000002")
    go_on(begun)
    monkeypatch.setenv("THREED_RESTARTS", "1")
    copied, said = tmp_path / "checkpoints" / "step-00000002", []
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", no_room)
        origin, outcome = go_on(begun, being_copied=lambda: copied, say=said.append)
    assert origin == "step-00000003" and "No space left" in str(outcome.problem)
    assert names(tmp_path) == {f"step-{step:08d}" for step in (2, 3, 5, 6)}
    assert [line.rpartition(": ")[2]
            for line in said] == ["step-00000001 make room for the checkpoint of step 4"]


def test_room_is_not_made_for_the_doubtful(tmp_path, monkeypatch):
    """The save of a run that fails may hold the weights that made it fail: it pushes out nothing, on a full
    disk neither."""
    config = at(tmp_path)
    for steps in (1, 2):
        saved_after(config, steps)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", no_room)
        _, outcome = go_on(config, prunes=False)
    assert "No space left" in str(outcome.problem) and names(tmp_path) == {"step-00000001", "step-00000002"}


@pytest.mark.parametrize("older", [0, 2])
def test_a_second_attempt_is_said(older, tmp_path, monkeypatch):
    """Whatever made it needful, with its own words: also where another rank has made the folder meanwhile,
    and where there is nothing older to make room."""
    config, said, fails, original = at(tmp_path, *DP), [], [True], os.mkdir
    for steps in range(1, older + 1):
        saved_after(config, steps)

    def mkdir(path: Any, *others: Any, **how: Any) -> None:
        original(path, *others, **how)
        if str(path).endswith(".tmp") and fails.pop() if fails else False:
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "mkdir", mkdir)
    _, outcome = go_on(config, say=said.append)
    assert outcome.problem is None
    assert names(tmp_path) == {f"step-{step:08d}" for step in {older, older + 1} - {0}}
    (line,) = said
    assert "Disk quota exceeded" in line
    assert ("step-00000001 make room" if older else "it is tried once more") in line


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "Input/output error")])
def test_what_fails_after_the_rename(error, tmp_path, monkeypatch):
    """The checkpoint is saved, since a resume takes it: it is neither removed nor written again."""
    config, said = at(tmp_path, *DP), []
    saved_after(config, 1)

    def fail(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        for module, name in ((saving, "write_latest"), (older, "own"), (older, "remove")):
            patch.setattr(module, name, fail)
        _, outcome = go_on(config, say=said.append)
    assert outcome.problem is None and names(tmp_path) == {"step-00000001", "step-00000002"}
    assert len(said) == 2 and all(str(error) in line for line in said)
    assert "latest does not name step-00000002" in said[0] and "older checkpoints" in said[1]
    assert take(config)[0] == "step-00000002"


def test_what_is_not_removed_at_once_is_said(tmp_path, monkeypatch):
    """One call failed: a message says so, and all that could be removed is gone."""
    config = replace(at(tmp_path, *DP), checkpoint=replace(at(tmp_path).checkpoint, keep=1))
    said, original = [], shutil.rmtree
    saved_after(config, 1)

    def once(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(path, ignore_errors=True)

    with monkeypatch.context() as patch:
        patch.setattr(saving.shutil, "rmtree", once)
        _, outcome = go_on(config, say=said.append)
    assert outcome.problem is None and names(tmp_path) == {"step-00000002"}
    (line,) = said
    assert "step-00000001 was not removed at once" in line and "Input/output error" in line


def test_what_cannot_be_read_is_left_alone(tmp_path):
    """An unreadable checkpoint may be another run's: it is kept beyond checkpoint.keep, and one message says
    so."""
    config, said = replace(at(tmp_path, *DP), checkpoint=replace(at(tmp_path).checkpoint, keep=1)), []
    saved_after(config, 2)
    saved_after(replace(config, checkpoint=replace(config.checkpoint, keep=0)), 1)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text("{")
    _, outcome = go_on(config, say=said.append)
    assert outcome.problem is None and names(tmp_path) == {"step-00000001", "step-00000003"}
    assert len(said) == 1
    assert "step-00000001 is left alone, whatever checkpoint.keep says: checkpoint" in said[0]


def test_a_file_that_cannot_be_replaced(tmp_path, monkeypatch):
    """It stays as it was, with nothing half-written beside it."""
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "latest").write_text("old")
    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(tmp_path / "latest", "new", lasting=True)
    assert [path.name
            for path in tmp_path.iterdir()] == ["latest"] and (tmp_path / "latest").read_text() == "old"


def test_a_failed_save_is_removed_on_a_thread(tmp_path, monkeypatch):
    """The file system may not answer: no rank waits for that with its clock running."""
    threads: list[str] = []
    original = saving.tidy
    monkeypatch.setattr(saving, "tidy",
                        lambda config: (threads.append(threading.current_thread().name), original(config)))
    monkeypatch.setattr(saving, "write", lambda *_: 1 / 0)
    _, outcome = go_on(at(tmp_path, *DP))
    assert threads == ["save"] and "ZeroDivisionError" in str(outcome.problem) and names(tmp_path) == set()


def test_what_was_replaced_is_swept(tmp_path):
    """It could not be removed at once, as on NFS while somebody reads it: the next save does. One whose
    successor has not come stays, to be brought back."""
    config = at(tmp_path)
    path = saved_after(config, 1)
    for name in ("step-00000001.replaced.tmp", "step-00000007.replaced.tmp"):
        shutil.copytree(path, path.with_name(name))
    go_on(config)
    assert names(tmp_path) == {"step-00000001", "step-00000002", "step-00000007.replaced.tmp"}


def test_a_restart_whose_origin_was_removed(tmp_path, monkeypatch):
    """train.resume names a checkpoint of the folder, which the run removes in time (checkpoint.keep): a
    restart goes on."""
    config = at(tmp_path, "checkpoint.keep=1")
    again = named(config, saved_after(config, 1))
    go_on(again)
    assert not (tmp_path / "checkpoints" / "step-00000001").exists()
    monkeypatch.setenv("THREED_RESTARTS", "1")
    assert take(again)[0] == "step-00000002"


def test_a_checkpoint_under_another_name(tmp_path):
    """Beside the others, with a name of its owner's: newer ones are left behind all the same."""
    config = at(tmp_path, "checkpoint.keep=0")
    for steps in (1, 2, 3):
        saved_after(config, steps)
    kept = shutil.copytree(tmp_path / "checkpoints" / "step-00000001", tmp_path / "checkpoints" / "good")
    again = named(config, kept)
    (begun,) = on_ranks(again, lambda engine, comm: resume(again, engine.zero))
    begin_lineage(again, begun.path, begun.lineage)
    assert take(config)[0] in ("good", "step-00000001")  # they are the same


def test_a_save_after_one_that_failed(tmp_path, monkeypatch):
    """Of the same step, while rank 0 still removes what the first has left: nothing that the second writes is
    removed."""
    original, slow = saving.write, shutil.rmtree
    fails = [True]

    def write(path: Path, rank: int, items: list) -> Any:
        if rank == 0 and fails[0]:
            raise OSError(5, "Input/output error")
        return original(path, rank, items)

    monkeypatch.setattr(saving, "write", write)
    monkeypatch.setattr(saving.shutil, "rmtree", lambda *args, **how: (time.sleep(0.5), slow(*args, **how)))

    def work(engine: Engine, comm: Comm) -> Outcome | None:
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin(COUNTERS)
        assert (outcome := saver.drain()) and outcome.problem
        fails[0] = False
        saver.begin(COUNTERS)
        return saver.drain()

    outcome = on_ranks(at(tmp_path, *DP), work)[0]
    assert outcome is not None
    assert outcome.problem is None
    assert (outcome.path / "rank-00001.safetensors").exists()
    assert take(at(tmp_path))[0] == outcome.path.name


def cannot_be_read() -> list[torch.Tensor]:
    raise RuntimeError("it cannot be read")


@pytest.mark.parametrize(("parts", "reason"), [(cannot_be_read, "it cannot be read"),
                                               (lambda: [torch.empty(3)], "must match")],
                         ids=["issued", "copied"])
def test_a_copy_that_fails(parts, reason, tmp_path, monkeypatch):
    """Half a copy is not written as if it were a whole one."""
    original, begun = Snapshot.begin, []

    def begin(self: Snapshot, whole: Any) -> Any:
        begun.append(self)
        return original(self, parts if len(begun) == 2 else whole)

    monkeypatch.setattr(Snapshot, "begin", begin)
    config = at(tmp_path)
    _, outcome = go_on(replace(config, train=replace(config.train, resume="never")))
    assert outcome.problem is not None and reason in outcome.problem


def test_older_ones_that_cannot_be_removed(tmp_path, monkeypatch):
    """The new checkpoint is saved all the same."""
    config = at(tmp_path, "checkpoint.keep=1")
    saved_after(config, 1)

    def busy(path: Path) -> None:
        raise OSError(39, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(older, "remove", busy)
        _, outcome = go_on(config)
    assert outcome.problem is None and take(config)[0] == "step-00000002"


def test_few_files_at_a_time(tmp_path, monkeypatch):
    """One rank reads what 8 have written, with 3 files open."""
    path = saved_after(at(tmp_path / "many", "parallel.dp=4", *TP), 1)
    monkeypatch.setattr(reading, "_OPEN", 3)
    most, original = [0], reading.BoxReader._open

    def opened(self: reading.BoxReader, rank: int) -> int:
        descriptor = original(self, rank)
        most[0] = max(most[0], len(self._files))
        return descriptor

    monkeypatch.setattr(reading.BoxReader, "_open", opened)
    assert take(named(at(tmp_path / "one"), path))[0] == path.name and most[0] == 3


def test_the_newest_is_gone(tmp_path):
    """Or its manifest, or a stale listing does not show it: `latest` says that it was there, and that is not
    passed over without a word. Where all are gone, nothing begins anew by itself."""
    config = at(tmp_path, "checkpoint.keep=0")
    for steps in (1, 2, 3):
        saved_after(config, steps)
    folder = tmp_path / "checkpoints"
    (folder / "step-00000003" / "manifest.json").unlink()
    taken, notes = take(config)
    assert taken == "step-00000002"
    assert "step-00000003 cannot be used: manifest.json cannot be read" in notes[0]
    shutil.rmtree(folder / "step-00000003")
    taken, notes = take(config)
    assert taken == "step-00000002" and "step-00000003 cannot be used" in notes[0]
    for name in ("step-00000001", "step-00000002"):
        shutil.rmtree(folder / name)
    with pytest.raises(InputError, match="none of the checkpoints can be used"):
        take(config)


NARROW = ["precision.dtype=bf16", "precision.master=none"]


@pytest.mark.parametrize("before", [[], NARROW, ["precision.dtype=bf16"],
                                    ["precision.dtype=fp16", "precision.loss_scale=64"]])
def test_weights_without_a_master(before, tmp_path, monkeypatch):
    """fp32 weights are rounded when a run goes on without a master: they are proved as they were read, and a
    bit that flips afterwards is found."""
    config = named(at(tmp_path / "narrow", *DP, "zero.stage=1", *NARROW),
                   saved_after(at(tmp_path / "wide", *TP, *before), 2))
    take(config)
    original = loading._prove

    def flip(values: Manifest, zero: Any, rounded: dict) -> str | None:
        if zero.comm.rank == 1:
            zero.states[1].optimizer_state.master.view(torch.int16)[5] ^= 1
        return original(values, zero, rounded)

    monkeypatch.setattr(loading, "_prove", flip)
    with pytest.raises(InputError, match="does not have the checksum of its manifest"):
        take(config)
