"""Checkpoints in loopback: what is saved while the run goes on, what is damaged and is noticed, what goes to
another mesh."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import batches, tiny
from threed.base.errors import InputError, RunError
from threed.checkpoint import format as formats
from threed.checkpoint import load as loading
from threed.checkpoint import manifest as manifests
from threed.checkpoint import save as saving
from threed.checkpoint.choose import notes, read_manifest
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver, SaveStage
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config

COUNTERS = {"samples": 0, "skipped": 0, "wandb_id": None}
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16",
         "train.global_batch_size=4", "train.steps=8", "checkpoint.every=1"]
PP, TP, DP = ["parallel.pp=2"], ["parallel.tp=2"], ["parallel.dp=2"]
FILES = "offload.nvme_path=/tmp"


def at(path: Path, *others: str) -> Config:
    return tiny(*SMALL, f"run.dir={path}", *others)


def named(config: Config, path: Path) -> Config:
    return replace(config, train=replace(config.train, resume=str(path)))


def on_ranks(config: Config, work: Callable[[Engine, Comm], Any]) -> list[Any]:
    plan = make_plan(config)
    torch.set_num_threads(1)
    return run_loopback(plan, make_mesh(config), lambda comm: work(Engine(Analysis(plan), comm), comm))


def step(engine: Engine, comm: Comm, count: int = 1) -> list[float]:
    first = engine.zero.step_number
    return [engine.train_step(batches(engine.config, comm, first + index))[0].loss for index in range(count)]


def saved(engine: Engine) -> Path:
    """Save a checkpoint in the foreground."""
    saver = Saver(engine, Lineage("test-0"), lambda: None)
    saver.begin(COUNTERS)
    outcome = saver.drain()
    assert outcome is not None and outcome.problem is None, outcome
    return outcome.path


def saved_after(config: Config, steps: int) -> Path:
    """Take some steps, then save a checkpoint in the foreground."""
    def work(engine: Engine, comm: Comm) -> Path:
        step(engine, comm, steps)
        return saved(engine)

    return on_ranks(config, work)[0]


def wait(event: threading.Event) -> None:
    assert event.wait(60)


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text())


# ---------------------------------------------------------------- in the background

WAYS = {
    "zero-0": [*DP, *PP], "zero-1": [*DP, *TP], "zero-2": [*DP, "zero.stage=2"],
    "zero-3": [*DP, *PP, "zero.stage=3"],
    "groups": ["parallel.dp=4", "zero.stage=3", "zero.shard_size=2"], "tied-pp": [*PP, *TP],
    "bf16": [*DP, "precision.dtype=bf16"],
    "no-master": [*DP, "zero.stage=1", "precision.dtype=bf16", "precision.master=none"],
    "cpu": [*DP, "zero.stage=2", "offload.optimizer=cpu"],
    "parameters": [*DP, "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
    "overlap": [*DP, "zero.stage=1", "offload.optimizer=cpu"],
    "no-overlap": [*DP, "zero.stage=1", "offload.optimizer=cpu", "offload.overlap=none"],
    "gradients": [*DP, "zero.stage=2", "offload.optimizer=cpu", "offload.gradients=host"],
    "zb-h1": [*PP, "parallel.schedule=zb-h1"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_one_moment(way, tmp_path, monkeypatch):
    """A checkpoint that is written while two more steps are taken has the bits of one for which the run
    waited. The writer is held until the steps are over, and each unit's copy until the step has begun."""
    waited = saved_after(at(tmp_path / "waited", *WAYS[way], "checkpoint.background=false"), 2)
    hold = threading.Event()
    original = Saver._write
    monkeypatch.setattr(Saver, "_write", lambda self: (hold.wait(60), original(self))[1])

    def work(engine: Engine, comm: Comm) -> tuple[list[float], Path]:
        step(engine, comm, 2)
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        engine.settle()  # (the copy comes after the updates that wait, which take the same lanes)
        late = threading.Event()
        for lane in (comm.lane("d2h"), comm.lane("host")):
            lane.submit(partial(wait, late))
        saver.begin(COUNTERS)
        threading.Timer(0.05, late.set).start()  # while the step below is under way, or before
        after = step(engine, comm, 2)
        if engine.comm.rank == 0:
            hold.set()
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None
        return after, outcome.path

    config = at(tmp_path / "beside", *WAYS[way])
    (losses, path), *_ = on_ranks(config, work)
    for key in ("step", "updates", "loss_scaler", "waiting", "parameters"):
        mine, theirs = manifest(path)[key], manifest(waited)[key]
        if key == "parameters":
            mine, theirs = ({name: entry["sums"] for name, entry in each.items()} for each in (mine, theirs))
        assert mine == theirs, key
    undisturbed = replace(config, checkpoint=replace(config.checkpoint, background=False))
    expected = on_ranks(undisturbed, lambda engine, comm: step(engine, comm, 4))[0][2:]
    assert losses == expected, "the copy has changed the run"


def test_a_step_waits_for_its_copy(tmp_path):
    """Without the wait the copy has parts of the next step's weights: the same test, without the plan's
    dependency, must fail."""
    def work(engine: Engine, comm: Comm, obeys: bool) -> bool:
        step(engine, comm, 1)
        before = {unit: state.optimizer_state.master.clone() for unit, state in engine.states.items()}
        late = threading.Event()
        comm.lane("d2h").submit(partial(wait, late))
        engine.snapshot()
        if not obeys:  # forget what STEP waits for
            engine._copies.clear()
            timer = threading.Timer(1.5, late.set)
        else:
            timer = threading.Timer(0.3, late.set)
        timer.start()
        step(engine, comm, 1)
        late.set()
        for state in engine.states.values():
            if state.snapshot is not None:
                state.snapshot.wait()
        return all(torch.equal(state.snapshot.rows[0], before[unit]) for unit, state in engine.states.items()
                   if state.snapshot is not None)

    config = at(tmp_path, *TP)
    assert all(on_ranks(config, lambda engine, comm: work(engine, comm, True)))
    assert not all(on_ranks(config, lambda engine, comm: work(engine, comm, False)))


def test_stages_are_entered_together(tmp_path):
    """Statuses arrive with the steps, as in a run: no rank publishes before all have written."""
    def work(engine: Engine, comm: Comm) -> int:
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin(COUNTERS)
        for number in range(30_000):
            time.sleep(0.001)  # a step; on a busy machine the threads that write take long
            seen = [saver.stage]
            outcome = saver.advance(comm.numbers(saver.status))
            assert len(set(comm.all_gather(saver.stage))) == 1
            if outcome is not None:
                assert seen[-1] is SaveStage.PUBLISHING and (outcome.path / "manifest.json").exists()
                return number
        raise AssertionError("it never ended")

    assert len(set(on_ranks(at(tmp_path, *DP, *PP), work))) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write(rank, tmp_path, monkeypatch):
    """The failure costs that checkpoint only: all ranks know why, no file is left, and the next save
    succeeds."""
    original = saving.write

    def fail(path: Path, number: int, items: list) -> Any:
        if number == rank and fails[0]:
            raise OSError(5, "Input/output error")
        return original(path, number, items)

    monkeypatch.setattr(saving, "write", fail)
    fails = [True]

    def work(engine: Engine, comm: Comm) -> None:
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin(COUNTERS)
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is not None
        assert f"rank {rank} cannot write to" in outcome.problem and "Input/output error" in outcome.problem
        comm.all_gather(None)
        fails[0] = False
        comm.all_gather(None)
        saver.begin(COUNTERS)
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None

    on_ranks(at(tmp_path, *DP), work)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000000"]


# ---------------------------------------------------------------- what is damaged is noticed


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return saved_after(at(tmp_path_factory.mktemp("source"), *DP, *TP, "zero.stage=2"), 2)


def refused(config: Config, words: str = "") -> None:
    with pytest.raises(InputError, match=words):
        on_ranks(config, lambda engine, comm: resume(config, engine.zero))


FILES_OF_ONE = ["manifest.json", "index.jsonl", "rank-00000.safetensors", "rank-00003.safetensors"]
MESHES = {"same": [*DP, *TP, "zero.stage=2"], "other": [*PP, "zero.stage=1"], "one": []}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("file", FILES_OF_ONE)
def test_a_flipped_bit_in_a_file(file, mesh, source, tmp_path):
    """Anywhere in it, on the mesh that wrote it and on others, which read parts of its tensors."""
    random.seed(f"{file} {mesh}")
    for number in range(3):
        copy = tmp_path / f"{number}"
        shutil.copytree(source, copy)
        content = bytearray((copy / file).read_bytes())
        place = random.randrange(len(content)) if number else 30
        content[place] ^= 1 << random.randrange(8)
        (copy / file).write_bytes(content)
        refused(named(at(tmp_path / "run", *MESHES[mesh]), copy), "is damaged|cannot be read|is incomplete")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["param", "exp_avg", "exp_avg_sq"])
def test_a_flipped_bit_in_memory(kind, mesh, source, tmp_path, monkeypatch):
    """Between reading and the proof, on any one rank: the tensor is named."""
    original = loading._prove
    config = named(at(tmp_path / "run", *MESHES[mesh]), source)
    for victim in range(config.world_size):
        def flip(values: formats.Manifest, zero: Any, rounded: dict, victim: int = victim) -> str | None:
            if zero.comm.rank == victim:
                state = next(iter(zero.states.values()))
                state.kept()[kind].view(torch.int32)[
                    random.randrange(state.part.layout.placed[0].stop // 8)
                ] ^= 1 << 7
            return original(values, zero, rounded)

        monkeypatch.setattr(loading, "_prove", flip)
        refused(config, f"is damaged: {kind} .* does not have the checksum of its manifest")


def test_every_copy_is_looked_at(tmp_path):
    """A wrong element in a copy that is not the one that was written: of another shard group, of the other
    end of a tie, of a norm on another tp rank."""
    for others, pick in ((["parallel.dp=4", "zero.shard_size=2", "zero.stage=1"],
                          lambda comm: comm.here.replica == 3),
                         ([*PP, *TP], lambda comm: comm.here.position == 1 and comm.here.on["tp"] == 1)):
        path = saved_after(at(tmp_path / "source", *others), 1)
        config = named(at(tmp_path / "run", *others), path)

        def work(engine: Engine, comm: Comm, config: Config = config, pick: Callable = pick) -> str | None:
            resume(config, engine.zero)
            if pick(comm):
                unit = max(engine.states)  # the tied embedding
                engine.states[unit].optimizer_state.master[3] += 1
            return loading._prove(manifests.unseal(Path(config.train.resume)), engine.zero, {})

        assert any(on_ranks(config, work)), others
        shutil.rmtree(tmp_path / "source")


@pytest.mark.parametrize(("key", "value"), [
    ("samples", 113), ("updates", 3), ("step", 1000), ("skipped", 1), ("format", 3), ("lineage", ["x", []]),
    ("loss_scaler", {"scale": 2.0, "good": 0, "left": 0}),
])
def test_an_edited_manifest(key, value, source, tmp_path):
    """One digit of a counter would train on other data, or not at all."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    values = manifest(copy)
    (copy / "manifest.json").write_text(json.dumps({**values, key: value}, indent=1))
    refused(named(at(tmp_path / "run"), copy), "does not have its own checksum")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '"x"', '{"format": 2}', "\x00" * 50,
                                  "[" * 100_000])
def test_a_broken_manifest(text, source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "manifest.json").write_text(text)
    refused(named(at(tmp_path / "run"), copy), "is damaged: manifest.json")


def test_an_older_format(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    values = {key: value for key, value in manifest(copy).items() if key != "checksum"}
    (copy / "manifest.json").write_text(json.dumps({**values, "format": 1}))
    refused(named(at(tmp_path / "run"), copy),
            "has format 1; this version of threed reads format 2: go on with the version")


# ---------------------------------------------------------------- which one is taken


def take(config: Config) -> tuple[str | None, list[str]]:
    result = on_ranks(config, lambda engine, comm: resume(config, engine.zero))
    assert len({(each.path, each.lineage) for each in result}) == 1
    return (result[0].path.name if result[0].path else None), result[0].notes


def test_weights_alone_begin_fresh(tmp_path):
    """They come from no run, whose settings could be compared."""
    config, path = at(tmp_path, *DP), tmp_path / "checkpoints" / "step-00000000"
    values = formats.Manifest(weights_only=True, config={**config.to_dict(), "optimizer": {"lr": 7.0}})
    assert notes(path, values, {}, config) == ["step-00000000 has weights alone: the optimizer, its schedule "
                                               "and the data begin fresh, at step 1"]
    assert notes(path, values, {"tokenizer": "anew", "sources": []}, config)[1:] == [
        "data.tokenizer=bpe is trained on the source: its tokens mean nothing to these weights"]


def test_the_one_before_is_taken(tmp_path):
    """A damaged newest checkpoint does not stop an unattended restart; it is named with its reason. Where
    none can be used, nothing begins anew by itself."""
    config = at(tmp_path, *DP, "checkpoint.keep=0")
    for steps in (1, 2, 3):
        saved_after(config, steps)
    folder = tmp_path / "checkpoints"
    (folder / "step-00000003" / "rank-00001.safetensors").write_bytes(b"short")
    taken, notes = take(config)
    assert taken == "step-00000002"
    assert "step-00000003 is damaged: rank-00001.safetensors has 5 bytes" in notes[0]
    content = bytearray((folder / "step-00000002" / "rank-00001.safetensors").read_bytes())
    content[-3] ^= 4  # noticed by the rank that reads it, not by rank 0
    (folder / "step-00000002" / "rank-00001.safetensors").write_bytes(content)
    taken, notes = take(config)
    assert taken == "step-00000001"
    assert len(notes) == 2
    assert "does not have the checksum of the index" in notes[1]
    refused(named(config, folder / "step-00000002"), "resume from another one with train.resume=PATH")
    shutil.rmtree(folder / "step-00000001")
    refused(config, "none of the checkpoints can be used")
    shutil.rmtree(folder)
    assert take(config) == (None, [])


@pytest.mark.parametrize("latest", ["", "nonsense", "step-00000099 x", "x" * 5000, "\xff\xfe", None])
def test_latest_is_damaged(latest, tmp_path):
    """The newest whole checkpoint is taken."""
    config = at(tmp_path)
    for steps in (1, 2):
        saved_after(config, steps)
    path = tmp_path / "checkpoints" / "latest"
    path.unlink() if latest is None else path.write_bytes(latest.encode("latin-1"))
    assert take(config)[0] == "step-00000002"


def test_killed_between_the_rename_and_latest(tmp_path):
    """The newer checkpoint is whole, and of the same lineage: it is taken."""
    config = at(tmp_path)
    saved_after(config, 1)
    before = (tmp_path / "checkpoints" / "latest").read_text()
    saved_after(config, 2)
    (tmp_path / "checkpoints" / "latest").write_text(before)
    assert take(config)[0] == "step-00000002"


def test_an_abandoned_checkpoint(tmp_path, monkeypatch):
    """A start from step 1 by name, and a crash before its first save: `auto` does not go on from step 3,
    which was left behind. And a restart of that start goes on from what it has saved itself."""
    from threed.checkpoint.choose import begin_lineage

    config = at(tmp_path, "checkpoint.keep=0")
    for steps in (1, 2, 3):
        saved_after(config, steps)
    folder = tmp_path / "checkpoints"
    again = named(config, folder / "step-00000001")
    (begun,) = on_ranks(again, lambda engine, comm: resume(again, engine.zero))
    begin_lineage(again, begun.path, begun.lineage)
    assert take(config)[0] == "step-00000001"

    def go_on(engine: Engine, comm: Comm) -> None:
        resume(again, engine.zero)
        step(engine, comm, 1)
        saver = Saver(engine, begun.lineage, lambda: None)
        saver.begin(COUNTERS)
        saver.drain()

    on_ranks(again, go_on)
    assert take(config)[0] == "step-00000002" and take(again)[0] == "step-00000001"
    monkeypatch.setenv("THREED_RESTARTS", "1")
    assert take(again)[0] == "step-00000002"


def test_a_stale_view(tmp_path, monkeypatch):
    """A rank whose file system does not show what rank 0 has chosen: nobody trains on mixed weights; it is
    said who and why."""
    config = at(tmp_path / "run", *DP)
    for steps in (1, 2):
        saved_after(config, steps)
    monkeypatch.setattr(formats, "PATIENCE_S", 0.2)
    original = loading.unseal

    def stale(path: Path) -> formats.Manifest:
        if "rank 1" in threading.current_thread().name and path.name == "step-00000002":
            raise formats.Unusable(path, "cannot be used")
        return original(path)

    monkeypatch.setattr(loading, "unseal", stale)

    def work(engine: Engine, comm: Comm) -> None:
        threading.current_thread().name = f"rank {comm.rank}"
        resume(config, engine.zero)

    with pytest.raises(RunError, match=r"does not see .*step-00000002 as rank 0 does"):
        on_ranks(config, work)


def test_what_a_crash_leaves(tmp_path):
    """Half of a checkpoint, of a removal, of a replacement."""
    config = at(tmp_path)
    path = saved_after(config, 1)
    folder = path.parent
    (folder / "step-00000002.abc.tmp").mkdir()
    shutil.copytree(path, folder / "step-00000001.removed.tmp")
    os.replace(path, folder / "step-00000001.replaced.tmp")  # killed before its successor had the name
    (folder / "latest.tmp").write_text("half")
    saving.tidy(config)
    assert sorted(each.name for each in folder.iterdir()) == ["latest", "step-00000001"]
    assert take(config)[0] == "step-00000001"


# ---------------------------------------------------------------- any to any

LAYOUTS = {
    "one": [], "dp2": DP, "tp2": TP, "pp2": PP, "dp4": ["parallel.dp=4", "zero.stage=1"],
    "zero-2": [*DP, *PP, "zero.stage=2"], "zero-3": [*DP, *TP, "zero.stage=3"],
    "groups": ["parallel.dp=4", "zero.stage=3", "zero.shard_size=2"],
    "sp": [*TP, "parallel.sequence_parallel=true"],
    "tp4": ["parallel.tp=4"], "zb-v": [*PP, "parallel.schedule=zb-v"],
    "interleaved": [*PP, "parallel.schedule=interleaved", "parallel.virtual_stages=2"],
    "cpu": [*DP, "zero.stage=2", "offload.optimizer=cpu"], "nvme": [*TP, "offload.optimizer=nvme", FILES],
    "nvme-all": [*DP, "zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme", FILES],
    "tiles": [*DP, "zero.stage=3", "model.tile_linears=1KiB"], "tiles-tp": [*TP, "model.tile_linears=2KiB"],
    "persist": [*DP, "zero.stage=3", "zero.persist_below=100"], "bf16": [*DP, "precision.dtype=bf16"],
    "fp16": ["precision.dtype=fp16", "precision.loss_scale=1024", *TP],
    "full": [*PP, "activation.policy=full"],
    "cpu-parameters": [*DP, "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
}
PAIRS = [(a, b) for a, b in itertools.product(LAYOUTS, LAYOUTS) if a != b]
SAMPLE = random.Random(7).sample(PAIRS, 24)


@pytest.mark.parametrize(("before", "after"), [
    pytest.param(*pair, marks=[] if pair in SAMPLE else [pytest.mark.slow]) for pair in PAIRS])
def test_any_to_any(before, after, tmp_path, references):
    """Two steps on one layout and two on another, with the optimizer state, give the reference's losses.
    Saved again without a step, the whole tensors keep their bits."""
    untied = ["model.tie_embeddings=false", "checkpoint.every=0"]
    first, second = (at(tmp_path / name, *untied, *LAYOUTS[name]) for name in (before, after))

    def begin(engine: Engine, comm: Comm) -> tuple[list[float], Path]:
        return step(engine, comm, 2), save(engine)

    def save(engine: Engine) -> Path:
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin(COUNTERS)
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None
        return outcome.path

    (losses, path), *_ = on_ranks(first, begin)
    goes_on = named(second, path)

    def go_on(engine: Engine, comm: Comm) -> tuple[list[float], Path]:
        resume(goes_on, engine.zero)
        again = save(engine)
        return step(engine, comm, 2), again

    (more, again), *_ = on_ranks(goes_on, go_on)
    assert {name: entry["sums"] for name, entry in manifest(path)["parameters"].items()} == {
        name: entry["sums"] for name, entry in manifest(again)["parameters"].items()}
    narrow = any(config.precision.dtype != "fp32" for config in (first, second))
    want = references(at(tmp_path, *untied), 4).losses
    assert losses + more == pytest.approx(want, rel=3e-3 if narrow else 1e-5)


def test_any_bit_of_latest(tmp_path):
    """A flipped bit in `latest`: the newest checkpoint is still taken; nothing begins anew, and nothing older
    is taken."""
    config = at(tmp_path)
    for steps in (1, 2):
        saved_after(config, steps)
    path = tmp_path / "checkpoints" / "latest"
    content = path.read_bytes()
    random.seed(1)
    for _ in range(6):
        wrong = bytearray(content)
        wrong[random.randrange(len(wrong))] ^= 1 << random.randrange(8)
        path.write_bytes(wrong)
        assert take(config)[0] == "step-00000002", bytes(wrong)


@pytest.mark.parametrize("change", [
    {"samples": -5}, {"step": "x"}, {"mesh": {}}, {"config": {}}, {"loss_scaler": {"scale": 2}},
    {"waiting": {"loss": 1}},
    {"files": {"a": 1}}, {"files": {"rank-00000.safetensors": []}}, {"files": {"../x": [1, 1, 1]}},
    {"files": {"/etc/passwd": [1, 1, 1]}}, {"files": {"rank-000000.safetensors": [1, 1, 1]}}, {"lineage": []},
    {"lineage": ["x", [1]]}, {"parameters": {}}, {"parameters": {"x": {}}},
    {"mesh": {"pp": "1", "dp": 1, "tp": 1}}, {"mesh": {"pp": 0, "dp": 1, "tp": 1}},
    {"config": {"model": {}, "train": 3}}], ids=str)
def test_a_manifest_of_somebody_else(change, source, tmp_path):
    """A manifest with a right checksum and wrong content: one message, no traceback."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    values = {key: value for key, value in manifest(copy).items() if key != "checksum"}
    (copy / "manifest.json").write_text(manifests.seal({**values, **change}))
    refused(named(at(tmp_path / "run"), copy), "cannot be used|is damaged|is of another model")


@pytest.mark.parametrize("trains", [True, False])
def test_gradients_that_wait(trains, source, tmp_path):
    """An earlier version could save gradients for its next step to apply, which this one would drop: it says
    so. Who wants the weights alone has them."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    values = {key: value for key, value in manifest(copy).items() if key != "checksum"}
    values["config"]["offload"] |= {"delayed_update": True, "warmup": 1}
    waiting = {"loss": 1.0, "grad_norm": 1.0, "scale": 1.0, "finite": True, "loss_scale": 1.0}
    (copy / "manifest.json").write_text(manifests.seal({**values, "waiting": waiting}))
    config = named(at(tmp_path / "run"), copy)
    if trains:
        refused(config, "holds gradients that its next step was to apply, a step late .* resume from one "
                        "that was saved before the first delayed step or after the last")
    else:
        assert read_manifest(copy, config, trains=False).step == values["step"]


def test_no_proof_is_no_load(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    values = {key: value for key, value in manifest(copy).items() if key != "checksum"}
    for entry in values["parameters"].values():
        entry["sums"] = {}
    (copy / "manifest.json").write_text(manifests.seal(values))
    refused(named(at(tmp_path / "run"), copy), "does not have the checksum of its manifest")


def test_a_manifest_that_is_no_file(source, tmp_path):
    """The manifest is a pipe: to read it would block for ever."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")
    refused(named(at(tmp_path / "run"), copy), "manifest.json cannot be read")


def test_another_runs_checkpoints_are_left_alone(tmp_path):
    """A start with `never` in a folder that has some: where its own newest is damaged it does not go on from
    the others', and its own are counted by themselves when older ones are removed."""
    from threed.checkpoint.choose import begin_lineage

    config = at(tmp_path, *DP)
    for steps in (2, 3):
        saved_after(config, steps)
    anew = replace(config, train=replace(config.train, resume="never"))

    def work(engine: Engine, comm: Comm) -> None:
        begun = resume(anew, engine.zero)
        if comm.rank == 0:
            begin_lineage(anew, begun.path, begun.lineage)
        saver = Saver(engine, begun.lineage, lambda: None)
        for count in (1, 3):
            step(engine, comm, count)
            saver.begin(COUNTERS)
            saver.drain()

    on_ranks(anew, work)
    folder = tmp_path / "checkpoints"
    assert {path.name for path in folder.glob("step-*")} == {f"step-{number:08d}" for number in (1, 2, 3, 4)}
    (folder / "step-00000004" / "rank-00000.safetensors").write_bytes(b"")
    assert take(config)[0] == "step-00000001"


def test_weights_that_compute_reads(tmp_path, monkeypatch):
    """A change between the master weights, which are proved, and their 16-bit copy."""
    from threed.features.zero.optimizer_state import OptimizerState

    config = at(tmp_path / "run", *DP, "precision.dtype=bf16", "zero.stage=1")
    path = saved_after(config, 1)
    original = OptimizerState.publish

    def publish(self: OptimizerState) -> None:
        original(self)
        if self.part.number == 1 and self.part.index == 1:
            self._weights.at_home[5] += 1

    monkeypatch.setattr(OptimizerState, "publish", publish)
    refused(named(config, path), "computes with are not those that were read")
