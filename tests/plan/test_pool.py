"""Buffers that are shared in turn."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from threed.tensor.pool import Pool


@pytest.mark.parametrize("for_disk", [False, True])
def test_buffers_have_versions_of_their_own(for_disk):
    """What is written into one buffer does not count as a change of another, or of what autograd saves of
    it."""
    pool = Pool({8: 2}, torch.float32, torch.device("cpu"), for_disk=for_disk)
    one, other = pool.take(8), pool.take(6)
    version = one._version
    other.fill_(1.0)
    assert one._version == version and other.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
    pool.give(other)
    pool.take(8).fill_(2.0)
    assert one._version == version and not one.any()


def test_wider_numbers():
    """They take as many more elements of a buffer, which comes back as it was."""
    pool = Pool({8: 1, 16: 1}, torch.bfloat16, torch.device("cpu"))
    for numel, dtype in ((6, torch.float32), (12, torch.bfloat16), (3, torch.float32), (8, None)):
        buffer = pool.take(numel, dtype)
        assert (buffer.dtype, buffer.numel()) == (dtype or torch.bfloat16, numel)
        assert torch.equal(pool.sample(numel, dtype), buffer)
        size = numel * buffer.itemsize // 2
        with pytest.raises(IndexError):
            pool.take(size)
        pool.give(buffer)
        assert pool.take(size).data_ptr() == buffer.data_ptr()
        pool.give(buffer)


def test_a_lane_writes_while_pieces_are_computed_again():
    """GATHER fills the next unit's buffer while a piece of this unit is computed again from its parameters.
    """
    pool = Pool({64: 2}, torch.float32, torch.device("cpu"))
    weight, other = pool.take(64), pool.take(64)
    over = threading.Event()

    def gather() -> None:
        while not over.is_set():
            other.fill_(1.0)

    lane = threading.Thread(target=gather)
    lane.start()
    try:
        for _ in range(300):
            x = torch.ones(64, requires_grad=True)
            checkpoint(lambda x, weight: (x * weight.view(64)).sin() * weight, x, weight,
                       use_reentrant=False).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    finally:
        over.set()
        lane.join()
