"""A fact about a machine and its GPU: a function that is asked, and says a line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LIMIT_S = 40  # of one fact


class Missing(Exception):
    """The machine does not have what a fact is about."""


class At(NamedTuple):
    """Where facts are asked."""

    device: torch.device
    small: bool  # sizes that a CPU can take

    def of(self, large: int, small: int) -> int:
        return small if self.small else large


Ask = Callable[[At], str]


class Fact(NamedTuple):
    ask: Ask
    gpu: bool  # it is about a GPU
    alone: bool  # it wants a process that has not used the GPU, and changes its settings

    @property
    def name(self) -> str:
        return self.ask.__name__


class Facts(list[Fact]):
    """The facts of a module, in its order."""

    def add(self, gpu: bool = True, alone: bool = False) -> Callable[[Ask], Ask]:
        def keep(ask: Ask) -> Ask:
            self.append(Fact(ask, gpu, alone))
            return ask

        return keep


def took(work: Callable[[], Any], times: int = 10, warm: int = 2) -> float:
    """Seconds of a call on the GPU, a mean."""
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def bf16(at: At, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=at.device, dtype=torch.bfloat16)


def of_cuda() -> None:
    if torch.version.cuda is None:
        raise Missing("torch is built without CUDA")
