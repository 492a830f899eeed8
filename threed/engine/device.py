"""The device of a rank, and the settings of torch that hold for its whole process."""

from __future__ import annotations

import os

import torch
from torch.nn.attention import SDPBackend

from threed.engine.compiler import lacks
from threed.errors import InputError
from threed.schema import Config
from threed.tensor.documents import has_varlen
from threed.tensor.precision import DTYPES

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION}
# Their backwards add with atomics on a GPU, in an order that changes from run to run.
_ATOMIC = ("efficient", "cudnn")
PINNED = "pinned_max_round_threshold_mb"  # above it the allocator of pinned memory does not round
EXACT_FROM = (2, 13)  # the versions of torch that are known to have this setting


def pick_device(config: Config, local_rank: int) -> torch.device:
    """The device of a rank. InputError where the machine does not have it."""
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("run.device=cuda, but torch sees no GPU here; use run.device=auto or cpu")
    if local_rank >= torch.cuda.device_count():
        raise InputError(f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()} on this "
                         "machine; start fewer processes a node, or use run.device=cpu")
    return torch.device("cuda", local_rank)


def set_up(config: Config) -> None:
    """Settings of the process, before its first work on a GPU. With run.deterministic, an operation that
    has no deterministic kernel raises RuntimeError, with its name."""
    _pin_exactly()
    # Kernels of collectives are short, and everybody waits for them. Read when a communicator is made.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    asked, deterministic = config.run.attention_backend, config.run.deterministic
    for name, enable in (("flash", torch.backends.cuda.enable_flash_sdp),
                         ("efficient", torch.backends.cuda.enable_mem_efficient_sdp),
                         ("cudnn", torch.backends.cuda.enable_cudnn_sdp)):
        if asked != "auto":
            enable(name == asked)
        elif deterministic and name in _ATOMIC:
            enable(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        # It is for operations that read memory before it is written, and takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False


def _pin_exactly() -> None:
    """Have torch pin no more host memory than it is asked for, above 1 MiB. By itself it rounds up to a power
    of two, so that freed memory fits another request, and 2.6 GB take 4.3. What a run pins is large, and
    lives as long as the run. (Pages registered by hand, with cudaHostRegister, would do in older versions of
    torch, too; but torch keeps its own memory until copies that are under way have ended.)"""
    if tuple(map(int, torch.__version__.split(".")[:2])) < EXACT_FROM:
        return
    # Of these torch reads the first that is set; it reads it when memory is pinned first.
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    name = next((each for each in names if each in os.environ), names[0])
    others = [text for text in os.environ.get(name, "").split(",") if text]
    if not any(PINNED in os.environ.get(each, "") for each in names):
        os.environ[name] = ",".join([*others, f"{PINNED}:1"])


def compiles(config: Config, device: torch.device) -> bool:
    """Whether the pieces of model.fused are compiled here. InputError where they must be, and cannot."""
    fused = config.model.fused
    if fused == "off" or config.model.own_layers or (fused == "auto" and device.type != "cuda"):
        return False
    if (why := lacks(device)) and fused == "on":
        raise InputError(f"model.fused=on cannot compile for a {device.type} here: {why}; install what is "
                         "missing, or use model.fused=auto, which computes the same without")
    return not why


def attention(config: Config, device: torch.device) -> str:
    """The backend that torch uses for the model's attention here: flash, efficient, cudnn or math; or varlen,
    which is flash with one kernel for all documents. InputError where it is not the one that the config asks
    for."""
    model, tp, asked = config.model, config.parallel.tp, config.run.attention_backend
    if model.own_layers:  # each of them chooses for itself, among those allowed
        return asked
    if model.attention_dropout > 0:  # attention.py computes it with separate operations
        chosen = "math"
    else:
        sizes = (1, model.heads // tp, model.seq_len, model.head_size)
        dtype = DTYPES[config.precision.dtype]
        queries = torch.empty(sizes, device=device, dtype=dtype, requires_grad=True)
        keys = queries[:, :model.num_kv_heads // tp]
        value = torch._fused_sdp_choice(queries, keys, keys, None, 0.0, True,
                                        enable_gqa=model.heads > model.num_kv_heads)
        chosen = next((name for name, backend in BACKENDS.items() if backend.value == value), "math")
    if asked not in ("auto", chosen):
        raise InputError(
            f"run.attention_backend={asked} cannot run here: for {model.heads // tp} heads of "
            f"{model.head_size}, {model.seq_len} tokens, {config.precision.dtype} and "
            f"model.attention_dropout={model.attention_dropout} on a {device.type}, torch uses {chosen}; "
            "use run.attention_backend=auto")
    if chosen == "flash" and config.data.document_mask and device.type == "cuda" and has_varlen():
        return "varlen"
    return chosen
