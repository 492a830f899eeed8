"""Unknown keys: whose they are, and what to write in their place."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from threed.base.errors import Problem

_NEAR = 0.8  # how alike a key and a slip of the pen are; below it they are two words
_NEARER = 0.9  # the same, of a key of another section


@dataclass(frozen=True)
class UnknownKey(Problem):
    """A key that the schema has not."""

    framework: str  # whose key it is; "" where it is none's that is known
    near: str  # the key that is most like it; "" where none is

    @property
    def is_flag(self) -> bool:
        """Whether it is, or is written as, an option of Megatron-LM."""
        flag = self.framework == "Megatron-LM" or ("-" in self.key and self.near != "")
        return flag and "." not in self.key


def unknown(key: str, keys: Sequence[str]) -> UnknownKey:
    """The problem of a key that is none of `keys`."""
    from threed.base.words import meant
    from threed.config.synonyms import whose  # long tables, which a config without mistakes does not need
    from threed.models.families.registry import FAMILIES
    from threed.schema.config import keys_of

    other = next((name for name, family in FAMILIES.items() if key in keys_of(family.config)), "")
    if other:
        return UnknownKey(key, f"{key}: unknown key; it is a key of model.family={other}", "", "")
    begun = [known for known in keys if known.startswith(key)]
    framework, said = whose(key) or ("", None if begun else meant(key))
    if said is not None:
        return UnknownKey(key, f"{key}: unknown key; {said}", framework, "")
    section, _, tail = key.replace("-", "_").rpartition(".")
    near = begun or _alike(tail, [known for known in keys if known.startswith(f"{section}.")])
    near = near or _alike(tail, keys, _NEARER)
    hint = f"did you mean {near[0]}?" if near else "the keys are listed in configs/reference.yaml"
    return UnknownKey(key, f"{key}: unknown key; {hint}", "", near[0] if near else "")


def _alike(tail: str, keys: Sequence[str], near: float = _NEAR) -> list[str]:
    """The keys whose last part is most like `tail`; none where all are other words."""
    tails = {known.rpartition(".")[2]: known for known in reversed(keys)}
    return [tails[name] for name in difflib.get_close_matches(tail, list(tails), 1, near)]
