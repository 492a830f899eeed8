"""Arguments of Megatron-LM come as a list or a launch line; a script is refused, and no word of either is
lost without a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from threed.base.errors import InputError
from threed.interop import convert as subject

TINY = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --lr 1e-3 "
        "--train-iters 10")
VALUES = {"model.layers": 4, "model.hidden": 64, "model.heads": 4, "model.seq_len": 32, "optimizer.lr": 1e-3,
          "train.steps": 10}
LAUNCH = "torchrun --nproc_per_node 4 pretrain_gpt.py"
EXPERTS = ("--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --disable-bias-linear --swiglu "
           "--normalization RMSNorm")


def convert(tmp_path: Path, text: str, *overrides: str, name: str = "args",
            **files: str) -> subject.Converted:
    for other, content in files.items():
        (tmp_path / other.replace("__", ".")).write_text(content)
    (tmp_path / name).write_text(text)
    return subject.megatron(str(tmp_path / name), list(overrides))


def check(done: subject.Converted, **others: Any) -> None:
    expected = {**VALUES, **{key.replace("__", "."): value for key, value in others.items()}}
    assert {key: done.values.get(key) for key in expected} == expected
    assert not done.missing and not done.refused


@pytest.mark.parametrize("text, others", [
    (TINY, {}), (TINY.replace(" --", "\n--") + "\n# --lr 5\n", {}), (f"{TINY}\r\n", {}),
    (f"{TINY} \\\n  # --lr 5 \\\n  --bf16 # and so\n", {"precision__dtype": "bf16"}),
    (f"{TINY} --save run#1 --wandb-exp-name 'a # b'", {"run__dir": "run#1", "monitor__name": "a # b"}),
    (f"'{TINY}'", {}), (f"{TINY} --weight-decay \\\n 0.2", {"optimizer__weight_decay": 0.2}),
    (f"{LAUNCH} {TINY} --swiglu --bf16", {"parallel__dp": 4, "model__activation": "swiglu"}),
    (f"+ {LAUNCH} {TINY}\n", {"parallel__dp": 4}),
    (f"{LAUNCH} \\\n{TINY}\n--bf16", {"parallel__dp": 4, "precision__dtype": "bf16"}),
    (f"OMP_NUM_THREADS=1 torchrun --nproc-per-node=8 --nnodes=2 --rdzv-id a x/pretrain_gpt.py {TINY}",
     {"parallel__dp": 16}),
    (f"torchrun --nproc_per_node gpu --nnodes 2 pretrain_gpt.py {TINY}", {"parallel__dp": None}),
    (f"python -m torch.distributed.run --nproc-per-node=2 t.py {TINY}", {"parallel__dp": 2}),
    (f"python -u -m megatron.train {TINY}", {"parallel__dp": None}),
    (f"deepspeed --num_gpus=8 --num_nodes 2 --hostfile h pretrain_gpt.py {TINY} --zero-stage 2",
     {"parallel__dp": 16, "zero__stage": 2}),
    (f"accelerate launch --num_processes 3 pretrain_gpt.py {TINY}", {"parallel__dp": 3}),
    (f"NPROC_PER_NODE=4 NNODES=2 megatron pt {TINY.replace('m-l', 'm_l')} --sequence_parallel false",
     {"parallel__dp": 8}),
    (f"{TINY} --moe-layer-freq '([1]*4)'", {}), (f"{TINY} '--adam-beta2 0.98'",
                                                 {"optimizer__betas": [0.9, 0.98]})])
def test_lists_and_launch_lines(text, others, tmp_path):
    """Options of comments and of launchers that are taken for the trainer's, values cut at a #."""
    check(convert(tmp_path, text), **others)


@pytest.mark.parametrize("text", [
    f"#!/bin/bash\n{LAUNCH} {TINY}", f"A=({TINY})\n{LAUNCH} ${{A[@]}}", f"A='{TINY}'\n{LAUNCH} $A",
    f"{LAUNCH} {TINY} $EXTRA", f"{LAUNCH} {TINY} --lr $(cat lr)", f"{LAUNCH} {TINY} --lr `cat lr`",
    f"{LAUNCH} {TINY} --save \"$HOME/x\"", f"{LAUNCH} {TINY} 2>&1 | tee log", f"{LAUNCH} {TINY} > log",
    f"cd x && {LAUNCH} {TINY}", f"cd x; {LAUNCH} {TINY}", f"{LAUNCH} {TINY}\npython evaluate.py --lr 6",
    f"python mix.py --split valid --out v.txt\n{LAUNCH} {TINY}", f"export A=1\n{LAUNCH} {TINY}",
    f"if true; then\n{LAUNCH} {TINY}\nfi", f": ${{L:=2}}\n{LAUNCH} --num-layers $L", f"ARGS=({TINY})",
    f"MODEL_ARGS='{TINY}'"])
def test_scripts_are_refused(text, tmp_path):
    """Half of a script is another run; what to do is said."""
    with pytest.raises(InputError) as caught:
        convert(tmp_path, text, name="train.sh")
    assert "train.sh is no list of arguments" in str(caught.value)
    assert "Put echo in front of its launch line" in str(caught.value)
    assert "a log of the run" in str(caught.value)


@pytest.mark.parametrize("text, words", [
    ("--lr 1e-3 --swiglu foo", "--swiglu foo: the option is a switch"), ("--lr", "--lr needs a value"),
    ("--data-path --lr 1", "--data-path needs a value"), ("--wandb-exp-name my run", "stands in quotes"),
    ("--lr 'x", "cannot be read as a command"), ("-x --lr 1", "-x is no option"),
    ("srun x --num-layers 4", "no program stands before"), ("words alone", "has no option"),
    ("--moe-layer-freq __import__('os') --num-experts 8", "must be a number, or a list of 0 and 1"),
    ("--moe-layer-freq ([1]*10000000000) --num-experts 8", "must be a number, or a list of 0 and 1"),
    ("--moe-layer-freq ([1]*3) --num-experts 8 --num-layers 4", "is of 3 blocks, and --num-layers is 4")])
def test_bad_lists(text, words):
    with pytest.raises(InputError) as caught:
        subject.megatron(text, [])
    assert words in str(caught.value)


@pytest.mark.parametrize("text, key, expected", [
    ("--tensor_model_parallel_size 2 --sequence_parallel false", "parallel.sequence_parallel", None),
    ("--tensor_model_parallel_size 2 --sequence-parallel=true", "parallel.sequence_parallel", True),
    ("--swiglu False", "model.activation", None), ("--swiglu 1", "model.activation", "swiglu"),
    ("--add_bias_linear false", "model.bias", False), ("--add_bias_linear true", "model.bias", None),
    ("--disable-bias-linear false", "model.bias", None),
    ("--untie_embeddings_and_output_weights false", "model.tie_embeddings", None),
    ("--share_embeddings_and_output_weights false", "model.tie_embeddings", False),
    ("--bf16 false --fp16 true", "precision.dtype", "fp16"), ("--use_distributed_optimizer false",
                                                              "zero.stage", 0),
    ("--recompute_activations no", "activation.policy", None), ("--async_save off", "checkpoint.background",
                                                                None),
    ("--bf16 --bf16 false", "precision.dtype", None)])
def test_true_and_false_after_a_switch(text, key, expected):
    """A switch that is given false and is on."""
    done = subject.megatron(f"{TINY} {text}", [])
    assert done.values.get(key) == expected and not done.refused


@pytest.mark.parametrize("text, values", [
    ("--optimizer lion --lion-beta1 0.9", {"optimizer.name": "lion", "optimizer.betas": [0.9, 0.98]}),
    ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads", {"zero.stage": 2}),
    ("--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-samples 80 --global-batch-size 8",
     {"optimizer.wsd_decay_steps": 10}),
    ("--distribute-checkpointed-activations --recompute-granularity full --tensor-model-parallel-size 2",
     {"activation.partition": True}),
    ("--disable-jit-fuser --override-lr-scheduler --num-dataset-builder-threads 4", {}),
    ("--mixed_precision bf16_mixed", {"precision.dtype": "bf16"}),
    ("--num_moe_experts 8 --swiglu --disable-bias-linear", {"model.experts": 8})])
def test_what_has_another_name_is_not_refused(text, values):
    done = subject.megatron(f"{TINY} {text}", [])
    assert {key: done.config.to_dict()[key.split(".")[0]][key.split(".")[1]] for key in values} == values
    assert not done.refused


@pytest.mark.parametrize("text, refused", [
    ("--decoder-first-pipeline-num-layers 1", "--decoder-first-pipeline-num-layers"),
    ("--perform_initialization false", "--no-initialization"),
    ("--bias_gelu_fusion false", "--no-bias-gelu-fusion"), ("--some_new_switch false", "--some-new-switch"),
    ("--some-new-option 3", "--some-new-option"), ("--add_position_embedding false --position-embedding-type "
                                                   "none", "--no-position-embedding")])
def test_what_is_switched_off_there_and_missing_here(text, refused):
    assert refused in subject.megatron(f"{TINY} {text}", []).refused


@pytest.mark.parametrize("value, expected", [
    ("1", (1, None)), ("2", (2, None)), ("([1]*4)", (1, 0)), ("[1,1,1,1]", (1, 0)), ("([0]*1+[1]*3)", (1, 1)),
    ("'([0] * 1 + [1] * 3)'", (1, 1)), ("([0] * 1 + [1] * 3)", (1, 1)), ("4*[1]", (1, 0)),
    ("([0,1]*2)", (2, 1)), ("[1]+[0]+[1,0]", (2, 0)), ("[0,0,0,1]", (4, 3))])
def test_lists_of_blocks_with_experts(value, expected):
    done = subject.megatron(f"{TINY} {EXPERTS} --moe-layer-freq {value}", [])
    assert (done.values["model.moe_every"], done.values.get("model.first_dense")) == expected
    assert not done.refused


@pytest.mark.parametrize("value", ["[0,1,1,0]", "([0]*4)", "([1]*2+[0]*2)"])
def test_lists_of_blocks_that_threed_lacks(value):
    done = subject.megatron(f"{TINY} {EXPERTS} --moe-layer-freq {value}", [])
    assert "model.moe_every-th from model.first_dense on" in done.refused["--moe-layer-freq"]


@pytest.mark.parametrize("text, option, needed", [
    ("--lr-warmup-fraction 0.1", "--lr-warmup-fraction", "--train-iters"),
    ("--train-samples 100", "--train-samples", "--global-batch-size"),
    ("--lr-decay-samples 100", "--lr-decay-samples", "--global-batch-size"),
    ("--train-tokens 100", "--train-tokens", "--global-batch-size"),
    ("--train-tokens 100 --global-batch-size 2", "--train-tokens", "--seq-length"),
    ("--num-layers-per-virtual-pipeline-stage 1", "--num-layers-per-virtual-pipeline-stage", "--num-layers")])
def test_an_option_that_needs_another_is_named(text, option, needed):
    """The message is about the option that was given; the rest converts."""
    done = subject.megatron(f"--lr 1e-3 {text}", [])
    assert done.refused == {option: f"it needs {needed}, which is not given"}
    assert "train.steps" in done.missing and done.values["optimizer.lr"] == 1e-3


def test_what_is_not_found_is_said(tmp_path):
    """A config that looks whole, and trains threed's model by threed's rate for threed's steps."""
    done = convert(tmp_path, "python pretrain_gpt.py --bf16")
    assert done.missing == ["optimizer.lr", "train.steps", "model.seq_len", "model.layers", "model.hidden",
                            "model.heads", "model.vocab"]
    assert "# NOT FOUND in it, so the default counts: optimizer.lr 0.0003, train.steps 100" in (
        subject.show(done))
    assert subject.document(done)["not_found"] == done.missing
    named = convert(tmp_path, "python pretrain_gpt.py --bf16", "model.name=llama3-8b")
    assert named.missing == done.missing[:3]


def test_an_option_twice(tmp_path):
    done = convert(tmp_path, f"{TINY} --lr 5e-4")
    assert done.values["optimizer.lr"] == 5e-4
    assert done.notes == ["--lr is given as 0.001 and 0.0005: the last is taken"]


def test_the_defaults_of_ms_swift_are_said(tmp_path):
    done = convert(tmp_path, f"megatron sft {TINY} --dataset x")
    assert "--dataset" in done.refused and "defaults of its own" in done.notes[0]


def test_experts_without_a_gate():
    """Megatron-LM's default is none, which threed has not: said, and the rest converts."""
    done = subject.megatron(f"{TINY} --num-experts 8", [])
    assert done.values["model.experts"] == 8
    assert set(done.refused) == {"--activation-func", "--add-bias-linear"}


DS = ('{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, "gradient_clipping": 0.3,\n'
      ' "zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 0, '
      '"initial_scale_power": 12}}')
DEEPSPEED = f"deepspeed pretrain_gpt.py {TINY} --fp16 --deepspeed --deepspeed_config "


def test_the_file_of_deepspeed_counts(tmp_path):
    """DeepSpeed shards, clips and scales by its file; the options alone say something else."""
    done = convert(tmp_path, DEEPSPEED + "ds.json", ds__json=DS)
    check(done, zero__stage=2, optimizer__clip_grad=0.3, precision__loss_scale="dynamic",
          precision__initial_loss_scale=4096.0, train__global_batch_size=8)
    assert done.config.zero.stage == 2 and "--deepspeed-config" in done.dropped


def test_the_file_of_a_typed_launch_line(tmp_path):
    (tmp_path / "ds.json").write_text(DS)
    assert subject.megatron(f"{DEEPSPEED}{tmp_path}/ds.json", []).config.zero.stage == 2


def test_contradictions_of_deepspeeds_file_are_said(tmp_path):
    done = convert(tmp_path, DEEPSPEED + "ds.json --loss-scale 12 --clip-grad 5 --zero-stage 1 --lr 1e-3",
                   ds__json=DS[:-1] + ', "optimizer": {"type": "Adam", "params": {"lr": 4}}, "amp": '
                                      '{"enabled": true}}')
    text = "\n".join(done.notes)
    for key, ours, theirs in (("precision.loss_scale", 12, "dynamic"), ("optimizer.clip_grad", 5, 0.3),
                              ("zero.stage", 1, 2), ("optimizer.lr", 0.001, 4)):
        assert f"{key} is {ours} by the options and {theirs} by" in text
    assert done.values["optimizer.lr"] == 1e-3 and done.values["optimizer.clip_grad"] == 0.3
    assert any("apex" in reason for reason in done.refused.values())


def test_a_file_of_deepspeed_that_is_not_there(tmp_path):
    done = convert(tmp_path, DEEPSPEED + "gone.json")
    assert "threed convert gone.json" in done.refused["--deepspeed-config"]
    done = convert(tmp_path, f"python t.py {TINY} --deepspeed_config gone.json")
    assert "without --deepspeed it is not read" in done.dropped["--deepspeed-config"]
    with pytest.raises(InputError, match=r"ds\.json is not JSON"):
        convert(tmp_path, DEEPSPEED + "ds.json", ds__json="{")
