"""Compute: what one rank measures alone: products, element-wise kernels and attention on its device; copies
between device and host, the disk, and the host's optimizer step."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from threed.calibration.clock import Stopwatch
from threed.calibration.grid import Grid
from threed.calibration.points import Computed
from threed.comm.lanes import Lane, StreamLane, ThreadLane, copy
from threed.devices import device_of
from threed.optim import step as optimizer
from threed.optim.base import Update, View
from threed.optim.registry import optimizer_called
from threed.schema import OptimizerConfig
from threed.spec.kernels import AttentionKernel, Kernel, Moved, Product
from threed.tensor.disk import Disk
from threed.tensor.pool import aligned

LAUNCHES = 1000


class Compute:
    """What one rank measures alone. Each method returns points, or bytes a second."""

    def __init__(self, grid: Grid, device: torch.device):
        self.grid, self.device = grid, device
        self.clock, self.host = Stopwatch(device), Stopwatch(torch.device("cpu"))

    def products(self, dtype: torch.dtype) -> list[Computed]:
        """All sizes in the type that the machine is for, and some in the other: a CPU without units for 16
        bits takes long for them."""
        narrow = dtype.itemsize < 4
        some = 1 if dtype == device_of(self.device).dtype else 2
        points = []
        for m, n, k in self.grid.products[::some]:
            left, right = self._numbers(m, k, dtype=dtype), self._numbers(n, k, dtype=dtype).t()
            seconds = self.clock.seconds(lambda a=left, b=right: torch.mm(a, b), self.grid.point_s)
            points.append(_computed("products in 16 bits" if narrow else "products", f"{m} x {n} x {k}",
                                    Product(m, n, k), dtype.itemsize, seconds))
        return points

    def element_wise(self) -> list[Computed]:
        """A sum, which reads two tensors and writes a third, and an activation."""
        points = []
        for numel in self.grid.moved:
            x, y = self._numbers(numel), self._numbers(numel)
            for what, call, tensors in (("sum", lambda x=x, y=y: x + y, 3),
                                        ("gelu", lambda x=x: F.gelu(x), 2)):
                seconds = self.clock.seconds(call, self.grid.point_s)
                kernel = Moved(what, tensors * x.nbytes, 0, exponentials=(2 * numel * (what == "gelu"), 0))
                points.append(_computed("element-wise", f"{what} of {numel}", kernel, 4, seconds))
        return points

    def attention(self, dtype: torch.dtype) -> list[Computed]:
        points = []
        for sequences, heads, seq, size in self.grid.attention:
            q, k, v = (self._numbers(sequences, heads, seq, size, dtype=dtype).requires_grad_()
                       for _ in range(3))
            kernel = AttentionKernel(sequences, heads, heads, seq, size)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            given = torch.ones_like(out)

            def forward(q=q, k=k, v=v) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            def backward(out=out, q=q, k=k, v=v, given=given) -> None:
                torch.autograd.grad(out, (q, k, v), given, retain_graph=True)

            what = f"{sequences * heads} heads of {size}, {seq} tokens"
            for back, call in ((False, forward), (True, backward)):
                seconds = self.clock.seconds(call, self.grid.point_s)
                points.append(_computed("attention", what + ", backward" * back, kernel, dtype.itemsize,
                                        seconds, back))
        return points

    def launch_s(self) -> float:
        """The host's time for a small kernel, in a graph of autograd."""
        x = self._numbers(16).requires_grad_()
        def launch() -> None:
            for _ in range(LAUNCHES):
                x.mul(x)

        seconds = self.host.seconds(launch, self.grid.point_s)
        device_of(self.device).synchronize()
        return seconds / LAUNCHES

    def link(self) -> tuple[float, float]:
        """Bytes a second of copies to the device and from it, the slower of both; and the share of it that
        each has while they go both ways."""
        up, down = self._copies(), self._copies()[::-1]
        alone = max(self.clock.seconds(lambda way=way: copy(*way), self.grid.point_s) for way in (up, down))
        lane: Lane = (StreamLane if device_of(self.device).asynchronous else partial(ThreadLane, "link"))(
            self.device)

        def both() -> None:
            handle = lane.submit(lambda: copy(*down))
            copy(*up)
            handle.wait()

        seconds = self.clock.seconds(both, self.grid.point_s)
        lane.close()
        return self.grid.copied / alone, min(1.0, alone / seconds)

    def _copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of the device and of the host."""
        pinned = device_of(self.device).asynchronous
        host = torch.zeros(self.grid.copied, dtype=torch.uint8, pin_memory=pinned)
        return torch.zeros_like(host, device=self.device), host

    def step(self) -> float:
        """Bytes a second of AdamW on the host, as the price of STEP counts them: weights and buffers are read
        and written, the gradient is read, and the parameter written."""
        weight, grad, *buffers = (torch.zeros(self.grid.stepped) for _ in range(4))
        by = Update(OptimizerConfig(), 1e-3, 1, True, 1.0)
        adamw = optimizer_called(by.config.name)
        view = View(weight, grad,
                    {buffer.name: each for buffer, each in zip(adamw.buffers, buffers, strict=True)})
        seconds = self.host.seconds(lambda: optimizer.step(by, view), self.grid.point_s)
        return self.grid.stepped * (2 * (adamw.bytes + 4) + 4 + 4) / seconds

    def disk(self, folder: str, rank: int) -> tuple[float, float]:
        """Bytes a second that are written, and read, past the page cache. RunError where the disk fails."""
        disk = Disk(folder, rank)
        memory = aligned(self.grid.disk, torch.uint8, torch.device("cpu"),
                         device_of(self.device).asynchronous)
        try:
            disk.make("calibration", self.grid.disk)
            written = self.host.seconds(lambda: disk.write("calibration", memory), self.grid.point_s)
            read = self.host.seconds(lambda: disk.read("calibration", memory), self.grid.point_s)
        finally:
            disk.close()
        return self.grid.disk / written, self.grid.disk / read

    def _numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


def _computed(kind: str, what: str, kernel: Kernel, element: int, seconds: float,
              backward: bool = False) -> Computed:
    return Computed(kind, what, (kernel,), element, backward, seconds)
