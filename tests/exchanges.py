"""An all-to-all of rows, whose right answer is known without it."""

from __future__ import annotations

import torch

from threed.comm.group import Group

# Rows that each of three ranks (a line) gives to each: uneven, none, all to itself.
GIVES = ((2, 0, 3), (1, 4, 0), (0, 5, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def row(giver: int, taker: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[giver, taker], [number, 7]], dtype=dtype)


def exchanged(group: Group, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What has arrived at this rank, and what should have: [rows, 2, 2]."""
    me, gives = group.rank(), GIVES[group.rank()]
    takes = [row[me] for row in GIVES]
    given = torch.stack([row(me, to, number, dtype) for to, count in enumerate(gives)
                         for number in range(count)]).to(device)
    output = torch.full((sum(takes), 2, 2), 99, dtype=dtype, device=device)
    group.exchange(output, given, gives, takes).wait()
    want = torch.stack([row(of, me, number, dtype) for of, count in enumerate(takes)
                        for number in range(count)])
    return output.cpu(), want


def sent(me: int, dtype: torch.dtype) -> int:
    """Bytes that leave a rank."""
    return (sum(GIVES[me]) - GIVES[me][me]) * 4 * dtype.itemsize
