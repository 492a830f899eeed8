"""Settings of torch that hold for a whole process. (What torch keeps under torch.backends.cuda holds for
attention on a CPU, too.)"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

PINNED = "pinned_max_round_threshold_mb"  # above it the allocator of pinned memory does not round
EXACT_FROM = (2, 13)  # the versions of torch that are known to have this setting
QUEUES = 32  # of the hardware, for a process: the most there are. Lanes and communicators have a stream each


def set_up(attention: Mapping[str, bool], deterministic: bool) -> None:
    """Call it before the process's first work on an accelerator. `attention`: whether a backend (flash,
    efficient, cudnn) may be used; torch decides on those that are not named. `deterministic`: an operation
    that has no deterministic kernel raises RuntimeError, with its name."""
    _pin_exactly()
    # Streams that share a queue of the hardware wait for one another. (CUDA takes 8.) Read when CUDA begins.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(QUEUES))
    # Kernels of collectives are short, and everybody waits for them. Read when a communicator is made.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    enable = {"flash": torch.backends.cuda.enable_flash_sdp,
              "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
              "cudnn": torch.backends.cuda.enable_cudnn_sdp}
    for name, allowed in attention.items():
        enable[name](allowed)
    # What a product adds up in parts is added in fp32, too. (torch's default rounds the parts to 16 bits.)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        # It is for operations that read memory before it is written, and takes time.
        memory = torch.utils.deterministic
        memory.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def version() -> tuple[int, ...]:
    """torch's, as two numbers."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def _pin_exactly() -> None:
    """Have torch pin no more host memory than it is asked for, above 1 MiB. By itself it rounds up to a power
    of two, so that freed memory fits another request, and 2.6 GB take 4.3. What a run pins is large, and
    lives as long as the run. (Older versions have no such setting: see `pinned`.)"""
    if version() < EXACT_FROM:
        return
    # Of these torch reads the first that is set; it reads it when memory is pinned first.
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    name = next((each for each in names if each in os.environ), names[0])
    others = [text for text in os.environ.get(name, "").split(",") if text]
    if not any(PINNED in os.environ.get(each, "") for each in names):
        os.environ[name] = ",".join([*others, f"{PINNED}:1"])
