"""config.json of transformers <-> the keys of `model`. No torch.

What config.json asks for and threed does not compute is refused by its name; keys that nobody here knows are
listed, so that their effect is not lost silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.interop.hf import lacks
from threed.interop.hf.names import FAMILIES, NEEDED, HFFamily
from threed.interop.hf.places import CONFIG
from threed.models.families.registry import family_of as family_of_ours
from threed.models.layers.experts import ExpertsConfig
from threed.models.model import parameters
from threed.schema import ModelConfig

LONGEST = 4096  # model.seq_len of an import, where the model allows longer sequences
# What a key of ours is where it is null.
_RESOLVED = {"kv_heads": "num_kv_heads", "ffn_hidden": "num_ffn_hidden", "head_dim": "head_size",
             "expert_ffn_hidden": "inner"}
_ACTIVATIONS = ("activation_function", "hidden_act")  # keys that model.activation answers
_GROUPS = ("expert_groups", "groups_per_token", "experts_per_token")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
         "partial_rotary_factor")
# Keys that do not change what a model computes.
_IGNORED = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
            "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "_name_or_path",
            "task_specific_params", "gradient_checkpointing", "tokenizer_class", "is_decoder", "return_dict",
            "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type",
            "_attn_implementation", "_attn_implementation_autoset", "embd_pdrop", "head_dim"}


def family_of(config: Mapping[str, Any], where: Path) -> HFFamily:
    """The family of a config.json. InputError for one that threed does not know."""
    kind, known = config.get("model_type"), ", ".join(FAMILIES)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if kind is None:
        raise InputError(f"{where} has no model_type: it is not the config.json of a model of transformers"
                         + ("; this is a run of threed, which is exported, not imported"
                            if "parallel" in config else ""))
    if family is None:
        has = [what + f" ({how})" * bool(how) for what, how in lacks.asked(config)]
        raise InputError(f"{where}: model_type={kind} is a model that threed does not have"
                         + f", with {', '.join(has)}" * bool(has) + f"; import one of {known}")
    classes = config.get("architectures") or [family.architecture]
    if family.architecture not in classes:
        raise InputError(f"{where}: architectures={classes}: threed has {family.architecture} of {kind} "
                         "alone, the model with the head that predicts tokens")
    return family


def values_of(family: HFFamily, config: Mapping[str, Any], where: Path,
              given: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """The keys of `model` that a config.json says, and lines for the person who imports it. `given`: keys
    with values that this person gives, which answer what config.json leaves out or contradicts. InputError,
    which lists all that threed does not have."""
    values, problems, given = dict(family.fixed), [], given or {}
    for key in family.keys:
        value = key.of(config)
        if key.ours in given and not _is_number(value, key.default):
            value = given[key.ours]
        if value is NEEDED or (value is None and key.default is not None):
            problems.append(f"{key.theirs} is missing; give model.{key.ours}=...")
        elif value is not None and not _is_number(value, key.default):
            problems.append(f"{key.theirs}={value!r} is not {_kind(key.default)}; give model.{key.ours}=...")
        values[key.ours] = value
    if problems:
        raise _refusal(where, problems)
    if family.shared:
        values["shared_expert_ffn"] = (config.get(family.shared) or 0) * values["expert_ffn_hidden"]
    for key, allowed in family.only.items():
        if (value := config.get(key, allowed[0])) not in allowed and not (
                key in _ACTIVATIONS and "activation" in given):
            answer = f"; to have that all the same, give model.activation={values['activation']}"
            problems.append(f"{key}={value}: threed has {' or '.join(map(str, allowed))} alone"
                            + answer * (key in _ACTIVATIONS))
    if (family.model_type == "gpt2" and config.get("embd_pdrop", 0.1) != values["dropout"]
            and "dropout" not in given):
        problems.append(f"embd_pdrop={config.get('embd_pdrop', 0.1)} differs from resid_pdrop="
                        f"{values['dropout']}: threed has one for both; give model.dropout=...")
    problems += [f"{how}: threed has no {what}; import another model, or, if this one was made without, take "
                 "the key out of config.json"
                 for what, how in lacks.asked(config) if how.partition("=")[0] not in family.only]
    if ours := _rated_by(family, values):
        theirs = ", ".join(f"{key.theirs}={values[key.ours]}" for key in family.keys if key.ours in _GROUPS)
        problems.append(f"{theirs}: in {family.model_type} a group of experts is as good as its best "
                        f"{family.best_of_group}, and in threed as its best {ours:g}, the experts of a token "
                        f"over its groups; import a model where these are {family.best_of_group}")
    if config.get("quantization_config"):
        problems.append("quantization_config: threed reads weights that are not quantized")
    if values["position"] == "rotary":
        values["head_dim"] = _head_dim(family, config, values)
        problems += _rotary(config, values, given)
    values["seq_len"], notes, wrong = _seq_len(family, config, values, given.get("seq_len"))
    if problems := [*problems, *wrong]:
        raise _refusal(where, problems)
    known = {*_IGNORED, *_ROPE, *family.other, *family.only, *lacks.KEYS, family.longest, family.shared,
             "quantization_config",
             *(name for key in family.keys for name in (key.theirs, key.also))}
    if strange := [key for key in config if key not in known and not key.startswith("summary_")]:
        notes.append(f"{where} has keys that threed does not know, and does not follow: {', '.join(strange)}")
    return values, notes


def _rated_by(family: HFFamily, values: Mapping[str, Any]) -> float:
    """The experts by whose scores a group is as good here, which are those that it may have of a token; 0
    where the family takes as many, or no groups are chosen."""
    groups, chosen, k = (values.get(name, 1) for name in _GROUPS)
    return k / chosen if family.best_of_group and groups > 1 and k != family.best_of_group * chosen else 0.0


def _is_number(value: Any, default: Any) -> bool:
    """Whether a value is a number, or true or false where its default is."""
    return isinstance(value, bool | int | float) and isinstance(value, bool) == isinstance(default, bool)


def _kind(default: Any) -> str:
    return "true or false" if isinstance(default, bool) else "a number"


def _refusal(where: Path, problems: list[str]) -> InputError:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return InputError(f"{where} describes a model that threed does not have:{lines}")


def _head_dim(family: HFFamily, config: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    size = config.get("head_dim", family.heads)
    hidden, heads = values["hidden"], values["heads"]
    usual = hidden // heads if heads and hidden % heads == 0 else None
    return None if size in (None, usual) else size


def _rotary(config: Mapping[str, Any], values: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Set rope_theta and rope_scaling. What is not understood, and not given. (transformers 5 has
    `rope_parameters`, older ones have `rope_theta` and `rope_scaling`.)"""
    rope, problems = config.get("rope_parameters") or {}, []
    scaling = config.get("rope_scaling") or rope
    if not (isinstance(rope, dict) and isinstance(scaling, dict)):
        return ["rope_parameters or rope_scaling is no JSON object"]
    values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    values["rope_scaling"] = None
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        problems.append(f"partial_rotary_factor={partial}: threed turns whole heads")
    kind = _scaling(config)
    if kind == "llama3":
        before = scaling.get("original_max_position_embeddings",
                             config.get("original_max_position_embeddings",
                                        config.get("max_position_embeddings")))
        numbers = [*(scaling.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")), before]
        if all(isinstance(each, int | float) for each in numbers):
            values["rope_scaling"] = [float(each) for each in numbers]
        elif "rope_scaling" not in given:
            problems.append(f"rope_scaling of type llama3 lacks a number: {dict(scaling)}; give "
                            "model.rope_scaling=[factor,low,high,tokens]")
    elif kind != "default" and "rope_scaling" not in given:
        problems.append(f"rope_scaling of type {kind}: threed has llama3 alone; give model.rope_scaling=null "
                        "to go on without")
    return problems


def _scaling(config: Mapping[str, Any]) -> str:
    """The kind of the rotary positions' scaling."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling.get("rope_type", scaling.get("type", "default"))


def _seq_len(family: HFFamily, config: Mapping[str, Any], values: Mapping[str, Any],
             asked: Any) -> tuple[int, list[str], list[str]]:
    """(model.seq_len, lines to say, problems). `asked`: what is given for it."""
    asked = asked if isinstance(asked, int) else None
    longest = config.get(family.longest, {"gpt2": 1024}.get(family.model_type))
    if not isinstance(longest, int) or longest < 1:
        if asked is None:
            return 1, [], [f"{family.longest}={longest}: must be a number of tokens; give model.seq_len=..."]
        longest = asked
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
    always = family.model_type in ("mistral", "mixtral")
    if window is None or not config.get("use_sliding_window", always):
        return None
    if isinstance(kinds, list):
        return window if any(kind != "full_attention" for kind in kinds) else None
    return window if always or config.get("max_window_layers", 0) < layers else None


# ---------------------------------------------------------------- out


def model_of(values: Mapping[str, Any]) -> ModelConfig:
    """The model with these keys."""
    return family_of_ours(values["family"]).config(**values)


def unfit(family: HFFamily, model: ModelConfig) -> list[str]:
    """Why a family cannot hold a model; empty if it can."""
    told = {key.ours for key in family.keys}
    problems = [f"model.{key}={mine}" for key, value in family.fixed.items() if key not in told
                and key not in ("family", "qkv_bias", "kv_heads", "head_dim", "dropout", "balance")
                and not (key == "shared_expert_ffn" and family.shared)
                and (mine := getattr(model, key, value)) != value]
    problems += [f"model.family={model.family}"] * (
        isinstance(model, ExpertsConfig) != (family.fixed["family"] == "moe"))
    if isinstance(model, ExpertsConfig) and family.shared and model.shared_expert_ffn % model.inner:
        problems.append(f"model.shared_expert_ffn={model.shared_expert_ffn}, no multiple of an expert's "
                        f"{model.inner}")
    if ours := _rated_by(family, vars(model)):
        problems.append(f"groups of experts that are as good as their best {ours:g}")
    has, needed = family.rows(model), {each.name: None for each in parameters(model)}
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
    raise InputError(f"no model of transformers that threed knows can hold this one:{lines}\nTrain a model "
                     "of model.family=llama, such as that of configs/llama-toy.yaml; or a gpt with "
                     "model.position=learned and the other defaults")


def written(family: HFFamily, model: ModelConfig, kept: Mapping[str, Any] | None,
            dtype: str | None) -> dict[str, Any]:
    """config.json of a model: `kept` with what is different now, or a new one. `dtype`: bfloat16 ...; None:
    that of `kept`."""
    if kept is None:
        return {"architectures": [family.architecture], "model_type": family.model_type,
                **{key: allowed[0] for key, allowed in family.only.items()}, **_keys_of(family, model),
                family.longest: model.seq_len, "torch_dtype": dtype}
    before = model_of(values_of(family, kept, Path(CONFIG), {**vars(model), "seq_len": 1})[0])
    then, now = _keys_of(family, before), _keys_of(family, model)
    changed = {key: value for key, value in now.items() if then[key] != value}
    changed |= _answered(family, kept, now)
    if _scaling(kept) != "default" and before.rope_scaling is None:
        changed["rope_scaling"] = now["rope_scaling"]  # kept has one that threed does not take
    if "rope_parameters" in kept and changed.keys() & {"rope_theta", "rope_scaling"}:
        changed["rope_parameters"] = {"rope_theta": model.rope_theta,
                                      **(changed.pop("rope_scaling", now["rope_scaling"])
                                         or {"rope_type": "default"})}
        changed.pop("rope_theta", None)
    longest = kept.get(family.longest)
    if model.position == "learned" or not isinstance(longest, int) or model.seq_len > longest:
        changed |= {family.longest: model.seq_len} if longest != model.seq_len else {}
    if dtype is not None:  # by its new name, its old name, or both
        named = [key for key in ("dtype", "torch_dtype") if key in kept] or ["torch_dtype"]
        changed |= dict.fromkeys(named, dtype)
    return {**kept, **changed}


def _answered(family: HFFamily, kept: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for which `kept` has nothing that threed takes, so that a person has given it, as they are now."""
    found = {key.theirs: now[key.theirs] for key in family.keys
             if ((value := key.of(kept)) is not key.default
             and not _is_number(value, key.default)) or value is NEEDED}
    found |= {key: allowed[0] for key, allowed in family.only.items()
              if kept.get(key, allowed[0]) not in allowed}
    if "embd_pdrop" in now and kept.get("embd_pdrop", 0.1) != now["embd_pdrop"]:
        found["embd_pdrop"] = now["embd_pdrop"]
    return found


def _keys_of(family: HFFamily, model: ModelConfig) -> dict[str, Any]:
    """Keys of theirs that a model of ours gives."""
    keys = {key.theirs: getattr(model, _RESOLVED.get(key.ours, key.ours)) for key in family.keys}
    if family.shared and isinstance(model, ExpertsConfig):
        keys[family.shared] = model.shared_expert_ffn // model.inner
    if family.model_type == "gpt2":
        return {**keys, "embd_pdrop": model.dropout}
    scaling = None
    if model.rope_scaling is not None:
        factor, low, high, before = model.rope_scaling
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                   "original_max_position_embeddings": int(before)}
    return {**keys, "head_dim": model.head_size, "rope_theta": model.rope_theta, "rope_scaling": scaling}
