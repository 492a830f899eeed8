"""What attention and compilers can do on a rank's device, and the settings of its process."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from threed.base.errors import InputError
from threed.devices import device_of, settings
from threed.engine.compiler import lacks, uncompiled
from threed.schema import Config
from threed.tensor.documents import varlen_call
from threed.tensor.precision import DTYPES
from threed.tensor.products import Way, way_of

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION}
# Their backwards add with atomics on a GPU, in an order that changes from run to run.
_ATOMIC = ("efficient", "cudnn")


def set_up(config: Config) -> None:
    """Settings of the process, before its first work on a GPU. With run.deterministic, an operation that
    has no deterministic kernel raises RuntimeError, with its name."""
    asked, deterministic = config.run.attention_backend, config.run.deterministic
    allowed: dict[str, bool] = {}
    if asked != "auto":
        allowed = {name: name == asked for name in BACKENDS}
    elif deterministic:
        allowed |= dict.fromkeys(_ATOMIC, False)
    elif config.data.document_mask:
        allowed["cudnn"] = False  # it makes a plan for each new length of a document, which takes far longer
    settings.set_up(allowed, deterministic)


def compiles(config: Config, device: torch.device) -> bool:
    """Whether the pieces of model.fused are compiled here. InputError where they must be, and cannot."""
    fused = config.model.fused
    if fused == "off" or config.model.own_layers or (fused == "auto" and not device_of(device).triton):
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
    if not config.data.document_mask or not device_of(device).varlen or model.attention_dropout > 0:
        return False
    flash = config.run.attention_backend in ("auto", "flash")
    return flash and varlen_call(device, dtype, model.head_size, model.heads > model.num_kv_heads) is not None


def shortcomings(config: Config, device: torch.device) -> list[str]:
    """What this version of torch, or this device, makes slower, larger or less exact than it could be."""
    if not device_of(device).asynchronous:
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
