"""Runs with ZeRO and 16-bit precision from the command line: stopped and resumed they go on to the bit; a
checkpoint of one stage and mesh goes on at another; what a dynamic loss scale skips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, metrics

SMALL = ["train", "configs/toy.yaml", "model.layers=4", "model.hidden=32", "model.seq_len=32",
         "model.vocab=300",
         "train.global_batch_size=8", "train.micro_batch_size=1", "train.eval_every=0",
         "monitor.wandb=disabled",
         "monitor.trace_every=0", "optimizer.warmup_steps=3", "optimizer.decay_steps=12", "parallel.tp=1"]
STEPS, STOP = 8, 4
KEYS = ("train/loss", "train/lr", "train/grad_norm", "train/skipped_steps", "train/loss_scale")


@pytest.fixture
def start(tmp_path, cache):
    """start(name, *overrides) -> the ended run in tmp_path/name."""

    def begin(name: str, *overrides: str, status: int = 0) -> Run:
        files = [f"offload.nvme_path={tmp_path}"] if any(text.endswith("=nvme") for text in overrides) else []
        run = Run(tmp_path, *SMALL, *cache, f"run.dir={tmp_path / name}", *files, *overrides)
        try:
            assert run.wait() == status, run.output
        finally:
            run.kill()
        return run

    return begin


def rows(folder: Path) -> list[dict]:
    return [{key: row.get(key) for key in ("step", *KEYS)} for row in metrics(folder)]


def manifest(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())


PP, DP4 = ["parallel.dp=2", "parallel.pp=2"], ["parallel.dp=4", "parallel.pp=1"]
CPU, NVME = ["offload.optimizer=cpu"], ["offload.optimizer=nvme"]
FP16 = ["precision.dtype=fp16", f"precision.initial_loss_scale={2**24}"]
RUNS = {
    "zero-1-fp16": [*PP, *FP16, "zero.stage=1"],
    "zero-2": [*PP, "zero.stage=2"],
    "zero-2-fp16-groups": [*DP4, *FP16, "zero.stage=2", "zero.shard_size=2", "precision.reduce_dtype=fp16"],
    "zero-3-persist": [*PP, "zero.stage=3", "zero.persist_below=100", "zero.residency=stage"],
    "zero-3-fp16-groups": [*DP4, *FP16, "zero.stage=3", "zero.shard_size=2", "zero.reduce_every=step",
                           "precision.hysteresis=6"],
    "zero-2-fp16-up": [*PP, "zero.stage=2", "precision.dtype=fp16", f"precision.initial_loss_scale={2**21}",
                       "precision.hysteresis=1", "precision.loss_scale_window=3"],
    "zero-3-bf16-no-master": [*PP, "zero.stage=3", "precision.dtype=bf16", "precision.grad_dtype=bf16",
                              "precision.master=none",
                              "parallel.schedule=zb-h1"],
    "zero-2-cpu": [*PP, *CPU, "zero.stage=2", "offload.ratio=0.5"],
    "zero-1-nvme": [*PP, *NVME, "zero.stage=1", "precision.dtype=bf16"],
    "zero-3-nvme-fp16": [*PP, *NVME, *FP16, "zero.stage=3", "offload.parameters=nvme"],
}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_to_the_bit(name, start, tmp_path):
    """Something that a step needs and a checkpoint does not keep: a shard, a moment, the scale, its counts of
    good steps and overflows, the skip count, the position in the data. fp16 runs are stopped while the scale
    is on its way down, or while good steps count towards its next doubling."""
    fp16 = "fp16" in name
    start("unbroken", f"train.steps={STEPS}", *RUNS[name])
    start("run", f"train.steps={STOP}", *RUNS[name])
    again = start("run", f"train.steps={STEPS}", *RUNS[name])
    assert f"after step {STOP}" in again.output and rows(tmp_path / "run") == rows(tmp_path / "unbroken")
    wanted, resumed = (manifest(tmp_path / which, STEPS) for which in ("unbroken", "run"))
    # weights and moments, to the bit
    for key in ("step", "updates", "samples", "skipped", "loss_scaler", "parameters"):
        assert resumed[key] == wanted[key], key
    at_stop = manifest(tmp_path / "run", STOP)
    assert at_stop["samples"] == 8 * STOP and resumed["updates"] == STEPS - resumed["skipped"]
    assert (at_stop["skipped"] >= 2) == fp16
    assert (len({row["train/loss_scale"] for row in rows(tmp_path / "run")[STOP:]} - {None}) > 1) == fp16


OVERLAP = [*PP, "checkpoint.every=1", "checkpoint.keep=0"]
OVERLAP_RUNS = {
    "cpu": [*OVERLAP, *CPU, "zero.stage=2"],
    "nvme-bf16": [*OVERLAP, *NVME, "zero.stage=1", "precision.dtype=bf16"],
    "fp16-stage-3": [*OVERLAP, *CPU, *FP16, "zero.stage=3", "precision.hysteresis=1"],
}


@pytest.mark.parametrize("name", OVERLAP_RUNS)
def test_updates_that_wait_are_resumed_to_the_bit(name, start, tmp_path):
    """From a checkpoint after any step: the update that the next step would have begun with is in it. And a
    run whose checkpoints come in between has the numbers of one without them, and of one that updates at the
    end of each step."""
    start("unbroken", f"train.steps={STEPS}", *OVERLAP_RUNS[name])
    start("seldom", f"train.steps={STEPS}", *OVERLAP_RUNS[name], "checkpoint.every=100")
    start("none", f"train.steps={STEPS}", *OVERLAP_RUNS[name], "offload.overlap=none")
    wanted, seen = manifest(tmp_path / "unbroken", STEPS), rows(tmp_path / "unbroken")
    assert rows(tmp_path / "seldom") == rows(tmp_path / "none") == seen
    kept = ("updates", "skipped", "loss_scaler", "waiting", "parameters")
    for other in ("seldom", "none"):
        assert {key: manifest(tmp_path / other, STEPS)[key] for key in kept} == {
            key: wanted[key] for key in kept}, other
    for step in (1, 3, STOP):
        before = tmp_path / "unbroken" / "checkpoints" / f"step-{step:08d}"
        assert manifest(tmp_path / "unbroken", step)["waiting"] is None
        start(f"run-{step}", f"train.steps={STEPS}", *OVERLAP_RUNS[name], f"train.resume={before}")
        assert rows(tmp_path / f"run-{step}") == seen[step:]
        resumed = manifest(tmp_path / f"run-{step}", STEPS)
        for key in kept:
            assert resumed[key] == wanted[key], (step, key)


def test_a_checkpoint_goes_to_another_mesh_and_tier(start, tmp_path):
    """What waited when it was saved is applied there, too."""
    start("first", "train.steps=5", *OVERLAP, *CPU, "zero.stage=2")
    at = f"train.resume={tmp_path / 'first' / 'checkpoints' / 'step-00000003'}"
    start("device", "train.steps=5", *PP, "zero.stage=2", at)
    start("other", "train.steps=5", *OVERLAP, *NVME, "zero.stage=3", at, "parallel.dp=1", "parallel.pp=4")
    wanted, *others = ([row["train/loss"] for row in metrics(tmp_path / name)]
                       for name in ("first", "device", "other"))
    for losses in others:
        assert losses == pytest.approx(wanted[3:], rel=1e-5)


def test_a_skipped_step(start, tmp_path):
    """What the metrics and the log say: data goes on, the learning rate does not, and the run does not end,
    though it would for a loss that is not finite."""
    run = start("run", "train.steps=5", *PP, *FP16, "zero.stage=2", "train.on_nonfinite=stop")
    seen = rows(tmp_path / "run")
    scale, halved = 2**24, 2**23
    # hysteresis 2
    assert [row["train/loss_scale"] for row in seen[:4]] == [scale, scale, halved, halved // 2]
    assert [row["train/skipped_steps"] for row in seen[:3]] == [1, 2, 3]
    assert {row["train/lr"] for row in seen[:4]} == {1e-3}
    assert [row["train/grad_norm"] in ("inf", "nan") for row in seen[:3]] == [True] * 3
    for step, before, after in ((1, scale, scale), (2, scale, halved), (3, halved, halved // 2)):
        assert (f"step {step}: gradients overflowed at loss scale {before}: the step is skipped, {step} so "
                f"far; the scale is now {after}") in run.output
    assert len({row["train/loss"] for row in seen[:3]}) == 3, "the same data again"


@pytest.mark.parametrize("lower, overrides", [
    ("precision.loss_scale", [f"precision.loss_scale={2**24}"]),
    ("precision.min_loss_scale", [f"precision.initial_loss_scale={2**24}",
                                  f"precision.min_loss_scale={2**24}"]),
])
def test_an_overflow_that_no_scale_helps(lower, overrides, start, tmp_path):
    """It follows train.on_nonfinite; a run that skipped such steps for ever would train nothing and say
    nothing."""
    common = ["train.steps=3", *PP, "precision.dtype=fp16", "zero.stage=2", *overrides]
    stop = start("stop", *common, status=1)
    assert "step 1: not finite (loss " in stop.output and "first in the gradient of u" in stop.output
    assert f"Lower {lower}, or set train.on_nonfinite=skip" in stop.output
    skip = start("skip", *common, "train.on_nonfinite=skip")
    assert skip.output.count("not finite (loss") == 3
    assert rows(tmp_path / "skip")[-1]["train/skipped_steps"] == 3


def test_a_loss_that_is_not_finite(start):
    """Under a dynamic scale too it ends the run: no scale helps, and the scale would be driven to its
    minimum."""
    run = start("run", "train.steps=30", *PP, "precision.dtype=bf16", "precision.loss_scale=dynamic",
                "optimizer.lr=1e30",
                "optimizer.clip_grad=0", "optimizer.warmup_steps=0", "zero.stage=3", status=1)
    assert "not finite (loss " in run.output and run.output.count("threed: step") == 1
    assert "Lower optimizer.lr" in run.output


@pytest.fixture(scope="module")
def source(tmp_path_factory, cache):
    """8 steps of ZeRO-1 on dp=2 x pp=2, with a checkpoint after 4."""
    folder = tmp_path_factory.mktemp("source")
    run = Run(folder, *SMALL, *cache, f"run.dir={folder / 'run'}", f"train.steps={STEPS}",
              f"checkpoint.every={STOP}",
              "checkpoint.keep=0", "zero.stage=1", *PP)
    assert run.wait() == 0, run.output
    return folder / "run"


ELSEWHERE = {
    "stage-0": (["zero.stage=0"], 0.0),  # the same sums in the same order: the same bits
    "stage-2": (["zero.stage=2", "zero.reduce_every=step"], 0.0),
    "stage-3": (["zero.stage=3", "zero.reduce_every=step", "zero.residency=2"], 0.0),
    "stage-2-often": (["zero.stage=2"], 1e-5),
    "stage-3-groups": (["zero.stage=3", "parallel.pp=1", "parallel.dp=4", "zero.shard_size=2"], 1e-5),
    "stage-3-tp-persist": (["zero.stage=3", "parallel.tp=2", "parallel.pp=1", "zero.persist_below=100"],
                           1e-5),
    "stage-2-v": (["zero.stage=2", "parallel.dp=1", "parallel.schedule=zb-v"], 1e-5),
    "cpu": ([*CPU, "zero.stage=0", "offload.ratio=0.5"], 0.0),
    "nvme": ([*NVME, "zero.stage=1"], 0.0),
    "nvme-both": ([*NVME, "offload.parameters=nvme", "zero.stage=3", "zero.reduce_every=step"], 0.0),
    "nvme-elsewhere": ([*NVME, "offload.parameters=cpu", "zero.stage=3", "parallel.pp=1", "parallel.tp=2"],
                       1e-5),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_from_zero_1_to_elsewhere(name, start, tmp_path, source):
    """A checkpoint that knows its stage, shards, units or tiers: it goes on anywhere, and there it can be
    read again."""
    overrides, tolerance = ELSEWHERE[name]
    start("run", f"train.steps={STEPS - 2}", *PP, *overrides,
          f"train.resume={source / 'checkpoints' / f'step-{STOP:08d}'}")
    start("back", f"train.steps={STEPS}", *PP, "zero.stage=1",
          f"train.resume={tmp_path / 'run' / 'checkpoints' / f'step-{STEPS - 2:08d}'}")
    resumed = {row["step"]: row for which in ("run", "back") for row in rows(tmp_path / which)}
    assert sorted(resumed) == list(range(STOP + 1, STEPS + 1))
    for row in rows(source)[STOP:]:
        got = resumed[row["step"]]
        assert got["train/loss"] == pytest.approx(row["train/loss"], rel=tolerance, abs=0)
        assert got["train/grad_norm"] == pytest.approx(row["train/grad_norm"], rel=10 * tolerance, abs=0)
        assert got["train/lr"] == row["train/lr"]


def test_a_scale_goes_to_another_mesh(start, tmp_path):
    """fp16 stopped while its scale falls goes on elsewhere with the same scale, skips and learning rate."""
    start("run", f"train.steps={STOP}", *PP, *FP16, "zero.stage=3")
    saved = manifest(tmp_path / "run", STOP)
    start("other", f"train.steps={STOP + 1}", *DP4, *FP16, "zero.stage=2", "zero.shard_size=2",
          f"train.resume={tmp_path / 'run' / 'checkpoints' / f'step-{STOP:08d}'}")
    (row,) = rows(tmp_path / "other")
    assert row["train/loss_scale"] == saved["loss_scaler"]["scale"] < 2**24 and saved["skipped"] >= 3
    assert row["train/skipped_steps"] >= saved["skipped"]
    assert row["train/lr"] == rows(tmp_path / "run")[0]["train/lr"]
