"""Layouts: the settings of a config that lay work out on devices, as plain values, and what follows from
them. Only `reduce_dtype` changes what is computed; a search leaves it alone unless it is asked to.

Beside this file, space.py alone knows which settings there are besides mesh, schedule and micro-batch: a
setting that is new is a field here and values there (tests/test_layers.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from threed.config.values import get
from threed.schedules.orders import SCHEDULES, Order
from threed.schema import ActivationConfig, Config, OffloadConfig, ZeroConfig

# Field of a layout -> key of the config
KEYS = {
    "tp": "parallel.tp", "pp": "parallel.pp", "dp": "parallel.dp", "axis_order": "parallel.axis_order",
    "schedule": "parallel.schedule", "virtual_stages": "parallel.virtual_stages",
    "micro_batch_size": "train.micro_batch_size", "sequence_parallel": "parallel.sequence_parallel",
    "stage": "zero.stage", "shard_size": "zero.shard_size", "residency": "zero.residency",
    "reduce_every": "zero.reduce_every", "policy": "activation.policy", "every": "activation.every",
    "offload_activations": "activation.offload", "offload_optimizer": "offload.optimizer",
    "tile_linears": "model.tile_linears", "reduce_dtype": "precision.reduce_dtype", "ep": "parallel.ep",
    "pair": "parallel.pair", "cp": "parallel.cp", "cp_form": "parallel.cp_form",
    "cp_overlap": "parallel.cp_overlap",
}


def without_cp(fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same fields, of layouts in which each rank has all tokens of its sequences; None where parallel.cp
    is among them."""
    return None if "cp" in fixed else {**fixed, "cp": 1, "cp_form": "keys", "cp_overlap": False}


def sends_often(zero: Layout | ZeroConfig) -> bool:
    """Whether, on several ranks of dp, parameters are gathered or gradients are reduced in every micro-batch.
    """
    return (zero.stage == 3 and zero.residency != "step") or (zero.stage >= 2 and zero.reduce_every != "step")


class Layout(NamedTuple):
    """Each field is a key of the config (KEYS), in its words."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    axis_order: str = "pp-dp-tp"
    schedule: str = "1f1b"
    virtual_stages: int = 1  # stages a position
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    stage: int = 1  # of ZeRO
    shard_size: int = 1  # ranks that share one copy
    residency: int | str | None = None  # of stage 3
    reduce_every: int | str | None = None  # of stages 2 and 3
    policy: str = "none"
    every: int = 1
    offload_activations: bool = False
    offload_optimizer: bool = False
    tile_linears: str | None = None
    reduce_dtype: str | None = None  # None: what the config has
    ep: int = 1
    pair: bool = False
    cp: int = 1
    cp_form: str = "keys"
    cp_overlap: bool = False

    @property
    def data_ranks(self) -> int:
        """Ranks with data of their own, over which ZeRO works."""
        return self.dp * self.cp

    @property
    def can_pair(self) -> bool:
        """Whether it has what travels, and a schedule for `pair`."""
        return (self.ep > 1 or self.cp_overlap) and bool(SCHEDULES[self.schedule].paired)

    @property
    def idea(self) -> tuple[object, ...]:
        """What distinguishes one idea from another: layouts of one idea differ in details."""
        family = "" if self.pp == 1 else _FAMILIES.get(self.schedule, self.schedule)
        often = self.data_ranks > 1 and sends_often(self)
        return (self.tp, self.pp, family, often, self.policy == "full", self.offload_optimizer,
                self.reduce_dtype, self.ep, self.cp)

    # What follows for a step

    @property
    def place(self) -> tuple[int, ...]:
        """The position of each stage."""
        return _place(self.schedule, self.pp, self.virtual_stages)

    def order(self, microbatches: int) -> Order:
        """The tasks of each position."""
        return _order(self.schedule, self.pp, microbatches, self.virtual_stages, self.pair)

    @property
    def reduces_often(self) -> bool:
        """Whether gradients are reduced after every micro-batch."""
        return self.stage >= 2 and self.reduce_every == 1

    @property
    def adds_whole(self) -> bool:
        """Whether whole gradients of all units are added up, and reduced once a step."""
        return self.reduce_every == "step"

    @property
    def by_number(self) -> bool:
        """Whether a unit is computed again by its number."""
        return self.every > 1

    @property
    def budgeted(self) -> bool:
        """Whether only a plan knows which units are computed again."""
        return self.policy == "budget"

    def window(self, stages: Collection[int]) -> int:
        """Parameter units that may be gathered at one time, where they come and go in every micro-batch; 0
        where they do not. `stages`: how many such units each stage of a position has."""
        if self.stage < 3 or self.residency == "step":
            return 0
        return self.residency if isinstance(self.residency, int) else max(stages)

    def alive(self, stages: list[dict[object, int]], ahead: int) -> int:
        """Bytes of the weights that are gathered at one time, at least: of a stage, of neighbouring units, or
        of all. `stages`: bytes of a position's units, by stage. `ahead`: units gathered before their turn."""
        if isinstance(self.residency, int):
            rows = [[size for size in stage.values() if size] for stage in stages]
            count = self.residency + ahead
            return max(sum(row[first:first + count]) for row in rows for first in range(max(1, len(row))))
        if self.residency == "stage":
            return max(sum(stage.values()) for stage in stages)
        return sum({unit: size for stage in stages for unit, size in stage.items()}.values())

    def with_tiles(self, limit: str) -> Layout:
        """With layers cut into tiles of at most so many bytes."""
        return self._replace(tile_linears=limit)

    # What some things depend on, as a layout whose other fields are as by default

    def of_model(self) -> Layout:
        """The units of the model. (Ranks that have heads of their own leave fewer for each tile.)"""
        return self.of_units()._replace(sequence_parallel=False, micro_batch_size=1, policy="none", every=1,
                                        offload_activations=False, ep=1,
                                        cp=self.cp if self.cp_form == "heads" else 1)

    def of_mesh(self) -> Layout:
        """Groups of ranks."""
        return Layout(self.tp, self.pp, self.dp, self.axis_order, ep=self.ep, cp=self.cp,
                      cp_form=self.cp_form, cp_overlap=self.cp_overlap)

    def of_units(self) -> Layout:
        """What a unit computes, but for where its ranks are."""
        return self.of_activations()._replace(
            pp=1, dp=1, shard_size=1, axis_order="pp-dp-tp", schedule="1f1b", virtual_stages=1, pair=False,
            policy="none" if self.policy == "budget" else self.policy)

    def of_parameters(self) -> Layout:
        """What a rank holds of parameters all the time."""
        return self._replace(pp=1, axis_order="pp-dp-tp", schedule="1f1b", virtual_stages=1,
                             sequence_parallel=False, micro_batch_size=1, policy="none", every=1,
                             offload_activations=False, pair=False)

    def of_reductions(self) -> Layout:
        """Reductions of gradients."""
        return self.of_mesh()._replace(sequence_parallel=self.sequence_parallel, stage=self.stage,
                                       shard_size=self.shard_size, reduce_dtype=self.reduce_dtype,
                                       tile_linears=self.tile_linears)

    def of_activations(self) -> Layout:
        """What computes the same, with the same activations, and leaves parameters as they are."""
        return self._replace(stage=0, shard_size=self.data_ranks, residency=None, reduce_every=None,
                             offload_optimizer=False, reduce_dtype=None)

    def of_working(self) -> Layout:
        """What is on a device besides parameters, gradients and optimizer state."""
        return self.of_activations()._replace(axis_order="pp-dp-tp")

    def text(self) -> str:
        """In a line: what a person would call it."""
        form = self.cp_form + ", overlap" * self.cp_overlap
        more = f" cp {self.cp} ({form})" * (self.cp > 1) + f" ep {self.ep}" * (self.ep > 1)
        words = [f"tp {self.tp} pp {self.pp} dp {self.dp}{more}"]
        if self.axis_order != "pp-dp-tp":
            words.append(self.axis_order)
        if self.pp > 1:
            times = f" x{self.virtual_stages}" if SCHEDULES[self.schedule].virtual is None else ""
            words.append(self.schedule + times)
        words.append(f"micro-batch {self.micro_batch_size}")
        words += ["pairs"] * self.pair + ["sequence parallel"] * self.sequence_parallel
        if self.data_ranks > 1:
            over = f" over {self.shard_size}" if self.shard_size < self.data_ranks else ""
            words.append(f"ZeRO-{self.stage}{over}")
            words += [f"residency {self.residency}"] * (self.stage == 3)
            words += [f"reduce every {self.reduce_every}"] * (self.stage >= 2 and self.reduce_every != "step")
        if self.policy != "none":
            words.append("recompute " + self.policy + (f"/{self.every}" if self.every > 1 else ""))
        words += ["inputs on host"] * self.offload_activations
        words += ["optimizer on host"] * self.offload_optimizer
        words += [f"tiles of {self.tile_linears}"] * (self.tile_linears is not None)
        words += [f"gradients sent in {self.reduce_dtype}"] * (self.reduce_dtype in ("bf16", "fp16"))
        return ", ".join(words)


@lru_cache(512)
def _place(name: str, p: int, v: int) -> tuple[int, ...]:
    return SCHEDULES[name].place(p, v)


@lru_cache(64)
def _order(name: str, p: int, m: int, v: int, pair: bool) -> Order:
    return SCHEDULES[name].order(p, m, v, pair)


# (stage, micro-batches that wait for its backward, or for the second half of it), of those that wait
Held = tuple[tuple[int, int, int], ...]


class MostHeld(NamedTuple):
    """Before a backward of a stage, or a half of one."""

    stage: int
    kind: str  # of the task
    held: Held


def most_held(layout: Layout, microbatches: int) -> list[list[MostHeld]]:
    """By position: when its tasks hold most."""
    return _most_held(layout.schedule, layout.pp, microbatches, layout.virtual_stages, layout.pair)


@cache
def _most_held(*about: Any) -> list[list[MostHeld]]:
    """What is left out holds less than another before a task of the same kind and stage."""
    positions = []
    for tasks in _order(*about):
        whole, half, before = Counter[int](), Counter[int](), dict[MostHeld, None]()
        for task in tasks:
            if task.kind == "F":
                whole[task.stage] += 1
                continue
            held = tuple((stage, whole[stage], half[stage]) for stage in whole if whole[stage] or half[stage])
            before[MostHeld(task.stage, task.kind, held)] = None
            whole[task.stage] -= task.kind != "W"
            half[task.stage] += {"B": 0, "I": 1, "W": -1}[task.kind]
        positions.append([each for each in before
                          if not any(other is not each and _covers(other, each) for other in before)])
    return positions


def _covers(other: MostHeld, one: MostHeld) -> bool:
    more = {stage: (whole, half) for stage, whole, half in other.held}
    return other[:2] == one[:2] and all(of >= whole and later >= half for stage, whole, half in one.held
                                        for of, later in [more.get(stage, (0, 0))])


def added_up(layout: Layout, microbatches: int) -> tuple[frozenset[frozenset[int]], ...]:
    """By position: the stages that have begun to add up gradients of a step, and have not ended, at each
    time."""
    return _added_up(layout.schedule, layout.pp, microbatches, layout.virtual_stages, layout.pair)


@cache
def _added_up(*about: Any) -> tuple[frozenset[frozenset[int]], ...]:
    positions = []
    for tasks in _order(*about):
        left = Counter(task.stage for task in tasks if task.kind in "BW")
        begun, times = frozenset[int](), set[frozenset[int]]()
        for task in tasks:
            if task.kind in "BW":
                left[task.stage] -= 1
                begun = begun | {task.stage} if left[task.stage] else begun - {task.stage}
                times.add(begun)
        positions.append(frozenset(times))
    return tuple(positions)


# Schedules of one kind: they trade memory for time in the same way.
_FAMILIES = {"zb-h1": "zero bubble", "zb-h2": "zero bubble", **dict.fromkeys(
    ("zb-v", "dualpipe-v", "v-half", "v-min"), "v"), "gpipe": "all forwards first",
    "breadth-first": "all forwards first"}


def schedules() -> tuple[str, ...]:
    """Those that layouts may have: all but those whose stages are units, which are for parameters that come
    and go, and no search offloads them by itself. (Looked up at each call: a script may add one.)"""
    return tuple(name for name, row in SCHEDULES.items() if not row.by_unit)


def copied(config: Config) -> Config:
    """A config with the same values, whose keys can be set apart. (A search makes thousands.)"""
    other = copy.copy(config)
    for name, section in vars(config).items():
        setattr(other, name, copy.copy(section))
    return other


def config_of(layout: Layout, base: Config) -> Config:
    """The config `base` with a layout's settings. Settings that the layout has no use for are left out."""
    config = copied(base)
    parallel, free = config.parallel, SCHEDULES[layout.schedule].virtual is None
    parallel.tp, parallel.pp, parallel.dp, parallel.ep = layout.tp, layout.pp, layout.dp, layout.ep
    parallel.cp, parallel.cp_form, parallel.cp_overlap = layout.cp, layout.cp_form, layout.cp_overlap
    if layout.cp == 1 or parallel.cp_form == "heads":
        parallel.cp_order = "zigzag"
    parallel.axis_order, parallel.schedule = layout.axis_order, layout.schedule
    parallel.virtual_stages = layout.virtual_stages if free else None
    parallel.sequence_parallel, parallel.pair = layout.sequence_parallel, layout.pair
    config.train.micro_batch_size = layout.micro_batch_size
    shard = layout.shard_size if layout.shard_size < layout.data_ranks else None
    third = base.zero if layout.stage == 3 else ZeroConfig()
    config.zero = ZeroConfig(layout.stage, shard if layout.stage >= 1 else None,
                             layout.reduce_every if layout.stage >= 2 and layout.reduce_every else "auto",
                             layout.residency if layout.stage == 3 else None,
                             third.prefetch, third.persist_below)
    if layout.policy in ("full", "budget"):
        config.activation = replace(base.activation, policy=layout.policy, pieces=None,
                                    every=layout.every if layout.every > 1 else None,
                                    budget=base.activation.budget if layout.policy == "budget" else None,
                                    offload="cpu" if layout.offload_activations else "none")
    else:
        pieces = base.activation.pieces if layout.policy == "selective" else None
        config.activation = ActivationConfig(layout.policy, pieces=pieces)
    config.offload = OffloadConfig()
    if layout.offload_optimizer:
        tier = "nvme" if base.offload.optimizer == "nvme" else "cpu"
        # One that reduces after each micro-batch saves memory: its gradients leave the device.
        leaves = {"auto": layout.reduce_every not in ("step", "auto"), "host": True, "device": False}
        where = "host" if layout.stage >= 2 and leaves[base.offload.gradients] else "device"
        config.offload = replace(base.offload, optimizer=tier, gradients=where,
                                 parameters=base.offload.parameters if layout.stage == 3 else "none")
    config.model.tile_linears = layout.tile_linears
    config.precision.reduce_dtype = layout.reduce_dtype or base.precision.reduce_dtype
    return config


def fields_of(config: Config, keys: Collection[str]) -> dict[str, Any]:
    """Field of a layout -> what some keys of a config say of it; none of a key that leaves it open. (null is
    what the schedule or the ZeRO stage has; of tiles, that there are none.)"""
    fields = {name: get(config, key) for name, key in KEYS.items() if key in keys}
    for name in ("offload_activations", "offload_optimizer"):
        if name in fields:
            fields[name] = fields[name] != "none"
    return {name: value for name, value in fields.items()
            if (value is not None or name == "tile_linears") and (name, value) != ("dp", "auto")}


def changes(config: Config, base: Config) -> dict[str, Any]:
    """Dotted keys with other values than in `base`."""
    ours, theirs = config.to_dict(), base.to_dict()
    return {f"{section}.{key}": value for section, values in ours.items() for key, value in values.items()
            if theirs[section][key] != value}
