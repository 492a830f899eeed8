"""The parameter units that a rank holds: the weights, the gradient and the optimizer state of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from threed.comm.group import Comm
from threed.comm.lanes import Job
from threed.features.zero.gradient import Gradient
from threed.features.zero.optimizer_state import OptimizerState
from threed.features.zero.part import UnitPart
from threed.features.zero.shard import FlatLayout
from threed.features.zero.snapshot import Snapshot
from threed.features.zero.storage import Storage
from threed.features.zero.weights import Weights
from threed.program.instruction import Tier
from threed.schema import Config
from threed.tensor.random import Draw, draw
from threed.tensor.saving import UnsavedMemory


@dataclass(eq=False)
class UnitState:
    """One parameter unit on one rank, and what checkpoints keep of it."""

    part: UnitPart
    weights: Weights
    gradient: Gradient
    optimizer_state: OptimizerState
    # whether this rank writes its shard to checkpoints: one of the ranks with the same values does
    writes: bool = False
    # a copy of what this rank writes to the checkpoint under way; None: no copy
    snapshot: Snapshot | None = None

    @classmethod
    def make(cls, part: UnitPart, storage: Storage) -> UnitState:
        weights = Weights(part, storage)
        return cls(part, weights, Gradient(part, storage, weights.parameters.values()),
                   OptimizerState(part, storage, weights))

    @torch.no_grad()
    def fill(self, place: Mapping[str, int], seed: int, draw: Draw = draw) -> None:
        """Draw initial values of this rank's part into its weights. `place`: axis -> the rank's index."""
        first, last = self.part.owned
        for placed in self.part.layout.placed:
            start, stop = max(placed.start, first), min(placed.stop, last)
            if stop > start:
                part = placed.parameter.part(self.part.layout.ranks, place)
                draw(self.optimizer_state.master[start - first:stop - first], placed.parameter, part, seed,
                     start - placed.start)
        self.optimizer_state.publish()

    def kept(self) -> dict[str, torch.Tensor]:
        """Kind -> tensor over `owned` that a checkpoint keeps."""
        return {"param": self.optimizer_state.master, **self.optimizer_state.buffers}

    def take_snapshot(self) -> Job | None:
        """Copy the tensors that this rank writes to the host, while the next program runs; None where another
        rank writes the same values."""
        if self.snapshot is None:
            return None
        mine = slice(*(at - self.part.owned[0] for at in self.part.shard))
        return self.snapshot.begin(lambda: [whole[mine] for whole in self.kept().values()])

    def to_save(self) -> dict[str, Callable[[int, int], torch.Tensor]]:
        """Kind -> a function that returns a range of this rank's shard, in fp32 on the host: of the snapshot
        if there is one, else of the current values (which a frozen unit keeps)."""
        first = self.part.shard[0] - self.part.owned[0]

        def current(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return whole[first + start:first + stop].detach().cpu().float()

        def of_snapshot(row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return row[start:stop]

        kept = self.kept()
        if self.snapshot is None:
            return {kind: partial(current, whole) for kind, whole in kept.items()}
        return {kind: partial(of_snapshot, row) for kind, row in zip(kept, self.snapshot.rows, strict=False)}


def places(states: Iterable[UnitState]) -> list[UnsavedMemory]:
    """Weights that autograd must not save as tensors, but look up again in BACKWARD: their buffers may hold
    other units meanwhile."""
    return [UnsavedMemory(state.weights.whole(), state.weights.whole) for state in states
            if state.weights.in_pool]


def make_states(config: Config, comm: Comm, layouts: dict[int, FlatLayout], storage: Storage,
                draw: Draw = draw) -> dict[int, UnitState]:
    """The parameter units that a rank holds, with initial values by `draw`."""
    states = {}
    table, position = storage.table, comm.here.position
    for unit in table.held(position):
        index = comm.groups[table.parameters[unit].shard_group].rank()
        state = UnitState.make(UnitPart.of(unit, layouts[unit], index, table), storage)
        state.writes = table.saves(position, unit) and comm.is_first_copy(table.parameters[unit].fold)
        if state.writes and table.update.snapshots and state.part.unit.trains:
            kinds, length = table.shards.kept_kinds(unit), state.part.shard[1] - state.part.shard[0]
            rows = storage.on_host(kinds * length, torch.float32,
                                   crosses=state.part.unit.state_home == Tier.DEVICE)
            state.snapshot = Snapshot(rows.view(kinds, -1), storage.device)
        states[unit] = state
    # at last: what a drawing takes meanwhile would leave holes between units in the allocator's memory
    for state in states.values():
        state.fill(comm.here.on, config.train.seed, draw)
    return states
