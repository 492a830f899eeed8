"""`threed search`: bounds, what stays fixed, what is refused, and the config that it writes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import threed
from tests.layouts import QUIET, TOY, full_s, searched, short_s
from threed.base.errors import ConfigError, InputError
from threed.cli.main import app
from threed.layout_search.layout import KEYS, Layout, changes, config_of
from threed.layout_search.request import ask
from threed.layout_search.search import RankedLayout, Ranking, show
from threed.layout_search.space import NEEDLESS, NO_BATCH, NO_SHAPE, SLOWER
from threed.prediction.hardware import Hardware


def test_traffic_that_more_microbatches_hide():
    """Where few micro-batches leave traffic that many would hide, longer plans are made."""
    base = threed.load("configs/llama3-8b.yaml", ["model.layers=8", "train.global_batch_size=256", *QUIET])
    slow = Hardware.parse("a100-sxm,adapter_gbps=25")
    layout = Layout(4, 2, 2, "dp-pp-tp", "breadth-first", 2, 2, True, 0, 2, reduce_dtype="bf16")
    config = config_of(layout, base)
    assert short_s(config, slow) == pytest.approx(full_s(config, slow), rel=0.02)


# ---------------------------------------------------------------- what stays fixed


def test_model_and_batch_stay():
    """Everything but the layout is the config's; each layout has all devices."""
    asked, result = searched(4, "model.layers=6", "train.global_batch_size=64", "precision.dtype=bf16")
    keys = {*KEYS.values(), "offload.gradients"}  # which follow from zero.reduce_every
    for found in result.timed[:30]:
        layout, config = found.layout, asked.config(found.layout)
        assert layout.tp * layout.pp * layout.dp == 4 and not threed.config.load.validate(config)
        assert {*changes(config, asked.base)} <= keys
    assert asked.base.model.layers == 6 and asked.base.precision.dtype == "bf16"


def test_files_layout_is_free():
    """What a file says of its own layout would leave nothing to search."""
    asked = ask("configs/llama3-8b.yaml")
    assert not asked.fixed and asked.base.parallel.tp == asked.base.parallel.pp == 1


def test_every_layout_is_counted():
    """Layouts that vanish make the counts a lie."""
    _, result = searched(4, "model.layers=4")
    assert result.considered == len(result.timed) + result.dropped.total() > 5000
    assert result.dropped[NEEDLESS] and result.dropped[SLOWER] and result.dropped[NO_BATCH]
    steps = [found.step_s for found in result.timed]
    assert all(then > step * 0.999 for step, then in zip(steps, steps[1:]))


# ---------------------------------------------------------------- the verb


def run(*arguments: str):
    return CliRunner().invoke(app, ["search", TOY, "--hardware", "h100-sxm", "run.device=auto", *arguments],
                              catch_exceptions=False)


def test_command(tmp_path):
    """The table, the document, and a config that is what it says."""
    file = tmp_path / "best.yaml"
    done = run("--devices", "4", "parallel.tp=1", "model.layers=4", "--json", "--write", str(file))
    values = json.loads(done.stdout)
    best = values["layouts"][0]
    assert values["considered"] == values["timed"] + sum(
        count for reason, count in values["dropped"].items() if "full plan" not in reason)
    assert all(row["fast_s"] == pytest.approx(row["step_s"], rel=0.02) for row in values["layouts"])
    assert [row["step_s"] for row in values["layouts"]] == sorted(row["step_s"] for row in values["layouts"])
    config = threed.load(file)
    assert config.world_size == 4 and config.parallel.tp == 1 and config.model.layers == 4
    assert threed.check(config)["ok"]
    step_s = threed.predict(threed.load(file, QUIET), "h100-sxm")["step_time"]
    assert step_s == pytest.approx(best["step_s"], rel=1e-6)
    assert len({row["layout"] for row in values["layouts"]}) == len(values["layouts"])
    text = show(Ranking(**{**values, "layouts": [RankedLayout(**row) for row in values["layouts"]]}), 3)
    assert "would help" in text and "fixed: tp=1" in text and text.count("layers") == 0
    assert best["layout"] in file.read_text().replace("\n# ", " ")


@pytest.mark.parametrize("arguments, message", [
    (["--devices", "4", "parallel.schedule=auto"], "named schedules"),
    (["--devices", "4", "activation.policy=budget"], "needs activation.budget"),
    (["--devices", "4", "offload.optimizer=nvme"], "needs offload.nvme_path"),
    (["--devices", "4", "zero.persist_below=100", "zero.stage=2"], "has no effect with zero.stage=2"),
    (["--devices", "4", "parallel.costs=runs/toy"], "of its own layout"),
    (["--devices", "4", "parallel.tp=3"], "model.heads=8 is not divisible by parallel.tp=3"),
    (["--devices", "6", "parallel.tp=4"], "no layout of 6 devices"),
    (["--devices", "4", "train.micro_batch_size=3"], "does not divide the global batch"),
    (["--devices", "4", "--memory", "400MB"], "the nearest"),
    (["--devices", "4", "--memory", "much"], "not an amount of bytes"),
    (["--devices", "4", "zero.stage=7"], "must be one of"),
    (["--devices", "4", "parallel.tq=3"], "unknown key"),
    (["--devices", "4", "parallel.tp=x"], "parallel.tp=x"),
    (["--devices", "4", "--rounding"], "precision.dtype=fp32 gradients are sent in fp32"),
    (["--devices", "4", "--rounding", "precision.dtype=bf16", "precision.reduce_dtype=bf16"],
     "exclude each other"),
    (["--devices", "4", "model.tile_linears=1KiB"], "would cut the word embedding"),
    (["--devices", "4", "model.tile_linears=much"], "model.tile_linears"),
])
def test_refused(arguments, message):
    with pytest.raises((InputError, ConfigError), match=message) as caught:
        run(*arguments)
    assert " 0 " not in str(caught.value)  # reasons for which nothing was dropped


def test_refused_by_the_library():
    with pytest.raises(InputError, match="devices=0"):
        threed.search(TOY, 0)
    with pytest.raises(InputError, match="devices"):
        threed.search(TOY, "8")  # pyright: ignore[reportArgumentType]


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="--write"):
        run("--devices", "1", "model.layers=2", "--write", str(tmp_path / "no" / "best.yaml"))


def test_every_device_alone():
    """One device has no mesh to search, and still a micro-batch."""
    asked, result = searched(1)
    assert result.timed and {found.layout.tp * found.layout.pp for found in result.timed} == {1}
    assert config_of(result.timed[0].layout, asked.base).world_size == 1
    assert NO_SHAPE not in result.dropped
