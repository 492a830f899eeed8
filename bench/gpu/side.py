"""What one device makes of a model: threed's step and units, torch's step, what a setting gains.

Each function is called in a process of its own, which may run out of memory, crash or be killed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from bench.common import Sizes, batches, make_config
from threed import predict
from threed.base.errors import InputError
from threed.base.quantity import show_bytes
from threed.comm.group import Comm
from threed.comm.process import ProcessComm, file_store
from threed.devices import device_of
from threed.engine.device import attention, compiles, set_up
from threed.engine.engine import Engine
from threed.models.model import model_flops
from threed.planner import make_mesh, make_plan
from threed.prediction.hardware import named_as
from threed.program.analysis import Analysis
from threed.program.instruction import Op, Slot
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.precision import DTYPES
from threed.tensor.random import draw_in_place

# What is recomputed, the least first: the first of these whose plan fits is taken.
POLICIES = ("none", "selective", "full")
SHARE = 0.85  # of the free memory that a plan may take


class DoesNotFit(Exception):
    """No plan of a model fits into the device's memory."""


NO_ROOM = DoesNotFit.__name__


class Machine(NamedTuple):
    """This device, measured."""

    name: str  # "no GPU" on a CPU
    memory: int  # bytes that are free
    flops: float  # a second, of products
    bytes: float  # a second, of copies: read plus written

    @property
    def hardware(self) -> str:
        """What `threed predict --hardware` is told: the file for such a GPU, or else the measured peaks."""
        return named_as(self.name) or (f"tflops={self.flops / 1e12:.4g},efficiency=0.8,"
                                       f"memory_gbps={8 * self.bytes / 1e9:.4g}")


class Row(NamedTuple):
    """threed's side of a model."""

    parameters: int
    policy: str  # of recomputation
    attention: str
    step_s: float
    tokens: int  # of a step
    flops: float  # a second, of the model's own
    predicted_s: float
    planned_bytes: int
    peak_bytes: int  # 0 without a GPU
    units: list[dict[str, Any]]


class Run(NamedTuple):
    step_s: float
    peak: int  # bytes, measured
    units: dict[tuple[Op, int], float]  # seconds of an instruction


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, times: int) -> float:
    """The median of some calls, after one that does not count."""
    took = []
    for _ in range(times + 1):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        took.append(time.perf_counter() - begin)
    return statistics.median(took[1:])


def machine(dtype: torch.dtype, small: bool) -> Machine:
    here = device()
    gpu, side = here.type == "cuda", 512 if small else 8192
    left, right = (torch.randn(side, side, device=here, dtype=dtype) for _ in range(2))
    flops = 2 * side**3 / seconds(lambda: left @ right, here, 10)
    from_, into = (torch.empty(1 << (24 if small else 30), dtype=torch.uint8, device=here) for _ in range(2))
    speed = 2 * len(from_) / seconds(lambda: into.copy_(from_), here, 10)
    return Machine(torch.cuda.get_device_name(here) if gpu else "no GPU",
                   torch.cuda.mem_get_info(here)[0] if gpu else 1 << 32, flops, speed)


@contextmanager
def alone(config: Config) -> Iterator[Comm]:
    """A run of one rank."""
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        comm = ProcessComm(make_mesh(config), 0, device(), 600.0, file_store(str(Path(scratch) / "store"), 1))
        yield comm
        comm.close()


# ---------------------------------------------------------------- threed


def planned_bytes(plan: Plan) -> int:
    """Bytes of the device that a plan needs."""
    row = stages(Analysis(plan))[0]
    return row.fixed_bytes + row.activation_peak_bytes


def fitting(size: Sizes, memory: int, *more: str) -> tuple[Config, Plan]:
    """The plan with the least recomputation that fits into SHARE of the memory. DoesNotFit if none does."""
    needed = 0
    for policy in POLICIES:
        config = make_config(size, 1, f"activation.policy={policy}", *more)
        plan = make_plan(config)
        needed = planned_bytes(plan)
        if needed < SHARE * memory:
            return config, plan
    raise DoesNotFit(f"{show_bytes(needed)} are planned with everything recomputed; {SHARE:.0%} of the free "
                     f"memory are {show_bytes(int(SHARE * memory))}")


def measure(config: Config, plan: Plan, comm: Comm, steps: int) -> Run:
    """The median step, after two that do not count, and the median of each unit's work."""
    if comm.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(comm.device)
    engine = Engine(Analysis(plan), comm, draw_in_place)
    took, units = [], defaultdict(list)
    for number in range(steps + 2):
        data = batches(config, number, 0, comm.device)
        wait(comm.device)
        begin = time.perf_counter()
        _, trace = engine.train_step(lambda microbatch, data=data: data[microbatch])
        wait(comm.device)
        if number < 2:
            continue
        took.append(time.perf_counter() - begin)
        for index, item in enumerate(plan.programs["train"][0]):
            if item.op in (Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE, Op.STEP):
                units[item.op, item.unit].append(trace.ended[index] - trace.started[index])
    peak = device_of(comm.device).peak_bytes() if comm.device.type == "cuda" else 0
    engine.close()
    return Run(statistics.median(took), peak, {key: statistics.median(each) for key, each in units.items()})


def ours(size: Sizes, here: Machine, steps: int, hardware: str) -> Row:
    """A step of threed. `hardware`: as `threed predict --hardware`. DoesNotFit; whatever an engine raises."""
    config, plan = fitting(size, here.memory)
    set_up(config)
    with alone(config) as comm:
        chosen = attention(config, comm.device)
        run = measure(config, plan, comm, steps)
    return Row(sum(p.numel for p in plan.table.parameters.values()), config.activation.policy, chosen,
               run.step_s, config.tokens_per_step,
               model_flops(config.model, config.train.global_batch_size) / run.step_s,
               predict(plan, hardware)["step_time"], planned_bytes(plan), run.peak,
               roofs(plan, run, here))


def roofs(plan: Plan, run: Run, here: Machine) -> list[dict[str, Any]]:
    """A row for each kind of unit: forward and backward, measured and as the roofline has them, in
    seconds."""
    table, rows = plan.table, []
    kinds: dict[tuple[int, int], list[int]] = defaultdict(list)  # units of the same cost
    for index, unit in enumerate(table.units):
        kinds[unit.forward_flops, unit.saved_bytes].append(index)
    for indices in kinds.values():
        unit = table.units[indices[0]]
        weights = sum(table.size(Slot("param", p)) for p in unit.parameters)
        gradients = sum(table.parameters[p].numel * table.elements.grad for p in unit.parameters)
        for op, flops, moved in (
                (Op.FORWARD, unit.forward_flops, weights + 2 * table.act_bytes + unit.saved_bytes),
                (Op.BACKWARD, 2 * unit.forward_flops,
                 weights + 2 * gradients + 3 * table.act_bytes + unit.saved_bytes)):
            rows.append({
                "unit": f"{unit.name}{f' and {len(indices) - 1} more' if len(indices) > 1 else ''}",
                "op": str(op), "s": statistics.median(run.units[op, index] for index in indices),
                "by_flops_s": flops / here.flops, "by_bytes_s": moved / here.bytes})
    return rows


def gain(size: Sizes, here: Machine, steps: int, ways: tuple[list[str], list[str]]) -> list[list[float]]:
    """Seconds of a step and bytes at the peak, each without and with a setting: the least of two turns."""
    took: list[list[float]] = [[], []]
    peak = [0, 0]
    for which in (0, 1, 0, 1):  # in turn
        config, plan = fitting(size, here.memory, *ways[which])
        with settled(config), alone(config) as comm:
            run = measure(config, plan, comm, steps)
        took[which].append(run.step_s)
        peak[which] = run.peak
    return [[min(each) for each in took], [float(each) for each in peak]]


@contextmanager
def settled(config: Config) -> Iterator[None]:
    """torch's settings of the process, as a run has them, and as they were. InputError where a backend of
    attention is asked for that cannot run."""
    cuda = torch.backends.cuda
    before = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        set_up(config)
        attention(config, device())
        yield
    finally:
        cuda.enable_flash_sdp(before[0])
        cuda.enable_mem_efficient_sdp(before[1])
        cuda.enable_cudnn_sdp(before[2])
        torch.use_deterministic_algorithms(deterministic)


# ---------------------------------------------------------------- torch's own


class Block(nn.Module):
    """A block of GPT-2: pre-norm, causal attention, GELU."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, size: Sizes):
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.hidden)
        self.positions = nn.Embedding(size.seq_len, size.hidden)
        self.blocks = nn.ModuleList(Block(size.hidden, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def torchs(size: Sizes, policy: str, steps: int) -> float:
    """Seconds of a step of torch's own. `policy`: of recomputation, as threed took it."""
    config = make_config(size, 1, f"activation.policy={policy}")
    with alone(config) as comm:
        return _torchs(config, size, comm, steps)


def _torchs(config: Config, size: Sizes, comm: Comm, steps: int) -> float:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device, dtype = comm.device, DTYPES[size.dtype]
    with device:
        model = Gpt(size)
    mesh = init_device_mesh(device.type, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for number, block in enumerate(model.blocks):
        if config.activation.policy == "full":
            block = checkpoint_wrapper(block)
        if compiled(config, device):
            block.compile()
        model.blocks[number] = block
        fully_shard(block, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(data: Sequence[Batch]) -> None:
        optimizer.zero_grad(set_to_none=True)
        for batch in data:
            (model(batch.tokens_BS, batch.labels_BS) / len(data)).backward()
        optimizer.step()

    data = batches(config, 0, 0, device)
    step(data)  # compiles
    return seconds(lambda: step(data), device, steps)


def compiled(config: Config, device: torch.device) -> bool:
    try:
        return compiles(replace(config, model=replace(config.model, fused="on")), device)
    except InputError:
        return False
