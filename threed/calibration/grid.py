"""Grids: what `threed calibrate` measures, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

# Layers that the host's time and the share of memory's bandwidth are fitted to.
_GPT = ("model.hidden=64 model.heads=4 model.seq_len=64 train.micro_batch_size=2 model.vocab=256",
        "model.hidden=192 model.heads=4 model.seq_len=192 train.micro_batch_size=2 model.vocab=1024",
        "model.hidden=96 model.heads=6 model.seq_len=256 train.micro_batch_size=1 model.vocab=384 "
        "model.position=rotary")
_LLAMA = ("model.family=llama model.hidden=64 model.heads=4 model.seq_len=128 train.micro_batch_size=4",
          "model.family=llama model.hidden=256 model.heads=8 model.seq_len=96 train.micro_batch_size=2")


@dataclass(frozen=True)
class Grid:
    """Sizes on one kind of device."""

    point_s: float  # how long each point is measured
    products: tuple[tuple[int, int, int], ...]  # m, n, k
    moved: tuple[int, ...]  # elements of element-wise kernels
    attention: tuple[tuple[int, int, int, int], ...]  # sequences, heads, sequence length, head size
    layers: tuple[str, ...]  # overrides of configs; none on a GPU
    sent: tuple[int, ...]  # elements of collectives and messages, in fp32
    copied: int  # bytes between device and host
    stepped: int  # numbers of an optimizer's step on the host
    disk: int  # bytes


CPU = Grid(
    0.6,
    ((64, 64, 64), (256, 96, 64), (512, 48, 192), (256, 256, 256), (768, 768, 192), (2048, 64, 64),
     (640, 640, 640), (96, 1024, 512)),
    (1 << 12, 1 << 15, 1 << 18, 1 << 21), ((2, 4, 64, 16), (2, 4, 192, 32), (1, 8, 512, 64)),
    (*_GPT, *_LLAMA), (64, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21), 64 << 20, 1 << 22, 256 << 20)
CPU_QUICK = Grid(
    0.15, CPU.products[::2], CPU.moved[1::2], CPU.attention[:2], (_GPT[1], _LLAMA[0]), CPU.sent[::2],
    32 << 20, 1 << 20, 64 << 20)
# A kernel of a GPU takes longer here than the host's launch of it, of 10 to 50 us, and its tensors are not in
# a cache: a fit to smaller ones says that the device is slow.
GPU = Grid(
    0.3,
    ((2048, 6144, 2048), (4096, 1536, 4096), (4096, 4096, 4096), (8192, 1024, 8192), (4096, 8192, 4096),
     (8192, 4096, 14336), (8192, 8192, 8192)),
    (1 << 25, 1 << 26, 1 << 27, 1 << 28), ((8, 16, 2048, 64), (2, 32, 4096, 128), (1, 32, 8192, 128)), (),
    (256, 1 << 16, 1 << 20, 1 << 24, 1 << 27), 1 << 30, 1 << 25, 1 << 30)
GPU_QUICK = Grid(
    0.1, GPU.products[1::2], GPU.moved[1::2], GPU.attention[1:], (), GPU.sent[::2], 256 << 20, 1 << 24,
    256 << 20)


def grid(gpus: bool, quick: bool) -> Grid:
    return (GPU_QUICK if quick else GPU) if gpus else (CPU_QUICK if quick else CPU)
