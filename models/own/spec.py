"""Spec: how a layer is made, before any rank has made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from threed.base.errors import InputError, line_of


class Spec:
    """A layer that each rank makes for itself, if it holds it: `make(*args, **kwargs)`, a torch module.

    A layer is called with what the layer before it returned: a tensor, or a tuple, list or dictionary of
    tensors. The first layer is called with the inputs of the samples. `forward(module, x)`, if given, is
    called in place of the module.

    `tied`: a name; the layers with this name have all parameters in common. Or {name: path}: only the
    parameter at this path of each module, such as {"word": "embed.weight"}.

    `adamw`: paths of matrices of torch.nn.Linear that AdamW steps where an optimizer of matrices (muon) turns
    the others: such as those of a head.

    >>> threed.Spec(torch.nn.Linear, 64, 64, bias=False)
    """

    def __init__(self, make: Callable[..., torch.nn.Module], /, *args: Any,
                 tied: str | Mapping[str, str] | None = None,
                 forward: Callable[[torch.nn.Module, Any], Any] | None = None,
                 adamw: Sequence[str] = (), **kwargs: Any):
        if not callable(make) or isinstance(make, torch.nn.Module):
            have = f"a {type(make).__name__}" if not callable(make) else "a module that is made already"
            raise InputError(f"Spec has {have}: give a class of modules and its arguments, such as "
                             "Spec(torch.nn.Linear, 64, 64), so that each rank makes only what it holds")
        if forward is not None and not callable(forward):
            raise InputError(f"Spec({_name(make)}, forward={forward!r}): give a function of the module and "
                             "its input")
        ties = {tied: ""} if isinstance(tied, str) else tied
        if ties is not None and not (isinstance(ties, Mapping) and ties and all(
                isinstance(each, str) for pair in ties.items() for each in pair)):
            raise InputError(f"Spec({_name(make)}, tied={tied!r}): give a name, or a dictionary from "
                             'names to paths of parameters, such as {"word": "embed.weight"}')
        if isinstance(adamw, str) or not all(isinstance(each, str) for each in adamw):
            raise InputError(f"Spec({_name(make)}, adamw={adamw!r}): give a list of paths of parameters, "
                             'such as ["output.weight"]')
        self.adamw = tuple(adamw)
        self.make, self.args, self.kwargs, self.forward = make, args, kwargs, forward
        self.ties: Mapping[str, str] = dict(ties or {})
        self.name = _name(make)

    def module(self, label: str) -> torch.nn.Module:
        """A new module. `label`: the layer, in an InputError where it cannot be made."""
        try:
            module = self.make(*self.args, **self.kwargs)
        except Exception as error:
            raise InputError(f"layer {label}: {_call(self)} failed: {type(error).__name__}: {error}"
                             f"{line_of(error)}") from error
        if not isinstance(module, torch.nn.Module):
            raise InputError(f"layer {label}: {_call(self)} returned a {type(module).__name__}, and must "
                             "return a torch.nn.Module")
        return module

    def call(self, module: torch.nn.Module, x: Any) -> Any:
        return module(x) if self.forward is None else self.forward(module, x)

    def like(self, other: Spec) -> bool:
        """Whether it makes the same modules, as far as can be seen."""
        try:
            return bool(self is other or (self.make, self.args, self.kwargs, self.forward)
                        == (other.make, other.args, other.kwargs, other.forward))
        except Exception:  # arguments that cannot be compared, such as tensors
            return False

    def tied_as(self, path: str) -> str | None:
        """The name under which a parameter is shared; None where it is not."""
        return next((name if only else f"{name}.{path}" for name, only in self.ties.items()
                     if only in ("", path)), None)


def _name(make: Any) -> str:
    return getattr(make, "__name__", None) or type(make).__name__


def _call(spec: Spec) -> str:
    return f"{spec.name}({', '.join([*map(_short, spec.args), *spec.kwargs])})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 30 else type(value).__name__
