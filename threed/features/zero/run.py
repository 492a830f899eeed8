"""The handlers of GATHER, RELEASE, REDUCE, CLIP and STEP."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from threed.base.axes import axes_of
from threed.base.mesh import GROUPS
from threed.comm.group import Comm, Group
from threed.comm.lanes import Job
from threed.devices import device_of
from threed.features.zero.clip import Clipped, Limits
from threed.features.zero.part import UnitPart
from threed.features.zero.shard import counts
from threed.features.zero.turns import MatrixRun
from threed.features.zero.units import UnitState
from threed.features.zero.updates import Due, UpdateCount
from threed.models.tiling import share_of
from threed.optim import step as optimizer
from threed.optim.base import OnDevice, Update, View
from threed.optim.registry import BESIDE, RULES, optimizer_called
from threed.program.buffers import Buffers
from threed.program.instruction import Instruction, Op, Slot, SlotKind, Tier
from threed.program.names import ENTER, TRAIN
from threed.program.slots import Slots
from threed.program.table import Table
from threed.schema import Config, OptimizerConfig
from threed.tensor.loss_sum import NUMBERS
from threed.tensor.precision import Precision


class _Range(NamedTuple):
    """A range of a unit's step."""

    decay: bool
    view: View
    copy: torch.Tensor | None


class Updater(Protocol):
    """How updates on the device are run."""

    def numbers(self, given: OnDevice) -> OnDevice:
        """The same numbers, where updates read them."""
        ...

    def update(self, unit: int, numbers: OnDevice, body: Callable[[], None]) -> None:
        """Run `body`, the update of a unit by these numbers: kernels on tensors that stay where they are."""
        ...


class PlainUpdates:
    """Runs updates as they are."""

    def numbers(self, given: OnDevice) -> OnDevice:
        return given

    def update(self, unit: int, numbers: OnDevice, body: Callable[[], None]) -> None:
        body()


class ZeroRun(UpdateCount):
    def __init__(self, config: Config, comm: Comm, table: Table, states: dict[int, UnitState],
                 buffers: Buffers):
        super().__init__(config, comm.device)
        self.comm, self.table, self.states = comm, table, states
        self.stepped = {unit: states[unit] for unit in table.stepped(comm.here.position)}
        self.precision = Precision.of(config.precision)
        self.on_device: OnDevice | None = None  # the numbers of this step's updates there
        self.updater: Updater = PlainUpdates()
        self.host_threads = 0  # of a step on the host; 0: as many as torch's
        self.waiting: Due | None = None  # of the gradients that wait for their STEP in the next program
        # While a step is verified: (unit, number of elements in which the two computations of its update
        # differ).
        self.update_differences: list[tuple[int, torch.Tensor]] | None = None
        # Whether this rank adds the loss, which all ranks have that share a layer's parameters, to the sum.
        self._speaks = comm.here.is_first(axes_of("parameters"))
        self.matrices = MatrixRun(config, comm, table, states)
        self._staging = torch.zeros(buffers.staging, dtype=torch.uint8, device=comm.device)

    def handlers(self) -> dict[Op, Callable[[Instruction, Slots], Job | None]]:
        return {Op.GATHER: self.gather, Op.RELEASE: self.release, Op.REDUCE: self.reduce, Op.CLIP: self.clip,
                Op.STEP: self.step, Op.EXCHANGE: self.matrices.exchange}

    def program(self) -> str:
        """The name of the next step's program."""
        return ENTER if self.table.update.overlap and self.waiting is None else TRAIN

    def gather(self, instruction: Instruction, slots: Slots) -> Job:
        group = self.comm.groups[instruction.group]
        whole, shard = self.states[instruction.unit].weights.gather()
        slots.put(Slot(SlotKind.PARAM, instruction.unit), whole)
        return lambda: group.all_gather(whole, shard).wait()

    def release(self, instruction: Instruction, slots: Slots) -> None:
        self.states[instruction.unit].weights.release()

    @torch.no_grad()
    def reduce(self, instruction: Instruction, slots: Slots) -> Job | None:
        state, unit = self.states[instruction.unit], self.table.parameters[instruction.unit]
        step = next(step for step in unit.reductions if step.group == instruction.group)
        group = self.comm.groups[step.group]
        slots.put(Slot(step.makes, instruction.unit), True)
        if step.group == unit.shard_group:
            return self._scatter(state, group)
        if GROUPS[step.group].lane == "compute":
            self._sum_partial(state, group)
            return None
        shard = state.gradient.sum_copies()
        if step.staged:
            return lambda: self._sum_copies(shard, group)
        return lambda: group.all_reduce(shard).wait()

    def _sum_partial(self, state: UnitState, group: Group) -> None:
        """Sum the gradients of parameters that all ranks of the group hold, each with the gradient of its own
        tokens or heads, in one call."""
        grad, complete = state.gradient.sum_parts()
        complete()
        over = GROUPS[group.name].axes or ()
        parts = [grad[each.start:each.stop]
                 for each in state.part.layout.partial(over, share_of(self.config).sequence)]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        group.all_reduce(joined).wait()
        if len(parts) > 1:
            for part, summed in zip(parts, joined.split([len(part) for part in parts]), strict=True):
                part.copy_(summed)

    def _sum_copies(self, shard: torch.Tensor, group: Group) -> None:
        moving = self._stage(shard, 0)
        group.all_reduce(moving).wait()
        if moving is not shard:
            shard.copy_(moving)

    def _scatter(self, state: UnitState, group: Group) -> Job:
        """Sum the gradient over the shard group; this rank keeps its shard. Without sharding all ranks then
        gather all shards, so that the sums are those of ZeRO-1."""
        sharded, (grad, complete, shard, adds) = self.table.zero.sharded, state.gradient.reduce()

        def job() -> None:
            complete()
            moving = self._stage(grad, grad.numel())
            scratch = self._staging.view(moving.dtype)[:grad.numel()] if group.size() > 1 else None
            group.reduce_scatter(shard, moving, adds, scratch).wait()
            if not sharded:
                group.all_gather(grad, shard).wait()

        return job

    def _stage(self, tensor: torch.Tensor, skip: int) -> torch.Tensor:
        """The tensor in the dtype of reductions: itself, or a copy in the staging buffer after `skip`
        elements."""
        if tensor.dtype == self.precision.reduce or not len(self._staging):  # no staging: one rank
            return tensor
        staged = self._staging.view(self.precision.reduce)[skip:skip + tensor.numel()]
        return staged.copy_(tensor)

    @torch.no_grad()
    def clip(self, instruction: Instruction, slots: Slots) -> None:
        """One all-reduce over the world of [norm squared, found_inf, token count, and the numbers of
        LossSum]."""
        numbers = torch.zeros(3 + NUMBERS, dtype=torch.float64, device=self.comm.device)
        if instruction.gradients != "none":
            device = device_of(self.comm.device)
            here = self.comm.here
            for state in self.stepped.values():
                part, gradient = state.part, state.gradient
                squares = gradient.squares or part.squared_norms(gradient.values)
                for segment, squared in zip(part.layout.segments_of(part.index), squares, strict=True):
                    # Copies that another rank counts are checked for overflows, too: they may differ.
                    counted = (state.writes and state.part.unit.optimizer not in RULES
                               and counts(segment.axes, here.on))
                    if gradient.squares:  # of the lane that has copied it
                        device.in_use(squared)
                    numbers[0 if counted else 1].add_(squared)
        if Slot(SlotKind.LOSS) in slots and self._speaks:
            numbers[3:] = slots.get(Slot(SlotKind.LOSS))
            if self.comm.here.position == self.table.position(self.table.last):  # count tokens once
                # (`numbers[2] = ...` would be a copy from the host, which waits for all work before it)
                numbers[2].fill_(self.config.tokens_per_step / self.config.data_ranks)
        numbers[1] = (~torch.isfinite(numbers)).any().double()
        self.comm.groups["world"].all_reduce(numbers).wait()
        clipped = Clipped(numbers, Limits(self.config.tokens_per_step, self.scaler.scale,
                                          self.config.optimizer.clip_grad,
                                          bool(self.config.model.own_layers)))
        slots.put(Slot(SlotKind.SCALE), clipped)
        for state in self.stepped.values() if instruction.gradients != "none" else ():
            state.gradient.clip()
            if instruction.gradients == "drop":
                state.gradient.drop()
        if instruction.gradients != "none" and device_of(self.comm.device).asynchronous:
            self.on_device = self.updater.numbers(self.due_on_device(clipped))
        if instruction.gradients == "wait":
            self.waiting = self.due(clipped)
            for slot in self.table.waiting(self.comm.here.position):
                slots.put(slot, True)

    @torch.no_grad()
    def step(self, instruction: Instruction, slots: Slots) -> Job | None:
        state = self.states[instruction.unit]
        if instruction.part:
            due = self.due(slots.get(Slot(SlotKind.SCALE)))
            return self.matrices.step(instruction, slots, due, self.update_differences)
        gradient = state.gradient.step()
        if instruction.age == "prev":
            assert self.waiting is not None
            return self._step_on_host(state, gradient, self.waiting, slots)
        clipped = slots.get(Slot(SlotKind.SCALE))
        if state.gradient.away:
            return self._step_on_host(state, gradient, self.due(clipped), slots)

        def update(due: Due | None = None) -> None:
            self._update(state.part, self._ranges(state, gradient), due)
            state.optimizer_state.publish()

        numbers, rule = self.on_device, optimizer_called(self._rule(state.part).name)
        if numbers is not None and rule.on_device:
            # A step that is skipped changes no master weight: the same weights are published again.
            updater = self.updater if self.update_differences is None else PlainUpdates()
            updater.update(instruction.unit, numbers, update)
        elif clipped.finite:  # else weights do not change, and the training loop decides what follows
            update(self.due(clipped))
        return None

    def _rule(self, part: UnitPart) -> OptimizerConfig:
        """The optimizer of a unit."""
        config, own = self.config.optimizer, part.unit.optimizer
        if not own:
            return config
        decay = config.adamw_weight_decay if own == BESIDE else None
        return replace(config, name=own, weight_decay=config.weight_decay if decay is None else decay)

    def _rate_of(self, part: UnitPart) -> float:
        """By what the learning rate is multiplied for a unit."""
        config = self.config.optimizer
        if part.unit.optimizer != BESIDE or config.adamw_lr is None:
            return 1.0
        return config.adamw_lr / config.lr

    def _ranges(self, state: UnitState, gradient: torch.Tensor,
                out: torch.Tensor | None = None) -> list[_Range]:
        """The ranges of a unit's step; the new weights are written to `out`, too, if given."""
        part, master, buffers = state.part, state.optimizer_state.master, state.optimizer_state.buffers
        return [_Range(segment.decay,
                       View(part.range(master, segment), part.range(gradient, segment),
                            {name: part.range(each, segment) for name, each in buffers.items()}),
                       part.range(out, segment) if out is not None else None) for segment in part.segments()]

    def _update(self, part: UnitPart, ranges: Sequence[_Range], due: Due | None) -> None:
        """Step ranges of a unit. `due`: None where the device has the numbers."""
        mean = part.layout.placed[0].parameter.counted * self.config.tokens_per_step
        threads = self.host_threads if part.unit.state_home != Tier.DEVICE else 0
        times = self._rate_of(part)
        lr, number, scale = ((due.lr * times, due.update, due.clipped.scale) if due is not None
                             else (math.nan, 0, math.nan))
        on_device = self.on_device if due is None else None
        if on_device is not None and times != 1.0:
            on_device = on_device._replace(lr=on_device.lr * times)
        by = {decay: Update(self._rule(part), lr, number, decay, scale, mean, threads, on_device)
              for decay in (False, True)}
        steps = [optimizer.RangeStep(by[each.decay], each.view, each.copy) for each in ranges]
        if self.update_differences is None:
            optimizer.step_all(steps)
        else:
            self.update_differences += [(part.number, optimizer.step_twice(*step)) for step in steps]

    def _step_on_host(self, state: UnitState, gradient: torch.Tensor, due: Due, slots: Slots) -> Job:
        """Step a unit on the host lane. The new weights go to their home on the host, or to a staging buffer
        that a later FETCH or OFFLOAD empties."""
        part, out = state.part, state.weights.step_output()
        # (of the tensors that this rank has now: where they go to the disk afterwards, others are next)
        master, ranges = state.optimizer_state.master, self._ranges(state, gradient, out)
        stepped = sum(segment.stop - segment.start for segment in part.segments())
        slots.put(self.table.shards.weight(part.number).on(Tier.HOST), out)
        slots.put(Slot(SlotKind.STATE, part.number, tier=Tier.HOST), True)

        def job() -> None:
            if due.clipped.finite:
                self._update(part, ranges, due)
                out[stepped:].zero_()  # padding
            else:
                out[:part.count].copy_(master)

        return job
