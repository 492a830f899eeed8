"""Helps: what would make a layout's step shorter, and what it is made of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from threed.base.quantity import BYTES
from threed.layout_search.short_plan import ShortPlans
from threed.program.instruction import Op, Tier
from threed.program.table import Table


def helps(plans: ShortPlans) -> dict[str, float]:
    """By how much a layout's step would be shorter (as a share, a sequence) with something else, the most
    first: what would help."""
    config, hardware = plans.config, plans.hardware
    values = {"a global batch twice as large": plans.would_take_s(times=2) / 2}
    if config.world_size > 1:
        values["adapters twice as fast"] = plans.would_take_s(
            hardware=replace(hardware, adapter_gbps=2 * hardware.adapter_gbps))
        values["links in a node twice as fast"] = plans.would_take_s(
            hardware=replace(hardware, node_gbps=2 * hardware.node_gbps))
    dtype = config.precision.dtype
    if config.data_ranks > 1 and config.precision.reduce_dtype == "fp32" != dtype:
        values[f"precision.reduce_dtype={dtype} (rounds)"] = plans.would_take_s(
            change=partial(_reduced_in, BYTES[dtype]))
    if config.activation.policy != "none":
        values["memory for no recomputation"] = plans.would_take_s(free=(Op.RECOMPUTE,), change=_never_again)
    if config.offload.optimizer != "none":
        values["memory for the optimizer"] = plans.would_take_s(
            free=(Op.OFFLOAD, Op.FETCH), change=_state_on_device)
    now_s = plans.would_take_s()
    gains = {words: 1 - seconds / now_s for words, seconds in values.items()}
    return {words: gain for words, gain in sorted(gains.items(), key=lambda each: -each[1]) if gain > 0.005}


def _reduced_in(size: int, table: Table) -> Table:
    """With gradients that are sent in elements of so many bytes."""
    return replace(table, parameters={p: replace(unit, reductions=tuple(
        step._replace(bytes=size) if step.staged else step for step in unit.reductions))
        for p, unit in table.parameters.items()})


def _never_again(table: Table) -> Table:
    """With pieces of units that are not computed again."""
    return replace(table, units=tuple(replace(unit, again=()) for unit in table.units))


def _state_on_device(table: Table) -> Table:
    return replace(table, parameters={p: replace(unit, state_home=Tier.DEVICE)
                                      for p, unit in table.parameters.items()})
