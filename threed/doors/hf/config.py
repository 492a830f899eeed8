"""config.json of transformers <-> the keys of `model`. No torch.

What config.json asks for and threed does not compute is refused by its name; keys that nobody here knows are
listed, so that their effect is not lost silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.doors.hf.families import FAMILIES, NEEDED, HFFamily
from threed.errors import InputError
from threed.models.families.registry import family_of as family_of_ours
from threed.models.model import parameters
from threed.schema import ModelConfig

LONGEST = 4096  # model.seq_len of an import, where the model allows longer sequences
# What a key of ours is where it is null.
_RESOLVED = {"kv_heads": "num_kv_heads", "ffn_hidden": "num_ffn_hidden", "head_dim": "head_size"}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
         "partial_rotary_factor")
# Keys that do not change what a model computes.
_IGNORED = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
            "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "_name_or_path",
            "task_specific_params", "gradient_checkpointing", "tokenizer_class", "is_decoder", "return_dict",
            "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type",
            "_attn_implementation", "_attn_implementation_autoset", "embd_pdrop", "head_dim"}


def read(path: Path) -> dict[str, Any]:
    """A JSON object in a file. InputError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give the folder of a model of "
                         "transformers, with config.json and *.safetensors (threed downloads nothing: hf "
                         "download NAME --local-dir FOLDER fills one)") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a JSON object, not a {type(values).__name__}")
    return values


def family_of(config: Mapping[str, Any], where: Path) -> HFFamily:
    """The family of a config.json. InputError for one that threed does not know."""
    kind, known = config.get("model_type"), ", ".join(FAMILIES)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(f"{where}: model_type={kind} is a model that threed does not have; it has {known}")
    classes = config.get("architectures") or [family.architecture]
    if family.architecture not in classes:
        raise InputError(f"{where}: architectures={classes}: threed has {family.architecture} of {kind} "
                         "alone, the model with the head that predicts tokens")
    return family


def values_of(family: HFFamily, config: Mapping[str, Any], where: Path,
              seq_len: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """The keys of `model` that a config.json says, and lines for the person who imports it. `seq_len`: of the
    run, if it is asked for. InputError, which lists all that threed does not have."""
    values, problems = dict(family.fixed), []
    for key in family.keys:
        value = config.get(key.theirs, key.default)
        if value is NEEDED or (value is None and key.default is not None):
            problems.append(f"{key.theirs} is missing")
        elif value is not None and (not isinstance(value, bool | int | float)
                                    or isinstance(value, bool) != isinstance(key.default, bool)):
            problems.append(f"{key.theirs}={value!r} is not a number, or not true or false")
        values[key.ours] = value
    if problems:
        raise _refusal(where, problems)
    for key, allowed in family.only.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            problems.append(f"{key}={value}: threed has {' or '.join(map(str, allowed))} alone")
    if family.model_type == "gpt2" and config.get("embd_pdrop", 0.1) != values["dropout"]:
        problems.append(f"embd_pdrop={config.get('embd_pdrop', 0.1)} differs from resid_pdrop="
                        f"{values['dropout']}: threed has one model.dropout for both")
    if config.get("quantization_config"):
        problems.append("quantization_config: threed reads weights that are not quantized")
    if values["position"] == "rotary":
        values["head_dim"] = _head_dim(family, config, values)
        problems += _rotary(config, values)
    values["seq_len"], notes, wrong = _seq_len(family, config, values, seq_len)
    if problems := [*problems, *wrong]:
        raise _refusal(where, problems)
    known = {*_IGNORED, *_ROPE, *family.other, *family.only, family.longest, "quantization_config",
             *(key.theirs for key in family.keys)}
    if strange := [key for key in config if key not in known and not key.startswith("summary_")]:
        notes.append(f"{where} has keys that threed does not know, and does not follow: {', '.join(strange)}")
    return values, notes


def _refusal(where: Path, problems: list[str]) -> InputError:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return InputError(f"{where} describes a model that threed does not have:{lines}")


def _head_dim(family: HFFamily, config: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    size = config.get("head_dim", family.heads)
    usual = values["hidden"] // values["heads"] if values["hidden"] % values["heads"] == 0 else None
    return None if size in (None, usual) else size


def _rotary(config: Mapping[str, Any], values: dict[str, Any]) -> list[str]:
    """Set rope_theta and rope_scaling. What is not understood. (transformers 5 has `rope_parameters`, older
    ones have `rope_theta` and `rope_scaling`.)"""
    rope, problems = config.get("rope_parameters") or {}, []
    scaling = config.get("rope_scaling") or rope
    if not (isinstance(rope, dict) and isinstance(scaling, dict)):
        return ["rope_parameters or rope_scaling is no JSON object"]
    values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    values["rope_scaling"] = None
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        problems.append(f"partial_rotary_factor={partial}: threed turns whole heads")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        before = scaling.get("original_max_position_embeddings",
                             config.get("original_max_position_embeddings",
                                        config.get("max_position_embeddings")))
        given = [*(scaling.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")), before]
        if any(not isinstance(each, int | float) for each in given):
            problems.append(f"rope_scaling of type llama3 lacks a number: {dict(scaling)}")
        else:
            values["rope_scaling"] = [float(each) for each in given]
    elif kind != "default":
        problems.append(f"rope_scaling of type {kind}: threed has llama3 alone")
    return problems


def _seq_len(family: HFFamily, config: Mapping[str, Any], values: Mapping[str, Any],
             asked: int | None) -> tuple[int, list[str], list[str]]:
    """(model.seq_len, lines to say, problems)."""
    longest = config.get(family.longest, {"gpt2": 1024}.get(family.model_type))
    if not isinstance(longest, int) or longest < 1:
        return 1, [], [f"{family.longest}={longest}: must be a number of tokens"]
    if values["position"] == "learned":
        return longest, [], []
    window, notes = _window(family, config, values["layers"]), []
    most = longest if window is None else min(longest, window)
    length = asked or min(most, LONGEST)
    if window is not None and length > window:
        return length, [], [f"sliding_window={window}: attention is whole in threed, which is the same for "
                            f"sequences of up to {window} tokens; set model.seq_len={window}"]
    if window is not None:
        notes.append(f"sliding_window={window} changes nothing at model.seq_len={length}; longer "
                     "sequences are refused")
    if length < longest and asked is None:
        notes.append(f"model.seq_len={length}; the model is made for up to {longest} tokens")
    return length, notes, []


def _window(family: HFFamily, config: Mapping[str, Any], layers: int) -> int | None:
    """Tokens that a layer with a sliding window sees; None where no layer has one."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or not config.get("use_sliding_window", family.model_type == "mistral"):
        return None
    if isinstance(kinds, list):
        return window if any(kind != "full_attention" for kind in kinds) else None
    return window if family.model_type == "mistral" or config.get("max_window_layers", 0) < layers else None


# ---------------------------------------------------------------- out


def model_of(values: Mapping[str, Any]) -> ModelConfig:
    """The model with these keys."""
    return family_of_ours(values["family"]).config(**values)


def unfit(family: HFFamily, model: ModelConfig) -> list[str]:
    """Why a family cannot hold a model; empty if it can."""
    problems = [f"model.{key}={mine}" for key, value in family.fixed.items()
                if key not in ("family", "qkv_bias", "kv_heads", "head_dim", "dropout")
                and (mine := getattr(model, key)) != value]
    has, needed = ({row.ours: None for row in family.rows(model)},
                   {each.name: None for each in parameters(model)})
    problems += [f"parameter {name}" for name in [each for each in needed if each not in has][:1]]
    problems += [f"model without {name}" for name in
                 [each for each in has if each not in needed and each != "head.output.weight"][:1]]
    if family.model_type == "gpt2" and (model.num_kv_heads != model.heads
                                        or model.head_size * model.heads != model.hidden):
        problems.append("model.kv_heads or model.head_dim")
    return problems


def family_for(model: ModelConfig, kept: Mapping[str, Any] | None) -> HFFamily:
    """The family as which a model is exported: that of `kept`, its config.json, or the first that can hold
    it. InputError where none can."""
    order = list(FAMILIES.values())
    if kept is not None and kept.get("model_type") in FAMILIES:
        order.sort(key=lambda family: family.model_type != kept["model_type"])
    reasons = {family.model_type: unfit(family, model) for family in order}
    for family in order:
        if not reasons[family.model_type]:
            return family
    lines = "".join(f"\n  - {name} has no {', '.join(each)}" for name, each in reasons.items())
    raise InputError(f"no model of transformers that threed knows can hold this one:{lines}")


def written(family: HFFamily, model: ModelConfig, kept: Mapping[str, Any] | None,
            dtype: str | None) -> dict[str, Any]:
    """config.json of a model: `kept` with what is different now, or a new one. `dtype`: bfloat16 ...; None:
    that of `kept`."""
    if kept is None:
        return {"architectures": [family.architecture], "model_type": family.model_type,
                **{key: allowed[0] for key, allowed in family.only.items()}, **_keys_of(family, model),
                family.longest: model.seq_len, "torch_dtype": dtype}
    before = model_of(values_of(family, kept, Path("config.json"), 1)[0])
    then, now = _keys_of(family, before), _keys_of(family, model)
    changed = {key: value for key, value in now.items() if then[key] != value}
    if "rope_parameters" in kept and changed.keys() & {"rope_theta", "rope_scaling"}:
        changed["rope_parameters"] = {"rope_theta": model.rope_theta,
                                      **(changed.pop("rope_scaling", now["rope_scaling"])
                                         or {"rope_type": "default"})}
        changed.pop("rope_theta", None)
    if model.position == "learned" or model.seq_len > kept.get(family.longest, 0):
        changed |= {family.longest: model.seq_len} if kept.get(family.longest) != model.seq_len else {}
    named = "dtype" if "dtype" in kept else "torch_dtype"
    if dtype is not None and kept.get(named) != dtype:
        changed[named] = dtype
    return {**kept, **changed}


def _keys_of(family: HFFamily, model: ModelConfig) -> dict[str, Any]:
    """Keys of theirs that a model of ours gives."""
    keys = {key.theirs: getattr(model, _RESOLVED.get(key.ours, key.ours)) for key in family.keys}
    if family.model_type == "gpt2":
        return {**keys, "embd_pdrop": model.dropout}
    scaling = None
    if model.rope_scaling is not None:
        factor, low, high, before = model.rope_scaling
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                   "original_max_position_embeddings": int(before)}
    return {**keys, "head_dim": model.head_size, "rope_theta": model.rope_theta, "rope_scaling": scaling}
