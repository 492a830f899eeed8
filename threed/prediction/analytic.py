"""Costs before any run: FLOPs over speed, bytes over bandwidth. They neglect the start-up of kernels,
memory-bound work, and the lower speed of a GPU on small products; `efficiency` stands for all of these.
Measured costs (`--costs RUN`) are better."""

from __future__ import annotations

from dataclasses import dataclass, fields

from threed.errors import InputError
from threed.prediction.simulate import Costs, cost_of
from threed.program.effects import effects
from threed.program.instruction import COMPUTE, Instruction, Op, Tier
from threed.program.table import Table
from threed.program.walk import Cost


@dataclass(frozen=True)
class Hardware:
    """One device and its links. The defaults are an A100's 16-bit peak, half of it reached, NVLink inside a
    node (tp) and 200 Gbit/s a device between nodes (dp, pp)."""

    tflops: float = 312.0  # peak of one device
    efficiency: float = 0.5  # share of the peak that large products reach
    tp_gbps: float = 2400.0  # Gbit/s that a rank sends over tp
    dp_gbps: float = 200.0  # Gbit/s that a rank sends over dp
    pp_gbps: float = 200.0  # Gbit/s that a rank sends over pp
    memory_gbps: float = 12000.0  # Gbit/s of device memory, which bounds the optimizer step
    host_gbps: float = 800.0  # Gbit/s of host memory that a rank has for its optimizer step
    link_gbps: float = 200.0  # Gbit/s between device and host, each way
    read_gbps: float = 24.0  # Gbit/s that a rank reads from its disk
    write_gbps: float = 12.0  # Gbit/s that a rank writes to its disk
    latency_us: float = 10.0  # of one communication
    context_gb: float = 0.5  # GB of device memory for CUDA and its libraries
    # NVIDIA/nccl, issue 964: 0.54 GB for 2 ranks of an A100 node, 0.69 GB for more.
    communicator_gb: float = 0.6  # GB of device memory for a NCCL communicator

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """'tflops=989,dp_gbps=400' -> Hardware."""
        values = {}
        names = [item.name for item in fields(cls)]
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                values[name] = float(value)
            except ValueError:
                values[name] = -1.0
            if name not in names or not values[name] > 0:
                raise InputError(f"hardware={text}: '{part}' is not one of {', '.join(names)} with a number "
                                 "above 0")
        return cls(**values)

    def taken_bytes(self, communicators: int) -> int:
        """Bytes of a device that are taken before a run asks for any, by so many communicators a rank."""
        return round((self.context_gb + communicators * self.communicator_gb) * 1e9)

    def link(self, axis: str) -> float:
        """Gbit/s that a rank sends over an axis. An axis without a number of its own has that of dp."""
        return getattr(self, f"{axis}_gbps", self.dp_gbps)

    def cost(self, table: Table, measured: Costs | None = None) -> Cost:
        """Seconds of an instruction of a plan. `measured` costs replace the analytic ones, but not for moves
        between tiers and steps on the host, which no run measures."""
        by_run = cost_of(measured) if measured is not None else None
        speed = self.tflops * 1e12 * self.efficiency
        ways = {"d2h": self.link_gbps, "h2d": self.link_gbps, "read": self.read_gbps,
                "write": self.write_gbps, "host": self.host_gbps}

        def travel(instruction: Instruction) -> float:
            sent = {axis: size for axis, size in table.sent(instruction).items() if size}
            return sum(size * 8 / (self.link(axis) * 1e9) + self.latency_us * 1e-6
                       for axis, size in sent.items())

        def cost(position: int, instruction: Instruction) -> float:
            op = instruction.op
            home = table.parameters[instruction.unit].state_home if op == Op.STEP else Tier.DEVICE
            if by_run is not None and op not in (Op.OFFLOAD, Op.FETCH) and home == Tier.DEVICE:
                return by_run(position, instruction)
            if op in COMPUTE:
                flops = table.units[instruction.unit].forward_flops * (2 if op == Op.BACKWARD else 1)
                return flops / speed + travel(instruction)
            # STEP reads gradient, master and buffers, and writes master, buffers and the parameter.
            if op == Op.STEP:
                numel = table.shard_numel(instruction.unit)
                speed_gbps = self.memory_gbps if home == Tier.DEVICE else self.host_gbps
                kept = table.state_bytes(Tier.HOST)
                return numel * (2 * kept + table.elements.grad
                                + table.elements.param) * 8 / (speed_gbps * 1e9)
            if op in (Op.OFFLOAD, Op.FETCH):
                gbps = ways[effects(instruction, table, position).lane]
                return table.moved(instruction) * 8 / (gbps * 1e9) + self.latency_us * 1e-6
            if op == Op.CLIP:
                return self.latency_us * 1e-6
            return travel(instruction)

        return cost


