"""Families by their name in `model.family`, or by the module or file that has them.

A family is a file in this folder and a line below. Or it is a module or file of your own, which
`model.family` names: `package.module:name`, or `folder/file.py:name`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from threed.base.errors import InputError, ThreedError, line_of
from threed.base.shipped import HERE
from threed.models.families.base import Family
from threed.models.families.gpt import GPT
from threed.models.families.llama import LLAMA
from threed.models.families.moe import MOE
from threed.schema import ModelConfig

FAMILIES: dict[str, Family] = {"gpt": GPT, "llama": LLAMA, "moe": MOE}
_ALIASES = {"gpt2": "gpt2small"}
_TUNED = ("meta", "hf", "base", "pt", "it", "instruct", "chat")  # words that say nothing of a size
# What beginnings of names have that threed has not.
_OTHERS = {"mistral7bv0.1": "v0.1 has a sliding window, which threed has not"}
_EXPERTS = ("moe", "expert", "experts")  # words of a name that mean a family
_NEAR, _MOST = 0.75, 4  # how alike names are of which one may be meant; how many are listed
_GIVEN: list[Family] = []  # by scripts
GIVEN = "initialize:"  # before the number of one of these


def give(family: Family) -> str:
    """Let a family be known in this process, and in those that are forked from it. Returns its name, the same
    in every run of a script."""
    if family not in _GIVEN:
        _GIVEN.append(family)
    return f"{GIVEN}{_GIVEN.index(family) + 1}"


def sizes() -> dict[str, str]:
    """Names that `model.name` may be -> the family whose size it is."""
    return {name: family for family, each in FAMILIES.items() for name in each.sizes}


def size_of(name: str) -> str | None:
    """The size that a name means, however people write it: Llama3-8B, meta-llama/Llama-3.1-8B,
    Qwen2.5-7B-Instruct, gpt2. None where there is no such size."""
    plain = _plain(name)
    return next((size for size in sizes() if _plain(size) == _ALIASES.get(plain, plain)), None)


def instead_of(name: str) -> str:
    """The end of the error message for an unknown size: "; did you mean llama3-8b?" or another hint, or "."
    if nothing is similar."""
    shipped = HERE / "configs" / f"{name}.yaml"
    if shipped.is_file():
        return f"; configs/{shipped.name} is a config of one."
    why = next((why for begin, why in _OTHERS.items() if _plain(name).startswith(begin)), "")
    near = _like(name)
    meant = f"; did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?" if near else "."
    return f"{f' ({why})' if why else ''}{meant}"


def _like(name: str) -> list[str]:
    """Sizes that an unknown name may mean, at most `_MOST`: those that begin with the name; if there are
    none, those with which the name begins; if there are none, those that contain all words of the name; if
    there are none, the most similar size, provided that its similarity is at least `_NEAR`."""
    last, plain = name.lower().rpartition("/")[2], _plain(name)
    asked = [word for word in re.split(r"[\s_:-]+", last) if word]
    words = [word for word in asked if word not in _EXPERTS]
    some = FAMILIES["moe"].sizes if len(words) < len(asked) else sizes()
    begins = [size for size in some if plain and _plain(size).startswith(plain)] or [
        size for size in some if plain.startswith(_plain(size))]
    # A number begins where it begins in the name: 8b is in llama3-8b, and not in 0.8b or 4x8b.
    has = [size for size in some if len(last) > 1 and all(
        re.search(rf"(?<![\d.]){'(?<!x)' * word[0].isdigit()}{re.escape(word)}", size) for word in words)]
    return (begins or has)[:_MOST] or difflib.get_close_matches(last, sizes(), 1, _NEAR)


def _plain(name: str) -> str:
    words = re.split(r"[\s_:-]+", name.lower().rpartition("/")[2])
    return "".join(word for word in words if word not in _TUNED)


@cache
def family_of(name: str) -> Family:
    """The family that `model.family` names. Raises InputError where it names none."""
    if name in FAMILIES:
        return FAMILIES[name]
    asked = f"model.family={name}"
    if name.startswith(GIVEN):
        number = name.removeprefix(GIVEN)
        if not number.isdecimal() or not 1 <= int(number) <= len(_GIVEN):
            raise InputError(f"{asked}: its layers were given to threed.initialize by a script, which alone "
                             "knows them: call threed in that script, or name them in a file (threed.Layers)")
        return _GIVEN[int(number) - 1]
    where, colon, attribute = name.rpartition(":")
    if not colon:
        raise InputError(f"{asked}: there are {', '.join(FAMILIES)}; for one of your own write "
                         "package.module:name or file.py:name")
    module = _from_file(asked, Path(where)) if where.endswith(".py") else _from_package(asked, where)
    family = getattr(module, attribute, None)
    if not isinstance(family, Family):
        wrong = (f"has no name '{attribute}'" if family is None
                 else f"has a {type(family).__name__} of this name")
        raise InputError(f"{asked}: {where} {wrong}; it must be a threed.models.families.base.Family")
    if not issubclass(family.config, ModelConfig):
        raise InputError(f"{asked}: its config must be a dataclass that extends threed.schema.ModelConfig")
    if problem := _forgotten(family.config):
        raise InputError(f"{asked}: {problem}")
    return family


def _forgotten(config: type[ModelConfig]) -> str | None:
    """Why a default or a key that a configuration's class names would be ignored, if one would."""
    keys = {leaf.name for leaf in dataclasses.fields(config)}
    for kind in config.__mro__[:config.__mro__.index(ModelConfig)]:
        annotated = {name: text for name, text in inspect.get_annotations(kind).items()
                     if "ClassVar" not in str(text)}
        bare = [name for name in vars(kind) if name in keys and name not in annotated]
        if "__dataclass_fields__" not in vars(kind) and (annotated or bare):
            return (f"{kind.__name__}.{[*annotated, *bare][0]} is ignored, because {kind.__name__} is no "
                    "dataclass: write @dataclass above the class")
        if bare:
            return (f"{kind.__name__}.{bare[0]} is ignored, because it has no type: write "
                    f"'{bare[0]}: {type(vars(kind)[bare[0]]).__name__} = ...'")
    return None


@contextmanager
def calling(family: str, what: str) -> Iterator[None]:
    """Within the context, an error in a user's family is an InputError that names family, function
    and line. An error in one of threed's own families passes as it is."""
    try:
        yield
    except ThreedError:
        raise
    except Exception as error:
        if family in FAMILIES:
            raise
        raise InputError(f"model.family={family}: {what} failed: {type(error).__name__}: {error}"
                         f"{line_of(error)}") from error


def _from_file(asked: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{asked}: there is no file {path} (seen from {Path.cwd()})")
    alias = f"threed_family_{path.stem}"
    spec = importlib.util.spec_from_file_location(alias, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)  # where dataclasses look
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{asked}: {path} cannot be imported: {type(error).__name__}: {error}"
                         f"{line_of(error)}") from error
    return module


def _from_package(asked: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except Exception as error:
        raise InputError(f"{asked}: {where} cannot be imported: {type(error).__name__}: {error}"
                         f"{line_of(error)}") from error
