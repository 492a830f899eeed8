"""Files that `threed convert` and `threed check` are given: DeepSpeed's JSON as hjson, other formats, numbers
as people write them, and what options do elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from threed.base.errors import ConfigError, InputError
from threed.base.quantity import whole_number
from threed.config.load import load
from threed.interop import convert as subject


def deepspeed(tmp_path: Path, text: str, name: str = "ds.json", *overrides: str) -> subject.Converted:
    (tmp_path / name).write_text(text)
    return subject.deepspeed(tmp_path / name, list(overrides))


@pytest.mark.parametrize("text", [
    '{\n  # two per step\n  "train_batch_size": 2, "zero_optimization": {"stage": 2,},\n}',
    '{"train_batch_size": 2, // so\n /* or\n so */ "zero_optimization": {"stage": 2}}',
    '{\n  train_batch_size: 2\n  zero_optimization: {\n    stage: 2\n  }\n}',
    'train_batch_size: 2\nzero_optimization: {\n stage: 2\n}',
    '{"train_batch_size": 2e0, "zero_optimization": {"stage": 2}, "steps_per_print": Infinity}'])
def test_deepspeeds_json_has_comments(text, tmp_path):
    """DeepSpeed reads its file with hjson."""
    done = deepspeed(tmp_path, text)
    assert (done.values["train.global_batch_size"], done.values["zero.stage"]) == (2, 2)


def test_a_key_twice_is_refused_among_comments(tmp_path):
    with pytest.raises(InputError, match="stage is given twice in one section"):
        deepspeed(tmp_path, '{"zero_optimization": {"stage": 1, # a\n"stage": 2}}')


@pytest.mark.parametrize("value, expected", [
    ("1e5", 100_000), ('"1e5"', 100_000), ("100000.0", 100_000), ("1E+5", 100_000), ('"7"', 7)])
def test_whole_numbers_of_deepspeed(value, expected, tmp_path):
    done = deepspeed(tmp_path, '{"train_batch_size": 1e1, "zero_optimization": {"stage": 3, '
                               f'"stage3_param_persistence_threshold": {value}}}}}')
    assert done.values["zero.persist_below"] == expected and done.values["train.global_batch_size"] == 10


@pytest.mark.parametrize("text, words", [
    ('{"train_batch_size": "8"}', "train_batch_size: '8' is text; write 8"),
    ('{"train_batch_size": 8, "gradient_accumulation_steps": "2e0"}', "'2e0' is text; write 2"),
    ('{"train_batch_size": 1.5}', "train_batch_size=1.5: must be a whole number above 0")])
def test_texts_where_numbers_must_stand(text, words, tmp_path):
    with pytest.raises(InputError) as caught:
        deepspeed(tmp_path, text)
    assert words in str(caught.value)


@pytest.mark.parametrize("override, key, expected", [
    ("train.steps=1e3", ("train", "steps"), 1000), ("checkpoint.every=1e2", ("checkpoint", "every"), 100),
    ("train.steps='1e3'", ("train", "steps"), 1000), ("parallel.dp=2e0", ("parallel", "dp"), 2),
    ("model.vocab=5.12e2", ("model", "vocab"), 512), ("train.steps=8.0", ("train", "steps"), 8)])
def test_whole_numbers_with_an_exponent(override, key, expected, tmp_path):
    """1e3 is how people write a thousand, on the command line and in a file."""
    value = getattr(getattr(load(None, [override]), key[0]), key[1])
    assert value == expected and type(value) is int
    name, _, text = override.partition("=")
    (tmp_path / "c.yaml").write_text("{}: {{{}: {}}}".format(*name.split("."), text))
    assert getattr(getattr(load(tmp_path / "c.yaml"), key[0]), key[1]) == expected


@pytest.mark.parametrize("override", ["train.steps=1.5e0", "train.steps=0.5", "train.steps=1e-3",
                                      "train.steps=1e", "train.steps=.nan", "model.layers=[1e1]"])
def test_what_is_no_whole_number_stays_refused(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load(None, [override])


def test_whole_number():
    assert [whole_number(value) for value in (True, "", "abc", "1e400", float("inf"), None, "-3", 2**60)] == [
        None, None, None, None, None, None, -3, 2**60]


@pytest.mark.parametrize("name, text, words", [
    ("t.toml", "[training]\nsteps = 3", ["torchtitan", "threed check", "docs/coming-from.md#torchtitan",
                                         "--megatron"]),
    ("job", "[training]\nsteps = 3", ["is TOML", "FILE.toml"]),
    ("m.yaml", "num-layers: 3", ["is not JSON", "threed convert --megatron FILE"]),
    ("run.sh", "torchrun pretrain_gpt.py --num-layers 3", ["is not JSON", "a list of them"])])
def test_other_formats_are_named(name, text, words, tmp_path):
    with pytest.raises(InputError) as caught:
        deepspeed(tmp_path, text, name)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("text", ["num-layers: 3\nmicro-batch-size: 2", "micro-batch-size: 2",
                                  "--num-layers: 3", "num_layers: 3\nlr: 1e-3"])
def test_options_of_megatron_as_yaml(text, tmp_path):
    """A YAML with Megatron-LM's options gets our keys, and the command that converts it, which does."""
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert f"threed convert --megatron {path} makes a config of it" in str(caught.value)
    if "micro-batch" in text:
        assert "micro-batch-size: unknown key; did you mean train.micro_batch_size?" in str(caught.value)
        assert subject.megatron(str(path), []).values["train.micro_batch_size"] == 2
    else:
        assert subject.megatron(str(path), []).values["model.layers"] == 3


def test_a_json_is_no_list():
    with pytest.raises(InputError, match=r"threed convert ds\.json says what becomes of it"):
        subject.megatron("ds.json", [])


def test_nested_options_of_megatron_as_yaml(tmp_path):
    """The form of --yaml-cfg."""
    (tmp_path / "m.yaml").write_text("language_model:\n  num_layers: 2\n  hidden_size: 64\nbf16: true\n"
                                     "lr: 1e-3\nmodel_parallel:\n  tensor_model_parallel_size: 2\n"
                                     "fp16: false\n")
    values = subject.megatron(str(tmp_path / "m.yaml"), []).values
    assert (values["model.layers"], values["parallel.tp"], values["precision.dtype"]) == (2, 2, "bf16")
    assert "--yaml-cfg" in subject.megatron("--yaml-cfg m.yaml", []).refused


EXPERTS = "--num-experts 4 --swiglu --disable-bias-linear"


@pytest.mark.parametrize("text, refused", [
    ("--exit-interval 5 --train-iters 10", "--exit-interval"), ("--no-load-optim", "--no-load-optim"),
    ("--no-initialization", "--no-initialization"), ("--use-checkpoint-args", "--use-checkpoint-args"),
    ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    ("--ckpt-step 7", "--ckpt-step"), ("--dataloader-type cyclic", "--dataloader-type"),
    ("--no-position-embedding", "--no-position-embedding"), ("--fp32-residual-connection",
                                                             "--fp32-residual-connection"),
    ("--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy"), (
        f"{EXPERTS} --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss",
        "--moe-router-load-balancing-type"),
    (f"{EXPERTS} --moe-input-jitter-eps 0.1", "--moe-input-jitter-eps"),
    (f"{EXPERTS} --moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff"),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type"),
    (f"{EXPERTS} --moe-layer-freq '[1,1,0]'", "--moe-layer-freq")])
def test_what_has_an_effect_elsewhere_is_refused(text, refused):
    """An option that is said to change nothing, and does."""
    done = subject.megatron(text, [])
    assert refused in done.refused and refused not in done.dropped


@pytest.mark.parametrize("text, dropped", [
    ("--exit-interval 10 --train-iters 10", "--exit-interval"), ("--dataloader-type single",
                                                                 "--dataloader-type"),
    (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss", "--moe-router-load-balancing-type"),
    (f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.0", "--moe-aux-loss-coeff"),
    (f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-pre-softmax", "--moe-router-pre-softmax"),
    ("--moe-router-topk 2", "--moe-router-topk"), ("--no-position-embedding --position-embedding-type rope",
                                                   "--no-position-embedding"),
    ("--exit-duration-in-mins 30000000", "--exit-duration-in-mins")])
def test_what_has_none_is_dropped(text, dropped):
    done = subject.megatron(text, [])
    assert dropped in done.dropped and not done.refused


@pytest.mark.parametrize("text, values", [
    ("--position-embedding-type rotary --rotary-position-embeddings-theta 5e5",
     {"model.position": "rotary", "model.rope_theta": 5e5}),
    ("--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 --swiglu "
     "--disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
     "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-z-loss-coeff 1e-3 "
     "--moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-3 --moe-router-num-groups 4 "
     "--moe-router-group-topk 2 --moe-shared-expert-intermediate-size 96 --moe-layer-freq 2 "
     "--moe-router-load-balancing-type none --moe-grouped-gemm --data-parallel-size 2 "
     "--moe-token-dispatcher-type alltoall",
     {"model.family": "moe", "model.experts": 8, "model.experts_per_token": 4, "model.expert_ffn_hidden": 64,
      "parallel.ep": 2, "model.norm": "rmsnorm", "model.bias": False, "model.tie_embeddings": False,
      "model.activation": "swiglu", "model.router_score": "sigmoid", "model.routed_scale": 2.5,
      "model.balance": "bias", "optimizer.balance_rate": 2e-3, "model.expert_groups": 4,
      "model.groups_per_token": 2, "model.shared_expert_ffn": 96, "model.moe_every": 2,
      "model.z_loss": 1e-3}),
    (f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-topk 1",
     {"model.router_score": "sigmoid", "model.normalize_top_k": False}),
    (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
     {"model.balance": "sequence", "model.balance_weight": 0.01}),
    (f"{EXPERTS} --moe-expert-capacity-factor 1.25 --moe-token-drop-policy probs",
     {"model.moe_capacity": 1.25}),
    (f"{EXPERTS} --moe-expert-capacity-factor -1", {"model.moe_capacity": None}),
    ("--num-experts 1 --ds-sequence-parallel-size 1 --model-parallel-size 2", {"parallel.tp": 2}),
    ("--batch-size 4", {"train.micro_batch_size": 4}),
    ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2 --num-layers 8",
     {"activation.policy": "full", "activation.every": 4}),
    ("--checkpoint-activations --checkpoint-num-layers 2 --num-layers 8 --partition-activations "
     "--tensor-model-parallel-size 2",
     {"activation.policy": "full", "parallel.layers_per_unit": 2, "activation.partition": True}),
    ("--train-iters 100 --train-tokens 640 --global-batch-size 2 --seq-length 32", {"train.steps": 10}),
    ("--train-iters 5 --train-tokens 640 --global-batch-size 2 --seq-length 32", {"train.steps": 5}),
    ("--use-tp-pp-dp-mapping", {"parallel.axis_order": "dp-pp-tp"})])
def test_older_names_and_those_of_megatron_deepspeed(text, values):
    done = subject.megatron(text, [])
    assert {key: done.values.get(key) for key in values} == values and not done.refused


def test_a_duration_ends_a_job():
    assert subject.megatron("--exit-duration-in-mins 230", []).values["run.stop_after"] == "230m"


def test_effects_of_deepspeeds_keys(tmp_path):
    done = deepspeed(tmp_path, '{"train_batch_size": 2, "fp32_allreduce": true, "bf16": {"enabled": true}, '
                               '"autotuning": {"enabled": true}, "optimizer": {"type": "Adam", "params": '
                               '{"lr": 1, "bias_correction": false}}, "wandb": {"enabled": true, '
                               '"team": "x"}}')
    assert {"autotuning", "optimizer.params.bias_correction"} <= set(done.refused)
    assert done.values["precision.reduce_dtype"] == "fp32" and "WANDB_ENTITY" in done.dropped["wandb.team"]


@pytest.mark.parametrize("true, false", [("True", "False"), ('"true"', '"False"'), ("1", "0")])
def test_true_as_people_write_it(true, false, tmp_path):
    """A text that is read as true by one row and not by another converts half of a section."""
    text = f'{{"fp16": {{"loss_scale": 8,\n"enabled": {true}\n}},\n"bf16": {{\n"enabled": {false}\n}}}}'
    done = deepspeed(tmp_path, text)
    assert done.values["precision.dtype"] == "fp16" and done.values["precision.loss_scale"] == 8
    assert done.values["precision.reduce_dtype"] == "fp16"


PARALLEL = {"autotp_size": 2}


@pytest.mark.parametrize("values, expected", [
    ({"tensor_parallel": PARALLEL | {"preset_model": "llama"}}, {"parallel.tp": 2}),
    ({"tensor_parallel": PARALLEL | {"partition_config": {"use_default_specs": False, "layer_specs": [
        {"patterns": ["o_proj"], "partition_type": "row"}]}}}, {"parallel.tp": 2}),
    ({"tensor_parallel": PARALLEL | {"tp_overlap_comm": True, "dtype": "bf16", "keep_module_on_host": False}},
     {"parallel.tp": 2}),
    ({"tensor_parallel": {"tp": {"tp_size": 2, "tp_grain_size": 64}}}, {"parallel.tp": 2}),
    ({"tensor_parallel": {"autotp_size": 0}}, {"parallel.tp": None}),
    ({"zero_optimization": {"stage": 3, "param_persistence_threshold": 1e4, "prefetch_bucket_size": 5e7,
                            "max_live_parameters": 1e9, "allgather_sequential": True}},
     {"zero.persist_below": 10_000}),
    ({"bf16": {"enabled": True, "check_overflow": True}}, {"train.on_nonfinite": "skip"}),
    ({"gradient_allreduce_op": "mean", "log_level": "info", "managed_gradient_accumulation": True}, {}),
    ({"checkpoint": {"writer": {"type": "fast"}, "load_universal": True}}, {}),
    ({"optimizer": {"type": "Adam", "legacy_fusion": True, "params": {"fused": True, "foreach": False}}},
     {"optimizer.name": "adamw"})])
def test_keys_of_deepspeed_that_were_not_known(values, expected, tmp_path):
    done = deepspeed(tmp_path, json.dumps({"train_micro_batch_size_per_gpu": 1,
                                           "gradient_accumulation_steps": 2} | values))
    assert {key: done.values.get(key) for key in expected} == expected and not done.refused
    assert subject.deepspeed(tmp_path / "ds.json", [], 4).config.dp == 4 // (expected.get("parallel.tp") or 1)


@pytest.mark.parametrize("values, key, words", [
    ({"expert_parallel": {"enabled": True, "ep_size": 4}}, "expert_parallel.ep_size", "it is parallel.ep"),
    ({"expert_parallel": {"enabled": True, "num_experts": 8}}, "expert_parallel.num_experts",
     "it is model.experts"),
    ({"moe": {"enabled": True, "ep_size": 4}}, "moe.ep_size", "model.experts and parallel.ep"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "not a sum over ranks"),
    ({"tensor_parallel": {"enabled": True}}, "tensor_parallel.enabled", "does not know"),
    ({"monitor": {"enabled": True}}, "monitor.enabled", "does not know")])
def test_no_other_section_is_blamed(values, key, words, tmp_path):
    """A key that is alike in another section is no slip of the pen."""
    done = deepspeed(tmp_path, json.dumps({"train_batch_size": 8} | values))
    assert words in done.refused[key]


@pytest.mark.parametrize("values, words", [
    ({"zero_optimisation": {"stage": 2}}, "did you mean zero_optimization.stage?"),
    ({"fp16": {"enabeld": True}}, "did you mean fp16.enabled?"),
    ({"optimiser": {"type": "Adam"}}, "did you mean optimizer.type?"),
    ({"zero_optimization": {"stage3_prefetch_bucket_siz": 2}}, "did you mean stage3_prefetch_bucket_size?")])
def test_slips_of_the_pen_in_a_section(values, words, tmp_path):
    with pytest.raises(InputError) as caught:
        deepspeed(tmp_path, json.dumps(values))
    assert words in str(caught.value)
