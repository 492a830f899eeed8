"""What model.fused gains for each piece: time of forward and backward, and bytes kept between them.

    python -m bench.run.fused --markdown bench/results/fused.md

Three ways in turn, in one process: separate operations (off), fused pieces with plain bodies, and compiled
ones. On a GPU where there is one. Times are the medians of rounds; compare them within a row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compile anew each time, to measure it

import torch
import torch.nn.functional as F

from threed.base.quantity import show_bytes
from threed.tensor.fused import Fused
from threed.tensor.random import keep_mask

WAYS = ("off", "plain bodies", "compiled")
Piece = Callable[[torch.Tensor], torch.Tensor]


def pieces(hidden: int, tokens: int, dtype: torch.dtype,
           device: torch.device) -> dict[str, tuple[int, Piece, Callable[[Fused], Piece]]]:
    """Name -> (width of its input, the separate operations, the fused piece)."""
    inner, head = round(8 * hidden / 3 / 64) * 64, 64
    angles = torch.outer(torch.arange(tokens), torch.rand(head // 2)).repeat(1, 2)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    weight = torch.ones(hidden, dtype=dtype, device=device, requires_grad=True)
    samples, key = torch.zeros(1, dtype=torch.int64, device=device), (1, "bench")
    rows = ((range(tokens),),)
    counters = torch.arange(tokens * hidden, device=device).view(1, tokens, hidden)

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def heads(turn: Piece) -> Piece:
        """[s, 1, heads x E] -> [1, heads, s, E], as attention has them."""
        return lambda x: turn(x.view(tokens, 1, -1, head).permute(1, 2, 0, 3))

    def drop(x: torch.Tensor) -> torch.Tensor:
        return x * keep_mask(0.1, key, samples, counters).transpose(0, 1) / 0.9

    return {
        "SwiGLU": (2 * inner, swiglu, lambda fused: fused.swiglu),
        "rotary": (hidden, heads(rotate), lambda fused: heads(lambda x: fused.rotate(x, cos, sin))),
        "dropout": (hidden, drop, lambda fused: lambda x: fused.drop(x, 0.1, key, samples, rows)),
        "RMS norm": (hidden, lambda x: F.rms_norm(x, (hidden,), weight, 1e-5),
                     lambda fused: lambda x: fused.rms_norm(x, weight, 1e-5)),
    }


def kept_bytes(piece: Piece, x: torch.Tensor) -> int:
    """Bytes of what autograd keeps that were not there before."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        piece(x)
    return sum(kept.values())


def once(piece: Piece, x: torch.Tensor) -> float:
    """Milliseconds of a forward and a backward."""
    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    y = piece(x)
    y.backward(torch.ones_like(y))
    wait()
    x.grad = None
    return (time.perf_counter() - begin) * 1e3


def table(options: argparse.Namespace, device: torch.device) -> list[str]:
    lines = ["| dtype | piece | off | plain bodies | compiled | kept: off | fused | compiled after |",
             "|---|---|--:|--:|--:|--:|--:|--:|"]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for piece, (width, off, fused) in pieces(options.hidden, options.tokens, dtype, device).items():
            x = torch.randn(options.tokens, 1, width, device=device).to(dtype).requires_grad_()
            ways = (off, fused(Fused()), fused(Fused(compile=True)))
            compile_ms = once(ways[2], x)
            times = [[once(way, x) for way in ways] for _ in range(options.rounds)]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            kept = [show_bytes(kept_bytes(way, x)) for way in ways[:2]]
            cells = [*(f"{ms:.2f} ms" for ms in medians), *kept, f"{compile_ms / 1e3:.1f} s"]
            lines.append(f"| {name} | {piece} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    where = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} threads of a CPU"
    lines = ["# Fused pieces", "",
             "`python -m bench.run.fused --markdown bench/results/fused.md`, "
             f"{where}, torch {torch.__version__}",
             "",
             f"Forward and backward of {options.tokens} tokens, hidden {options.hidden}; medians of "
             f"{options.rounds} rounds. `off` of RMS norm is torch's own. The last column is the first call, "
             "with compilation of both directions.",
             "", *table(options, device)]
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
