"""One rank of bench/peers/tp.py: threed's engine over a tp group behind a slow link, and the products that
can hide the group's collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import NamedTuple

import torch

from threed.comm.lanes import Handle
from threed.comm.process import ProcessComm, ProcessGroup
from threed.engine.engine import Engine
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op
from threed.program.slots import Slots
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.products import add_product


class SlowGroup(ProcessGroup):
    """A group behind a slow link, by this rank's clock. A collective begins on it when it is issued, or when
    the one before it has ended, and waiting for it ends no earlier than it ends there. (Gloo has brought the
    numbers before that, unless the link is fast.)"""

    def __init__(self, group: ProcessGroup, comm: ProcessComm):
        super().__init__(group.name, group.ranks, comm.rank, comm.sent, group.process_group)
        self.s_per_byte = 0.0
        self.blocking = False  # whether a collective is waited for where it is issued
        self.slept_s = 0.0  # in waits for the link, since the start
        self._free = 0.0  # when the link's last collective ends

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle:
        return self._slow(super()._all_reduce(tensor, op), 2 * tensor.nbytes)

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                        scratch: torch.Tensor | None) -> Handle:
        return self._slow(super()._reduce_scatter(output, tensor, add, scratch), tensor.nbytes)

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        return self._slow(super()._all_gather(output, tensor), output.nbytes)

    def _slow(self, handle: Handle, size: int) -> Handle:
        """`size`: bytes, of which a rank sends all but its own share."""
        took = size * (self.size() - 1) / self.size() * self.s_per_byte
        self._free = end = max(time.monotonic(), self._free) + took

        def wait() -> None:
            begin = time.monotonic()
            if begin < end:
                time.sleep(end - begin)
                self.slept_s += time.monotonic() - begin
            handle.wait()  # a reduce-scatter sums what has arrived

        slow = Handle(wait)
        if self.blocking:
            slow.wait()
        return slow


class Spent(NamedTuple):
    """In a part of a step."""

    took_s: float
    slept_s: float  # of it, in waits for the link
    sent: int  # bytes over tp

    def plus(self, other: Spent, sign: int = 1) -> Spent:
        return Spent(self.took_s + sign * other.took_s, self.slept_s + sign * other.slept_s,
                     self.sent + sign * other.sent)


NOTHING = Spent(0.0, 0.0, 0)


class Ran(NamedTuple):
    """A step of one rank."""

    begin: float  # by the clock that all processes of a machine share
    backward: Spent  # of blocks
    step: Spent
    loss: float


class Stepper:
    """The engine of one rank over a slow group."""

    def __init__(self, config: Config, comm: ProcessComm, link: SlowGroup):
        plan = make_plan(config)
        self.comm, self.link, self.units = comm, link, plan.table.units
        self.engine = Engine(Analysis(plan), comm)
        self.handler = self.engine.handlers[Op.BACKWARD]
        self.engine.handlers[Op.BACKWARD] = self.backward
        self.of_blocks = NOTHING

    def so_far(self) -> Spent:
        return Spent(time.monotonic(), self.link.slept_s, self.comm.sent["tp"])

    def backward(self, item: Instruction, slots: Slots) -> Handle | None:
        before = self.so_far()
        handle = self.handler(item, slots)
        if is_block(self.units[item.unit].name):
            self.of_blocks = self.of_blocks.plus(self.so_far().plus(before, -1))
        return handle

    def step(self, data: Sequence[Batch]) -> Ran:
        self.of_blocks, before = NOTHING, self.so_far()
        clipped, _ = self.engine.train_step(lambda microbatch: data[microbatch])
        return Ran(before.took_s, self.of_blocks, self.so_far().plus(before, -1), clipped.loss)


def is_block(unit: str) -> bool:
    return unit.startswith("blocks.")


class Products(NamedTuple):
    """Seconds of the two products in backward of a column-parallel linear."""

    input: float  # for its input's gradient
    weight: float  # for its weight's; with the sum for its bias's


class Alone:
    """These products and nothing else: of the same shapes and layouts as in the engine, with matrices of
    their own for each block, as there."""

    def __init__(self, config: Config):
        model, tp = config.model, config.parallel.tp
        tokens = model.seq_len, config.train.micro_batch_size
        widths = {"qkv": 3 * model.hidden, "up": model.num_ffn_hidden, "head": model.padded_vocab}

        def matrices(width: int) -> tuple[torch.Tensor, ...]:
            return (torch.randn(*tokens, model.hidden), torch.randn(*tokens, width),
                    torch.randn(width, model.hidden), torch.zeros(width, model.hidden))

        self.linears = {name: [matrices(width // tp) for _ in range(1 if name == "head" else model.layers)]
                        for name, width in widths.items()}

    def time(self) -> dict[str, Products]:
        """By linear, the means over the blocks."""
        return {name: Products(*map(mean, zip(*self._products(name)))) for name in self.linears}

    def _products(self, name: str) -> Iterator[Products]:
        for x, grad, weight, into in self.linears[name]:
            begin = time.monotonic()
            torch.matmul(grad, weight)
            middle = time.monotonic()
            add_product(into, False, grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
            if name != "head":
                grad.sum((0, 1))
            yield Products(middle - begin, time.monotonic() - middle)
