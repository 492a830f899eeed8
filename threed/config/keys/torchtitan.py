"""torchtitan's keys, those of its job_config.py, and what each is here. They change between versions."""

from __future__ import annotations

from typing import Any

from threed.config.keys.table import NO_KEY, NOTHING, Framework, Given, Key

ROWS = (
    Key("model.flavor", "model.name (llama3-8b and others)"),
    Key("parallelism.data_parallel_shard_degree", "zero.shard_size (with zero.stage=3 for FSDP)"),
    Key("parallelism.data_parallel_replicate_degree", "parallel.dp (it is shard degree x replicate degree)"),
    Key("parallelism.tensor_parallel_degree", "parallel.tp (with parallel.sequence_parallel=true)"),
    Key("parallelism.pipeline_parallel_degree", "parallel.pp"),
    Key("parallelism.pipeline_parallel_schedule",
        "parallel.schedule (1F1B is 1f1b, GPipe gpipe, Interleaved1F1B interleaved, ZBVZeroBubble zb-v, "
        "DualPipeV dualpipe-v, LoopedBFS breadth-first)"),
    Key("parallelism.pipeline_parallel_schedule_csv", "parallel.schedule=file:PATH"),
    Key("parallelism.pipeline_parallel_layers_per_stage",
        "parallel.virtual_stages (or parallel.stage_units)"),
    Key("parallelism.pipeline_parallel_microbatch_size", "train.micro_batch_size"),
    Key("parallelism.fsdp_reshard_after_forward", "zero.residency (1 for always, step for never)"),
    Key("parallelism.context_parallel_degree", "parallel.cp", None, (1,)),
    Key("parallelism.expert_parallel_degree", "parallel.ep (with model.family=moe)"),
    Key("parallelism.expert_tensor_parallel_degree",
        NOTHING + "threed does not cut an expert over tp: parallel.ep takes ranks of tp, too"),
    Key("parallelism.expert_parallel_comm_backend", NO_KEY + "rows always travel by all-to-all"),
    Key("debug.moe_force_load_balance", "model.moe_route=balanced (with model.family=moe)"),
    Key("training.debug_moe_force_load_balance", "model.moe_route=balanced (with model.family=moe)"),
    Key("parallelism.enable_async_tensor_parallel", NO_KEY + "it overlaps under sequence parallelism"),
    Key("training.global_batch_size", "train.global_batch_size"),
    Key("training.local_batch_size", "train.micro_batch_size (without pipelines)"),
    Key("training.steps", "train.steps"),
    Key("training.seq_len", "model.seq_len"),
    Key("training.max_norm", "optimizer.clip_grad"),
    Key("training.seed", "train.seed"),
    Key("training.dataset", "data.source"),
    Key("training.mixed_precision_param", "precision.dtype"),
    Key("training.mixed_precision_reduce", "precision.reduce_dtype"),
    Key("training.enable_cpu_offload", "offload.optimizer=cpu with offload.parameters"),
    Key("training.compile", NOTHING + "threed compiles pieces of blocks (model.fused), not whole models"),
    Key("compile.enable", NOTHING + "threed compiles pieces of blocks (model.fused), not whole models"),
    Key("activation_checkpoint.mode", "activation.policy"),
    Key("activation_checkpoint.selective_ac_option", "activation.every (or activation.pieces)"),
    Key("optimizer.beta1", "optimizer.betas"),
    Key("optimizer.beta2", "optimizer.betas"),
    Key("lr_scheduler.warmup_steps", "optimizer.warmup_steps"),
    Key("lr_scheduler.decay_ratio", "optimizer.wsd_decay_steps (with optimizer.schedule=wsd)"),
    Key("lr_scheduler.decay_type", "optimizer.schedule"),
    Key("lr_scheduler.min_lr_factor", "optimizer.min_lr (the rate itself, not a share of optimizer.lr)"),
    Key("checkpoint.interval", "checkpoint.every"),
    Key("checkpoint.async_mode", "checkpoint.background"),
    Key("checkpoint.folder", "run.dir"),
    Key("job.dump_folder", "run.dir"),
    Key("metrics.log_freq", "monitor.console_every"),
    Key("metrics.enable_wandb", "monitor.wandb"),
    Key("profiling.enable_profiling", "monitor.trace_every"),
    Key("comm.train_timeout_seconds", "run.timeout_s"),
)


def _nothing(_: Given) -> dict[str, Any]:
    return {}


TORCHTITAN = Framework("torchtitan", ROWS, _nothing)
