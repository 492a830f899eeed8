"""Facts about what a GPU computes, and how fast."""

from __future__ import annotations

import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu.fact import At, Facts, Missing, bf16, of_cuda, took

FACTS = Facts()

# ---------------------------------------------------------------- numbers


@FACTS.add()
def dot_of_nothing(at: At) -> str:
    found = []
    for _ in range(3):
        torch.full((64,), float("nan"), device=at.device, dtype=torch.float64)  # what memory may hold
        empty = torch.empty(0, device=at.device, dtype=torch.float64)
        found.append((empty.dot(empty).item(), empty.square().sum().item()))
    return f"dot {[dot for dot, _ in found]}, sum of squares {[total for _, total in found]}"


@FACTS.add()
def weight_gradients(at: At) -> str:
    """A product of 16-bit matrices, added to a sum in fp32."""
    from threed.tensor.products import Way, add_product, way_of

    rows, inner, columns = at.of(14336, 64), at.of(8192, 32), at.of(4096, 64)
    left, right, ms = bf16(at, rows, inner), bf16(at, inner, columns), 1e3
    into = torch.zeros(rows, columns, device=at.device)
    way = way_of(torch.float32, torch.bfloat16, at.device)
    plain, apart = took(lambda: left @ right), took(lambda: into.add_(left @ right))
    into.zero_()
    add_product(into, True, left, right)
    error = (into - left.float() @ right.float()).abs().max().item()
    added = took(lambda: add_product(into, True, left, right))
    return (f"{'ROUNDED, ' if way is Way.ROUNDED else ''}{way.value}: largest error {error:.1e}; product "
            f"{ms * plain:.2f} ms, added as threed does {ms * added:.2f}, product and add {ms * apart:.2f}")


@FACTS.add()
def products(at: At) -> str:
    """TFLOP/s of bf16 products, also of some seconds, when clocks have come down."""
    def speed(rows: int, inner: int, columns: int, times: int = 10) -> str:
        left, right = bf16(at, rows, inner), bf16(at, inner, columns)
        seconds = took(lambda: left @ right, times)
        return f"{rows}x{inner}x{columns} {2 * rows * inner * columns / seconds / 1e12:.4g}"

    side, times = at.of(8192, 128), at.of(1500, 3)
    block = speed(at.of(8192, 64), at.of(4096, 64), at.of(14336, 64))
    return f"TFLOP/s: {speed(side, side, side)}, {block}; {times} times {speed(side, side, side, times)}"


@FACTS.add(alone=True)
def split_sums(at: At) -> str:
    """Whether cuBLAS may add parts of a bf16 product in bf16, and what that costs."""
    of_cuda()
    backend: Any = torch.backends.cuda.matmul
    default, said = backend.allow_bf16_reduced_precision_reduction, []
    left, right = bf16(at, 1024, 65536), bf16(at, 65536, 1024)
    exact = left.double() @ right.double()
    for allowed in (True, False):
        backend.allow_bf16_reduced_precision_reduction = allowed
        error = ((left @ right).double() - exact).abs().mean().item() / exact.abs().mean().item()
        ms = 1e3 * took(lambda: left @ right)
        said.append(f"{'with' if allowed else 'without'} {error:.2e} in {ms:.2f} ms")
    return f"by default {default}; relative error of 1024x65536x1024 {', '.join(said)}"


@FACTS.add()
def memory_speed(at: At) -> str:
    size = at.of(2 << 30, 1 << 20)
    source, into = (torch.zeros(size, dtype=torch.uint8, device=at.device) for _ in range(2))
    copied, filled = took(lambda: into.copy_(source)), took(lambda: into.fill_(1))
    return f"copy {2 * size / copied / 1e9:.0f} GB/s (read plus written), fill {size / filled / 1e9:.0f} GB/s"


@FACTS.add()
def step_of_adamw(at: At) -> str:
    count = at.of(200_000_000, 10_000)
    parameter = torch.zeros(count, device=at.device, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    seconds = took(optimizer.step, 5)
    return f"{count / 1e6:.4g}M weights in {1e3 * seconds:.2f} ms, {28 * count / seconds / 1e9:.0f} GB/s"


@FACTS.add()
def initial_values(at: At) -> str:
    """Of a run, which do not depend on the mesh, and of a bench, drawn on the device."""
    from threed.spec.parameter import Parameter
    from threed.tensor.random import draw, draw_in_place

    rows, said = at.of(4096, 64), []
    weight = Parameter("weight", (rows, 4096), std=0.02)
    into = torch.empty(weight.numel, device=at.device)
    for function in (draw, draw_in_place):
        seconds = took(partial(function, into, weight, weight.part({}, {}), 1), 1, 0)
        said.append(f"{function.__name__} {weight.numel / seconds / 1e6:.0f}M a second")
    return ", ".join(said)


# ---------------------------------------------------------------- the host beside the GPU


@FACTS.add()
def events(at: At) -> str:
    count = at.of(2000, 50)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    begin = time.perf_counter()
    for mark in marks:
        mark.record()
    recorded = time.perf_counter() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for mark in marks:
        marks[0].elapsed_time(mark)
    read = time.perf_counter() - begin
    return f"record {1e6 * recorded / count:.1f} us, elapsed_time {1e6 * read / count:.1f} us"


@FACTS.add()
def launches(at: At) -> str:
    """What the host needs to launch a kernel, and to wait for one."""
    x, count = torch.zeros(16, device=at.device), at.of(2000, 50)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):  # torch and the driver load what they need, and the clock of the GPU rises
        x.add_(1)
    first = time.perf_counter() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count // 10):
        x.add_(1).sum().item()
    waited = time.perf_counter() - begin
    return (f"launch {1e6 * launched / count:.1f} us ({1e6 * first / count:.1f} of the first {count}), "
            f"a number read {1e6 * waited / (count // 10):.0f} us")


@FACTS.add()
def graphs(at: At) -> str:
    """100 small kernels: launched, and replayed from a CUDA graph (a hardware file's launch_us, graph_us)."""
    of_cuda()
    x = torch.zeros(16, device=at.device)

    def work() -> None:
        for _ in range(100):
            x.add_(1)

    work()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    x.zero_()
    graph.replay()
    assert x.eq(100).all(), "a replay computes something else"
    launched, replayed, issued = took(work), took(graph.replay), 0.0
    for _ in range(10):
        begin = time.perf_counter()
        graph.replay()
        issued += time.perf_counter() - begin
        torch.cuda.synchronize()
    return (f"launched {1e6 * launched:.0f} us, replayed {1e6 * replayed:.0f} us, of which the host's launch "
            f"{1e5 * issued:.1f}")


@FACTS.add()
def copies(at: At) -> str:
    """GB/s between the host and the GPU."""
    size = at.of(1 << 30, 1 << 16)
    begin = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    made = (time.perf_counter() - begin) / 2
    pageable = torch.zeros(size, dtype=torch.uint8)
    here, there = (torch.zeros(size, dtype=torch.uint8, device=at.device) for _ in range(2))
    side = torch.cuda.Stream()

    def both() -> None:
        here.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(side):
            other.copy_(there, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    ways = {"up": lambda: here.copy_(pinned, non_blocking=True),
            "down": lambda: pinned.copy_(here, non_blocking=True), "each of both at once": both,
            "pageable up": lambda: here.copy_(pageable), "pageable down": lambda: pageable.copy_(here)}
    speeds = ", ".join(f"{name} {size / took(way, 5, 1) / 1e9:.1f}" for name, way in ways.items())
    return f"GB/s pinned: {speeds}; pinning takes {made / size * (1 << 30):.2f} s a GiB"


# ---------------------------------------------------------------- attention, fused pieces


@FACTS.add(alone=True)
def attention_chosen(at: At) -> str:
    """What a run takes, for models of several kinds."""
    from threed.config.load import load
    from threed.engine.device import attention, set_up

    large = ["model.heads=32", "model.hidden=4096", "model.seq_len=8192", "precision.dtype=bf16"]
    cases = {"head 128": large, "8 key heads": [*large, "model.family=llama", "model.kv_heads=8"],
             "head 64": [*large, "model.hidden=2048"], "fp32": [*large, "precision.dtype=fp32"],
             "documents": [*large, "data.document_mask=true"],
             "deterministic": [*large, "run.deterministic=true"]}
    said = []
    for name, settings in cases.items():  # the last one's settings stay
        config = load(None, settings)
        set_up(config)
        said.append(f"{name} {attention(config, at.device)}")
    return ", ".join(said)


def _attention(at: At, length: int, kv_heads: int) -> list[torch.Tensor]:
    heads = at.of(32, 2)
    return [torch.randn(1, count, length, 128, device=at.device, dtype=torch.bfloat16, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)]


@FACTS.add(alone=True)
def attention_speed(at: At) -> str:
    """Forward, and forward with backward, of a causal layer with 32 heads of 128 and 8 key heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length, heads, said = at.of(8192, 64), at.of(32, 2), []
    q, k, v = _attention(at, length, at.of(8, 1))
    flops = 2 * heads * length**2 * 128  # causal: half of two products
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        name = str(backend).rpartition(".")[2].removesuffix("_ATTENTION").lower()

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def both() -> None:
            out = forward()
            out.backward(out.detach())

        try:
            with sdpa_kernel([backend]):
                once, twice = took(forward, 5), took(both, 5)
        except RuntimeError as error:
            said.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        said.append(f"{name} {1e3 * once:.2f} ms ({flops / once / 1e12:.3g} TFLOP/s), with backward "
                    f"{1e3 * twice:.2f} ms ({3.5 * flops / twice / 1e12:.3g})")
    return "; ".join(said)


@FACTS.add(alone=True)
def new_lengths(at: At) -> str:
    """Milliseconds of the first call at a length: documents bring new ones all the time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    said = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        name = str(backend).rpartition(".")[2].removesuffix("_ATTENTION").lower()

        def call(length: int) -> float:
            q, k, v = _attention(at, length, at.of(32, 2))
            return took(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, 0)

        try:
            with sdpa_kernel([backend]):
                times = [call(length) for length in (100, 101, 102, 103, 103)]
        except RuntimeError as error:
            said.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        *new, again = (f"{1e3 * each:.1f}" for each in times[1:])
        said.append(f"{name} {', '.join(new)}, again {again}")
    return "; ".join(said)


@FACTS.add(alone=True)
def varlen(at: At) -> str:
    """Attention over documents: one kernel for all, or a call for each."""
    from threed.tensor.documents import Documents, attend, varlen_call

    of_cuda()
    if (call := varlen_call(at.device, torch.bfloat16, 128, True)) is None:
        raise Missing("torch has no attention for sequences of varying length that computes the same")
    length, count = at.of(8192, 64), 16
    q, k, v = _attention(at, length, at.of(8, 1))
    positions = torch.arange(length).remainder(length // count).view(1, -1)
    documents = Documents.of(positions)
    times = {name: 1e3 * took(partial(attend, q, k, v, documents, way), 5)
             for name, way in (("one kernel", True), ("a call each", False))}
    return f"{call}; {count} documents: {', '.join(f'{name} {ms:.2f} ms' for name, ms in times.items())}"


@FACTS.add(alone=True)
def fused_pieces(at: At) -> str:
    """Whether each piece compiles, forward and backward, and how far it is from the plain one."""
    from bench.run.fused import pieces
    from threed.base.errors import InputError
    from threed.config.load import load
    from threed.engine.device import compiles
    from threed.tensor.fused import Fused

    try:
        compiles(load(None, ["model.fused=on"]), at.device)
    except InputError as error:
        raise Missing(str(error)) from None
    said = []
    for name, (width, off, fused) in pieces(1024, 1024, torch.bfloat16, at.device).items():
        x = torch.randn(1024, 1, width, device=at.device, dtype=torch.bfloat16).requires_grad_()
        results, begin = [], time.perf_counter()
        for way in (fused(Fused(compile=True)), off):
            y = way(x)
            grad, = torch.autograd.grad(y, x, torch.ones_like(y))
            results.append((y, grad))
        error = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
        said.append(f"{name} in {time.perf_counter() - begin:.1f} s, differs by {error:.1e}")
    return "; ".join(said)


@FACTS.add(alone=True)
def loss_kernel(at: At) -> str:
    """The loss's own kernels over 16-bit logits, beside torch's cross entropy in fp32."""
    if find_spec("threed.tensor.fused_loss") is None or find_spec("triton") is None:
        raise Missing("they are Triton's, which is not here")
    from threed.tensor.fused import Fused

    pieces: Any = Fused(compile=True)
    kernels = pieces.kernels(at.device)
    tokens, vocab = at.of(8192, 64), at.of(128256, 512)
    logits = bf16(at, tokens, 1, vocab)
    labels = torch.randint(vocab, (tokens, 1), device=at.device)
    numbers, label = kernels.statistics(logits, labels, vocab, None)
    loss = (numbers[0] + numbers[1].log() - label).flatten()
    want = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    error = (loss - want).abs().max().item()
    plain = took(lambda: F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), 5)
    forward = took(lambda: kernels.statistics(logits, labels, vocab, None))
    ones = torch.ones_like(label)
    backward = took(lambda: kernels.gradient(logits, labels, numbers, ones, None, vocab))
    size = logits.nbytes
    return (f"differs by {error:.1e}; forward {1e3 * forward:.2f} ms ({size / forward / 1e9:.0f} GB/s), "
            f"backward {1e3 * backward:.2f} ({2 * size / backward / 1e9:.0f} GB/s); torch's forward "
            f"{1e3 * plain:.2f}")
