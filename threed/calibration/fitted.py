"""Fitted: from what ranks have measured to the constants of Hardware, and their file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean

from threed.base.quantity import many
from threed.calibration.points import UNITS, Computed, Point, RankPoints, errors, fit
from threed.devices.host import memory_bytes
from threed.prediction.hardware import OF_CPUS, Hardware, load, named_as
from threed.spec.kernels import Moved

NARROW = "products in 16 bits"
LEAST = 1e-6  # a number of a fit below this is 0
ABOVE = 1.1  # nothing that is measured reaches its peak


@dataclass(frozen=True)
class Machine:
    """How a machine was measured."""

    ranks: int
    processors: int
    device: str  # the kind

    @property
    def on_gpus(self) -> bool:
        return self.device != "cpu"


def fitted(measured: Sequence[RankPoints], machine: Machine) -> tuple[Hardware, list[Point]]:
    """The constants, and the points that they were fitted to: means over the ranks."""
    ours = [each for each in measured if each.computed]
    computed = [row[0]._replace(seconds=fmean(point.seconds for point in row))
                for row in zip(*(each.computed for each in ours), strict=True)]
    sent = [row[0]._replace(seconds=fmean(point.seconds for point in row))
            for row in zip(*(each.sent for each in measured), strict=True)]
    rates = {name: fmean(each.rates[name] for each in measured if name in each.rates)
             for name in {name for each in measured for name in each.rates}}
    begin = _gpu if machine.on_gpus else _cpu
    stepping = sum("step" in each.rates for each in measured)  # at the same time
    hardware = replace(begin(computed, rates, machine, measured[0].device),
                       host_gbps=_gbps(rates.get("alone", rates["step"])),
                       host_all_gbps=_gbps(stepping * rates["step"]), link_gbps=_gbps(rates["link"]),
                       link_both=rates["both"], read_gbps=_gbps(rates["read"]),
                       write_gbps=_gbps(rates["write"]), host_memory_gb=memory_bytes() / 1e9)
    hardware, points = (_fit_gpu if machine.on_gpus else _fit_cpu)(computed, hardware)
    if sent:
        exchanges = [point for point in sent if point.way == "all_to_all"]
        others = [point for point in sent if point.way != "all_to_all"]
        hardware = replace(hardware, contention=rates["contention"], node_efficiency=0.9,
                           node_us=1e6 * min(point.alone_s(hardware) for point in others),
                           node_gbps=ABOVE * _gbps(max(point.size / point.alone_s(hardware)
                                                       for point in others)))
        hardware = fit(others, hardware, ("node_efficiency", "node_us"))
        hardware = fit(exchanges, hardware, ("exchange_efficiency",))
    return _rounded(hardware), [*points, *sent]


def _gpu(computed: Sequence[Computed], rates: dict[str, float], machine: Machine, device: str) -> Hardware:
    """What a GPU's fit begins with: the file of its kind, if there is one."""
    known = named_as(device)
    hardware = load(known) if known else Hardware(
        tflops=_tflops(computed, NARROW) / 0.7, tflops_fp32=_tflops(computed, "products") / 0.7,
        memory_gbps=_gbps(_moved(computed) / 0.8))
    return replace(hardware, name=device, launch_us=rates["launch"] * 1e6, memory_gb=rates["memory"] / 1e9)


def _cpu(computed: Sequence[Computed], rates: dict[str, float], machine: Machine, _: str) -> Hardware:
    """What a CPU's fit begins with: peaks a little above what this machine has shown."""
    return replace(load(OF_CPUS), name=f"{_processor()}, {machine.processors} cores",
                   tflops=ABOVE * _tflops(computed, NARROW),
                   tflops_fp32=ABOVE * _tflops(computed, "products"), half_dim=8.0,
                   memory_gbps=_gbps(_moved(computed)), devices=machine.processors,
                   memory_gb=memory_bytes() / 1e9 / machine.processors, context_gb=rates["context"] / 1e9,
                   launch_us=rates["launch"] * 1e6, host_us=100.0, exponential_ns=1.0)


def _fit_gpu(computed: Sequence[Computed], hardware: Hardware) -> tuple[Hardware, list[Computed]]:
    """The peaks are known, and `efficiency` is for 16 bits."""
    for kind, name in ((NARROW, "efficiency"), ("products", "tflops_fp32"),
                       ("element-wise", "memory_efficiency"), ("attention", "attention_efficiency")):
        hardware = fit(_of(computed, kind), hardware, (name,))
    return hardware, list(computed)


def _fit_cpu(computed: Sequence[Computed], hardware: Hardware) -> tuple[Hardware, list[Computed]]:
    """What a unit takes above its products is the time of attention, exponentials, memory and the host. An
    element-wise kernel that runs again and again says little of it: its tensors are in caches."""
    hardware = fit(_of(computed, "products"), hardware, ("efficiency", "half_dim"))
    hardware = fit(_of(computed, "attention", UNITS), hardware,
                   ("efficiency", "attention_efficiency", "exponential_ns", "memory_efficiency", "launch_us",
                    "host_us"))
    hardware = fit(_of(computed, NARROW), hardware, ("tflops",))
    return hardware, [point for point in computed if point.kind != "element-wise"]


def _of(computed: Sequence[Computed], *kinds: str) -> list[Computed]:
    return [point for kind in kinds for point in computed if point.kind == kind]


def _tflops(computed: Sequence[Computed], kind: str) -> float:
    return max(point.kernels[0].flops / point.seconds for point in computed if point.kind == kind) / 1e12


def _moved(computed: Sequence[Computed]) -> float:
    """The highest bandwidth that an element-wise kernel reached, in bytes a second."""
    return max(kernel.forward / point.seconds for point in computed if point.kind == "element-wise"
               for kernel in point.kernels if isinstance(kernel, Moved))


def _gbps(rate: float) -> float:
    return rate * 8 / 1e9


def _processor() -> str:
    """What the kernel calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.machine())


def _rounded(hardware: Hardware) -> Hardware:
    values = {item.name: getattr(hardware, item.name) for item in fields(Hardware)}
    return replace(hardware, **{name: float(f"{value:.3g}") if value >= LEAST else 0.0
                                for name, value in values.items() if isinstance(value, float)})


# ---------------------------------------------------------------- the file


def text(hardware: Hardware, points: Sequence[Point], machine: Machine) -> str:
    """A hardware file, which begins with the errors of the fit."""
    lines = [f"Measured by threed calibrate on {time.strftime('%Y-%m-%d')}: {many(machine.ranks, 'rank')} on "
             f"{'GPUs' if machine.on_gpus else 'CPUs'}, at the same time.",
             "How far the prices are from what they were fitted to:",
             *(f"  {line}" for line in table(points, hardware).splitlines()),
             "adapter_* and dollars are not measured."]
    if machine.ranks == 1:
        lines.append("One rank has no peers: node_*, exchange_efficiency and contention are not measured, "
                     "and host_all_gbps is what it reaches alone.")
    values = {item.name: getattr(hardware, item.name) for item in fields(Hardware)}
    return "\n".join([*(f"# {line}" for line in lines),
                      *(f"{name}: {f'{value:g}' if isinstance(value, float) else json.dumps(value)}"
                        for name, value in values.items())]) + "\n"


def table(points: Sequence[Point], hardware: Hardware) -> str:
    """The errors of a fit, a line a kind of points."""
    return "\n".join(f"{kind:20} {mean:6.1%} on average, {most:6.1%} at most, of {count}"
                     for kind, (mean, most, count) in errors(points, hardware).items())
