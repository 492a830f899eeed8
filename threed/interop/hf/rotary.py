"""Rotary positions in config.json: their base, their scaling, and the lengths for which a model is made. No
torch.

    rope_theta, rope_scaling       as transformers 4 writes them
    rope_parameters                the same in one table, as transformers 5 does
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from threed.interop.hf.names import HFFamily
from threed.schema import ModelConfig

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
        "partial_rotary_factor")
LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers; the second up to its window
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Rotary(NamedTuple):
    """What a config.json says of rotary positions."""

    theta: Any
    scaling: list[float] | None
    problems: list[tuple[tuple[str, ...], str]]  # keys of ours that answer it together, and what is wrong


def rotary_of(config: Mapping[str, Any]) -> Rotary:
    """`config`: as `HFFamily.completed` returns it. transformers reads `rope_scaling` first, as here."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    table, problems = config.get(name) or {}, []
    if not isinstance(table, dict):
        return Rotary(config["rope_theta"], None, [((), f"{name} is no JSON object")])
    kinds = [key for key, value in table.items() if isinstance(value, dict) or key.endswith("_attention")]
    if kinds:
        return Rotary(config["rope_theta"], None, [(
            ("rope_theta", "rope_scaling"),
            f"{name} has a table for each kind of layer ({', '.join(kinds)}): threed has one for all; give "
            "model.rope_theta=... and model.rope_scaling=... (null: none) to have that one")])
    theta = table.get("rope_theta", config["rope_theta"])
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        problems.append((("rope_theta",), f"rope_theta={theta!r} is not a number; give model.rope_theta=..."))
    partial = table.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        problems.append(((), f"partial_rotary_factor={partial}: threed turns whole heads"))
    kind, scaling = _kind(table), None
    if kind == "llama3":
        before = config.get("max_position_embeddings")
        numbers = [{_LLAMA3[-1]: before, **table}.get(each) for each in _LLAMA3]
        if all(isinstance(each, int | float) for each in numbers):
            scaling = [float(each) for each in numbers if each is not None]
        else:
            problems.append((("rope_scaling",), f"{name} of type llama3 lacks a number: {table}; give "
                             "model.rope_scaling=[factor,low,high,tokens]"))
    elif kind != "default":
        made = f", for the {before} tokens of original_max_position_embeddings" if (
            before := table.get(_LLAMA3[-1])) else ""
        problems.append((("rope_scaling",), f"{name} of type {kind}: threed has llama3 alone; give "
                         f"model.rope_scaling=null to go on without{made}"))
    return Rotary(theta, scaling, problems)


def _kind(table: Mapping[str, Any]) -> str:
    return table.get("rope_type", table.get("type", "default"))


def longest(family: HFFamily, config: Mapping[str, Any], unscaled: bool = False) -> Any:
    """The tokens of the longest sequence for which a model is made, as its config.json says. `unscaled`: its
    positions are taken without their scaling."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    before = table.get(_LLAMA3[-1], config.get(_LLAMA3[-1])) if isinstance(table, dict) else None
    scaled = unscaled and isinstance(before, int) and _kind(table) != "default"
    return before if scaled else config.get(family.longest)


def window(family: HFFamily, config: Mapping[str, Any], layers: int) -> int | None:
    """The tokens that a layer with a sliding window sees; None where no layer has one."""
    size, kinds = config.get("sliding_window"), config.get("layer_types")
    if not family.windows or size is None or ("use_sliding_window" in family.defaults
                                              and not config["use_sliding_window"]):
        return None
    if family.windows == "layers":
        return size
    if isinstance(kinds, list):
        return size if "sliding_attention" in kinds else None
    return size if (config.get("max_window_layers") or 0) < layers else None


def made_for(family: HFFamily, config: Mapping[str, Any], model: ModelConfig) -> dict[str, int | None] | None:
    """The tokens of the longest sequence for which an imported model is made, and those that its layers with
    a sliding window see, for the manifest; None where there is a table of positions."""
    if model.position == "learned":
        return None
    config = family.completed(config)
    tokens = longest(family, config, model.rope_scaling is None)
    return {"tokens": tokens if isinstance(tokens, int) else None,
            "window": window(family, config, model.layers)}


def changed(kept: Mapping[str, Any], before: Rotary, model: ModelConfig) -> dict[str, Any]:
    """Keys of a config.json, `kept`, that says `before`, which a model's rotary positions change."""
    if not before.problems and (before.theta, before.scaling) == (model.rope_theta, model.rope_scaling):
        return {}
    if "rope_parameters" not in kept:
        return rope_keys(model)
    table = {"rope_theta": model.rope_theta, **(rope_keys(model)["rope_scaling"] or {"rope_type": "default"})}
    return {key: model.rope_theta if key == "rope_theta" else table
            for key in ("rope_parameters", *(kept.keys() & {"rope_scaling", "rope_theta"}))}


def rope_keys(model: ModelConfig) -> dict[str, Any]:
    """As transformers 4 writes them, which all versions read."""
    scaling = None
    if model.rope_scaling is not None:
        *numbers, tokens = model.rope_scaling
        scaling = {"rope_type": "llama3", **dict(zip(_LLAMA3, [*numbers, int(tokens)], strict=True))}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}
