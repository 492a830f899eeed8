"""What GATHER, RELEASE, REDUCE, CLIP and STEP do to tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from threed.comm import Comm, Handle
from threed.program.effects import chain
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table
from threed.schema import Config
from threed.slots import Slots
from threed.zero import optimizer
from threed.zero.state import UnitState


@dataclass
class Clipped:
    """What CLIP found, equal on all ranks."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float
    scale: float  # STEP multiplies gradients by this
    finite: bool


class ZeroRun:
    def __init__(self, config: Config, comm: Comm, table: Table, states: dict[int, UnitState]):
        self.config, self.comm, self.table, self.states = config, comm, table, states
        self.step_number = 0  # steps of the run so far: the learning rate's clock
        self.updates = 0  # optimizer updates so far: Adam's clock (skipped steps do not count)
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {
            Op.GATHER: self.gather, Op.RELEASE: self.release, Op.REDUCE: self.reduce, Op.CLIP: self.clip, Op.STEP: self.step}

    @property
    def lr(self) -> float:
        return optimizer.learning_rate(self.config.optimizer, self.step_number, self.config.train.steps)

    def gather(self, instruction: Instruction, slots: Slots) -> None:
        state = self.states[instruction.unit]
        state.publish()
        handle = self.comm.groups["dp"].all_gather(state.param, state.param[slice(*state.owned)])
        slots.put(Slot("param", instruction.unit), state.param, handle)

    def release(self, instruction: Instruction, slots: Slots) -> None:
        """Nothing to do: the whole parameters keep their buffer, only their content is given up."""

    @torch.no_grad()
    def reduce(self, instruction: Instruction, slots: Slots) -> None:
        unit, group = instruction.unit, self.comm.groups[instruction.group]
        state = self.states[unit]
        made = next(made for name, _, made in chain(self.table, unit) if name == instruction.group)
        if instruction.group == "tp":
            handles = [group.all_reduce(state.grad[segment.start:segment.stop])
                       for segment in state.layout.segments if segment.replicated]
            slots.put(made, True, _all(handles))
        elif instruction.group == "tie":
            slots.put(made, True, group.all_reduce(state.gshard))
        else:
            part = state.grad[slice(*state.shard)]
            scattered = group.reduce_scatter(part, state.grad)

            def finish() -> None:
                scattered.wait()
                if not self.table.sharded:  # the same sums as under ZeRO-1, then everybody gets all of them
                    group.all_gather(state.grad, part).wait()
                state.start_over()

            slots.put(made, True, Handle(finish))

    @torch.no_grad()
    def clip(self, instruction: Instruction, slots: Slots) -> None:
        """One all-reduce over the world of [norm squared, found_inf, loss sum, token count]."""
        numbers = torch.zeros(4, dtype=torch.float64, device=self.comm.device)
        if instruction.keep != "none":
            for state, counts in ((self.states[p], self._counts(p)) for p in self.table.held(self.comm.here.pp)):
                for segment in state.layout.segments_of(state.index) if counts else ():
                    if self.comm.here.tp == 0 or not segment.replicated:
                        norm = torch.linalg.vector_norm(state.range(state.gshard, segment), dtype=torch.float64)
                        numbers[0] += norm * norm
        if Slot("loss") in slots and self.comm.here.tp == 0:
            numbers[2] = slots.get(Slot("loss"))
            numbers[3] = self.config.tokens_per_step / self.config.dp
        numbers[1] = (~torch.isfinite(numbers)).any().double()
        self.comm.groups["world"].all_reduce(numbers).wait()
        squared, found, loss, tokens = numbers.tolist()
        assert tokens == self.config.tokens_per_step, f"{tokens} tokens were counted, not {self.config.tokens_per_step}"
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        limit = self.config.optimizer.clip_grad
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        slots.put(Slot("scale"), Clipped(loss, norm, scale, found == 0 and math.isfinite(norm) and math.isfinite(loss)))

    def _counts(self, unit: int) -> bool:
        """A tied embedding counts once: at the first of its positions."""
        return self.table.parameters[unit].positions[0] == self.comm.here.pp

    @torch.no_grad()
    def step(self, instruction: Instruction, slots: Slots) -> None:
        clipped: Clipped = slots.get(Slot("scale"))
        if not clipped.finite:
            return  # nothing moves; the loop decides whether the run goes on
        state, config = self.states[instruction.unit], self.config.optimizer
        if clipped.scale != 1.0:
            state.gshard.mul_(clipped.scale)
        for segment in state.segments():
            moments = optimizer.Moments(state.range(state.moments.exp_avg, segment),
                                        state.range(state.moments.exp_avg_sq, segment))
            optimizer.step(config, self.lr, self.updates + 1, state.range(state.master, segment),
                           state.range(state.gshard, segment), moments, segment.decay)
        if not self.table.sharded:
            state.publish()


def _all(handles: list[Handle]) -> Handle:
    def wait() -> None:
        for handle in handles:
            handle.wait()

    return Handle(wait)
