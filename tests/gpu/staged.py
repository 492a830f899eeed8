"""Several ranks on one GPU, or on none: their tensors travel over gloo, by way of the host.

NCCL wants a GPU a rank. Everything else is as in a run on GPUs: streams, pinned memory, the device's
allocator.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.harness import drive
from tests.reference import Picks
from threed.comm.group import Channel, Comm
from threed.comm.lanes import Handle
from threed.comm.process import ProcessComm, ProcessGroup, file_store
from threed.engine.device import set_up
from threed.engine.engine import Engine
from threed.engine.loopback import channel_pairs
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config

TIMEOUT_S = 120.0
# Of each rank. It is sent to a process: a function of a module, or a partial of one.
Work = Callable[[Engine, Comm], Any]


class StagedGroup(ProcessGroup):
    """A group whose collectives have copies on the host."""

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle:
        host = tensor.cpu()
        handle = super()._all_reduce(host, op)
        return _then(handle, lambda: tensor.copy_(host))

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                        scratch: torch.Tensor | None) -> Handle:
        part, flat = torch.empty(output.numel(), dtype=output.dtype), output.view(-1)
        handle = super()._reduce_scatter(part, tensor.cpu(), False, None)
        return _then(handle, lambda: flat.add_(part.to(flat.device)) if add else flat.copy_(part))

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        host = torch.empty(output.shape, dtype=output.dtype)
        handle = super()._all_gather(host, tensor.cpu())
        return _then(handle, lambda: output.copy_(host))

    def _exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                  takes: Sequence[int]) -> Handle:
        host = torch.empty(output.shape, dtype=output.dtype)
        handle = super()._exchange(host, tensor.cpu(), gives, takes)
        return _then(handle, lambda: output.copy_(host))


class StagedChannel(Channel):
    def __init__(self, channel: Channel):
        super().__init__(channel._sent)
        self._channel = channel

    def _send(self, tensor: torch.Tensor) -> Handle:
        return self._channel._send(tensor.cpu())

    def recv(self, tensor: torch.Tensor) -> Handle:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _then(self._channel.recv(host), lambda: tensor.copy_(host))


def _then(handle: Handle, finish: Callable[[], Any]) -> Handle:
    def wait() -> None:
        handle.wait()
        finish()

    return Handle(wait)


class StagedComm(ProcessComm):
    def __init__(self, config: Config, rank: int, device: torch.device, store: str):
        super().__init__(make_mesh(config), rank, torch.device("cpu"), TIMEOUT_S,
                         file_store(store, config.world_size))
        self.device = device
        self.groups = {name: StagedGroup(name, group.ranks, rank, self.sent,
                                         group.process_group)  # pyright: ignore[reportAttributeAccessIssue]
                       for name, group in self.groups.items()}

    def open_channels(self, pairs: Sequence[tuple[int, int, str]]) -> None:
        super().open_channels(pairs)
        self.channels = {key: StagedChannel(channel) for key, channel in self.channels.items()}


def on_rank(rank: int, store: str, config: Config, work: Work, over_nccl: bool) -> Any:
    """What `work` returns on a rank."""
    torch.set_num_threads(1)
    set_up(config)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    plan = make_plan(config)
    comm = (ProcessComm(make_mesh(config), rank, device, TIMEOUT_S, file_store(store, config.world_size))
            if over_nccl else StagedComm(config, rank, device, store))
    try:
        comm.open_channels(channel_pairs(plan))
        return work(Engine(Analysis(plan), comm), comm)
    finally:
        comm.close()


@cache
def _processes(number: int, deterministic: bool) -> ProcessPoolExecutor:
    """Processes that are kept: they are spawned, since a process that has used a GPU cannot be forked.
    `deterministic`: a process is so for good."""
    pool = ProcessPoolExecutor(number, get_context("spawn"))
    atexit.register(pool.shutdown, wait=False, cancel_futures=True)
    return pool


def on_ranks(config: Config, work: Work, over_nccl: bool = False) -> list[Any]:
    """What `work` returns on every rank of a config."""
    number = config.world_size
    with tempfile.TemporaryDirectory(prefix="threed-test-") as scratch:
        store, pool = str(Path(scratch) / "store"), _processes(number, config.run.deterministic)
        futures = [pool.submit(on_rank, rank, store, config, work, over_nccl) for rank in range(number)]
        return [future.result(TIMEOUT_S * 2) for future in futures]


def trained(steps: int, picks: Picks | None, engine: Engine, comm: Comm) -> Any:
    """A rank's numbers and parts, on the host."""
    losses, norms, *both, places, here, sent, evaluated = drive(engine.config, engine, comm, steps,
                                                                 picks=picks)
    grads, weights = ({unit: part.cpu() for unit, part in parts.items()} for parts in both)
    return losses, norms, grads, weights, places, here, sent, evaluated


def ranks(config: Config, steps: int, over_nccl: bool = False, picks: Picks | None = None) -> list[Any]:
    """The results of `trained` on every rank of a config."""
    return on_ranks(config, partial(trained, steps, picks), over_nccl)
