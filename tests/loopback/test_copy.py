"""Copies of checkpoints elsewhere: what is complete there and what is kept, what is damaged, what a run goes
on from."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import uuid
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tests.harness import batches, tiny
from threed.base.errors import ConfigError, InputError
from threed.checkpoint.choose import Candidate, begin_lineage, candidates
from threed.checkpoint.copy import Copied, Copier, fetch
from threed.checkpoint.format import Manifest, checkpoints, folder, name_of
from threed.checkpoint.lineage import Lineage, parse_latest, read_latest
from threed.checkpoint.load import Resumed, _on_first, resume
from threed.checkpoint.manifest import unseal
from threed.checkpoint.place import Store
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.config.load import load
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.training import checkpoints as running
from threed.training.checkpoints import Checkpoints

SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16",
         "train.global_batch_size=4", "train.steps=8", "checkpoint.every=1", "checkpoint.keep=0"]
NEW = Lineage("new-1")


def at(path: Path, *others: str) -> Config:
    return tiny(*SMALL, f"run.dir={path}", *others)


def on_ranks(config: Config, work: Any) -> list[Any]:
    plan = make_plan(config)
    torch.set_num_threads(1)
    return run_loopback(plan, make_mesh(config), lambda comm: work(Engine(Analysis(plan), comm), comm))


def train(config: Config, steps: int, lineage: Lineage = NEW, held: Any = lambda: None) -> list[Path]:
    """Take steps from where train.resume says, with a checkpoint after each."""
    def work(engine: Engine, comm: Comm) -> list[Path]:
        resume(config, engine.zero)
        saver, paths = Saver(engine, lineage, lambda: None, being_copied=held), []
        for index in range(engine.zero.step_number, steps):
            engine.train_step(batches(config, comm, index))
            saver.begin({"samples": 0, "skipped": 0, "wandb_id": None})
            outcome = saver.drain()
            assert outcome is not None and outcome.problem is None
            paths.append(outcome.path)
        return paths

    return on_ranks(config, work)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[Path]:
    """Checkpoints of steps 1 to 4, by two ranks."""
    return train(at(tmp_path_factory.mktemp("saved"), "parallel.dp=2", "zero.stage=2"), 4)


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path) -> str:
    return str(tmp_path / "far" / "away") if request.param == "folder" else f"memory://{uuid.uuid4().hex}/run"


def copied(place: str, *paths: Path, keep: int = 0) -> list[Copied]:
    """Copy the checkpoints one after the other."""
    copier = Copier(place, keep)
    for path in paths:
        copier.offer(path)
        assert copier.wait(60)
    return copier.ended()


def files(place: str, name: str = "") -> dict[str, bytes]:
    system, root = url_to_fs(f"{place}/{name}" if name else place)
    root = root.rstrip("/")
    return {path.removeprefix(f"{root}/"): system.cat_file(path) for path in system.find(root)}


def overwrite(place: str, name: str, change: Any) -> None:
    """Change an existing file."""
    system, root = url_to_fs(place)
    system.pipe_file(f"{root}/{name}", change(system.cat_file(f"{root}/{name}")))


def taken(config: Config, say: Any = lambda line: None) -> list[Candidate]:
    return list(candidates(config, say))


def flipped(data: bytes, where: float) -> bytes:
    at = min(len(data) - 1, int(len(data) * where))
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1:]


# ---------------------------------------------------------------- there


def test_a_copy_is_equal(saved, place):
    """All files are there with their bytes; a second copy of the same moves nothing."""
    first, second = copied(place, saved[-1], saved[-1])
    assert first.problem is None and first.size and second == Copied(saved[-1], 0, second.took_s, None)
    assert files(place, "step-00000004") == {path.name: path.read_bytes() for path in saved[-1].iterdir()}
    assert parse_latest(files(place)["latest"]) == ("step-00000004", NEW)


def test_the_manifest_is_last(saved, place, monkeypatch):
    """Killed before it, the copy is none: it is neither listed nor fetched, and the next copy clears it
    away."""
    def put(self, source, *others):
        order.append(source.name)
        if source.name == "manifest.json":
            raise KeyboardInterrupt
        return original(self, source, *others)

    order, original = [], Store.put
    monkeypatch.setattr(Store, "put", put)
    with pytest.raises(KeyboardInterrupt):
        Copier(place, 0)._copy(Store(place), saved[1])
    assert order == ["rank-00000.safetensors", "rank-00001.safetensors", "index.jsonl", "manifest.json"]
    left = "step-00000002" if "://" in place else "step-00000002.copying.tmp"
    assert Store(place).names() == ([], [left]) and list(Store(place).newest()) == []
    monkeypatch.undo()
    copied(place, saved[2])
    assert Store(place).names() == (["step-00000003"], [])


def test_kept_by_a_rule_of_their_own(saved, place, tmp_path):
    """The newest so many of the run's own; those of a higher step, or of another lineage, are not counted, as
    in run.dir."""
    other = train(at(tmp_path / "other"), 1, Lineage("other-2"))
    copied(place, saved[3], *other)
    copied(place, *saved[1:3], keep=1)
    assert Store(place).names()[0] == ["step-00000004", "step-00000003", "step-00000001"]
    assert all(path.exists() for path in saved)


def test_the_newest_is_next(saved, tmp_path, monkeypatch):
    """While one is copied, of those that come the newest waits; what is held stays, though others are
    pruned."""
    go, begun = threading.Event(), threading.Event()
    original = Store.put
    monkeypatch.setattr(Store, "put", lambda *args: (begun.set(), go.wait(60), original(*args))[2])
    copier = Copier(str(tmp_path / "copies"), 0)
    assert copier.offer(saved[0]) is None and begun.wait(60)
    assert copier.being_copied == saved[0]
    assert copier.offer(saved[1]) is None and copier.offer(saved[2]) == saved[1]
    assert not copier.wait(0.01)
    go.set()
    assert copier.wait(60) and copier.being_copied is None
    assert [(each.path, each.problem) for each in copier.ended()] == [(saved[0], None), (saved[2], None)]


def test_what_is_copied_stays(tmp_path):
    """A checkpoint is not pruned while it is copied; it is, later."""
    config, held = at(tmp_path, "checkpoint.keep=1"), [folder(at(tmp_path)) / name_of(1)]
    train(config, 2, held=lambda: held[0])
    assert [path.name for path in checkpoints(config)] == ["step-00000002", "step-00000001"]
    train(config, 3)
    assert [path.name for path in checkpoints(config)] == ["step-00000003"]


def test_removed_under_its_copy(tmp_path, monkeypatch):
    """A full disk takes the checkpoint away: its copy is given up, is said so, and leaves nothing."""
    (path,) = train(at(tmp_path), 1)
    original = Store.put

    def put(self, source, *others):
        if source.name == "index.jsonl":
            shutil.rmtree(path)
        return original(self, source, *others)

    monkeypatch.setattr(Store, "put", put)
    (end,) = copied(str(tmp_path / "copies"), path)
    assert end.problem == "it was removed before its copy was complete"
    assert Store(str(tmp_path / "copies")).names() == ([], [])


@pytest.mark.parametrize("broken", ["rank-00001.safetensors", "index.jsonl", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "short", "long"])
def test_damaged_on_the_way(broken, how, saved, tmp_path, monkeypatch):
    """What lies in the folder is read back: such a copy does not count, and its room is given back."""
    def put_file(self, source, target, **others):
        original(self, source, target, **others)
        if Path(source).name == broken:
            data = Path(target).read_bytes()
            damaged = {"flipped": flipped(data, 0.7), "short": data[:-1], "long": data + b" "}
            Path(target).write_bytes(damaged[how])

    original = LocalFileSystem.put_file
    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    (end,) = copied(str(tmp_path), saved[0])
    assert end.problem is not None and broken in end.problem
    assert Store(str(tmp_path)).names() == ([], [])


@pytest.mark.parametrize("broken", ["rank-00001.safetensors", "index.jsonl", "manifest.json"])
def test_a_store_that_loses_bytes(broken, saved, monkeypatch):
    """Sizes of all files, and the bytes of what names all others."""
    system, _ = url_to_fs("memory://")
    original = type(system).put_file

    def put_file(self, source, target, **others):
        original(self, source, target, **others)
        if Path(source).name == broken:
            self.pipe_file(target, self.cat_file(target)[:-1])

    monkeypatch.setattr(type(system), "put_file", put_file)
    place = f"memory://{uuid.uuid4().hex}/run"
    (end,) = copied(place, saved[0])
    assert end.problem is not None and broken in end.problem and Store(place).names() == ([], [])


def test_a_copy_that_cannot_be_looked_at(saved, place, monkeypatch):
    """A store that does not answer for a moment: no existing copy is removed."""
    copied(place, saved[0])
    before = files(place)
    monkeypatch.setattr(Store, "read", lambda *args: 1 / 0)
    (end,) = copied(place, saved[0])
    assert end.problem == "ZeroDivisionError: division by zero" and files(place) == before


def test_older_copies_that_stay(saved, place, monkeypatch):
    """The newest copy is whole all the same."""
    copied(place, saved[0])
    original = Store.remove

    def remove(self, name):
        return original(self, name) if name.startswith("step-00000002") else 1 / 0

    monkeypatch.setattr(Store, "remove", remove)
    (end,) = copied(place, saved[1], keep=1)
    assert end.size and end.problem is not None
    assert list(Store(place).newest()) == ["step-00000002", "step-00000001"]


def test_a_copy_of_which_nobody_knows(saved, place, monkeypatch):
    """An error is not the answer that a file is not there: what may be complete stays, and nothing begins
    anew."""
    copied(place, *saved[:2])
    system, _ = url_to_fs(place)
    original = type(system).info

    def info(self, path, **others):
        if str(path).endswith("step-00000002/manifest.json"):
            raise OSError(116, "Stale file handle")
        return original(self, path, **others)

    before = files(place, "step-00000002")
    with monkeypatch.context() as patch:
        patch.setattr(type(system), "info", info)
        (end,) = copied(place, saved[2])
        assert end.size and "Stale file handle" in str(end.problem)
        with pytest.raises(InputError, match=r"cannot be fetched: .*Stale file handle"):
            fetch(place, saved[0].parent, lambda line: None)
    assert files(place, "step-00000002") == before


def test_a_copy_of_nobody(saved, place):
    """A copy whose manifest cannot be read, or has another version, may be another run's: it is kept, and not
    counted."""
    copied(place, *saved[:3])
    overwrite(place, "step-00000001/manifest.json", lambda data: b"{")
    overwrite(place, "step-00000002/manifest.json", lambda data: b'{"format": 1}')
    copied(place, saved[3], keep=1)
    assert Store(place).names() == (["step-00000004", "step-00000002", "step-00000001"], [])


@pytest.mark.parametrize("number", [5, 2])
def test_a_source_that_fails(number, saved, tmp_path, monkeypatch):
    """Even the question whether it is there: the copy is given up, and the next one goes on."""
    def fail(*_: Any, **others: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        patch.setattr(Path, "is_dir", lambda *_: 1 / 0)
        copier = Copier(str(tmp_path), 0)
        copier.offer(saved[0])
        assert copier.wait(60)
    (end,) = copier.ended()
    assert end.size is None and os.strerror(number) in str(end.problem) and copier.being_copied is None
    copier.offer(saved[0])
    assert copier.wait(60) and copier.ended()[0].problem is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies(saved, tmp_path, monkeypatch):
    """Nobody waits for it for ever, and the next offer begins another."""
    copier = Copier(str(tmp_path), 0)
    with monkeypatch.context() as patch:
        patch.setattr(Copier, "_try", lambda self, path: sys.exit())  # ends the thread alone
        copier.offer(saved[0])
        assert copier.wait(60) and copier.being_copied is None
    copier.offer(saved[0])
    assert copier.wait(60) and [end.problem for end in copier.ended()] == [None]


@pytest.mark.parametrize("broken", ["rank-00001.safetensors", "index.jsonl"])
def test_a_source_that_is_damaged(broken, saved, tmp_path, place):
    """It is not copied as if it were whole, and does not push out the copy of a whole one."""
    copied(place, saved[0])
    shutil.copytree(saved[1], tmp_path / "step-00000002")
    path = tmp_path / "step-00000002" / broken
    path.write_bytes(flipped(path.read_bytes(), 0.9))
    (end,) = copied(place, path.parent, keep=1)
    assert end.size is None and f"it is damaged: {broken} reads back otherwise" in str(end.problem)
    assert Store(place).names() == (["step-00000001"], [])


def test_another_of_that_name(saved, tmp_path, monkeypatch):
    """In a folder it stays until its successor is whole; then it goes."""
    place = str(tmp_path / "copies")
    (other,) = train(at(tmp_path / "other"), 1, Lineage("other-2"))
    copied(place, other)
    before, original = files(place, other.name), Store.put

    def put(self, source, *others):
        if source.name == "manifest.json":
            raise OSError(5, "Input/output error")
        return original(self, source, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", put)
        (end,) = copied(place, saved[0])
    assert end.size is None and files(place, other.name) == before
    assert Store(place).names() == ([other.name], [])
    (end,) = copied(place, saved[0])
    assert end.size
    assert files(place, other.name) == {path.name: path.read_bytes() for path in saved[0].iterdir()}
    assert Store(place).names() == ([other.name], [])


def test_a_copy_that_is_there_already(saved, place):
    """Killed before it was named and others were removed: that is done by the next."""
    copied(place, *saved[:2])
    overwrite(place, "latest", lambda data: b"")
    (end,) = copied(place, saved[1], keep=1)
    assert (end.size, end.problem) == (0, None) and Store(place).names()[0] == ["step-00000002"]
    assert parse_latest(files(place)["latest"]) == ("step-00000002", NEW)


def test_latest_is_replaced(saved, tmp_path):
    """In a folder it is there whole, before and after, and never half."""
    copied(str(tmp_path), saved[0])
    (tmp_path / "link").hardlink_to(tmp_path / "latest")
    copied(str(tmp_path), saved[1])
    assert parse_latest((tmp_path / "link").read_bytes())[0] == "step-00000001"
    assert parse_latest((tmp_path / "latest").read_bytes())[0] == "step-00000002"


@pytest.mark.parametrize("failures", [2, 3])
def test_the_last_copy_is_tried_again(failures, tmp_path, monkeypatch):
    """As the last checkpoint is; once it cannot be had, that is said."""
    config, said, left, original = (
        at(tmp_path / "run", f"checkpoint.copy_to={tmp_path / 'copies'}"),
        [],
        [failures],
        Copier._copy,
    )
    (path,) = train(config, 1)

    def fails(self: Copier, *others: Any) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(110, "Connection timed out")
        return original(self, *others)

    monkeypatch.setattr(Copier, "_copy", fails)
    monkeypatch.setattr(running, "PAUSE_S", 0.0)

    def work(engine: Engine, comm: Comm) -> None:
        log = SimpleNamespace(say=said.append, sync=lambda: None)
        watch = SimpleNamespace(phase=lambda *a, **b: nullcontext())
        mine: Any = Checkpoints(config, engine, watch, log, Resumed(path, Manifest(), NEW, [], {}))  # pyright: ignore[reportArgumentType]
        mine.close(lambda: False)

    on_ranks(config, work)
    assert sum("was not copied" in line and "Connection timed out" in line for line in said) == failures
    assert any("THE LAST CHECKPOINT IS NOT AT" in line for line in said) == (failures == 3)
    assert (tmp_path / "copies" / path.name / "manifest.json").exists() == (failures == 2)


# ---------------------------------------------------------------- and back


@pytest.mark.parametrize("mesh", [("parallel.dp=2", "zero.stage=2"), ("parallel.tp=2",)])
def test_a_run_goes_on_from_an_address(mesh, saved, tmp_path):
    """From a store, on the same mesh and on another: to the bit as from the folder that was copied."""
    place = f"memory://{uuid.uuid4().hex}/run"
    copied(place, *saved[:2])
    near, far = (at(tmp_path / name, *mesh, f"train.resume={where}")
                 for name, where in (("near", saved[1]), ("far", f"{place}/step-00000002")))

    def sums(path: Path) -> Any:
        parameters = json.loads((path / "manifest.json").read_text())["parameters"]
        return {name: entry["sums"] for name, entry in parameters.items()}

    assert sums(train(near, 3)[-1]) == sums(train(far, 3)[-1])
    fetched, original = ({path.name: path.read_bytes() for path in checkpoint.iterdir()}
                         for checkpoint in (folder(far) / "step-00000002", saved[1]))
    assert fetched == original


def test_the_newest_of_an_address(saved, tmp_path, place):
    """By `latest` and its lineage, not by the highest step alone: another lineage may have come further."""
    copied(place, saved[3], *saved[:2])
    assert next(Store(place).newest()) == "step-00000004", "one lineage: `latest` may be late"
    other = train(at(tmp_path / "other"), 2, Lineage("other-2"))
    copied(place, other[1])
    assert list(Store(place).newest()) == ["step-00000002"]
    said = []
    assert fetch(place, tmp_path / "into", said.append) == tmp_path / "into" / "step-00000002"
    assert said[-1].startswith(f"fetched {place}/step-00000002: ") and len(said) == 2


@pytest.mark.parametrize("broken, where", [("rank-00000.safetensors", 0.05), ("rank-00001.safetensors", 0.95),
                                           ("index.jsonl", 0.5), ("manifest.json", 0.5)])
def test_a_flipped_bit_in_a_copy(broken, where, saved, tmp_path, place):
    """Named, it is refused; in a folder of copies the one before it is taken. Nothing of it stays."""
    copied(place, *saved[:2])
    overwrite(place, f"step-00000002/{broken}", lambda data: flipped(data, where))
    with pytest.raises(InputError, match="step-00000002 is damaged"):
        fetch(f"{place}/step-00000002", tmp_path / "into", lambda line: None)
    assert not (tmp_path / "into").exists() or not list((tmp_path / "into").iterdir())
    said = []
    fetched = fetch(place, tmp_path / "into", said.append)
    assert fetched is not None
    assert fetched.name == "step-00000001"
    assert [path.name for path in fetched.parent.iterdir()] == ["step-00000001"]
    assert "step-00000002 is damaged" in said[0] or "step-00000002 is damaged" in said[1]


@pytest.mark.parametrize("gone", ["manifest.json", "index.jsonl", "rank-00001.safetensors"])
def test_half_a_copy(gone, saved, tmp_path, place):
    """A copy without a manifest does not count; a copy without another file is refused."""
    copied(place, *saved[:2])
    system, root = url_to_fs(place)
    system.rm(f"{root}/step-00000002/{gone}")
    with pytest.raises(InputError, match="incomplete"):
        fetch(f"{place}/step-00000002", tmp_path / "into", lambda line: None)
    fetched = fetch(place, tmp_path / "into", lambda line: None)
    assert fetched is not None and fetched.name == "step-00000001"


def test_nothing_there(tmp_path, place):
    """An empty address: refused if the user named it; otherwise, as the last resort, the run begins at step
    0."""
    named = at(tmp_path / "run", f"train.resume={place}" if "://" in place
               else f"train.resume=file://{place}")
    with pytest.raises(InputError, match="there is no complete checkpoint"):
        taken(named)
    said: list[str] = []
    assert taken(at(tmp_path / "run", f"checkpoint.copy_to={place}"), said.append) == []
    assert said == [f"note: no checkpoint at {place}: a run that has no other begins anew"]


def test_after_the_loss_of_a_disk(saved, tmp_path, place):
    """auto takes a copy where run.dir has nothing; not where the run has begun anew there."""
    copied(place, *saved[:3])
    config = at(tmp_path / "run", f"checkpoint.copy_to={place}")
    assert taken(config) == [(folder(config) / "step-00000003", None, True)]
    begin_lineage(config, folder(config) / "step-00000003", NEW)
    assert read_latest(config) == ("step-00000003", NEW)
    anew = at(tmp_path / "anew", f"checkpoint.copy_to={place}")
    begin_lineage(anew, None, Lineage("never-1"))
    assert taken(anew) == []


def test_a_restart_does_not_fetch_again(saved, tmp_path, place, monkeypatch):
    """It goes on from what the run has saved since; without a restart the address is taken again, and is
    there already."""
    copied(place, saved[0])
    address = f"{place}/step-00000001" if "://" in place else f"file://{place}/step-00000001"
    config = at(tmp_path / "run", f"train.resume={address}")
    (path, none, may_fall_back), = taken(config)
    assert none is None and not may_fall_back
    lineage = Lineage.new(config, unseal(path))
    begin_lineage(config, path, lineage)
    (later,) = train(at(tmp_path / "run"), 2, lineage)
    said: list[str] = []
    assert taken(config, said.append)[0][0] == path and said == [f"{address} is in {folder(config)} already"]
    monkeypatch.setenv("THREED_RESTARTS", "1")
    monkeypatch.setattr("threed.checkpoint.choose.fetch", None)
    assert taken(config, said.append) == [(later, lineage, True), (path, lineage, True)]


def test_another_checkpoint_of_that_step(saved, tmp_path, place):
    """What the run has saved itself is not replaced."""
    copied(place, saved[0])
    train(at(tmp_path / "run"), 1)
    with pytest.raises(InputError, match="is another checkpoint than"):
        fetch(f"{place}/step-00000001", folder(at(tmp_path / "run")), lambda line: None)


def test_nobody_waits_for_what_is_fetched(tmp_path):
    """A rank that waits for an answer for run.timeout_s ends the run; a large checkpoint may take longer than
    that to fetch."""
    often = threading.Event()

    def work(engine: Engine, comm: Comm) -> str:
        all_gather, counts = comm.all_gather, []

        def counted(value: Any) -> list[Any]:
            counts.append(value)
            if comm.rank == 1 and len(counts) == 3:
                often.set()
            return all_gather(value)

        comm.all_gather = counted
        return _on_first(comm, lambda: "fetched" if often.wait(60) else "too late")

    assert on_ranks(at(tmp_path, "parallel.dp=2"), work) == ["fetched", "fetched"]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("override, text", [
    ("checkpoint.copy_to=s4://bucket/run", "no store is known by s4://"),
    ("train.resume=nowhere://bucket/run/step-00000001", "no store is known by nowhere://"),
    ("checkpoint.copy_to=s3://", "names no place in the store"),
    ("checkpoint.copy_to=''", "is empty"),
    ("checkpoint.copy_to=runs/default/checkpoints", "is the folder of run.dir's checkpoints"),
    ("checkpoint.copy_to=file://runs/../runs/default/checkpoints/", "is the folder of run.dir's checkpoints"),
    ("checkpoint.copy_keep=3", "needs checkpoint.copy_to"),
    ("checkpoint.copy_wait_s=-1", "must be at least 0")])
def test_refused_before_anything_starts(override, text):
    """An impossible address, and settings that need an address without one."""
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert text in str(caught.value)


@pytest.mark.parametrize("address, package", [
    ("s3://bucket/run", "s3fs"),
    ("gs://bucket/run", "gcsfs"),
])
def test_without_its_package(address, package, monkeypatch):
    """One message, with the package to install."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, address.partition(":")[0], raising=False)
    with pytest.raises(ConfigError) as caught:
        load(None, [f"checkpoint.copy_to={address}"])
    assert len(caught.value.problems) == 1 and f"pip install {package}" in str(caught.value)
