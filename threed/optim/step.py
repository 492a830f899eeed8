"""An optimizer's step over flat ranges, and of whole matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from threed.devices import device_of
from threed.optim.base import MatrixOptimizer, Update, View
from threed.optim.registry import optimizer_called, turning


class RangeStep(NamedTuple):
    """A flat range of a step."""

    by: Update
    view: View
    copy: torch.Tensor | None = None  # gets the new weights, too


def step_all(parts: Sequence[RangeStep]) -> None:
    """Step ranges of one unit. Where the device has the numbers, those with the same numbers are one call of
    a kernel for many tensors, if weights and gradients are fp32."""
    together: dict[int, list[RangeStep]] = {}
    for part in parts:
        whole = part.copy is None and not optimizer_called(part.by.config.name).needs_room
        if part.by.device is not None and whole and not _is_narrow(part.view):
            together.setdefault(id(part.by), []).append(part)
        else:
            step(*part)
    for same in together.values():
        by = same[0].by
        optimizer_called(by.config.name).update_all([part.view for part in same], by)


def step(by: Update, view: View, copy: torch.Tensor | None = None) -> None:
    """Update a flat range in place, and write the new weights to `copy`, too, if given. 16-bit weights and
    gradients are converted to fp32 a chunk at a time."""
    optimizer, (weight, grad, state) = optimizer_called(by.config.name), view
    if optimizer.update_any(view, by, copy):
        return
    narrow = _is_narrow(view)
    in_chunks = narrow or copy is not None or optimizer.needs_room
    size = min(device_of(weight.device).chunk, len(weight)) if in_chunks else len(weight)
    scratch = torch.empty(2, size if narrow else 0, device=weight.device)
    for start in range(0, len(weight), max(1, size)):
        part = slice(start, start + size)
        wide = _wide(weight[part], scratch[0])
        optimizer.update(View(wide, _wide(grad[part], scratch[1]),
                              {name: each[part] for name, each in state.items()}), by)
        if weight.dtype != torch.float32:
            weight[part] = wide
        if copy is not None:
            copy[part] = wide


def step_twice(by: Update, view: View, copy: torch.Tensor | None = None) -> torch.Tensor:
    """Update copies of the range first, then the range itself. Returns how many elements of the two
    differ."""
    again = copied(view)
    scratch = torch.empty_like(copy) if copy is not None else None
    step(by, again, scratch)
    step(by, view, copy)
    pairs = [(again.weight, view.weight), *((again.state[name], each) for name, each in view.state.items())]
    if scratch is not None and copy is not None:
        pairs.append((scratch, copy))
    return differing(pairs)


def begin(by: Update, view: View, out: torch.Tensor) -> None:
    """The part `begin` of a step of matrices, of a flat range; what is to be turned is written to `out`, in
    its dtype."""
    optimizer = _turning(by)
    for part, scratch in _chunks(view.grad):
        out[part] = optimizer.begin(View(view.weight[part], _wide(view.grad[part], scratch),
                                         {name: each[part] for name, each in view.state.items()}), by)


def end(by: Update, view: View, turned: torch.Tensor) -> None:
    """The part `end`, of a flat range of a matrix. (`view.grad` is not read.)"""
    optimizer = _turning(by)
    for part, scratch in _chunks(view.weight):
        weight = view.weight[part]
        wide = _wide(weight, scratch)
        optimizer.end(View(wide, view.grad, {name: each[part] for name, each in view.state.items()}),
                      turned[part], by)
        if wide is not weight:
            weight.copy_(wide)


def turn(by: Update, matrix: torch.Tensor) -> torch.Tensor:
    """The part `turn`, of a whole matrix, which may be overwritten."""
    return _turning(by).turn(matrix, by)


def squares(by: Update, turned: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of a turned matrix's step at a learning rate of 1, without decay: fp64, []."""
    rows, columns = turned.shape
    scale = _turning(by).scale(rows, columns, by.config)
    return (torch.linalg.vector_norm(turned, dtype=torch.float32).double() * scale).square()


def differing(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """How many elements of two computations of the same differ."""
    return torch.stack([((one != other) & ~(one.isnan() & other.isnan())).sum()
                        for one, other in pairs]).sum()


def copied(view: View) -> View:
    """A view of memory of its own with the same values."""
    return View(view.weight.clone(), view.grad.clone(),
                {name: each.clone() for name, each in view.state.items()})


def _turning(by: Update) -> MatrixOptimizer:
    optimizer = turning(by.config.name)
    assert optimizer is not None, by.config.name
    return optimizer


def _chunks(flat: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Short parts of a range, and room for each in fp32, which is empty where the range is fp32."""
    size = max(1, min(device_of(flat.device).chunk, len(flat)))
    scratch = torch.empty(size if flat.dtype != torch.float32 else 0, device=flat.device)
    for start in range(0, len(flat), size):
        yield slice(start, start + size), scratch


def _is_narrow(view: View) -> bool:
    return not view.weight.dtype == view.grad.dtype == torch.float32


def _wide(tensor: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The tensor if it is fp32, else an fp32 copy in `scratch`."""
    return tensor if tensor.dtype == torch.float32 else scratch[:len(tensor)].copy_(tensor)
