"""torchtitan's keys, those of its job_config.py, and what each is here. They change between versions."""

from __future__ import annotations

from typing import Any

from threed.config.keys.table import NO_KEY, NOTHING, Framework, Given, Row

ROWS = (
    Row("model.flavor", "model.name (llama3-8b and others)"),
    Row("parallelism.data_parallel_shard_degree", "zero.shard_size (with zero.stage=3 for FSDP)"),
    Row("parallelism.data_parallel_replicate_degree", "parallel.dp (it is shard degree x replicate degree)"),
    Row("parallelism.tensor_parallel_degree", "parallel.tp (with parallel.sequence_parallel=true)"),
    Row("parallelism.pipeline_parallel_degree", "parallel.pp"),
    Row("parallelism.pipeline_parallel_schedule",
        "parallel.schedule (1F1B is 1f1b, GPipe gpipe, Interleaved1F1B interleaved, ZBVZeroBubble zb-v, "
        "DualPipeV dualpipe-v, LoopedBFS breadth-first)"),
    Row("parallelism.pipeline_parallel_schedule_csv", "parallel.schedule=file:PATH"),
    Row("parallelism.pipeline_parallel_layers_per_stage",
        "parallel.virtual_stages (or parallel.stage_units)"),
    Row("parallelism.pipeline_parallel_microbatch_size", "train.micro_batch_size"),
    Row("parallelism.fsdp_reshard_after_forward", "zero.residency (1 for always, step for never)"),
    Row("parallelism.context_parallel_degree", NOTHING + "threed does not cut the sequence of attention"),
    Row("parallelism.expert_parallel_degree", NOTHING + "threed has no experts"),
    Row("parallelism.enable_async_tensor_parallel", NO_KEY + "it overlaps under sequence parallelism"),
    Row("training.global_batch_size", "train.global_batch_size"),
    Row("training.local_batch_size", "train.micro_batch_size (without pipelines)"),
    Row("training.steps", "train.steps"),
    Row("training.seq_len", "model.seq_len"),
    Row("training.max_norm", "optimizer.clip_grad"),
    Row("training.seed", "train.seed"),
    Row("training.dataset", "data.source"),
    Row("training.mixed_precision_param", "precision.dtype"),
    Row("training.mixed_precision_reduce", "precision.reduce_dtype"),
    Row("training.enable_cpu_offload", "offload.optimizer=cpu with offload.parameters"),
    Row("training.compile", NOTHING + "threed compiles pieces of blocks (model.fused), not whole models"),
    Row("compile.enable", NOTHING + "threed compiles pieces of blocks (model.fused), not whole models"),
    Row("activation_checkpoint.mode", "activation.policy"),
    Row("activation_checkpoint.selective_ac_option", "activation.every (or activation.pieces)"),
    Row("optimizer.beta1", "optimizer.betas"),
    Row("optimizer.beta2", "optimizer.betas"),
    Row("lr_scheduler.warmup_steps", "optimizer.warmup_steps"),
    Row("lr_scheduler.decay_ratio", "optimizer.wsd_decay_steps (with optimizer.schedule=wsd)"),
    Row("lr_scheduler.decay_type", "optimizer.schedule"),
    Row("lr_scheduler.min_lr_factor", "optimizer.min_lr (the rate itself, not a share of optimizer.lr)"),
    Row("checkpoint.interval", "checkpoint.every"),
    Row("checkpoint.async_mode", "checkpoint.background"),
    Row("checkpoint.folder", "run.dir"),
    Row("job.dump_folder", "run.dir"),
    Row("metrics.log_freq", "monitor.console_every"),
    Row("metrics.enable_wandb", "monitor.wandb"),
    Row("profiling.enable_profiling", "monitor.trace_every"),
    Row("comm.train_timeout_seconds", "run.timeout_s"),
)


def _nothing(_: Given) -> dict[str, Any]:
    return {}


TORCHTITAN = Framework("torchtitan", ROWS, _nothing)
