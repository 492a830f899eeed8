"""What a group does beside what every step shows: an exchange of rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests import exchanges
from tests.harness import tiny
from threed.comm.group import Comm
from threed.engine.loopback import run_loopback
from threed.models.measure import SilentGroup
from threed.planner import make_mesh, make_plan


@pytest.mark.parametrize("dtype", exchanges.DTYPES, ids=str)
def test_rows_arrive_in_order(dtype):
    """Rows of another rank, in another order, or bytes that are not those that leave a rank."""
    config = tiny("parallel.dp=3", "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=6")

    def work(comm: Comm) -> None:
        before = comm.sent["dp"]
        got, want = exchanges.exchanged(comm.groups["dp"], dtype, comm.device)
        assert torch.equal(got, want)
        assert comm.sent["dp"] - before == exchanges.sent(comm.rank, dtype)

    run_loopback(make_plan(config), make_mesh(config), work)


def test_counts_must_fit():
    group, rows = SilentGroup("tp", range(2), 1, Counter()), torch.zeros(3, 4)
    for gives, takes in (((1, 1), (2, 1)), ((1, 2), (1, 1)), ((3,), (3,)), ((1, 1, 1), (1, 1, 1))):
        with pytest.raises(AssertionError):
            group.exchange(torch.zeros(3, 4), rows, gives, takes)
    assert not group._sent


def test_alone_a_rank_keeps_its_rows():
    group, rows, sent = SilentGroup("tp", range(1), 0, Counter()), torch.rand(3, 4), Counter()
    output = torch.zeros(3, 4)
    group.exchange(output, rows, (3,), (3,)).wait()
    assert torch.equal(output, rows) and not sum(sent.values())
