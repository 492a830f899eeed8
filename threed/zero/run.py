"""What GATHER, RELEASE, REDUCE, CLIP and STEP do to tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from threed.comm import Comm
from threed.optimizers.base import Update, View
from threed.program.buffers import Buffers
from threed.program.effects import chain
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table
from threed.schema import Config
from threed.slots import Slots
from threed.tensor.precision import Precision
from threed.zero import optimizer
from threed.zero.scaler import LossScaler
from threed.zero.shard import counts
from threed.zero.state import UnitState, there


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
    """Sum of squares of a flat tensor, in fp64: of blocks in fp32, and over these in fp64. (On a CPU torch's own norm in fp64
    makes an fp64 copy first.) An element above 1e19 is taken for an overflow: its square would be one in Adam's moments, too."""
    whole = len(values) - len(values) % BLOCK
    norms = torch.linalg.vector_norm(values[:whole].view(-1, BLOCK), dim=1, dtype=torch.float32).double()
    rest = torch.linalg.vector_norm(values[whole:], dtype=torch.float64)
    return norms.dot(norms) + rest * rest


class ZeroRun:
    def __init__(self, config: Config, comm: Comm, table: Table, states: dict[int, UnitState], buffers: Buffers):
        self.config, self.comm, self.table, self.states = config, comm, table, states
        self.precision, self.scaler = Precision.of(config.precision), LossScaler.of(config)
        self.step_number = 0  # steps of the run so far
        self.updates = 0  # optimizer updates so far: Adam's and the learning rate's clock (skipped steps do not count)
        self.waiting: Clipped | None = None  # what CLIP found of the gradients that wait for the next step
        # While a step is verified: of each update that was computed twice, unit -> elements that differ.
        self.update_differences: list[tuple[int, torch.Tensor]] | None = None
        self._staging = torch.zeros(buffers.staging, dtype=torch.uint8, device=comm.device)
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {
            Op.GATHER: self.gather, Op.RELEASE: self.release, Op.REDUCE: self.reduce, Op.CLIP: self.clip, Op.STEP: self.step}

    @property
    def lr(self) -> float:
        return optimizer.learning_rate(self.config.optimizer, self.updates, self.config.train.steps)

    def program(self) -> str:
        """Which program the next step runs."""
        if not self.table.delayed:
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
        if not state.whole:
            state.occupy(state.storage.params.take(state.layout.numel))
        whole, slot = state.param, Slot("pshard", instruction.unit)
        fetched = slot != self.table.weight(instruction.unit)
        part = slots.get(slot) if fetched else state.pshard
        assert whole is not None and part is not None
        handle = self.comm.lane("dp").submit(lambda: group.all_gather(whole, part).wait())
        if fetched:
            state.storage.pshards.give(part, handle)
        slots.put(Slot("param", instruction.unit), whole, handle)

    def release(self, instruction: Instruction, slots: Slots) -> None:
        """A unit that stays whole keeps its buffer; only the content is given up."""
        if not self.states[instruction.unit].whole:
            self.states[instruction.unit].vacate()

    @torch.no_grad()
    def reduce(self, instruction: Instruction, slots: Slots) -> None:
        name, state = instruction.group, self.states[instruction.unit]
        made = next(made for group, _, made in chain(self.table, instruction.unit) if group == name)
        if name == "tp":
            self._sum_replicated(state)
            slots.put(made, True)
        elif name == "tie":
            slots.put(made, True, self.comm.groups[name].all_reduce(there(state.gshard)))
        elif name == "replica":
            slots.put(made, True, self.comm.lane("dp").submit(lambda: self._sum_replicas(state)))
        else:
            self._scatter(instruction, made, slots)

    def _sum_replicated(self, state: UnitState) -> None:
        """Over tp, in one call: parameters that all tp ranks hold, of which each has the gradient of its own tokens."""
        grad = state.whole_grad()
        parts = [grad[segment.start:segment.stop] for segment in state.layout.segments if "tp" not in segment.axes]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.comm.groups["tp"].all_reduce(joined).wait()
        if len(parts) > 1:
            for part, summed in zip(parts, joined.split([len(part) for part in parts]), strict=True):
                part.copy_(summed)

    def _sum_replicas(self, state: UnitState) -> None:
        group, gshard = self.comm.groups["replica"], state.gshard
        assert gshard is not None
        moving = self._stage(gshard, 0)
        group.all_reduce(moving).wait()
        if moving is not gshard:
            gshard.copy_(moving)

    def _scatter(self, instruction: Instruction, made: Slot, slots: Slots) -> None:
        """Sum the gradient over the group that shares the unit; this rank keeps its part. Without sharding everybody then gets
        all parts: the same sums as under ZeRO-1."""
        state = self.states[instruction.unit]
        group, sharded = self.comm.groups[self.table.shard_group], self.table.sharded
        grad, pooled = state.whole_grad(), self.table.zero_stage >= 2
        if self.table.streams(instruction.unit):
            state.gshard = state.storage.gshards.take(state.count)
        part = state.gshard if pooled else grad[slice(*state.shard)]
        assert part is not None
        add = pooled and state.reduced and not self.table.streams(instruction.unit)
        state.reduced = True

        def job() -> None:
            moving = self._stage(grad, grad.numel())
            scratch = self._staging.view(moving.dtype)[:grad.numel()] if group.size() > 1 else None
            group.reduce_scatter(part, moving, add, scratch).wait()
            if not sharded:
                group.all_gather(grad, part).wait()

        handle = self.comm.lane("dp").submit(job)
        state.begin_anew(handle)
        slots.put(made, True, handle)

    def _stage(self, tensor: torch.Tensor, skip: int) -> torch.Tensor:
        """The tensor in the dtype in which gradients travel: itself, or a copy in the staging buffer after `skip` elements."""
        if tensor.dtype == self.precision.reduce or self.table.dp == 1:
            return tensor
        staged = self._staging.view(self.precision.reduce)[skip:skip + tensor.numel()]
        return staged.copy_(tensor)

    @torch.no_grad()
    def clip(self, instruction: Instruction, slots: Slots) -> None:
        """One all-reduce over the world of [norm squared, found_inf, loss sum, token count]."""
        numbers = torch.zeros(4, dtype=torch.float64, device=self.comm.device)
        if instruction.keep != "none":
            if self.comm.device.type == "cuda" and any(state.host_grad is not None for state in self.states.values()):
                torch.cuda.current_stream().synchronize()  # it waits for the copies to the host; the host reads them now
            for state, mine in ((self.states[p], self._counts(p)) for p in self.table.held(self.comm.here.pp)):
                for segment in state.layout.segments_of(state.index):
                    # What another rank counts is looked at, too: an overflow may be in one copy only.
                    counted = mine and counts(segment.axes, self.comm.here._asdict())
                    numbers[0 if counted else 1] += squared_norm(state.range(state.gradient, segment))
        if Slot("loss") in slots and self.comm.here.tp == 0:
            numbers[2] = slots.get(Slot("loss"))
            if self.comm.here.pp == self.table.position(self.table.last):  # tokens count once
                numbers[3] = self.config.tokens_per_step / self.config.dp
        numbers[1] = (~torch.isfinite(numbers)).any().double()
        self.comm.groups["world"].all_reduce(numbers).wait()
        squared, found, loss, tokens = numbers.tolist()
        assert tokens == self.config.tokens_per_step, f"{tokens} tokens were counted, not {self.config.tokens_per_step}"
        loss_scale = self.scaler.scale
        norm = (math.sqrt(squared) if squared >= 0 else math.nan) / loss_scale
        limit = self.config.optimizer.clip_grad
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        finite = found == 0 and math.isfinite(norm) and math.isfinite(loss)
        clipped = Clipped(loss, norm, scale / loss_scale, finite, loss_scale)
        slots.put(Slot("scale"), clipped)
        for state in self.states.values() if instruction.keep != "none" else ():  # the next gradients are of another step
            state.reduced = state.came_down = False
        if instruction.keep in ("all", "later"):
            self._complete(clipped if instruction.keep == "later" else None, slots)

    def _complete(self, waiting: Clipped | None, slots: Slots) -> None:
        """What waited has been stepped; this step's gradients may wait in turn."""
        if self.waiting is not None:
            self.updates += self.waiting.finite
        self.waiting = waiting
        for unit, state in self.states.items() if waiting is not None else ():
            state.host_grad, state.host_prev = state.host_prev, state.host_grad
            slots.put(Slot("host_gprev", unit), True)

    def _counts(self, unit: int) -> bool:
        """A tied embedding counts once: at the first of its positions. So does what several shard groups hold: in the first."""
        first = self.table.parameters[unit].positions[0] == self.comm.here.pp
        return first and self.comm.here.dp < self.table.shard_size

    @torch.no_grad()
    def step(self, instruction: Instruction, slots: Slots) -> None:
        state, clipped = self.states[instruction.unit], self.waiting if instruction.group == "prev" else slots.get(Slot("scale"))
        gradient = state.gradient_prev if instruction.group == "prev" else state.gradient
        assert clipped is not None
        if state.unit.state_home != "device":
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
        """The same beside the computation. What comes of it lies where the weights live, or on its way there."""
        lr, number, unit = self.lr, self.updates + 1, state.number
        stays = state.unit.weight_home == "host"
        kind = "host_param" if self.table.weight(unit).kind == "param" else "host_pshard"
        if stays:
            out = state.pshard
        else:
            out = state.storage.host_weights.take(state.file_bytes(self.table.param_bytes) // self.table.param_bytes)
        assert out is not None

        def job() -> None:
            if clipped.finite:
                self._update(state, gradient, clipped, lr, number, out)
                out[sum(segment.stop - segment.start for segment in state.segments()):].zero_()  # padding
            else:
                out[:state.count].copy_(state.weights)

        handle = self.comm.host(job)
        slots.put(Slot(kind, unit), out, handle)
        slots.put(Slot("host_state", unit), True, handle)
