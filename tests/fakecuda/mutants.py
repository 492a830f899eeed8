"""The engine with one kind of wait taken out. A mutant changes the process in which it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.harness import Ranks, loopback
from threed.comm import lanes
from threed.comm.lanes import DONE, Handle, OnStream
from threed.engine import underway
from threed.features.offload import run as offload
from threed.features.zero import gradient, storage, weights
from threed.schema import Config


def computation_does_not_wait_for_lanes() -> None:
    OnStream.wait = lambda self: None


def collectives_are_not_waited_for() -> None:
    def wait(self: Handle) -> None:
        self._wait, self._keep, self._done = None, (), None

    Handle.wait = wait


def lane_does_not_wait_for_what_its_job_needs() -> None:
    submit = lanes.StreamLane.submit
    lanes.StreamLane.submit = lambda self, job, after=(): submit(self, job)


def lane_does_not_wait_for_the_step_before() -> None:
    underway.so_far = lambda device: DONE


def memory_of_copies_is_not_held() -> None:
    def copy(into: torch.Tensor, of: torch.Tensor) -> None:
        into.copy_(of, non_blocking=True)  # without record_stream

    offload.copy = weights.copy = gradient.copy = copy


def host_adds_a_piece_before_it_has_arrived() -> None:
    storage.so_far = lambda device: DONE


def host_does_not_wait_for_copies() -> None:
    OnStream.block = lambda self: None


def thread_waits_for_nothing() -> None:
    def run(self: lanes.ThreadLane, job: Callable[[], object], after: Sequence[Handle]) -> Handle:
        job()
        return DONE

    lanes.ThreadLane._run = run


def train(mutant: Callable[[], None] | None, config: Config, steps: int) -> Ranks:
    if mutant is not None:
        mutant()
    return loopback(config, steps)
