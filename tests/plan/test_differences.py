"""What a run that goes on says of its config: each key that differs, or a reason why it does not matter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from threed.checkpoint.differences import IN_ONE_LINE, NOT_COMPARED, changed_keys, notes, tokens_seen
from threed.checkpoint.format import Manifest
from threed.config.load import known_keys, load
from threed.models.families.registry import FAMILIES
from threed.optim.rate import learning_rate
from threed.schema import Config
from threed.schema.config import keys_of

STEP = Path("runs/x/checkpoints/step-00000004")
USUAL = ["train.steps=8", "optimizer.lr=1e-2"]


def saved(config: Config, step: int = 4, **others) -> Manifest:
    """What a manifest of this config's run says."""
    return replace(Manifest(step, step, samples=64, config=config.to_dict(),
                            mesh={**config.axis_sizes, "order": ["pp", "dp", "tp"]}), **others)


def said(before: list[str], now: list[str], **others) -> list[str]:
    manifest = saved(load(None, [*USUAL, *before]), **others)
    head, *lines = notes(STEP, manifest, load(None, [*USUAL, *now])) or [""]
    step = manifest.step + 1
    assert not lines or head == (f"not as in {STEP.name}; from step {step} on, the settings of this start "
                                 "count:")
    return lines


@pytest.mark.parametrize("key", known_keys())
def test_each_key_is_compared_or_has_a_reason(key):
    """A new key is compared by default: who does not want it adds a line to NOT_COMPARED."""
    config = load(None)
    manifest = saved(config)
    section, name = key.split(".")
    manifest.config[section][name] = "another"
    found = [(where, before) for where, before, _ in changed_keys(manifest.config, config)]
    if key in NOT_COMPARED:
        assert len(NOT_COMPARED[key].split()) > 1 and not found
    else:
        assert found == [(key, "another")]
    if key not in NOT_COMPARED and section != "optimizer" and key != "train.steps":  # rates need numbers
        assert any(f"{key} was another, is " in line for line in notes(STEP, manifest, config))


def test_no_stale_rows():
    keys = {*known_keys(), *(key for family in FAMILIES.values() for key in keys_of(family.config))}
    assert not set(NOT_COMPARED) - keys
    assert all(any(key.startswith(start) for key in keys) for start in IN_ONE_LINE)


def test_nothing_differs():
    assert notes(STEP, saved(load(None, USUAL)), load(None, USUAL)) == []
    assert said([], ["monitor.console_every=3", "checkpoint.every=2", "run.dir=runs/moved"]) == []


def test_a_key_that_an_older_version_did_not_know():
    manifest = saved(load(None, USUAL))
    del manifest.config["data"]["packing"], manifest.config["precision"]
    assert notes(STEP, manifest, load(None, USUAL)) == []
    assert notes(STEP, manifest, load(None, [*USUAL, "data.packing=best-fit"]))[1].startswith(
        "data.packing was stream, is best-fit; windows are cut anew")


def test_old_and_new_values():
    lines = said([], ["optimizer.betas=[0.8,0.99]", "optimizer.weight_decay=0", "optimizer.clip_grad=0.5",
                      "model.seq_len=64", "train.seed=7", "data.loss_mask=answers", "model.dropout=0.1"])
    for start in ("optimizer.betas was [0.9, 0.95], is [0.8, 0.99]", "optimizer.weight_decay was 0.1, is 0",
                  "optimizer.clip_grad was 1, is 0.5", "model.seq_len was 128, is 64; windows are cut anew",
                  "train.seed was 1234, is 7; the order of samples", "model.dropout was 0, is 0.1",
                  "data.loss_mask was none, is answers; the loss is a mean over other tokens"):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    assert len(lines) == 7


def test_how_a_step_is_computed_is_one_line():
    lines = said([], ["zero.stage=3", "parallel.pp=2", "parallel.dp=2", "parallel.schedule=gpipe",
                      "train.micro_batch_size=2", "offload.optimizer=cpu"])
    assert len(lines) == 2 and lines[0].startswith("a step is computed otherwise, to the same result within "
                                                   "rounding: parallel.schedule was 1f1b, is gpipe; ")
    assert "zero.stage was 1, is 3" in lines[0] and "offload.optimizer was none, is cpu" in lines[0]
    assert lines[1] == (f"{STEP.name} was saved by 1 rank (pp 1 x dp 1 x tp 1), and goes on on 4 ranks "
                        "(pp 2 x dp 2 x tp 1); the global batch is 16 sequences")


def test_what_becomes_of_the_state():
    assert said([], ["optimizer.name=lion"]) == [
        "optimizer.name was adamw, is lion; its exp_avg goes on, exp_avg_sq is left behind"]
    assert said(["optimizer.name=lion"], ["optimizer.name=sgd"]) == [
        "optimizer.name was lion, is sgd; exp_avg is left behind"]
    assert said([], ["train.global_batch_size=32"]) == [
        "train.global_batch_size was 16, is 32; the run has seen 64 sequences, and goes on with the next"]
    assert said([], ["precision.dtype=fp16"]) == [
        "precision.dtype was fp32, is fp16; weights and the optimizer's state are fp32 in a checkpoint; the "
        "dynamic loss scale begins at precision.initial_loss_scale=65536"]
    fp16 = ["precision.dtype=fp16"]
    scaler = {"scale": 32.0, "good": 1, "left": 1}
    assert said(fp16, [*fp16, "precision.loss_scale=128"], loss_scaler=scaler) == [
        "precision.loss_scale was null, is 128; the loss scale is 128"]
    assert said(fp16, ["precision.dtype=bf16"], loss_scaler=scaler) == [
        "precision.dtype was fp16, is bf16; weights and the optimizer's state are fp32 in a checkpoint; the "
        "loss scale is 1"]
    assert said(["precision.dtype=bf16"], ["precision.dtype=bf16", "precision.master=none"])[0].endswith(
        "fp32 weights are rounded to bf16")


def test_tokens_after_another_seq_len():
    """They are counted, and do not follow from the samples: those of the run so far had another length."""
    older = saved(load(None, ["model.seq_len=64"]))
    assert tokens_seen(Manifest()) == 0 and tokens_seen(older) == 64 * 64
    assert tokens_seen(replace(older, tokens=9)) == 9
    (line,) = said(["model.seq_len=64"], ["model.seq_len=32"])
    assert line.startswith("model.seq_len was 64, is 32; windows are cut anew")
    assert line.endswith("; the run has seen 4096 tokens")


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_stretched_schedule(schedule):
    """The rate jumps from that of the last step to that of the new curve; decay_steps keeps the old one."""
    given = [f"optimizer.schedule={schedule}"]
    steps, rate, stretched = said(given, [*given, "train.steps=16"], step=8)
    config = load(None, [*USUAL, *given])
    before = learning_rate(config.optimizer, 7, 8)
    now = learning_rate(config.optimizer, 8, 16)
    assert steps == "train.steps was 8, is 16"
    assert rate == f"the learning rate goes from {before:.2e} in step 8 to {now:.2e} in step 9"
    assert stretched == (f"optimizer.schedule={schedule} ends at train.steps, so train.steps=16 stretches "
                         "it; optimizer.decay_steps=8 keeps it as it was, and later steps have "
                         "optimizer.min_lr=0")
    kept = said(given, [*given, "train.steps=16", "optimizer.decay_steps=8"], step=8)
    assert kept == ["optimizer.decay_steps was null, is 8", "train.steps was 8, is 16"]
    assert any("squeezes" in line for line in said(given, [*given, "train.steps=6"]))


def test_which_rate_wins():
    """In the middle of a schedule: the rate of the config that is given now, and what it would have been."""
    lines = said([], ["optimizer.lr=1e-3", "optimizer.schedule=constant"])
    assert lines[:2] == ["optimizer.lr was 0.01, is 0.001", "optimizer.schedule was cosine, is constant"]
    would = 0.01 * 0.5 * (1 + math.cos(math.pi * 4 / 8))
    assert lines[2].endswith(f" in step 4 to 1.00e-03 in step 5 (before, it would have been {would:.2e})")
    assert said(["optimizer.schedule=constant"], ["optimizer.schedule=constant", "train.steps=90"]) == [
        "train.steps was 8, is 90"]
    assert said([], ["optimizer.min_lr=1e-3"])[0] == "optimizer.min_lr was 0, is 0.001"
    assert said([], ["optimizer.warmup_steps=6"])[0].startswith("optimizer.warmup_steps was 0, is 6; counted")
