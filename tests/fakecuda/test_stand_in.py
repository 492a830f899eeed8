"""The fake GPUs themselves: right numbers, and each fault that they claim to find."""

from __future__ import annotations

import math
import signal

import pytest

from tests.fakecuda import programs


def test_numbers_are_the_cpus(fake_gpus):
    assert max(fake_gpus.run(programs.gradients)) < 1e-6


def test_a_host_that_touches_device_memory_dies(fake_gpus):
    assert fake_gpus.outcome(programs.host_touches_device_memory).died == signal.SIGSEGV
    assert fake_gpus.run(programs.two_streams, True) == 1000  # the next process lives


def test_a_missing_wait_is_a_race(fake_gpus):
    assert fake_gpus.outcome(programs.two_streams, False).races == [
        "aten::sum reads on stream 1 of GPU 0 what aten::fill_ wrote on stream 0 of GPU 0"]
    fake_gpus.run(programs.disjoint_parts)


def test_memory_that_another_stream_uses_is_not_handed_out(fake_gpus):
    assert fake_gpus.outcome(programs.reuse, False).value is True
    assert "wrote on" not in "".join(races := fake_gpus.outcome(programs.reuse, False).races) and races
    assert fake_gpus.run(programs.reuse, True) is False
    assert fake_gpus.run(programs.held_copy) is False


def test_freed_memory_is_no_number(fake_gpus):
    assert fake_gpus.run(programs.freed_memory)


def test_copies_of_pinned_memory_end_when_the_host_has_waited(fake_gpus):
    assert fake_gpus.run(programs.copy_down, True) == 8
    assert math.isnan(fake_gpus.run(programs.copy_down, False))
    fake_gpus.run(programs.copy_up, True)
    assert "the host writes to pinned memory" in fake_gpus.outcome(programs.copy_up, False).races[0]
    assert fake_gpus.run(programs.freed_pinned_memory) == 24


@pytest.mark.parametrize("program, words", [
    (programs.devices_mixed, "Expected all tensors to be on the same device"),
    (programs.host_and_device_mixed, "Expected all tensors to be on the same device"),
    (programs.time_of_an_event_that_nobody_waited_for, "device not ready"),
    (programs.no_such_device, "invalid device ordinal"),
    (programs.recorded_on_the_default_stream, "non-default stream"),
    (programs.number_read_in_a_graph, "not permitted when stream is capturing"),
    (programs.shape_by_data_in_a_graph, "not permitted when stream is capturing"),
    (programs.pageable_copy_in_a_graph, "a copy that blocks the host"),
    (programs.host_waits_in_a_graph, "to wait for a device"),
    (programs.outside_event_in_a_graph, "capture isolation"),
    (programs.spoilt_graph_ends, "previous error during capture"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_gpu_refuses_is_refused(program, words, fake_gpus):
    assert words in fake_gpus.outcome(program).error


def test_an_event_comes_late(fake_gpus):
    assert fake_gpus.run(programs.event_comes_late) == [False] * 3 + [True] * 3


def test_a_graph_does_nothing_until_it_is_replayed(fake_gpus):
    assert fake_gpus.run(programs.replayed) == [0, 48, 96, 192]


def test_graphs_of_a_pool_share_its_memory(fake_gpus):
    assert fake_gpus.run(programs.pool_is_reused) == (True, 33)
    assert not fake_gpus.run(programs.reads_what_was_freed) >= 0  # no number


def test_a_replay_can_race(fake_gpus):
    assert "what aten::add wrote" in fake_gpus.outcome(programs.race_of_a_replay).races[0]


def test_what_happens_is_counted(fake_gpus):
    counts = fake_gpus.run(programs.counted)
    assert counts.pop("launches") > 0
    assert counts == {"copies down": 2, "copies up": 1, "blocking copies": 1, "pageable copies": 1,
                      "numbers read": 1, "stream synchronisations": 1}
