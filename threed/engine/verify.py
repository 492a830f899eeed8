"""Verify: a step is computed twice and compared, to find a machine that computes wrongly (run.verify_every).

    rehearsal   the program `verify`: the step without its update; everything is afterwards as it was before
    step        the same once more, with its update, of which each part is computed twice, too

Of all that a rank computes in the two, checksums are compared: outputs, losses and gradients of each unit and
micro-batch, what comes from other pipeline positions, what goes into sums over tp, reduced gradients. Each
rank finds its own first difference in the order of its program. Of these the first along the data's way is
where it began, since a wrong number makes others wrong only further on.

On a CPU results are equal to the bit. On a GPU some kernels (backward of attention, of the embedding) add up
in an order that changes from run to run: there sums of values are compared, within TOLERANCE. Updates are
equal to the bit everywhere.

What is wrong twice in the same way is not seen: weights that changed in memory before the step, a kernel with
a fault.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from threed.engine.engine import Engine
from threed.engine.inspect import Finding, first, made, me, named, way
from threed.errors import WrongResult
from threed.mesh import axes_of
from threed.program.instruction import BACKWARDS, Instruction, Op, Slot
from threed.program.trace import Trace
from threed.slots import Slots
from threed.tensor.context import Batch
from threed.zero.run import Clipped

# Where kernels are not deterministic: how much a result may change, as a part of its norm; by the precision
# of compute.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
COLUMNS = 64  # sums that make a checksum
Result = TypeVar("Result")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Line(NamedTuple):
    """One checksum, and what it is of."""

    phase: int  # as in Finding
    distance: int
    what: str
    count: int  # elements
    sums: torch.Tensor


class Verifier:
    """Of one rank. All ranks call its methods together: `rehearse`, then `step`."""

    def __init__(self, engine: Engine, exact: bool | None = None):
        """`exact`: compare to the bit. None: on a CPU."""
        self.engine = engine
        self.exact = engine.comm.device.type == "cpu" if exact is None else exact
        self.verified = 0  # steps so far
        self.last: int | None = None  # of these
        self._lines: list[Line] = []  # of the program under way
        # Into sums over an axis, by the instruction under way: (axis, elements, checksum).
        self._given: list[tuple[str, int, torch.Tensor]] = []

    def rehearse(self, batch: Callable[[int], Batch]) -> Trace:
        """The next step without its update."""
        return self._recorded(self.engine.rehearse, batch)

    def step(self, batch: Callable[[int], Batch]) -> tuple[Clipped, Trace]:
        """The step that was rehearsed. WrongResult, on all ranks with one message, where a rank got two
        results."""
        zero, rehearsed, number = self.engine.zero, self._lines, self.engine.zero.step_number + 1
        zero.update_differences = []
        try:
            result = self._recorded(self.engine.train_step, batch)
            found = self._difference(rehearsed, self._lines) or self._wrong_update(zero.update_differences)
        finally:
            zero.update_differences = None
        where = first(self.engine, [found] if found else [])
        if where is not None:
            raise WrongResult(f"step {number} was computed twice, with two results: first in the "
                              f"{where.text}. That machine "
                              "computes wrongly, or its memory fails: take it out. The last step that was "
                              "verified is "
                              f"{self.last or 'before this start'}: later ones are in doubt, so go on from a "
                              f"checkpoint up to "
                              "it, by train.resume=PATH")
        self._lines = []
        self.verified, self.last = self.verified + 1, number
        return result

    def _recorded(self, run: Callable[[Callable[[int], Batch]], Result],
                  batch: Callable[[int], Batch]) -> Result:
        """Run a program, with checksums of all that it makes, in the order of the program."""
        groups, self._lines = [self.engine.comm.groups[axis] for axis in axes_of("parameters")], []
        for group in groups:
            group.tap = partial(self._tap, group.name)
        try:
            with self.engine.inspected(self._look):
                return run(batch)
        finally:
            for group in groups:
                group.tap = None
            self._given.clear()

    def _tap(self, axis: str, values: torch.Tensor) -> None:
        self._given.append((axis, values.numel(), checksum(values, self.exact)))

    def _look(self, instruction: Instruction, slots: Slots) -> None:
        table, phase = self.engine.plan.table, way(instruction)
        distance = -instruction.unit if phase == 1 else instruction.unit
        if (slot := self._received(instruction)) is not None:
            what = f"input, received from pp{table.position(slot.unit)}, of {named(self.engine, instruction)}"
            self._lines.append(Line(phase, distance, what, slots.get(slot).numel(),
                                    checksum(slots.get(slot), self.exact)))
        for axis, count, sums in self._given:
            what = f"part of a sum over {axis} in {named(self.engine, instruction)}"
            self._lines.append(Line(phase, distance, what, count, sums))
        self._given.clear()
        for each in made(self.engine, instruction, slots):
            sums = checksum(each.values, self.exact)
            self._lines.append(Line(each.phase, each.distance, each.what, each.values.numel(), sums))

    def _received(self, instruction: Instruction) -> Slot | None:
        """What a forward or backward reads that another position has made."""
        op, unit, microbatch, *_ = instruction
        table = self.engine.plan.table
        slot = Slot("act", unit - 1, microbatch) if op == Op.FORWARD else Slot("grad", unit, microbatch)
        if op not in (Op.FORWARD, Op.BACKWARD,
                      Op.BACKWARD_INPUT) or slot.unit < 0 or (op in BACKWARDS and unit == table.last):
            return None
        maker = slot.unit if op == Op.FORWARD else unit + 1
        return slot if table.position(maker) != self.engine.position else None

    def _difference(self, before: list[Line], after: list[Line]) -> Finding | None:
        """This rank's first, in the order of its program."""
        assert [line[:4] for line in before] == [line[:4]
                                                 for line in after], "the step is not what was rehearsed"
        if not before:
            return None
        one, other = (torch.stack([line.sums for line in lines]).cpu() for lines in (before, after))
        for turn in (one != other).any(1).nonzero().flatten().tolist():
            line = before[turn]
            how = self._how(one[turn], other[turn], line.count)
            if how is not None:
                return Finding(line.phase, line.distance, turn, self._text(line.what, how))
        return None

    def _how(self, one: torch.Tensor, other: torch.Tensor, count: int) -> str | None:
        """In what way two checksums differ; None where they do not."""
        if self.exact:
            return f"at least {int((one != other).sum())} of {count} elements differ"
        norms = one[-1].item(), other[-1].item()
        if not all(map(math.isfinite, norms)):
            return None if not any(map(math.isfinite,
                                       norms)) else f"its norm is {norms[0]:g}, then {norms[1]:g}"
        change = torch.linalg.vector_norm((one - other)[:-1]).item() / (max(norms) or 1.0)
        limit = TOLERANCE[self.engine.zero.precision.compute]
        return (
            f"it changes by {change:.2g} of its norm (rounding: at most {limit:g})"
            if change > limit
            else None
        )

    def _wrong_update(self, differences: list[tuple[int, torch.Tensor]]) -> Finding | None:
        for turn, (unit, count) in enumerate(differences):
            if count > 0:
                what = f"update of p{unit} ({self.engine.plan.table.parameters[unit].name}), STEP"
                return Finding(3, unit, turn, self._text(what,
                                                         f"{int(count)} numbers of weights and optimizer "
                                                         f"state differ"))
        return None

    def _text(self, what: str, how: str) -> str:
        return f"{what}, on {me(self.engine)} on host {socket.gethostname()}: {how}"


def checksum(values: torch.Tensor, exact: bool) -> torch.Tensor:
    """Sums of every 64th element: of their bits, or of their values, and then their norm, too. What changes
    in one element changes one of the sums; of the difference of two tensors the sums have about the norm that
    it has."""
    flat = values.detach().reshape(-1)
    numbers = flat.view(_BITS[flat.element_size()]) if exact else flat
    rows = len(flat) // COLUMNS
    sums = numbers[:rows * COLUMNS].view(rows, COLUMNS).sum(0, dtype=torch.int64 if exact else torch.float64)
    rest = numbers[rows * COLUMNS:]
    sums[:len(rest)] += rest
    return sums if exact else torch.cat([sums, torch.linalg.vector_norm(flat, dtype=torch.float64).view(1)])
