"""AdamW (Loshchilov and Hutter 2019): native.c where all tensors are in host memory, else torch's fused
kernel.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from threed.optim import native
from threed.optim.base import Buffer, Optimizer, Update, View

if TYPE_CHECKING:
    from torch import Tensor, dtype


class AdamW(Optimizer):
    buffers = Buffer("exp_avg"), Buffer("exp_avg_sq")
    compiled = True

    def update(self, view: View, by: Update) -> None:
        import torch

        beta1, beta2 = by.config.betas
        # The kernel alone: the rest of torch.optim takes longer than a chunk. It divides by its grad_scale.
        # Its numbers are filled in on the device: a copy of a tensor from the host would wait for the device.
        count = torch.full((), float(by.number), device=view.weight.device)
        divisor = torch.full((), 1 / by.scale, device=view.weight.device) if by.scale != 1.0 else None
        with torch.no_grad():
            torch._fused_adamw_([view.weight], [view.grad], [view.state["exp_avg"]],
                                [view.state["exp_avg_sq"]], [], [count], amsgrad=False, lr=by.lr,
                                beta1=beta1, beta2=beta2, weight_decay=by.weight_decay, eps=by.config.eps,
                                maximize=False, grad_scale=divisor, found_inf=None)

    def update_any(self, view: View, by: Update, copy: Tensor | None) -> bool:
        """The update in native.c, with torch's number of threads, for fp32 weights in host memory, and a
        gradient and a copy of any precision."""
        import torch

        weight, grad, count = view.weight, view.grad, view.weight.numel()
        state = weight, view.state["exp_avg"], view.state["exp_avg_sq"]
        everything = (*state, grad) if copy is None else (*state, grad, copy)
        # (Loops in place of generators: a rank has dozens of small ranges.)
        if native.ADAMW is None:
            return False
        for tensor in state:
            if tensor.dtype != torch.float32:
                return False
        for tensor in everything:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                return False
            assert tensor.numel() == count
        beta1, beta2 = by.config.betas
        numbers = native.Numbers(
            by.scale, beta1, 1 - beta1, beta2, 1 - beta2, 1 - by.lr * by.weight_decay,
            by.lr / (1 - beta1**by.number), 1 / math.sqrt(1 - beta2**by.number), by.config.eps)
        into, kind = (None, native.KINDS[""]) if copy is None else (copy.data_ptr(), _kind(copy.dtype))
        native.ADAMW(native.Range(weight.data_ptr(), state[1].data_ptr(), state[2].data_ptr(),
                                  grad.data_ptr(), into, _kind(grad.dtype), kind),
                     count, torch.get_num_threads(), numbers)
        return True


@cache
def _kind(of: dtype) -> int:
    return native.KINDS[str(of).removeprefix("torch.")]
