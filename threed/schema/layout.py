"""Sections of the layout: what each rank holds and computes, where, and in which dtype."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from threed.base.axes import AXES, in_full
from threed.base.errors import InputError
from threed.base.paths import expanded, of_file
from threed.base.quantity import parse_limit
from threed.schedules.orders import SCHEDULES
from threed.schema.keys import key

PIECES = ("attention", "norm", "mlp_act")  # of a block, which are computed again
KEYS = "keys"  # gathered over cp: the opposite, kept instead of gathered again
DTYPES = ("fp32", "bf16", "fp16")


TIERS = {"none": "the device", "cpu": "", "nvme": ""}


# What is wrong with a value: how the message goes on after the key.


def _dp(value: int | str) -> Iterator[str]:
    if not isinstance(value, int) or value < 1:
        yield f"={value}: must be 'auto' or an integer of at least 1"


def _group(value: int | str) -> Iterator[str]:
    if value != "auto" and (not isinstance(value, int) or value < 1):
        yield f"={value}: must be 'auto' or an integer of at least 1"


def _axis_order(value: str) -> Iterator[str]:
    if sorted(in_full(value.split("-"))) != sorted(AXES):
        yield f"={value}: must name each axis once, outermost first, for example {'-'.join(AXES)}"


def _activation_limit(value: str) -> Iterator[str]:
    try:
        parse_limit(value)
    except InputError as error:
        yield f": {error}"


def _ratio(value: float) -> Iterator[str]:
    if not 0 < value <= 1:
        yield f"={value}: must be above 0 and at most 1; offload.optimizer=none offloads nothing"


def _loss_scale(value: float | str) -> Iterator[str]:
    try:
        wrong = value != "dynamic" and not 0 < float(value) < math.inf
    except ValueError:
        wrong = True
    if wrong:
        yield f"={value}: must be dynamic or a number above 0"


@dataclass
class ParallelConfig:
    """The mesh, and the schedule of its pipeline."""

    dp: int | str = key("auto", "auto: world size / (tp x cp x pp)", check=_dp)
    tp: int = key(1, "tensor-parallel ranks", least=1)
    pp: int = key(1, "pipeline positions", least=1)
    schedule: str = key("1f1b", "of docs/schedules.md, auto (the best of a search) or file:PATH",
                        choices=ChainMap[str, Any]({"auto": None}, SCHEDULES), prefix="file:", path=of_file)
    virtual_stages: int | None = key(
        None, "stages a rank; null: what the schedule has (2 in V shapes, else 1), or any for auto", least=1)
    group: int | str = key("auto", "vertical: micro-batches that pass a unit before the next one begins, a "
                           "divisor of those of a step; auto: the most that fit the device", check=_group)
    activation_limit: str | None = key(None, "most that a rank may keep: 2x (times 1F1B's peak) or bytes "
                                       "such as 30GiB", check=_activation_limit)
    sequence_parallel: bool = key(False, "outside tensor-parallel layers, activations are cut over tp by "
                                  "sequence")
    cp: int = key(1, "context-parallel ranks, which share each sequence: each has a part of its tokens",
                  least=1)
    cp_form: str = key("keys", "how attention of a part of each sequence reaches all of it", choices={
        "keys": "keys and values are gathered over cp",
        "heads": "an exchange gives each rank whole sequences of a part of the heads (Ulysses)"})
    cp_order: str = key("zigzag", "which tokens of a sequence each of them has", choices={
        "zigzag": "two chunks, equal work in sequences of one document",
        "documents": "chunks by each sequence's documents, nearly equal work in them"})
    cp_overlap: bool = key(False, "attention is two units, and keys and values travel between them, beside "
                           "other computation; backward gathers them again")
    ep: int = key(1, "expert-parallel ranks: runs of ranks of dp x tp, each of which holds all experts of a "
                  "layer", least=1)
    pair: bool = key(False, "a forward and a backward of different micro-batches are computed together, so "
                     "that what travels for one (rows for experts) does so while the other computes")
    split_messages: str = key(
        "auto", "tp ranks that hold the same send a part each to the next position, and gather it there",
        choices={"auto": "between nodes of 8 GPUs, 1 MiB and more", "on": "", "off": ""})
    axis_order: str = key("pp-dp-tp", "outermost first; neighbours on the last axis are neighbouring ranks",
                          check=_axis_order)
    layers_per_unit: int = key(1, "transformer blocks a unit", least=1)
    costs: str | None = key(None, "measured costs, a run's folder: stages are balanced and auto searches "
                            "by them; null: by FLOPs", path=expanded)
    stage_units: list[int] | None = key(None, "units of each stage, first to last; null: balanced by cost")


@dataclass
class ZeroConfig:
    stage: int = key(1, "what is cut over dp", choices={
        0: "nothing", 1: "the optimizer's state", 2: "gradients, too", 3: "parameters, too"})
    shard_size: int | None = key(None, "ranks that share one copy (stage 1 up); null: all of dp; fewer: "
                                 "copies between groups (HSDP)", least=1)
    reduce_every: int | str | None = key(
        "auto", "stage 2, 3: micro-batches between reductions, or step; auto: step with offload.optimizer "
        "where whole gradients fit the device, else 1")
    residency: int | str | None = key(
        None, "stage 3: units gathered at a time, or stage, or step (gathered once); null: 1")
    prefetch: int | None = key(None, "stage 3: how many uses ahead a unit is gathered; null: 1", least=0)
    persist_below: int | None = key(
        None, "stage 3: parameters of fewer elements are gathered once a step and stay whole; null: 0",
        least=0)


@dataclass
class ActivationConfig:
    policy: str = key("none", "recompute in backward", choices={
        "none": "", "full": "units", "selective": "pieces of blocks", "budget": "fewest units"})
    every: int | None = key(None, "full: every so many units are recomputed; null: 1, all", least=1)
    pieces: list[str] | None = key(
        None, f"selective: of {', '.join(PIECES)}, and with cp {KEYS}, which is kept instead of gathered "
        f"again; null: [norm, mlp_act]. budget: [{KEYS}] or []; null: {KEYS} where no more units are "
        "recomputed for it")
    budget: str | None = key(None, "budget: most bytes of activations that a rank may keep, such as 8GiB")
    partition: bool = key(False, "full, budget: kept inputs are cut over tp")
    offload: str = key("none", "full, budget: kept inputs go to", choices=("none", "cpu"))
    contiguous: bool = key(False, "full, budget: kept inputs lie in one preallocated arena")


@dataclass
class OffloadConfig:
    optimizer: str = key("none", "where Adam's moments and fp32 weights live and are stepped",
                         choices=TIERS)
    ratio: float = key(1.0, "share of the optimizer's state that is offloaded, by units; the device steps "
                       "the rest meanwhile", check=_ratio)
    parameters: str = key("none", "stage 3: where this rank's part of the parameters lives", choices=TIERS)
    nvme_path: str | None = key(None, "nvme: a folder on a fast disk of each machine", path=expanded)
    gradients: str = key("auto", "where reduced gradients are until their norm is known", choices={
        "device": "", "host": "each part goes there at once, and is added up there (stage 2, 3)",
        "auto": "the device, where they fit"})
    overlap: str = key("auto", "when the host steps", choices={
        "next": "at the head of the next step, beside what does not need the new weights yet",
        "none": "at the end of the step", "auto": "next, or none where matrices are turned"})


@dataclass
class PrecisionConfig:
    dtype: str = key("fp32", "of compute, weights as compute reads them, and messages", choices=DTYPES)
    loss_scale: int | float | str | None = key(None, "dynamic | a number; null: dynamic for fp16, 1 "
                                               "otherwise", check=_loss_scale)
    initial_loss_scale: float = key(65536.0, "of dynamic", above=0)
    loss_scale_window: int = key(1000, "updates in a row without an overflow, after which dynamic doubles",
                                 least=1)
    hysteresis: int = key(2, "overflows until dynamic halves; the count begins anew when it doubles", least=1)
    min_loss_scale: float = key(1.0, "the least scale of dynamic", above=0)
    grad_dtype: str = key("fp32", "of accumulated gradients, fp32 or what dtype is", choices=DTYPES)
    reduce_dtype: str = key("fp32", "of gradients that are sent over dp, fp32 or what dtype is",
                            choices=DTYPES)
    master: str = key("fp32", choices={
        "fp32": "a 16-bit weight has an fp32 copy that the optimizer updates",
        "none": "it is updated itself"})
