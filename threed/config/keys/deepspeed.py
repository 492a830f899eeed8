"""DeepSpeed's config keys, and what each is here.

Defaults are those of deepspeed/runtime/constants.py, engine.py (communication_data_type, get_data_types),
lr_schedules.py and zero/config.py.
"""

from __future__ import annotations

import math
from typing import Any

from threed.base.errors import InputError
from threed.base.quantity import whole_number
from threed.config.keys.deepspeed_experts import KEYS as OF_EXPERTS
from threed.config.keys.deepspeed_muon import KEYS as OF_MUON
from threed.config.keys.table import NO_KEY, NOTHING, Dropped, Framework, Given, Key, Refused, where

CLIPS_SINCE = (0, 19, 3)  # the version from which an absent gradient_clipping means 1.0 instead of 0
_NAMES = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "lion": "lion",
          "sgd": "sgd", "muon": "muon"}
_SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_DTYPES = {"fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "fp16": "fp16", "float16": "fp16",
           "torch.float16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16"}


def ulysses(value: Any, _: Given) -> Any:
    return {"parallel.cp": value, "parallel.cp_form": "heads"}


def dtype_of(given: Given) -> str:
    both = [name for name, keys in (("fp16", ("fp16.enabled",)),
                                    ("bf16", ("bf16.enabled", "bfloat16.enabled")))
            if any(given.get(key) is True for key in keys)]
    return both[0] if both else "fp32"


def _whole(value: Any, _: Given) -> Any:
    """1e5 is a whole number, too; what is none is left to the check of our key."""
    if value == math.inf:
        raise Dropped("never")
    whole = whole_number(value)
    return value if whole is None else whole


def _count(name: str, value: Any) -> int | None:
    """A batch size, which DeepSpeed does not take as a text."""
    whole = whole_number(value)
    if value is not None and isinstance(value, str) and whole is not None:
        raise InputError(f"{name}: {value!r} is text; write {whole}")
    if value is not None and (whole is None or whole < 1):
        raise InputError(f"{name}={value}: must be a whole number above 0")
    return whole


def _batches(_: Any, given: Given) -> dict[str, Any]:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp: any two give the
    third."""
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    batch, micro, steps = (_count(name, given.get(name)) for name in names)
    dp = given["dp"]  # None: not known
    if batch is None:
        return {"train.micro_batch_size": micro or 1, "parallel.dp": dp or 1,
                "train.global_batch_size": (micro or 1) * (steps or 1) * (dp or 1)}
    if micro is not None and (steps is not None or dp is None):
        each = micro * (steps or 1)
        if batch % each or dp not in (None, batch // each):
            raise InputError(f"train_batch_size={batch} is not train_micro_batch_size_per_gpu={micro} x "
                             f"gradient_accumulation_steps={steps or 1} x {dp or 'a number of'} "
                             f"data-parallel "
                             "ranks: change one of them" + ("" if dp is None else ", or --devices"))
        return {"train.global_batch_size": batch, "train.micro_batch_size": micro,
                "parallel.dp": batch // each if steps is not None or dp is not None else "auto"}
    if micro is not None or dp is None:
        return {"train.global_batch_size": batch, "train.micro_batch_size": micro or 1,
                **({} if dp is None else {"parallel.dp": dp})}
    if batch % (dp * (steps or 1)):
        raise InputError(f"train_batch_size={batch} is not divisible by gradient_accumulation_steps="
                         f"{steps or 1} x {dp} data-parallel ranks")
    return {"train.global_batch_size": batch, "train.micro_batch_size": batch // (dp * (steps or 1)),
            "parallel.dp": dp}


def _optimizer(value: Any, given: Given) -> Any:
    name = _NAMES.get(str(value).lower())
    if name is None:
        raise Refused(f"threed has adamw, lion, muon and sgd, and no {value}")
    return {"optimizer.name": name, "optimizer.turn_scale": "original"} if name == "muon" else name


def _corrected(value: Any, _: Given) -> Any:
    if value is False:
        raise Refused("adamw always corrects its bias")
    raise Dropped("adamw always corrects its bias")


def _decoupled(value: Any, _: Given) -> dict[str, Any]:
    if value is False:
        raise Refused("threed's weight decay is decoupled from Adam's moments")
    return {}


def _lr(value: Any, given: Given) -> Any:
    if given.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR"):
        raise Dropped(f"there the scheduler's warmup_max_lr={given['warmup_max_lr']} replaces it")
    return value


def _schedule(value: Any, _: Given) -> str:
    if value not in _SHAPES:
        raise Refused(f"threed has constant, linear, cosine and wsd, and no {value}")
    return _SHAPES[value]


def _max_lr(value: Any, given: Given) -> Any:
    if given.get("scheduler.type") not in ("WarmupLR", "WarmupDecayLR"):
        raise Dropped("only WarmupLR and WarmupDecayLR read it")
    return value


def _cos_min(value: Any, given: Given) -> Any:
    if given.get("scheduler.type") != "WarmupCosineLR":
        raise Dropped("only WarmupCosineLR reads it")
    lr = given.get("optimizer.params.lr")
    if not isinstance(lr, (int, float)):
        raise Refused("it is a share of the learning rate, which the file does not have: set "
                      "optimizer.min_lr")
    return float(f"{lr * value:.6g}")


def _log_warm_up(value: Any, given: Given) -> Any:
    if value == "linear":
        return {}
    raise Refused(f"warm-up of the learning rate by {value} (DeepSpeed's default is log): it is linear here, "
                  "over the same steps")


def _below_stage_3(given: Given) -> str:
    stage = given["zero_optimization.stage"]
    return "" if stage == 3 else f"it has an effect in stage 3 only, and the stage is {stage}"


def _prefetch(value: Any, _: Given) -> Any:
    if value == 0:
        return 0
    raise Dropped("a number of elements there; zero.prefetch counts uses ahead, and stays 1")


def _live(value: Any, _: Given) -> Any:
    raise Dropped("a number of elements there; zero.residency counts units, and stays 1")


def _not_fp16(given: Given) -> str:
    return "" if dtype_of(given) == "fp16" else "fp16 is not enabled"


def _not_dynamic(given: Given) -> str:
    fixed = given.get("fp16.loss_scale", 0)
    return _not_fp16(given) or (f"the loss scale is fixed: {fixed}" if fixed != 0 else "")


def _narrow(value: Any, given: Given) -> Any:
    """A dtype of gradients: fp32, or that of the model."""
    dtype = _DTYPES.get(str(value))
    if dtype not in ("fp32", dtype_of(given)):
        raise Refused(f"it must be fp32 or the model's dtype, {dtype_of(given)}")
    return dtype


def _no_master(value: Any, given: Given) -> Any:
    if given.get("offload_optimizer.device") not in (None, "none"):
        raise Refused("with offload_optimizer the host steps fp32 weights of its own")
    return "none"


def _tier(value: Any, given: Given) -> Any:
    if isinstance(value, str) and value in ("none", "cpu", "nvme"):
        return value
    raise InputError(f"offload to device {value}: must be none, cpu or nvme")


def _path(value: Any, given: Given) -> Any:
    if "nvme" not in (given.get("offload_optimizer.device"), given.get("offload_param.device")):
        raise Dropped("nothing is offloaded to nvme")
    return str(value)


def _not_offloaded(given: Given) -> str:
    return "the optimizer is not offloaded" if given.get("offload_optimizer.device") in (None, "none") else ""


def _kept(key: str, value: Any):
    """Keys of activation_checkpointing: the kept input of what is recomputed."""
    return lambda _, given: {"activation.policy": "full", key: value}


def _interval(value: Any, given: Given) -> dict[str, Any]:
    return {"activation.policy": "full", "parallel.layers_per_unit": value} if value > 1 else {
        "activation.policy": "full"}


def _never_read(*_: Any) -> Any:
    raise Dropped("DeepSpeed parses this key and never reads it: its PipelineModule has arguments of these "
                  "names")


def _mean(value: Any, _: Given) -> Any:
    if value != "mean":
        raise Refused("gradients are those of the mean loss of the global batch, not a sum over ranks")
    raise Dropped("gradients are those of the mean loss of the global batch")


def _group(value: Any, given: Given) -> Any:
    if given["zero_optimization.stage"] == 0:
        raise Dropped("nothing is sharded in stage 0")
    return value


_HERE = "there it is on all parameters, here not on biases, norms and other one-dimensional ones"
ROWS = (
    # Batches
    Key("train_batch_size", "train.global_batch_size", _batches),
    Key("train_micro_batch_size_per_gpu", "train.micro_batch_size", _batches),
    Key("gradient_accumulation_steps",
        "train.global_batch_size (micro-batches are it / (train.micro_batch_size x parallel.dp))", _batches),
    # Optimizer and schedule
    Key("optimizer.type",
        "optimizer.name (adamw, lion, muon or sgd; DeepSpeed's Adam is AdamW by default)", _optimizer),
    Key("optimizer.params.lr", "optimizer.lr", _lr),
    Key("optimizer.params.betas", "optimizer.betas"),
    Key("optimizer.params.eps", "optimizer.eps"),
    Key("optimizer.params.weight_decay", f"optimizer.weight_decay ({_HERE})"),
    *OF_MUON,
    Key("optimizer.params.adam_w_mode",
        "optimizer.name (adamw, whose weight decay is decoupled)", _decoupled),
    *(Key(f"optimizer.params.{name}", NO_KEY + "adamw is torch's fused kernel, or native.c on the host")
      for name in ("torch_adam", "fused", "foreach", "capturable")),
    Key("optimizer.params.bias_correction", NO_KEY + "adamw always corrects its bias", _corrected),
    Key("optimizer.params.*", NOTHING + "threed's optimizers have no such number"),
    Key("scheduler.params.*", NOTHING + "threed's schedules have no such number"),
    Key("gradient_clipping", "optimizer.clip_grad"),
    Key("max_grad_norm", "optimizer.clip_grad"),
    Key("scheduler.type",
        "optimizer.schedule (WarmupLR is constant, WarmupDecayLR linear, WarmupCosineLR cosine)", _schedule),
    Key("warmup_num_steps", "optimizer.warmup_steps", _whole),
    Key("total_num_steps", "optimizer.decay_steps", _whole),
    Key("warmup_max_lr", "optimizer.lr", _max_lr),
    Key("warmup_min_lr", NOTHING + "warm-up begins at 0"),
    Key("warmup_min_ratio", NOTHING + "warm-up begins at 0"),
    Key("cos_min_ratio", "optimizer.min_lr (the rate itself, not a share of optimizer.lr)", _cos_min),
    Key("warmup_type", NOTHING + "warm-up is linear; DeepSpeed's is logarithmic by default", _log_warm_up),
    # Precision
    Key("fp16.enabled", "precision.dtype=fp16"),
    Key("bf16.enabled", "precision.dtype=bf16"),
    Key("bfloat16.enabled", "precision.dtype=bf16"),
    where(_not_fp16, Key("fp16.loss_scale", "precision.loss_scale (dynamic, or a number)",
                         lambda value, _: "dynamic" if value == 0 else value)),
    *(where(_not_dynamic, row) for row in (
        Key("initial_scale_power", "precision.initial_loss_scale (the scale itself, not its power of two)",
            lambda value, _: float(2**value)),
        Key("loss_scale_window", "precision.loss_scale_window", _whole),
        Key("hysteresis", "precision.hysteresis"),
        Key("min_loss_scale", "precision.min_loss_scale"))),
    Key("consecutive_hysteresis", NOTHING + "the count of overflows begins anew when the scale doubles"),
    Key("fp16.auto_cast", NO_KEY + "inputs are token ids"),
    Key("fp16_master_weights_and_grads", "precision.master=none", _no_master),
    Key("bf16_master_weights_and_grads", "precision.master=none", _no_master),
    Key("bf16_optimizer_states", NOTHING + "Adam's moments are in fp32"),
    Key("immediate_grad_update", NO_KEY + "gradients are added up as they come"),
    Key("check_grad_overflow", "train.on_nonfinite=skip"),
    Key("check_overflow", "train.on_nonfinite=skip"),
    Key("gradient_allreduce_op", NO_KEY + "gradients are those of the mean loss of the global batch",
        _mean),
    Key("communication_data_type", "precision.reduce_dtype", _narrow),
    Key("fp32_allreduce", "precision.reduce_dtype=fp32"),
    Key("data_types.grad_accum_dtype", "precision.grad_dtype", _narrow),
    Key("grad_accum_dtype", "precision.grad_dtype", _narrow),
    Key("prescale_gradients",
        NO_KEY + "the loss is divided by the tokens of the global batch before backward"),
    Key("gradient_predivide_factor", NO_KEY + "gradients are sums; the loss is divided before backward"),
    # ZeRO
    Key("zero_optimization.stage", "zero.stage"),
    Key("reduce_bucket_size",
        NO_KEY + "gradients are reduced unit by unit (parallel.layers_per_unit makes units larger)"),
    Key("allgather_bucket_size",
        NO_KEY + "parameters are gathered unit by unit (parallel.layers_per_unit makes units larger)"),
    Key("contiguous_gradients", NO_KEY + "gradients always lie in one buffer a unit"),
    Key("reduce_scatter", NO_KEY + "gradients are always reduced by reduce-scatter"),
    Key("allgather_partitions", NO_KEY + "parameters are always gathered"),
    Key("overlap_comm",
        NO_KEY + "it always overlaps; zero.prefetch says how far ahead parameters are gathered"),
    Key("sub_group_size", NO_KEY + "the optimizer steps unit by unit"),
    Key("round_robin_gradients", NO_KEY + "gradients are cut evenly over ranks"),
    Key("use_multi_rank_bucket_allreduce", NO_KEY + "gradients are always reduced by reduce-scatter"),
    Key("ignore_unused_parameters", NO_KEY + "all parameters of a model here have a gradient"),
    Key("load_from_fp32_weights", NO_KEY + "checkpoints hold fp32 weights"),
    Key("memory_efficient_linear",
        NO_KEY + "backward finds parameters in the buffer that they are gathered in"),
    *(row._replace(theirs=f"{prefix}{row.theirs}") for prefix in ("stage3_", "") for row in (
        where(_below_stage_3, Key("prefetch_bucket_size", "zero.prefetch (in uses ahead, not elements)",
                                  _prefetch)),
        where(_below_stage_3, Key("param_persistence_threshold", "zero.persist_below", _whole)),
        Key("model_persistence_threshold", NO_KEY + "zero.persist_below alone says what stays whole"),
        where(_below_stage_3, Key("max_live_parameters", "zero.residency (in units, not elements)", _live)),
        where(_below_stage_3, Key("max_reuse_distance", "zero.residency (in units, not elements)", _live)),
        Key("module_granularity_threshold", NO_KEY + "a unit is what is gathered; parallel.layers_per_unit"),
        Key("use_all_reduce_for_fetch_params", NO_KEY + "parameters are always gathered"),
        Key("allgather_sequential", NO_KEY + "parameters are always gathered unit by unit"))),
    Key("leaf_module*", NO_KEY + "a unit is what is gathered; parallel.layers_per_unit"),
    Key("*gather_*_weights_on_model_save",
        NO_KEY + "checkpoints hold whole fp32 parameters in parts, for any mesh"),
    Key("elastic_checkpoint", NO_KEY + "any mesh loads any checkpoint"),
    Key("mics_shard_size", "zero.shard_size", _group, (-1,)),
    Key("mics_hierarchical_params_gather", NO_KEY + "NCCL knows the hosts of a group"),
    Key("zero_hpz_partition_size", "zero.shard_size", _group, (1,)),
    Key("zero_quantized_*", NOTHING + "threed sends no quantized weights or gradients"),
    Key("zeropp_loco_param*", NOTHING + "threed sends no quantized gradients"),
    Key("zenflow*", NOTHING + "offload.overlap=next hides the host's step and applies no gradient late"),
    Key("super_offload", NOTHING + "offload.* and offload.ratio place the optimizer's state"),
    Key("cpuadam_cores_perc", NO_KEY + "the host's step uses OMP_NUM_THREADS threads"),
    # Offload
    Key("offload_optimizer.device", "offload.optimizer", _tier),
    where(_below_stage_3, Key("offload_param.device", "offload.parameters", _tier)),
    where(_not_offloaded, Key("offload_optimizer.ratio", "offload.ratio")),
    Key("nvme_path", "offload.nvme_path", _path),
    Key("cpu_offload", "offload.optimizer=cpu"),
    Key("cpu_offload_param*", "offload.parameters=cpu"),
    *(Key(name, NO_KEY + "buffers are pinned, and copies overlap, always; the plan counts them")
      for name in ("pin_memory", "cpu_offload_use_pin_memory", "buffer_count", "buffer_size", "max_in_cpu",
                   "pipeline_read", "pipeline_write", "fast_init", "aio*")),
    # Activations
    Key("partition_activations", "activation.partition=true", _kept("activation.partition", True)),
    Key("cpu_checkpointing", "activation.offload=cpu", _kept("activation.offload", "cpu")),
    Key("contiguous_memory_optimization", "activation.contiguous=true", _kept("activation.contiguous", True)),
    Key("activation_checkpoint_interval", "activation.policy=full with parallel.layers_per_unit", _interval),
    Key("number_checkpoints", NO_KEY + "the plan knows how many inputs are kept"),
    Key("synchronize_checkpoint_boundary", NO_KEY + "nothing waits for the device between units"),
    Key("activation_checkpointing.profile", NO_KEY + "each recomputation is timed: threed compare RUN"),
    # Pipelines and tensor parallelism
    Key("pipeline.stages", "parallel.pp", _never_read),
    Key("pipeline.partition", "parallel.stage_units", _never_read),
    Key("partition_method", "parallel.stage_units", _never_read),
    Key("seed_layers", "train.seed (initial weights never depend on the mesh)", _never_read),
    Key("pipe_partitioned", NO_KEY + "parallel.sequence_parallel cuts what is sent over tp"),
    Key("grad_partitioned", NO_KEY + "parallel.sequence_parallel cuts what is sent over tp"),
    Key("use_reentrant", NO_KEY + "each unit has a graph of its own"),
    Key("autotp_size", "parallel.tp", None, (1,)),
    Key("tp_size", "parallel.tp", None, (1,)),
    Key("tp_overlap_comm", NO_KEY + "it overlaps under sequence parallelism"),
    Key("tensor_parallel.dtype", NO_KEY + "precision.dtype is of all computation"),
    *(Key(name, NO_KEY + "model.* describes the model, and its layers know how they are cut")
      for name in ("tensor_parallel.preset_model", "tensor_parallel.partition_config*",
                   "injection_policy*", "tp_grain_size", "keep_module_on_host", "kernel_inject",
                   "replace_with_kernel_inject")),
    Key("sequence_parallel_size", "parallel.cp (with parallel.cp_form=heads)", ulysses, (1,)),
    # What is logged
    Key("steps_per_print", "monitor.console_every", _whole),
    Key("wall_clock_breakdown", NO_KEY + "steps are always timed (monitor.trace_every): threed compare RUN"),
    Key("wandb.project", "monitor.project"),
    Key("wandb.group", "monitor.group"),
    Key("wandb.enabled", NO_KEY + "wandb is always written, offline unless monitor.wandb says more"),
    *(Key(name, NO_KEY + "runs/.../metrics.jsonl and wandb have it; threed report RUN draws it")
      for name in ("tensorboard*", "csv_monitor*", "comet*", "wandb.*", "flops_profiler*", "comms_logger*",
                   "memory_breakdown", "dump_state")),
    Key("dataloader_drop_last", NO_KEY + "a batch is always whole"),
    Key("load_universal", NO_KEY + "any mesh loads any checkpoint"),
    Key("wandb.team", NO_KEY + "set WANDB_ENTITY in the environment"),
    Key("autotuning*", NOTHING + "threed check --advise compares settings, and threed train tries none"),
    *(Key(name, NO_KEY + "it has no counterpart, and changes no numbers")
      for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "nebula*",
                   "tag_validation", "parallel_write*",
                   "log_trace_cache_warnings", "enable_sanity_checks", "disable_allgather",
                   "use_node_local_storage", "graph_harvesting",
                   "override_module_apply", "managed_gradient_accumulation", "legacy_fusion", "log_level",
                   "seq_parallel_communication_data_type", "checkpoint.writer*",
                   "checkpoint_serialization", "datastates_ckpt*",
                   "save_muon_momentum_buffer_in_memory", "pipeline_loading_checkpoint", "legacy_stage1")),
    *(Key(name, NOTHING + f"threed has no {what}")
      for name, what in (("amp*", "apex"), ("torch_autocast*",
                                            "autocast: precision.dtype is of all computation"),
                         ("sparse_gradients", "sparse gradients"), ("sparse_attention*", "sparse attention"),
                         ("progressive_layer_drop*", "layer drop"), ("curriculum_learning*", "curriculum"),
                         ("data_efficiency*", "curriculum or random layer-wise token dropping"),
                         ("compression_training*", "quantization or pruning"),
                         ("quantize_training*", "quantization"), ("eigenvalue*", "eigenvalues"),
                         ("elasticity*", "batch sizes that change with the ranks"),
                         ("hybrid_engine*", "inference engine"),
                         ("compile*", "compilation of whole models"))),
    *OF_EXPERTS,
)


def defaults(given: Given) -> dict[str, Any]:
    """What DeepSpeed takes for keys that a file does not have. `version` among the given: DeepSpeed's, for
    which the default of gradient_clipping is."""
    dtype, stage = dtype_of(given), given.get("zero_optimization.stage", 0)
    values: dict[str, Any] = {"zero_optimization.stage": 0, "gradient_clipping":
                              1.0 if given["version"] >= CLIPS_SINCE else 0.0}
    if "max_grad_norm" in given:
        del values["gradient_clipping"]
    if dtype != "fp32":
        values["communication_data_type"] = dtype
        if "grad_accum_dtype" not in given:
            values["data_types.grad_accum_dtype"] = "fp32" if dtype == "bf16" and stage == 0 else dtype
    if stage == 3:
        values["stage3_param_persistence_threshold"] = 100_000
    if "optimizer.type" in given:
        values |= {"optimizer.params.lr": 1e-3, "optimizer.params.weight_decay": 0.0,
                   "optimizer.params.eps": 1e-8, "optimizer.params.betas": [0.9, 0.999]}
    kind = given.get("scheduler.type")
    if kind in _SHAPES:
        values |= {"warmup_num_steps": 1000, "warmup_type": "log"}
        values |= {"cos_min_ratio": 1e-4} if kind == "WarmupCosineLR" else {"warmup_max_lr": 1e-3}
    return values


DEEPSPEED = Framework("DeepSpeed", ROWS, defaults, {
    "zero_optimization": "zero", "fp16": "precision", "bf16": "precision", "bfloat16": "precision",
    "activation_checkpointing": "activation", "pipeline": "parallel", "scheduler": "optimizer",
    "tensorboard": "monitor", "wandb": "monitor", "flops_profiler": "monitor"})
