"""Loading of checkpoints in loopback: what takes long on one rank, what cannot be read, which one is chosen
and what stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import batches
from tests.loopback.test_checkpoint import (
    COUNTERS,
    DP,
    PP,
    TP,
    at,
    manifest,
    named,
    on_ranks,
    saved_after,
    step,
    take,
)
from tests.loopback.test_checkpoint_mishaps import go_on
from threed.base.errors import RunError
from threed.checkpoint import format as formats
from threed.checkpoint import manifest as manifests
from threed.checkpoint.box_reader import BoxReader
from threed.checkpoint.choose import begin_lineage, candidates
from threed.checkpoint.lineage import Lineage, write_latest
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.schema import Config
from threed.tensor import precision


def steps_in(config: Config) -> list[int]:
    return [formats.step_of(path) for path in formats.checkpoints(config)]


def edit(path: Path, **change: Any) -> None:
    """Replace the manifest, with the right checksum."""
    values = {key: value for key, value in manifest(path).items() if key != "checksum"}
    (path / "manifest.json").write_text(manifests.seal({**values, **change}))


# ---------------------------------------------------------------- what compute reads


class Elsewhere(torch.Tensor):
    """A tensor on another device: it can only be cut and copied to the host, not computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            return func(args[0].as_subclass(torch.Tensor), *args[1:])
        assert func in (torch.Tensor.__getitem__, torch.Tensor.__len__), f"{func} across devices"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_of_weights(dtype, monkeypatch):
    """Piece by piece, on one device; a NaN is one whatever its bits are, and any other bit counts."""
    monkeypatch.setattr(precision, "PIECE", 8)
    weights = torch.linspace(-3, 3, 27)
    weights[[0, 9]] = float("nan")
    weights[20] = 0.0
    published, away = weights.to(dtype), weights.as_subclass(Elsewhere)
    assert precision.has_bits_of(published, away)
    bits = published.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    bits[9] ^= 1  # another NaN
    assert precision.has_bits_of(published, away)
    for index, change in ((9, 1.0), (20, -0.0), (26, 0.0)):
        wrong = published.clone()
        wrong[index] = change
        assert not precision.has_bits_of(wrong, away)


def test_a_weight_that_is_no_number(tmp_path):
    """A checkpoint of a run that diverged can be inspected: its NaN weights are loaded as saved."""
    config = at(tmp_path, *DP, "zero.stage=1", "precision.dtype=bf16")

    def work(engine: Engine, comm: Comm) -> None:
        next(iter(engine.zero.states.values())).optimizer_state.master[3] = float("nan")
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        step(engine, comm, 0)
        saver.begin(COUNTERS)
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None

    on_ranks(config, work)
    assert take(config)[0] == "step-00000000"


# ---------------------------------------------------------------- ranks that take longer than others


def test_nobody_waits_for_what_is_read(tmp_path, monkeypatch):
    """A rank that waits for an answer for run.timeout_s ends the run; another may read for longer than
    that."""
    config = at(tmp_path, *DP)
    saved_after(config, 1)
    often, read, readers = threading.Event(), BoxReader.read, []

    def slow(self: BoxReader, *others: Any) -> None:
        readers.append(self)
        if self is readers[0]:
            assert often.wait(10), "the other rank waits for this one"
        read(self, *others)

    def work(engine: Engine, comm: Comm) -> str | None:
        all_gather, values = comm.all_gather, []

        def counted(value: Any) -> list[Any]:
            values.append(value)
            if values[-6:] == [1.0] * 6:  # of the one that has read
                often.set()
            return all_gather(value)

        comm.all_gather = counted
        resumed = resume(config, engine.zero)
        return resumed.path.name if resumed.path else None

    monkeypatch.setattr(BoxReader, "read", slow)
    assert on_ranks(config, work) == ["step-00000001"] * 2


def test_the_others_stop(tmp_path, monkeypatch):
    """Once one rank has met damage, nobody reads on: all go to the checkpoint before it."""
    config = at(tmp_path, *DP, "zero.stage=1")
    for steps in (1, 2):
        saved_after(config, steps)
    path = tmp_path / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    read, boxes = BoxReader.read, []

    def slow(self: BoxReader, *others: Any) -> None:
        if self._path.name == "step-00000002" and threading.current_thread().name == "load, rank 0":
            boxes.append(others)
            assert self.stop.wait(10), "rank 0 reads on"
        read(self, *others)

    monkeypatch.setattr(BoxReader, "read", slow)
    taken, notes = take(config)
    assert taken == "step-00000001"
    assert "does not have the checksum of the index" in notes[0]
    assert len(boxes) == 1


# ---------------------------------------------------------------- what a file system does


def test_one_that_cannot_be_looked_into(tmp_path, monkeypatch):
    """An unreadable checkpoint is tried, and refused with its reason; if the folder of checkpoints cannot be
    listed, nothing begins anew."""
    config = at(tmp_path)
    for steps in (1, 2):
        saved_after(config, steps)
    stat, listdir = Path.stat, os.listdir

    def stale(self: Path, **how: Any) -> Any:
        if self == tmp_path / "checkpoints" / "step-00000002" / "manifest.json":
            raise OSError(errno.EIO, "Input/output error")
        return stat(self, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stale)
        taken, notes = take(config)
    assert taken == "step-00000001" and "manifest.json cannot be read (Input/output error)" in notes[0]

    def broken(path: Any) -> Any:
        if path == tmp_path / "checkpoints":
            raise OSError(errno.ESTALE, "Stale file handle")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", broken)
    with pytest.raises(RunError, match=r"checkpoints cannot be listed: Stale file handle"):
        take(config)


def test_an_index_that_is_late(tmp_path, monkeypatch):
    """The newest is not passed over because a host's view of the file system shows it after a moment."""
    config = at(tmp_path)
    for steps in (1, 2):
        saved_after(config, steps)
    regular, calls = formats.regular, []

    def late(path: Path) -> Path:
        if path.name == "index.jsonl":
            calls.append(path)
            if len(calls) < 3:
                raise OSError((errno.ENOENT, errno.ESTALE)[len(calls) - 1], "it is late")
        return regular(path)

    monkeypatch.setattr(formats, "regular", late)
    monkeypatch.setattr(manifests, "regular", late)
    assert take(config)[0] == "step-00000002" and len(calls) > 3


def test_an_index_that_is_gone(tmp_path, monkeypatch):
    """Rank 0 notices the missing index at once: no rank waits for it."""
    config = at(tmp_path)
    for steps in (1, 2):
        saved_after(config, steps)
    (tmp_path / "checkpoints" / "step-00000002" / "index.jsonl").unlink()
    monkeypatch.setattr(formats, "PATIENCE_S", 600)
    taken, notes = take(config)
    assert taken == "step-00000001" and "is incomplete: index.jsonl cannot be read" in notes[0]


def test_an_index_of_somebody_else(tmp_path):
    """All its checksums are right, and its boxes have too few dims: the one before is taken."""
    config = at(tmp_path)
    for steps in (1, 2):
        saved_after(config, steps)
    path, lines, parameters, place = tmp_path / "checkpoints" / "step-00000002", [], {}, 0
    for text in (path / "index.jsonl").read_text().splitlines():
        values = json.loads(text)
        values["boxes"] = [[rank, offset[:1], shape[:1], pieces]
                           for rank, offset, shape, pieces in values["boxes"]]
        line = json.dumps(values).encode() + b"\n"
        lines.append(line)
        parameters[values["name"]] = {**manifest(path)["parameters"][values["name"]],
                                      "at": place, "size": len(line), "crc": zlib.crc32(line)}
        place += len(lines[-1])
    (path / "index.jsonl").write_bytes(b"".join(lines))
    edit(path, parameters=parameters)
    taken, notes = take(config)
    assert taken == "step-00000001" and "its index is not as threed writes it" in notes[0]


# ---------------------------------------------------------------- which one, and what stays


def test_one_that_was_passed_over_does_not_come_back(tmp_path):
    """Step 5 cannot be read for a moment, and the run goes on from step 3: what it saves then is its newest,
    and 5 is left behind. What is older is removed in time, 5 is not."""
    config = at(tmp_path, "checkpoint.keep=2")
    for steps in (1, 3, 5):
        saved_after(config, steps)
    file = tmp_path / "checkpoints" / "step-00000005" / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(b"short")
    assert go_on(config)[0] == "step-00000003"
    file.write_bytes(whole)
    assert steps_in(config) == [5, 4, 3]
    assert go_on(config, 2)[0] == "step-00000004"
    assert steps_in(config) == [6, 5, 4] and take(config)[0] == "step-00000006"


def test_nothing_was_saved_after_it_was_passed_over(tmp_path):
    """A crash before the first save: the next start does not go back to it either."""
    config = at(tmp_path, "checkpoint.keep=0")
    for steps in (1, 2):
        saved_after(config, steps)
    file = tmp_path / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(b"short")
    (begun,) = on_ranks(config, lambda engine, comm: resume(config, engine.zero))
    begin_lineage(config, begun.path, begun.lineage)
    file.write_bytes(whole)
    assert take(config) == ("step-00000001", [])


def test_the_named_one_comes_before_its_ancestors(tmp_path):
    """train.resume names one elsewhere, whose ancestors are in the folder, and the run crashes before its
    first save; killed between a rename and `latest`, its own comes first."""
    config = at(tmp_path / "run", "checkpoint.keep=0")
    for steps in (1, 2, 3):
        saved_after(config, steps)
    backup = tmp_path / "backup" / "good"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step-00000003", backup)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000003")
    again = named(config, backup)
    (begun,) = on_ranks(again, lambda engine, comm: resume(again, engine.zero))
    begin_lineage(again, begun.path, begun.lineage)
    paths = [candidate.path.name for candidate in candidates(config, lambda line: None)]
    assert paths == ["good", "step-00000002", "step-00000001"] and take(config)[0] == "good"
    assert go_on(config)[0] == "good"
    write_latest(config, str(backup), begun.lineage)
    paths = [candidate.path.name for candidate in candidates(config, lambda line: None)]
    assert paths == ["step-00000004", "good", "step-00000002", "step-00000001"]


def test_a_checkpoint_of_the_folder_by_another_path(tmp_path, monkeypatch):
    """An absolute train.resume in a relative run.dir, and through a link: it is the folder's own."""
    monkeypatch.chdir(tmp_path)
    config = at(Path("run"))
    saved_after(config, 1)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for top in (tmp_path / "run", tmp_path / "link"):
        (candidate,) = candidates(named(config, top / "checkpoints" / "step-00000001"), lambda line: None)
        assert candidate.path == Path("run/checkpoints/step-00000001")


def make_unknown(path: Path, how: str) -> None:
    if how == "no file":
        (path / "manifest.json").unlink()
        (path / "manifest.json").mkdir()
    elif how == "format 3":
        edit(path, format=3)
    else:
        (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 1}))


@pytest.mark.parametrize("how", ["format 1", "format 3", "no file"])
def test_what_may_be_anothers_stays(how, tmp_path):
    """A checkpoint whose manifest cannot be read, or is of another version, is not removed as an older one of
    the run."""
    config = at(tmp_path, "checkpoint.keep=1")
    make_unknown(saved_after(config, 1), how)
    never = replace(config, train=replace(config.train, resume="never"))
    (begun,) = on_ranks(never, lambda engine, comm: resume(never, engine.zero))

    def work(engine: Engine, comm: Comm) -> None:
        saver = Saver(engine, begun.lineage, lambda: None)
        for count in (2, 1):
            step(engine, comm, count)
            saver.begin(COUNTERS)
            saver.drain()

    on_ranks(config, work)
    assert steps_in(config) == [3, 1]


# ---------------------------------------------------------------- another padding of the vocabulary


@pytest.mark.parametrize("before, after", [
    (["model.vocab_multiple=128"], ["model.vocab_multiple=7", "parallel.tp=1"]),
    (["model.vocab_multiple=1", "parallel.tp=1"], ["model.vocab_multiple=128", *TP]),
    (["model.vocab_multiple=128", *TP], ["model.vocab_multiple=6", "parallel.tp=3", "model.heads=6"]),
    (["model.vocab_multiple=64", *PP, "model.tie_embeddings=true"],
     ["model.vocab_multiple=96", *TP, "model.tie_embeddings=true"]),
    (["model.vocab_multiple=64", "model.tie_embeddings=false"],
     ["model.vocab_multiple=300", *DP, *PP, "zero.stage=3", "model.tie_embeddings=false"]),
    (["model.vocab_multiple=300", *DP, "zero.stage=3"], ["model.vocab_multiple=2", *TP]),
    (["model.vocab_multiple=128"], ["model.vocab_multiple=16", *DP, "zero.stage=2", "precision.dtype=bf16",
                                    "offload.optimizer=cpu"]),
    (["model.vocab_multiple=128", "optimizer.name=lion"], ["model.vocab_multiple=16", "optimizer.name=lion"]),
    (["model.vocab_multiple=128", "model.tie_embeddings=false"],
     ["model.vocab_multiple=16", "model.tie_embeddings=false", "model.tile_linears=2KiB"]),
    (["model.vocab_multiple=16", "model.tie_embeddings=false", "model.tile_linears=2KiB"],
     ["model.vocab_multiple=128", "model.tie_embeddings=false"])])
def test_another_padding_of_the_vocabulary(before, after, tmp_path):
    """A run goes on with it, to the losses that it would have had, and comes back."""
    same = ["model.vocab=91", "model.heads=6", "model.hidden=24", "train.global_batch_size=4"]
    first = at(tmp_path, *same, *before)
    saved_after(first, 2)

    def losses(config: Config) -> list[float]:
        def work(engine: Engine, comm: Comm) -> list[float]:
            assert resume(config, engine.zero).path is not None
            return [engine.train_step(batches(config, comm, index))[0].loss for index in range(2, 4)]

        return next(found for found in on_ranks(config, work) if found[0] is not None)

    def saved(config: Config) -> None:
        def work(engine: Engine, comm: Comm) -> None:
            resume(config, engine.zero)
            saver = Saver(engine, Lineage("test-1"), lambda: None)
            saver.begin(COUNTERS)
            outcome = saver.drain()
            assert outcome is not None and outcome.problem is None, outcome

        on_ranks(config, work)

    second = at(tmp_path, *same, *after)
    want, got = losses(first), losses(second)
    assert got == pytest.approx(want, abs=2e-2 if second.precision.dtype == "bf16" else 1e-5)
    sums = manifest(tmp_path / "checkpoints" / "step-00000002")["parameters"]
    saved(second)
    saved(first)
    again = manifest(tmp_path / "checkpoints" / "step-00000002")["parameters"]
    assert {name: entry["sums"]["param"] for name, entry in sums.items()} == {
        name: entry["sums"]["param"] for name, entry in again.items()}
