"""Checks of optimizers that turn whole matrices (muon, polar)."""

from __future__ import annotations

from collections.abc import Iterator

from threed.base.errors import Idle, Problem
from threed.models.tiling import layers_of
from threed.optim.registry import OPTIMIZERS, turning
from threed.schema import Config, OptimizerConfig

# Keys that only they have, and those of them that are AdamW's beside them.
KEYS = ("momentum", "nesterov", "matrices", "turns", "turn_coefficients", "turn_eps", "turn_scale",
        "turn_dtype", "adamw_lr", "adamw_weight_decay")
BESIDE = ("betas", "eps", "adamw_lr", "adamw_weight_decay")


def _given(config: OptimizerConfig, keys: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """Keys with another value than their default."""
    usual = OptimizerConfig()
    return ((key, value) for key in keys if (value := getattr(config, key)) != getattr(usual, key))


def check_turned(config: Config) -> Iterator[Problem]:
    """Problems of keys with a matrix optimizer (muon, polar), and of its own keys without one."""
    optimizer = config.optimizer
    asked = f"optimizer.name={optimizer.name}"
    if turning(optimizer.name) is None:
        names = " or ".join(name for name in OPTIMIZERS if turning(name) is not None)
        for key, value in _given(optimizer, KEYS):
            yield Idle.of(f"optimizer.{key}", f"={value} needs optimizer.name={names}, which turn whole "
                          f"matrices, and it is {optimizer.name}; leave it out")
        return
    if config.model.tile_linears is not None:
        yield Problem.of("model.tile_linears", f"={config.model.tile_linears} with {asked}: a tile is no "
                         "whole matrix, and whole ones are turned; leave it out, or choose another "
                         "optimizer.name")
    if config.precision.dtype == "fp16" and config.precision.master == "none":
        yield Problem.of("precision.master", f"=none with {asked} and precision.dtype=fp16: steps are "
                         "smaller than what fp16 weights can hold; set it to fp32, or precision.dtype=bf16")
    if config.offload.optimizer != "none" and config.offload.overlap == "next":
        yield Problem.of("offload.overlap", f"=next with {asked}: owners turn matrices at the end of the "
                         "step, when all ranks have their gradients; set it to none, or leave it out")
    if optimizer.adamw_lr is not None and not optimizer.lr:
        yield Problem.of("optimizer.adamw_lr", f"={optimizer.adamw_lr} follows the schedule of optimizer.lr, "
                         "which is 0: give that a value above 0")


def check_matrices(config: Config) -> Iterator[Problem]:
    """Whether the model has what the optimizer asks for."""
    if turning(config.optimizer.name) is None:
        return
    name, lora = config.optimizer.name, config.model.lora_rank is not None
    trained = [each for layer in layers_of(config) for each in layer.parameters() if each.trains]
    if not any(each.matrices for each in trained):
        why = ("model.lora_rank trains adapters alone, which AdamW steps" if lora else
               "it turns matrices of linear layers, and no layer of the model has one")
        yield Problem.of("optimizer.name", f"={name}: {why}; choose adamw")
    elif all(each.matrices or each.counted for each in trained):
        for key, value in _given(config.optimizer, BESIDE):
            yield Idle.of(f"optimizer.{key}", f"={value} is for what AdamW steps, and "
                          f"optimizer.name={name} turns all that the model trains; leave it out")
