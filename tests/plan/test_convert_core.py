"""YAML by the names of megatron.core and Megatron-Bridge, and of other programs; arguments at their edges."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from threed.base.errors import InputError
from threed.cli.main import app
from threed.config.load import load
from threed.interop.arguments import arguments
from threed.interop.convert import deepspeed, megatron, show

SIZES = """
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, seq_length: 128, vocab_size: 512%s}
train: {train_iters: 100, global_batch_size: 8}
optimizer: {lr: 0.0003, weight_decay: 0.1}
"""
LIST = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --lr 1e-3 "
        "--train-iters 100")


def converted(tmp_path, text):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    return show(megatron(str(file), []))


@pytest.mark.parametrize("more, key, value", [
    (", num_query_groups: 2", "model.kv_heads", 2),
    (", gated_linear_unit: true, activation_func: silu, add_bias_linear: false", "model.ffn_hidden", 256),
    ("}\nscheduler: {start_weight_decay: 0.033, end_weight_decay: 0.033", "optimizer.weight_decay", 0.033),
    ("}\nddp: {grad_reduce_in_fp32: true", "precision.grad_dtype", "fp32"),
])
def test_what_megatron_core_says_otherwise(more, key, value, tmp_path):
    text = converted(tmp_path, SIZES % more)
    section, name = key.split(".")
    (tmp_path / "ours.yaml").write_text(text)
    assert getattr(getattr(load(tmp_path / "ours.yaml"), section), name) == value
    assert "weight decay that changes" not in text and "num-query-groups" not in text


def test_strange_keys_that_are_false(tmp_path):
    text = converted(tmp_path, SIZES % ", tie_word_embeddings: false, bias: false")
    assert "tie_word_embeddings, bias: false, and threed does not know" in text


@pytest.mark.parametrize("text", [
    "base_model: meta-llama/Llama-3.2-1B\nsequence_len: 2048\nadapter: lora\nlora_r: 16\n"
    "lr_scheduler: cosine\nlearning_rate: 2e-4\nweight_decay: 0.0",
    "model_name_or_path: x\nstage: sft\ndo_train: true\ncutoff_len: 2048\nlearning_rate: 1.0e-4\nbf16: true",
], ids=["axolotl", "llama-factory"])
def test_another_programs_yaml(text, tmp_path):
    with pytest.raises(InputError, match="is no YAML of Megatron-LM, "):
        converted(tmp_path, text)
    said = CliRunner().invoke(app, ["check", str(tmp_path / "theirs.yaml")])
    assert said.exception is not None and "threed convert" not in str(said.exception)


def test_other_names(tmp_path):
    assert arguments(f"{LIST} --encoder-seq-length 2048").found["seq_length"] == 2048
    text = show(megatron(f"{LIST} --padded-vocab-size 640", []))
    assert "vocab: 512" in text and "vocab_multiple: 640" in text


def test_a_launch_line_that_is_longer_than_a_files_name():
    line = f"torchrun --nproc_per_node 8 pretrain_gpt.py {LIST} --save {'x' * 300}"
    assert arguments(line).found["num_layers"] == 4


def test_an_empty_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("")
    with pytest.raises(InputError, match=r"ds\.json is empty"):
        deepspeed(file, [])
