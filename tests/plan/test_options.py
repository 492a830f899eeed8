"""Options of the commands that plan: each has its effect or is refused; --devices; and what is said to
whoever writes another word."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from threed.base.errors import InputError
from threed.base.quantity import parse_count, parse_parameters
from threed.base.shipped import find_file
from threed.cli import main as cli
from threed.cli import options
from threed.config.load import for_devices
from threed.prediction.hardware import load as hardware
from threed.prediction.predict import parse_tokens

TOY, OPEN = "configs/toy.yaml", "configs/llama3-8b.yaml"
EIGHT = "parallel.tp=4", "parallel.pp=2"


def run(*words: str):
    return CliRunner().invoke(cli.app, list(words))


def main(monkeypatch, *words: str) -> int:
    """The exit status of the command line."""
    monkeypatch.setattr(sys, "argv", ["threed", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


# ---------------------------------------------------------------- --devices


@pytest.mark.parametrize("command", ["check", "show", "predict", "memory", "report"])
def test_devices(command, tmp_path):
    """A config for 64 GPUs that is checked for 8, with a note that nobody reads."""
    done = run(command, OPEN, *EIGHT)
    assert isinstance(done.exception, InputError) and not done.stdout
    wanted = f"give --devices N (a multiple of tp x pp = 8), as in `threed {command} {OPEN} --devices 64`"
    assert wanted in str(done.exception)
    if command in ("check", "show"):
        assert "64 ranks" in run(command, OPEN, "--devices", "64", "train.global_batch_size=64").stdout
    assert for_devices(OPEN, [*EIGHT], 64, command).dp == 8 == for_devices(OPEN, ["parallel.dp=8", *EIGHT],
                                                                               64, "").dp


@pytest.mark.parametrize("words, message", [
    ((OPEN, "--devices", "60", *EIGHT), "tp x pp = 8 does not divide it, so nothing is left for "
                                        "parallel.dp=auto: give 56 or 64"),
    ((OPEN, "--devices", "4", *EIGHT), "give 8"),
    ((TOY, "--devices", "64"), "the world size is 64: set parallel.dp=16, or auto"),
    ((OPEN, "modle.layers=3"), "did you mean model.layers"), ((OPEN, "zero.stage=9"), "zero.stage=9")])
def test_wrong_devices(words, message):
    """Other mistakes are said first, and not of dp=1."""
    done = run("check", *words)
    assert isinstance(done.exception, InputError) and message in str(done.exception)
    assert "--devices N" not in str(done.exception) and not done.output


# ---------------------------------------------------------------- options without an effect


@pytest.mark.parametrize("argv, message", [
    ("predict --schedule zb-v --devices 8", "--schedule and --devices"),
    ("predict --schedule zb-v --tokens 1T", "--schedule and --tokens"),
    ("predict --schedule 1f1b --seconds 3", "only --schedule auto searches"),
    ("predict --schedule 1f1b --virtual-stages 3", "1f1b has 1 a position"),
    ("predict configs/toy.yaml --times f=1,b=1,w=1", "CONFIG and --times"),
    ("predict configs/toy.yaml --seconds 3", "CONFIG and --seconds"),
    ("memory --parameters 8b --devices 8", "--parameters and --devices"),
    ("memory --parameters 8b --dtype fp32 --master none", "--dtype fp32 and --master"),
    ("memory configs/toy.yaml --optimizer lion", "CONFIG and --optimizer"),
    ("generate nowhere --temperature 0 --seed 3", "--temperature 0 and --seed"),
    ("generate nowhere --temperature 0 --top-p 0.9", "--temperature 0 and --top-p"),
    ("report tests --devices 8", "has its ranks already"),
    ("report tests model.layers=3", "leave the overrides"),
    ("show configs/toy.yaml --units p --program train", "--units and --program")])
def test_refused(argv, message):
    """An option that is read and then ignored: what is asked for does not happen, without a word."""
    done = run(*argv.split())
    assert isinstance(done.exception, InputError) and message in str(done.exception)


def test_effects():
    """The others have one."""
    large = ("parallel.dp=1", "parallel.tp=1", "parallel.pp=1", "parallel.sequence_parallel=false",
             "train.global_batch_size=1")
    done = run("check", OPEN, *large, "--hardware", "h100-sxm")
    assert done.exit_code == 2 and not done.stdout.startswith("ok") and "a rank of pp0 needs" in done.stderr
    assert run("check", OPEN, *large).exit_code == 0, "nobody said how much memory there is"
    assert "fits" in run("check", TOY, "--hardware", "h100-sxm").stdout
    assert all(cell["verdict"] == "refused"
               for cell in json.loads(run("matrix", "--json", "--refused").stdout)["cells"])
    search = ("search", TOY, "--devices", "2", "parallel.tp=1", "zero.stage=1", "offload.optimizer=none",
              "activation.policy=none", "train.micro_batch_size=4", "parallel.axis_order=pp-dp-tp",
              "zero.shard_size=1", "--json")
    found = json.loads(run(*search, "--top", "1").stdout)
    assert len(found["layouts"]) == 1 < found["timed"]


# ---------------------------------------------------------------- an error under --json


@pytest.mark.parametrize("argv", [
    "check configs/toy.yaml model.layer=3 zero.stage=9 --json", "predict nowhere.yaml --json",
    "eval nowhere --json", "generate nowhere --json", "compare nowhere --json", "runs nowhere --json",
    "memory --parameters x --json", "search configs/toy.yaml --devices 3 parallel.tp=2 --json",
    "show configs/toy.yaml --rank 99 --json", "data configs/toy.yaml data.source=/no/such --json",
    "convert /no/such.json --json", "predict configs/toy.yaml --tokens many --json"])
def test_json_of_an_error(argv):
    """Nothing on stdout: a script that parses it fails with another error."""
    done = run(*argv.split())
    document = json.loads(done.stdout)
    assert done.exit_code == 2 and document["error"] and document["problems"] and document["ok"] is False
    assert f"threed: {document['error']}" in done.stderr
    assert len(document["problems"]) == (2 if argv.startswith("check") else 1)


def test_json_of_a_wrong_command_line(monkeypatch, capsys):
    assert main(monkeypatch, "check", TOY, "--gpus", "8", "--json") == 2
    said = capsys.readouterr()
    assert "--devices N" in json.loads(said.out)["error"] and "No such option" in said.err


# ---------------------------------------------------------------- words of others


@pytest.mark.parametrize("words, hint", [
    (("check", TOY, "--parallel.tp=4"), "leave out the dashes: parallel.tp=4"),
    (("train", TOY, "--train.steps", "10"), "leave out the dashes: train.steps=10"),
    (("predict", TOY, "--tp", "4"), "leave out the dashes: parallel.tp=4"),
    (("show", TOY, "--micro-batch-size", "4"), "train.micro_batch_size"),
    (("check", TOY, "--num-gpus", "4"), "--devices N"), (("train", TOY, "--epochs", "3"), "use train.steps"),
    (("train", "--config", "a.yaml"), "as in threed train a.yaml"),
    (("check", "-c", TOY), "is the first word"),
    (("resume",), "threed train RUN"), (("run", TOY), "threed train CONFIG"),
    (("evaluate", "r"), "threed eval RUN"),
    (("estimate",), "threed predict CONFIG"), (("help",), "threed --help")])
def test_options_and_commands_that_there_are_not(words, hint, monkeypatch, capsys):
    assert main(monkeypatch, *words) == 2
    assert hint in capsys.readouterr().err


def test_short_help():
    assert run("train", "-h").stdout == run("train", "--help").stdout


def test_missing_file(tmp_path, monkeypatch):
    """A line a config, of configs alone; and the one that was meant."""
    with pytest.raises(InputError) as caught:
        find_file("configs/toi.yaml")
    said = str(caught.value)
    assert "did you mean configs/toy.yaml?" in said and "\n  configs/llama3-8b.yaml\n" in said
    assert "hardware" not in said and "threed init" in said
    with pytest.raises(InputError) as caught:
        find_file("missing.yaml")
    assert "did you mean" not in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="is the folder of a run; give a YAML config such as "):
        find_file(tmp_path)


@pytest.mark.parametrize("name, message", [
    ("h100", "mean h100-sxm"), ("A100", "mean a100-sxm"), ("h100-pcie", "mean h100-sxm"),
    ("cpu", "mean cpu-core"), ("4090", "change single numbers"), ("b200_nvl", "mean b200-sxm")])
def test_hardware_names(name, message):
    with pytest.raises(InputError, match=message):
        hardware(name)
    assert hardware("H100_SXM") == hardware("h100 sxm") == hardware("h100-sxm")


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("text, count", [
    ("1T", 1e12), ("300B", 3e11), ("15t", 15e12), ("1e12", 1e12), ("1,000,000", 1e6), ("8bn", 8e9),
    ("0.5 T", 5e11), ("2 trillion", 2e12), ("1_000", 1e3), (".5b", 5e8), ("1.5e3k", 1.5e6)])
def test_counts(text, count):
    assert parse_count(text) == pytest.approx(count)


def test_tokens():
    predicted = json.loads(run("predict", TOY, "--tokens", "1.5T", "--json").stdout)
    assert predicted["training"]["tokens"] == 1.5e12


@pytest.mark.parametrize("text", ["0", "-3", "1TB", "T", "1.2.3", "one", "1e", "5 apples", "nan", "inf"])
def test_no_counts(text):
    with pytest.raises(InputError, match="is not a count"):
        parse_count(text)
    with pytest.raises(InputError):
        parse_tokens(text)
    assert isinstance(run("memory", f"--parameters={text}").exception, InputError)


def test_a_model_of_eight_parameters():
    """128 B of model states, for a forgotten B."""
    for text in ("8", "70", "7.5", "405"):
        with pytest.raises(InputError, match=f"Did you mean {text}B"):
            parse_parameters(text)
    assert parse_parameters("8B") == parse_parameters("8e9") == 8e9


# ---------------------------------------------------------------- what a shell completes


def test_completion():
    assert options.machines("h1") == ["h100-sxm"]
    assert "h100-sxm,memory_gb=" in options.machines("h100-sxm,mem")
    assert options.models("llama3-8") == ["llama3-8b"] and "toy" in options.models("")
    assert options.keys([], "model.name=llama3-8") == ["model.name=llama3-8b"]
    assert options.schedules("zb-") == ["zb-h1", "zb-h2", "zb-v"] and options.optimizers("l") == ["lion"]
