"""AdamW (Loshchilov and Hutter 2019): native.c where all tensors are in host memory, else torch's fused
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from threed.optim import native
from threed.optim.base import Buffer, Optimizer, Update, View

if TYPE_CHECKING:
    from torch import Tensor


class AdamW(Optimizer):
    buffers = Buffer("exp_avg"), Buffer("exp_avg_sq")
    compiled = on_device = True

    def update(self, view: View, by: Update) -> None:
        self.update_all([view], by)

    def update_all(self, views: Sequence[View], by: Update) -> None:
        import torch

        beta1, beta2 = by.config.betas
        device = views[0].weight.device
        if by.device is not None:
            found_inf, divisor, lr, count = by.device
        else:
            # Filled in on the device: a copy of a tensor from the host would wait for the device.
            found_inf, lr, count = None, by.lr, torch.full((), float(by.number), device=device)
            divisor = torch.full((), 1 / by.scale, device=device) if by.scale != 1.0 else None
        # The kernel alone: the rest of torch.optim takes longer than a chunk. It divides by its grad_scale.
        with torch.no_grad():
            torch._fused_adamw_([view.weight for view in views], [view.grad for view in views],
                                [view.state["exp_avg"] for view in views],
                                [view.state["exp_avg_sq"] for view in views], [], [count] * len(views),
                                amsgrad=False, lr=lr, beta1=beta1, beta2=beta2, weight_decay=by.weight_decay,
                                eps=by.config.eps, maximize=False, grad_scale=divisor, found_inf=found_inf)

    def update_any(self, view: View, by: Update, copy: Tensor | None) -> bool:
        """The update in native.c, for fp32 weights in host memory, and a gradient and a copy of any
        precision."""
        import torch

        state = view.weight, view.state["exp_avg"], view.state["exp_avg_sq"]
        everything = (*state, view.grad, *(() if copy is None else (copy,)))
        if (native.ADAMW is None or any(tensor.dtype != torch.float32 for tensor in state)
                or any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in everything)):
            return False
        assert all(tensor.numel() == view.weight.numel() for tensor in everything)
        beta1, beta2 = by.config.betas
        kinds = [native.KINDS[str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""]
                 for tensor in (view.grad, copy)]
        numbers = native.Numbers(
            by.scale, beta1, 1 - beta1, beta2, 1 - beta2, 1 - by.lr * by.weight_decay,
            by.lr / (1 - beta1**by.number), 1 / math.sqrt(1 - beta2**by.number), by.config.eps)
        native.ADAMW(native.Range(*(tensor.data_ptr() for tensor in (*state, view.grad)),
                                  copy.data_ptr() if copy is not None else None, *kinds),
                     view.weight.numel(), by.threads or torch.get_num_threads(), numbers)
        return True
