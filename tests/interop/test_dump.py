"""The dump of arguments at the begin of a log of Megatron-LM: what was given converts as the list of it, and
what has its default is no line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from threed.interop import convert as subject

# All arguments of Megatron-LM 0.15 for LLAMA on 8 ranks, in the form in which it prints them.
LOG = (Path(__file__).parents[1] / "golden" / "megatron-llama.log").read_text()
BEGIN, END = LOG.splitlines()[0], LOG.splitlines()[-1]
LLAMA = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
         "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 "
         "--train-iters 100 --lr-decay-style cosine "
         "--lr-warmup-fraction 0.1 --swiglu --disable-bias-linear --normalization RMSNorm "
         "--position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
         "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --vocab-size 512 "
         "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 --split 99,1,0")
MIXTRAL = (" --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --expert-model-parallel-size 2 "
           "--moe-grouped-gemm --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 "
           "--moe-token-dispatcher-type alltoall --moe-layer-freq ([0]*1+[1]*3)")
OF_MIXTRAL = {"num_experts": 8, "moe_ffn_hidden_size": 96, "expert_model_parallel_size": 2,
              "moe_grouped_gemm": True, "moe_router_load_balancing_type": "seq_aux_loss",
              "moe_aux_loss_coeff": 0.01, "moe_token_dispatcher_type": "alltoall",
              "moe_layer_freq": [0, 1, 1, 1]}


def line(name: str, value: Any) -> str:
    return "  {} {} {}".format(name, "." * (48 - len(name)), value)


def log(**changed: Any) -> str:
    text = LOG
    for name, value in ({"split": "99,1,0"} | changed).items():
        text, count = re.subn(rf"^  {name} \.* .*$", line(name, value), text, flags=re.MULTILINE)
        text = text if count else text.replace(END, f"{line(name, value)}\n{END}")
    return text


def convert(tmp_path: Path, text: str, *overrides: str, devices: int | None = None,
            name: str = "train.log") -> subject.Converted:
    (tmp_path / name).write_text(text)
    return subject.megatron(str(tmp_path / name), list(overrides), devices)


@pytest.mark.parametrize("options, changed", [("", {}), (MIXTRAL, OF_MIXTRAL)], ids=["llama", "mixtral"])
def test_a_dump_converts_as_the_list(options, changed, tmp_path):
    dump = convert(tmp_path, log(**changed))
    arguments = subject.megatron(LLAMA + options, [], 8)
    assert {key: dump.values[key] for key in arguments.values} == arguments.values
    assert dump.refused == arguments.refused == {} and dump.notes == arguments.notes
    assert set(dump.dropped) == set(arguments.dropped) and not dump.missing
    assert dump.config.model == arguments.config.model and dump.config.parallel == arguments.config.parallel
    assert dump.config.precision == arguments.config.precision and dump.config.dp == 4


@pytest.mark.parametrize("before", [
    "0: ", " 3: ", "[default0]:", "[rank0]: ", "[1,0]<stdout>:", "2026-01-02 03:04:05,678 | INFO | ",
    "[2026-01-02 03:04:05] node1: ", "(worker pid=77) ", "\x1b[36m(pid=77)\x1b[0m ", "\t"])
def test_prefixes_of_lines(before, tmp_path):
    text = "\n".join(before + each for each in ["building ... done", *log().splitlines(), "step 1 ... ok"])
    done = convert(tmp_path, text)
    assert done.values == convert(tmp_path, log()).values and not done.refused


@pytest.mark.parametrize("name, value, key, expected", [
    ("add_bias_linear", True, "model.bias", None), ("untie_embeddings_and_output_weights", False,
                                                    "model.tie_embeddings", None),
    ("hidden_dropout", 0.1, "model.dropout", 0.1), ("clip_grad", 0.0, "optimizer.clip_grad", 0.0),
    ("adam_eps", "1e-05", "optimizer.eps", 1e-5), ("seed", 0, "train.seed", 0),
    ("attention_backend", "AttnBackend.flash", "run.attention_backend", "flash"),
    ("attention_backend", "<AttnBackend.fused: 2>", "run.attention_backend", "cudnn"),
    ("data_path", "['0.3', 'a', '0.7', 'b']", "data.mix", ["0.3 a", "0.7 b"]),
    ("kv_channels", 32, "model.head_dim", 32), ("ffn_hidden_size", 512, "model.ffn_hidden", 512),
    ("recompute_granularity", "full", "activation.policy", "full"), ("data_parallel_size", 2, "parallel.dp",
                                                                     2),
    ("scatter_gather_tensors_in_pipeline", False, "parallel.split_messages", False),
    ("wandb_project", "", "monitor.project", None), ("lr_warmup_iters", 7, "optimizer.warmup_steps", 7),
    ("train_iters", "100", "train.steps", 100)])
def test_values_of_a_dump(name, value, key, expected, tmp_path):
    more = {"lr_warmup_fraction": None} if name == "lr_warmup_iters" else {}
    done = convert(tmp_path, log(**{name: value, **more}))
    assert done.values.get(key) == expected and not done.refused


@pytest.mark.parametrize("name, value, refused", [
    ("fp8", "hybrid", "--fp8"),
    ("hierarchical_context_parallel_sizes", "[2, 2]", "--hierarchical-context-parallel-sizes"),
    ("some_new_argument", "fast", "--some-new-argument"), ("some_new_number", 3, "--some-new-number"),
    ("perform_initialization", False, "--no-initialization"), ("mtp_num_layers", 1, "--mtp-num-layers"),
    ("multi_latent_attention", True, "--multi-latent-attention"),
    ("clone_scatter_output_in_embedding", False, "--clone-scatter-output-in-embedding"),
    ("rampup_batch_size", "[16, 16, 5859375]", "--rampup-batch-size"), ("fim_data", True, "--fim-data"),
    ("end_weight_decay", 0.1, "--end-weight-decay"), ("retro_add_retriever", True, "--retro-add-retriever"),
    ("expert_tensor_parallel_size", 4, None), ("softmax_type", "off-by-one", "--softmax-type"),
    ("a_new_argument_with_a_name_that_is_longer_than_its_column", 3,
     "--a-new-argument-with-a-name-that-is-longer-than-its-column")])
def test_what_differs_and_is_missing_is_a_line(name, value, refused, tmp_path):
    assert set(convert(tmp_path, log(**{name: value})).refused) == ({refused} if refused else set())


@pytest.mark.parametrize("name, value", [
    ("async_strategy", "mcore"), ("iteration", 400), ("consumed_train_samples", 6400), ("rank", 7),
    ("inference_max_batch_size", 64), ("rl_prompts_per_eval", 9), ("rerun_mode", "disabled"),
    ("exit_signal", "Signals.SIGTERM"), ("model_type", "ModelType.encoder_or_decoder"),
    ("params_dtype", "torch.float32"), ("dino_teacher_temp", 0.2)])
def test_what_says_nothing_is_no_line(name, value, tmp_path):
    done = convert(tmp_path, log(**{name: value}))
    assert done.values == convert(tmp_path, log()).values and not done.refused


def test_a_vocabulary_that_the_log_says(tmp_path):
    text = log(vocab_size=None, tokenizer_type="HuggingFaceTokenizer")
    assert "model.vocab" in convert(tmp_path, text).missing
    done = convert(tmp_path, f"{text}\n > padded vocab (size: 32000) with 0 dummy tokens (new size: 32000)")
    assert done.values["model.vocab"] == 32000 and not done.missing
    assert convert(tmp_path, log(vocab_size=None, padded_vocab_size=512)).values["model.vocab"] == 512


def test_logs_of_several_starts_and_of_half_a_one(tmp_path):
    done = convert(tmp_path, f"{log(train_iters=5)}\nsteps\n{log()}\nsteps")
    assert done.values["train.steps"] == 100
    assert done.notes == ["the log has the arguments of 2 starts: those of the last are taken"]
    done = convert(tmp_path, log().partition("  vocab_size")[0])
    assert "the arguments end with vocab_file" in done.notes[0] and done.missing == ["model.vocab"]
    bare = "\n".join(log().splitlines()[1:-1])
    assert convert(tmp_path, bare).values == convert(tmp_path, log()).values


def test_devices_win_over_the_log(tmp_path):
    assert convert(tmp_path, log()).config.dp == 4
    assert convert(tmp_path, log(), devices=16).config.dp == 8
    assert convert(tmp_path, log(data_parallel_size=None)).config.dp == 4  # of world_size
    assert convert(tmp_path, log(), "optimizer.lr=1").config.optimizer.lr == 1


def test_a_dump_of_megatron_deepspeed(tmp_path):
    """Its options of experts have defaults of their own, and switches that switch off."""
    changed = {"deepspeed": True, "zero_stage": 2.0, "topk": 2, "expert_interval": 1, "num_experts": "[8]",
               "moe_expert_parallel_size": 2, "moe_loss_coeff": 0.0, "moe_token_dropping": False,
               "moe_top2_2nd_expert_sampling": False, "mlp_type": "standard", "num_key_value_heads": 4,
               "ds_sequence_parallel_size": 1, "moe_train_capacity_factor": 1.0, "use_distributed_optimizer":
               False}
    done = convert(tmp_path, log(**changed))
    assert not done.refused
    assert (done.values["model.experts"], done.values["parallel.ep"], done.values["zero.stage"]) == (8, 2, 2)
    done = convert(tmp_path, log(**changed | {"moe_token_dropping": True}))
    assert set(done.refused) == {"--moe-train-capacity-factor"}


@pytest.mark.parametrize("text, values, refused", [
    ("model: {num_layers: 4, num_moe_experts: 8, add_bias_linear: false, gated_linear_unit: true, "
     "activation_func: torch.nn.functional.silu}\nmixed_precision: bf16_mixed",
     {"model.layers": 4, "model.experts": 8, "model.activation": "swiglu", "precision.dtype": "bf16"}, set()),
    ("num_layers: 4\nmixed_precision: bf16_with_fp8_mixed", {"model.layers": 4}, {"--mixed-precision"}),
    ("params_dtype: torch.bfloat16", {"precision.dtype": "bf16"}, set()),
    ("bf16: true\nparams_dtype: torch.float32", {"precision.dtype": "bf16"}, set()),
    ("share_embeddings_and_output_weights: false", {"model.tie_embeddings": False}, set()),
    ("layernorm_epsilon: 1e-6\nrotary_base: 500000\nposition_embedding_type: rope",
     {"model.norm_eps": 1e-6, "model.rope_theta": 500000}, set()),
    ("virtual_pipeline_model_parallel_size: 2\npipeline_model_parallel_size: 2\nnum_layers: 8",
     {"parallel.virtual_stages": 2}, set()),
    ("dataset: {sequence_length: 64, random_seed: 5}", {"model.seq_len": 64}, {"--random-seed"}),
    ("num_layers: 4\nnovelty: 3\nother: {deep: [1]}\noff: false\nnone: null", {"model.layers": 4},
     {"--novelty", "--deep"}),
    ("train: {train_iters: 5, eval_interval: 1000}\noptimizer: {lr: 1e-4, weight_decay: 0.0}",
     {"train.steps": 5, "train.eval_every": 1000, "optimizer.weight_decay": 0.0}, set()),
    ("language_model: {activation_func: swiglu, layernorm_zero_centered_gamma: true}",
     {"model.activation": "swiglu"}, set()), ("model.num_layers: 3", {"model.layers": 3}, set()),
    ("save: ${HOME}/x\ntensorboard_dir: $T\nlr: 1", {"optimizer.lr": 1}, {"--save"})])
def test_a_yaml_of_arguments(text, values, refused, tmp_path):
    """Each key that is not understood is a line, as an option of a list is."""
    done = convert(tmp_path, text, name="bridge.yaml")
    assert {key: done.values.get(key) for key in values} == values and set(done.refused) == refused


def test_a_key_of_a_yaml_in_two_sections(tmp_path):
    done = convert(tmp_path, "a: {seed: 1, lr: 1}\nb: {seed: 2, lr: 1}", name="two.yaml")
    assert done.notes == ["seed is given as 1 and 2: the last is taken"] and done.values["train.seed"] == 2
