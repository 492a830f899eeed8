"""Turns: the step of a parameter unit whose matrices are turned, each by one rank.

    begin   update the moment of what this rank owns; pack the pieces of its shard, by the owners of their
            matrices
    turn    put each matrix together from what has come, turn it; pack the pieces of what each rank updates
    end     step what this rank updates, piece by piece, as they have come

What is packed is one flat tensor in optimizer.turn_dtype, of which EXCHANGE gives each rank a range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from threed.comm.group import Comm, Group
from threed.comm.lanes import Job
from threed.devices import device_of
from threed.features.zero.matrices import Member, Piece, UnitMatrices, members
from threed.features.zero.turned import Turned
from threed.features.zero.units import UnitState
from threed.features.zero.updates import Due
from threed.optim import step as optimizer
from threed.optim.base import Update, View
from threed.program.entries import Turning
from threed.program.instruction import TO_OWNERS, Instruction, Slot, SlotKind, Tier
from threed.program.slots import Slots
from threed.program.table import Table
from threed.schema import Config
from threed.tensor.precision import DTYPES

Differences = list[tuple[int, torch.Tensor]]  # unit, elements in which two computations of its update differ
Twice = Callable[[torch.Tensor], None]  # is told in how many elements two computations differ


class _Way(NamedTuple):
    """What one EXCHANGE gives to each rank of the group, and takes of each."""

    gives: list[list[Piece]]
    takes: list[list[Piece]]


class MatrixRun:
    """The handlers of EXCHANGE of matrices, and of the parts of STEP."""

    def __init__(self, config: Config, comm: Comm, table: Table, states: Mapping[int, UnitState]):
        self.config, self.comm, self.table, self.states = config, comm, table, states
        self.turned = Turned(comm.device)
        self._turns: dict[int, Turns] = {}  # by unit

    def exchange(self, instruction: Instruction, slots: Slots) -> Job:
        """Matrices go to their owners, or back."""
        came, job = self.of(instruction.unit).exchange(instruction.kind, slots.get(instruction.slot))
        slots.put(Slot(TO_OWNERS[instruction.kind], instruction.unit), came)
        return job

    def step(self, instruction: Instruction, slots: Slots, due: Due,
             differences: Differences | None) -> Job | None:
        """A part of a unit's step: done, or where the state is off the device, as a job. A step that is
        skipped changes nothing, and what travels are zeros. `differences`: of a step that is verified, to
        which is added."""
        unit, turns, config = instruction.unit, self.of(instruction.unit), self.config.optimizer
        part, taken, away = instruction.part, due.clipped.finite, turns.state.gradient.away
        tier = Tier.HOST if away else Tier.DEVICE
        twice = None if differences is None else lambda count: differences.append((unit, count))

        def by(decay: bool) -> Update:
            return Update(config, due.lr, due.update, decay, due.clipped.scale)

        if part == "turn":
            turned = turns.turn(by(True), slots.get(Slot(SlotKind.MATRIX, unit)), taken, twice, self.turned)
            slots.put(Slot(SlotKind.TURNED, unit), turned)
            return None
        if part == "begin":
            update, job = turns.begin(by, DTYPES[config.turn_dtype], taken, twice)
            slots.put(Slot(SlotKind.UPDATE, unit, tier=tier), update)
        else:
            out, job = turns.end(by, slots.get(Slot(SlotKind.DIRECTION, unit, tier=tier)), taken, twice)
            if away:
                slots.put(self.table.shards.weight(unit).on(tier), out)
        if away:
            slots.put(Slot(SlotKind.STATE, unit, tier=tier), True)
            return job
        job()
        return None

    def of(self, unit: int) -> Turns:
        if unit not in self._turns:
            state, comm = self.states[unit], self.comm
            assert state.part.unit.turning is not None
            group = state.part.unit.turning.group
            ranks = members(comm.mesh, group, state.part.unit.shard_group, comm.rank)
            heads = self.config.optimizer.matrices == "heads"
            self._turns[unit] = Turns(state, comm.groups[group], ranks, heads)
        return self._turns[unit]


class Turns:
    """The matrices of one unit on one rank."""

    def __init__(self, state: UnitState, group: Group, members: Sequence[Member], heads: bool):
        assert state.part.unit.turning is not None
        self.state, self.part, self.group, self.members = state, state.part, group, members
        self.how: Turning = state.part.unit.turning
        self.all = UnitMatrices(self.part.layout, members[group.rank()].place, heads)

    # ---- who has what

    @cached_property
    def to_owners(self) -> _Way:
        return self._way(self.all.sends, there=True)

    @cached_property
    def back(self) -> _Way:
        return self._way(lambda member: self.all.owned(member, self.part.sharded), there=False)

    def _way(self, has: Callable[[Member], list[Piece]], there: bool) -> _Way:
        mine: list[list[Piece]] = [[] for _ in self.members]
        for piece in has(self.members[self.group.rank()]):
            mine[self.how.matrices[piece.matrix].owner].append(piece)
        of_others = [[piece for piece in has(member)
                      if self.how.matrices[piece.matrix].owner == self.group.rank()]
                     for member in self.members]
        return _Way(mine, of_others) if there else _Way(of_others, mine)

    # ---- the parts of a step

    def begin(self, by: Callable[[bool], Update], dtype: torch.dtype, taken: bool,
              twice: Twice | None) -> tuple[torch.Tensor, Job]:
        """What goes to the owners, and the job that makes it and updates the state, if the step is `taken`.
        `by`: the numbers of ranges with weight decay, and without."""
        part, state, gradient = self.part, self.state.optimizer_state, self.state.gradient.step()
        first, stop = part.shard
        update, made = self._room(stop - first, dtype, gradient)
        # (of the tensors that this rank has now: where they go to the disk afterwards, others are next)
        views = [(segment, View(part.range(state.master, segment), part.range(gradient, segment),
                                {name: part.range(each, segment) for name, each in state.buffers.items()}))
                 for segment in part.segments()]

        def job() -> None:
            made.zero_()
            for segment, view in views if taken else ():
                # (what another rank sends is made nowhere: `update` is free until all is packed)
                at = segment.start - first if first <= segment.start < stop else 0
                out = (made if first <= segment.start < stop else update)[at:][:segment.stop - segment.start]
                again, other = (optimizer.copied(view), out.clone()) if twice is not None else (view, out)
                optimizer.begin(by(segment.decay), view, out)
                if twice is not None:
                    optimizer.begin(by(segment.decay), again, other)
                    twice(optimizer.differing([(out, other), *_pairs(view, again)]))
            parts = [made[piece.start - first:piece.stop - first] for piece in _each(self.to_owners.gives)]
            torch.cat([made[:0], *parts], out=update[:sum(map(len, parts))])

        return update, job

    def _room(self, numel: int, dtype: torch.dtype, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for what goes to the owners, and for the same before it is packed."""
        if not self.state.gradient.away:
            return like.new_empty(numel, dtype=dtype), like.new_empty(numel, dtype=dtype)
        storage = self.state.optimizer_state.storage
        return storage.host_matrices.take(numel, dtype), storage.packing.view(dtype)[:numel]

    def turn(self, by: Update, came: torch.Tensor, taken: bool, twice: Twice | None,
             sums: Turned) -> torch.Tensor:
        """Turn the matrices that this rank owns. Returns what goes back. `sums`: to which they are added."""
        rank = self.group.rank()
        whole = {number: came.new_empty(each.shape) for number, each in enumerate(self.how.matrices)
                 if each.owner == rank}
        takes = self.to_owners.takes
        for piece, values in zip(_each(takes), _split(came, takes), strict=True):
            _inside(whole[piece.matrix], piece).copy_(values.view(piece.shape))
        if taken:
            for number, matrix in whole.items():
                again = matrix.clone() if twice is not None else matrix
                turned = optimizer.turn(by, matrix)
                if twice is not None:
                    twice(optimizer.differing([(turned, optimizer.turn(by, again))]))
                whole[number] = turned
                sums.add(optimizer.squares(by, turned), turned.numel())
        return _packed([_inside(whole[piece.matrix], piece).reshape(-1)
                        for piece in _each(self.back.gives)], came)

    def end(self, by: Callable[[bool], Update], came: torch.Tensor, taken: bool,
            twice: Twice | None) -> tuple[torch.Tensor, Job]:
        """The new weights, as compute reads them, and the job that makes them, if the step is `taken`."""
        part, state, away = self.part, self.state.optimizer_state, self.state.gradient.away
        out = self.state.weights.step_output() if away else self.state.weights.at_home
        master, buffers = state.master, state.buffers
        if away:
            state.storage.host_matrices.give(came)

        def job() -> None:
            for piece, turned in zip(_each(self.back.takes), _split(came, self.back.takes),
                                     strict=True) if taken else ():
                where = slice(piece.start - part.owned[0], piece.stop - part.owned[0])
                view = View(master[where], turned[:0], {name: each[where] for name, each in buffers.items()})
                now = by(self.all.parameter(piece).decay)._replace(
                    shape=self.how.matrices[piece.matrix].shape)
                again = optimizer.copied(view) if twice is not None else view
                optimizer.end(now, view, turned)
                if twice is not None:
                    optimizer.end(now, again, turned)
                    twice(optimizer.differing(_pairs(view, again)))
            if state.separate:
                out[:part.count].copy_(master)
                out[part.count:].zero_()

        return out, job

    # ---- between them

    def exchange(self, kind: str, value: torch.Tensor) -> tuple[torch.Tensor, Job]:
        """What arrives, and the job that fills it."""
        way, device = self.to_owners if kind == SlotKind.UPDATE else self.back, device_of(value.device)
        gives, takes = (list(map(_numel, each)) for each in way)
        # What goes to the host, or comes from it, is as large as the plan says.
        came = value.new_empty(sum(takes) if kind == SlotKind.UPDATE else self.part.count)

        def job() -> None:
            self.group.exchange(came[:sum(takes)], value[:sum(gives)], gives, takes).wait()
            for tensor in (value, came):
                device.in_use(tensor)

        return came, job


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(piece.numel for piece in pieces)


def _each(pieces: Sequence[Sequence[Piece]]) -> Iterator[Piece]:
    return (piece for of_rank in pieces for piece in of_rank)


def _split(flat: torch.Tensor, pieces: Sequence[Sequence[Piece]]) -> Sequence[torch.Tensor]:
    sizes = [piece.numel for piece in _each(pieces)]
    return flat[:sum(sizes)].split(sizes)


def _inside(matrix: torch.Tensor, piece: Piece) -> torch.Tensor:
    return matrix[slice(*piece.rows), slice(*piece.columns)]


def _packed(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([like[:0], *parts])


def _pairs(view: View, again: View) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(view.weight, again.weight), *((each, again.state[name]) for name, each in view.state.items())]
