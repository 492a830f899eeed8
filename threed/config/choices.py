"""The values that each key of a config may have, whatever the other keys are."""

from __future__ import annotations

import difflib
import math
from collections import ChainMap
from collections.abc import Collection
from typing import Any

from threed import devices
from threed.base.errors import InputError
from threed.base.mesh import AXES
from threed.base.quantity import parse_seconds
from threed.optim.registry import OPTIMIZERS
from threed.schedules.orders import SCHEDULES
from threed.schema import Config, MonitorConfig

# Schedules and optimizers are looked up when a config is read: a script may have added its own.
CHOICES: dict[str, Collection[object]] = {
    "model.position": ("rotary", "learned"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "swiglu"),
    "model.fused": ("off", "auto", "on"),
    "parallel.schedule": ChainMap[str, Any]({"auto": None}, SCHEDULES),
    "parallel.split_messages": ("auto", "on", "off"),
    "precision.dtype": ("fp32", "bf16", "fp16"),
    "precision.grad_dtype": ("fp32", "bf16", "fp16"),
    "precision.reduce_dtype": ("fp32", "bf16", "fp16"),
    "precision.master": ("fp32", "none"),
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": ("constant", "linear", "cosine", "wsd"),
    "data.loss_mask": ("none", "answers", "chat"),
    "data.packing": ("stream", "best-fit"), "data.on_bad_row": ("error", "skip"),
    "data.on_change": ("error", "accept"),
    "train.on_nonfinite": ("stop", "skip"),
    "monitor.wandb": ("auto", "offline", "online", "disabled"),
    "run.device": devices.CHOICES,
    "run.attention_backend": ("auto", "flash", "efficient", "cudnn"),
    "zero.stage": (0, 1, 2, 3),
    "activation.policy": ("none", "full", "selective", "budget"),
    "activation.offload": ("none", "cpu"),
    "offload.optimizer": ("none", "cpu", "nvme"),
    "offload.parameters": ("none", "cpu", "nvme"),
}
LOGGERS = ("wandb", "tensorboard", "mlflow", "trackio", "prometheus")
AT_LEAST = {  # key: least value
    "model.layers": 1, "model.hidden": 1, "model.heads": 1, "model.kv_heads": 1, "model.head_dim": 1,
    "model.ffn_hidden": 1,
    "model.vocab": 2, "model.vocab_multiple": 1, "model.seq_len": 1, "model.init_std": 0, "model.dropout": 0,
    "model.attention_dropout": 0, "model.loss_chunk": 1, "model.lora_rank": 1, "parallel.layers_per_unit": 1,
    "parallel.virtual_stages": 1, "optimizer.lr": 0, "optimizer.eps": 0, "optimizer.weight_decay": 0,
    "optimizer.clip_grad": 0, "optimizer.warmup_steps": 0, "optimizer.decay_steps": 1,
    "optimizer.wsd_decay_steps": 0, "optimizer.min_lr": 0, "activation.every": 1, "train.steps": 0,
    "train.global_batch_size": 1, "train.micro_batch_size": 1, "train.seed": 0, "train.eval_every": 0,
    "train.eval_batches": 1, "train.sample_every": 0, "train.sample_tokens": 1, "train.sample_temperature": 0,
    "train.max_skipped": 0, "checkpoint.every": 0, "checkpoint.keep": 0,
    "checkpoint.copy_keep": 0, "checkpoint.copy_wait_s": 0,
    "monitor.console_every": 1, "monitor.trace_every": 0, "monitor.timeline_every": 0,
    "run.timeout_s": 1, "run.connect_timeout_s": 1, "run.verify_every": 0, "run.restarts": 0,
    "run.restart_wait_s": 0,
    "data.validation_fraction": 0, "data.bad_rows_limit": 1, "zero.shard_size": 1, "zero.prefetch": 0,
    "zero.persist_below": 0,
    "precision.loss_scale_window": 1, "precision.hysteresis": 1,
    **{f"parallel.{axis}": 1 for axis in AXES if axis != "dp"},  # which may be auto
}
# What others call a value.
_SAID = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
         "adam": "adamw", "rope": "rotary", "learned_absolute": "learned", "silu": "swiglu",
         "gpu": devices.ACCELERATORS[0], "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v",
         "dualpipev": "dualpipe-v", "loopedbfs": "breadth-first"}
ABOVE_ZERO = ("model.norm_eps", "model.rope_theta", "model.lora_alpha", "monitor.peak_tflops",
              "precision.initial_loss_scale", "precision.min_loss_scale")


def get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def check_values(config: Config) -> list[str]:
    problems = []
    for key, choices in CHOICES.items():
        value = get(config, key)
        if key == "parallel.schedule" and str(value).startswith("file:"):
            continue
        if value not in choices:
            said = str(value).lower()
            meant = said if said in choices else _SAID.get(said)
            hint = f"; did you mean {meant}?" if meant in choices else ""
            problems.append(f"{key}={value}: must be one of {', '.join(map(str, choices))}{hint}")
    for key, least in AT_LEAST.items():
        value = get(config, key)
        if value is not None and not value >= least:  # `not >=`: NaN is refused too
            problems.append(f"{key}={value}: must be at least {least}")
        elif value == math.inf:
            problems.append(f"{key}={value}: must be finite")
    for key in ABOVE_ZERO:
        value = get(config, key)
        if value is not None and not 0 < value < math.inf:
            problems.append(f"{key}={value}: must be above 0 and finite")
    dp = config.parallel.dp
    if not isinstance(dp, int) or dp < 1:
        problems.append(f"parallel.dp={dp}: must be 'auto' or an integer of at least 1")
    for key in ("model.dropout", "model.attention_dropout", "data.validation_fraction"):
        if get(config, key) >= 1:
            problems.append(f"{key}={get(config, key)}: must be less than 1")
    if not config.run.dir.strip():
        problems.append("run.dir is empty: give a folder for checkpoints and metrics")
    if config.run.stop_after is not None:
        try:
            if not parse_seconds(config.run.stop_after) > 0:
                problems.append(f"run.stop_after={config.run.stop_after}: must be more than 0")
        except InputError as error:
            problems.append(f"run.stop_after={error}")
    if sorted(config.parallel.axis_order.split("-")) != sorted(AXES):
        problems.append(f"parallel.axis_order={config.parallel.axis_order}: must name each axis once, "
                        f"outermost first, for example {'-'.join(AXES)}")
    problems += _check_loggers(config.monitor)
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        problems.append(f"optimizer.betas={betas}: must be two numbers in [0, 1)")
    return problems


def _check_loggers(monitor: MonitorConfig) -> list[str]:
    problems, given = [], f"monitor.loggers=[{','.join(map(str, monitor.loggers))}]"
    for name in monitor.loggers:
        if name not in LOGGERS:
            near = difflib.get_close_matches(str(name).lower(), LOGGERS, 1)
            hint = f"; did you mean {near[0]}?" if near else ", or a callback of your own"
            problems.append(f"{given}: {name} is none of {', '.join(LOGGERS)}{hint}")
        elif monitor.loggers.count(name) > 1:
            problems.append(f"{given}: {name} is named twice")
    port, file = monitor.prometheus_port, monitor.prometheus_file
    if "prometheus" in monitor.loggers and port is None and not file:
        problems.append(f"{given}: give monitor.prometheus_port (such as 9400), where prometheus reads the "
                        "metrics, or monitor.prometheus_file, for node_exporter's textfile collector")
    if "prometheus" not in monitor.loggers and (port is not None or file):
        key = "monitor.prometheus_file" if port is None else "monitor.prometheus_port"
        problems.append(f"{key}={file if port is None else port} has no effect: {given} lacks prometheus")
    if port is not None and not 0 <= port < 65536:
        problems.append(f"monitor.prometheus_port={port}: must be between 0 and 65535")
    return list(dict.fromkeys(problems))
