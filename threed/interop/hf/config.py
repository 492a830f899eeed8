"""config.json of transformers <-> the keys of `model`. No torch.

What config.json asks for and threed does not compute is refused by its name; keys that nobody here knows are
listed, so that their effect is not lost silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.interop.hf import lacks, rotary
from threed.interop.hf.fitting import GROUPS, rated_by
from threed.interop.hf.names import FAMILIES, NEEDED, HFFamily
from threed.interop.hf.places import CONFIG
from threed.models.families.registry import family_of as family_of_ours
from threed.models.layers.experts import ExpertsConfig
from threed.schema import ModelConfig

LONGEST = 4096  # model.seq_len of an import, where the model allows longer sequences
# What a key of ours is where it is null.
_RESOLVED = {"kv_heads": "num_kv_heads", "ffn_hidden": "num_ffn_hidden", "head_dim": "head_size",
             "expert_ffn_hidden": "inner"}
_ACTIVATIONS = ("activation_function", "hidden_act")  # keys that model.activation answers
_NOISE = ("router_jitter_noise",)  # keys of what is off where they are 0
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
    config, strange = family.completed(config), _strange(family, config)
    for key in family.keys:
        value = config.get(key.theirs, NEEDED)
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
    if config.get("embd_pdrop", values["dropout"]) != values["dropout"] and "dropout" not in given:
        problems.append(f"embd_pdrop={config['embd_pdrop']} differs from resid_pdrop="
                        f"{values['dropout']}: threed has one for both; give model.dropout=...")
    problems += [f"{how}: threed has no {what}; import another model, or, if this one was made without, take "
                 "the key out of config.json"
                 for what, how in lacks.asked(config) if how.partition("=")[0] not in family.only]
    if ours := rated_by(family, values):
        theirs = ", ".join(f"{key.theirs}={values[key.ours]}" for key in family.keys if key.ours in GROUPS)
        problems.append(f"{theirs}: in {family.model_type} a group of experts is as good as its best "
                        f"{family.best_of_group}, and in threed as its best {ours:g}, the experts of a token "
                        f"over its groups; import a model where these are {family.best_of_group}")
    if others := sorted({str(kind) for kind in config.get("layer_types") or ()} - rotary.LAYERS):
        problems.append(f"layer_types has {', '.join(others)}: threed's layers have attention to all tokens "
                        "before")
    if config.get("quantization_config"):
        problems.append("quantization_config: threed reads weights that are not quantized")
    if values["position"] == "rotary":
        values["head_dim"] = _head_dim(config, values)
        found = rotary.rotary_of(config)
        values["rope_theta"], values["rope_scaling"] = found.theta, found.scaling
        problems += [what for answers, what in found.problems if not (answers and given.keys() >= {*answers})]
    values["seq_len"], notes, wrong = _seq_len(family, config, values, given)
    if problems := [*problems, *wrong]:
        raise _refusal(where, problems)
    notes += _balance(family, config, values, given)
    if strange:
        notes.append(f"{where} has keys that threed does not know, and does not follow: {', '.join(strange)}")
    return values, notes


def _strange(family: HFFamily, config: Mapping[str, Any]) -> list[str]:
    """Keys that nobody here knows."""
    known = {*_IGNORED, *rotary.KEYS, *family.other, *family.only, *family.defaults, *lacks.KEYS,
             family.longest, "max_position_embeddings", family.shared, "quantization_config",
             *(name for key in family.keys for name in (key.theirs, key.also))}
    known |= {key for key in _NOISE if not config.get(key)}
    return [key for key in config if key not in known and not key.startswith("summary_")]


def _balance(family: HFFamily, config: Mapping[str, Any], values: dict[str, Any],
             given: Mapping[str, Any]) -> list[str]:
    """Set what keeps experts balanced to what transformers trains with; lines to say.

    transformers multiplies sums of scores with sums of counts over all layers, whose mean over experts is k,
    and threed does so in each of L layers, with a mean of 1: weights of k / L make gradients of one size.
    """
    if values.get("balance") == "bias" and "optimizer.balance_rate" not in given:
        return ["biases of routers move by optimizer.balance_rate in each step, which transformers never "
                "does: optimizer.balance_rate=0 leaves them as they are"]
    if "router_aux_loss_coef" not in family.defaults or given.keys() & {"balance", "balance_weight"}:
        return []
    coefficient = config["router_aux_loss_coef"]
    if not _is_number(coefficient, 0.0):
        coefficient = family.defaults["router_aux_loss_coef"]
    weight = float(f"{coefficient * values['experts_per_token'] / values['layers']:.6g}")
    keys = f"model.balance=sequence model.balance_weight={weight:g}"
    if not config["output_router_logits"]:
        return ["output_router_logits is not true, so transformers trains without an auxiliary loss, and so "
                f"does this run: {keys} adds it, with the weight that router_aux_loss_coef={coefficient:g}"]
    values |= {"balance": "sequence", "balance_weight": weight}
    return [f"router_aux_loss_coef={coefficient:g} of all {values['layers']} layers together is {keys}: of "
            "each layer, whose experts share 1 and not experts_per_token; threed balances each sequence, "
            "transformers all of a batch"]


def _is_number(value: Any, default: Any) -> bool:
    """Whether a value is a number, or true or false where its default is."""
    return isinstance(value, bool | int | float) and isinstance(value, bool) == isinstance(default, bool)


def _kind(default: Any) -> str:
    return "true or false" if isinstance(default, bool) else "a number"


def _refusal(where: Path, problems: list[str]) -> InputError:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return InputError(f"{where} describes a model that threed does not have:{lines}")


def _head_dim(config: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    hidden, heads = values["hidden"], values["heads"]
    usual = hidden // heads if heads and hidden % heads == 0 else None
    size = config.get("head_dim")
    return None if size in (None, usual) else size


def _seq_len(family: HFFamily, config: Mapping[str, Any], values: Mapping[str, Any],
             given: Mapping[str, Any]) -> tuple[int, list[str], list[str]]:
    """(model.seq_len, lines to say, problems)."""
    asked = given.get("seq_len") if isinstance(given.get("seq_len"), int) else None
    longest = rotary.longest(family, config, "rope_scaling" in given and given["rope_scaling"] is None)
    if not isinstance(longest, int) or longest < 1:
        if asked is None:
            return 1, [], [f"{family.longest}={longest}: must be a number of tokens; give model.seq_len=..."]
        longest = asked
    if values["position"] == "learned":
        return longest, [], []
    window, notes = rotary.window(family, config, values["layers"]), []
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


# ---------------------------------------------------------------- out


def model_of(values: Mapping[str, Any]) -> ModelConfig:
    """The model with these keys."""
    return family_of_ours(values["family"]).config(**values)


def written(family: HFFamily, model: ModelConfig, kept: Mapping[str, Any] | None,
            dtype: str | None) -> dict[str, Any]:
    """config.json of a model: `kept` with what is different now, or a new one. `dtype`: bfloat16 ...; None:
    that of `kept`."""
    if kept is None:
        return {"architectures": [family.architecture], "model_type": family.model_type,
                **{key: allowed[0] for key, allowed in family.only.items()}, **_keys_of(family, model),
                **({"sliding_window": None} if family.windows else {}), family.longest: model.seq_len,
                "torch_dtype": dtype}
    before = model_of(values_of(family, kept, Path(CONFIG), {**vars(model), "seq_len": 1})[0])
    then, now, all_kept = _keys_of(family, before), _keys_of(family, model), family.completed(kept)
    changed = {key: value for key, value in now.items() if then[key] != value}
    changed |= _answered(family, all_kept, now)
    longest = all_kept.get(family.longest)
    if model.position == "rotary":
        said = rotary.rotary_of(all_kept)
        changed = {key: value for key, value in changed.items() if key not in rotary.KEYS}
        changed |= rotary.changed(kept, said, model)
        longest = rotary.longest(family, all_kept, bool(said.problems) and model.rope_scaling is None)
        if not isinstance(longest, int) or model.seq_len > longest:
            longest = model.seq_len
    else:
        longest = model.seq_len
    changed |= {family.longest: longest} if longest != all_kept.get(family.longest) else {}
    if (window := rotary.window(family, all_kept, model.layers)) is not None and model.seq_len > window:
        changed["sliding_window"] = None  # it was trained without
    if dtype is not None:  # by its new name, its old name, or both
        named = [key for key in ("dtype", "torch_dtype") if key in kept] or ["torch_dtype"]
        changed |= dict.fromkeys(named, dtype)
    return {**kept, **changed}


def _answered(family: HFFamily, kept: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for which `kept` has nothing that threed takes, so that a person has given it, as they are now."""
    found = {key.theirs: now[key.theirs] for key in family.keys
             if (value := kept.get(key.theirs, NEEDED)) is not key.default
             and not _is_number(value, key.default)}
    found |= {key: allowed[0] for key, allowed in family.only.items()
              if kept.get(key, allowed[0]) not in allowed}
    if "embd_pdrop" in now and kept["embd_pdrop"] != now["embd_pdrop"]:
        found["embd_pdrop"] = now["embd_pdrop"]
    return found


def _keys_of(family: HFFamily, model: ModelConfig) -> dict[str, Any]:
    """Keys of theirs that a model of ours gives."""
    keys = {key.theirs: getattr(model, _RESOLVED.get(key.ours, key.ours)) for key in family.keys}
    if isinstance(model, ExpertsConfig) and not any(key.ours == "expert_ffn_hidden" for key in family.keys):
        keys["intermediate_size"] = model.inner  # all its MLPs are experts
    if family.shared and isinstance(model, ExpertsConfig):
        keys[family.shared] = model.shared_expert_ffn // model.inner
    if family.model_type == "gpt2":
        return {**keys, "embd_pdrop": model.dropout}
    return {**keys, "head_dim": model.head_size, **rotary.rope_keys(model)}
