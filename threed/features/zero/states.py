"""The states of the parameter units that a rank holds."""

from __future__ import annotations

import torch

from threed.comm.group import Comm
from threed.features.zero.shard import FlatLayout
from threed.features.zero.snapshot import Snapshot
from threed.features.zero.state import UnitState
from threed.features.zero.storage import Storage
from threed.schema import Config
from threed.tensor.random import Draw, draw
from threed.tensor.saving import UnsavedMemory


def places(states: list[UnitState]) -> list[UnsavedMemory]:
    """Parameters that autograd must not save as tensors, but look up again in BACKWARD: their buffers may
    hold other units meanwhile."""
    return [UnsavedMemory(state.param, state.whole_param) for state in states if not state.unit.whole
            and state.param is not None]


def make_states(config: Config, comm: Comm, layouts: dict[int, FlatLayout], storage: Storage,
                draw: Draw = draw) -> dict[int, UnitState]:
    """The states of the parameter units that a rank holds, with initial values by `draw`."""
    states = {}
    table, position = storage.table, comm.here.position
    for unit in table.held(position):
        state = UnitState(unit, layouts[unit], comm.groups[table.parameters[unit].shard_group].rank(),
                          storage)
        state.writes = table.saves(position, unit) and comm.is_first_copy
        if state.writes and table.update.snapshots and state.unit.trains:
            rows = storage.on_host(table.kept_kinds * (state.shard[1] - state.shard[0]), torch.float32)
            state.snapshot = Snapshot(rows.view(table.kept_kinds, -1), storage.device)
        state.fill(comm.here.on, config.train.seed, draw)
        states[unit] = state
    return states
