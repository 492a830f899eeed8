"""Verify: compute a step twice and compare, to find a machine that computes wrongly (run.verify_every).

    rehearsal   the program `verify`: the step without its update, which leaves the run's state unchanged
    step        the same step with its update, each part of which is computed twice, too

Checksums of all results of a rank are compared: outputs, losses and gradients of each unit and micro-batch,
what was received from other ranks, terms of sums over tp, reduced gradients. Each rank finds its own
first difference in the order of its program. The first of these along the flow of data is the origin, since a
wrong number makes only later ones wrong.

On a CPU results are equal to the bit. On a GPU some kernels (backward of attention; of the embedding, with
model.fused=off) add up in an order that changes from run to run: there sums of values are compared, within
TOLERANCE. Updates and whole numbers, such as choices of experts, are equal to the bit everywhere.

An error that happens twice in the same way is not found: weights that changed in memory before the step, a
faulty kernel.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from threed.base.axes import axes_of
from threed.base.errors import WrongResult
from threed.engine.engine import Engine
from threed.engine.inspect import Finding, first, me, named, numbers, phase_of, results
from threed.features.zero.clip import Clipped
from threed.program.entries import gradient_of
from threed.program.instruction import Instruction, Op, Slot, SlotKind
from threed.program.slots import Slots
from threed.program.trace import Trace
from threed.program.trips import came_over
from threed.tensor.context import Batch

# Where kernels are not deterministic: dtype of compute -> how much a result may change, relative to its norm.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
COLUMNS = 64  # sums in a checksum
Result = TypeVar("Result")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Line(NamedTuple):
    """The checksum of one result."""

    phase: int  # as in Finding
    distance: int
    what: str
    count: int  # elements, which may depend on results of other ranks
    whole: bool  # whether they are whole numbers
    sums: torch.Tensor


class Verifier:
    """Verifies steps on one rank. All ranks call its methods together: `rehearse`, then `step`."""

    def __init__(self, engine: Engine, exact: bool | None = None):
        """`exact`: compare to the bit. None: exact on a CPU only."""
        self.engine = engine
        self.exact = engine.comm.device.type == "cpu" if exact is None else exact
        self.verified = 0  # steps verified so far
        self.last: int | None = None  # number of the last verified step
        self._lines: list[Line] = []  # of the program under way
        # what the instruction under way put into sums over an axis: (axis, elements, checksum)
        self._given: list[tuple[str, int, torch.Tensor]] = []

    def rehearse(self, batch: Callable[[int], Batch]) -> Trace:
        """The next step without its update."""
        return self._recorded(self.engine.rehearse, batch)

    def step(self, batch: Callable[[int], Batch]) -> tuple[Clipped, Trace]:
        """The step that was rehearsed. WrongResult, with the same message on all ranks, where any rank got
        two different results."""
        zero, rehearsed, number = self.engine.zero, self._lines, self.engine.zero.step_number + 1
        zero.update_differences = []
        try:
            result = self._recorded(self.engine.train_step, batch)
            self.engine.settle()
            mine = self._difference(rehearsed, self._lines) or self._wrong_update(zero.update_differences)
        finally:
            zero.update_differences = None
        finding = first(self.engine, [mine] if mine else [])
        if finding is not None:
            raise WrongResult(f"step {number} was computed twice, with two results: first in the "
                              f"{finding.text}. That machine computes wrongly, or its memory fails: take it "
                              f"out. The last step that was verified is {self.last or 'before this start'}: "
                              "do not trust later checkpoints; resume from one at or before it: "
                              "train.resume=PATH")
        self._lines = []
        self.verified, self.last = self.verified + 1, number
        return result

    def _recorded(self, run: Callable[[Callable[[int], Batch]], Result],
                  batch: Callable[[int], Batch]) -> Result:
        """Run a program, and record checksums of all its results, in the order of the program."""
        axes = [axis for axis in (*axes_of("tokens"), *axes_of("parameters"))
                if axis in self.engine.comm.groups]
        groups, self._lines = [self.engine.comm.groups[axis] for axis in axes], []
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
        table = self.engine.plan.table
        phase = phase_of(instruction, table)
        distance = -instruction.unit if phase == 1 else instruction.unit
        for slot, what in self._received(instruction):
            for values in numbers(self.engine, slot, slots):
                self._record(phase, distance, f"{what} of {named(self.engine, instruction)}", values)
        for axis, count, sums in self._given:
            part = "part of a sum" if axis in axes_of("parameters") else "part of a gather or sum"
            what = f"{part} over {axis} in {named(self.engine, instruction)}"
            self._lines.append(Line(phase, distance, what, count, False, sums))
        self._given.clear()
        for result in results(self.engine, instruction, slots):
            self._record(*result)

    def _record(self, phase: int, distance: int, what: str, values: torch.Tensor) -> None:
        self._lines.append(Line(phase, distance, what, values.numel(), not values.is_floating_point(),
                                checksum(values, self.exact)))

    def _received(self, instruction: Instruction) -> Iterator[tuple[Slot, str]]:
        """What a forward or backward reads and other ranks have sent, and in words."""
        op, (unit, microbatch) = instruction.op, instruction.turn
        table = self.engine.plan.table
        if op not in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            return
        forward = op == Op.FORWARD
        slot = Slot(SlotKind.ACT, unit - 1, microbatch) if forward else Slot(SlotKind.GRAD, unit, microbatch)
        if slot.unit >= 0 and (forward or unit < table.last):
            position = table.position(slot.unit if forward else unit + 1)
            if position != self.engine.position:
                yield slot, f"input, received from pp{position},"
        handed = ([Slot(read.name, read.unit, microbatch) for read in table.units[unit].reads] if forward else
                  [gradient_of(Slot(made.name, unit, microbatch)) for made in table.units[unit].makes
                   if made.grad])
        for slot in handed:
            if (group := came_over(slot, table)) is not None:
                yield slot, f"'{slot.kind}', received over {group},"

    def _difference(self, before: list[Line], after: list[Line]) -> Finding | None:
        """This rank's first difference, in the order of its program."""
        names, names_after = ([(line.phase, line.distance, line.what) for line in lines]
                              for lines in (before, after))
        assert names == names_after, "the step is not what was rehearsed"
        if not before:
            return None
        one, other = (self._on_host(lines) for lines in (before, after))
        counts = torch.tensor([[line.count for line in lines] for lines in (before, after)])
        for turn in ((one != other).any(1) | (counts[0] != counts[1])).nonzero().flatten().tolist():
            line = before[turn]
            how = self._how(one[turn], other[turn], line, after[turn].count)
            if how is not None:
                return Finding(line.phase, line.distance, turn, self._text(line.what, how))
        return None

    def _on_host(self, lines: list[Line]) -> torch.Tensor:
        """The checksums of all lines, [lines, sums]. (Those of gradients on the host are made there.)"""
        device = self.engine.comm.device
        return torch.stack([line.sums.to(device, non_blocking=True) for line in lines]).cpu()

    def _how(self, one: torch.Tensor, other: torch.Tensor, line: Line, count: int) -> str | None:
        """How two checksums differ, in words; None where the difference is only rounding. `count`: the
        elements of the second."""
        if line.count != count:
            return f"it has {line.count} elements, then {count}"
        if self.exact or line.whole:
            return f"at least {int((one != other)[:COLUMNS].sum())} of {count} elements differ"
        norms = one[-1].item(), other[-1].item()
        if not any(map(math.isfinite, norms)):
            return None
        if not all(map(math.isfinite, norms)):
            return f"its norm is {norms[0]:g}, then {norms[1]:g}"
        change = torch.linalg.vector_norm((one - other)[:-1]).item() / (max(norms) or 1.0)
        limit = TOLERANCE[self.engine.zero.precision.compute]
        if change <= limit:
            return None
        return f"it changes by {change:.2g} of its norm (rounding: at most {limit:g})"

    def _wrong_update(self, differences: list[tuple[int, torch.Tensor]]) -> Finding | None:
        for turn, (unit, count) in enumerate(differences):
            if count > 0:
                what = f"update of p{unit} ({self.engine.plan.table.parameters[unit].name}), STEP"
                how = f"{int(count)} numbers of weights and optimizer state differ"
                return Finding(3, unit, turn, self._text(what, how))
        return None

    def _text(self, what: str, how: str) -> str:
        return f"{what}, on {me(self.engine)} on host {socket.gethostname()}: {how}"


def checksum(values: torch.Tensor, exact: bool) -> torch.Tensor:
    """COLUMNS sums, each of every COLUMNS-th element: of bits if `exact`, else of values, followed by the
    norm of the tensor. A change of one element changes one sum. The norm of the difference of two checksums
    is about that of the difference of the tensors."""
    flat = values.detach().reshape(-1)
    if not exact and not flat.is_floating_point():
        flat = flat.double()
    numbers = flat.view(_BITS[flat.element_size()]) if exact else flat
    rows = len(flat) // COLUMNS
    sums = numbers[:rows * COLUMNS].view(rows, COLUMNS).sum(0, dtype=torch.int64 if exact else torch.float64)
    rest = numbers[rows * COLUMNS:]
    sums[:len(rest)] += rest
    return sums if exact else torch.cat([sums, torch.linalg.vector_norm(flat, dtype=torch.float64).view(1)])
