"""The passes: an order becomes programs, one pass after the other. No torch.

A pass is a pure function from the programs of all positions to the programs of all positions; it reads the
table and nothing else. To add a pass, write the function and add a line here: passes run in the order of the
list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from threed.features.activation import plan as activation
from threed.features.offload import plan as offload
from threed.features.pipeline.message_parts import in_parts
from threed.features.pipeline.plan import communicate, expand
from threed.features.travel.pair import pair
from threed.features.travel.plan import in_halves, travel
from threed.features.zero import plan as zero
from threed.program.instruction import Programs
from threed.program.names import ENTER, EVALUATE, GENERATE, SETTLE, SNAPSHOT, TRAIN, VERIFY
from threed.program.plan import Plan
from threed.program.table import Table
from threed.schedules.orders import Order, forward_only
from threed.schema import Config


class Pipeline(NamedTuple):
    """An order, and the position of each of its stages."""

    order: Order
    place: tuple[int, ...]


class Pass(NamedTuple):
    """One step from an order to programs."""

    name: str
    apply: Callable[[Programs, Table], Programs]


MESSAGES = (
    Pass("messages", communicate),
    Pass("messages in parts", in_parts),
)
# The passes of a training step, after its forwards and backwards have been expanded.
STEP = (
    Pass("recompute", activation.recompute),
    Pass("pair", pair),
    Pass("halves", in_halves),
    Pass("partition", activation.partition),
    Pass("offload activations", activation.offload),
    *MESSAGES,
    Pass("zero", zero.train),
    Pass("travel", travel),
)
PARAMETERS = Pass("offload parameters", offload.parameters)
# Program -> the pass that offloads the optimizer, where the host's updates come at the head of the next step
OVERLAPPED = {TRAIN: offload.head, ENTER: offload.enter}
FORWARD = {
    EVALUATE: (
        *MESSAGES,
        Pass("zero", zero.evaluate),
        Pass("travel", travel),
        PARAMETERS,
    ),
    GENERATE: (
        *MESSAGES,
        Pass("zero", zero.forward),
        Pass("travel", travel),
        PARAMETERS,
    ),
}


def recipes(config: Config, pipeline: Pipeline, table: Table) -> dict[str, tuple[Pass, ...]]:
    """The passes of each program of a plan (program.table.Plan names them)."""
    step = (Pass("order", partial(_expand, pipeline.order, "all")), *STEP)
    updates = OVERLAPPED if table.update.overlap else {TRAIN: offload.optimizer}
    passes: dict[str, tuple[Pass, ...]] = {name: (*step, Pass("offload the optimizer", update), PARAMETERS)
                                           for name, update in updates.items()}
    if table.update.overlap:
        passes[SETTLE] = (Pass("settle", offload.settle),)
    if config.run.verify_every:
        passes[VERIFY] = (*passes[ENTER if table.update.overlap else TRAIN], Pass("verify", zero.rehearse))
    if config.train.eval_every:
        passes[EVALUATE] = forward_recipe(EVALUATE, config, pipeline, table)
    if config.train.sample_every:
        passes[GENERATE] = forward_recipe(GENERATE, config, pipeline, table)
    if table.update.snapshots:
        passes[SNAPSHOT] = (Pass("snapshot", offload.snapshot),)
    return passes


def forward_recipe(name: str, config: Config, pipeline: Pipeline, table: Table) -> tuple[Pass, ...]:
    """The passes of a program that only runs forward."""
    order = forward_only(pipeline.place, table.microbatches(name), config.grouped)
    keep = "logits" if name == GENERATE else "none"
    return Pass("order", partial(_expand, order, keep)), *FORWARD[name]


def run_passes(config: Config, pipeline: Pipeline, table: Table,
               named: dict[str, tuple[Pass, ...]] | None = None) -> Plan:
    """The plan of a table, unchecked. `named`: the passes of its programs, if not those of `recipes`."""
    done: dict[tuple[Pass, ...], Programs] = {(): [[] for _ in range(table.num_positions)]}

    def after(passes: tuple[Pass, ...]) -> Programs:
        for stop in range(1, len(passes) + 1):  # programs share the results of their first passes
            if passes[:stop] not in done:
                done[passes[:stop]] = passes[stop - 1].apply(done[passes[:stop - 1]], table)
        return done[passes]

    named = named or recipes(config, pipeline, table)
    programs = {name: [tuple(program) for program in after(passes)] for name, passes in named.items()}
    return Plan(table, programs, config)


def stages_of(config: Config, pipeline: Pipeline, table: Table, name: str) -> list[tuple[str, Programs]]:
    """The passes of one program, each with the programs after it."""
    programs: Programs = [[] for _ in range(table.num_positions)]
    stages = []
    for step in recipes(config, pipeline, table)[name]:
        programs = step.apply(programs, table)
        stages.append((step.name, programs))
    return stages


def _expand(order: Order, keep: str, _: Programs, table: Table) -> Programs:
    return expand(order, table, keep)
