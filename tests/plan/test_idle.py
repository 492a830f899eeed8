"""Keys of a file that overrides leave without effect: left out, with a note; else refused, as ever."""

from __future__ import annotations

import json

import pytest
import yaml

import threed
from threed.base.errors import ConfigError
from threed.config.values import get

SMALL = {"model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 300, "vocab_multiple": 4, "seq_len": 64},
         "train": {"global_batch_size": 8}, "parallel": {"dp": 2}, "run": {"device": "cpu"}}
# what a file has; the override; the keys that it leaves without effect
PAIRS = [
    (["monitor.loggers=[prometheus]", "monitor.prometheus_port=9400"], "monitor.loggers=[]",
     ["monitor.prometheus_port"]),
    (["monitor.loggers=[prometheus]", "monitor.prometheus_file=x.prom"], "monitor.loggers=[tensorboard]",
     ["monitor.prometheus_file"]),
    (["monitor.loggers=[prometheus]", "monitor.prometheus_port=9400", "monitor.prometheus_file=x.prom"],
     "monitor.loggers=[]", ["monitor.prometheus_file", "monitor.prometheus_port"]),
    (["zero.stage=2", "zero.reduce_every=2"], "zero.stage=1", ["zero.reduce_every"]),
    (["zero.stage=3", "zero.residency=2", "zero.prefetch=2", "zero.persist_below=10"], "zero.stage=2",
     ["zero.persist_below", "zero.prefetch", "zero.residency"]),
    (["zero.stage=1", "zero.shard_size=1"], "zero.stage=0", ["zero.shard_size"]),
    (["activation.policy=full", "activation.every=2"], "activation.policy=none", ["activation.every"]),
    (["activation.policy=selective", "activation.pieces=[norm]"], "activation.policy=full",
     ["activation.pieces"]),
    (["offload.optimizer=cpu", "offload.ratio=0.5"], "offload.optimizer=none", ["offload.ratio"]),
    (["offload.optimizer=cpu", "offload.overlap=next", "offload.gradients=device"], "offload.optimizer=none",
     ["offload.gradients", "offload.overlap"]),
    (["offload.optimizer=cpu", "offload.gradients=host", "zero.stage=2"], "zero.stage=1",
     ["offload.gradients"]),
    (["offload.optimizer=nvme", "offload.nvme_path=nvme"], "offload.optimizer=cpu", ["offload.nvme_path"]),
    (["checkpoint.copy_to=copies", "checkpoint.copy_keep=3", "checkpoint.copy_wait_s=5"],
     "checkpoint.copy_to=null", ["checkpoint.copy_keep", "checkpoint.copy_wait_s"]),
    (["precision.dtype=fp16", "precision.hysteresis=3"], "precision.dtype=bf16", ["precision.hysteresis"]),
    (["data.loss_mask=chat", "data.messages_key=turns"], "data.loss_mask=none", ["data.messages_key"]),
    (["data.on_bad_row=skip", "data.bad_rows_limit=50"], "data.on_bad_row=error", ["data.bad_rows_limit"]),
    (["parallel.tp=2", "parallel.sequence_parallel=true"], "parallel.tp=1", ["parallel.sequence_parallel"]),
    (["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"],
     "parallel.schedule=1f1b", ["parallel.virtual_stages"]),
    (["train.eval_every=5"], "data.validation_fraction=0", ["train.eval_every"]),
    (["train.sample_every=5", "train.sample_prompts=[def]"], "train.sample_prompts=[]",
     ["train.sample_every"]),
    (["model.lora_rank=4", "model.lora_alpha=8"], "model.lora_rank=null", ["model.lora_alpha"]),
]


def written(folder, given):
    """A file with these values."""
    values = json.loads(json.dumps(SMALL))
    for text in given:
        key, _, value = text.partition("=")
        section, name = key.split(".")
        values.setdefault(section, {})[name] = yaml.safe_load(value)
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize(("given", "override", "keys"), PAIRS, ids=lambda value: str(value)[:40])
def test_left_out(given, override, keys, tmp_path, capfd):
    file = written(tmp_path, given)
    threed.load(file)  # the file is right by itself
    assert not capfd.readouterr().err
    for _ in range(2):
        config = threed.load(file, [override])
    assert all(get(config, key) == get(threed.Config(), key) for key in keys)
    said = capfd.readouterr().err.splitlines()
    assert sorted(line.partition("overrides: ")[2].split("=")[0].split(" ")[0] for line in said) == keys, (
        "a line each, once")
    assert all(line.startswith(f"threed: note: left out of {file}") and "leave it out" not in line
               for line in said)


@pytest.mark.parametrize(("given", "override", "keys"), PAIRS, ids=lambda value: str(value)[:40])
def test_refused(given, override, keys, tmp_path):
    """Where the override itself has no effect, and where the file is so by itself."""
    file = written(tmp_path, [text for text in given if text.partition("=")[0] not in keys])
    idle = [text for text in given if text.partition("=")[0] in keys]
    with pytest.raises(ConfigError, match=rf"{keys[0]}"):
        threed.load(file, [override, *idle])
    alone = written(tmp_path, [*(text for text in given if text.partition("=")[0] in keys), override])
    with pytest.raises(ConfigError, match=rf"{keys[0]}"):
        threed.load(alone)
    with pytest.raises(ConfigError, match=rf"{keys[0]}"):
        threed.load(alone, ["train.steps=3"])
