"""Connect: the first call on every communicator, in an order that all ranks share."""

from __future__ import annotations

import torch

from threed.comm import Comm


def warm(comm: Comm) -> None:
    """A number through every group and channel. NCCL connects two ranks or more at their first call. Let that
    be here, where each rank comes to all of its communicators in one order, and not wherever in a step it
    gets to them first."""
    number = torch.zeros(1, device=comm.device)
    for group in comm.groups.values():
        group.all_reduce(number).wait()
    for (sender, _, _), channel in comm.channels.items():
        (channel.send(number) if comm.here.position == sender else channel.recv(number)).wait()
