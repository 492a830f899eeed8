"""The engine with one kind of wait taken out. A mutant changes the process in which it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.harness import Ranks, loopback
from threed.comm import lanes
from threed.comm.lanes import DONE, Handle, OnStream
from threed.engine import underway
from threed.features.offload import run as offload
from threed.features.zero import clip, gradient, storage, updates, weights
from threed.features.zero.clip import Clipped
from threed.optim.balance import Balance
from threed.optim.base import OnDevice
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


def a_skipped_step_is_an_update() -> None:
    def finish_step(self: updates.UpdateCount, clipped: Clipped) -> None:
        clipped.taken = torch.ones_like(clipped.taken)
        finish(self, clipped)

    finish, updates.UpdateCount.finish_step = updates.UpdateCount.finish_step, finish_step


def _with_numbers(**changes: Callable[[Any], Any]) -> None:
    """Change the numbers that the device has of an update."""
    right = updates.UpdateCount.due_on_device

    def due_on_device(self: updates.UpdateCount, clipped: Clipped) -> OnDevice:
        due = right(self, clipped)
        return due._replace(**{name: change(getattr(due, name)) for name, change in changes.items()})

    updates.UpdateCount.due_on_device = due_on_device


def a_skipped_step_is_taken() -> None:
    _with_numbers(found_inf=torch.zeros_like)


def gradients_are_not_clipped() -> None:
    _with_numbers(divisor=torch.ones_like)


def the_rate_is_of_the_last_step_that_was_counted() -> None:
    def due_on_device(self: updates.UpdateCount, clipped: Clipped) -> OnDevice:
        uncounted, self._uncounted = self._uncounted, type(self._uncounted)()
        due, self._uncounted = right(self, clipped), uncounted
        return due

    right, updates.UpdateCount.due_on_device = updates.UpdateCount.due_on_device, due_on_device


def the_host_reads_before_it_has_come() -> None:
    clip.so_far = lambda device: DONE


def a_skipped_step_moves_biases() -> None:
    right = Balance.update
    Balance.update = lambda self, view, by: right(self, view, by._replace(device=None))


def train(mutant: Callable[[], None] | None, config: Config, steps: int) -> Ranks:
    if mutant is not None:
        mutant()
    return loopback(config, steps)
