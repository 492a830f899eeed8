"""A micro-batch on its way to a GPU."""

from __future__ import annotations

import pytest
import torch

from threed.tensor.context import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_batch_on_the_gpu_is_the_batch():
    window = torch.randint(0, 1000, (3, 9))
    batch = Batch(window[:, :-1], window[:, 1:], torch.tensor([5, 6, 7]), 0, 24)
    with torch.cuda.stream(torch.cuda.Stream()):
        moved = batch.to(torch.device("cuda"))
        for name in ("tokens_BS", "labels_BS", "samples_B"):
            assert torch.equal(getattr(moved, name).cpu(), getattr(batch, name))
