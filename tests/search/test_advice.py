"""What `check --advise` and `--memory` say of other settings."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import threed
from threed.cli.main import app
from threed.layout_search import search as searching
from threed.prediction.advise import advise, neighbours
from threed.prediction.hardware import Hardware

TOY = "configs/toy.yaml"
GPU = "run.device=auto"  # the toy itself is for processors
GB = 10**9


def run(*words: str):
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_search_and_advise_say_what_predict_says(tmp_path):
    """And search proposes nothing about which predict warns."""
    over = [GPU, "parallel.tp=1", "parallel.axis_order=pp-dp-tp", "offload.optimizer=none", "zero.stage=3",
            "zero.residency=1", "activation.offload=none", "train.micro_batch_size=4", "parallel.pp=2"]
    best = searching.ranked(TOY, 4, over, "h100-sxm", "4GB")
    found = best.document()
    assert found["usable_bytes"] == round(0.95 * 4 * GB) and found["memory_bytes"] == 4 * GB
    assert max(row["peak_bytes"] for row in found["layouts"]) <= found["usable_bytes"]
    file = tmp_path / "best.yaml"
    searching.write_best(best, file)
    told = threed.predict(threed.load(file), "h100-sxm,memory_gb=4")
    assert max(row["peak_bytes"]["device"] for row in told["stages"]) == found["layouts"][0]["peak_bytes"]
    assert told["too_much"] is None and told["usable_bytes"] == found["usable_bytes"]
    advice = json.loads(run("check", str(file), "--memory", "4GB", "--hardware", "h100-sxm", "--json").stdout)
    assert advice["advice"][0]["peak_bytes"] == found["layouts"][0]["peak_bytes"] and advice["ok"]


def test_advice_says_whose_times_it_has():
    for words, costs in (([GPU, "--advise"], "A100"), ([GPU, "--advise", "--hardware", "h100-sxm"], "H100"),
                         ([GPU, "--memory", "80GB"], "A100"), (["--advise"], "a CPU core")):
        done = run("check", TOY, *words)
        assert f"\ncosts: {costs}" in done.stdout
        assert ("(by default; for another machine --hardware" in done.stdout) == (costs == "A100")
    assert "\ncosts: " not in run("check", TOY, GPU, "--hardware", "h100-sxm").stdout  # it prints no times


def test_advice():
    """What each setting saves and costs is what its own plan says; what fits a memory comes first, the
    fastest first."""
    config = threed.load("configs/gpt2-small.yaml", ["parallel.dp=4", "parallel.pp=1", "parallel.tp=1",
                                              "train.global_batch_size=64",
                                              "parallel.sequence_parallel=false"])
    rows = {row.text: row.needs for row in advise(config, Hardware())}
    here = rows.pop("as configured")
    assert {"zero.stage=0", "zero.stage=2 zero.reduce_every=step"} <= rows.keys()
    assert "zero.stage=1" not in rows, "it is the config itself"
    assert rows["zero.stage=0"].peak.fixed_bytes > here.peak.fixed_bytes
    assert (rows["zero.stage=3"].peak.fixed_bytes < rows["zero.stage=2"].peak.fixed_bytes
            < here.peak.fixed_bytes)
    once_a_step = rows["zero.stage=2 zero.reduce_every=step"]
    assert rows["zero.stage=2"].dp_bytes > here.dp_bytes == once_a_step.dp_bytes
    plans = [(row.peak, row.dp_bytes, row.step_s) for row in rows.values()]
    assert len(rows) >= 8 and len(set(plans)) >= 7, "one setting is listed under several names"
    memory = round(sorted(row.peak.total for row in rows.values())[3] / 0.95) + 1  # 5% stay free
    listed = advise(config, Hardware(), memory)[1:]
    fits = [row.fits for row in listed]
    assert fits == sorted(fits, reverse=True) and fits.count(True) >= 4
    times = [row.needs.step_s for row in listed if row.fits]
    assert times == sorted(times)


def test_advice_to_those_who_offload():
    """The other tier, no offload, or the same tier with parameters there: keys of the tier that is left
    would be refused."""
    over = ["offload.optimizer=nvme", "offload.nvme_path=disk", "offload.overlap=next",
            "offload.gradients=device"]
    rows = {row.text: row.needs for row in advise(threed.load(TOY, over), Hardware())}
    assert {"offload.optimizer=none", "offload.optimizer=cpu", "offload.optimizer=nvme",
            "zero.stage=3 offload.optimizer=nvme offload.parameters=nvme"} <= rows.keys()
    assert rows["offload.optimizer=none"].peak.fixed_bytes > rows["offload.optimizer=cpu"].peak.fixed_bytes


def test_advice_is_printed():
    """The sentence that says what a setting saves and costs."""
    result = run("check", TOY, "parallel.dp=4", "train.global_batch_size=32", GPU, "--memory", "3GiB")
    assert result.exit_code == 2 and not result.stdout.startswith("ok") and "more than the" in result.stderr
    assert "zero.stage=2" in result.stdout
    assert "of traffic a step" in result.stdout and "fits" in result.stdout and "saves" in result.stdout
    assert "peak of pp0: " in result.stdout


def test_advise_experts():
    """Other numbers of ranks that hold all experts, and pairs, where there are experts."""
    config = threed.load("configs/toy-moe.yaml", ["model.layers=2", "train.global_batch_size=8"])
    rows = {row.text: row.needs for row in advise(config, Hardware()) if "parallel." in row.text}
    assert rows.keys() == {"parallel.ep=1", "parallel.ep=4", "parallel.pair=True"}
    assert rows["parallel.ep=4"].peak.fixed_bytes < rows["parallel.ep=1"].peak.fixed_bytes
    assert not any("parallel.ep" in changes for changes in neighbours(threed.load(TOY)))
