"""Calibration without a machine: constants are found again from points that they have made, and their file
loads."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

import threed
from threed.base.errors import InputError
from threed.calibration import grid
from threed.calibration import task as calibration
from threed.calibration.fitted import NARROW, Machine, fitted, table, text
from threed.calibration.points import UNITS, Computed, RankPoints, Sent, errors
from threed.config.load import load as load_config
from threed.planner import make_pipeline, make_plan
from threed.prediction.hardware import Hardware, load
from threed.spec.kernels import AttentionKernel, Moved, Product

CPU = replace(load("cpu-core"), half_dim=6.0, launch_us=9.0, host_us=120.0, contention=0.4, node_us=80.0,
              exchange_efficiency=0.6)
GPU = replace(load("a100-sxm"), efficiency=0.6, memory_efficiency=0.7, attention_efficiency=0.4,
              exchange_efficiency=1.3)
RATES = {"step": 1e10, "alone": 1.5e10, "link": 5e9, "both": 0.8,
         "read": 1e9, "write": 5e8, "launch": 6e-6, "contention": 0.4,
         "context": 3e8, "memory": 8.5e10}


def points(hardware: Hardware, cuda: bool) -> list[Computed]:
    """What `hardware` would take for everything on a grid."""
    sizes = grid.grid(cuda, False)
    found = [Computed(kind, "", (Product(*each),), element, False, 0.0)
             for kind, element in (("products", 4), (NARROW, 2)) for each in sizes.products]
    found += [Computed("element-wise", "", (Moved("sum", 12 * each, 0),), 4, False, 0.0)
              for each in sizes.moved]
    found += [Computed("attention", "", (AttentionKernel(sequences, heads, heads, seq, size),),
                       2 if cuda else 4, back, 0.0)
              for sequences, heads, seq, size in sizes.attention for back in (False, True)]
    for layers in sizes.layers:
        config = load_config(None, ["run.device=cpu", "model.layers=2", "model.dropout=0", "parallel.dp=1",
                                    *layers.split()])
        found += [Computed(UNITS, unit.name, unit.kernels, 4, back, 0.0)
                  for unit in make_plan(config, make_pipeline(config)).table.units for back in (False, True)]
    return [point._replace(seconds=point.predicted_s(hardware)) for point in found]


def measured(hardware: Hardware, cuda: bool, ranks: int) -> list[RankPoints]:
    sent = [Sent("all-to-alls" if way == "all_to_all" else "collectives", "", way, size, ranks, ranks, 0.0)
            for way in ("ring", "all_reduce", "message", "all_to_all")
            for size in (128, 1 << 14, 1 << 20, 1 << 25)]
    sent = [point._replace(seconds=point.predicted_s(hardware)) for point in sent]
    return [RankPoints("NVIDIA A100-SXM4-80GB" * cuda, points(hardware, cuda), sent if ranks > 1 else [],
                       dict(RATES)) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cpu(ranks):
    machine = Machine(ranks, 2, "cpu")
    found, fits = fitted(measured(CPU, False, ranks), machine)
    assert all(mean < 0.02 and most < 0.1 for mean, most, _ in errors(fits, found).values()), \
        table(fits, found)
    for name in ("half_dim", "launch_us", "host_us", "exponential_ns"):
        assert getattr(found, name) == pytest.approx(getattr(CPU, name), 0.1), name
    assert found.tflops_fp32 * found.efficiency == pytest.approx(CPU.tflops_fp32 * CPU.efficiency, 0.02)
    assert found.memory_gbps * found.memory_efficiency == pytest.approx(
        CPU.memory_gbps * CPU.memory_efficiency, 0.05)
    assert (found.host_gbps, found.link_gbps, found.read_gbps, found.write_gbps) == (120, 40, 8, 4)
    assert (found.host_all_gbps, found.link_both) == (80 * ranks, 0.8)
    assert (found.devices, found.waits, found.context_gb) == (2, True, 0.3)
    if ranks > 1:
        assert found.node_us == pytest.approx(CPU.node_us, 0.1) and found.contention == 0.4
        assert found.node_gbps * found.node_efficiency == pytest.approx(
            CPU.node_gbps * CPU.node_efficiency, 0.05)
        assert found.exchange_efficiency == pytest.approx(CPU.exchange_efficiency, 0.05)


def test_a_slow_host_is_not_a_slow_gpu():
    """An H100 whose host launches a kernel in 30 us, and attention's backward in 150: small kernels took as
    long, and the fit said that the GPU was a third slower than it is."""
    gpu = replace(load("h100-sxm"), efficiency=0.78, memory_efficiency=0.9, attention_efficiency=0.6)
    host_us = {"attention": (60, 150)}
    slow = [point._replace(seconds=max(point.seconds, 1e-6 * least[point.backward]))
            for point in points(gpu, True) for least in [host_us.get(point.kind, (30, 30))]]
    found, _ = fitted([RankPoints("NVIDIA H100 80GB HBM3", slow, [], dict(RATES))], Machine(1, 16, "cuda"))
    for name in ("efficiency", "memory_efficiency", "attention_efficiency"):
        assert getattr(found, name) == pytest.approx(getattr(gpu, name), 0.02), name


def test_gpu():
    """What is not measured is that of the file of this kind of GPU."""
    found, fits = fitted(measured(GPU, True, 4), Machine(4, 64, "cuda"))
    assert all(most < 0.02 for _, most, _ in errors(fits, found).values()), table(fits, found)
    for name in ("efficiency", "memory_efficiency", "attention_efficiency", "tflops_fp32",
                 "exchange_efficiency"):
        assert getattr(found, name) == pytest.approx(getattr(GPU, name), 0.02), name
    assert (found.name, found.tflops, found.memory_gb) == ("NVIDIA A100-SXM4-80GB", GPU.tflops, 85)
    assert found.adapters == load("a100-sxm").adapters and not found.waits


def test_unknown_gpu():
    """Its peaks are not known, and the prices are what was measured all the same."""
    ranks = [replace(each, device="Other 1") for each in measured(GPU, True, 2)]
    found, fits = fitted(ranks, Machine(2, 64, "cuda"))
    assert found.name == "Other 1"
    assert all(mean < 0.1 for mean, _, _ in errors(fits, found).values()), table(fits, found)


def test_noise():
    """A fit of noisy points says how far it is from them."""
    ranks = measured(CPU, False, 2)
    for each in ranks:
        each.computed = [point._replace(seconds=point.seconds * (1.2 if number % 2 else 0.8))
                         for number, point in enumerate(each.computed)]
    found, fits = fitted(ranks, Machine(2, 2, "cpu"))
    assert 0.1 < errors(fits, found)[UNITS][0] < 0.3


@pytest.mark.parametrize("ranks", [1, 2])
def test_file(ranks, tmp_path):
    """It has the errors as comments, and loads as the hardware that it was made of."""
    machine = Machine(ranks, 2, "cpu")
    found, fits = fitted(measured(CPU, False, ranks), machine)
    path = tmp_path / "my.yaml"
    path.write_text(text(found, fits, machine))
    assert Hardware.parse(str(path)) == found
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any("products" in line and "on average" in line for line in comments)
    assert any("node_*, exchange_efficiency and contention are" in line for line in comments) == (ranks == 1)
    config = threed.load("configs/toy.yaml", ["run.device=cpu"])
    assert threed.predict(config, str(path))["step_time"] > 0


def test_a_rank_measures_with_the_settings_of_a_run(monkeypatch):
    """NCCL's streams have the priority that they have there, when the first communicator is made."""
    seen = {}
    names = "TORCH_NCCL_HIGH_PRIORITY", "CUDA_DEVICE_MAX_CONNECTIONS"
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def connect(*arguments):
        seen.update({name: os.environ.get(name) for name in names})
        raise InputError("no peers here")

    said = []
    monkeypatch.setattr(calibration, "ProcessComm", connect)
    monkeypatch.setattr(calibration, "file_store", lambda *_: None)
    task = calibration.CalibrationTask(grid.grid(False, True), Machine(1, 1, "cpu"), "", "")
    assert calibration.measure(0, task, SimpleNamespace(send=said.append)) == 1
    assert said == [("failed", "no peers here")] and seen == dict(zip(names, ("1", "32"), strict=True))
