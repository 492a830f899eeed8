"""A layout: the settings of a config that decide how the work is laid out on devices, as plain values."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

from threed.pipeline.orders import SCHEDULES
from threed.schema import ActivationConfig, Config, OffloadConfig, ZeroConfig


class Layout(NamedTuple):
    """Each field is a key of the config, in its words."""

    tp: int
    pp: int
    dp: int
    axis_order: str
    schedule: str
    virtual_stages: int  # stages a position
    micro_batch_size: int
    sequence_parallel: bool
    stage: int  # of ZeRO
    shard_size: int  # ranks that share one copy; dp: all
    residency: int | str | None
    reduce_every: int | str | None
    policy: str
    every: int
    offload_activations: bool
    offload_optimizer: bool
    reduce_dtype: str
    tile_linears: str | None = None

    @property
    def idea(self) -> tuple[object, ...]:
        """What distinguishes one idea from another: layouts of one idea differ in details."""
        family = "" if self.pp == 1 else _FAMILIES.get(self.schedule, self.schedule)
        return self.tp, self.pp, self.stage, family

    def text(self) -> str:
        """In a line: what a person would call it."""
        words = [f"tp {self.tp} pp {self.pp} dp {self.dp}"]
        if self.axis_order != "pp-dp-tp":
            words.append(self.axis_order)
        if self.pp > 1:
            times = f" x{self.virtual_stages}" if SCHEDULES[self.schedule].virtual is None else ""
            words.append(self.schedule + times)
        words.append(f"mbs {self.micro_batch_size}")
        if self.dp > 1:
            shard = f"/{self.shard_size}" if self.shard_size < self.dp else ""
            held = f" {self.residency}" if self.stage == 3 and self.residency not in (None, 1) else ""
            words.append(f"zero {self.stage}{shard}{held}")
        words += ["sp"] * self.sequence_parallel
        if self.policy != "none":
            words.append(self.policy + (f"/{self.every}" if self.every > 1 else ""))
        words += ["act->cpu"] * self.offload_activations + ["opt->cpu"] * self.offload_optimizer
        words += [f"reduce {self.reduce_dtype}"] if self.dp > 1 else []
        words += [f"tiles {self.tile_linears}"] if self.tile_linears else []
        return ", ".join(words)


# Schedules of one kind: they trade memory for time in the same way.
_FAMILIES = {"zb-h1": "zero bubble", "zb-h2": "zero bubble", "zb-v": "v", "dualpipe-v": "v",
             "gpipe": "all forwards first", "breadth-first": "all forwards first"}


def config_of(layout: Layout, base: Config) -> Config:
    """The config `base` with a layout's settings. Settings that the layout has no use for are left out."""
    config = copy.deepcopy(base)
    parallel, deep = config.parallel, layout.pp > 1
    free = SCHEDULES.get(layout.schedule)
    parallel.tp, parallel.pp, parallel.dp = layout.tp, layout.pp, layout.dp
    parallel.axis_order, parallel.schedule = layout.axis_order, layout.schedule
    parallel.virtual_stages = layout.virtual_stages if free is not None and free.virtual is None else None
    parallel.sequence_parallel = layout.sequence_parallel
    if not deep:
        parallel.activation_limit = None
    config.train.micro_batch_size = layout.micro_batch_size
    config.zero = _zero(layout, base.zero)
    activation = replace(base.activation, policy=layout.policy,
                         every=layout.every if layout.every > 1 else None,
                         offload="cpu" if layout.offload_activations else "none")
    if layout.policy not in ("full", "budget"):
        activation = ActivationConfig(layout.policy,
                                      pieces=base.activation.pieces if layout.policy == "selective" else None)
    config.activation = activation
    if not layout.offload_optimizer:
        config.offload = OffloadConfig()
    elif base.offload.optimizer == "none":
        config.offload = OffloadConfig("cpu")
    config.precision.reduce_dtype = layout.reduce_dtype
    config.model.tile_linears = layout.tile_linears
    return config


def _zero(layout: Layout, base: ZeroConfig) -> ZeroConfig:
    shard = layout.shard_size if layout.shard_size < layout.dp else None
    return ZeroConfig(layout.stage, shard if layout.stage >= 1 else None,
                      layout.reduce_every if layout.stage >= 2 else None,
                      layout.residency if layout.stage == 3 else None,
                      base.prefetch if layout.stage == 3 else None,
                      base.persist_below if layout.stage == 3 else None)


def changes(config: Config, base: Config) -> dict[str, Any]:
    """Dotted keys with other values than in `base`."""
    ours, theirs = config.to_dict(), base.to_dict()
    return {f"{section}.{key}": value for section, values in ours.items() for key, value in values.items()
            if theirs[section][key] != value}
