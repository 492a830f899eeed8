"""Peak: what a rank needs of its device's memory. `predict`, `check`, `search`, `init` and the page all ask
here, so that one plan on one machine has one peak.

    peak = fixed      parameters, gradients, optimizer state, buffers: all the time
         + working    activations, and temporaries inside an instruction, when the two together are most
         + taken      CUDA and its libraries, and the buffers of each NCCL communicator

A device must have more: `Hardware.free_share` of its memory stays free, for what the allocator loses to
fragmentation, and what a kernel uses inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from threed.base.mesh import GROUPS, Mesh
from threed.base.quantity import show_bytes
from threed.planner import make_mesh
from threed.planner.from_config import config_of
from threed.prediction.hardware import Hardware
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction
from threed.program.plan import Plan
from threed.program.summary import StageSummary, stages
from threed.program.walk import Channels, channels
from threed.schema import Config

Temporaries = Callable[[Instruction], int]  # bytes of an instruction beside all slots


class Peak(NamedTuple):
    """Bytes of a rank of one position when it needs most."""

    position: int
    fixed_bytes: int
    activation_bytes: int  # the most of activations alone
    working_bytes: int  # the most of activations and temporaries together
    context_bytes: int  # for CUDA and its libraries
    communicators: int
    communicator_bytes: int  # of all communicators

    @property
    def taken_bytes(self) -> int:
        return self.context_bytes + self.communicator_bytes

    @property
    def total(self) -> int:
        return self.fixed_bytes + self.working_bytes + self.taken_bytes


def peaks(analysis: Analysis, machine: Hardware, temporaries: Temporaries | None = None,
          rows: list[StageSummary] | None = None) -> list[Peak]:
    """The peak of each position. `temporaries`, `rows` (of `summary.stages`): where they are known already.
    """
    from threed.prediction.transient import peak_bytes  # torch

    plan = analysis.plan
    held, of_device = temporaries or temporaries_of(plan), config_of(plan).run.device != "cpu"
    ends, found = channels(plan.programs["train"]), []
    for position, row in enumerate(stages(analysis) if rows is None else rows):
        count = communicators(plan, position, ends)
        context, opened = (machine.taken_bytes(0), machine.taken_bytes(count)) if of_device else (0, 0)
        found.append(Peak(position, row.fixed_bytes, row.activation_peak_bytes,
                          peak_bytes(analysis, position, held), context, count, opened - context))
    return found


def temporaries_of(plan: Plan) -> Temporaries:
    """Bytes that an instruction of the train step holds beside all slots."""
    from threed.prediction import transient  # torch

    return transient.temporaries_of(plan)


def communicators(plan: Plan, position: int, ends: Channels | None = None) -> int:
    """Communicators of a rank: its groups of several ranks, and its channels to other positions. `ends`:
    those of the train step, where they are known already."""
    found = channels(plan.programs["train"]) if ends is None else ends
    return groups(make_mesh(config_of(plan)), position) + sum(position in both for *both, _ in found)


def groups(mesh: Mesh, position: int) -> int:
    """The number of process groups of a rank at a position that have several ranks. Each of them has a
    communicator."""
    rank = mesh.group("pp", 0)[position]
    return sum(bool(row.lane) and row.needed(mesh) and len(mesh.group(name, rank)) > 1
               for name, row in GROUPS.items())


def fullest(rows: list[Peak]) -> Peak:
    """Of the position that needs most."""
    return max(rows, key=lambda row: row.total)


def too_much(rows: list[Peak], machine: Hardware, memory: int) -> str | None:
    """Why a plan does not fit into so many bytes of a device; None where it does."""
    most, usable = fullest(rows), machine.usable_bytes(memory)
    if most.total <= usable:
        return None
    return (f"a rank of pp{most.position} needs {show_bytes(most.total)}, more than the {show_bytes(usable)} "
            f"that may be in use of a device's {show_bytes(memory)} ({machine.free_share:.0%} stay free: "
            "free_share of --hardware)")


def memory_of(machine: Hardware, config: Config) -> int:
    """Bytes that a rank can have: of its device; on a CPU, of the machine, which its ranks share."""
    return machine.memory_bytes * (machine.devices if config.run.device == "cpu" else 1)


_COMMUNICATORS = 4  # for which `plan_room` leaves memory: how many a plan has is not known before it is made


def plan_room(machine: Hardware, config: Config, memory: int | None = None) -> float:
    """Bytes that a plan may take of so many of a device's memory (None: the machine's), on which keys that
    are `auto` depend (planner.auto.choices). On a CPU there is no limit."""
    if config.run.device == "cpu":
        return math.inf
    usable = machine.usable_bytes(machine.memory_bytes if memory is None else memory)
    return usable - machine.taken_bytes(_COMMUNICATORS)


def room(rows: list[Peak], machine: Hardware, memory: int) -> str:
    """How much of a device a plan that fits leaves."""
    usable = machine.usable_bytes(memory)
    return (f"fits: {show_bytes(usable - fullest(rows).total)} less than the {show_bytes(usable)} that may "
            f"be in use of a device's {show_bytes(memory)}")


def show(rows: list[Peak]) -> str:
    """What the peak of the fullest position is made of."""
    most = fullest(rows)
    many = "communicators" if most.communicators != 1 else "communicator"
    beside = most.working_bytes - most.activation_bytes
    # Below 0 where what needs temporaries frees more of the activations than these take.
    moving = ([(most.activation_bytes, "of activations"), (beside, "of temporaries beside them")]
              if beside >= 0 else [(most.working_bytes, "of activations and temporaries")])
    terms = [(most.fixed_bytes, "fixed"), *moving, (most.context_bytes, "for CUDA"),
             (most.communicator_bytes, f"for {most.communicators} NCCL {many}")]
    parts = [f"{show_bytes(size)} {what}" for size, what in terms if size]
    return f"peak of pp{most.position}: {show_bytes(most.total)} = {' + '.join(parts)}"


def document(rows: list[Peak], machine: Hardware, memory: int) -> dict[str, Any]:
    """The same of all positions, for `--json`."""
    return {"memory_bytes": memory, "usable_bytes": machine.usable_bytes(memory),
            "fits": too_much(rows, machine, memory) is None,
            "peaks": [{"peak_bytes": row.total, **row._asdict()} for row in rows]}
