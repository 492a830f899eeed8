"""Hardware: what one device, its links and its host can do. Files of configs/hardware have one machine each;
`threed calibrate` writes one for the machine that it runs on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from threed.base.errors import InputError
from threed.base.mesh import GROUPS, Mesh
from threed.base.quantity import many
from threed.base.words import nearest, same
from threed.schema import key

FOLDER = Path(__file__).parent.parent / "configs" / "hardware"
DEFAULT, OF_CPUS = "a100-sxm", "cpu-core"


@dataclass(frozen=True)
class Hardware:
    """One kind of machine. Rates are those of the data sheet; the efficiencies are the shares of them that
    large kernels and messages reach. Gbit/s count one direction."""

    name: str = "unnamed"
    # ---- a device
    tflops: float = key(312.0, "peak of products in 16 bits, without sparsity")
    tflops_fp32: float = key(19.5, "and in fp32")
    efficiency: float = key(0.7, "share of the peak that large products reach")
    sustained: float = key(0.0, "share of the peak that products reach where a device computes nothing else: "
                           "then its clock falls. Up to 80% of the time `efficiency` holds. 0: always")
    attention_efficiency: float = key(0.5, "share of the peak that attention in one kernel reaches")
    attention_half_size: float = key(0.0, "size of a head that reaches half of that share; 0: all alike")
    attention_backward: float = key(1.0, "rate of attention's backward, over that of its forward")
    attention_passes: float = key(0.0, "0: attention is one kernel. Above: software before such kernels, "
                                  "whose forward reads or writes the matrix of [S, S] so many times (and "
                                  "backward 1.3 times as often)")
    units: int = key(108, "that compute tiles of a product at the same time")
    tile: int = key(128, "a unit computes tiles of 2 tile x tile numbers; 1: no tiles")
    half_dim: float = key(0.0, "shortest dim of a product that reaches half of its efficiency; 0: all alike")
    exponential_ns: float = key(0.0, "of an exponential; 0: they take no time of their own, as on a GPU")
    memory_gb: float = key(80.0, "GB of memory")
    memory_gbps: float = key(16312.0, "Gbit/s of memory")
    memory_efficiency: float = key(0.8, "share of it that element-wise kernels reach")
    fused_rate: float = key(1.0, "rate of kernels of fused pieces, over that of element-wise kernels")
    column_efficiency: float = key(1.0, "rate of sums over tokens, over that of element-wise kernels")
    scatter_efficiency: float = key(1.0, "and of rows that are added up where their tokens say")
    kernel_us: float = key(3.0, "from the end of a kernel to the end of an empty one")
    launch_us: float = key(6.0, "of the host, for a kernel that it launches")
    # The driver takes 2.5, and 0.001 a kernel (developer.nvidia.com/blog, "Constant Time Launch for
    # Straight-Line CUDA Graphs", 2024); the rest is Python's. Not measured: bench.gpu.facts, `graphs`, will.
    graph_us: float = key(10.0, "and for a CUDA graph, however many kernels it holds")
    contention: float = key(0.1, "seconds that computation loses to a second of a collective beside it; 1: "
                            "nothing is computed meanwhile")
    waits: bool = key(False, "whether the host waits for each kernel, as on a CPU. Then `devices` are "
                      "processors, which the ranks of a run share, however many there are")
    host_us: float = key(0.0, "of a host that waits, for an instruction")
    context_gb: float = key(0.5, "GB of memory for CUDA and its libraries")
    communicator_gb: float = key(0.6, "GB of memory for a NCCL communicator (NVIDIA/nccl, issue 964: 0.54 GB "
                                 "for 2 ranks of an A100 node, 0.69 GB for more)")
    free_share: float = key(0.05, "share of a device's memory that stays free: an allocator loses some to "
                            "fragmentation, and kernels use some inside")
    # ---- links
    devices: int = key(8, "of a node")
    node_gbps: float = key(2400.0, "Gbit/s that a device sends to others of its node")
    node_efficiency: float = key(0.75, "share of it that large messages reach")
    node_us: float = key(5.0, "of a message inside a node")
    adapters: float = key(8.0, "network adapters of a node")
    adapter_gbps: float = key(200.0, "Gbit/s of an adapter")
    adapter_efficiency: float = key(0.75, "share of it that large messages reach")
    adapter_us: float = key(12.0, "of a message between nodes")
    exchange_efficiency: float = key(1.0, "rate of large all-to-alls, over that of other large messages: "
                                     "inside a node, and between nodes")
    # ---- the host
    host_gbps: float = key(800.0, "Gbit/s of host memory that the optimizer step of one rank reaches, alone "
                           "on its node")
    host_all_gbps: float = key(2600.0, "and those of all ranks of a node together, which share its memory")
    host_memory_gb: float = key(1000.0, "GB of a node")
    host_free_share: float = key(0.1, "share of it that stays free, for the processes themselves and for the "
                                 "system's caches")
    link_gbps: float = key(200.0, "Gbit/s between device and host, one way alone")
    link_both: float = key(0.82, "share of it that each way keeps while copies go both ways")
    read_gbps: float = key(24.0, "Gbit/s that a rank reads from its disk")
    write_gbps: float = key(12.0, "Gbit/s that a rank writes to its disk")
    dollars: float = key(0.0, "an hour of one device; 0: not known")

    @classmethod
    def parse(cls, text: str, default: str = DEFAULT) -> Hardware:
        """'h100-sxm,adapter_gbps=100' -> Hardware: a name of configs/hardware or a file, then single
        numbers. Without a name, `default`."""
        first, *rest = text.split(",") if text else [""]
        if first and "=" in first:
            first, rest = "", [first, *rest]
        values: dict[str, Any] = {}
        for part in filter(None, rest):
            name, _, value = part.partition("=")
            try:
                values[name] = float(value)
            except ValueError:
                raise InputError(f"hardware={text}: '{part}' must be a name with a number, such as "
                                 "adapter_gbps=200") from None
        return _checked(load(first or default), values, f"hardware={text}")

    @property
    def title(self) -> str:
        return (f"{self.name}: {self.tflops:g} TFLOPS, {self.memory_gb:g} GB, "
                f"{many(self.devices, 'device')} a node")

    @property
    def node_ranks(self) -> float:
        """Ranks of a node: one a device; on a CPU any number."""
        return math.inf if self.waits else self.devices

    def taken_bytes(self, communicators: int) -> int:
        """Bytes of a device that are taken before a run asks for any, by so many communicators a rank."""
        return round((self.context_gb + communicators * self.communicator_gb) * 1e9)

    @property
    def memory_bytes(self) -> int:
        """Of a device."""
        return round(self.memory_gb * 1e9)

    def usable_bytes(self, memory: int) -> int:
        """Of so many bytes of a device's memory, those that may be in use at a peak."""
        return round(memory * (1.0 - self.free_share))

    @property
    def host_bytes(self) -> int:
        """Of a node's host."""
        return round(self.host_memory_gb * 1e9)

    @property
    def usable_host_bytes(self) -> int:
        """Of a node's memory, those that its ranks may use together."""
        return round(self.host_bytes * (1.0 - self.host_free_share))

    def host_rate(self, ranks: float) -> float:
        """Bytes a second of host memory that each of so many ranks of a node has for its optimizer step."""
        together = min(ranks, self.devices) if self.waits else ranks  # more take turns
        return min(self.host_gbps, self.host_all_gbps / together) * 1e9 / 8

    def peak(self, element: int) -> float:
        """FLOPs a second of products, at an element's bytes."""
        return 1e12 * (self.tflops if element < 4 else self.tflops_fp32)


_NAMES = tuple(item.name for item in fields(Hardware))
NUMBERS = tuple(name for name in _NAMES if name != "name")
_MAY_BE_0 = ("sustained", "attention_half_size", "attention_passes", "contention", "half_dim",
             "exponential_ns", "kernel_us", "launch_us", "graph_us", "host_us", "node_us", "adapter_us",
             "context_gb", "communicator_gb", "free_share", "host_free_share", "dollars")
SHARES = ("efficiency", "sustained", "contention", "attention_efficiency", "memory_efficiency",
          "node_efficiency", "adapter_efficiency", "column_efficiency", "scatter_efficiency", "free_share",
          "host_free_share", "link_both")


def names() -> list[str]:
    """Of the hardware files that threed has."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def named_as(device: str) -> str | None:
    """The name of the hardware file for a GPU, by what it calls itself: "NVIDIA H100 80GB HBM3". Cards that
    are plugged in are slower: there is none for them."""
    words = device.upper().replace("-", " ").split()
    if "PCIE" in words or "NVL" in words:
        return None
    return next((name for name in names() if name.split("-")[0].upper() in words), None)


# Peaks of cards that are plugged in, in TFLOPS: less than those of boards of the same name (data sheets).
_CARDS = {"H100 PCIe": 756.0, "H100 NVL": 835.0, "H200 NVL": 835.0}


def peak_tflops(device: str) -> float | None:
    """Peak of a GPU in 16 bits, without sparsity, by what it calls itself; None: not known."""
    card = next((peak for name, peak in _CARDS.items() if name in device), None)
    board = next((name for name in names() if name != OF_CPUS and name.split("-")[0].upper() in device), None)
    return card or (load(board).tflops if board else None)


def load(name: str) -> Hardware:
    """A hardware file by its name in configs/hardware, or by its path."""
    own = name in names() or not Path(name).exists()
    path = FOLDER / f"{known}.yaml" if own and (known := same(name, names())) else Path(name)
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        near = nearest(name, names(), 0.7)
        meant = f"; did you mean {near}?" if near else "."
        raise InputError(f"hardware={name}: there is no such file, and threed has none of this name{meant} "
                         f"There are {', '.join(names())}; threed calibrate -o my.yaml measures a machine, "
                         "or change single numbers of one of them: a100-sxm,memory_gb=24") from None
    except (OSError, ValueError, OmegaConfBaseException, YAMLError) as error:
        raise InputError(f"hardware={name}: {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"hardware={name}: {path} must have a name and a number on each line")
    return _checked(Hardware(name=path.stem), values, str(path))


def _checked(hardware: Hardware, values: dict[Any, Any], where: str) -> Hardware:
    """`hardware` with other values. InputError where one has no meaning."""
    for name, value in values.items():
        if name not in _NAMES:
            raise InputError(f"{where}: '{name}' is not one of {', '.join(_NAMES)}")
        if name == "name" or (name == "waits" and isinstance(value, bool)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{where}: {name}={value} must be a number")
        if not value >= 0 or (value == 0 and name not in _MAY_BE_0):
            raise InputError(f"{where}: {name}={value} must be above 0")
        if name in SHARES and value > 1:
            raise InputError(f"{where}: {name}={value} is a share, at most 1")
        if name in ("devices", "units", "tile"):
            if value != int(value):
                raise InputError(f"{where}: {name}={value} must be a whole number")
            values = {**values, name: int(value)}
    return replace(hardware, **values)


class GroupPlace:
    """How the ranks of a group lie: how many, on how many nodes, and how many of them on each."""

    def __init__(self, ranks: Sequence[int], devices: float):
        self.ranks = len(ranks)
        self.nodes = len({rank // devices for rank in ranks})
        self.together = max(1, self.ranks // self.nodes)


def places(mesh: Mesh, devices: float, names: Iterable[str] = GROUPS) -> dict[str, GroupPlace]:
    """The place of rank 0's group of each kind: meshes are regular, so the others lie alike."""
    return {name: GroupPlace(mesh.group(name, 0), devices) for name in names if GROUPS[name].needed(mesh)}
