"""One plan on one machine has one peak, whoever is asked; and a share of the memory stays free."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import threed
from threed.base.quantity import show_bytes
from threed.cli import main as cli
from threed.cli.runs import _fits
from threed.html_report import report as pages
from threed.planner import analyse
from threed.prediction.advise import measure
from threed.prediction.hardware import Hardware
from threed.prediction.peak import communicators, fullest, peaks, show, too_much
from threed.prediction.predict import predicted
from threed.prediction.report import show as show_report

TOY, H100 = "configs/toy.yaml", Hardware.parse("h100-sxm")
GPU = "run.device=auto"  # the toy itself is for processors
GB = 10**9
PLANS = {
    "one rank": ["parallel.dp=1", "parallel.tp=1", "parallel.pp=1"],
    "zero3": ["zero.stage=3", "parallel.dp=4", "train.global_batch_size=32"],
    "zero2, groups": ["zero.stage=2", "zero.shard_size=2", "parallel.dp=4"],
    "pipeline": ["parallel.schedule=zb-v", "parallel.pp=4", "parallel.dp=1"],
    "interleaved": ["parallel.schedule=interleaved", "parallel.virtual_stages=2", "activation.policy=full"],
    "offload": ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
    "graphs, 16 bits": ["run.cuda_graphs=true", "run.device=cuda", "precision.dtype=bf16",
                        "activation.policy=selective"], "cpu": ["run.device=cpu"],
}


def run(*words: str):
    return CliRunner().invoke(cli.app, list(words))


@pytest.mark.parametrize("over", PLANS.values(), ids=PLANS)
def test_all_say_the_same(over):
    """Three commands, three peaks: the smallest decided whether anybody was warned."""
    config = threed.load(TOY, over)
    held = peaks(analyse(config), H100)
    wanted, found = [row.total for row in held], predicted(config, "h100-sxm")
    checked = json.loads(run("check", TOY, *over, "--hardware", "h100-sxm", "--json").stdout)
    assert [row["peak_bytes"]["device"] for row in found.document()["stages"]] == wanted
    assert [row["peak_bytes"] for row in checked["peaks"]] == wanted
    assert measure(config, H100).peak.total == max(wanted)
    text = show_report(found)
    assert show(held) in text and f"{show_bytes(max(wanted))} = " in text


def test_the_page_says_the_same():
    page = pages.content(threed.load(TOY), "h100-sxm").stages
    assert page == predicted(threed.load(TOY), "h100-sxm").step.stages


def test_what_stays_free():
    """The same limit everywhere: one byte more than may be in use does not fit."""
    rows = peaks(analyse(threed.load(TOY, [GPU])), H100)
    need = fullest(rows).total
    enough, short = round(need / 0.95) + 1, round(need / 0.95) - 100
    assert too_much(rows, H100, enough) is None and "5% stay free" in str(too_much(rows, H100, short))
    for size, fits in ((enough, True), (short, False)):
        hardware = f"h100-sxm,memory_gb={size / GB:.9f}"
        assert (threed.predict(threed.load(TOY, [GPU]), hardware)["too_much"] is None) == fits
        done = run("check", TOY, GPU, "--hardware", hardware)
        assert done.exit_code == (0 if fits else 2) and done.stdout.startswith("ok:") == fits
        assert ("a rank of pp0 needs" in done.stderr) != fits
        assert ("warning: a rank of pp0" in run("predict", TOY, GPU, "--hardware", hardware).stdout) != fits
    assert run("check", TOY, GPU, "--hardware", f"h100-sxm,memory_gb={need / GB + 1e-6:.9f},free_share=0",
               "--json").exit_code == 0


def test_init_asks_for_the_same_peak():
    values = {"parallel.dp": 1, "train.global_batch_size": 2, "train.micro_batch_size": 1}
    need = fullest(peaks(analyse(threed.load(None, [f"{k}={v}" for k, v in values.items()])),
                         Hardware.parse(""))).total
    assert _fits(values, round(need / 0.95) + 1) and not _fits(values, round(need / 0.95) - 100)


def test_communicators_are_counted_and_said():
    """How many a plan opens, and what they cost: on a large mesh they are gigabytes that no slot has."""
    plan = threed.plan(threed.load(TOY, [GPU]))
    assert communicators(plan, 0) == 6
    text = run("predict", TOY, GPU, "--hardware", "h100-sxm,communicator_gb=0.5").stdout
    assert "2.8 GiB for 6 NCCL communicators" in text and "for CUDA" in text
    alone = run("predict", TOY, GPU, *PLANS["one rank"]).stdout
    assert "for CUDA" in alone and "NCCL" not in alone
    assert "CUDA" not in run("predict", TOY).stdout


def test_ranks_that_share_processors_have_no_bubble_of_it():
    """76% of bubble predicted, 28% measured: waiting for a processor is no idle position."""
    few, many = (threed.predict(threed.load(TOY, ["run.device=cpu"]), f"cpu-core,devices={count}")
                 for count in (2, 64))
    assert few["slower"] > 2 and many["slower"] == 1 and few["step_time"] > 2 * many["step_time"]
    assert few["bubble"] == pytest.approx(many["bubble"])
    row = few["stages"][0]
    assert row["bubble"] == pytest.approx(1 - row["busy_s"] / few["step_time"])
    assert "8 ranks share 2 processors" in run("predict", TOY).stdout


