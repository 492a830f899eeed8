"""Rows 13 to 22 of docs/silent-faults.md: what a run goes on from, and what it has written."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests import harness
from tests.harness import SETTINGS, Ranks, batches, drive, same_bits, tiny
from tests.loopback.test_checkpoint import (
    COUNTERS,
    DP,
    SMALL,
    at,
    manifest,
    named,
    on_ranks,
    saved,
    saved_after,
    step,
    take,
)
from tests.loopback.test_hugging_face_files import LLAMA, folder
from threed.checkpoint.box_reader import BoxReader
from threed.checkpoint.load import resume
from threed.checkpoint.manifest import unseal
from threed.checkpoint.older import tidy
from threed.checkpoint.save import Saver, SaveStage
from threed.comm.group import Comm
from threed.config.load import load
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.interop.hf.importing import import_model
from threed.models.model import parameters
from threed.optim.rate import learning_rate
from threed.optim.registry import OPTIMIZERS
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config

TINY_RUN = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=16", "model.heads=2",
            "model.seq_len=16", "model.vocab=300", "train.global_batch_size=2", "train.micro_batch_size=1",
            "train.eval_every=0", "monitor.wandb=disabled", "monitor.trace_every=0", "parallel.dp=2",
            "parallel.tp=1", "parallel.pp=1", "zero.stage=2"]


def gathered(config: Config, results: list[Any]) -> dict[str, torch.Tensor]:
    return harness.collect(config, results).weights


def goes_on(config: Config, steps: int) -> tuple[dict[str, torch.Tensor], Ranks]:
    """Whole weights right after `train.resume` was read, and those after some more steps, with all numbers
    of these steps."""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> tuple[Any, Any]:
        engine = Engine(Analysis(plan), comm)
        resume(config, engine.zero)
        first = engine.zero.step_number
        data = lambda config, comm, index: batches(config, comm, first + index)  # noqa: E731
        close, engine.close = engine.close, lambda: None
        return drive(config, engine, comm, 0), (setattr(engine, "close", close),
                                                drive(config, engine, comm, steps, data=data))[1]

    results = run_loopback(plan, make_mesh(config), work)
    return (gathered(config, [each for each, _ in results]),
            harness.collect(config, [each for _, each in results]))


# ---------------------------------------------------------------- 13: the weights that were loaded

LOADED: dict[str, list] = {
    "optimizer": ["adamw", "lion", "sgd"],
    "stage": [0, 1, 2, 3],
    "offload": ["none", "cpu", "nvme", "cpu+parameters", "nvme+parameters"],
    "ratio": [1.0, 0.5],
    "precision": ["fp32", "bf16"],
    "source": ["import", "run"],
}


def works(row: list) -> bool:
    if len(row) > 3 and row[3] != 1.0 and row[2] == "none":
        return False
    return not (len(row) > 2 and "parameters" in row[2] and row[1] < 3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints of a Llama: an import, with weights alone; and one of a run of two steps, whose optimizer
    state is of the optimizer."""
    base = tmp_path_factory.mktemp("sources")
    import_model(folder(base / "theirs", LLAMA), base / "import", ["model.seq_len=8"])
    made = {"import": base / "import" / "checkpoints" / "step-00000000"}
    for name in OPTIMIZERS:
        config = load(base / "import" / "config.yaml", [
            f"run.dir={base / name}", "train.global_batch_size=4", "train.steps=8", "optimizer.lr=0.01",
            f"optimizer.name={name}", f"train.resume={made['import']}", "parallel.dp=2"])

        def work(engine: Engine, comm: Comm) -> Path:
            resume(engine.config, engine.zero)
            step(engine, comm, 2)
            return saved(engine)

        made[name] = on_ranks(config, work)[0]
    return base / "import" / "config.yaml", made


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("row", list(AllPairs(list(LOADED.values()), filter_func=works)),
                         ids=lambda row: "-".join(map(str, row)))
def test_the_weights_that_were_loaded(row, sources, tmp_path):
    """Bit by bit those of the files, right after the load and after a step whose learning rate is 0: an
    optimizer that keeps weights of its own, on the host or on a disk, would write back those with which it
    began. And a step whose rate is not 0 changes them all a little, and none by as much as another beginning
    would."""
    name, stage, offload, ratio, precision, source = row
    path, made = sources
    checkpoint = made["import" if source == "import" else name]
    config = load(path, [
        "train.global_batch_size=4", "train.steps=8", "optimizer.schedule=constant", f"optimizer.name={name}",
        "optimizer.warmup_steps=0", "parallel.dp=2", f"zero.stage={stage}", *SETTINGS["offload"][offload],
        *([f"offload.ratio={ratio}"] if offload != "none" else []), f"precision.dtype={precision}",
        f"train.resume={checkpoint}", f"run.dir={tmp_path}", "optimizer.lr=0", "optimizer.min_lr=0"])
    right = of_files(checkpoint, config)
    loaded, after = goes_on(config, 1)
    assert loaded.keys() == right.keys() == after.weights.keys()
    for key, value in right.items():
        assert torch.equal(loaded[key], value), f"{key}, after the load"
        assert torch.equal(after.weights[key], value), f"{key}, after a step"
    config.optimizer.lr = config.optimizer.min_lr = 1e-4
    moved = goes_on(config, 1)[1].weights
    changes = {key: (moved[key] - value).abs().max().item() for key, value in right.items()}
    assert all(0 < change < 1e-2 for change in changes.values()), changes


def of_files(path: Path, config: Config) -> dict[str, torch.Tensor]:
    """The whole weights in a checkpoint's files, read by the reader, and by no engine."""
    from threed.features.zero.boxes import Box

    reader, values = BoxReader(path, unseal(path)), {}
    for each in parameters(config.model):
        values[each.name] = torch.empty(each.stored)
        shape = tuple(each.stored)
        reader.read("param", Box(each.name, (0,) * len(shape), shape, shape, 0, ()),
                    values[each.name])
    reader.close()
    return values


# ---------------------------------------------------------------- 14, 15: elsewhere, and on more ranks

TIERS = [["none"], ["cpu"], ["nvme"], ["none"]]


def legs(tmp_path: Path, each: list[list[str]], *others: str) -> tuple[list[float], Ranks]:
    """Two steps with each of some settings, saved after each; all losses, and the numbers of the last leg
    with the weights at its end."""
    all_losses, path, ranks = list[float](), None, None
    for number, leg in enumerate(each):
        config = at(tmp_path / "legs", *others, *leg)
        config = named(config, path) if path is not None else config

        def work(engine: Engine, comm: Comm, first: int = 2 * number) -> tuple[Any, Path]:
            if engine.config.train.resume != "auto":
                resume(engine.config, engine.zero)
            assert (engine.zero.step_number, engine.zero.updates) == (first, first)
            close, engine.close = engine.close, lambda: None
            done = drive(engine.config, engine, comm, 2, data=partial(later, first))
            path = saved(engine)
            close()
            return done, path

        results = on_ranks(config, work)
        path, ranks = results[0][1], harness.collect(config, [done for done, _ in results])
        all_losses += ranks.losses
    assert ranks is not None
    return all_losses, ranks


def later(first: int, config: Config, comm: Comm, index: int, train: bool = True) -> Callable:
    return batches(config, comm, first + index, train)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("others", [
    [], ["zero.stage=2", "zero.reduce_every=step"],  # else sums have another order elsewhere
    ["zero.stage=3", "zero.reduce_every=step", "precision.dtype=bf16"], ["optimizer.name=lion"]], ids=str)
def test_a_state_that_moves(others, tmp_path):
    """Optimizer state on the device, then on the host, on the disk, a half of it on the host, and back: the
    bits of the run that stayed. A count of updates that is left behind at any change would be seen: Adam's
    correction at step 3 is that of no other step."""
    moves = [SETTINGS["offload"]["none"], SETTINGS["offload"]["cpu"], SETTINGS["offload"]["nvme"],
             [*SETTINGS["offload"]["cpu"], "offload.ratio=0.5"], SETTINGS["offload"]["none"]]
    some = [*DP, "train.steps=10", "optimizer.betas=[0.9,0.95]", "optimizer.eps=1e-8", *others]
    moved, end = legs(tmp_path / "a", moves, *some)
    stayed, right = legs(tmp_path / "b", [[]] * 5, *some)
    whole = harness.loopback(tiny(*SMALL, *some), 10)
    assert moved == stayed == whole.losses
    same_bits([replace(end, first_grads={}), replace(right, first_grads={})])
    assert all(torch.equal(end.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_ranks_than_before(stage, tmp_path, references):
    """1, 3, 2, 6 and 4 ranks, of which none divides the sizes of units: shards are padded, and the last rank
    of some units has nothing but padding."""
    odd = ["model.hidden=12", "model.heads=2", "model.vocab=31", "model.vocab_multiple=1",
           "train.global_batch_size=12", "train.steps=10", f"zero.stage={stage}"]
    growing = [["parallel.dp=1"], ["parallel.dp=3"], ["parallel.dp=2"], ["parallel.dp=6"],
               ["parallel.dp=2", "parallel.pp=2"]]
    some, end = legs(tmp_path, growing, *odd)
    right = references(tiny(*SMALL, *odd), 10)
    assert some == pytest.approx(right.losses, rel=1e-5)
    for name, value in right.weights.items():
        assert (end.weights[name] - value).abs().max() <= 1e-4 * max(value.abs().max().item(), 1e-3), name


# ---------------------------------------------------------------- 16: a folder that is half written


@pytest.mark.parametrize("leaves", ["foreign", "half", "index", "file"])
def test_a_folder_of_the_step_that_is_saved(leaves, tmp_path):
    """Where step 2 is to be saved there is already what a kill has left, or what somebody has put there: the
    run goes on from step 1, reaches step 2 again, and saves it; no rank waits for another. What is not
    threed's is not removed."""
    config = at(tmp_path, *DP, "zero.stage=2", "checkpoint.keep=0")
    first, second = saved_after(config, 1), saved_after(config, 2)
    (first.parent / "latest").unlink()
    right = manifest(second)["parameters"]
    if leaves == "file":
        shutil.rmtree(second)
        second.write_text("no folder")
    elif leaves == "foreign":
        (second / "notes.txt").write_text("by hand")
        (second / "manifest.json").unlink()
    elif leaves == "half":
        (second / "manifest.json").unlink()
        (second / "rank-00001.safetensors").unlink()
    else:
        (second / "manifest.json").write_text('{"format": 2, "st')
    taken = []

    def work(engine: Engine, comm: Comm) -> Path:
        resumed = resume(config, engine.zero)
        taken.append(resumed.path)
        step(engine, comm, 2 - engine.zero.step_number)
        return saved(engine)

    begun = time.monotonic()
    path = on_ranks(config, work)[0]
    assert time.monotonic() - begun < 30 and {each and each.name for each in taken} == {"step-00000001"}
    assert path == second
    assert {name: each["sums"] for name, each in manifest(path)["parameters"].items()} == {
        name: each["sums"] for name, each in right.items()}
    assert take(config)[0] == "step-00000002"
    if leaves in ("foreign", "file"):
        (found,) = first.parent.glob("step-00000002.found-*")
        assert (found / "notes.txt" if leaves == "foreign" else found).read_text() in ("by hand", "no folder")


# ---------------------------------------------------------------- 17: a save in a step on NVMe

KILLS = 20


def on_a_disk(tmp_path: Path, name: str) -> Config:
    return at(tmp_path / name, *DP, "zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme",
              f"offload.nvme_path={tmp_path}", "train.steps=1000", "checkpoint.keep=2")


def trained(config: Config, until: int) -> None:
    """A save after each step, in the background of the next one, whose state goes to the disk and back."""
    def work(engine: Engine, comm: Comm) -> None:
        resumed = resume(config, engine.zero)
        saver = Saver(engine, resumed.lineage, lambda: None)
        while engine.zero.step_number < until:
            step(engine, comm)
            if saver.stage is not SaveStage.IDLE:
                saver.drain()
            saver.begin(COUNTERS)
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None, outcome
        engine.close()

    tidy(config)
    on_ranks(config, work)


def test_killed_in_a_step_on_a_disk(tmp_path):
    """SIGKILL, 20 times, at random moments of a step that reads and writes its state on a disk while a
    checkpoint of it is written. Each start goes on from a checkpoint, and the weights and the state at the
    end have the bits of a run that nobody disturbed."""
    config, draw, reached, until = on_a_disk(tmp_path, "run"), random.Random(17), [], 0
    latest = tmp_path / "run" / "checkpoints" / "latest"
    fork = multiprocessing.get_context("fork")
    for number in range(KILLS):
        child = fork.Process(target=trained, args=(config, 1000))
        child.start()
        before, limit = content(latest), time.monotonic() + 60
        while content(latest) == before:  # it goes on, and has saved once more
            assert child.is_alive() and time.monotonic() < limit, f"start {number}"
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        reached.append(int(content(latest).split()[0].removeprefix("step-")))
    assert reached == sorted(set(reached))
    until = reached[-1] + 2
    last = fork.Process(target=trained, args=(config, until))
    last.start()
    last.join(60)
    assert last.exitcode == 0
    trained(on_a_disk(tmp_path, "unbroken"), until)
    got, right = (manifest(tmp_path / name / "checkpoints" / f"step-{until:08d}")
                  for name in ("run", "unbroken"))
    for key in ("step", "updates", "parameters"):
        mine, theirs = (each[key] for each in (got, right))
        if key == "parameters":
            mine, theirs = ({name: entry["sums"] for name, entry in each.items()} for each in (mine, theirs))
        assert mine == theirs, key
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


def content(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# ---------------------------------------------------------------- 18: bytes on disk

WRITTEN = {
    "zero-0": ([*DP, "zero.stage=0"], 3), "zero-1": ([*DP, "zero.stage=1"], 3),
    "zero-2": ([*DP, "zero.stage=2", "offload.optimizer=cpu"], 3),
    "zero-3": ([*DP, "zero.stage=3", "parallel.tp=2"], 3),
    "nvme": ([*DP, "zero.stage=3", *SETTINGS["offload"]["nvme+parameters"]], 3),
    "bf16": ([*DP, "precision.dtype=bf16", "zero.stage=2"], 3),
    "groups": (["parallel.dp=4", "zero.stage=3", "zero.shard_size=2"], 3),
    "pp": (["parallel.pp=2", "parallel.schedule=zb-v"], 3),
    "tiles": ([*DP, "zero.stage=3", "model.tile_linears=1KiB", "model.tie_embeddings=false"], 3),
    "lion": ([*DP, "optimizer.name=lion"], 2), "sgd": ([*DP, "optimizer.name=sgd"], 1),
}


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("name", WRITTEN)
def test_bytes_on_disk(name, tmp_path):
    """Four bytes for each number that a run must have again, once, and a head; the files have as many bytes
    as the manifest says. A view that drags its buffer along would be seen, and a copy that several ranks
    write."""
    overrides, kinds = WRITTEN[name]
    config = at(tmp_path, *overrides)
    path = saved_after(config, 1)
    files = {each.name: each.stat().st_size for each in path.glob("rank-*.safetensors")}
    assert {each: size for each, (size, *_) in manifest(path)["files"].items()} == files
    heads = {}
    for each in files:
        with open(path / each, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
        ends = sorted(entry["data_offsets"] for key, entry in entries.items() if key != "__metadata__")
        assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(ends))
        assert files[each] == 8 + size + ends[-1][1]
        heads[each] = 8 + size
    planned = sum(torch.Size(each.stored).numel() for each in parameters(config.model)) * kinds * 4
    assert sum(files.values()) - sum(heads.values()) == planned


# ---------------------------------------------------------------- 20: a schedule that begins

FRESH = ["optimizer.lr=0.01", "optimizer.min_lr=0.001", "optimizer.warmup_steps=3", "train.steps=8",
         "optimizer.schedule=cosine", "optimizer.decay_steps=6", "train.global_batch_size=4"]


@pytest.mark.parametrize("others", [[], [*DP, "zero.stage=3", "offload.optimizer=cpu",
                                         "offload.parameters=cpu"]], ids=["plain", "offloaded"])
def test_weights_alone_have_a_fresh_schedule(others, sources, tmp_path):
    """The learning rates from the first step on, the optimizer's count of updates, the data; and it is said.
    A checkpoint of a run, with its optimizer's state, goes on in its schedule."""
    path, made = sources
    for source, first in (("import", 0), ("adamw", 2)):
        config = load(path, [*FRESH, *others, f"train.resume={made[source]}", f"run.dir={tmp_path}"])

        def work(engine: Engine, comm: Comm, config: Config = config) -> tuple[list[str], list[float], int]:
            resumed, rates = resume(config, engine.zero), []
            for _ in range(4):
                rates.append(engine.zero.lr)
                step(engine, comm)
            return resumed.notes, rates, engine.zero.updates

        notes, rates, updates = on_ranks(config, work)[0]
        assert rates == [learning_rate(config.optimizer, first + index, 8) for index in range(4)]
        assert len({*rates}) > 1 and updates == first + 4
        said = [line for line in notes if "the optimizer, its schedule and the data begin fresh" in line]
        assert len(said) == (first == 0)


# ---------------------------------------------------------------- 21: a load that blocks


def test_a_load_that_goes_on_slowly(tmp_path, monkeypatch):
    """A rank that reads for longer than run.timeout_s, piece by piece, is waited for."""
    config = at(tmp_path, *DP, "run.timeout_s=1", "checkpoint.every=0")
    saved_after(config, 1)
    plan, begun = BoxReader.plan, time.monotonic()

    def slow(self: BoxReader, kind: str, box: Any) -> Any:
        if threading.current_thread().name == "load, rank 1":
            time.sleep(0.05)
        return plan(self, kind, box)

    monkeypatch.setattr(BoxReader, "plan", slow)
    assert take(config)[0] == "step-00000001" and time.monotonic() - begun > 1


@pytest.mark.parametrize("where", ["_read", "_open"])
def test_a_load_that_blocks(where, begin, monkeypatch, tmp_path):
    """The file system of one rank answers no more: the run says so, names the rank and the checkpoint, and
    ends within the limit; not in silence after five hours."""
    first = begin(TINY_RUN, "train.steps=2", "checkpoint.every=2")
    assert first.wait() == 0, first.output
    usual = getattr(BoxReader, where)

    def stuck(self: BoxReader, *others: Any) -> Any:
        if threading.current_thread().name == "load, rank 1":
            time.sleep(300)
        return usual(self, *others)

    monkeypatch.setattr(BoxReader, where, stuck)
    begun = time.monotonic()
    again = begin(TINY_RUN, "train.steps=4", "run.timeout_s=6")
    assert again.wait(40) == 1, again.output
    assert time.monotonic() - begun < 6 + 25
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert f"read nothing of {path} for 0.6 s, and all others wait" in again.output
    assert again.output.count(f"read nothing of {path} for run.timeout_s=6") == 1, again.output
    assert "rank 1 on" in again.output and "Traceback" not in again.output, again.output
