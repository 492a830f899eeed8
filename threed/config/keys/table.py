"""Table: what each key of another framework is here. One row a key, read by the error about an unknown key
(`config.synonyms`), by `threed convert` (`interop.convert`) and by docs/reference/keys.md.

    Row("gradient_clipping", "optimizer.clip_grad")                       the value is taken as it is
    Row("fp16.initial_scale_power", "precision.initial_loss_scale", f)    f(value, given) is taken
    Row("swiglu", "model.activation=swiglu")                              a switch: taken where it is on
    Row("contiguous_gradients", "no key: it is always so")                dropped, nothing is lost
    Row("mtp_num_layers", "nothing like it: ...")                         refused where it is on

After the key, a remark may follow in parentheses. A function may return a dict of keys and values instead of
a value, and raise `Dropped` or `Refused` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import yaml

NO_KEY, NOTHING = "no key: ", "nothing like it: "
OFF = (None, False, 0, -1, "", "none", "None", "off", "False", "false")
Given = Mapping[str, Any]  # the names of rows, as they were given or by default -> values


class Dropped(Exception):
    """Nothing is lost without this key; the reason."""


class Refused(Exception):
    """threed cannot do what this key asks for; the reason."""


class Key(NamedTuple):
    theirs: str  # the end of a dotted key, or an option with _ for -; a name with * stands for many
    ours: str
    take: Callable[[Any, Given], Any] | None = None
    off: tuple[Any, ...] = ()  # values besides OFF with which the key asks for nothing

    @property
    def key(self) -> str | None:
        """Our key; None where there is none."""
        return None if self.ours.startswith((NO_KEY, NOTHING)) else self.ours.split(" ")[0].split("=")[0]

    @property
    def switch(self) -> str | None:
        """The value that the key takes where a switch is on; None where the row is no switch."""
        name, equals, value = self.ours.split(" ")[0].partition("=")
        return value if equals and self.key == name else None

    def asks(self, value: Any) -> bool:
        """Whether a value asks for anything: it is neither in OFF nor in the row's `off`."""
        return not any(value is off or (value == off and isinstance(value, bool) == isinstance(off, bool))
                       for off in (*OFF, *self.off))

    def taken(self, value: Any, given: Given) -> dict[str, Any]:
        """Our keys and values for it. Dropped or Refused where there are none."""
        if self.key is None and self.take is None:
            if self.ours.startswith(NOTHING) and not self.asks(value):
                return {}
            raise (Dropped if self.ours.startswith(NO_KEY) else Refused)(self.ours.partition(": ")[2])
        if (self.switch is not None or self.off) and not self.asks(value):
            return {}
        if self.take is not None:
            value = self.take(value, given)
        elif self.switch is not None:
            value = yaml.safe_load(self.switch)
        return value if isinstance(value, dict) else {self.key: value}  # pyright: ignore


def where(lost: Callable[[Given], str], row: Key) -> Key:
    """The row, whose key has no effect where `lost` says why."""
    def take(value: Any, given: Given) -> Any:
        if why := lost(given):
            raise Dropped(why)
        return row.taken(value, given)

    return row._replace(take=take)


class Framework(NamedTuple):
    name: str
    rows: tuple[Key, ...]
    # what its keys are where they are not given, where that differs from threed: as a function of those given
    defaults: Callable[[Given], dict[str, Any]]
    sections: Mapping[str, str] = {}  # section of its file -> ours, for a key that no row has

    def row(self, key: str) -> Key | None:
        """The row of a key: by its full name, or by the end of it that is longest."""
        parts = key.lstrip("-").split(".")
        tails = [".".join(parts[first:]) for first in range(len(parts))]
        plain = [tail.replace("-", "_") for tail in tails]
        return next((row for tail in plain for row in self.rows if row.theirs == tail),
                    next((row for row in self.rows if "*" in row.theirs
                          and any(fnmatchcase(tail, row.theirs) for tail in plain)), None))
