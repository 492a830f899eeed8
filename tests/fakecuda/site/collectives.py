"""torch.distributed's backend "nccl" over gloo. Each group has a stream of its own on the device, on which
its calls run in the order in which they are issued. As NCCL does, a call comes after what the current stream
has done so far; `wait` makes the current stream come after the call, and does not block the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

SUM = dist.ReduceOp.SUM


class Work:
    """A call that is under way. `keep`: tensors whose memory it uses."""

    _streams: ClassVar[dict[tuple[int, int], Any]] = {}

    def __init__(self, group: Any, keep: Any, run: Callable[[], Any]):
        key = id(group), torch.cuda.current_device()
        stream = self._streams.get(key) or self._streams.setdefault(key, torch.cuda.Stream(priority=-1))
        stream.wait_stream(torch.cuda.current_stream())
        self.keep, self.done = keep, torch.cuda.Event()
        with torch.cuda.stream(stream):
            run()
            self.done.record()

    def wait(self) -> bool:
        torch.cuda.current_stream().wait_event(self.done)
        self.keep = None
        return True

    def is_completed(self) -> bool:
        return self.done.query()


class OverGloo:
    """torch.distributed's functions, for tensors of a device; others go to gloo's own. `device` has `peek`
    (device -> host) and `poke` (host -> device), which run on the current stream."""

    def __init__(self, device: Any):
        self.device = device
        self.rank: int | None = None  # of this process
        self.plain = {name: getattr(dist, name) for name in ("init_process_group", "new_group", "all_reduce")}
        self.send, self.recv = dist.ProcessGroup.send, dist.ProcessGroup.recv

    def install(self) -> None:
        dist.init_process_group, dist.new_group = self._init_process_group, self._new_group
        for over, names in ((self._all_reduce, ("all_reduce",)),
                            (self._all_gather, ("all_gather_single", "all_gather_into_tensor")),
                            (self._reduce_scatter, ("reduce_scatter_single", "reduce_scatter_tensor"))):
            for name in names:  # each version of torch has some of them
                if hasattr(dist, name):
                    setattr(dist, name, _for_devices(getattr(dist, name), over))
        dist.ProcessGroup.send = lambda *args: self._send(*args)
        dist.ProcessGroup.recv = lambda *args: self._recv(*args)

    # -------- groups

    def _init_process_group(self, backend: str, *args: Any, **more: Any) -> None:
        self.rank = more.get("rank")
        self.plain["init_process_group"]("gloo" if "nccl" in backend else backend, *args, **more)

    def _new_group(self, ranks: Any = None, timeout: Any = None, backend: Any = None, **more: Any) -> Any:
        return self.plain["new_group"](ranks, timeout, "gloo" if backend == "nccl" else backend, **more)

    # -------- calls

    def _all_reduce(self, plain: Any, tensor: torch.Tensor, op: Any = SUM, group: Any = None) -> Work:
        def run() -> None:
            host = self.device.peek(tensor.detach())
            plain(host, op, group)
            self.device.poke(tensor.detach(), host)

        return Work(group, tensor, run)

    def _all_gather(self, plain: Any, output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> Work:
        def run() -> None:
            host = torch.empty(output.numel(), dtype=output.dtype)
            plain(host, self.device.peek(tensor.detach()).view(-1), group)
            self.device.poke(output.detach(), host.view(output.shape))

        return Work(group, (output, tensor), run)

    def _reduce_scatter(self, _: Any, output: torch.Tensor, tensor: torch.Tensor, op: Any = SUM,
                        group: Any = None) -> Work:
        def run() -> None:
            host = self.device.peek(tensor.detach()).view(-1)
            self.plain["all_reduce"](host, op, group)
            mine = host.view(-1, output.numel())[dist.get_rank(group)]
            self.device.poke(output.detach(), mine.clone().view(output.shape))

        return Work(group, (output, tensor), run)

    def _send(self, group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        if not tensor.is_cuda:
            return self.send(group, tensors, peer, tag)
        return Work(group, tensor,
                    lambda: self.send(group, [self.device.peek(tensor.detach())], peer, tag).wait())

    def _recv(self, group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        (tensor,) = tensors
        if not tensor.is_cuda:
            return self.recv(group, tensors, peer, tag)

        def run() -> None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.recv(group, [host], peer, tag).wait()
            self.device.poke(tensor, host)

        return Work(group, tensor, run)


def _for_devices(plain: Callable[..., Any], over: Callable[..., Work]) -> Callable[..., Any]:
    """A function of torch.distributed that is `over` where its first argument is a tensor of a device."""
    def call(first: torch.Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
        if not first.is_cuda:
            return plain(first, *args, async_op=async_op, **more)
        work = over(plain, first, *args, **more)
        return work if async_op else work.wait()

    return call
