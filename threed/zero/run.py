"""What GATHER, RELEASE, REDUCE, CLIP and STEP do to tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from threed.comm import Comm, Group
from threed.lanes import Handle, Lane
from threed.mesh import GROUPS, axes_of
from threed.optimizers.base import Update, View
from threed.program.buffers import Buffers
from threed.program.instruction import Instruction, Op, Slot, Tier
from threed.program.table import Table
from threed.schema import Config
from threed.slots import Slots
from threed.tensor.precision import Precision
from threed.zero import optimizer
from threed.zero.scaler import LossScaler
from threed.zero.shard import counts
from threed.zero.state import Reduced, UnitState, there


@dataclass
class Clipped:
    """What CLIP found, equal on all ranks."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float
    scale: float  # STEP multiplies gradients by this
    finite: bool
    loss_scale: float  # that this step's gradients were made with


BLOCK = 256  # elements whose squares are summed in fp32: few enough that the norm is right to some 1e-8


def squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat tensor, in fp64: of blocks in fp32, and over these in fp64. (On a CPU torch's
    own norm in fp64 makes an fp64 copy first.) An element above 1e19 is taken for an overflow: its square
    would be one in Adam's moments, too."""
    whole = len(values) - len(values) % BLOCK
    norms = torch.linalg.vector_norm(values[:whole].view(-1, BLOCK), dim=1, dtype=torch.float32).double()
    rest = torch.linalg.vector_norm(values[whole:], dtype=torch.float64)
    return norms.dot(norms) + rest * rest


class ZeroRun:
    def __init__(self, config: Config, comm: Comm, table: Table, states: dict[int, UnitState],
                 buffers: Buffers):
        self.config, self.comm, self.table, self.states = config, comm, table, states
        self.precision, self.scaler = Precision.of(config.precision), LossScaler.of(config)
        self.step_number = 0  # steps of the run so far
        # optimizer updates so far: Adam's and the learning rate's clock (skipped steps do not count)
        self.updates = 0
        self.waiting: Clipped | None = None  # what CLIP found of the gradients that wait for the next step
        # While a step is verified: of each update that was computed twice, unit -> elements that differ.
        self.update_differences: list[tuple[int, torch.Tensor]] | None = None
        # Whether it counts what all ranks hold that divide a layer's parameters among them.
        self._speaks = comm.here.is_first(axes_of("parameters"))
        self._staging = torch.zeros(buffers.staging, dtype=torch.uint8, device=comm.device)
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {
            Op.GATHER: self.gather, Op.RELEASE: self.release, Op.REDUCE: self.reduce, Op.CLIP: self.clip,
            Op.STEP: self.step}

    @property
    def lr(self) -> float:
        return optimizer.learning_rate(self.config.optimizer, self.updates, self.config.train.steps)

    def program(self) -> str:
        """Which program the next step runs."""
        if not self.table.update.delayed:
            return "train"
        last = self.step_number >= self.config.train.steps - 1
        if self.waiting is not None:
            return "drain" if last else "train"
        return "plain" if last or self.step_number < self.config.offload.warmup else "enter"

    def finish_step(self, clipped: Clipped) -> None:
        """Count a step of which CLIP found this."""
        self.step_number += 1
        self.updates += clipped.finite and self.waiting is None
        self.scaler.update(not clipped.finite)

    def gather(self, instruction: Instruction, slots: Slots) -> None:
        state, group = self.states[instruction.unit], self.comm.groups[instruction.group]
        if not state.unit.whole:
            state.occupy(state.storage.params.take(state.layout.numel))
        whole, slot = state.param, Slot("pshard", instruction.unit)
        fetched = slot != self.table.weight(instruction.unit)
        part = slots.get(slot) if fetched else state.pshard
        assert whole is not None and part is not None
        lane = self.comm.lane(GROUPS[instruction.group].lane)
        handle = lane.submit(lambda: group.all_gather(whole, part).wait())
        if fetched:
            state.storage.pshards.give(part, handle)
        slots.put(Slot("param", instruction.unit), whole, handle)

    def release(self, instruction: Instruction, slots: Slots) -> None:
        """A unit that stays whole keeps its buffer; only the content is given up."""
        if not self.states[instruction.unit].unit.whole:
            self.states[instruction.unit].vacate()

    @torch.no_grad()
    def reduce(self, instruction: Instruction, slots: Slots) -> None:
        state, unit = self.states[instruction.unit], self.table.parameters[instruction.unit]
        step = next(step for step in unit.reductions if step.group == instruction.group)
        group, lane, made = self.comm.groups[step.group], GROUPS[step.group].lane, Slot(step.makes,
                                                                                        instruction.unit)
        if step.group == unit.shard_group:
            slots.put(made, True, self._scatter(state, group, self.comm.lane(lane)))
        elif lane == "compute":
            self._sum_partial(state, group)
            slots.put(made, True)
        elif step.staged:
            slots.put(made, True, self.comm.lane(lane).submit(lambda: self._sum_copies(state, group)))
        else:
            slots.put(made, True, group.all_reduce(there(state.gshard)))

    def _sum_partial(self, state: UnitState, group: Group) -> None:
        """In one call: parameters that all ranks of a group hold, of which each has the gradient of its own
        tokens."""
        grad = state.whole_grad()
        over = GROUPS[group.name].axes or ()
        parts = [grad[each.start:each.stop] for each in state.layout.segments
                 if not set(over) & set(each.axes)]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        group.all_reduce(joined).wait()
        if len(parts) > 1:
            for part, summed in zip(parts, joined.split([len(part) for part in parts]), strict=True):
                part.copy_(summed)

    def _sum_copies(self, state: UnitState, group: Group) -> None:
        gshard = there(state.gshard)
        moving = self._stage(gshard, 0)
        group.all_reduce(moving).wait()
        if moving is not gshard:
            gshard.copy_(moving)

    def _scatter(self, state: UnitState, group: Group, lane: Lane) -> Handle:
        """Sum the gradient over the group that shares the unit; this rank keeps its part. Without sharding
        everybody then gets all parts: the same sums as under ZeRO-1."""
        sharded, streams = self.table.sharded, self.table.streams(state.number)
        grad, pooled = state.whole_grad(), self.table.zero.stage >= 2
        if streams:
            state.gshard = state.storage.gshards.take(state.count)
        part = there(state.gshard) if pooled else grad[slice(*state.shard)]
        add = pooled and not streams and state.reduced == Reduced.SHARD
        if not streams:
            state.reduced = Reduced.SHARD

        def job() -> None:
            moving = self._stage(grad, grad.numel())
            scratch = self._staging.view(moving.dtype)[:grad.numel()] if group.size() > 1 else None
            group.reduce_scatter(part, moving, add, scratch).wait()
            if not sharded:
                group.all_gather(grad, part).wait()

        handle = lane.submit(job)
        state.begin_anew(handle)
        return handle

    def _stage(self, tensor: torch.Tensor, skip: int) -> torch.Tensor:
        """The tensor in the dtype in which gradients travel: itself, or a copy in the staging buffer after
        `skip` elements."""
        if tensor.dtype == self.precision.reduce or not len(self._staging):  # there is nobody to send it to
            return tensor
        staged = self._staging.view(self.precision.reduce)[skip:skip + tensor.numel()]
        return staged.copy_(tensor)

    @torch.no_grad()
    def clip(self, instruction: Instruction, slots: Slots) -> None:
        """One all-reduce over the world of [norm squared, found_inf, loss sum, token count]."""
        numbers = torch.zeros(4, dtype=torch.float64, device=self.comm.device)
        if instruction.gradients != "none":
            if self.comm.device.type == "cuda" and any(state.host_grad is not None
                                                       for state in self.states.values()):
                # it waits for the copies to the host; the host reads them now
                torch.cuda.current_stream().synchronize()
            here = self.comm.here
            for state, mine in ((self.states[p], self._counts(p)) for p in self.table.held(here.position)):
                for segment in state.layout.segments_of(state.index):
                    # What another rank counts is looked at, too: an overflow may be in one copy only.
                    counted = mine and counts(segment.axes, here.on)
                    numbers[0 if counted else 1] += squared_norm(state.range(state.gradient, segment))
        if Slot("loss") in slots and self._speaks:
            numbers[2] = slots.get(Slot("loss"))
            if self.comm.here.position == self.table.position(self.table.last):  # tokens count once
                numbers[3] = self.config.tokens_per_step / self.config.dp
        numbers[1] = (~torch.isfinite(numbers)).any().double()
        self.comm.groups["world"].all_reduce(numbers).wait()
        squared, found, loss, tokens = numbers.tolist()
        assert tokens == self.config.tokens_per_step, (
            f"{tokens} tokens were counted, not {self.config.tokens_per_step}"
        )
        loss_scale = self.scaler.scale
        norm = (math.sqrt(squared) if squared >= 0 else math.nan) / loss_scale
        limit = self.config.optimizer.clip_grad
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        finite = found == 0 and math.isfinite(norm) and math.isfinite(loss)
        clipped = Clipped(loss, norm, scale / loss_scale, finite, loss_scale)
        slots.put(Slot("scale"), clipped)
        # the next gradients are of another step
        for state in self.states.values() if instruction.gradients != "none" else ():
            state.reduced = Reduced.NOTHING
        if instruction.gradients in ("step", "wait"):
            self._complete(clipped if instruction.gradients == "wait" else None, slots)

    def _complete(self, waiting: Clipped | None, slots: Slots) -> None:
        """What waited has been stepped; this step's gradients may wait in turn."""
        if self.waiting is not None:
            self.updates += self.waiting.finite
        self.waiting = waiting
        for unit, state in self.states.items() if waiting is not None else ():
            state.host_grad, state.host_prev = state.host_prev, state.host_grad
            slots.put(Slot("gprev", unit, tier=Tier.HOST), True)

    def _counts(self, unit: int) -> bool:
        """A tied embedding counts once: at the first of its positions. So does what several shard groups
        hold: in the first."""
        return self.table.saves(self.comm.here.position, unit) and self.comm.is_first_copy

    @torch.no_grad()
    def step(self, instruction: Instruction, slots: Slots) -> None:
        state, clipped = (
            self.states[instruction.unit],
            self.waiting if instruction.age == "prev" else slots.get(Slot("scale")),
        )
        gradient = state.gradient_prev if instruction.age == "prev" else state.gradient
        assert clipped is not None
        if state.unit.state_home != Tier.DEVICE:
            self._step_on_host(state, gradient, clipped, slots)
        elif clipped.finite:  # else nothing moves; the loop decides whether the run goes on
            self._update(state, gradient, clipped, self.lr, self.updates + 1)
            state.publish()

    def _update(self, state: UnitState, gradient: torch.Tensor, clipped: Clipped, lr: float, number: int,
                out: torch.Tensor | None = None) -> None:
        """Step a unit; `out` gets the weights, too."""
        for segment in state.segments():
            by = Update(self.config.optimizer, lr, number, segment.decay, clipped.scale)
            copy = state.range(out, segment) if out is not None else None
            view = View(state.range(state.weights, segment), state.range(gradient, segment),
                        {name: state.range(each, segment) for name, each in state.buffers.items()})
            if self.update_differences is None:
                optimizer.step(by, view, copy)
            else:
                self.update_differences.append((state.number, optimizer.step_twice(by, view, copy)))

    def _step_on_host(self, state: UnitState, gradient: torch.Tensor, clipped: Clipped, slots: Slots) -> None:
        """The optimizer on the host lane. It writes the new weights to where they live on the host, or to a
        staging buffer that a later FETCH or OFFLOAD empties."""
        lr, number, unit = self.lr, self.updates + 1, state.number
        weights = self.table.weight(unit).on(Tier.HOST)
        out = there(state.pshard) if state.unit.weight_home == Tier.HOST else state.room_for_weights()

        def job() -> None:
            if clipped.finite:
                self._update(state, gradient, clipped, lr, number, out)
                out[sum(segment.stop - segment.start for segment in state.segments()):].zero_()  # padding
            else:
                out[:state.count].copy_(state.weights)

        handle = self.comm.host_lane().submit(job)
        slots.put(weights, out, handle)
        slots.put(Slot("state", unit, tier=Tier.HOST), True, handle)
