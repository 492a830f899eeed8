"""What a search is asked: a config without its layout, and the keys that stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from threed.base.errors import InputError
from threed.config.load import given, of_values, uncombined
from threed.config.values import get
from threed.layout_search.layout import KEYS, Layout, changes, config_of
from threed.models.families.registry import family_of
from threed.schema import Config

_LAYOUT = frozenset(KEYS.values())
_REDUCED = KEYS["reduce_dtype"]
# What else a config says about memory and layout. It is of another layout: a search leaves it out.
_OTHER = ("zero.persist_below", "activation.budget", "activation.partition", "activation.contiguous",
          "offload.ratio", "offload.parameters", "offload.nvme_path", "offload.delayed_update",
          "offload.warmup", "parallel.activation_limit", "parallel.stage_units", "parallel.costs")
_WHERE_USED = ("zero.prefetch", "activation.pieces")  # which only some layouts use
# Values that the fast evaluator does not know, by their beginnings; and why
_UNKNOWN = {
    "parallel.schedule": (("auto", "file:"), "search compares named schedules; try this one on the mesh that "
                                             "it finds"),
    "activation.policy": (("budget",), "search finds out what must be recomputed"),
    "offload.optimizer": (("nvme",), "search knows none and cpu"),
}


class Question(NamedTuple):
    """`values`: dotted keys of the config, without its layout. `fixed`: field of a layout -> its value."""

    base: Config
    values: dict[str, Any]
    fixed: dict[str, Any]

    def config(self, layout: Layout) -> Config:
        return config_of(layout, self.base)

    def values_of(self, layout: Layout) -> dict[str, Any]:
        """The keys of a file that has this layout."""
        return {**self.values, **changes(self.config(layout), self.base)}


def ask(path: str | Path, overrides: list[str] | None = None, rounding: bool = False) -> Question:
    """Read a config. What overrides say of the layout is fixed; what the file says of it is left out. So is
    the precision of reductions with `rounding`; else it stays what the config has. Raises InputError where a
    search could not honour an override."""
    file, others = given(path, overrides)
    layout = _LAYOUT if rounding else _LAYOUT - {_REDUCED}
    if rounding and _REDUCED in others:
        raise InputError(f"{_REDUCED}={others[_REDUCED]} and --rounding exclude each other: one says in "
                         "which precision gradients are sent, the other tries both; leave one out")
    for key, value in others.items():
        if key in _OTHER:
            raise InputError(f"{key}={value}: search decides what is kept, and where, by other keys; leave "
                             "it out, and set it in the config that --write writes")
        if key in _UNKNOWN and str(value).startswith(_UNKNOWN[key][0]):
            raise InputError(f"{key}={value}: {_UNKNOWN[key][1]}; leave it out")
    fixed = {key: value for key, value in others.items() if key in layout}
    values = {key: value for key, value in {**file, **others}.items()
              if key not in layout and key not in _OTHER}
    used = {key: values.pop(key) for key in _WHERE_USED if key in values}
    where = str(path)
    if family_of(str(values.get("model.family", "gpt"))).samples is not None:
        raise InputError(f"model.family={values['model.family']}: search does not know layers of your own; "
                         "compare layouts by threed.predict")
    typed = uncombined({**values, **used, **fixed}, where)
    base = of_values({**values, "parallel.dp": 1}, where)
    if base.model.lora_rank is not None:
        raise InputError(f"model.lora_rank={base.model.lora_rank}: search knows no frozen weights; search "
                         "without it, and see what threed check and predict say of that layout with it")
    base.zero.prefetch, base.activation.pieces = typed.zero.prefetch, typed.activation.pieces
    if rounding and base.precision.dtype == "fp32":
        raise InputError("--rounding: with precision.dtype=fp32 gradients are sent in fp32; set it to bf16, "
                         "or leave --rounding out")
    return Question(base, values, _fields(typed, fixed))


def _fields(typed: Config, fixed: dict[str, Any]) -> dict[str, Any]:
    """Field of a layout -> the value that it must have."""
    fields = {name: get(typed, key) for name, key in KEYS.items() if key in fixed}
    for name in ("offload_activations", "offload_optimizer"):
        if name in fields:
            fields[name] = fields[name] == "cpu"
    if fixed.get(KEYS["dp"]) == "auto":
        del fields["dp"]
    # null: what the schedule or the ZeRO stage has; of tiles, that there are none
    return {name: value for name, value in fields.items() if value is not None or name == "tile_linears"}


def write(file: Path, values: dict[str, Any], head: str) -> None:
    """Write a config of dotted keys, with comments before it. Raises InputError where the file cannot be
    written."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    parts = [yaml.safe_dump({name: keys}, sort_keys=False) for name, keys in sections.items()]
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    try:
        file.write_text(comment + "\n".join(parts))
    except OSError as error:
        raise InputError(f"--write {file}: {error.strerror}") from None
