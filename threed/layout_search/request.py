"""What a search is asked: a config without its layout, and the keys that stay as they are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from threed.base.errors import InputError
from threed.config.load import ConfigSource, of_values, uncombined
from threed.config.named import joined
from threed.config.validate import validate
from threed.config.values import get
from threed.layout_search.layout import KEYS, Layout, changes, config_of, fields_of
from threed.schema import Config

_LAYOUT = frozenset(KEYS.values())
_REDUCED = KEYS["reduce_dtype"]
# What else a config says about memory and layout -> the layouts that use it. In a file it is of another
# layout: a search leaves it out. On the command line it stays, and only such layouts are searched.
_USED_BY: dict[str, dict[str, Any]] = {
    "zero.persist_below": {"zero.stage": 3},
    "activation.budget": {"activation.policy": "budget"},
    "activation.partition": {"activation.policy": "full"},
    "activation.contiguous": {"activation.policy": "full"},
    "offload.ratio": {"offload.optimizer": "cpu"},
    "offload.gradients": {"offload.optimizer": "cpu", "zero.stage": 2},
    "offload.overlap": {"offload.optimizer": "cpu"},
    "offload.parameters": {"offload.optimizer": "cpu", "zero.stage": 3},
    "offload.nvme_path": {"offload.optimizer": "nvme"},
    "parallel.activation_limit": {}, "parallel.stage_units": {}}
_WHERE_USED = ("zero.prefetch", "activation.pieces")  # which only some layouts use
# What is of one layout alone, by the beginning of its value; and why
_OF_ONE = {
    "parallel.schedule": (("auto", "file:", "vertical"), "search compares named schedules that give "
                          "positions equally many stages; try this one on the mesh that it finds"),
    "parallel.group": (("",), "it is of parallel.schedule=vertical, which search does not try"),
    "parallel.costs": (("",), "costs that a run has measured are of its own layout"),
}


class Question(NamedTuple):
    """`base`: the config without its layout, with keys that some layouts use. `values`: dotted keys of
    `plain`, which is without these. `fixed`: field of a layout -> its value."""

    base: Config
    plain: Config
    values: dict[str, Any]
    fixed: dict[str, Any]

    def config(self, layout: Layout) -> Config:
        return config_of(layout, self.base)

    def values_of(self, layout: Layout) -> dict[str, Any]:
        """The keys of a file that has this layout."""
        return {**self.values, **changes(self.config(layout), self.plain)}


def ask(path: str | Path, overrides: list[str] | None = None, rounding: bool = False) -> Question:
    """Read a config. What overrides say of the layout is fixed; what the file says of it is left out. So is
    the precision of reductions with `rounding`; else it stays what the config has. Raises InputError where a
    search could not honour an override."""
    source = ConfigSource.read(path, overrides)
    file, others = source.values, source.others
    layout = _LAYOUT if rounding else _LAYOUT - {_REDUCED}
    if rounding and _REDUCED in others:
        raise InputError(f"{_REDUCED}={others[_REDUCED]} and --rounding exclude each other: one says in "
                         "which precision gradients are sent, the other tries both; leave one out")
    for key, value in others.items():
        if key in _OF_ONE and value is not None and str(value).startswith(_OF_ONE[key][0]):
            raise InputError(f"{key}={value}: {_OF_ONE[key][1]}; leave it out")
    kept = {key: value for key, value in others.items() if key in _USED_BY}
    implied = _implied(kept, others)
    fixed = {**implied, **{key: value for key, value in others.items() if key in layout}}
    values = {key: value for key, value in joined(file, others).items()
              if key not in layout and key not in _USED_BY and key not in _OF_ONE}
    used = {key: values.pop(key) for key in _WHERE_USED if key in values}
    where = str(path)
    typed = uncombined({**values, **used, **kept, **fixed}, where)
    plain = of_values({**values, "parallel.dp": 1}, where)
    base, fields = copy.deepcopy(plain), fields_of(typed, fixed)
    for key in (*_WHERE_USED, *kept, KEYS["offload_optimizer"]):
        section, name = key.split(".")
        setattr(getattr(base, section), name, get(typed, key))
    for problem in validate(config_of(Layout(**fields), base)):
        if problem.key == KEYS["policy"] or _USED_BY.get(problem.key):
            raise InputError(str(problem))
    if rounding and base.precision.dtype == "fp32":
        raise InputError("--rounding: with precision.dtype=fp32 gradients are sent in fp32; set it to bf16, "
                         "or leave --rounding out")
    return Question(base, plain, values, fields)


def _implied(kept: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The keys of layouts that use all of `kept`. Raises InputError where an override rules them out."""
    implied: dict[str, Any] = {}
    for key, value in kept.items():
        for other, needed in _USED_BY[key].items():
            given = others.get(other, implied.get(other, needed))
            if given != needed and not (given in ("budget", "nvme") and needed in ("full", "cpu")):
                raise InputError(f"{key}={value} has no effect with {other}={given}, which search keeps: "
                                 f"leave one of them out, or set {other}={needed}")
            implied[other] = given
    return implied


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
