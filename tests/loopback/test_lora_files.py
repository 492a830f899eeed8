"""LoRA of models of transformers: trained beside PEFT from the same adapters, exported for PEFT and merged,
and resumed on another mesh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import FILES, batches
from tests.loopback.test_hugging_face import RUN, close, make, ours, same_files, theirs
from tests.reference import data_of
from threed.base.errors import InputError
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.cli.main import app
from threed.comm.group import Comm
from threed.config.load import load
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.interop.hf.adapters import export_adapters
from threed.interop.hf.exporting import export_model
from threed.interop.hf.importing import import_model
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config

transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install -e '.[dev]'")

TARGETS = {"llama3": "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
           "qwen2": "[q_proj,v_proj,down_proj]", "gpt2": "[qkv_proj,o_proj,up_proj]"}
OPTIONS = [*RUN, "optimizer.clip_grad=0", "model.lora_rank=4", "model.lora_alpha=10"]
FIRST = ["parallel.dp=2", "parallel.tp=2", "zero.stage=3", "train.micro_batch_size=1", "checkpoint.every=1"]
SECOND = ["parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.schedule=zb-h1"]
# where each rank holds frozen weights whole and a part of the adapters
THIRD = ["parallel.dp=2", "zero.stage=1", "precision.dtype=bf16", "train.micro_batch_size=1"]


def lora(run: Path, name: str, *overrides: str) -> Config:
    return load(run / "config.yaml", [*OPTIONS, f"model.lora_targets={TARGETS[name]}", *overrides])


def trained(config: Config, steps: int) -> tuple[list[float], list[str]]:
    """Resume as the config says, train, save. The losses, and the notes about the resume."""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> tuple[list[float], list[str]]:
        engine = Engine(Analysis(plan), comm)
        resumed = resume(config, engine.zero)
        first = engine.zero.step_number
        losses = [engine.train_step(batches(config, comm, step))[0].loss
                  for step in range(first, first + steps)]
        saver = Saver(engine, Lineage(f"test-{config.world_size}"), lambda: None)
        saver.begin({"samples": 0, "skipped": 0, "wandb_id": None})
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None, outcome
        engine.close()
        return losses, resumed.notes

    return run_loopback(plan, make_mesh(config), work)[0]


def peft_losses(model: Any, config: Config, steps: int) -> list[float]:
    """Losses of PEFT's model under torch.optim.AdamW."""
    model.train()
    weights = [each for each in model.parameters() if each.requires_grad]
    asked, losses = config.optimizer, []
    optimizer = torch.optim.AdamW(weights, lr=asked.lr, betas=(asked.betas[0], asked.betas[1]), eps=asked.eps,
                                  weight_decay=asked.weight_decay)
    for step in range(steps):
        data = data_of(config, step)
        logits = model(input_ids=data.tokens_GS).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.labels_GS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", TARGETS)
def test_as_peft(name, tmp_path, monkeypatch):
    """The same losses as PEFT's from the same base and the same adapters, on two meshes with a checkpoint in
    between; and adapters that PEFT loads, with the logits of the run."""
    peft = pytest.importorskip("peft", reason="the peer is peft: pip install -e '.[dev]'")
    made, run = make(name, tmp_path / "theirs"), tmp_path / "run"
    import_model(made.folder, run, RUN[:1])
    _, notes = trained(lora(run, name), 0)
    assert any("no adapters: they begin anew" in note for note in notes)
    export_adapters(run, tmp_path / "fresh")
    model = peft.PeftModel.from_pretrained(made.model, tmp_path / "fresh", is_trainable=True)
    close(ours(lora(run, name), monkeypatch), theirs(model))
    want = peft_losses(model, lora(run, name), 6)
    first, _ = trained(lora(run, name, *FIRST), 3)
    second, notes = trained(lora(run, name, *SECOND), 3)
    assert not any("adapters" in note for note in notes)
    for mine, peers in zip([*first, *second], want, strict=True):
        assert abs(mine - peers) <= 1e-5 * peers, (first, second, want)
    trained(lora(run, name, *THIRD, f"train.resume={run}/checkpoints/step-00000006",
                 f"run.dir={tmp_path / 'other'}"), 0)
    export_adapters(run, tmp_path / "adapters")
    base = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    logits = ours(lora(run, name, *SECOND), monkeypatch)
    close(logits, theirs(loaded))
    close(theirs(model.eval()), theirs(loaded))
    with loaded.disable_adapter():
        assert (theirs(loaded) - logits).abs().max() > 1e-2, "it was not trained"


@pytest.mark.parametrize("name", TARGETS)
def test_merged(name, tmp_path, monkeypatch):
    """An export has the adapters in its weights: transformers has the logits of the run."""
    made, run = make(name, tmp_path / "theirs"), tmp_path / "run"
    import_model(made.folder, run, RUN[:1])
    trained(lora(run, name, *FIRST, "zero.stage=2"), 2)
    logits = ours(lora(run, name, *SECOND), monkeypatch)
    assert export_model(run, tmp_path / "back").step == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    close(logits, theirs(model))
    assert (logits - theirs(made.model)).abs().max() > 1e-2, "it was not trained"


@pytest.mark.core
def test_what_cannot_go_on_is_refused(tmp_path):
    made, run = make("llama3", tmp_path / "theirs"), tmp_path / "run"
    import_model(made.folder, run, RUN[:1])
    trained(lora(run, "llama3"), 1)
    for overrides, words in ((["model.lora_rank=8"], "lora_rank=4 there, 8 here"),
                             (["model.lora_alpha=4"], "lora_alpha=10.0 there, 4.0 here"),
                             (["model.lora_targets=[q_proj]"], "lora_targets=")):
        with pytest.raises(InputError, match=words):
            trained(lora(run, "llama3", *overrides), 0)
    # what is the same in other words is not named
    with pytest.raises(InputError, match=r"another model: model.lora_alpha=10.0 there, 4 here; "):
        backwards = ",".join(reversed(TARGETS["llama3"].strip("[]").split(",")))
        trained(lora(run, "llama3", f"model.lora_targets=[{backwards}]", "model.lora_alpha=null"), 0)
    with pytest.raises(InputError, match=r"has adapters of model.lora_rank=4.*merge them by threed export"):
        trained(load(run / "config.yaml", RUN), 0)
    with pytest.raises(InputError, match="is there already"):
        export_adapters(run, run)
    # what GPT-2 of transformers calls c_attn has one adapter
    made, run = make("gpt2", tmp_path / "gpt2"), tmp_path / "other"
    import_model(made.folder, run, RUN[:1])
    trained(lora(run, "gpt2", "model.lora_targets=[q_proj]"), 0)
    with pytest.raises(InputError, match="a gpt2 of transformers has c_attn, and no linear for an adapter"):
        app(["export", str(run), str(tmp_path / "none"), "--adapters"], standalone_mode=False)
    assert not (tmp_path / "none").exists()


def test_without_a_base_a_note_says_so(tmp_path):
    """Somebody would train adapters of random weights, without a word."""
    made = make("llama3", tmp_path / "theirs")
    import_model(made.folder, tmp_path / "run", RUN[:1])
    _, notes = trained(lora(tmp_path / "run", "llama3", f"run.dir={tmp_path / 'other'}"), 0)
    assert any("beside random weights" in note for note in notes)


def test_a_base_that_was_trained_here(tmp_path):
    """Its weights are taken, and nothing else: the run begins at step 0, in a folder of its own."""
    made, run = make("llama3", tmp_path / "theirs"), tmp_path / "run"
    import_model(made.folder, run, RUN[:1])
    trained(load(run / "config.yaml", RUN), 2)
    with pytest.raises(InputError, match=r"in the run.dir of the run that trained the base model"):
        trained(lora(run, "llama3"), 0)
    path = run / "checkpoints" / "step-00000002"
    config = lora(run, "llama3", f"run.dir={tmp_path / 'tuned'}", f"train.resume={path}")
    plan = make_plan(config)

    def work(comm: Comm) -> tuple[int, int, Any]:
        engine = Engine(Analysis(plan), comm)
        resumed = resume(config, engine.zero)
        return engine.zero.step_number, engine.zero.updates, resumed.manifest.step

    assert run_loopback(plan, make_mesh(config), work) == [(0, 0, 0)]
    trained(config, 1)
    assert export_model(tmp_path / "tuned", tmp_path / "back").step == 1
    # frozen weights that live on disk are saved and loaded, too
    disk = lora(run, "llama3", f"run.dir={tmp_path / 'tuned'}", "parallel.dp=2", "zero.stage=3", FILES,
                "offload.optimizer=nvme", "offload.parameters=nvme", "train.micro_batch_size=1")
    trained(disk, 0)
    shutil.move(tmp_path / "back", tmp_path / "before")
    export_model(tmp_path / "tuned", tmp_path / "back")
    same_files(tmp_path / "before", tmp_path / "back")
