"""Costs before any run: seconds of each instruction of a plan on a kind of machine. Measured costs
(`--costs RUN`) are better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from threed.base.axes import axes_of
from threed.base.mesh import GROUPS
from threed.base.quantity import BYTES
from threed.base.remember import remembered
from threed.optim.registry import turning
from threed.planner.facts import make_mesh, make_table
from threed.prediction.hardware import GroupPlace, Hardware, places
from threed.prediction.prices import Prices, Travel
from threed.program.buffers import lowered
from threed.program.effects import effects
from threed.program.entries import ComputeUnit, Turning
from threed.program.instruction import COMPUTE, PARTS, PHASES, Instruction, Op, SlotKind, Tier, form_key
from threed.program.plan import Plan
from threed.program.simulate import Costs, cost_of
from threed.program.table import Table
from threed.program.traffic import moved_by, sent_by
from threed.program.trips import depends, trip_of
from threed.program.turning import on_host
from threed.program.walk import Cost
from threed.schema import OptimizerConfig
from threed.spec.kernels import FROZEN, Moved, Product

# Kernels of a unit on a device. Of its norm: some six for each kind of its parameters, of which a block has
# four (decayed or not, cut over tp or not). Of its step: with and without weight decay, and one that writes
# the weights that compute reads.
_NORM_KERNELS, _STEP_KERNELS = 24, 3
_COOL = 0.8  # share of the time in products, up to which a device keeps its clock


def cost(plan: Plan, hardware: Hardware, measured: Costs | None = None, imbalance: float = 1.0) -> Cost:
    """A function: (position, instruction) of a plan -> seconds. `measured` costs replace analytic ones, but
    not for moves between tiers and steps on the host, which no run measures. `imbalance`: rows of the busiest
    rank, for which others wait, over those of balanced ranks: its work on them takes as much longer."""
    hardware = under_load(plan, hardware)
    table, by_run = plan.table, cost_of(measured) if measured is not None else None
    compute, travel = _Compute(plan, hardware), _Travel(plan, hardware)
    host_s = hardware.host_us * 1e-6 if hardware.waits else 0.0
    ways = {"d2h": hardware.link_gbps, "h2d": hardware.link_gbps, "read": hardware.read_gbps,
            "write": hardware.write_gbps, "host": hardware.host_rate(_ranks_of_node(plan, hardware)) * 8e-9}
    lowers = [lowered(plan.table, plan.programs["train"][position]) if "train" in plan.programs
              else Counter[int]()
              for position in range(table.num_positions)]
    known: dict[tuple, float] = {}
    busiest = uneven(plan.table) if imbalance != 1.0 else {}

    def analytic(position: int, instruction: Instruction) -> float:
        op = instruction.op
        if op in COMPUTE:
            return compute.seconds(op, instruction.unit) * (imbalance if instruction.unit in busiest else 1.0)
        if op == Op.STEP:
            return compute.step(instruction.unit, instruction.part)
        if op == Op.CLIP and instruction.gradients != "none":
            return compute.norm(position) + travel.seconds(position, instruction)
        if op == Op.RELEASE and instruction.kind in PARTS:  # it copies this rank's part
            part = table.size(instruction.slot._replace(kind=PARTS[instruction.kind]))
            return compute.prices.moved(2 * part)
        if op in (Op.OFFLOAD, Op.FETCH):
            gbps, size = ways[effects(instruction, table, position).lane], moved_by(table, instruction)
            copied_s = size * 8 / (gbps * 1e9) + hardware.kernel_us * 1e-6
            times = lowers[position][instruction.unit] if instruction.kind == SlotKind.GRAD_SHARD else 1
            # All but the first are added to what the host has.
            added_s = max(0.0, compute.added(size) - copied_s) if times > 1 else 0.0
            return copied_s + (1 - 1 / max(1, times)) * added_s
        sent_s = travel.seconds(position, instruction)
        travels = busiest and op == Op.EXCHANGE and instruction.of_slot
        return sent_s * imbalance if travels and trip_of(instruction, table).counts else sent_s

    def seconds(position: int, instruction: Instruction) -> float:
        op = instruction.op
        if by_run is not None and op not in (Op.OFFLOAD, Op.FETCH) and not on_host(instruction, table):
            return by_run(position, instruction)
        # All micro-batches take the same time.
        key = position, form_key(instruction)
        if key not in known:
            known[key] = analytic(position, instruction) + host_s
        return known[key]

    return seconds


def under_load(plan: Plan, hardware: Hardware) -> Hardware:
    """The hardware as it is in the middle of this plan's steps: the more of the time it multiplies matrices,
    the lower is its clock."""
    if not hardware.sustained:
        return hardware
    prices, hot, total = Prices(hardware, plan.table.elements.param), 0.0, 0.0
    for kernels, units in Counter(unit.kernels for unit in plan.table.units).items():
        for kernel in kernels:
            seconds = prices.forward([kernel]) + prices.input_half([kernel]) + prices.weight_half([kernel])
            total += seconds * units
            hot += seconds * units * (not isinstance(kernel, Moved))
    load = max(0.0, (hot / total - _COOL) / (1 - _COOL)) if total else 0.0
    return replace(hardware, efficiency=hardware.efficiency
                   - load * (hardware.efficiency - min(hardware.efficiency, hardware.sustained)))


def uneven(table: Table) -> dict[int, int]:
    """Units that compute rows whose number depends on other ranks -> the ranks of which they come."""
    units = table.units
    return {index: made.ranks for index, unit in enumerate(units) for read in unit.reads
            for made in units[read.unit].makes
            if made.ranks > 1 and made.becomes == read.name and depends(made, units[read.unit])}


@remembered(lambda *about: about)
def _known_prices(*_: object) -> dict[tuple, float]:
    """Prices on a machine, of compute units by op and unit or of turns by shape: plans of one model share
    them."""
    return {}


class _Compute:
    """Seconds of what a device computes, with the collectives of tensor parallelism."""

    def __init__(self, plan: Plan, hardware: Hardware):
        self.table, self.hardware = plan.table, hardware
        self.units = _units(plan, hardware)
        self.sequence_parallel = plan.config is not None and plan.config.parallel.sequence_parallel
        self.prices = Prices(hardware, plan.table.elements.param, _ranks_of_node(plan, hardware))
        self.travel, self.places, self.config = Travel(hardware), _places(plan, hardware), plan.config
        self._steps: dict[int, dict[str, float]] = {}  # unit whose matrices are turned -> by part of its step
        self.graphs = plan.config is not None and plan.config.run.cuda_graphs and not hardware.waits
        about = plan.table.elements.param, self.sequence_parallel, self.graphs
        self._known = _known_prices(hardware, *about, tuple(
            (axis, *vars(self.places[axis]).values())
            for axis in (*axes_of("tokens"), *axes_of("parameters"))))

    def seconds(self, op: Op, index: int) -> float:
        unit = self.units[index]
        key = op, (unit.kernels, unit.again, tuple((phase, tuple(of.items()))
                                                   for each in (unit.traffic, unit.rings, unit.exchanged)
                                                   for phase, of in each.items()))
        if key not in self._known:  # units are few kinds
            self._known[key] = self._seconds(op, unit)
        return self._known[key]

    def _seconds(self, op: Op, unit: ComputeUnit) -> float:
        prices, graphs = self.prices, self._graphs(unit, PHASES[op])
        if op in (Op.FORWARD, Op.RECOMPUTE):
            return prices.forward(unit.kernels, graphs) + sum(
                self._sent(unit, phase) + self._gathered(unit, phase) for phase in PHASES[op])
        # Pieces are computed again when the input half begins, and all of an instruction is in its graphs.
        rest = None if graphs is None else 0
        first = prices.forward(unit.again, rest) + prices.input_half(unit.kernels, graphs)
        second = prices.weight_half(unit.kernels, graphs if op == Op.BACKWARD_WEIGHT else rest)
        gathers = self._gathered(unit, "input")
        if op == Op.BACKWARD_INPUT:
            return first + self._sent(unit, "input") + gathers
        if op == Op.BACKWARD_WEIGHT:
            return second + self._sent(unit, "weight")
        # A column-parallel linear sends beside its products: the sum of its input's gradient beside that for
        # its weight, and where the sequence is cut, the gather of its input beside the other. A row-parallel
        # one, which gathers where the sequence is cut, waits. On a CPU the processor does both.
        cut = self._cut(unit)
        waits = self._sent(unit, "input") / 2 if cut else 0.0
        beside = self._sent(unit, "input") - waits + self._sent(unit, "weight")
        lost = self.hardware.contention * min(beside, second) if self.hardware.waits else 0.0
        return first + second + gathers + waits + max(0.0, beside - second) + lost

    def _sent(self, unit: ComputeUnit, phase: str) -> float:
        """Of the collectives in a phase: all-reduces, or where the sequence is cut, gathers and scatters."""
        cut, seconds = self._cut(unit), 0.0
        for axis, size in unit.traffic.get(phase, {}).items():
            rings, place = unit.rings[phase].get(axis, 0), self.places[axis]
            if axis in axes_of("tokens"):
                continue
            seconds += (self.travel.ring(size, place, rings) if cut else
                        self.travel.all_reduce(size, place, rings // 2))
        return seconds

    def _gathered(self, unit: ComputeUnit, phase: str) -> float:
        """Of the gathers, scatters and all-to-alls in a phase over ranks that share sequences: attention
        waits for them."""
        seconds = 0.0
        for axis in (axis for axis in axes_of("tokens") if axis in unit.traffic.get(phase, {})):
            place = self.places[axis]
            exchanged, exchanges = unit.exchanged.get(phase, {}).get(axis, (0, 0))
            seconds += (self.travel.ring(unit.traffic[phase][axis] - exchanged, place,
                                         unit.rings[phase][axis])
                        + self.travel.all_to_all(exchanged, place, exchanges))
        return seconds

    def _graphs(self, unit: ComputeUnit, phases: Sequence[str]) -> int | None:
        """Graphs of an instruction, which its collectives cut; None where the host launches each kernel."""
        if not self.graphs:
            return None
        calls = 0
        for phase in phases:
            for axis, rings in unit.rings.get(phase, {}).items():
                calls += rings if self._cut(unit) or axis in axes_of("tokens") else rings // 2
            calls += sum(count for _, count in unit.exchanged.get(phase, {}).values())
        return 1 + calls

    def _cut(self, unit: ComputeUnit) -> bool:
        """Whether the sequence is cut: then it is gathered once more for the gradients of weights, but not
        for those of frozen ones."""
        frozen = any(isinstance(kernel, Product) and kernel.weight == FROZEN for kernel in unit.kernels)
        return any(unit.traffic["weight"].values()) or (frozen and self.sequence_parallel)

    def step(self, index: int, part: str = "") -> float:
        """STEP reads gradient, master and buffers, and writes master, buffers and the parameter."""
        table = self.table
        if (way := table.parameters[index].turning) is not None:
            if index not in self._steps:
                self._steps[index] = self._parts(index, way)
            parts = self._steps[index]  # (a run measures the mean of the three)
            return parts[part] if part else sum(parts.values()) / len(parts)
        numel, home = table.shards.numel(index), table.parameters[index].state_home
        size = numel * (2 * table.shards.state_bytes(Tier.HOST, index) + table.elements.grad
                        + table.shards.param_bytes(index))
        return self.prices.update(size, home != Tier.DEVICE, _STEP_KERNELS)

    def _parts(self, index: int, way: Turning) -> dict[str, float]:
        """Of the parts of a step that turns matrices. The owner that has most to do in all units of a
        position is that much busier in each."""
        optimizer = self.config.optimizer if self.config is not None else OptimizerConfig("muon")
        numel = self.table.shards.numel(index)
        state = sum(BYTES[buffer.dtype] for buffer in self.table.shards.buffers(index))
        begun = numel * (2 * state + self.table.elements.grad + 3 * way.element)
        home = self.table.parameters[index].state_home
        away = home != Tier.DEVICE
        ended = numel * (2 * self.table.shards.state_bytes(home, index) - 2 * state + way.element
                         + 2 * self.table.shards.param_bytes(index))
        shapes = Counter(each.shape for each in way.matrices)
        whole = sum(count * self._turn(optimizer, way.element, shape) for shape, count in shapes.items())
        return {"begin": self.prices.update(begun, away, _STEP_KERNELS),
                "turn": whole * way.busiest / way.ranks + self.prices.moved(4 * way.owned * way.element),
                "end": self.prices.update(ended, away, _STEP_KERNELS)}

    def _turn(self, optimizer: OptimizerConfig, element: int, shape: tuple[int, int]) -> float:
        """Of one matrix. Matrices are of few shapes, on all layouts."""
        known = _known_prices(self.hardware, element, repr(optimizer))
        if shape not in known:
            turner, prices = turning(optimizer.name), Prices(self.hardware, element)
            assert turner is not None
            known[shape] = sum(prices.product(*each) for each in turner.products(*shape, optimizer))
        return known[shape]

    def added(self, size: int) -> float:
        """Seconds in which the host adds so many bytes to a gradient: it reads both and writes the sum."""
        return self.prices.update(3 * size, True)

    def norm(self, position: int) -> float:
        """CLIP reads the gradients where they are. (What leaves the device in one piece is read before.)"""
        table, shards = self.table, self.table.shards
        return sum(self.prices.update(shards.numel(unit) * table.elements.grad, shards.adds_on_host(unit),
                                      _NORM_KERNELS)
                   for unit in table.stepped(position))


def _units(plan: Plan, hardware: Hardware) -> Sequence[ComputeUnit]:
    """The compute units as they run on a machine: on a CPU nothing is compiled for model.fused=auto, so that
    its pieces are as many kernels as without."""
    config = plan.config
    if config is None or config.model.fused != "auto" or config.model.own_layers or not hardware.waits:
        return plan.table.units
    separate = replace(config, model=replace(config.model, fused="off"))
    return make_table(separate, plan.table.stage_positions).units


class _Travel:
    """Seconds of what instructions send."""

    def __init__(self, plan: Plan, hardware: Hardware):
        self.table, self.travel = plan.table, Travel(hardware)
        self.places, self.hardware = _places(plan, hardware), hardware
        mesh = make_mesh(plan.config) if plan.config is not None else None
        self.nodes = [rank // hardware.node_ranks for rank in mesh.group("pp", 0)] if mesh is not None else []

    def seconds(self, position: int, instruction: Instruction) -> float:
        sent = sum(sent_by(self.table, instruction).values())
        if instruction.op == Op.SEND:
            far = not self.nodes or self.nodes[position] != self.nodes[instruction.peer]
            return self.travel.message(sent, far)
        if instruction.op == Op.CLIP:
            return self.travel.all_reduce(8, self.places["world"]) + self.hardware.kernel_us * 1e-6
        if not sent:
            return 0.0
        way = self.travel.all_to_all if instruction.op == Op.EXCHANGE else self.travel.ring
        return way(sent, self.places[instruction.group])


def _ranks_of_node(plan: Plan, hardware: Hardware) -> float:
    """Ranks that share a node's memory."""
    return min(make_mesh(plan.config).size, hardware.node_ranks) if plan.config is not None else 1


def _places(plan: Plan, hardware: Hardware) -> dict[str, GroupPlace]:
    if plan.config is None:  # a plan of a test: all groups of one node
        return {name: GroupPlace((0,), hardware.devices) for name in GROUPS}
    return places(make_mesh(plan.config), hardware.node_ranks)
