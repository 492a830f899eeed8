"""Whole runs on documents, masks and mixtures, from the command line: another mesh has the same losses, and a
run that stops in the middle of a mixture goes on to the same bits."""

from __future__ import annotations

import json

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, losses, metrics

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}" \
           "{% if add_generation_prompt %}[assistant]{% endif %}"
BASE = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=32", "model.seq_len=48",
        "model.vocab=300",
        "train.global_batch_size=8", "train.steps=6", "train.eval_every=3", "monitor.wandb=disabled",
        "optimizer.warmup_steps=0", "data.loss_mask=chat", "data.document_mask=true", "data.packing=best-fit",
        "data.validation_fraction=0.2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    for name, count in (("a", 40), ("b", 20)):
        talks = [[{"role": "user", "content": f"{name} {i} " * (i % 4 + 1)},
                  {"role": "assistant", "content": f"so {i} it is " * (i % 3 + 1)}] for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    (folder / "template.jinja").write_text(TEMPLATE)
    return [f"data.mix=['2 {folder}/a.jsonl', '1 {folder}/b.jsonl']", f"data.cache={folder / 'cache'}",
            f"data.chat_template={folder / 'template.jinja'}"]


def train(folder, *overrides: str) -> Run:
    run = Run(folder, *BASE, *overrides)
    assert run.wait() == 0, run.output
    return run


def test_another_mesh_and_a_stop_in_between(tmp_path, data):
    one = tmp_path / "one"
    run = train(tmp_path, *data, f"run.dir={one}", "parallel.dp=2", "parallel.tp=1", "parallel.pp=1")
    assert "data.mix: 66.67% of samples from" in run.output
    assert "of them is data, the rest padding" in run.output
    other = tmp_path / "other"
    train(tmp_path, *data, f"run.dir={other}", "parallel.dp=1", "parallel.tp=2", "parallel.pp=2",
          "train.micro_batch_size=2", "activation.policy=full", "run.verify_every=2")
    for step, numbers in losses(one).items():
        assert losses(other)[step] == pytest.approx(numbers, rel=1e-4)
    values = [[row["val/loss"] for row in metrics(each) if "val/loss" in row] for each in (one, other)]
    assert len(values[0]) == 2 and values[0] == pytest.approx(values[1], rel=1e-4)
    halves = tmp_path / "halves"
    mesh = ["parallel.dp=2", "parallel.tp=1", "parallel.pp=1", "optimizer.decay_steps=6"]
    train(tmp_path, *data, f"run.dir={halves}", *mesh, "train.steps=2")
    train(tmp_path, *data, f"run.dir={halves}", *mesh)
    assert losses(halves) == losses(one)
