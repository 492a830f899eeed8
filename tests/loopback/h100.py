"""What an H100's compiler makes of the pieces of model.fused, on a machine without one.

torch and triton take the machine for one with an H100 (`an_h100`), compile as they do there, to the code of
its processor, and start nothing. Bodies are those that a layer calls, in both directions: they are taken
down while the pieces run on tensors without memory.

What torch's own dynamo would do before that, which is to read the body, is done by `make_fx`.
"""

# pyright: reportMissingImports=false
# (triton is not among .venv's packages: make kernels)
from __future__ import annotations

import re
import subprocess
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from threed.base.mesh import Mesh
from threed.engine.loopback import ThreadGroup, World
from threed.spec.kernels import WIDEST
from threed.tensor import fused_loss
from threed.tensor.documents import rotate_at
from threed.tensor.fused import Body, Fused
from threed.tensor.pieces import DropOf, Kernels, Normed, Statistics

PROCESSOR, WARP = 90, 32  # sm_90; threads of a warp
GPU = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
                            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
                            max_threads_per_block=1024, warp_size=WARP, total_memory=80 << 30)
# Of Llama 3 8B
TOKENS, HIDDEN, INNER, HEADS, HEAD, VOCAB = 8192, 4096, 14336, 32, 128, 128256
WIDE = (8192, WIDEST)  # of powers of two, which GPT-3's 12,288 numbers lie between


class Kernel(NamedTuple):
    piece: str
    way: str  # forward | backward
    number: int  # of the kernels that a body becomes
    tile: str  # of a program: torch compiles several, and takes the fastest
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    code: int  # bytes


def pieces(dtype: torch.dtype) -> dict[str, Callable[[Fused], torch.Tensor]]:
    """What layers of Llama 3 8B call, on a sequence."""
    def drawn(*sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, requires_grad=True)

    heads, tables = (1, HEADS, TOKENS, HEAD), (TOKENS, HEAD)
    numbers = torch.zeros(1, dtype=torch.int64)
    positions = torch.zeros(1, TOKENS, dtype=torch.int64)
    return {
        "SwiGLU": lambda fused: fused.swiglu(drawn(TOKENS, 1, 2 * INNER)),
        "rotary": lambda fused: fused.rotate(drawn(*heads), *(drawn(*tables).detach() for _ in range(2))),
        "rotary in documents": lambda fused: rotate_at(drawn(*heads), positions, drawn(*tables).detach(),
                                                       drawn(*tables).detach(), fused),
        "dropout": lambda fused: fused.drop(drawn(TOKENS, 1, HIDDEN), 0.1, (0, "here"), numbers,
                                            ((range(TOKENS),),)),
        "RMS norm": lambda fused: fused.rms_norm(drawn(TOKENS, 1, HIDDEN), drawn(HIDDEN), 1e-5),
    }


def kernels(dtype: torch.dtype) -> list[Kernel]:
    """All kernels of all pieces, and of the loss."""
    found: list[Kernel] = []
    with FakeTensorMode():
        bodies = {name: _called(piece) for name, piece in pieces(dtype).items()}
    with an_h100() as started, tempfile.TemporaryDirectory() as folder:
        def take(piece: str, way: str) -> None:
            for number, tiles in enumerate(started.values()):
                found.extend(Kernel(piece, way, number, *_measured(tile, binary, Path(folder)))
                             for tile, binary in tiles)
            started.clear()

        for name, called in bodies.items():
            for way, (body, inputs) in zip(("forward", "backward"), called, strict=True):
                _compile(body, inputs)
                take(name, way)
        from threed.tensor.loss_kernel import TritonKernels

        logits = torch.zeros(8, 1, VOCAB, dtype=dtype, requires_grad=True)
        labels = torch.zeros(8, 1, dtype=torch.int64)
        group = ThreadGroup("tp", (0,), 0, Counter(), World(Mesh()))
        losses = fused_loss.cross_entropy(logits * 1, labels, VOCAB, group, TritonKernels)  # pyright: ignore
        take("loss", "forward")
        losses.sum().backward()
        take("loss", "backward")
        for name, (forward, backward) in sums(dtype).items():
            forward()
            take(name, "forward")
            backward()
            take(name, "backward")
    return found


def sums(dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The pieces with sums over tokens, as layers of a GPT of the same sizes call them in forward and in
    backward: all that is summed."""
    from threed.tensor.pieces_kernel import start

    kernels, rows = Kernels(start), 64

    def drawn(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=kind)

    up = drawn(rows, 1, 4 * HIDDEN)
    heads = drawn(1, HEADS, rows, HEAD).permute(2, 0, 1, 3).unflatten(2, (HEADS, 1))
    tokens = torch.zeros(1, dtype=torch.int64)
    drop = DropOf(0.1, (0, "here"), tokens, ((range(rows),),))
    ids, table = torch.zeros(rows, 1, dtype=torch.int64), drawn(128, HIDDEN, kind=torch.float32)

    def ended(width: int, drop: DropOf | None,
              normed: bool = True) -> tuple[Callable[[], object], Callable[[], object]]:
        x, numbers = drawn(rows, 1, width), drawn(rows, 1, 1, kind=torch.float32)
        norm = Normed(drawn(width), drawn(width), 1e-5) if normed else None
        kept = Statistics(x, numbers, numbers) if normed else None
        of_normed = x if normed else None
        return (lambda: kernels.ended(x, x, drawn(width), drop, norm),
                lambda: kernels.ended_backward(x, of_normed, kept, norm, drop, (True, normed)))

    return {
        "GELU and its bias": (lambda: kernels.gelu(up), lambda: kernels.gelu_backward(up, up, True)),
        "queries, keys, values": (lambda: None, lambda: kernels.joined([heads] * 3, True)),
        "bias and sum": ended(HIDDEN, None, False),
        "bias, sum, layer norm": ended(HIDDEN, None),
        "bias, dropout, sum, layer norm": ended(HIDDEN, drop),
        **{f"the same, {width} wide": ended(width, drop) for width in WIDE},
        "rows of a table": (lambda: None, lambda: kernels.add_rows(table, ids, drawn(rows, 1, HIDDEN)))}


def _called(piece: Callable[[Fused], torch.Tensor]) -> list[tuple[Body, tuple[Any, ...]]]:
    """The bodies that a piece calls in forward and backward, with what they are given."""
    seen, fused = [], Fused()

    def taken_down(body: Body) -> Body:
        def call(*inputs: Any) -> Any:
            seen.append((body, inputs))
            return body(*inputs)

        return call

    fused.body = taken_down
    result = piece(fused)
    result.backward(torch.empty_like(result))
    return seen


def _compile(body: Body, inputs: tuple[Any, ...]) -> None:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    places = [index for index, each in enumerate(inputs) if isinstance(each, torch.Tensor)]

    def called(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(inputs)
        for index, tensor in zip(places, tensors, strict=True):
            given[index] = tensor
        result = body(*given)
        return result if isinstance(result, tuple) else (result,)

    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        here, there = ([torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
                        for each in inputs if isinstance(each, torch.Tensor)] for device in ("cpu", "cuda"))
        # On a build for CPUs, some operations on a GPU are not taken apart: that is done on the CPU.
        graph = make_fx(called, decomposition_table=select_decomp_table())(*here)
        compile_fx_inner(make_fx(graph)(*there), there)


def _measured(tile: str, binary: Any, folder: Path) -> tuple[str, int, int, int, int]:
    """As ptxas reports it: without a driver, triton does not know."""
    from triton import knobs

    code = binary.asm["cubin"]
    assert code[:4] == b"\x7fELF" and binary.metadata.target.arch == PROCESSOR, binary.metadata
    file = folder / "kernel.ptx"
    file.write_text(binary.asm["ptx"])
    said = subprocess.run([knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{PROCESSOR}a", str(file), "-o",
                           str(folder / "kernel.cubin")], capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return tile, int(registers), spilled, binary.metadata.shared, len(code)


Started = dict[object, list[tuple[str, Any]]]


@contextmanager
def an_h100() -> Iterator[Started]:
    """Within the context this machine has an H100, for compilers. Yields a dict which gets each kernel that
    would have been started: its tiles, and the binary of each. (torch may come back to a kernel, with more of
    them.)"""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime.jit import JITFunction

    started: Started = {}
    run = JITFunction.run

    def by_torch(self: Any) -> None:
        started[self] = [(f"{', '.join(f'{name} {size}' for name, size in each.config.kwargs.items())}; "
                          f"{each.config.num_warps} warps", each.kernel) for each in self.compile_results]

    def by_triton(self: Any, *given: Any, grid: Any, warmup: bool, **others: Any) -> Any:
        binary = run(self, *given, grid=grid, warmup=True, **others)
        sizes = ", ".join(f"{name} {size}" for name, size in others.items()
                          if name.isupper() and not isinstance(size, bool))
        started[self] = [(f"{sizes}; {others['num_warps']} warps", binary)]
        return binary

    def says(value: Any) -> Any:
        return staticmethod(lambda *_, **__: value)

    with ExitStack() as stack:
        for owner, name, value in (
                (CudaInterface, "get_device_properties", says(GPU)),
                (CudaInterface, "current_device", says(0)),
                (CudaInterface, "get_compute_capability", says(PROCESSOR)),
                (CudaInterface, "is_bf16_supported", says(True)),
                (CudaInterface.Worker, "get_device_properties", says(GPU)),
                (torch.cuda, "get_device_properties", lambda *_: GPU),
                (torch.cuda, "get_device_capability", lambda *_: (GPU.major, GPU.minor)),
                (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
                (scheduler, "has_triton", lambda *_: True),
                (triton_helpers, "set_driver_to_gpu", lambda: None),
                (CachingAutotuner, "_make_launchers", by_torch), (JITFunction, "run", by_triton)):
            stack.enter_context(mock.patch.object(owner, name, value, create=owner is torch._C))
        stack.enter_context(config.patch(force_disable_caches=True, use_static_cuda_launcher=False,
                                         compile_threads=1))
        DeviceProperties.create.cache_clear()
        stack.callback(DeviceProperties.create.cache_clear)
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _driver()))
        yield started


def _driver() -> Any:
    """Triton's idea of a driver."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", PROCESSOR, WARP)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

    return Driver()
