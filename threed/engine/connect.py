"""Connect: the first call on every communicator, in an order that all ranks share."""

from __future__ import annotations

import torch

from threed.comm.group import Comm


def warm(comm: Comm) -> None:
    """Send a number through every group and channel. NCCL connects the ranks of a communicator at their first
    call. Here that happens in an order that all ranks share, not at different points of their first step."""
    number = torch.zeros(1, device=comm.device)
    for group in comm.groups.values():
        group.all_reduce(number).wait()
    for (sender, _, _), channel in comm.channels.items():
        (channel.send(number) if comm.here.position == sender else channel.recv(number)).wait()
