"""Kinds of faults. Each is a function from a trial, whose `rng` it draws from, to a Fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.sister import SISTERS
from tests.chaos.trial import Fault, Trial


@dataclass(frozen=True)
class Kind:
    name: str
    weight: int  # of how many in a hundred and some
    draw: Callable[[Trial], Fault]
    sisters: Sequence[str]  # that it is drawn for
    walks: bool  # goes through all sites of the first sister's saves, one after the other, before any others


KINDS: dict[str, Kind] = {}


def kind(name: str, weight: int, sisters: Sequence[str] = tuple(SISTERS),
         walks: bool = False) -> Callable[[Callable[[Trial], Fault]], Callable[[Trial], Fault]]:
    def add(draw: Callable[[Trial], Fault]) -> Callable[[Trial], Fault]:
        KINDS[name] = Kind(name, weight, draw, sisters, walks)
        return draw

    return add


from tests.chaos.faults import disks, files, hosts, links, processes, saves  # noqa: E402, F401  (they fill KINDS)
