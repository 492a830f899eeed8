"""The line of a step, durations, and what a run says before its first step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from threed.base.errors import InputError
from threed.base.quantity import many, parse_seconds, show_left_s
from threed.config.load import load
from threed.monitor.stepline import Parts, waiting
from threed.planner import analyse

METRICS = {"train/loss": 5.6477, "train/grad_norm": 0.95, "train/lr": 2.1e-3, "perf/step_s": 1.61,
           "perf/tokens_per_s": 2544.0, "pipeline/bubble_measured": 0.25, "pipeline/bubble_predicted": 0.21,
           "memory/peak_bytes": 436731904.0}
WHOLE = ("step   7/180  loss 5.6477  norm 0.95  lr 2.10e-03  1.61 s  2.5K tok/s  4m left  bubble 25% "
         "(predicted 21%)  peak 416.5 MiB")


def test_it_fits_the_terminal():
    """At every width from 80 columns on no line wraps, and what is needed most is there; without a terminal
    it is whole."""
    for metrics in (METRICS, {**METRICS, "val/loss": 5.7}):
        for steps in (180, 1_000_000):
            parts = Parts(steps - 1, steps, metrics, 100 * 86400.0, "bubble")
            for columns in range(80, 160):
                line = parts.fit(columns)
                assert len(line) <= columns, line
                assert f"step {steps - 1:>{len(str(steps))}}/{steps}  loss 5.6477" in line
                assert "100d00h left" in line and "1.61 s" in line
    parts = Parts(7, 180, METRICS, 240.0, "bubble")
    assert parts.fit(None) == parts.fit(len(WHOLE)) == WHOLE
    assert parts.fit(len(WHOLE) - 1) == WHOLE.replace(" (predicted 21%)", "")
    assert parts.fit(80) == "step   7/180  loss 5.6477  norm 0.95  lr 2.10e-03  1.61 s  2.5K tok/s  4m left"
    assert parts.fit(20) == parts.fit(80), "a terminal may be too narrow"


def test_one_word_for_one_thing():
    """Without a pipeline there is no bubble: it is what `predict` calls exposed traffic."""
    assert waiting(load(None, ["parallel.pp=1"])) == "exposed traffic"
    assert waiting(load(None, ["parallel.pp=2"])) == "bubble"
    line = Parts(1, 9, METRICS, None, "exposed traffic").fit(None)
    assert "exposed traffic 25% (predicted 21%)" in line and "bubble" not in line and "left" not in line
    assert "left" not in Parts(9, 9, METRICS, 0.0, "bubble").fit(None)


@pytest.mark.parametrize("seconds, text", [(0.4, "0s"), (119, "119s"), (125, "2m"), (3599, "1h00m"),
                                           (7500, "2h05m"), (169200, "47h00m"), (2 * 86400 + 3600, "2d01h")])
def test_what_remains(seconds, text):
    assert show_left_s(seconds) == text


@pytest.mark.parametrize("text, seconds", [
    ("3h50m", 13800.0), ("90m", 5400.0), ("2d", 172800.0), ("13800", 13800.0), ("1d12h", 129600.0),
    ("1.5h", 5400.0), ("90 m", 5400.0), ("20S", 20.0), ("1h 30m", 5400.0), ("0.5", 0.5)])
def test_durations(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "3h50", "3:50:00", "-5m", "h", "5 parsecs", "1e3", "nan"])
def test_what_is_no_duration(text):
    with pytest.raises(InputError, match="is not a duration; write for example 90m, 3h50m"):
        parse_seconds(text)


def test_stop_after_in_a_config(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("run: {stop_after: 13800}\n")
    assert parse_seconds(load(file).run.stop_after or "") == 13800.0
    assert load(None, ["run.stop_after=3h50m"]).run.stop_after == "3h50m"
    for text, says in (("0", "must be more than 0"), ("3h50", "not a duration"), ("[1]", "run.stop_after")):
        with pytest.raises(InputError, match=says):
            load(None, [f"run.stop_after={text}"])


def test_many():
    assert (many(1, "rank"), many(0, "rank"), many(8, "rank")) == ("1 rank", "0 ranks", "8 ranks")


# ---------------------------------------------------------------- before the first step


def test_the_size_of_a_model():
    from threed.monitor.banner import size_line

    whole = size_line(load("configs/toy.yaml"))
    assert " parameters; steps of " in whole and "train" not in whole
    adapted = size_line(load("configs/toy.yaml", ["model.lora_rank=4", "parallel.tp=1"]))
    assert " parameters, of which " in adapted and " train; steps of " in adapted


@pytest.mark.parametrize("more, trained", [
    ([], 64), (["model.vocab_multiple=1"], 64), (["model.vocab_multiple=4096"], 64),
    (["model.vocab=299", "model.vocab_multiple=128", "model.tie_embeddings=false"], 64),
    (["model.vocab_multiple=128", "parallel.pp=1", "parallel.dp=2", "zero.stage=3"], 64),
    (["model.vocab_multiple=128", "model.lora_targets=[q_proj,v_proj]"], 128),
    (["model.vocab_multiple=128", "model.lora_targets=[up_proj]"], 2 * (16 + 64)),
    (["model.vocab_multiple=128", "model.family=llama", "model.kv_heads=1"], 64),
    (["model.vocab_multiple=128", "model.family=moe", "model.experts=4", "model.balance=bias"], 64),
    (["model.vocab_multiple=128", "parallel.tp=2"], 64)])
def test_the_parameters_that_train(more, trained):
    """Those of the adapters, however the vocabulary is padded and whatever else is frozen."""
    from threed.monitor.banner import size_line

    few = ["model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab=300", "model.seq_len=16",
           "model.lora_rank=2", "model.lora_targets=[q_proj]"]
    assert f"of which {trained} train;" in size_line(load(None, [*few, *more]))


def test_a_long_step_is_predicted():
    """As `threed predict` does, for the hardware that the device is most like; a short one is not."""
    from threed.api import plans as api
    from threed.monitor.banner import predicted_s, step_line

    cpu = torch.device("cpu")
    config = load("configs/gpt2-small.yaml", ["parallel.dp=1"])
    found = predicted_s(config, analyse(config), cpu)
    assert found is not None
    config.run.device = "cpu"
    assert found[0] == api.predict(config)["step_time"] and found[1] == "cpu-core"
    assert "will take about " in step_line(*found) and "min, as predicted for cpu-core" in step_line(*found)
    toy = load("configs/toy.yaml")
    assert predicted_s(toy, analyse(toy), cpu) is None


@pytest.mark.parametrize("command, given, expected", [
    ("train", {}, "PASSIVE"), ("eval", {}, "PASSIVE"), ("generate", {}, "PASSIVE"), ("predict", {}, "None"),
    ("train", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_openmp_sleeps(command, given, expected):
    """In each process that computes, before torch is imported; a person's own value wins."""
    code = ("import os, sys; sys.argv = ['threed', sys.argv[1]]\n"
            "from threed.base.signals import begin; begin()\n"
            "assert 'torch' not in sys.modules; print(os.environ.get('OMP_WAIT_POLICY'))")
    env = {"PATH": "/usr/bin:/bin", **given}
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == expected, done.stderr
