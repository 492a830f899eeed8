"""An optimizer's step over a flat range."""

from __future__ import annotations

import torch

from threed.devices import device_of
from threed.optim.base import Update, View
from threed.optim.registry import optimizer_called


def step(by: Update, view: View, copy: torch.Tensor | None = None) -> None:
    """Update a flat range in place, and write the new weights to `copy`, too, if given. 16-bit weights and
    gradients are converted to fp32 a chunk at a time."""
    optimizer, (weight, grad, state) = optimizer_called(by.config.name), view
    if optimizer.update_any(view, by, copy):
        return
    narrow = not weight.dtype == grad.dtype == torch.float32
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
    again = View(view.weight.clone(), view.grad.clone(),
                 {name: each.clone() for name, each in view.state.items()})
    scratch = torch.empty_like(copy) if copy is not None else None
    step(by, again, scratch)
    step(by, view, copy)
    pairs = [(again.weight, view.weight), *((again.state[name], each) for name, each in view.state.items())]
    if scratch is not None and copy is not None:
        pairs.append((scratch, copy))
    return torch.stack([((one != other) & ~(one.isnan() & other.isnan())).sum()
                        for one, other in pairs]).sum()


def _wide(tensor: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The tensor if it is fp32, else an fp32 copy in `scratch`."""
    return tensor if tensor.dtype == torch.float32 else scratch[:len(tensor)].copy_(tensor)
