"""Devices: all that depends on the kind of device on which a rank computes: streams, events, graphs, pinned
memory, the backend of collectives, figures of memory.

`device_of(torch_device)` is its `Device`. Another accelerator is one file like `cuda`, and a row of KINDS; no
other folder decides by its name. Begin with `device` (what each of them answers), then `cpu` and
`cuda`. `settings` are torch's for a whole process (all kinds at once: each reads its own variables); `forks`
asks what a forked process can do with torch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from threed.base.errors import InputError

if TYPE_CHECKING:
    import torch

    from threed.devices.device import Device

# torch's name of a kind of device, which is its name in run.device, too -> its class. Imported when it is
# needed: to check a config takes no torch.
KINDS = {"cpu": "threed.devices.cpu:Cpu", "cuda": "threed.devices.cuda:Cuda"}
CHOICES = ("auto", *KINDS)  # of run.device; auto: the first accelerator that is there, else the CPU
NAMED = f"{', '.join(CHOICES[:-1])} or {CHOICES[-1]}"
ACCELERATORS = tuple(kind for kind in KINDS if kind != "cpu")


def kind_of(name: str) -> type[Device]:
    """The class of a kind. Devices of other kinds, such as torch's "meta", are as the CPU."""
    module, _, attribute = KINDS.get(name, KINDS["cpu"]).partition(":")
    return getattr(import_module(module), attribute)


@cache
def device_of(device: torch.device) -> Device:
    return kind_of(device.type)(device)


def pick(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank, by its number on its machine. `wanted`: one of CHOICES. InputError where the
    machine does not have it."""
    import torch

    kind = next((name for name in _accelerators(wanted) if kind_of(name).driver.available()), None)
    if kind is None and wanted in ACCELERATORS:
        raise InputError(missing(wanted))
    if kind is None:
        return torch.device("cpu")
    count = kind_of(kind).driver.count()
    if count == 1:  # Slurm's --gpus-per-task=1 and many operators show each rank its own (see engine/gpu)
        return torch.device(kind, 0)
    if local_rank >= count:
        raise InputError(f"local rank {local_rank} has no GPU: there are {count} on this machine; start "
                         "fewer processes a node, or use run.device=cpu")
    return torch.device(kind, local_rank)


def for_forks(wanted: str) -> tuple[str, int]:
    """The kind of device that processes forked from this one would use, and how many of it they can use;
    ("cpu", 0) where they would use none. Errors as from `Driver.for_forks`."""
    counts = ((name, kind_of(name).driver.for_forks()) for name in _accelerators(wanted))
    return next(((name, count) for name, count in counts if count), ("cpu", 0))


def started() -> bool:
    """Whether this process has used an accelerator."""
    return any(kind_of(name).driver.started() for name in ACCELERATORS)


def missing(kind: str) -> str:
    """The message where a config asks for an accelerator, and there is none."""
    return f"run.device={kind}, but torch sees no GPU here; use run.device=auto or cpu"


def _accelerators(wanted: str) -> tuple[str, ...]:
    return ACCELERATORS if wanted == "auto" else tuple(name for name in ACCELERATORS if name == wanted)
