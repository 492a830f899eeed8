"""`threed generate`, `threed eval` and train.sample_every, from the command line."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest

import threed.api.forward
import threed.launcher.local
from tests.running import Run, metrics
from threed.api.inference import forward_config
from threed.base.errors import InputError
from threed.config.load import load

TOY = ["train", "configs/toy.yaml", "model.layers=4", "model.hidden=32", "model.seq_len=32",
       "model.vocab=300", "model.init_std=0.2", "train.global_batch_size=4", "train.micro_batch_size=1",
       "train.steps=4", "train.eval_every=2", "train.eval_batches=2", "checkpoint.every=2",
       "optimizer.warmup_steps=0", "optimizer.lr=1e-2", "monitor.wandb=disabled", "parallel.pp=2",
       "parallel.dp=1", "parallel.tp=1", "zero.stage=0"]
SAMPLES = ["train.sample_every=2", "train.sample_prompts=['import ','']", "train.sample_tokens=12"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache) -> tuple[Path, str]:
    """A run of 4 steps with a checkpoint at 2 and 4; what it has printed."""
    folder = tmp_path_factory.mktemp("trained")
    run = Run(folder, *TOY, *SAMPLES, *cache, f"run.dir={folder / 'run'}")
    assert run.wait() == 0, run.output
    return folder / "run", run.output


def ask(folder: Path, *argv: str, **env: str) -> tuple[int, str]:
    run = Run(folder, *argv, env=env)
    return run.wait(), run.output


def document(folder: Path, *argv: str) -> dict:
    status, output = ask(folder, *argv, "--json")
    assert status == 0, output
    return json.loads(output[output.index("{\n"):])


def test_a_run_writes_text(trained, tmp_path):
    """While it trains, and after it, from the newest checkpoint and from an older one: the same text."""
    folder, output = trained
    said = [line for line in output.splitlines() if line.startswith("text after step")]
    assert [line.split(":")[0] for line in said] == [f"text after step {n}" for n in (2, 2, 4, 4)]
    assert said[0].startswith("text after step 2: 'import ")
    for step, argv in ((4, ()), (2, ("--checkpoint", "2"))):
        seed = str(load("configs/toy.yaml").train.seed)
        done = document(tmp_path, "generate", str(folder), "--max-tokens", "12", "--seed", seed, *argv)
        assert (done["step"], Path(done["checkpoint"]).name) == (step, f"step-0000000{step}")
        texts = [repr(sample["prompt"] + sample["text"]) for sample in done["samples"]]
        assert texts == [line.split(": ", 1)[1] for line in said if f"step {step}:" in line]
    status, printed = ask(tmp_path, "generate", str(folder), "--prompt", "def f(", "--temperature", "0",
                          "--max-tokens", "5")
    assert status == 0 and "\ndef f(" in printed, printed


MESHES = {"tp": ["parallel.tp=2"], "pp": ["parallel.pp=2"], "zero-3": ["parallel.dp=2", "zero.stage=3"],
          "sp": ["parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"]}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_writes_the_same_text(mesh, trained, tmp_path):
    folder, _ = trained
    argv = ["generate", str(folder), "--prompt", "class ", "--prompt", "import os", "--prompt", "x",
            "--max-tokens", "40", "--top-p", "0.9", "--seed", "5"]
    one, other = document(tmp_path, *argv), document(tmp_path, *argv, *MESHES[mesh])
    assert one == other
    assert all(sample["ended"] or len(sample["tokens"]) == 40 for sample in one["samples"])


def test_eval_measures_what_the_run_has_measured(trained, tmp_path):
    """The same loss on the same sequences, and of all that was held out; perplexity, and counts."""
    folder, _ = trained
    done = document(tmp_path, "eval", str(folder), "--limit", "8")
    assert done["loss"] == pytest.approx(metrics(folder)[-1]["val/loss"], rel=1e-6)
    assert done["perplexity"] == pytest.approx(math.exp(done["loss"]))
    assert (done["sequences"], done["tokens"], done["left_out"]) == (8, 8 * 32, 0)


def test_eval_of_other_data_on_other_meshes(trained, tmp_path, cache):
    """Every sequence counts once, whatever the batches; what does not fill all ranks is said."""
    folder, _ = trained
    text = tmp_path / "other.txt"
    text.write_text("import os\nfor each in range(10):\n    print(each)\n" * 60)
    argv = ["eval", str(folder), "--data", str(text), cache[1]]
    one = document(tmp_path, *argv)
    assert one["sequences"] > 20 and one["left_out"] == 0 and one["data"] == str(text)
    for mesh in (["parallel.tp=2"], ["parallel.pp=2"], ["train.micro_batch_size=2"]):
        other = document(tmp_path, *argv, *mesh, "--limit", str(one["sequences"] // 2 * 2))
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2 if one["sequences"] % 2 else 1e-5)
    odd = document(tmp_path, *argv, "parallel.dp=2", "zero.stage=3", "--limit", "9")
    assert (odd["sequences"], odd["left_out"]) == (8, 1)


@pytest.mark.parametrize(("argv", "message"), [
    (["generate", "RUN", "--prompt", "x" * 400], "tokens, and the model sees model.seq_len=32: shorten it"),
    (["generate", "RUN", "--prompt", "a", "--tokenizer", "none.json"], "there is no tokenizer; give"),
    (["generate", "RUN", "--prompt", "a", "--checkpoint", "3"], "there is no "),
    (["generate", "nowhere", "--prompt", "a"], "there is no such run"),
    (["generate", "RUN", "--temperature", "-1"], "temperature=-1.0: must be at least 0"),
    (["generate", "RUN", "model.layers=2"], "model.layers: the run has it already"),
    (["generate", "RUN", "parallel.tp=3"], "is not divisible by parallel.tp=3"),
    (["eval", "RUN", "--tokenizer", "a.json"], "give --data SOURCE, too"),
    (["eval", "RUN", "--data", "nowhere"], "nowhere"),
    (["eval", "RUN", "--limit", "1", "parallel.dp=2"], "1 sequences are fewer than")])
def test_bad_input(argv, message, trained, tmp_path):
    """One message, exit status 2, and no traceback."""
    status, output = ask(tmp_path, *(str(trained[0]) if word == "RUN" else word for word in argv))
    assert status == 2 and message in output and "Traceback" not in output, output
    assert output.count("threed: ") == 1, output


def test_a_run_without_checkpoint_tokenizer_or_prompt(trained, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(trained[0] / "config.json", empty)
    with pytest.raises(InputError, match="has no complete checkpoint"):
        threed.generate(empty, ["a"])
    shutil.copytree(trained[0] / "checkpoints", empty / "checkpoints")
    with pytest.raises(InputError, match="there is no tokenizer: the run's data have no tokenizer"):
        threed.generate(empty, ["a"])
    values = json.loads((empty / "config.json").read_text())
    values["train"] |= {"sample_prompts": [], "sample_every": 0}
    (empty / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="no prompt"):
        threed.generate(empty)


def test_not_under_torchrun(trained, monkeypatch):
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(InputError, match="without torchrun"):
        threed.evaluate(trained[0])


def test_the_config_of_one_process():
    """What a run needs to train is left out; what its numbers depend on stays."""
    run = load("configs/toy.yaml", ["precision.dtype=bf16", "activation.policy=full", "run.verify_every=5",
                                    "parallel.schedule=zb-v", "model.dropout=0.1"])
    own = forward_config(run, Path("runs/x"), "auto", None)
    assert own.world_size == 1 and own.model == run.model and own.data == run.data
    assert (own.precision.dtype, own.precision.master, own.optimizer.name) == ("bf16", "none", "sgd")
    assert own.run.verify_every == own.zero.stage == 0 and own.run.dir == "runs/x"
    larger = forward_config(run, Path("runs/x"), "auto", ["parallel.dp=2", "zero.stage=3", "parallel.tp=2",
                                                          "train.micro_batch_size=3",
                                                          "precision.dtype=fp32"])
    assert (larger.world_size, larger.train.global_batch_size, larger.precision.master) == (4, 6, "fp32")


def test_the_config_of_one_process_with_biases_of_routers():
    """They are fp32 without masters, too."""
    run = load("configs/toy-moe.yaml", ["precision.dtype=bf16", "model.balance=bias"])
    assert forward_config(run, Path("runs/x"), "auto", None).precision.master == "none"


@pytest.mark.parametrize("problem", ["tokenizer", "prompt"])
def test_samples_that_cannot_be_written_end_the_run_before_it_begins(problem, begin, tmp_path, cache):
    """A Megatron prefix brings no tokenizer; a prompt that is too long."""
    prepared = Run(tmp_path, "data", "configs/toy.yaml", "model.vocab=300", "model.seq_len=32", *cache,
                   "--json")
    assert prepared.wait() == 0, prepared.output
    prefix = json.loads(prepared.output[prepared.output.index("{\n"):])["prefix"]
    given = {"tokenizer": (f"data.source={prefix}", "train.sample_prompts=[a]"),
             "prompt": (f"train.sample_prompts=[{'x' * 400}]",)}[problem]
    run = begin([*TOY, "parallel.pp=1"], "train.sample_every=1", *given)
    assert run.wait() == 2
    words = {"tokenizer": "needs a tokenizer, and data.source=", "prompt": "shorten it"}[problem]
    assert words in run.output and "Traceback" not in run.output, run.output
    assert "step 1/4" not in run.output
