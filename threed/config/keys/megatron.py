"""Megatron-LM's options, and what each is here.

Defaults are those of megatron/training/arguments.py, megatron/training/config and
megatron/core/optimizer/optimizer_config.py.
"""

from __future__ import annotations

from typing import Any

from threed.config.keys import megatron_values as take
from threed.config.keys.megatron_experts import KEYS as OF_EXPERTS
from threed.config.keys.megatron_experts import biases, defaults_of_experts, gate
from threed.config.keys.megatron_muon import KEYS as OF_MUON
from threed.config.keys.megatron_muon import defaults_of_muon
from threed.config.keys.megatron_rest import WITHOUT_VALUE
from threed.config.keys.table import NO_KEY, NOTHING, Framework, Given, Key

ROWS = (
    # Mesh
    Key("tensor_model_parallel_size", "parallel.tp"),
    Key("pipeline_model_parallel_size", "parallel.pp"),
    *(Key(name, "parallel.dp (auto: what the number of ranks leaves)", take.dp)
      for name in ("nproc_per_node", "nnodes", "num_gpus", "num_nodes", "num_processes", "world_size")),
    Key("data_parallel_size", "parallel.dp (auto: what the number of ranks leaves)",
        lambda value, given: given["dp"] or value),
    Key("num_layers_per_virtual_pipeline_stage",
        "parallel.virtual_stages with parallel.schedule=interleaved", take.layers_per_stage),
    Key("num_virtual_stages_per_pipeline_rank",
        "parallel.virtual_stages with parallel.schedule=interleaved", take.virtual),
    Key("use_tp_pp_dp_mapping", "parallel.axis_order=dp-pp-tp"),
    Key("sequence_parallel", "parallel.sequence_parallel=true", take.sequence_parallel),
    Key("no_scatter_gather_tensors_in_pipeline", "parallel.split_messages=off"),
    Key("context_parallel_size", "parallel.cp", None, (1,)),
    Key("cp_comm_type", "parallel.cp_form", take.cp_form),
    Key("hierarchical_context_parallel_sizes",
        NOTHING + "keys and values are gathered over all of parallel.cp"),
    *(Key(name, NOTHING + "parallel.cp is the same for all sequences")
      for name in ("dynamic_context_parallel", "hybrid_context_parallel")),
    # ZeRO
    Key("use_distributed_optimizer", "zero.stage=1", take.distributed),
    Key("use_megatron_fsdp", NO_KEY + "zero.stage alone says it"),
    Key("data_parallel_sharding_strategy", "zero.stage", take.one_of(take.SHARDED, "sharding")),
    Key("use_torch_fsdp2", "zero.stage=3"),
    Key("num_distributed_optimizer_instances", "zero.shard_size", take.instances),
    # Model
    Key("num_layers", "model.layers"),
    Key("hidden_size", "model.hidden"),
    Key("ffn_hidden_size", "model.ffn_hidden"),
    Key("num_attention_heads", "model.heads"),
    Key("num_query_groups", "model.kv_heads", take.groups),
    Key("group_query_attention", NO_KEY + "model.kv_heads alone says it"),
    Key("kv_channels", "model.head_dim"),
    Key("add_qkv_bias", "model.qkv_bias=true"),
    Key("qk_layernorm", "model.qk_norm=true (RMS norms)", take.qk_norm),
    Key("use_rope_scaling",
        "model.rope_scaling=[8,1,4,8192] (8 is --rope-scaling-factor)", take.rope_scaling),
    Key("rope_scaling_factor", NO_KEY + "the first number of model.rope_scaling"),
    Key("seq_length", "model.seq_len"),
    Key("max_position_embeddings", NO_KEY + "model.seq_len", take.positions),
    Key("swiglu", "model.activation=swiglu"),
    Key("activation_func", "model.activation (gelu; of gated ones it has swiglu)", gate),
    Key("normalization", "model.norm", take.one_of(take.NORMS, "norm")),
    Key("norm_epsilon", "model.norm_eps"),
    Key("layernorm_epsilon", "model.norm_eps"),
    Key("apply_layernorm_1p", NO_KEY + "a norm's weight is stored as it is, not less 1"),
    Key("position_embedding_type", "model.position", take.one_of(take.POSITIONS, "positions")),
    Key("use_rotary_position_embeddings", "model.position=rotary"),
    *(Key(name, "model.rope_theta", take.of_rotary)
      for name in ("rotary_base", "rotary_position_embeddings_theta")),
    Key("rotary_percent", NO_KEY + "all of a head is rotated", take.whole_share),
    Key("no_position_embedding", NO_KEY + "model.position=rotary has no table of positions",
        take.rotary_alone),
    Key("disable_bias_linear", "model.bias=false"),
    Key("add_bias_linear", "model.bias", biases),
    Key("untie_embeddings_and_output_weights", "model.tie_embeddings=false"),
    Key("make_vocab_size_divisible_by",
        "model.vocab_multiple (it x parallel.tp gives the same padding)", lambda value, given: value *
        given.get("tensor_model_parallel_size", 1)),
    Key("vocab_size", "model.vocab"),
    Key("padded_vocab_size", "model.vocab (where vocab_size is not given)",
        lambda value, given: {"model.vocab_multiple": value} if given.get("vocab_size") else value),
    Key("vocab_file", NO_KEY + "model.vocab is a number", take.vocabulary),
    Key("merge_file", NO_KEY + "model.vocab is a number", take.vocabulary),
    Key("hidden_dropout", "model.dropout"),
    Key("attention_dropout", "model.attention_dropout"),
    Key("init_method_std", "model.init_std"),
    Key("attention_backend", "run.attention_backend", take.one_of(take.BACKENDS, "backend of attention")),
    Key("cross_entropy_loss_fusion", "model.loss_chunk=1024 (tokens at a time)"),
    Key("calculate_per_token_loss", NO_KEY + "the loss is the mean over the tokens of the global batch"),
    # Memory
    Key("recompute_granularity", "activation.policy", take.recompute),
    Key("recompute_activations",
        "activation.policy=selective", lambda _, given: take.recompute("selective", given)),
    *(Key(name, NO_KEY + "activation.policy, with activation.every, activation.pieces, "
                         "parallel.layers_per_unit")
      for name in ("recompute_method", "recompute_num_layers", "recompute_modules")),
    Key("distribute_saved_activations", "activation.partition=true"),
    Key("optimizer_cpu_offload", "offload.optimizer=cpu"),
    Key("optimizer_offload_fraction",
        "offload.ratio", lambda value, given: value if given.get("optimizer_cpu_offload") else {}),
    # Precision
    Key("bf16", "precision.dtype=bf16"),
    Key("fp16", "precision.dtype=fp16"),
    *(Key(name, "precision.dtype", take.precision) for name in ("params_dtype", "mixed_precision")),
    Key("accumulate_allreduce_grads_in_fp32", "precision.grad_dtype=fp32", take.gradients("fp32")),
    Key("grad_reduce_in_bf16",
        "precision.reduce_dtype=bf16 with precision.grad_dtype", take.gradients("bf16")),
    Key("main_grads_dtype",
        "precision.grad_dtype with precision.reduce_dtype", lambda value, given: take.gradients(value)(value,
        given)),
    Key("loss_scale", "precision.loss_scale (dynamic, or a number)", take.fixed_scale),
    Key("initial_loss_scale", "precision.initial_loss_scale", take.of_fp16(float)),
    Key("min_loss_scale", "precision.min_loss_scale", take.of_fp16(float)),
    Key("loss_scale_window", "precision.loss_scale_window", take.of_fp16(int)),
    Key("hysteresis", "precision.hysteresis", take.of_fp16()),
    # Optimizer
    Key("optimizer", "optimizer.name", take.one_of(take.OPTIMIZERS, "optimizer")),
    Key("sgd_momentum", NOTHING + "threed's sgd has no momentum"),
    Key("lr", "optimizer.lr"),
    Key("min_lr", "optimizer.min_lr"),
    *(Key(name, "optimizer.betas", take.betas(names, optimizer)) for optimizer, names in (
        ("adam", ("adam_beta1", "adam_beta2")), ("lion", ("lion_beta1", "lion_beta2"))) for name in names),
    Key("adam_eps", "optimizer.eps"),
    Key("weight_decay", "optimizer.weight_decay"),
    Key("clip_grad", "optimizer.clip_grad"),
    Key("lr_decay_style", "optimizer.schedule", take.one_of(take.SHAPES, "schedule of the learning rate")),
    Key("lr_decay_iters", "optimizer.decay_steps"),
    Key("lr_decay_samples", "optimizer.decay_steps (samples / train.global_batch_size)", take.steps_of),
    Key("lr_warmup_iters", "optimizer.warmup_steps"),
    Key("lr_warmup_fraction",
        "optimizer.warmup_steps (a share of the decay's steps there)", take.warm_up_share),
    Key("lr_warmup_samples", "optimizer.warmup_steps (samples / train.global_batch_size)", take.steps_of),
    Key("lr_warmup_init", NOTHING + "warm-up begins at 0"),
    Key("lr_wsd_decay_iters", "optimizer.wsd_decay_steps"),
    Key("lr_wsd_decay_samples", "optimizer.wsd_decay_steps (samples / train.global_batch_size)",
        take.steps_of),
    Key("lr_wsd_decay_style", NO_KEY + "wsd decays linearly", take.decay_of_wsd),
    # Training and data
    Key("global_batch_size", "train.global_batch_size"),
    Key("micro_batch_size", "train.micro_batch_size"),
    Key("train_iters", "train.steps"),
    Key("train_samples", "train.steps (samples / train.global_batch_size)", take.train_samples),
    Key("seed", "train.seed"),
    Key("eval_interval", "train.eval_every", take.eval_every),
    Key("eval_iters", "train.eval_batches", take.eval_batches),
    Key("data_path", "data.source (data.mix for several)", take.source),
    *(Key(name, "data.document_mask=true", take.documents) for name in take.DOCUMENTS),
    Key("sft", "data.loss_mask=chat"),
    Key("split", "data.validation_fraction (the second share; nothing is kept for a test)", take.held_out),
    Key("tokenizer_model", "data.tokenizer", take.tokenizer),
    Key("tokenizer_type", NO_KEY + "data.tokenizer is a tokenizer.json", take.vocabulary),
    Key("mock_data", NOTHING + "give data.source text or tokens"),
    # Running
    Key("save", "run.dir"),
    Key("load", "train.resume", take.resume),
    Key("save_interval", "checkpoint.every"),
    Key("async_save", "checkpoint.background=true"),
    Key("log_interval", "monitor.console_every"),
    Key("wandb_project", "monitor.project"),
    Key("wandb_exp_name", "monitor.name"),
    Key("distributed_timeout_minutes", "run.timeout_s (seconds)", lambda value, given: 60.0 * value),
    Key("deterministic_mode", "run.deterministic=true"),
    Key("enable_cuda_graph", "run.cuda_graphs=true"),
    # Megatron-DeepSpeed's
    Key("zero_stage", "zero.stage"),
    Key("num_key_value_heads", "model.kv_heads"),
    *(Key(name, "activation.policy=full", take.checkpointed)
      for name in ("checkpoint_activations", "deepspeed_activation_checkpointing")),
    Key("checkpoint_num_layers", NO_KEY + "parallel.layers_per_unit, with activation.policy"),
    Key("partition_activations", "activation.partition=true", take.on_ranks("activation.partition", True)),
    Key("checkpoint_in_cpu", "activation.offload=cpu", take.on_ranks("activation.offload", "cpu")),
    Key("contigious_checkpointing",
        "activation.contiguous=true", take.on_ranks("activation.contiguous", True)),
    Key("cpu_optimizer", "offload.optimizer=cpu"),
    Key("enable_zbh1_pipeline", "parallel.schedule=zb-h1"),
    Key("train_tokens", "train.steps (tokens / a step's)", take.steps_of_tokens),
    Key("lr_decay_tokens", "optimizer.decay_steps (tokens / a step's)", take.steps_of_tokens),
    Key("lr_warmup_tokens", "optimizer.warmup_steps (tokens / a step's)", take.steps_of_tokens),
    # Older names
    Key("model_parallel_size", "parallel.tp"),
    Key("batch_size", "train.micro_batch_size"),
    Key("activations_checkpoint_method", "activation.policy", take.older_recompute),
    Key("activations_checkpoint_granularity", "activation.policy", take.recompute),
    Key("activations_checkpoint_num_layers", NO_KEY + "activation.every, or parallel.layers_per_unit"),
    *OF_EXPERTS, *OF_MUON, *WITHOUT_VALUE,
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
    if "global_batch_size" not in given:
        values |= take.least_batch(given)
    if given.get("swiglu") and isinstance(given.get("hidden_size"), int):
        values["ffn_hidden_size"] = take.gated_width(given["hidden_size"])
    if given.get("group_query_attention"):
        values["num_query_groups"] = 1
    if given.get("fp16"):
        values |= {"initial_loss_scale": 2.0**32}
        if "accumulate_allreduce_grads_in_fp32" not in given:
            values |= {"main_grads_dtype": "fp16"}
    values |= defaults_of_experts(given) | defaults_of_muon(given)
    if given.get("optimizer") == "sgd":
        values["sgd_momentum"] = 0.9
    if given.get("optimizer") == "lion":
        values |= {"lion_beta1": 0.95, "lion_beta2": 0.98}
    if given.get("lr_decay_style") == "WSD":
        values["lr_wsd_decay_style"] = "exponential"
    return values


MEGATRON = Framework("Megatron-LM", ROWS, defaults)
