"""Megatron-LM's options, and what each is here.

Defaults are those of megatron/training/arguments.py, megatron/training/config and
megatron/core/optimizer/optimizer_config.py.
"""

from __future__ import annotations

from typing import Any

from threed.doors.megatron_rest import WITHOUT_VALUE
from threed.doors.table import NO_KEY, NOTHING, Dropped, Framework, Given, Refused, Row
from threed.errors import InputError

DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_GPT2_VOCABULARY = 50257
_SHAPES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}
_BACKENDS = {"auto": "auto", "flash": "flash", "fused": "cudnn"}
_PIECES = {"core_attn": "attention", "layernorm": "norm"}
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _number(given: Given, name: str) -> int:
    """A size that another option's value depends on."""
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"--{name.replace('_', '-')} must be given, as a whole number above 0" +
                         ("" if value is None else f", and it is {value}"))
    return value


def _one_of(names: dict[str, Any], what: str):
    def take(value: Any, _: Given) -> Any:
        if value not in names:
            raise Refused(f"threed has no {what} like {value}")
        return names[value]

    return take


def _dp(_: Any, given: Given) -> Any:
    """From torchrun's options, unless --devices says it."""
    if given["dp"] is not None:
        return {"parallel.dp": given["dp"]}
    world = _number(given, "nproc_per_node") * _number(given, "nnodes") if "nnodes" in given else _number(
        given, "nproc_per_node")
    others = given.get("tensor_model_parallel_size", 1) * given.get("pipeline_model_parallel_size", 1)
    if world % others:
        raise Dropped(f"{world} processes are not a multiple of tp x pp = {others}: parallel.dp stays auto; "
                      "give --devices")
    return {"parallel.dp": world // others}


def _steps_of(samples: Any, given: Given) -> int:
    return round(samples / _number(given, "global_batch_size"))


def _warm_up_share(value: Any, given: Given) -> int:
    name = next((name for name in ("lr_decay_iters", "train_iters") if name in given), None)
    if name is not None:
        return round(value * _number(given, name))
    name = next((name for name in ("lr_decay_samples", "train_samples") if name in given), "train_iters")
    return round(value * _number(given, name) / _number(given, "global_batch_size"))


def _virtual(stages: int | None, given: Given) -> dict[str, Any]:
    if given.get("pipeline_model_parallel_size", 1) == 1:
        raise InputError("virtual pipeline stages need --pipeline-model-parallel-size above 1")
    if stages == 1:
        return {}
    return {"parallel.schedule": "interleaved", "parallel.virtual_stages": stages}


def _layers_per_stage(value: Any, given: Given) -> dict[str, Any]:
    layers, positions = _number(given, "num_layers"), given.get("pipeline_model_parallel_size", 1)
    if layers % (positions * value):
        raise InputError(f"--num-layers={layers} is not a multiple of "
                         f"--pipeline-model-parallel-size={positions}"
                         f" x --num-layers-per-virtual-pipeline-stage={value}")
    return _virtual(layers // (positions * value), given)


def _distributed(value: Any, given: Given) -> Any:
    if given.get("use_megatron_fsdp"):
        raise Dropped("--data-parallel-sharding-strategy says what is sharded")
    return 1


def _sequence_parallel(value: Any, given: Given) -> Any:
    if given.get("tensor_model_parallel_size", 1) == 1:
        raise Dropped("Megatron-LM turns it off, too, where tensor-model-parallel-size is 1")
    return True


def _recompute(value: Any, given: Given) -> dict[str, Any]:
    if value == "selective":
        pieces = given.get("recompute_modules", ["core_attn"])
        strange = [piece for piece in pieces if piece not in _PIECES]
        if strange:
            raise Refused(f"threed computes attention, norm and mlp_act again (activation.pieces), not "
                          f"{', '.join(strange)}")
        return {"activation.policy": "selective", "activation.pieces": [_PIECES[piece] for piece in pieces]}
    if value != "full":
        raise InputError(f"--recompute-granularity {value}: must be full or selective")
    count = given.get("recompute_num_layers", 1)
    if given.get("recompute_method", "uniform") == "uniform":
        per_unit = {"parallel.layers_per_unit": count} if count > 1 else {}
        return {"activation.policy": "full", **per_unit}
    layers = _number(given, "num_layers") // given.get("pipeline_model_parallel_size", 1)
    if count < layers and layers % count:
        raise Refused(f"{count} of the {layers} layers of a stage: activation.every recomputes all, or every "
                      "second, third ...; activation.policy=budget recomputes as few as fit")
    return {"activation.policy": "full", **({"activation.every": layers // count} if count < layers else {})}


def _positions(value: Any, given: Given) -> Any:
    length = given.get("seq_length")
    if given["position_embedding_type"] == "learned_absolute" and length is not None and value != length:
        raise Refused(f"a table of {value} positions for sequences of {length}: here it has as many rows as "
                      "a sequence has tokens")
    raise Dropped("there are as many positions as a sequence has tokens")


def _qk_norm(value: Any, given: Given) -> Any:
    if given.get("normalization") != "RMSNorm":
        raise Refused("norms of queries and keys are RMS norms here, with a weight and without a bias")
    return True


def _rope_scaling(value: Any, given: Given) -> Any:
    """Megatron-LM's numbers are those of Llama 3.1, but the factor."""
    if given["position_embedding_type"] != "rope":
        raise Dropped("positions are not rotary")
    return [float(given.get("rope_scaling_factor", 8)), 1.0, 4.0, 8192.0]


def _of_rotary(value: Any, given: Given) -> Any:
    if given["position_embedding_type"] != "rope":
        raise Dropped("positions are not rotary")
    return float(value)


def _whole_share(value: Any, given: Given) -> Any:
    if value != 1:
        raise Refused(f"all of a head is rotated, not {value} of it")
    raise Dropped("all of a head is rotated")


def _groups(value: Any, given: Given) -> Any:
    if not given.get("group_query_attention"):
        raise Dropped("without --group-query-attention Megatron-LM does not read it")
    return value


def _vocabulary(_: Any, given: Given) -> Any:
    """The size of GPT-2's vocabulary, where a file or a name says that it is GPT-2's."""
    kind = given.get("tokenizer_type", "GPT2BPETokenizer")
    if "vocab_size" in given or kind == "NullTokenizer":
        raise Dropped("--vocab-size says it")
    if kind == "GPT2BPETokenizer":
        return {"model.vocab": _GPT2_VOCABULARY}
    raise Refused("the vocabulary's size is in the tokenizer: set model.vocab")


def _tokenizer(value: Any, given: Given) -> Any:
    if str(value).endswith("tokenizer.json"):
        return value
    raise Dropped("data that are tokens already need none; for text, data.tokenizer takes a tokenizer.json")


def _source(value: Any, given: Given) -> Any:
    names = [each for each in value if not isinstance(each, (int, float))]
    if len(names) == 1:
        return str(names[0])
    if len(value) != 2 * len(names) or names != value[1::2]:
        raise Refused("several sources without weights are taken by their sizes: give data.mix weights")
    return {"data.mix": [f"{weight} {name}" for weight, name in zip(value[::2], names, strict=True)]}


def _documents(value: Any, given: Given) -> Any:
    if missing := [name for name in DOCUMENTS if not given.get(name)]:
        raise Refused(f"data.document_mask does all three of {', '.join(DOCUMENTS)}; not given: "
                      f"{', '.join(missing)}")
    return True


def _held_out(value: Any, given: Given) -> Any:
    try:
        train, valid, *test = (float(each) for each in str(value).replace(" ", "").split(","))
        return round(valid / (train + valid + sum(test)), 6)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"--split {value}: give three shares, such as 969,30,1") from None


def _eval_every(value: Any, given: Given) -> Any:
    shares = str(given.get("split", "1,1")).split(",")
    if given.get("eval_iters") == 0 or not given.get("eval_iters", 1) or (
            len(shares) > 1 and float(shares[1] or 0) == 0):
        raise Dropped("there is nothing to evaluate: --eval-iters or the second share of --split is 0")
    return value


def _eval_batches(value: Any, given: Given) -> Any:
    if not value:
        raise Dropped("nothing is evaluated")
    return value


def _resume(value: Any, given: Given) -> Any:
    if value == given.get("save"):
        raise Dropped("train.resume=auto goes on from run.dir, which --save names")
    raise Refused("threed does not read checkpoints of Megatron-LM")


def _of_fp16(convert: Any = lambda value: value):
    def take(value: Any, given: Given) -> Any:
        if not given.get("fp16"):
            raise Dropped("--fp16 is not given")
        if "loss_scale" in given:
            raise Dropped("--loss-scale fixes the scale")
        return convert(value)

    return take


def _fixed_scale(value: Any, given: Given) -> Any:
    if not given.get("fp16"):
        raise Dropped("--fp16 is not given")
    return value


def _decay_of_wsd(value: Any, given: Given) -> Any:
    if given.get("lr_decay_style") != "WSD":
        raise Dropped("--lr-decay-style is not WSD")
    if value != "linear":
        raise Refused(f"wsd decays linearly here, not by {value} (Megatron-LM's default is exponential)")
    return {}


def _gradients(dtype: str):
    return lambda _, given: {"precision.grad_dtype": dtype, "precision.reduce_dtype": dtype}


def _instances(value: Any, given: Given) -> Any:
    dp = given["dp"]
    if value == 1:
        return {}
    if dp is None or dp % value:
        raise Refused("zero.shard_size is parallel.dp / it: give --devices")
    return dp // value


_ONE = (1,)
ROWS = (
    # Mesh
    Row("tensor_model_parallel_size", "parallel.tp"),
    Row("pipeline_model_parallel_size", "parallel.pp"),
    Row("nproc_per_node", "parallel.dp (auto: what the number of ranks leaves)", _dp),
    Row("nnodes", "parallel.dp (auto: what the number of ranks leaves)", _dp),
    Row("data_parallel_size", "parallel.dp (auto: what the number of ranks leaves)"),
    Row("num_layers_per_virtual_pipeline_stage",
        "parallel.virtual_stages with parallel.schedule=interleaved", _layers_per_stage),
    Row("num_virtual_stages_per_pipeline_rank",
        "parallel.virtual_stages with parallel.schedule=interleaved", _virtual),
    Row("sequence_parallel", "parallel.sequence_parallel=true", _sequence_parallel),
    Row("context_parallel_size", NOTHING + "threed does not cut the sequence of attention", None, _ONE),
    Row("expert_model_parallel_size", NOTHING + "threed has no experts", None, _ONE),
    Row("expert_tensor_parallel_size", NOTHING + "threed has no experts", None, _ONE),
    # ZeRO
    Row("use_distributed_optimizer", "zero.stage=1", _distributed),
    Row("use_megatron_fsdp", NO_KEY + "zero.stage alone says it"),
    Row("data_parallel_sharding_strategy", "zero.stage", _one_of(_SHARDED, "sharding")),
    Row("use_torch_fsdp2", "zero.stage=3"),
    Row("num_distributed_optimizer_instances", "zero.shard_size", _instances),
    # Model
    Row("num_layers", "model.layers"),
    Row("hidden_size", "model.hidden"),
    Row("ffn_hidden_size", "model.ffn_hidden"),
    Row("num_attention_heads", "model.heads"),
    Row("num_query_groups", "model.kv_heads", _groups),
    Row("group_query_attention", NO_KEY + "model.kv_heads alone says it"),
    Row("kv_channels", "model.head_dim"),
    Row("add_qkv_bias", "model.qkv_bias=true"),
    Row("qk_layernorm", "model.qk_norm=true (RMS norms)", _qk_norm),
    Row("use_rope_scaling", "model.rope_scaling=[8,1,4,8192] (8 is --rope-scaling-factor)", _rope_scaling),
    Row("rope_scaling_factor", NO_KEY + "the first number of model.rope_scaling"),
    Row("seq_length", "model.seq_len"),
    Row("max_position_embeddings", NO_KEY + "model.seq_len", _positions),
    Row("swiglu", "model.activation=swiglu"),
    Row("normalization", "model.norm", _one_of({"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "norm")),
    Row("norm_epsilon", "model.norm_eps"),
    Row("layernorm_epsilon", "model.norm_eps"),
    Row("apply_layernorm_1p", NO_KEY + "a norm's weight is stored as it is, not less 1"),
    Row("position_embedding_type", "model.position", _one_of(_POSITIONS, "positions")),
    Row("use_rotary_position_embeddings", "model.position=rotary"),
    Row("rotary_base", "model.rope_theta", _of_rotary),
    Row("rotary_percent", NO_KEY + "all of a head is rotated", _whole_share),
    Row("no_position_embedding", NO_KEY + "model.position=rotary has no table of positions"),
    Row("disable_bias_linear", "model.bias=false"),
    Row("untie_embeddings_and_output_weights", "model.tie_embeddings=false"),
    Row("make_vocab_size_divisible_by",
        "model.vocab_multiple (it x parallel.tp gives the same padding)", lambda value, given: value *
        given.get("tensor_model_parallel_size", 1)),
    Row("vocab_size", "model.vocab"),
    Row("vocab_file", NO_KEY + "model.vocab is a number", _vocabulary),
    Row("merge_file", NO_KEY + "model.vocab is a number", _vocabulary),
    Row("hidden_dropout", "model.dropout"),
    Row("attention_dropout", "model.attention_dropout"),
    Row("init_method_std", "model.init_std"),
    Row("attention_backend", "run.attention_backend", _one_of(_BACKENDS, "backend of attention")),
    Row("cross_entropy_loss_fusion", "model.loss_chunk=1024 (tokens at a time)"),
    Row("calculate_per_token_loss", NO_KEY + "the loss is the mean over the tokens of the global batch"),
    # Memory
    Row("recompute_granularity", "activation.policy", _recompute),
    Row("recompute_activations",
        "activation.policy=selective", lambda _, given: _recompute("selective", given)),
    *(Row(name, NO_KEY + "activation.policy, with activation.every, activation.pieces, "
                         "parallel.layers_per_unit")
      for name in ("recompute_method", "recompute_num_layers", "recompute_modules")),
    Row("distribute_saved_activations", "activation.partition=true"),
    Row("optimizer_cpu_offload", "offload.optimizer=cpu"),
    Row("optimizer_offload_fraction",
        "offload.ratio", lambda value, given: value if given.get("optimizer_cpu_offload") else {}),
    # Precision
    Row("bf16", "precision.dtype=bf16"),
    Row("fp16", "precision.dtype=fp16"),
    Row("accumulate_allreduce_grads_in_fp32", "precision.grad_dtype=fp32", _gradients("fp32")),
    Row("grad_reduce_in_bf16", "precision.reduce_dtype=bf16 with precision.grad_dtype", _gradients("bf16")),
    Row("main_grads_dtype",
        "precision.grad_dtype with precision.reduce_dtype", lambda value, given: _gradients(value)(value,
        given)),
    Row("loss_scale", "precision.loss_scale (dynamic, or a number)", _fixed_scale),
    Row("initial_loss_scale", "precision.initial_loss_scale", _of_fp16(float)),
    Row("min_loss_scale", "precision.min_loss_scale", _of_fp16(float)),
    Row("loss_scale_window", "precision.loss_scale_window", _of_fp16(int)),
    Row("hysteresis", "precision.hysteresis", _of_fp16()),
    # Optimizer
    Row("optimizer", "optimizer.name", _one_of({"adam": "adamw", "sgd": "sgd"}, "optimizer")),
    Row("sgd_momentum", NOTHING + "threed's sgd has no momentum"),
    Row("lr", "optimizer.lr"),
    Row("min_lr", "optimizer.min_lr"),
    Row("adam_beta1", "optimizer.betas", lambda value, given: [given["adam_beta1"], given["adam_beta2"]]),
    Row("adam_beta2", "optimizer.betas", lambda value, given: [given["adam_beta1"], given["adam_beta2"]]),
    Row("adam_eps", "optimizer.eps"),
    Row("weight_decay", "optimizer.weight_decay"),
    Row("clip_grad", "optimizer.clip_grad"),
    Row("lr_decay_style", "optimizer.schedule", _one_of(_SHAPES, "schedule of the learning rate")),
    Row("lr_decay_iters", "optimizer.decay_steps"),
    Row("lr_decay_samples", "optimizer.decay_steps (samples / train.global_batch_size)", _steps_of),
    Row("lr_warmup_iters", "optimizer.warmup_steps"),
    Row("lr_warmup_fraction", "optimizer.warmup_steps (a share of the decay's steps there)", _warm_up_share),
    Row("lr_warmup_samples", "optimizer.warmup_steps (samples / train.global_batch_size)", _steps_of),
    Row("lr_warmup_init", NOTHING + "warm-up begins at 0"),
    Row("lr_wsd_decay_iters", "optimizer.wsd_decay_steps"),
    Row("lr_wsd_decay_style", NO_KEY + "wsd decays linearly", _decay_of_wsd),
    # Training and data
    Row("global_batch_size", "train.global_batch_size"),
    Row("micro_batch_size", "train.micro_batch_size"),
    Row("train_iters", "train.steps"),
    Row("train_samples", "train.steps (samples / train.global_batch_size)", _steps_of),
    Row("seed", "train.seed"),
    Row("eval_interval", "train.eval_every", _eval_every),
    Row("eval_iters", "train.eval_batches", _eval_batches),
    Row("data_path", "data.source (data.mix for several)", _source),
    *(Row(name, "data.document_mask=true", _documents) for name in DOCUMENTS),
    Row("sft", "data.loss_mask=chat"),
    Row("split", "data.validation_fraction (the second share; nothing is kept for a test)", _held_out),
    Row("tokenizer_model", "data.tokenizer", _tokenizer),
    Row("tokenizer_type", NO_KEY + "data.tokenizer is a tokenizer.json", _vocabulary),
    Row("mock_data", NOTHING + "give data.source text or tokens"),
    # Running
    Row("save", "run.dir"),
    Row("load", "train.resume", _resume),
    Row("save_interval", "checkpoint.every"),
    Row("async_save", "checkpoint.background=true"),
    Row("log_interval", "monitor.console_every"),
    Row("wandb_project", "monitor.project"),
    Row("wandb_exp_name", "monitor.name"),
    Row("distributed_timeout_minutes", "run.timeout_s (seconds)", lambda value, given: 60.0 * value),
    Row("deterministic_mode", "run.deterministic=true"),
    Row("enable_cuda_graph", "run.cuda_graphs=true"),
    *WITHOUT_VALUE,
)


def defaults(given: Given) -> dict[str, Any]:
    """What Megatron-LM takes for options that are not given."""
    values: dict[str, Any] = {
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.01, "clip_grad": 1.0,
        "hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02, "norm_epsilon": 1e-5,
        "lr_decay_style": "linear", "min_lr": 0.0, "make_vocab_size_divisible_by": 128, "seed": 1234,
        "position_embedding_type": "rope" if "use_rotary_position_embeddings" in given
                              else "learned_absolute",
        "data_parallel_sharding_strategy": "no_shard"}
    if given.get("use_megatron_fsdp"):
        values["data_parallel_sharding_strategy"] = "optim_grads_params"
    elif "use_distributed_optimizer" in given or "use_torch_fsdp2" in given:
        del values["data_parallel_sharding_strategy"]
    if "layernorm_epsilon" in given:
        del values["norm_epsilon"]
    if "eval_interval" in given:
        values["eval_iters"] = 100
    if given.get("swiglu") and isinstance(given.get("hidden_size"), int):
        values["ffn_hidden_size"] = int(4 * given["hidden_size"] * 2 / 3 / 64) * 64
    if given.get("group_query_attention"):
        values["num_query_groups"] = 1
    if given.get("fp16"):
        values |= {"initial_loss_scale": 2.0**32}
        if "accumulate_allreduce_grads_in_fp32" not in given:
            values |= {"main_grads_dtype": "fp16"}
    if given.get("optimizer") == "sgd":
        values["sgd_momentum"] = 0.9
    if given.get("lr_decay_style") == "WSD":
        values["lr_wsd_decay_style"] = "exponential"
    return values


MEGATRON = Framework("Megatron-LM", ROWS, defaults)
