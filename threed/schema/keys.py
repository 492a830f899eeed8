"""A key of the config: its field tells its default, its meaning and the values that it may have.

    norm: str = key("layernorm", choices=("layernorm", "rmsnorm"))
    layers: int = key(8, "transformer blocks", least=1)

A field without `key` is a key, too: of any value of its type, without a meaning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from threed.devices import ACCELERATORS

T = TypeVar("T")
# What others call a value.
_SAID = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
         "adam": "adamw", "rope": "rotary", "learned_absolute": "learned", "silu": "swiglu",
         "gpu": ACCELERATORS[0], "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v",
         "dualpipev": "dualpipe-v", "loopedbfs": "breadth-first"}


@dataclass(frozen=True)
class KeySpec:
    """What is told of a key. A value of None (null) stands for the lack of one, and has no bounds.

    choices: the values that it may have, or a mapping of them to their meanings. A table to which a script
        may add rows is read anew at each check.
    prefix: texts that begin with it are values besides the choices.
    least, above, below: bounds of a number, which must be finite then; `above` and `below` are no values.
    check: yields what else is wrong with a value, as `wrong` does.
    path: expands `~` and `$NAME` in a value (`base.paths`).
    free: of the model: how it is trained or computed, and nothing that a named size says.
    """

    doc: str = ""
    choices: Collection[object] = ()
    prefix: str = ""
    least: float | None = None
    above: float | None = None
    below: float | None = None
    check: Callable[[Any], Iterator[str]] | None = None
    path: Callable[[Any], Any] | None = None
    free: bool = False

    @property
    def text(self) -> str:
        """The meaning, and the choices with theirs."""
        meanings = self.choices if isinstance(self.choices, Mapping) else {}
        listed = []
        for each in self.choices:
            meaning = meanings.get(each)
            listed.append(f"{each} ({meaning})" if meaning and isinstance(meaning, str) else str(each))
        return ": ".join(filter(None, (self.doc, " | ".join(listed))))

    def wrong(self, value: Any) -> Iterator[str]:
        """What is wrong with a value, whatever the other keys are: each as what follows the key."""
        if self.choices and value not in self.choices and not (
                self.prefix and str(value).startswith(self.prefix)):
            yield f"={value}: must be one of {', '.join(map(str, self.choices))}{self._meant(str(value))}"
        if value is not None:
            if self.least is not None and not value >= self.least:  # `not >=`: NaN is refused too
                yield f"={value}: must be at least {self.least}"
            elif self.least is not None and value == math.inf:
                yield f"={value}: must be finite"
            if self.above is not None and not self.above < value < math.inf:
                yield f"={value}: must be above {self.above} and finite"
            if self.below is not None and value >= self.below:
                yield f"={value}: must be less than {self.below}"
            if self.check is not None:
                yield from self.check(value)

    def _meant(self, value: str) -> str:
        said = value.lower()
        meant = said if said in self.choices else _SAID.get(said)
        return f"; did you mean {meant}?" if meant in self.choices else ""


def key(default: T, doc: str = "", **rules: Any) -> T:
    """A field of a section: a key with its default, its meaning, and `rules`, the other fields of KeySpec."""
    metadata = {"spec": KeySpec(doc, **rules)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)  # pyright: ignore
    return field(default=default, metadata=metadata)


@lru_cache(100)
def specs(kind: type) -> dict[str, KeySpec]:
    """Field -> what is told of it, of a section. Who gives a key another default in a class of their own, as
    a family may, need not tell it again."""
    told: dict[str, KeySpec] = {}
    for base in reversed(kind.__mro__):
        for name, leaf in getattr(base, "__dataclass_fields__", {}).items():
            told[name] = leaf.metadata.get("spec") or told.get(name) or KeySpec()
    return {leaf.name: told[leaf.name] for leaf in dataclasses.fields(kind)}
