"""Adapters of a LoRA run for transformers: merged into the weights, or as a folder of PEFT's.

    W + (alpha / rank) B A                              merged: what `threed export` writes
    adapter_config.json, adapter_model.safetensors      `threed export --adapters`, for peft.PeftModel
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from threed.base.errors import InputError
from threed.interop.hf import sidecar as kept
from threed.interop.hf.fitting import family_for
from threed.interop.hf.names import HFFamily, TensorRow
from threed.interop.hf.places import ADAPTER, read
from threed.interop.hf.slices import TensorPart
from threed.interop.hf.source import Exported, Trained
from threed.interop.hf.tensors import NAMES, FileWriter, headers_of
from threed.models.layers.parts import Adapter
from threed.models.model import adapters
from threed.schema import ModelConfig
from threed.tensor.adapters import part_of

WEIGHTS, CONFIG = "adapter_model.safetensors", ADAPTER


def without(model: ModelConfig) -> ModelConfig:
    """The model without adapters."""
    return replace(model, lora_rank=None, lora_alpha=None, lora_targets=None)


def merge(whole: torch.Tensor, name: str, trained: Trained) -> None:
    """Add the adapters of a parameter to its values, in place, [as stored]."""
    model = trained.config.model
    for adapter in adapters(model) if model.lora_rank is not None else ():
        if adapter.of == name:
            a, b = (trained.read(each) for each in adapter.parameters())
            rows = part_of(whole.view(-1, whole.shape[-1]), adapter.rows, 0)
            rows += (b @ a).mul_(model.lora_scale).view(rows.shape)


def export_adapters(run: Path, output: Path, dtype: str | None = None, like: Path | None = None,
                    say: Callable[[str], None] = lambda line: None) -> Exported:
    """Write the adapters of a run as PEFT's folder. `dtype`: fp32 (None), bf16 or fp16; `like`: the folder of
    the base model. InputError where PEFT has no such adapters."""
    if dtype is not None and dtype not in NAMES:
        raise InputError(f"--dtype {dtype}: give {', '.join(NAMES)}")
    with Trained(run, like) as trained:
        model, beside = trained.config.model, trained.kept
        if model.lora_rank is None:
            raise InputError(f"--adapters: {trained.path} has none: its run had no model.lora_rank")
        described = read(beside / kept.CONFIG) if beside is not None else None
        family = family_for(without(model), described)
        rows = {name: row for name, (row, *_) in family.rows(without(model)).items()}
        modules = {adapter.name: _module(family, adapter, rows[adapter.of]) for adapter in adapters(model)}
        shapes = {name: shape for adapter in adapters(model) for name, shape in zip(
            _names(modules[adapter.name]), (each.shape for each in adapter.parameters()), strict=True)}
        header = next(iter(headers_of(shapes, dict.fromkeys(shapes, NAMES[dtype or "fp32"]),
                                             1 << 62).values()))
        base = str(like) if like is not None else (described or {}).get("_name_or_path")
        with trained.written(output) as aside:
            say(f"{trained.path} as adapters of a {family.model_type}: {WEIGHTS}")
            writer = FileWriter(aside, {WEIGHTS: header}, f"--dtype {dtype or 'fp32'}")
            for adapter in adapters(model):
                values = _values(family, adapter, rows[adapter.of], trained)
                for name, each in zip(_names(modules[adapter.name]), values, strict=True):
                    writer.write(name, TensorPart(each, tuple(each.shape)))
            notes = writer.close()
            (aside / CONFIG).write_text(kept.text_of(_described(family, model, list(modules.values()), base)))
        return trained.exported(family.model_type, output, notes)


def _names(module: str) -> tuple[str, str]:
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _module(family: HFFamily, adapter: Adapter, row: TensorRow) -> str:
    """Their linear that has an adapter."""
    target = adapter.name.rpartition(".")[2]
    found = [name for name in row.theirs if name.endswith(f".{target}.weight")]
    if len(row.theirs) == 1 and adapter.rows.whole:
        found = list(row.theirs)
    if not found:
        theirs = ", ".join(name.split(".")[-2] for name in row.theirs)
        raise InputError(f"--adapters: a {family.model_type} of transformers has {theirs}, and no linear for "
                         f"an adapter of {target}: export the model merged, without --adapters")
    return found[0].removesuffix(".weight")


def _values(family: HFFamily, adapter: Adapter, row: TensorRow, trained: Trained) -> Iterator[torch.Tensor]:
    """A [rank, inputs] and B [outputs, rank], with outputs in their order."""
    a, b = (trained.read(each) for each in adapter.parameters())
    yield a
    if len(row.theirs) == 1:  # B has as many rows as the matrix, which a view puts into their order
        (part,) = row.view(b, trained.config.model)
        b = part.values.reshape(part.shape)
        b = b.t() if _turned(family) else b
    yield b.contiguous()


def _turned(family: HFFamily) -> bool:
    """Whether their matrices are [inputs, outputs] (Conv1D)."""
    return family.model_type == "gpt2"


def _described(family: HFFamily, model: ModelConfig, modules: list[str], base: str | None) -> dict[str, Any]:
    """adapter_config.json."""
    every = [name.removesuffix(".weight") for rows in family.rows(without(model)).values() for row in rows
             for name in row.theirs]
    targets = set()
    for module in modules:
        last = module.rpartition(".")[2]  # one name may be that of several linears of a block
        alone = all(other in modules for other in every if other.endswith(f".{last}"))
        targets.add(last if alone else ".".join(module.split(".")[-2:]))
    alpha = model.lora_rank if model.lora_alpha is None else model.lora_alpha
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "r": model.lora_rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
            "fan_in_fan_out": _turned(family), "target_modules": sorted(targets), "inference_mode": True}
