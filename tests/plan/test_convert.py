"""`threed convert`: what comes out of another framework's config is a config, and says what it lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from threed.api import plans as api
from threed.base.errors import InputError
from threed.config.keys.table import NO_KEY, NOTHING
from threed.config.load import known_keys, load
from threed.config.synonyms import FRAMEWORKS, ours
from threed.config.values import get
from threed.interop import convert as subject
from threed.models.families.registry import FAMILIES
from threed.models.model import num_parameters
from threed.schema.config import keys_of


def deepspeed(tmp_path: Path, values: dict[str, Any], *overrides: str, devices: int | None = None,
              version: str | None = None) -> subject.Converted:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(values))
    return subject.deepspeed(path, list(overrides), devices, version)


def megatron(text: str, *overrides: str, devices: int | None = None) -> subject.Converted:
    return subject.megatron(text, list(overrides), devices)


def check(done: subject.Converted, tmp_path: Path) -> None:
    """What is printed is a config that `threed check` accepts, with the converted values."""
    path = tmp_path / "converted.yaml"
    path.write_text(subject.show(done))
    config = load(path)
    assert api.check(config)["ok"]
    assert {key: get(config, key) for key in done.values} == {
        key: get(done.config, key) for key in done.values}


ADAM = {"type": "AdamW", "params": {"lr": 3e-4}}
# In the spirit of DeepSpeed's tutorials: each ZeRO stage, offload, both 16-bit types, schedules, activations.
DEEPSPEED = {
    "plain": {"train_batch_size": 16, "optimizer": {"type": "Adam",
                                                    "params": {"lr": 1e-4, "betas": [0.9, 0.99],
                                                                              "eps": 1e-6,
                                                               "weight_decay": 0.01}}},
    "zero 1, fp16": {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM,
                     "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 4,
                              "loss_scale_window": 500, "min_loss_scale": 2},
                     "zero_optimization": {"stage": 1}},
    "zero 2, bf16": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "optimizer": ADAM,
                     "bf16": {"enabled": True}, "gradient_clipping": 0.5,
                     "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10,
                                                                  "warmup_max_lr": 2e-4,
                                                                  "warmup_type": "linear"}},
                     "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8,
                                           "allgather_bucket_size": 5e8, "contiguous_gradients": True}},
    "zero 3, offload": {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "optimizer": ADAM,
                        "bf16": {"enabled": True}, "communication_data_type": "fp32", "steps_per_print": 1e2,
                        "scheduler": {"type": "WarmupCosineLR",
                                      "params": {"warmup_num_steps": 5, "total_num_steps": 50}},
                        "zero_optimization": {
                            "stage": 3, "stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9,
                            "stage3_param_persistence_threshold": 1e4,
                            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
                            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}},
    "activations": {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 128},
                    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False,
                                                 "number_checkpoints": 4, "profile": True},
                    "tensorboard": {"enabled": True, "output_path": "x"}, "wall_clock_breakdown": True},
    "hugging face": {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                     "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
                     "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
                     "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}},
    "quantized": {"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_quantized_weights": True,
                                                               "zero_hpz_partition_size": 1}},
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(name, tmp_path):
    """An example whose conversion is no config, or drops a key without a word."""
    done = deepspeed(tmp_path, DEEPSPEED[name])
    check(done, tmp_path)
    assert all(reason for reason in (*done.dropped.values(), *done.refused.values()))


def test_deepspeeds_defaults(tmp_path):
    """Adam's betas and decay, the stage, gradients' precision: another run than the one that was meant."""
    values = deepspeed(tmp_path, {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization":
                                  {"stage": 3}, "optimizer": {"type": "Adam"}}).values
    assert values["optimizer.betas"] == [0.9, 0.999] and values["optimizer.weight_decay"] == 0
    assert values["optimizer.lr"] == 1e-3 and values["zero.persist_below"] == 100_000
    assert values["precision.reduce_dtype"] == values["precision.grad_dtype"] == "bf16"
    values = deepspeed(tmp_path, {"train_batch_size": 8, "bf16": {"enabled": True}}).values
    assert values["zero.stage"] == 0 and "precision.grad_dtype" not in values, "fp32 there, too"
    assert "optimizer.betas" not in values, "the script has the optimizer"


@pytest.mark.parametrize("version, clip", [(None, 1.0), ("0.19.3", 1.0), ("0.19.2", 0.0),
                                           ("0.9.0+cu12", 0.0)])
def test_clipping_by_version(version, clip, tmp_path):
    done = deepspeed(tmp_path, {"train_batch_size": 8}, version=version)
    assert done.values["optimizer.clip_grad"] == clip
    assert "clip_grad: " in subject.show(done) and "--deepspeed-version" in done.why["optimizer.clip_grad"]
    assert deepspeed(tmp_path, {"gradient_clipping": 3}, version=version).values["optimizer.clip_grad"] == 3


def test_auto(tmp_path):
    """What Hugging Face's Trainer fills in is not filled in by DeepSpeed's defaults."""
    done = deepspeed(tmp_path, {**DEEPSPEED["hugging face"], "steps_per_print": float("inf")})
    assert done.values["optimizer.name"] == "adamw" and done.values["optimizer.weight_decay"] == 0
    assert not {"optimizer.lr", "optimizer.betas", "optimizer.clip_grad",
                "monitor.console_every"} & set(done.values)
    assert "set optimizer.lr" in done.dropped["optimizer.params.lr"] and not done.refused


def test_schedules(tmp_path):
    """A warm-up that is logarithmic there is said to be; the rate is the scheduler's where it has one."""
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    done = deepspeed(tmp_path, {"optimizer": optimizer, "scheduler": {
        "type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 7,
                                            "total_num_steps": 90}}})
    assert "log" in done.refused["warmup_type"]
    assert done.values["optimizer.lr"] == 2e-4 and done.values["optimizer.schedule"] == "linear"
    assert (done.values["optimizer.warmup_steps"], done.values["optimizer.decay_steps"]) == (7, 90)
    done = deepspeed(tmp_path, {"optimizer": optimizer, "scheduler": {
        "type": "WarmupCosineLR", "params": {"warmup_type": "linear", "cos_min_ratio": 0.1}}})
    assert done.values["optimizer.min_lr"] == pytest.approx(1e-4) and not done.refused
    done = deepspeed(tmp_path, {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}})
    assert set(done.refused) == {"scheduler.type", "scheduler.params.cycle_min_lr"}


@pytest.mark.parametrize("batch, micro, steps, devices, expected", [
    (64, 4, 2, None, (64, 4, 8)), (64, 4, None, None, (64, 4, "auto")), (None, 4, 2, None, (8, 4, 1)),
    (None, 4, 2, 8, (64, 4, 8)), (64, None, 2, 8, (64, 4, 8)), (64, None, None, 16, (64, 4, 16)),
    (64, 4, None, 16, (64, 4, 16))])
def test_batches(batch, micro, steps, devices, expected, tmp_path):
    """Any two of three give the third."""
    given = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro,
             "gradient_accumulation_steps": steps}
    done = deepspeed(tmp_path, {key: value for key, value in given.items() if value}, devices=devices)
    values = done.values
    assert (values["train.global_batch_size"], values["train.micro_batch_size"],
            values["parallel.dp"]) == expected


@pytest.mark.parametrize("values, words", [
    ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
     "train_batch_size=10 is not train_micro_batch_size_per_gpu=4 x"),
    ({"train_batch_size": "many"}, "train_batch_size=many: must be a whole number"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled contradict"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, "device gpu"),
    ({"zero_optimization": {"stage": 9}}, "zero.stage=9"),
    ({"gradient_cliping": 1}, "gradient_cliping is no key of DeepSpeed; did you mean gradient_clipping?"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "offload.nvme_path"),
    ({"fp16": {"enabled": True, "initial_scale_power": "high"}}, "initial_scale_power"),
])
def test_bad_deepspeed(values, words, tmp_path):
    """A contradiction, a slip or a wrong value that is converted."""
    with pytest.raises(InputError) as caught:
        deepspeed(tmp_path, values)
    assert words in str(caught.value)


@pytest.mark.parametrize("text, words", [
    ('{"train_batch_size" 8}', "is not JSON"), ("[1, 2]", "must be an object"), ("{", "is not JSON"),
    ('{"a": 1, "a": 2}', "given twice")])
def test_not_a_deepspeed_config(text, words, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        subject.deepspeed(path, [])
    with pytest.raises(InputError, match="cannot be read"):
        subject.deepspeed(tmp_path / "none.json", [])


def test_refused_by_name(tmp_path):
    """What threed has not is refused by its name, whole sections once, and only where it is on."""
    done = deepspeed(tmp_path, {
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 9}},
                                "amp": {"enabled": True},
        "sparse_gradients": False, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1},
                                                         "zero_quantized_weights": False},
        "progressive_layer_drop": {"enabled": False, "theta": 0.5}, "pipeline": {"stages": 4}, "novelty": 3})
    assert set(done.refused) == {"optimizer.type", "optimizer.params.freeze_step", "amp",
                                 "zero_optimization.zenflow", "novelty"}
    assert "never reads" in done.dropped["pipeline.stages"] and "parallel.pp" not in done.values


GPT_345M = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 64 --lr 0.00015
    --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
    --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --split 949,50,1 --data-path my-gpt2_text_document --save ckpt --load ckpt --save-interval 10000
    --eval-interval 1000 --eval-iters 10 --log-interval 100"""
GPT3 = """torchrun --nproc_per_node 8 --nnodes 256 pretrain_gpt.py --num-layers 96 --hidden-size 12288
    --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
    --global-batch-size 1536 --train-samples 146484375 --rampup-batch-size 16 16 5859375
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-samples 183105
    --lr-decay-samples 126953125 --adam-beta2 0.95 --weight-decay 0.1 --init-method-std 0.006 --bf16
    --hidden-dropout 0 --attention-dropout 0 --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16 --sequence-parallel --num-layers-per-virtual-pipeline-stage 3
    --vocab-file vocab.json --data-path data/text_document --save ckpt"""
LLAMA = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size {ffn} --num-attention-heads 32 --swiglu
    --normalization RMSNorm --position-embedding-type rope --rotary-base {base} --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16
    --use-distributed-optimizer --tokenizer-type NullTokenizer --global-batch-size 128 --micro-batch-size 1
    --seq-length {length} --max-position-embeddings {length} --lr 3e-4 --train-iters 100
    --vocab-size {vocab} """
LLAMA_2 = LLAMA.format(ffn=11008, base=10000, length=4096, vocab=32000)
LLAMA_3 = LLAMA.format(ffn=14336, base=500000, length=8192, vocab=128256) + (
    "--group-query-attention --num-query-groups 8 --kv-channels 128")


@pytest.mark.parametrize("text, devices, count, published", [
    (GPT_345M, 8, 354_823_168, 345e6),  # Megatron-LM's own count leaves out what its name does
    (GPT3, None, 174_604_259_328, 175e9), (LLAMA_2, 64, 6_738_415_616, 6.74e9),
                                                             (LLAMA_3, 64, 8_030_261_248, 8.03e9)],
    ids=["GPT 345M", "GPT-3 175B", "Llama 2 7B", "Llama 3 8B"])
def test_megatron(text, devices, count, published, tmp_path):
    """Parameters are the published ones, and the config can run."""
    done = megatron(text, devices=devices)
    assert num_parameters(done.config.model) == count == pytest.approx(published, rel=0.03)
    check(done, tmp_path)


def test_samples_are_steps():
    """And a launch line gives the number of ranks."""
    done = megatron(GPT3)
    config = done.config
    assert (config.parallel.tp, config.parallel.pp, config.parallel.dp) == (8, 16, 16)
    assert (config.parallel.schedule, config.parallel.virtual_stages) == ("interleaved", 2)
    assert (config.train.steps, config.optimizer.warmup_steps, config.optimizer.decay_steps) == (95367, 119,
                                                                                                 82652)
    assert config.model.vocab == 50257 and config.model.vocab_multiple == 1024 and config.zero.stage == 0
    assert "grows" in done.refused["--rampup-batch-size"]


def test_a_batch_size_that_is_not_given():
    """A micro-batch for each replica."""
    done = megatron("--micro-batch-size 4 --train-samples 640 --zero-stage 2 --checkpoint-activations "
                    "--tensor-model-parallel-size 2 --normalization rmsnorm", devices=8)
    config = done.config
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.parallel.dp) == (16, 4, 4)
    assert (config.train.steps, config.zero.stage, config.activation.policy, config.model.norm) == (
        40, 2, "full", "rmsnorm")


def test_tokens_of_megatron_deepspeed():
    done = megatron("--global-batch-size 8 --seq-length 128 --train-tokens 1024000 --train-samples 99999 "
                    "--lr-decay-tokens 512000 --lr-warmup-tokens 10240 --num-key-value-heads 2 "
                    "--enable-zbh1-pipeline --pipeline-model-parallel-size 2")
    assert (done.values["train.steps"], done.values["optimizer.decay_steps"],
            done.values["optimizer.warmup_steps"]) == (1000, 500, 10)
    assert done.config.parallel.schedule == "zb-h1" and done.config.model.kv_heads == 2
    assert "--train-samples" in done.dropped


def test_megatrons_yaml(tmp_path):
    """The configs of its own tests."""
    file = tmp_path / "model_config.yaml"
    file.write_text("ENV_VARS: {A: 1}\nMODEL_ARGS:\n  --num-layers: 4\n  --swiglu: true\n  --bf16: false\n"
                    "  --split: 99,1,0\n  --save: ${PLACE}\n  --train-samples: 640\n")
    assert "it needs --global-batch-size" in megatron(str(file)).refused["--train-samples"]
    done = megatron(str(file), "train.global_batch_size=64")
    assert (done.config.model.layers, done.config.model.activation, done.config.precision.dtype) == (
        4, "swiglu", "fp32")
    assert done.config.train.steps == 10 and "--save" in done.refused
    file.write_text("- 1")
    with pytest.raises(InputError, match="has no option"):
        megatron(str(file))
    file.write_text("a: b: c")
    with pytest.raises(InputError, match="is not YAML"):
        megatron(str(file))


def test_a_launch_line_knows_its_own_options(tmp_path):
    """An unknown option that is typed is a slip of the pen; in a launch line it is another version's."""
    (tmp_path / "line").write_text("python pretrain_gpt.py --num-layers 4 --data-path2 x")
    assert "does not know" in megatron(str(tmp_path / "line")).refused["--data-path2"]


def test_megatrons_defaults():
    """Dropout of 0.1, Adam's second beta, a linear decay, no sharding: another run than the one that was
    meant."""
    done = megatron("--num-layers 2 --hidden-size 128 --num-attention-heads 4 --swiglu --fp16 --train-iters "
                    "9")
    model, optimizer = done.config.model, done.config.optimizer
    assert (model.dropout, model.attention_dropout, model.position) == (0.1, 0.1, "learned")
    assert model.ffn_hidden == 320, "8/3 x hidden rounded down to 64; threed's is rounded up"
    assert (optimizer.betas, optimizer.weight_decay, optimizer.schedule) == ([0.9, 0.999], 0.01, "linear")
    assert done.config.zero.stage == 0 and done.config.precision.initial_loss_scale == 2**32
    assert done.config.precision.grad_dtype == "fp16"
    assert all("Megatron-LM's default" in done.why[key] for key in ("model.dropout", "zero.stage"))
    assert megatron("--bf16 --train-iters 9").config.precision.grad_dtype == "fp32"


@pytest.mark.parametrize("text, values", [
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
     {"activation.policy": "full"}),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 2 --num-layers 8",
     {"activation.policy": "full", "activation.every": 4}),
    ("--recompute-activations", {"activation.policy": "selective", "activation.pieces": ["attention"]}),
    ("--recompute-granularity selective --recompute-modules core_attn layernorm",
     {"activation.pieces": ["attention", "norm"]}),
    ("--split 969,30,1", {"data.validation_fraction": 0.03}), ("--distributed-timeout-minutes 5",
                                                               {"run.timeout_s": 300.0}),
    ("--data-path 1.0 /data/a", {"data.source": "/data/a"}),
    ("--data-path 0.5 a 0.5 b", {"data.mix": ["0.5 a", "0.5 b"]}),
    ("--reset-position-ids --reset-attention-mask --eod-mask-loss", {"data.document_mask": True}),
    ("--kv-channels 32 --add-qkv-bias", {"model.head_dim": 32, "model.qkv_bias": True}),
    ("--normalization RMSNorm --qk-layernorm", {"model.qk_norm": True}),
    ("--position-embedding-type rope --use-rope-scaling", {"model.rope_scaling": [8.0, 1.0, 4.0, 8192.0]}),
    ("--use-distributed-optimizer", {"zero.stage": 1}),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero.stage": 2}),
    ("--lr-decay-style=WSD --lr-wsd-decay-iters 7 --lr-wsd-decay-style linear",
     {"optimizer.schedule": "wsd", "optimizer.wsd_decay_steps": 7}),
    ("--grad-reduce-in-bf16 --bf16", {"precision.reduce_dtype": "bf16", "precision.grad_dtype": "bf16"}),
])
def test_options(text, values):
    assert {key: megatron(text).values.get(key) for key in values} == values


@pytest.mark.parametrize("text, words", [
    ("--bf16 --fp16", "--bf16 and --fp16 contradict each other: precision.dtype would be bf16 and fp16"),
    ("--nun-layers 3", "--nun-layers is no key of Megatron-LM; did you mean --num-layers?"),
    ("--num-layers", "--num-layers needs a value"), ("--lr 1 2", "more than one value"),
    ("--num-layers abc", "model.layers=abc"), ("none.sh", "cannot be read"), ("--lr 'x", "cannot be read as"),
    ("--hidden-size 100 --num-attention-heads 8", "add KEY=VALUE to the command"),
    ("--num-layers-per-virtual-pipeline-stage 2 --num-layers 8", "pipeline-model-parallel-size above 1"),
    ("--train-iters 5 --train-samples 64 --global-batch-size 8", "contradict each other: train.steps"),
    ("--split a,b", "--split a,b"), ("--recompute-granularity most", "must be full or selective"),
    ("pretrain.py and words", "and is no option: options begin with --")])
def test_bad_options(text, words):
    with pytest.raises(InputError) as caught:
        megatron(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text, name", [
    ("--num-experts 8 --moe-token-drop-policy position --moe-expert-capacity-factor 1 --swiglu "
     "--disable-bias-linear", "--moe-token-drop-policy"),
    ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--cp-comm-type"),
    ("--fp8-format hybrid", "--fp8-format"), ("--data-path a b", "--data-path"),
    ("--qk-layernorm", "--qk-layernorm"), ("--reset-position-ids", "--reset-position-ids"),
    ("--load other --save mine", "--load"), ("--lr-decay-style inverse-square-root", "--lr-decay-style"),
    ("--lr-decay-style WSD", "--lr-wsd-decay-style"), ("--optimizer sgd", "--sgd-momentum"),
    ("--no-bias-gelu-fusion", "--no-bias-gelu-fusion"), ("--tokenizer-type Llama2Tokenizer",
                                                         "--tokenizer-type"),
                                        ("--some-new-option 4", "--some-new-option"),
    ("--max-position-embeddings 4096 --seq-length 2048", "--max-position-embeddings")])
def test_refused_options(text, name):
    """What would train another model is said, whatever else converts."""
    assert set(megatron(text).refused) == {name}


def test_off_is_nothing():
    """An option whose value asks for nothing is not refused."""
    done = megatron("--context-parallel-size 1 --expert-model-parallel-size 1 --sequence-parallel")
    assert not done.refused and not {"parallel.sequence_parallel", "parallel.cp"} & done.values.keys()


@pytest.mark.parametrize("way", ["p2p", "a2a", "all_gather", "p2p a2a"])
def test_context_parallelism(way):
    """How attention reaches whole sequences changes no number."""
    done = megatron(f"--context-parallel-size 2 --cp-comm-type {way} --seq-length 1024")
    assert done.values["parallel.cp"] == 2 and not done.refused
    assert done.config.parallel.cp_form == ("heads" if way == "a2a" else "keys")
    if way != "a2a":
        assert ("not sent by" in done.dropped["--cp-comm-type"]) == (way != "all_gather")


def test_context_parallelism_that_is_refused():
    """Groups in groups; and nothing is asked for where there is one rank."""
    done = megatron("--context-parallel-size 4 --cp-comm-type a2a+p2p --seq-length 1024")
    assert "no groups in groups" in done.refused["--cp-comm-type"]
    alone = megatron("--cp-comm-type a2a --seq-length 1024")
    assert "parallel.cp_form" not in alone.values and not alone.refused


def test_ulysses(tmp_path):
    """DeepSpeed's, in its own config and as an option of Megatron-DeepSpeed."""
    done = deepspeed(tmp_path, {"train_batch_size": 8, "sequence_parallel_size": 2}, "model.name=gpt2-small")
    assert (done.config.parallel.cp, done.config.parallel.cp_form) == (2, "heads") and not done.refused
    done = megatron("--ds-sequence-parallel-size 2 --seq-length 1024")
    assert (done.config.parallel.cp, done.config.parallel.cp_form) == (2, "heads")
    alone = deepspeed(tmp_path, {"train_batch_size": 8, "sequence_parallel_size": 1}, "model.name=gpt2-small")
    assert alone.config.parallel.cp_form == "keys"


def test_overrides_win(tmp_path):
    done = deepspeed(tmp_path, {"train_batch_size": 8, "zero_optimization": {"stage": 2}}, "zero.stage=3",
                     "model.name=gpt2-small")
    assert done.config.zero.stage == 3 and done.config.model.layers == 12
    assert "124.4M parameters" in subject.show(done)
    with pytest.raises(InputError, match="multiple of tp x pp = 2"):
        megatron("--tensor-model-parallel-size 2", devices=3)
    assert megatron("--tensor-model-parallel-size 2 --global-batch-size 8", devices=4).config.dp == 2


def test_document(tmp_path):
    """The document and the text hold the same."""
    done = deepspeed(tmp_path, DEEPSPEED["zero 3, offload"])
    document = subject.document(done)
    assert yaml.safe_load(subject.show(done)) == document["config"]
    assert all(f"{key}: " in subject.show(done) for key in (*document["dropped"], *document["refused"]))


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda each: each.name)
def test_rows(framework):
    """A row that names a key which threed has not, stands twice, or is hidden by another."""
    names = [row.theirs for row in framework.rows]
    assert len(set(names)) == len(names)
    sections = load(None).to_dict()
    keys = {*known_keys(), *(key for family in FAMILIES.values() for key in keys_of(family.config))}
    for row in framework.rows:
        assert row.key is None or row.key in keys, row
        assert row.key is not None or row.ours.startswith((NO_KEY, NOTHING)), row
        assert "*" in row.theirs or framework.row(row.theirs) is row, row
        for word in [word.strip("(),;:") for word in row.ours.split()]:
            if word.count(".") == 1 and word.split(".")[0] in sections:
                assert word.split("=")[0] in keys or word.endswith(".*"), row


@pytest.mark.parametrize("key, instead", [
    ("data_parallel_size", "use parallel.dp"), ("parallel.context_parallel_size", "use parallel.cp"),
    ("optimizer.type", "use optimizer.name"), ("offload_optimizer.pin_memory", "there is no key"),
    ("parallelism.tensor_parallel_degree", "for torchtitan's parallelism.tensor_parallel_degree use "
                                           "parallel.tp"),
    ("bf16", "for Megatron-LM's bf16 use precision.dtype=bf16"),
                                          ("bf16.enabled", "for DeepSpeed's bf16.enabled"),
    ("model.r", "for PEFT's model.r use model.lora_rank"), ("lora.lora_dropout", "there is nothing like it"),
    ("model.target_modules", "use model.lora_targets"),
    ("--num-experts", "use model.experts (with model.family=moe)"),
    ("zero_optimization.something", "use the section zero")])
def test_synonyms(key, instead):
    assert instead in (ours(key) or "")


@pytest.mark.parametrize("key", ["train.lr", "optimizer.params.lr", "checkpoint.save_every",
                                 "train.optimizer.lr",
                                 "data.min_lr", "parallel.micro_batch_size", "model.dim"])
def test_no_synonym_of_our_own_words(key):
    """Our words in another section are left to the search for names alike."""
    assert ours(key) is None


SMALL_LM = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
            "--global-batch-size 8 --lr 1e-3 --train-iters 10 ")


@pytest.mark.parametrize(("text", "ours", "refused"), [
    ("--optimizer muon --muon-scale-mode spectral --muon-extra-scale-factor 0.2 --muon-nesterov "
     "--muon-momentum 0.9 --muon-num-ns-steps 6",
     {"name": "muon", "turn_scale": "match_rms_adamw", "nesterov": True, "momentum": 0.9, "turns": 6,
      "betas": [0.9, 0.999]}, ""),
    ("--optimizer dist_muon --muon-scale-mode shape_scaling",
     {"name": "muon", "turn_scale": "original", "nesterov": False, "momentum": 0.95}, ""),
    ("--optimizer muon --muon-scale-mode unit_rms_norm", {"name": "muon"}, "unit_rms_norm"),
    ("--optimizer muon --muon-scale-mode shape_scaling --muon-tp-mode blockwise "
     "--tensor-model-parallel-size 2", {"name": "muon"}, "numbers would depend on tp"),
    ("--optimizer muon --muon-scale-mode shape_scaling --muon-tp-mode distributed "
     "--tensor-model-parallel-size 2", {"name": "muon"}, ""),
    ("--optimizer muon --muon-scale-mode shape_scaling --muon-no-split-qkv", {"name": "muon"},
     "of their own"),
    ("--optimizer adam --muon-momentum 0.9", {"name": "adamw", "momentum": 0.95}, ""),
])
def test_muon_of_megatron(text, ours, refused, tmp_path):
    done = megatron(SMALL_LM + text)
    check(done, tmp_path)
    assert {key: getattr(done.config.optimizer, key) for key in ours} == ours
    assert (refused in subject.show(done)) and bool(refused) == ("# Refused" in subject.show(done))


def test_muon_of_deepspeed(tmp_path):
    done = deepspeed(tmp_path, {"train_batch_size": 16, "optimizer": {"type": "Muon", "params": {
        "lr": 0.02, "momentum": 0.9, "adam_lr": 1e-3}}})
    check(done, tmp_path)
    optimizer = done.config.optimizer
    assert (optimizer.name, optimizer.turn_scale, optimizer.momentum) == ("muon", "original", 0.9)
    assert (optimizer.lr, optimizer.adamw_lr) == (0.02, 1e-3)
