"""Dump: tables of arguments by the names that Megatron-LM's program has for them. Its log begins with one,
and a YAML is one.

    ------------------------ arguments ------------------------
      add_bias_linear ................................. False
      ...
    -------------------- end of arguments ---------------------

Each argument stands in a dump, with its default where it was not given. What has its default and no key here
is left out.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import yaml

from threed.base.errors import InputError
from threed.config.keys.megatron import MEGATRON
from threed.config.keys.megatron_names import DEFAULTS, is_derived, option_of, usual
from threed.config.keys.table import NO_KEY

_BEGIN, _END = re.compile(r"-{8,} arguments -{8,}"), re.compile(r"-{8,} end of arguments -{8,}")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WIDTH = 29  # of a name and its dots, at least; none are left behind a long name
_LINE = re.compile(r"(?<![\w.-])(?P<name>[A-Za-z_]\w*) (?P<dots>\.+)(?: (?P<value>.*))?$")
_LONG = re.compile(r"(?<!\S)(?P<name>[A-Za-z_]\w{31,})  (?P<value>.*)$")
_FEW = 3  # lines without a mark of where they begin
_ENUM = re.compile(r"<?[A-Z]\w*\.(\w+)(?:: [^>]*>)?$")
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16", "torch.float32": "fp32",
           "torch.float": "fp32"}
_OF_DEEPSPEED = ("moe_token_dropping", "moe_top2_2nd_expert_sampling")  # what an option switches off there
_PADDED = re.compile(r"> padded vocab \(size: (\d+)\)")


def of_log(text: str, notes: list[str]) -> dict[str, Any] | None:
    """{name: value} of the last dump in a text; None where there is none. `notes` gets what is unclear."""
    lines = _COLOUR.sub("", text).splitlines()
    begins = [index for index, line in enumerate(lines) if _BEGIN.search(line)]
    first = begins[-1] + 1 if begins else 0
    last = next((index for index, line in enumerate(lines) if index >= first and _END.search(line)), None)
    values = {}
    for line in lines[first:last]:
        match = _LINE.search(line)
        if match is None or len(match["name"] + match["dots"]) < _WIDTH:
            match = _LONG.search(line)
        if match is not None:
            values[match["name"]] = _literal((match["value"] or "").strip())
    if not begins and len(values) < _FEW:
        return None
    if not values:
        raise InputError("the log has the mark of Megatron-LM's arguments, and none behind it: give a log "
                         "that has them")
    if len(begins) > 1:
        notes.append(f"the log has the arguments of {len(begins)} starts: those of the last are taken")
    if last is None:
        notes.append(f"the arguments end with {list(values)[-1]}, without the mark of their end: what would "
                     "stand behind it is not known")
    padded = _PADDED.search(text)
    if padded and not isinstance(values.get("vocab_size"), int):
        values["vocab_size"] = int(padded[1])
    return values


def _literal(text: str) -> Any:
    """A value that Python has printed."""
    if text in _DTYPES:
        return _DTYPES[text]
    if match := _ENUM.match(text):
        return match[1]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    if isinstance(value, list):
        return [_literal(each) if isinstance(each, str) else each for each in value]
    return text if isinstance(value, (str, bytes, tuple)) else value


def of_yaml(text: str, source: str, notes: list[str]) -> dict[str, Any]:
    """{name: value} of MODEL_ARGS in a YAML, or of all keys of one, by the last part of their names. `notes`
    gets what is there twice."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    given = values.get("MODEL_ARGS", values) if isinstance(values, dict) else {}
    flat: dict[str, Any] = {}
    stack = list(given.items()) if isinstance(given, dict) else []
    while stack:
        name, value = stack.pop(0)
        if isinstance(value, dict):
            stack = [*value.items(), *stack]
        else:
            plain = str(name).lstrip("-").rpartition(".")[2].replace("-", "_")
            value = _literal(value) if isinstance(value, str) else value
            if not _is(flat.get(plain, value), value):
                notes.append(f"{plain} is given as {flat[plain]} and {value}: the last is taken")
            flat[plain] = value
    return flat if given is not values else _of_core(flat)


def _of_core(values: dict[str, Any]) -> dict[str, Any]:
    """Keys of megatron.core's and Megatron-Bridge's configs, with what Megatron-LM's options say otherwise:
    groups of queries need no switch, a gated MLP is four times as wide as the model, and a weight decay that
    begins and ends alike is the weight decay."""
    values = dict(values)
    if values.get("gated_linear_unit") and "silu" in str(values.get("activation_func")):
        values["swiglu"] = True
    if values.get("num_query_groups") is not None:
        values.setdefault("group_query_attention", True)
    if isinstance(hidden := values.get("hidden_size"), int):
        values.setdefault("ffn_hidden_size", 4 * hidden)
    first, last = values.get("start_weight_decay"), values.get("end_weight_decay")
    if first is not None and first == last:
        del values["start_weight_decay"], values["end_weight_decay"]
        values["weight_decay"] = first
    return values


def is_strange(name: str) -> bool:
    """Whether no program of Megatron has this key, as far as threed knows."""
    option = option_of(name, True)[0]
    return MEGATRON.row(option) is None and option not in DEFAULTS and not is_derived(name)


def setting(name: str, value: Any, values: dict[str, Any]) -> tuple[str, Any, bool]:
    """(option, its value, whether that is Megatron-LM's default) for an entry of a table; no option where it
    says nothing. `values`: the table."""
    if name == "gated_linear_unit" and values.get("swiglu"):
        name = "swiglu"
    if name == "activation_func" and value == "swiglu":
        name, value = "swiglu", True
    if name in _OF_DEEPSPEED and "topk" in values and isinstance(value, bool):
        name, value = f"disable_{name}", not value
    option, value = option_of(name, value)
    row = MEGATRON.row(option)
    is_off = any(_is(value, off) for off in (False, 0, -1, "", "none", []))
    is_usual = any(_is(value, each) for each in DEFAULTS[option]) if option in DEFAULTS else is_off
    has_key = row is not None and row.key is not None
    is_always = row is not None and row.take is None and row.ours.startswith(NO_KEY) and "*" in row.theirs
    follows = _is(value, usual(values).get(option)) or _says_nothing(name, values)
    if value is None or is_always or follows or (is_usual and (is_off or not has_key)):
        return "", None, True
    return option, value, is_usual


def _is(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _says_nothing(name: str, values: dict[str, Any]) -> bool:
    """Whether an argument has no effect with the others of its table."""
    lost = {
        "params_dtype": {"bf16", "fp16"} & values.keys(),
        "activation_func": values.get("gated_linear_unit"),
        "world_size": values.get("data_parallel_size") is not None,
        "padded_vocab_size": values.get("vocab_size") is not None,
        "data_parallel_sharding_strategy": not (values.get("use_megatron_fsdp")
                                                or values.get("use_custom_fsdp")),
        "main_grads_dtype": not values.get("use_precision_aware_optimizer")}
    return is_derived(name) or bool(lost.get(name))
