"""`threed init`, the shell's completion, and options of other frameworks, on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from threed.api import plans as api
from threed.base.errors import InputError
from threed.base.quantity import parse_count, parse_memory, show_count, show_left
from threed.cli import main as cli
from threed.cli import runs as verbs
from threed.config.load import load
from threed.interop import init
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.show import grid

ROOT = Path(__file__).parents[2]


def run(*words: str, typed: str | None = None):
    return CliRunner().invoke(cli.app, list(words), input=typed, catch_exceptions=True)


@pytest.mark.parametrize("model, devices, holds", [
    ("toy", 1, "stage: 1"), ("gpt2-small", 8, "stage: 1"), ("llama3-8b", 64, "stage: 2"),
    ("llama3-70b", 128, "stage: 3")])
def test_init(model, devices, holds, tmp_path):
    """A first config that cannot run, or does not fit."""
    path = tmp_path / "my.yaml"
    done = run("init", str(path), "--model", model, "--devices", str(devices), "--yes")
    assert done.exit_code == 0, done.output
    config = load(path)
    checked = api.check(config)
    assert checked["world_size"] == devices and holds in path.read_text()
    row = max(checked["stages"], key=lambda row: row["parameter_bytes"])
    held = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "activation_peak_bytes")
    assert sum(row[name] for name in held) < 80 * 2**30
    assert config.run.dir == "runs/my" and not checked["warnings"]
    lines = [line for line in path.read_text().splitlines() if line.startswith("  ")]
    assert all("#" in line for line in lines), "each line has a comment"
    assert max(map(len, lines)) <= 120 and not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("model, devices, ep", [
    ("mixtral-8x7b", 64, 8), ("mixtral-8x22b", 4, 4), ("dots.llm1", 24, 8), ("mixtral-8x7b", 1, None),
    ("llama3-8b", 64, None)])
def test_init_of_experts(model, devices, ep):
    """Ranks of one machine hold a block's experts together."""
    values = init.choose(model, devices, 0, lambda values, limit: True, 10**11)
    assert values.get("parallel.ep") == ep
    assert ep is None or "# devices that together hold all experts" in init.text(values, "a", Path("a.yaml"))


def test_init_asks(tmp_path):
    """What is not given is asked for, with a default; nothing is written where a file is."""
    path = tmp_path / "c.yaml"
    done = run("init", str(path), typed="gpt2-small\n4\n\n/data/text\n")
    assert done.exit_code == 0 and "llama3-8b" in done.output
    config = load(path)
    assert (config.model.name, config.dp, config.data.source) == ("gpt2-small", 4, "/data/text")
    before = path.read_text()
    done = run("init", str(path), "--yes")
    assert isinstance(done.exception, InputError) and "exists" in str(done.exception)
    assert path.read_text() == before


def test_init_without_answers(tmp_path):
    """stdin ends, as in a pipe or a container: which question it was, and that --yes asks none."""
    done = run("init", str(tmp_path / "c.yaml"), typed="toy\n")
    said = str(done.exception)
    assert isinstance(done.exception, InputError) and "no answer to 'Devices'" in said and "--yes" in said
    assert not list(tmp_path.iterdir())


def test_init_of_one_device(tmp_path):
    done = run("init", str(tmp_path / "c.yaml"), "--yes")
    assert "on 1 device\n" in done.output and "on 1 device.\n" in (tmp_path / "c.yaml").read_text()


@pytest.mark.parametrize("words, message", [
    (("--model", "gpt5"), "There are toy, gpt2-small"),
    (("--model", "gpt2-small", "--memory", "500MiB"), "does not fit on 1 device of 500.0 MiB"),
    (("--memory", "lots"), "not an amount of bytes")])
def test_bad_init(words, message, tmp_path):
    done = run("init", str(tmp_path / "c.yaml"), "--yes", *words)
    assert isinstance(done.exception, InputError) and message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_init_without_a_folder(tmp_path):
    done = run("init", str(tmp_path / "no" / "c.yaml"), "--yes")
    assert isinstance(done.exception, InputError) and "cannot be written" in str(done.exception)


def test_init_with_a_pipeline(tmp_path):
    """A pipeline that is asked for, and one where every layer is shared already; a toy that has its sizes."""
    done = run("init", str(tmp_path / "p.yaml"), "--model", "llama3-8b", "--devices", "64", "--pp", "4",
               "--yes")
    config = load(tmp_path / "p.yaml")
    assert done.exit_code == 0 and config.parallel.schedule == "1f1b"
    assert (config.parallel.pp, config.dp) == (4, 16)
    assert any(rung.get("parallel.pp") for rung in init.settings(64, init.model_of("llama3-8b")))
    done = run("init", str(tmp_path / "q.yaml"), "--devices", "6", "--pp", "4", "--yes")
    assert isinstance(done.exception, InputError) and "must divide --devices 6" in str(done.exception)
    run("init", str(tmp_path / "toy.yaml"), "--model", "toy", "--yes")
    assert re.search(r"model:\n  family: llama +#.*\n  layers: 8 ", (tmp_path / "toy.yaml").read_text())


def test_settings_need_less_and_less():
    """The ladder of `threed init` ends with the setting that needs the least."""
    rungs = list(init.settings(64, init.model_of("llama3-8b")))
    assert rungs[0] == {} and rungs[-1]["parallel.tp"] == 8 and rungs[-1]["zero.stage"] == 3
    assert rungs[-1]["offload.parameters"] == "cpu"
    assert list(init.settings(1, init.model_of("toy")))[:2] == [{}, {"activation.policy": "full"}]


def test_convert(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "sparse_gradients": true}')
    done = run("convert", str(tmp_path / "ds.json"), "model.layers=3")
    assert done.exit_code == 0 and "layers: 3" in done.stdout and "1 key refused" in done.stderr
    document = json.loads(run("convert", str(tmp_path / "ds.json"), "--json").stdout)
    assert document["refused"] == {"sparse_gradients": "threed has no sparse gradients"}
    done = run("convert", "--megatron", "--num-layers 5", "model.heads=4", "model.hidden=64")
    assert "layers: 5" in done.stdout and "heads: 4" in done.stdout and "hidden: 64" in done.stdout
    done = run("convert", "--devices", "8", "zero.stage=3", "--megatron", "--", "torchrun", "pretrain_gpt.py",
               "--num-layers", "5", "--wandb-exp-name", "a b", "model.heads=4", "--hidden-size", "64")
    assert all(word in done.stdout for word in ("layers: 5", "heads: 4", "hidden: 64", "dp: 8", "stage: 3",
                                                "name: a b"))
    assert "has no option" in str(run("convert", "--megatron", "--").exception)
    assert isinstance(run("convert").exception, InputError)
    done = run("convert", "--megatron", "--num-layers 5", "--deepspeed-version", "0.1")
    assert isinstance(done.exception, InputError) and "exclude each other" in str(done.exception)


def test_completion():
    """Keys, and the values of keys that have a few; bash makes = a word of its own."""
    assert "zero.stage=" in verbs.keys([], "zero.s")
    assert verbs.keys([], "zero.stage=") == [f"zero.stage={stage}" for stage in range(4)]
    assert verbs.keys(["configs/toy.yaml", "precision.dtype", "="], "b") == ["bf16"]
    assert verbs.keys([], "train.steps=") == []
    shown = CliRunner().invoke(cli.app, ["check", "--help"]).output + CliRunner().invoke(cli.app,
                                                                                         ["--help"]).output
    assert "--install-completion" in shown


def test_training_does_not_wait_for_doors():
    """What `convert`, `init` and `runs` need, and the tables of other frameworks, are imported when asked
    for."""
    code = ("import sys, threed.cli.main, threed.config.load\n"
            "threed.config.load.load('configs/toy.yaml')\n"
            "late = [name for name in sys.modules\n"
            "        if name.startswith(('threed.interop', 'threed.config.keys', 'threed.config.syn'))]\n"
            "assert not late, late")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_option_of_another_framework(monkeypatch, capsys):
    """`threed train CONFIG --tensor-model-parallel-size 2` says parallel.tp."""
    monkeypatch.setattr(sys, "argv", ["threed", "check", "configs/toy.yaml", "--tensor-model-parallel-size",
                                      "2"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "for Megatron-LM's --tensor-model-parallel-size use parallel.tp" in capsys.readouterr().err


@pytest.mark.parametrize("text, count", [("8b", 8e9), ("7.5e9", 7.5e9), ("350M", 350e6), ("1T", 1e12)])
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "b", "-1", "nan", "inf", "eight"])
def test_no_counts(text):
    with pytest.raises(InputError, match="give a number above 0"):
        parse_count(text)


def test_memory_without_a_unit():
    """80 bytes are no device: the unit was forgotten."""
    with pytest.raises(InputError, match="such as 80GiB"):
        parse_memory("80")
    assert parse_memory("80GiB") == 80 * 2**30


def test_remaining_time():
    assert show_left(25, 100, 1.0) == ", 25% done, at most 3.0 s left"
    assert show_left(0, 100, 1.0) == show_left(100, 100, 1.0) == show_left(5, 0, 1.0) == ""


def test_every_command_ends_its_help_with_an_example():
    commands = {command.name or command.callback.__name__: command  # pyright: ignore
                for command in cli.app.registered_commands}
    assert commands.keys() == verbs.EXAMPLES.keys()
    for name, example in verbs.EXAMPLES.items():
        shown = run(name, "--help").output
        assert f"Example: threed {name} " in " ".join(shown.split()) and example.startswith(f"threed {name} ")
        assert all(word in shown for word in example.split() if word.startswith("-")), example


def test_progress(monkeypatch):
    """A line a second, with the time that is left at the pace so far; none where all is done."""
    from threed.base import progress as subject

    now, lines = iter([0.0, 0.5, 1.5, 2.0, 4.0, 9.0]), []
    monkeypatch.setattr(subject.time, "perf_counter", lambda: next(now))
    progress = subject.Progress("imported", 100, lambda amount: f"{amount:.0f} B", lines.append)
    for amount in (10, 15, 5, 20, 50):
        progress.add(amount)
    assert lines == ["imported 25 B of 100 B, 25% done, at most 4.5 s left",
                     "imported 50 B of 100 B, 50% done, at most 4.0 s left"]


# ---------------------------------------------------------------- what predict and show say


def test_more_than_a_device_has():
    """A plan of 106 GiB on a GPU of 80 GB, without a word."""
    large = ["configs/llama3-8b.yaml", "parallel.dp=8", "model.fused=off", "--hardware", "h100-sxm"]
    said = run("predict", *large, "zero.stage=1", "activation.policy=none").output
    assert ("warning: a rank of pp0 needs 109.2 GiB, more than the 70.8 GiB that may be in use of a device's "
            "74.5 GiB (5% stay free" in said)
    assert "threed check --memory 74.5GiB" in said and parse_memory("74.5GiB")
    assert "warning" not in run("predict", *large, "zero.stage=3", "activation.policy=full").output


def test_no_bubble_without_a_pipeline():
    """One position waits for traffic alone."""
    alone = run("predict", "configs/gpt2-small.yaml", "parallel.dp=8", "parallel.pp=1", "--hardware",
                "h100-sxm,adapter_gbps=10,node_gbps=10").output
    assert ", exposed traffic " in alone and ", bubble " not in alone
    assert ", bubble " in run("predict", "configs/toy.yaml").output


def test_trillions():
    assert (show_count(15e12), show_count(124_439_808), show_count(7)) == ("15.0T", "124.4M", "7")


def test_a_grid_in_a_terminal():
    """Rows of hundreds of columns, broken anywhere; and a grid that is cut without a word."""
    plan = make_plan(load("configs/toy.yaml"))
    whole, folded = grid(Analysis(plan)), grid(Analysis(plan), columns=30)
    assert max(map(len, folded.splitlines())) <= 30 < max(map(len, whole.splitlines()))
    for name in ("pp0", "pp1"):
        rows = [line.split()[1:] for line in folded.splitlines() if line.startswith(name)]
        (row,) = (line.split()[1:] for line in whole.splitlines() if line.startswith(name))
        assert len(rows) > 1 and [cell for part in rows for cell in part] == row
    assert grid(Analysis(plan), most=5).endswith("(the first 5 of 15 cells; --svg draws all)")
