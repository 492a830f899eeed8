"""Axes: those of the mesh, and what ranks along each divide among them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

# Axis -> what ranks along it divide among them: stages of the model, samples of the batch, tokens of a
# sample, or parameters of a layer. The order is that of text, from the outermost axis.
AXES: dict[str, str] = {"pp": "stages", "dp": "samples", "cp": "tokens", "tp": "parameters"}
# Axes that are shown only where they have more than one rank. An order that leaves one out has it after dp.
QUIET: set[str] = {"cp"}

DATA = ("samples", "tokens")  # what only ranks with data of their own divide
_DIVIDED = ("stages", "samples", "tokens", "parameters")


def axes_of(what: str) -> tuple[str, ...]:
    """The axes along which ranks divide this: stages, samples, tokens or parameters."""
    return tuple([axis for axis, divides in AXES.items() if divides == what])


def spanned(over: Iterable[str]) -> tuple[str, ...]:
    """Axes, and all axes of what ranks along them divide, such as tokens; each once."""
    return _spanned(tuple(over), tuple(AXES.items()))


@cache
def _spanned(over: tuple[str, ...], _: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """`_`: the rows of AXES, to which scripts add."""
    return tuple(dict.fromkeys(axis for each in over
                               for axis in (axes_of(each) if each in _DIVIDED else (each,))))


def data_axes() -> tuple[str, ...]:
    """The axes whose ranks have data of their own, and over which ZeRO works: of samples and of tokens."""
    return spanned(DATA)


def shown(sizes: Mapping[str, int]) -> list[str]:
    """The axes that texts show. `sizes`: ranks along each, or what else there is of it."""
    return [axis for axis in AXES if axis not in QUIET or sizes.get(axis, 1) > 1]


def in_full(order: Sequence[str]) -> tuple[str, ...]:
    """An order of axes, with the quiet ones that it leaves out."""
    missing = [axis for axis in AXES if axis in QUIET and axis not in order]
    after = order.index("dp") + 1 if "dp" in order else len(order)
    return (*order[:after], *missing, *order[after:])
