"""DeepSpeed's and Megatron-LM's names of config keys, and threed's: for the error about an unknown key."""

from __future__ import annotations

# DeepSpeed's name, in full or its last part -> our key, or what to know instead.
_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size (micro-batches are it / (train.micro_batch_size "
                                   "x parallel.dp))",
    "steps_per_print": "monitor.console_every",
    "gradient_clipping": "optimizer.clip_grad",
    "max_grad_norm": "optimizer.clip_grad",
    "communication_data_type": "precision.reduce_dtype",
    "data_types.grad_accum_dtype": "precision.grad_dtype",
    "grad_accum_dtype": "precision.grad_dtype",
    "prescale_gradients": "no key: the loss is divided by the tokens of the global batch before backward",
    "fp16.enabled": "precision.dtype=fp16",
    "bf16.enabled": "precision.dtype=bf16",
    "bfloat16.enabled": "precision.dtype=bf16",
    "fp16.loss_scale": "precision.loss_scale (dynamic, or a number)",
    "initial_scale_power": "precision.initial_loss_scale (the scale itself, not its power of two)",
    "loss_scale_window": "precision.loss_scale_window",
    "hysteresis": "precision.hysteresis",
    "min_loss_scale": "precision.min_loss_scale",
    "fp16_master_weights_and_grads": "precision.master=none",
    "bf16_master_weights_and_grads": "precision.master=none",
    "zero_optimization.stage": "zero.stage",
    "reduce_bucket_size": "no key: gradients are reduced unit by unit (parallel.layers_per_unit makes units "
                          "larger)",
    "allgather_bucket_size": "no key: parameters are gathered unit by unit (parallel.layers_per_unit makes "
                             "units larger)",
    "contiguous_gradients": "no key: gradients always lie in one buffer a unit",
    "reduce_scatter": "no key: gradients are always reduced by reduce-scatter",
    "overlap_comm": "no key: it always overlaps; zero.prefetch says how far ahead parameters are gathered",
    "sub_group_size": "no key: the optimizer steps unit by unit",
    "stage3_prefetch_bucket_size": "zero.prefetch (in uses ahead, not elements)",
    "stage3_param_persistence_threshold": "zero.persist_below",
    "stage3_max_live_parameters": "zero.residency (in units, not elements)",
    "stage3_max_reuse_distance": "zero.residency (in units, not elements)",
    "mics_shard_size": "zero.shard_size",
    "zero_hpz_partition_size": "zero.shard_size",
    "stage3_gather_16bit_weights_on_model_save": "no key: checkpoints hold whole fp32 parameters in parts, "
                                                 "for any mesh",
    "elastic_checkpoint": "no key: any mesh loads any checkpoint",
    "offload_optimizer.device": "offload.optimizer",
    "offload_param.device": "offload.parameters",
    "partition_activations": "activation.partition",
    "cpu_checkpointing": "activation.offload=cpu",
    "contiguous_memory_optimization": "activation.contiguous",
    "activation_checkpoint_interval": "activation.policy=full with activation.every",
    "warmup_num_steps": "optimizer.warmup_steps",
    "total_num_steps": "optimizer.decay_steps",
    "wall_clock_breakdown": "monitor.trace_every",
    "seed_layers": "train.seed",
    "pipeline.stages": "parallel.pp",
    "partition_method": "parallel.stage_units",
}
_SECTIONS = {"zero_optimization": "zero", "fp16": "precision", "bf16": "precision", "bfloat16": "precision",
             "activation_checkpointing": "activation", "pipeline": "parallel", "scheduler": "optimizer",
             "tensorboard": "monitor", "wandb": "monitor", "flops_profiler": "monitor"}
# Megatron-LM's name, with _ for - -> our key, or what to know instead.
_MEGATRON = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "num_layers_per_virtual_pipeline_stage": "parallel.schedule=interleaved with parallel.virtual_stages",
    "context_parallel_size": "no key: threed does not cut the sequence of attention",
    "expert_model_parallel_size": "no key: threed has no experts",
    "use_distributed_optimizer": "zero.stage=1",
    "overlap_grad_reduce": "no key: it always overlaps",
    "overlap_param_gather": "no key: it always overlaps",
    "recompute_granularity": "activation.policy",
    "distribute_saved_activations": "activation.partition",
    "optimizer_cpu_offload": "offload.optimizer=cpu",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "ffn_hidden_size": "model.ffn_hidden",
    "num_attention_heads": "model.heads",
    "num_query_groups": "model.kv_heads",
    "seq_length": "model.seq_len",
    "cross_entropy_loss_fusion": "model.loss_chunk (tokens at a time)",
    "enable_cuda_graph": "run.cuda_graphs",
    "swiglu": "model.activation=swiglu",
    "normalization": "model.norm",
    "position_embedding_type": "model.position",
    "rotary_base": "model.rope_theta",
    "untie_embeddings_and_output_weights": "model.tie_embeddings=false",
    "make_vocab_size_divisible_by": "model.vocab_multiple (it x parallel.tp gives the same padding)",
    "lr_decay_style": "optimizer.schedule",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "train_iters": "train.steps",
    "data_path": "data.source (of several, data.mix)",
    "reset_position_ids": "data.document_mask",
    "reset_attention_mask": "data.document_mask",
    "eod_mask_loss": "data.document_mask",
    "sft": "data.loss_mask=chat",
    "eval_interval": "train.eval_every",
    "eval_iters": "train.eval_batches",
    "save": "run.dir",
    "load": "train.resume",
    "save_interval": "checkpoint.every",
}


def ours(key: str) -> str | None:
    """What to use in place of a key of another framework, with the framework's name; None where it is none
    of theirs."""
    parts = key.split(".")
    for tail in (".".join(parts[-2:]), parts[-1]):
        if tail in _KEYS:
            return _instead("DeepSpeed", key, _KEYS[tail])
    plain = parts[-1].lstrip("-").replace("-", "_")
    if plain in _MEGATRON:
        return _instead("Megatron-LM", key, _MEGATRON[plain])
    if parts[0] in _SECTIONS:
        return _instead("DeepSpeed", key, f"the section {_SECTIONS[parts[0]]}")
    return None


def _instead(framework: str, key: str, known: str) -> str:
    return f"for {framework}'s {key} {'there is' if known.startswith('no key') else 'use'} {known}"
