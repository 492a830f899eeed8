"""The device of a rank, and the settings of torch that hold for its whole process."""

from __future__ import annotations

import os

import torch
from torch.nn.attention import SDPBackend

from threed.base.errors import InputError
from threed.engine.compiler import lacks, uncompiled
from threed.schema import Config
from threed.tensor.documents import varlen_call
from threed.tensor.precision import DTYPES
from threed.tensor.products import Way, way_of

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION}
# Their backwards add with atomics on a GPU, in an order that changes from run to run.
_ATOMIC = ("efficient", "cudnn")
PINNED = "pinned_max_round_threshold_mb"  # above it the allocator of pinned memory does not round
EXACT_FROM = (2, 13)  # the versions of torch that are known to have this setting
QUEUES = 32  # of the hardware, for a process: the most there are. Lanes and communicators have a stream each


def pick_device(config: Config, local_rank: int) -> torch.device:
    """The device of a rank. InputError where the machine does not have it."""
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("run.device=cuda, but torch sees no GPU here; use run.device=auto or cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1:  # Slurm's --gpus-per-task=1 and many operators show each rank its own (see `gpu`)
        return torch.device("cuda", 0)
    if local_rank >= gpus:
        raise InputError(f"local rank {local_rank} has no GPU: there are {gpus} on this machine; start fewer "
                         "processes a node, or use run.device=cpu")
    return torch.device("cuda", local_rank)


def set_up(config: Config) -> None:
    """Settings of the process, before its first work on a GPU. With run.deterministic, an operation that
    has no deterministic kernel raises RuntimeError, with its name."""
    _pin_exactly()
    # Streams that share a queue of the hardware wait for one another. (CUDA takes 8.) Read when CUDA begins.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(QUEUES))
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
        elif config.data.document_mask and name == "cudnn":
            enable(False)  # it makes a plan for each new length of a document, which takes far longer
    # What a product adds up in parts is added in fp32, too. (torch's default rounds the parts to 16 bits.)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
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
    return "varlen" if _has_varlen(config, device) else chosen


def _has_varlen(config: Config, device: torch.device) -> bool:
    """Whether one kernel of flash attention does all documents here. It may run where torch would choose
    another kernel for sequences without documents."""
    model, dtype = config.model, DTYPES[config.precision.dtype]
    if not config.data.document_mask or device.type != "cuda" or model.attention_dropout > 0:
        return False
    flash = config.run.attention_backend in ("auto", "flash")
    return flash and varlen_call(device, dtype, model.head_size, model.heads > model.num_kv_heads) is not None


def shortcomings(config: Config, device: torch.device) -> list[str]:
    """What this version of torch, or this device, makes slower, larger or less exact than it could be."""
    if device.type != "cuda":
        return []
    chosen, lines, precision = attention(config, device), [], config.precision
    plain = config.model.attention_dropout == 0 and not config.model.own_layers
    if chosen == "math" and plain:
        lines.append("attention is not fused here: a layer keeps the scores of all pairs of tokens, which "
                     "the plan does not count; see run.attention_backend")
    if config.data.document_mask and chosen != "varlen" and plain:
        lines.append(f"data.document_mask: each document is a call of attention ({chosen}), which is slow "
                     "where they are many; one kernel for all of them needs torch 2.10 or later, bf16 or "
                     "fp16, and a GPU and a head size that flash attention supports")
    if way_of(DTYPES[precision.grad_dtype], DTYPES[precision.dtype], device) is Way.ROUNDED:
        lines.append(f"weight gradients are rounded to {precision.dtype} before they are added up in "
                     f"{precision.grad_dtype}: torch {torch.__version__} has no product whose result has "
                     "more bits than the matrices; torch 2.8 and later have one")
    return [*lines, *uncompiled(config, device)]
