"""Kinds of parameter units: which parameters of a compute unit are one. A new kind is a row of KINDS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from threed.base.errors import InputError
from threed.base.mesh import FOLDS
from threed.base.remember import remembered
from threed.models.model import own_parameters, tied_parameters
from threed.models.tiling import model_key, unit_layers
from threed.optim.registry import elementwise, turning
from threed.schema import Config
from threed.spec.parameter import Parameter

OWN, TIED = "own", "tied"  # what no other kind takes of a compute unit; what two of them use


class UnitKind(NamedTuple):
    takes: Callable[[Config, Parameter], bool]  # whether a parameter of a compute unit is of this kind
    may_be_all: bool  # False: where all parameters of a compute unit are of this kind, they are its own
    optimizer: str = ""  # what steps it, of threed/optim/registry.py; empty: as `stepped_by` says
    dtype: str = ""  # of its weights, as compute reads them; empty: precision.dtype
    beside: bool = False  # whether there are any only in compute units of which some matrices are turned


class UnitParameters(NamedTuple):
    """A parameter unit of a model."""

    kind: str
    user: int  # the compute unit; of a tied one, the last that uses it
    parameters: tuple[Parameter, ...]


def persists(config: Config, parameter: Parameter) -> bool:
    """Whether a parameter stays whole from its first use in a step to its last, for any zero.residency."""
    return config.zero.stage < 3 or parameter.numel < (config.zero.persist_below or 0)


def small(config: Config, parameter: Parameter) -> bool:
    """Whether a parameter stays whole beside others that do not."""
    return config.zero.stage >= 3 and persists(config, parameter)


def fold_of(parameters: Sequence[Parameter]) -> str:
    """The axis of FOLDS over which the parameters of a unit are cut; "" for none. InputError for two."""
    found = sorted({axis for parameter in parameters for axis in parameter.axes if axis in FOLDS})
    if found and any(parameter.axes != (found[0],) for parameter in parameters):
        names = ", ".join(each.name for each in parameters if each.axes != (found[0],))
        raise InputError(f"{parameters[0].name} is cut over {found[0]}, for which ranks are numbered in a "
                         f"way of its own, and {names} is in the same unit, but cut otherwise: cut what is "
                         f"cut over {found[0]} over nothing else")
    return found[0] if found else ""


def turns(config: Config, parameter: Parameter) -> bool:
    """Whether the optimizer turns the matrices of a parameter."""
    return bool(parameter.matrices) and parameter.trains and turning(config.optimizer.name) is not None


def stepped_by(config: Config, parameters: Sequence[Parameter]) -> str:
    """What steps a parameter unit; empty: the config's optimizer."""
    name = elementwise(config.optimizer.name)
    return "" if name == config.optimizer.name or turns(config, parameters[0]) else name


def _plain(config: Config, parameter: Parameter) -> bool:
    """Of what no matrix is turned, and which no kind takes whatever the optimizer."""
    return not turns(config, parameter) and not parameter.counted and parameter.trains


# In the order of their numbers. A parameter is of the last kind that takes it. What a kind takes may depend
# on the keys of `depends_on` alone.
KINDS: dict[str, UnitKind] = {
    "small": UnitKind(persists, False),  # under ZeRO-3
    "adapters": UnitKind(lambda config, parameter: config.model.lora_rank is not None and parameter.trains,
                         True),  # the others are frozen
    "folded": UnitKind(lambda config, parameter: bool(fold_of([parameter])), True),
    # A step moves them by less than 16 bits can hold.
    "counted": UnitKind(lambda config, parameter: parameter.counted > 0, True, "balance", "fp32"),
    # Beside matrices that are turned: what is stepped element by element.
    "plain": UnitKind(lambda config, parameter: _plain(config, parameter) and not fold_of([parameter])
                      and not small(config, parameter), False, beside=True),
    "plain_small": UnitKind(lambda config, parameter: _plain(config, parameter) and not fold_of([parameter])
                            and small(config, parameter), False, beside=True),
    "plain_folded": UnitKind(lambda config, parameter: _plain(config, parameter)
                             and bool(fold_of([parameter])), False, beside=True),
}


def depends_on(config: Config) -> object:
    """What the parameter units of a config depend on."""
    return (model_key(config), config.zero.stage, config.zero.persist_below,
            turning(config.optimizer.name) is not None)


@remembered(depends_on)
def parameter_units(config: Config) -> dict[int, UnitParameters]:
    """Parameter unit -> what it is. Its number is that of its compute unit if it is that one's own. A tied
    embedding has the number after the last compute unit; after it come as many numbers as there are compute
    units for each of KINDS."""
    model_layers, runs = unit_layers(config)
    units, last = {len(runs): UnitParameters(TIED, len(runs) - 1, tied_parameters(model_layers))}, len(runs)
    for user, (first, stop) in enumerate(runs):
        parts = divided(config, [p for layer in model_layers[first:stop] for p in own_parameters(layer)])
        units[user] = UnitParameters(OWN, user, parts.pop(OWN))
        for block, kind in enumerate(KINDS):
            units[last + 1 + block * last + user] = UnitParameters(kind, user, parts.get(kind, ()))
    return {number: unit for number, unit in sorted(units.items()) if unit.parameters}


def divided(config: Config, parameters: Sequence[Parameter]) -> dict[str, tuple[Parameter, ...]]:
    """Kind -> those of a compute unit's parameters that are of it."""
    parts, some = {}, any(turns(config, p) for p in parameters)
    for name, kind in reversed(KINDS.items()):
        if kind.beside and not some:
            continue
        mine = [kind.takes(config, p) for p in parameters]
        if kind.may_be_all or not all(mine):
            parts[name] = tuple(p for p, taken in zip(parameters, mine, strict=True) if taken)
            parameters = [p for p, taken in zip(parameters, mine, strict=True) if not taken]
    return {**parts, OWN: tuple(parameters)}
