"""Load a config: one YAML file and dotted overrides.

`load` reads a YAML file and `key=value` overrides into the dataclasses of `threed.schema`, and
`threed.config.validate` checks them. Unknown keys, wrong types and impossible combinations are all reported
at once, as one `ConfigError`.

Batch sizes count sequences and mean what they mean in Megatron-LM:
global_batch_size = micro_batch_size x dp x number of micro-batches.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from threed.base import paths
from threed.base.axes import AXES, shown
from threed.base.errors import ConfigError, InputError, Problem, check_type
from threed.base.quantity import whole_number
from threed.base.remember import remembering
from threed.base.shipped import find_file
from threed.base.template import Template
from threed.config.idle import overridden
from threed.config.named import joined, named_model
from threed.config.retired import is_retired, retired
from threed.config.unknown import UnknownKey, unknown
from threed.config.validate import validate
from threed.config.values import PATHS, check_values, expand, get
from threed.schema import Config, ModelConfig, keys_of

_KINDS = {"converted to Float": "a number", "converted to Integer": "a whole number",  # ends of reasons
          "is not a ListConfig, TupleConfig, list, or tuple.": "a list"}


def load(path: str | Path | None, overrides: list[str] | None = None,
         world_size: int | None = None) -> Config:
    """Read a YAML file (None: defaults) and dotted overrides into a validated Config.

    A path such as configs/toy.yaml is also found among the configs that ship with the package. `world_size`
    is the number of ranks; where it is given, `parallel.dp: auto` is what it leaves, and where it is not, 1.
    Keys of the file that overrides leave without effect are left out, with a note on stderr. Raises
    ConfigError, which lists every problem at once, and InputError where the file or an override cannot
    be read.

    >>> threed.load("configs/toy.yaml", ["parallel.pp=4"], world_size=16).dp
    """
    check_type("path", path, (str, Path, None), "the path of a YAML file")
    check_type("world_size", world_size, (int, None), "the number of ranks")
    return ConfigSource.read(path, overrides).load(world_size)


@dataclasses.dataclass(frozen=True)
class ConfigSource:
    """A config file and overrides, read once. Only `load` validates them."""

    path: str | Path | None
    values: dict[str, Any]  # by dotted key, of the file
    others: dict[str, Any]  # of the overrides

    @classmethod
    def read(cls, path: str | Path | None, overrides: Sequence[str] | None = None) -> ConfigSource:
        """Raises InputError where the file or an override cannot be read."""
        values, others = _read_yaml(path) if path is not None else {}, overrides_of(overrides)
        if path is not None and not values and not others:
            raise InputError(f"{path} is empty: threed init writes a first config")
        return cls(path, flat(values), others)

    @property
    def where(self) -> str:
        return str(self.path) if self.path is not None else "the config"

    @property
    def leaves_dp(self) -> bool:
        """Whether `parallel.dp` is left to the number of ranks."""
        return (self.values | self.others).get("parallel.dp", "auto") == "auto"

    def load(self, world_size: int | None) -> Config:
        """As the function `load`."""
        with self._led_to_convert():
            return overridden(self.values, self.others, lambda both: of_values(both, self.where, world_size),
                              self.where)

    def uncombined(self) -> Config:
        """As the function `uncombined`."""
        with self._led_to_convert():
            return uncombined(joined(self.values, self.others), self.where)

    @contextmanager
    def _led_to_convert(self) -> Iterator[None]:
        """Name the command that converts the file, where it is refused and is another framework's. What an
        override gets wrong, or a file that has a key of ours, says nothing of a framework."""
        try:
            yield
        except ConfigError as error:
            path = self.where
            theirs = [each for each in error.problems if isinstance(each, UnknownKey)
                      and each.key in self.values]
            flags = sum(each.is_flag for each in theirs)
            command = ""
            if path.endswith(".json") and any(each.framework == "DeepSpeed" for each in theirs):
                command = f"threed convert {path}"
            elif path.endswith((".yaml", ".yml")) and flags and flags >= len(theirs) / 2:
                command = f"threed convert --megatron {path}"
            if not command or not self.values.keys().isdisjoint(known_keys()):
                raise
            raise ConfigError(error.problems, path, f"{command} makes a config of it") from None


def for_devices(path: str | Path, overrides: list[str] | None, devices: int | None, command: str) -> Config:
    """`load` for a command that starts no ranks, so that `parallel.dp: auto` needs a number of devices.
    InputError, which asks for it, where it is not given."""
    source = ConfigSource.read(path, overrides)
    if not source.leaves_dp:
        return source.load(devices)
    config = source.uncombined()  # what else is wrong comes first
    sizes = {axis: getattr(config.parallel, axis) for axis in reversed(AXES) if axis != "dp"}
    least = math.prod(sizes.values())
    others = " x ".join(axis for axis in sizes if axis in shown(sizes))
    if devices is not None and devices % least:
        near = sorted({max(1, devices // least) * least, -(-devices // least) * least})
        raise InputError(f"--devices {devices}: {others} = {least} does not divide it, so nothing is left "
                         f"for parallel.dp=auto: give {' or '.join(map(str, near))}")
    if devices is not None:
        return source.load(devices)
    many = f" (a multiple of {others} = {least})" if least > 1 else ""
    raise InputError(f"parallel.dp is auto: give --devices N{many}, as in `threed {command} {path} --devices "
                     f"{-(-64 // least) * least}`, or parallel.dp=N")


def overrides_of(texts: Sequence[str] | None) -> dict[str, Any]:
    """`section.key=value` texts -> {dotted key: value}; the last of equal keys wins. InputError where one is
    no override."""
    _check_overrides(texts)
    given: dict[str, Any] = {}
    for text in texts or []:
        given.update(_read_override(text))
    return given


@remembering()
def of_values(values: dict[str, Any], where: str, world_size: int | None = None) -> Config:
    """A validated Config of values by section or by dotted key. ConfigError, which names `where` they are
    from, where they are no config."""
    config, problems = _build(flat(values))
    return _resolved(config, world_size, problems, where)


def uncombined(values: dict[str, Any], where: str) -> Config:
    """A Config of values by dotted key, of which each has its type and a value that it may have. Whether they
    go together is not checked."""
    config, problems = _build(values)
    resolve_dp(config, None)
    if problems := [*problems, *check_values(config)]:
        raise ConfigError(problems, where)
    return config


@remembering()
def checked(config: Config, world_size: int | None = None) -> Config:
    """A copy of a config that a script may have made or changed, as `load` would return it: with a number for
    `parallel.dp`, and validated. Raises ConfigError, which lists every problem at once."""
    if problems := _wrong_types(config):
        raise ConfigError(problems)
    own = copy.deepcopy(config)
    found, problems = expand({key: get(own, key) for key in PATHS})
    for key, value in found.items():
        section, name = key.split(".")
        setattr(getattr(own, section), name, value)
    return _resolved(own, world_size, problems, "the config")


def _resolved(config: Config, world_size: int | None, problems: list[Problem], where: str) -> Config:
    resolve_dp(config, world_size)
    if config.model.fused == "auto" and config.run.device == "cpu" and not config.model.own_layers:
        config.model.fused = "off"
    problems = [*problems, *validate(config, world_size)]
    if problems:
        raise ConfigError(problems, where)
    return config


def _wrong_types(config: Config) -> list[Problem]:
    """A problem for each value that is not of its key's type, which `load` would have refused."""
    problems = []
    for name, kind in get_type_hints(type(config)).items():
        section = getattr(config, name)
        if not isinstance(section, kind):
            problems.append(Problem.of(name, f" is of type {type(section).__name__}: must be a "
                                       f"{kind.__name__}"))
            continue
        problems += [Problem.of(f"{name}.{key}", f"={value!r}: must be of type "
                                f"{hint if get_origin(hint) else hint.__name__}")
                     for key, hint in get_type_hints(type(section)).items()
                     if not _fits(value := getattr(section, key), hint)]
    return problems


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that a key of the schema has: `int`, `list[str] | None` ..."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(each, get_args(hint)[0]) for each in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _check_overrides(overrides: Any) -> None:
    give = 'a list of texts, such as ["train.steps=10"]'
    check_type("overrides", overrides, (list, tuple, None), give)
    for index, text in enumerate(overrides or []):
        check_type(f"overrides[{index}]", text, str, 'a text such as "train.steps=10"')


def _read_yaml(path: str | Path) -> dict[str, Any]:
    path = find_file(path)
    try:
        if path.suffix == ".toml":  # torchtitan's, whose keys the errors know
            values = tomllib.loads(path.read_text())
        else:
            values = _resolve(OmegaConf.load(path))
    except (yaml.YAMLError, tomllib.TOMLDecodeError, OmegaConfBaseException, UnicodeDecodeError,
            OSError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        raise InputError(f"{path} cannot be read as {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a mapping of sections (model:, parallel:, ...), not a "
                         f"{type(values).__name__}")
    return values  # pyright: ignore[reportReturnType]


def _resolve(values: Any) -> Any:
    """What a file or an override says, as plain values. In a path, ${NAME} is a variable of the environment,
    which `paths` expands later; OmegaConf would look for it among the keys."""
    raw = OmegaConf.to_container(values, resolve=False)
    if not isinstance(raw, dict):
        return raw

    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(each) for each in value]
        return paths.VARIABLE.sub(lambda match: "\\" * (match[2] not in {None, *raw}) + match[0],
                                  value) if isinstance(value, str) else value

    for key in PATHS:
        section, name = key.split(".")
        for holder, inside in ((raw, key), (raw.get(section), name)):
            if isinstance(holder, dict) and inside in holder:
                holder[inside] = kept(holder[inside])
    return OmegaConf.to_container(OmegaConf.create(raw), resolve=True)


@lru_cache(1000)  # a millisecond each; who loads many configs repeats most of their overrides
def _read_override(text: str) -> dict[str, Any]:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"'{text}' is not an override; write section.key=value, for example train.steps=10")
    try:
        return flat(_resolve(OmegaConf.from_dotlist([text])))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise InputError(f"override '{text}' cannot be read: {' '.join(str(error).split())}") from None


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> {dotted key: leaf}. An empty section (`model:` with nothing below) holds nothing."""
    sections = {section.name for section in dataclasses.fields(Config)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found.update(flat(value, name + "."))
        elif value is not None or prefix or key not in sections:
            found[name] = value
    return found


def known_keys(config: Config | None = None) -> list[str]:
    """Every dotted key of the schema; with those of the family of `config`."""
    return list(keys_of(type(config.model) if config else ModelConfig))


def _build(given: dict[str, Any]) -> tuple[Config, list[Problem]]:
    given, problems = expand(given)
    model, size, wrong = named_model(given)
    problems += wrong
    defaults, told = Config(model=model), keys_of(type(model))
    hints = _hints(type(model))
    given = {**size, **given, **({"model.name": size["model.name"]} if size else {})}
    schema = _schema(type(model)).copy()
    schema.model.family = model.family
    for key, value in given.items():
        if inside := [known for known in told if known.startswith(f"{key}.")]:
            problems.append(Problem.of(key, f"={value}: {key} is a section; give values to its keys, such as "
                                       f"{inside[0]}"))
            continue
        if is_retired(key):
            problems += retired(key, value)
            continue
        if key not in told:
            problems.append(unknown(key, list(told)))
            continue
        if isinstance(value, bool) and "off" in told[key].choices:  # YAML reads on and off as booleans
            value = "on" if value else "off"
        if isinstance(OmegaConf.select(schema, key), bool) and not isinstance(value, bool):
            # OmegaConf would take any number for one
            problems.append(Problem.of(key, f"={value}: must be true or false"))
            continue
        value = _whole(value, hints[key])
        try:
            OmegaConf.update(schema, key, value)
        except OmegaConfBaseException as error:
            problems.append(Problem.of(key, f"={value}: {_reason(error, key, value, defaults)}"))
    for key in [key for key in given if key in told and OmegaConf.is_missing(*_owner(schema, key))]:
        problems.append(Problem.of(key, " is '???', which stands for a value that is missing: give one"))
        OmegaConf.update(schema, key, get(defaults, key))
    config = OmegaConf.to_object(schema)
    assert isinstance(config, Config)
    names = {"source": ("data.source", "data.mix"), "tokenizer": ("data.tokenizer",)}
    config.data.left_out = tuple(key for key, keys in names.items()
                                 if all(given.get(each) is None for each in keys))
    return config, problems


def _reason(error: OmegaConfBaseException, key: str, value: Any, defaults: Config) -> str:
    """Why OmegaConf does not take a value."""
    reason = str(error).splitlines()[0]
    kind = next((word for name, word in _KINDS.items() if reason.endswith(name)), None)
    kind = _list_of(key, defaults) if kind == "a list" else kind
    if reason.endswith("is not Optional"):
        return "must have a value; leave the key out for its default"
    if isinstance(value, list) and "to string" in reason:
        kind = "one text, not a list" + "; data.mix takes several sources" * (key == "data.source")
    return f"must be {kind}" if kind else f"{reason[0].lower()}{reason[1:]}"


def _whole(value: Any, hint: Any) -> Any:
    """The value of a key, as a whole number where the key takes one and it is written as 1e5 or 8.0."""
    if isinstance(value, list):
        lists = [each for each in (hint, *get_args(hint)) if get_origin(each) is list]
        return [_whole(each, get_args(lists[0])[0]) for each in value] if lists else value
    number = whole_number(value)
    return value if number is None or _fits(value, hint) or not _fits(number, hint) else number


@lru_cache(8)
def _hints(model: type[ModelConfig]) -> dict[str, Any]:
    """The type of each dotted key."""
    sections = {**get_type_hints(Config), "model": model}
    return {f"{section}.{key}": hint for section, kind in sections.items()
            for key, hint in get_type_hints(kind).items()}


def _list_of(key: str, defaults: Config) -> str:
    """What a list must be that is the value of a key."""
    section, name = key.split(".")
    hint = get_type_hints(type(getattr(defaults, section)))[name]
    kinds = [each for each in (hint, *get_args(hint)) if get_origin(each) is list]
    kind = get_args(kinds[0])[0] if kinds else str
    words = {float: "a list of numbers, such as [0.9,0.95]", int: "a list of whole numbers, such as [4,4]"}
    return words.get(kind, "a list, such as [one,two]")


@lru_cache(8)  # 30 ms each
def _schema(model: type[ModelConfig]) -> Template:
    return Template(OmegaConf.structured(Config(model=model())))


def _owner(schema: DictConfig, key: str) -> tuple[DictConfig, str]:
    section, name = key.split(".")
    return schema[section], name


def resolve_dp(config: Config, world_size: int | None) -> None:
    """Turn `parallel.dp: auto` into what the world size leaves (1 when no world size is known)."""
    parallel = config.parallel
    if isinstance(parallel.dp, str) and parallel.dp.isdecimal():
        parallel.dp = int(parallel.dp)
    if parallel.dp == "auto":
        others = max(1, math.prod(getattr(parallel, axis) for axis in AXES if axis != "dp"))
        parallel.dp = max(1, world_size // others) if world_size else 1
