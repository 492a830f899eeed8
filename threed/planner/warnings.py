"""Warnings: what a plan does less well than its config asks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from threed.config.validate import warnings
from threed.models.tiling import layers_of, share_of
from threed.program.instruction import Instruction, Op
from threed.program.pairs import has_pairs
from threed.program.plan import Plan
from threed.schema import Config
from threed.spec.parameter import Share


@runtime_checkable
class Undivided(Protocol):
    """A layer that says its matrices if none of their gradients can wait for the second half of backward."""

    def undivided(self, share: Share) -> tuple[str, ...]: ...


@runtime_checkable
class MeanLoss(Protocol):
    """A last layer that says whether each micro-batch has the same weight in its loss, and may have fewer
    targets that count."""

    def weighs_alike(self, share: Share) -> bool: ...


def warnings_of(config: Config, plan: Plan) -> list[str]:
    """All warnings of a config, and of its plan."""
    return [*warnings(config), *undivided(config, plan.programs["train"]), *unpaired(plan), *unequal(config)]


def undivided(config: Config, programs: Sequence[Sequence[Instruction]]) -> list[str]:
    """A warning for layers of whose backward nothing is left for the second half, where programs have
    halves."""
    if not any(item.op == Op.BACKWARD_WEIGHT for program in programs for item in program):
        return []
    share, found = share_of(config), dict[tuple[str, ...], list[str]]()
    for layer in layers_of(config):
        if isinstance(layer, Undivided) and (paths := layer.undivided(share)):
            found.setdefault(paths, []).append(layer.name)
    return [f"layer {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: BACKWARD_INPUT "
            f"computes the gradients of {', '.join(paths)}, too, and BACKWARD_WEIGHT, with which the "
            "schedule would fill its bubble, nothing: it could compute those of matrices that one product "
            "alone uses (torch.nn.Linear, a convolution)"
            for paths, names in found.items()]


def unpaired(plan: Plan) -> list[str]:
    """A warning where parallel.pair finds nothing to compute together."""
    if plan.table.pair is None or any(has_pairs(program, plan.table) for program in plan.programs["train"]):
        return []
    schedule = plan.config.parallel.schedule if plan.config else "this order"
    return [f"parallel.pair=true: under {schedule} no forward and backward are computed together, since one "
            "would wait for the other longer than its exchanges take, or there is one micro-batch; "
            "zb-v, dualpipe-v and interleaved have pairs with enough micro-batches"]


def unequal(config: Config) -> list[str]:
    """A warning where a loss is a mean over each micro-batch, and these may have unequal counts."""
    if config.num_microbatches * config.dp == 1:
        return []
    return [f"the loss of layer {layer.name}'s output is a mean over a micro-batch: where some targets do "
            "not count (padding, a mask), the tokens of micro-batches with few that count weigh more; let "
            "the loss return (sum, count), and it is divided by the count of the global batch"
            for layer in layers_of(config)[-1:]
            if isinstance(layer, MeanLoss) and layer.weighs_alike(share_of(config))]
