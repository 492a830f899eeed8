"""The host: what ranks keep in its memory, all those of one node together, and whether that fits. `predict`,
`check`, `search`, `init` and a run at its start all ask here.

    of a rank = what is offloaded: state, weights, gradients, kept inputs
              + buffers of what is on its way
              + the copy from which a checkpoint is written (checkpoint.background)

A node must have more: `Hardware.host_free_share` of its memory stays free. Where ranks compute on CPUs, what
they hold as their device's memory is beside this.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from threed.base.errors import ThreedError
from threed.base.mesh import Mesh
from threed.base.quantity import BYTES, many, show_bytes
from threed.config.validate import validate
from threed.planner import analyse, make_mesh
from threed.prediction.hardware import Hardware
from threed.program.summary import StageSummary, stages
from threed.schema import Config

STEPS = 20  # of offload.ratio, from 0 to 1
FEW = 0.5  # below this offload.ratio there is little left of an offload
MOST = 3  # remedies that are named: each takes a plan


class HostUse(NamedTuple):
    """Bytes of a node's memory that its ranks need together: those of the fullest node."""

    node: int
    ranks: int
    bytes: int


class RankBytes(NamedTuple):
    """Bytes on the host of a rank of a position."""

    held: int
    snapshot: int  # of ranks of the first shard group only

    @classmethod
    def of(cls, row: StageSummary) -> RankBytes:
        return cls(row.host_bytes, row.snapshot_bytes)


def bytes_of(mesh: Mesh, ranks: Sequence[int], rows: Sequence[RankBytes]) -> int:
    """Bytes that these ranks need together. `rows`: by position."""
    groups = mesh.group("pp", 0)
    apart = groups[1] - groups[0] if len(groups) > 1 else 1
    places = Counter((rank // apart % len(groups),
                      not mesh.has_copies or mesh.group("replica", rank)[0] == rank) for rank in ranks)
    return sum(count * (rows[position].held + first * rows[position].snapshot)
               for (position, first), count in places.items())


def fullest(mesh: Mesh, node_ranks: float, rows: Sequence[RankBytes]) -> HostUse:
    """Of the node whose ranks need most. `node_ranks`: ranks of a node."""
    each = int(min(node_ranks, mesh.size))
    if len({*rows}) == 1 and not (mesh.has_copies and rows[0].snapshot):
        return HostUse(0, each, each * sum(rows[0]))
    if not any(map(any, rows)):
        return HostUse(0, each, 0)
    nodes = [range(first, min(first + each, mesh.size)) for first in range(0, mesh.size, each)]
    uses = [HostUse(node, len(ranks), bytes_of(mesh, ranks, rows)) for node, ranks in enumerate(nodes)]
    return max(uses, key=lambda use: use.bytes)


def use_of(config: Config, machine: Hardware, rows: Sequence[StageSummary]) -> HostUse:
    """Of a plan with these rows, by position, on the nodes of a machine."""
    return fullest(make_mesh(config), machine.node_ranks, [*map(RankBytes.of, rows)])


def fits(use: HostUse, machine: Hardware) -> bool:
    return use.bytes <= machine.usable_host_bytes


def too_much(use: HostUse, machine: Hardware, config: Config | None = None) -> str | None:
    """Why a plan does not fit into the memory of a node's host; None where it does. `config`: of the plan, to
    look for what would make it fit."""
    if fits(use, machine):
        return None
    text = (f"{many(use.ranks, 'rank')} of node {use.node} will hold {show_bytes(use.bytes)} in the host's "
            f"memory, more than the {show_bytes(machine.usable_host_bytes)} that may be in use of "
            f"{show_bytes(machine.host_bytes)} ({machine.host_free_share:.0%} stay free: host_memory_gb and "
            "host_free_share of --hardware)")
    return text if config is None else f"{text}; {show_remedies(remedies(config, machine))}"


def room(use: HostUse, machine: Hardware) -> str:
    """How much of a host a plan that fits leaves."""
    return (f"the host fits, too: {show_bytes(use.bytes)} for {many(use.ranks, 'rank')} of a node, of the "
            f"{show_bytes(machine.usable_host_bytes)} that may be in use")


def document(use: HostUse, machine: Hardware) -> dict[str, Any]:
    """The same for `--json`."""
    return {"host": {"node": use.node, "ranks": use.ranks, "bytes": use.bytes,
                     "memory_bytes": machine.host_bytes, "usable_bytes": machine.usable_host_bytes,
                     "fits": fits(use, machine)}}


# ---------------------------------------------------------------- what would make it fit


class Remedy(NamedTuple):
    """A change of a config, and what the ranks of the fullest node need with it."""

    setting: str
    bytes: int
    fits: bool  # the host's memory, and the device's


def remedies(config: Config, machine: Hardware) -> Iterator[Remedy]:
    """Changes of a config that need less of the host, each by its own plan, and fewer ranks a node."""
    yield from _by_ratio(config, machine)
    for setting, other in _changes(config):
        if not validate(other) and (known := _with(other, machine)) is not None:
            yield Remedy(setting, *known)
    ranks = int(min(machine.node_ranks, config.world_size)) if not machine.waits else 1
    while ranks > 1:
        ranks //= 2
        if (known := _with(config, replace(machine, devices=ranks))) is not None:
            yield Remedy(f"{many(ranks, 'rank')} a node", *known)
            if known[1]:
                return


def show_remedies(found: Iterator[Remedy]) -> str:
    """What to do: the first MOST that fit."""
    tried, good = list[Remedy](), list[str]()
    for each in found:
        tried.append(each)
        good += [f"{each.setting} ({show_bytes(each.bytes)})"] * each.fits
        if len(good) == MOST:
            break
    if good:
        return "it fits with " + ", or ".join(good)
    least = min(tried, key=lambda each: each.bytes, default=None)
    nearest = f": least is {show_bytes(least.bytes)}, with {least.setting}" if least is not None else ""
    return f"no other setting of offload fits host and device{nearest}; use more nodes, or a smaller model"


def _by_ratio(config: Config, machine: Hardware) -> Iterator[Remedy]:
    """The largest offload.ratio, in steps of 1/STEPS, with which the host's memory is enough. A copy for
    checkpoints is on the host wherever the state is: where it leaves little, the same without it."""
    if config.offload.optimizer != "cpu":
        return
    found, ratio = _largest(config, machine)
    if found is not None:
        yield found
    if config.checkpoint.background and ratio < FEW:
        without = _changed(config, {"checkpoint.background": False})
        known = _with(without, machine)
        if known is not None and known[1]:  # which `_changes` has
            return
        found, _ = _largest(without, machine)
        if found is not None:
            yield found._replace(setting=f"checkpoint.background=false {found.setting}")


def _largest(config: Config, machine: Hardware) -> tuple[Remedy | None, float]:
    """That ratio as a remedy, and as a number."""
    low, high, best, ratio = 1, math.ceil(config.offload.ratio * STEPS) - 1, None, 0.0
    while low <= high:
        middle = (low + high) // 2
        other = _changed(config, {"offload.ratio": middle / STEPS})
        known = _with(other, machine) if not validate(other) else None
        if known is not None and known[0] <= machine.usable_host_bytes:
            ratio, low = middle / STEPS, middle + 1
            best = Remedy(f"offload.ratio={ratio:g}", *known)
        else:
            high = middle - 1
    return best, ratio


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    """(text, config) of settings that need less memory of the host."""
    offload, precision = config.offload, config.precision
    changes: list[dict[str, Any]] = []
    if offload.optimizer == "cpu" and BYTES[precision.grad_dtype] > BYTES[precision.dtype]:
        changes.append({"precision.grad_dtype": precision.dtype, "precision.reduce_dtype": precision.dtype})
    if offload.parameters == "cpu":
        changes.append({"offload.parameters": "none"})
    if config.activation.offload != "none":
        changes.append({"activation.offload": "none"})
    if config.checkpoint.background:
        changes.append({"checkpoint.background": False})
    if offload.optimizer == "cpu":
        changes.append({"offload.optimizer": "nvme", "offload.nvme_path": offload.nvme_path or "/FOLDER"})
    for change in changes:
        text = " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}"
                        for key, value in change.items())
        yield text, _changed(config, change)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy with other values."""
    other = copy.deepcopy(config)
    for key, value in changes.items():
        section, name = key.split(".")
        setattr(getattr(other, section), name, value)
    return other


def _short(config: Config) -> Config:
    """As many micro-batches as hold the most at a time, twice as many as positions; more take longer to
    plan."""
    few = min(config.num_microbatches, 2 * config.parallel.pp)
    short = _changed(config, {"train.global_batch_size": few * config.dp * config.train.micro_batch_size})
    return config if validate(short) else short


def _with(config: Config, machine: Hardware) -> tuple[int, bool] | None:
    """Bytes of the fullest node, and whether they fit it, and the device fits its share. None where a config
    has no plan."""
    from threed.prediction import peak

    try:
        short = _short(config)
        analysis = analyse(short, room=peak.plan_room(machine, config))
    except ThreedError:
        return None
    rows = stages(analysis)
    use = use_of(config, machine, rows)
    held = peak.peaks(analysis, machine, rows=rows) if fits(use, machine) else []
    enough = bool(held) and peak.too_much(held, machine, peak.memory_of(machine, config)) is None
    return use.bytes, enough
