"""What one device makes of a model: units beside their rooflines, steps beside torch's and the prediction,
and what each setting gains.

    python bench/gpu.py --markdown bench/results/gpu.md     # 10 minutes on a GPU; 2 on a CPU, tiny models
    python bench/gpu.py --help

Peaks are measured first: of a product of large matrices in the dtype of the run, and of a copy. A unit's
roofline is the longer of its FLOPs at the first and its bytes at the second. torch's model is plain modules,
each block compiled where there is a compiler, under fully_shard (FSDP2) with the same dtypes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pipeline import machine
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zero_peers import Sizes, batches, make_config

from threed import predict
from threed.comm import Comm, ProcessComm, file_store
from threed.engine.device import compiles
from threed.engine.engine import Engine
from threed.errors import InputError, RunError
from threed.models.model import model_flops
from threed.monitor.measure import peak_bytes
from threed.planner import make_mesh, make_plan
from threed.program.instruction import Op, Slot
from threed.program.summary import fixed_bytes, stages
from threed.program.table import Plan
from threed.quantity import show_bytes, show_count
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.precision import DTYPES

# Name -> a GPT: layers, width, heads, vocabulary, sequence, micro-batch, micro-batches, dtype. On a GPU some
# 16,384 tokens a micro-batch, or as many as a sequence has.
LARGE = {
    "125M, 2k": Sizes(12, 768, 12, 50304, 2048, 8, 4, "bf16"),
    "1.3B, 2k": Sizes(24, 2048, 16, 50304, 2048, 8, 4, "bf16"),
    "1.3B, 8k": Sizes(24, 2048, 16, 50304, 8192, 2, 4, "bf16"),
    "2.7B, 4k": Sizes(32, 2560, 20, 50304, 4096, 4, 4, "bf16"),
    "6.7B, 4k": Sizes(32, 4096, 32, 50304, 4096, 2, 4, "bf16"),
}
SMALL = {"tiny": Sizes(2, 128, 4, 512, 64, 2, 4), "tiny, long": Sizes(2, 128, 4, 512, 256, 1, 4)}
# What is recomputed, the least first: the first of these whose plan fits is taken.
POLICIES = ("none", "selective", "full")
# Settings, and the model of LARGE on which they are tried.
TRIED = "1.3B, 2k"
LLAMA = ["model.family=llama", "model.position=rotary", "model.activation=swiglu", "model.norm=rmsnorm",
         "model.bias=false"]
SETTINGS: dict[str, tuple[list[str], list[str]]] = {  # name -> (without, with)
    "fused pieces": (LLAMA, [*LLAMA, "model.fused=on"]),
    "loss in chunks": ([], ["model.loss_chunk=1024"]),
    "cuDNN's attention": (["run.attention_backend=flash"], ["run.attention_backend=cudnn"]),
    "CUDA graphs": ([], ["run.cuda_graphs=true"]),
    "deterministic": ([], ["run.deterministic=true"]),
}


class Peaks(NamedTuple):
    """Of this device, measured."""

    flops: float  # a second, of products
    bytes: float  # a second, of copies: read plus written


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


def peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    side = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    flops = 2 * side**3 / seconds(lambda: left @ right, device, 10)
    from_, into = (torch.empty(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
                   for _ in range(2))
    return Peaks(flops, 2 * len(from_) / seconds(lambda: into.copy_(from_), device, 10))


@contextmanager
def engine_of(config: Config, plan: Plan, comm: Comm) -> Iterator[Engine]:
    engine = Engine(config, plan, comm)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        clean(comm.device)


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ---------------------------------------------------------------- what fits


def planned_bytes(plan: Plan) -> int:
    """Bytes of the device that a plan needs."""
    row = stages(plan)[0]
    return fixed_bytes(row) + row["activation_peak_bytes"]


def fitting(size: Sizes, memory: int, *more: str) -> tuple[Config, Plan] | None:
    """The plan with the least recomputation that fits into 85% of the memory."""
    for policy in POLICIES:
        config = make_config(size, 1, f"activation.policy={policy}", *more)
        plan = make_plan(config)
        if planned_bytes(plan) < 0.85 * memory:
            return config, plan
    return None


# ---------------------------------------------------------------- threed


class Run(NamedTuple):
    step_s: float
    peak: int  # bytes, measured
    units: dict[tuple[Op, int], float]  # seconds of an instruction


def measure(config: Config, plan: Plan, comm: Comm, steps: int) -> Run:
    """The median step, after two that do not count, and the median of each unit's work."""
    with engine_of(config, plan, comm) as engine:
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
        peak = peak_bytes(comm.device) if comm.device.type == "cuda" else 0
        return Run(statistics.median(took), peak,
                   {key: statistics.median(each) for key, each in units.items()})


def roofs(plan: Plan, run: Run, peak: Peaks) -> list[list[str]]:
    """A row for each kind of unit: forward and backward, measured and as the roofline has them."""
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
            measured = statistics.median(run.units[op, index] for index in indices)
            by_flops, by_bytes = flops / peak.flops, moved / peak.bytes
            least = max(by_flops, by_bytes)
            rows.append([f"{unit.name}{f' and {len(indices) - 1} more' if len(indices) > 1 else ''}", str(op),
                         ms(measured), ms(by_flops), ms(by_bytes), f"{least / measured:.0%}"])
    return rows


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


def torchs(config: Config, size: Sizes, comm: Comm, steps: int) -> float:
    """Seconds of a step of torch's own."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh

    device, dtype = comm.device, DTYPES[size.dtype]
    with device:
        model = Gpt(size)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for number, block in enumerate(model.blocks):
        if config.activation.policy == "full":
            block = checkpoint_wrapper(block)
        if compiled(config, device):
            block.compile()
        model.blocks[number] = fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
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
        fused = type(config.model)(**{**config.model.__dict__, "fused": "on"})
        return compiles(type(config)(**{**config.__dict__, "model": fused}), device)
    except InputError:
        return False


# ---------------------------------------------------------------- the tables


def ms(value: float) -> str:
    return f"{1e3 * value:.2f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1),
            *("| " + " | ".join(row) + " |" for row in rows), ""]


class Bench:
    def __init__(self, args: argparse.Namespace, comm: Comm):
        self.args, self.comm, self.device = args, comm, comm.device
        self.begin = time.monotonic()
        self.sizes = SMALL if args.small else LARGE
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 32
        self.memory = free
        self.peak = peaks(self.device, DTYPES[next(iter(self.sizes.values())).dtype])
        self.skipped: list[str] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:4.0f} s  {text}", file=sys.stderr, flush=True)

    def late(self, what: str) -> bool:
        """Whether the time is over, so that `what` is left out."""
        late = time.monotonic() - self.begin > 60 * self.args.minutes
        self.skipped += [what] * late
        return late

    def hardware(self) -> str:
        """What `threed predict --hardware` is told."""
        return (f"tflops={self.peak.flops / 1e12:.4g},efficiency={self.args.efficiency},"
                f"memory_gbps={8 * self.peak.bytes / 1e9:.4g}")

    def steps(self) -> list[str]:
        rows, units = [], []
        for name, size in self.sizes.items():
            fits = fitting(size, self.memory)
            if self.late(name) or fits is None:
                self.skipped += [f"{name}: no plan fits"] * (fits is None)
                continue
            config, plan = fits
            try:
                run = measure(config, plan, self.comm, self.args.steps)
            except (RunError, torch.OutOfMemoryError) as error:
                self.skipped.append(f"{name}: {str(error).splitlines()[-1]}")
                continue
            finally:
                clean(self.device)
            try:
                peer = torchs(config, size, self.comm, self.args.steps)
            except torch.OutOfMemoryError:
                peer = float("nan")
            clean(self.device)
            predicted = predict(plan, self.hardware())["step_time"]
            useful = model_flops(config.model, config.train.global_batch_size) / run.step_s
            parameters = sum(p.numel for p in plan.table.parameters.values())
            rows.append([name, show_count(parameters), config.activation.policy, ms(run.step_s),
                         f"{config.tokens_per_step / run.step_s:.0f}", f"{useful / 1e12:.3g}",
                         f"{useful / self.peak.flops:.1%}", ms(predicted), f"{predicted / run.step_s:.2f}",
                         show_bytes(planned_bytes(plan)), show_bytes(run.peak) if run.peak else "-",
                         ms(peer), f"{run.step_s / peer:.2f}"])
            units += [[name, *row] for row in roofs(plan, run, self.peak)]
            self.say(f"{name}: {run.step_s:.3f} s a step, {useful / self.peak.flops:.1%} of the measured "
                     f"peak; torch {peer:.3f} s")
        head = ["model", "parameters", "recomputed", "step, ms", "tokens/s", "TFLOPS", "of the measured peak",
                "predicted, ms", "predicted / measured", "planned", "measured", "torch, ms", "threed / torch"]
        return ["## Steps", "", *markdown(head, rows), "## Units", "",
                *markdown(["model", "unit", "op", "ms", "ms of products", "ms of bytes", "of the roofline"],
                          units)]

    def settings(self) -> list[str]:
        rows, size = [], self.sizes[TRIED] if TRIED in self.sizes else next(iter(self.sizes.values()))
        for name, ways in SETTINGS.items():
            if self.late(name):
                continue
            took: list[list[float]] = [[], []]
            peak = [0, 0]
            try:
                for which in (0, 1, 0, 1):  # in turn
                    fits = fitting(size, self.memory, *ways[which])
                    assert fits is not None
                    with settled(fits[0]):
                        run = measure(*fits, self.comm, max(1, self.args.steps // 2))
                    took[which].append(run.step_s)
                    peak[which] = run.peak
            except (InputError, RunError) as error:
                self.skipped.append(f"{name}: {str(error).splitlines()[-1].strip()}")
                continue
            without, with_ = (min(each) for each in took)
            rows.append([name, ms(without), ms(with_), f"{with_ / without:.2f}",
                         f"{show_bytes(peak[0])} -> {show_bytes(peak[1])}" if peak[0] else "-"])
            self.say(f"{name}: {with_ / without:.2f}")
        return ["## Settings", "", *markdown(["setting", "without, ms", "with, ms", "ratio", "peak"], rows)]


@contextmanager
def settled(config: Config) -> Iterator[None]:
    """torch's settings of the process, as a run has them, and as they were."""
    from threed.engine.device import attention, set_up

    cuda = torch.backends.cuda
    before = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        set_up(config)
        attention(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        yield
    finally:
        cuda.enable_flash_sdp(before[0])
        cuda.enable_mem_efficient_sdp(before[1])
        cuda.enable_cudnn_sdp(before[2])
        torch.use_deterministic_algorithms(deterministic)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps that count (default: 6)")
    parser.add_argument("--minutes", type=float, default=8, help="nothing begins after this (default: 8)")
    parser.add_argument("--small", action="store_true", help="tiny models, as without a GPU")
    parser.add_argument("--efficiency", type=float, default=0.8,
                        help="share of the measured peak that predictions take products to reach "
                             "(default: 0.8)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here too")
    args = parser.parse_args(argv)
    args.small = args.small or not torch.cuda.is_available()
    if args.steps < 1 or not 0 < args.efficiency <= 1:
        parser.error("--steps must be at least 1, and --efficiency above 0 and at most 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    with tempfile.TemporaryDirectory(prefix="threed-bench-") as scratch:
        config = make_config(next(iter((SMALL if args.small else LARGE).values())), 1)
        comm = ProcessComm(make_mesh(config), 0, device, 600.0, file_store(str(Path(scratch) / "store"), 1))
        bench = Bench(args, comm)
        lines = [*bench.steps(), *bench.settings()]
        comm.close()
    text = "\n".join([
        "# One device", "", f"`python bench/gpu.py {' '.join(argv or sys.argv[1:])}`, "
        f"{time.strftime('%Y-%m-%d')}. {name}; {machine()}.",
        f"Measured peaks: {bench.peak.flops / 1e12:.2f} TFLOPS of products, {bench.peak.bytes / 1e9:.0f} "
        f"GB/s of copies. Predictions: `--hardware {bench.hardware()}`.",
        *([] if device.type == "cuda" else ["Without a GPU they only show that they can be made."]), "",
        *lines, *([f"Left out: {'; '.join(bench.skipped)}.", ""] if bench.skipped else [])])
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
