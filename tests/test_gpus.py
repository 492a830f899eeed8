"""How processes come to GPUs: what a fork can do, which GPU a rank takes, on which processors it runs. (Whole
processes on fake GPUs are in tests/fakecuda/test_processes.py.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threed import devices
from threed.base.errors import InputError, RunError
from threed.devices import cuda, forks, host, pick
from threed.devices.cpu import Cpu, CpuDriver
from threed.engine import gpu
from threed.launcher import local as launcher
from threed.tensor import layers
from threed.tensor.shapes import Shapes

BUS = "0000:3b:00.0"


@pytest.fixture
def built_for_cuda(monkeypatch):
    """A process whose torch is built for CUDA; answers(bad, listed, usable) sets what a child would find."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)

    def answers(bad: bool, listed: int, usable: bool = True) -> None:
        cuda._ask.cache_clear()
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: bad)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: listed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable and listed > 0)

    yield answers
    cuda._ask.cache_clear()


# ---------------------------------------------------------------- forks


def test_a_question_is_asked_in_a_child():
    """What it starts ends with the child; a child that dies or hangs has no answer."""
    assert forks.ask(os.getpid, 10) != os.getpid() and forks.ask(lambda: [3, None], 10) == [3, None]
    assert forks.ask(lambda: os.kill(os.getpid(), signal.SIGKILL), 10) is None
    assert forks.ask(lambda: 1 // 0, 10) is None and forks.computes()
    begin = time.monotonic()
    assert forks.ask(lambda: time.sleep(30), 1) is None and time.monotonic() - begin < 10


def test_a_child_has_no_handlers(monkeypatch):
    """A signal to the whole group would be answered by the child, too, as by its parent."""
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    try:
        assert forks.ask(lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, 10) is True
    finally:
        signal.signal(signal.SIGTERM, before)


def test_gpus_of_forks(built_for_cuda, monkeypatch):
    built_for_cuda(False, 4)
    assert cuda.Cuda.driver.for_forks() == launcher.local_world_size("auto") == 4
    assert launcher.local_world_size("cpu") is None
    built_for_cuda(True, 0)  # a CUDA build without a GPU: whoever has asked has done no harm
    assert cuda.Cuda.driver.for_forks() == 0 and launcher.local_world_size("auto") is None
    built_for_cuda(True, 2)
    with pytest.raises(InputError, match="this process has started CUDA, so ranks"):
        cuda.Cuda.driver.for_forks()
    built_for_cuda(False, 2, usable=False)
    with pytest.raises(InputError, match="the driver lists 2 GPUs, but a process that is forked"):
        cuda.Cuda.driver.for_forks()
    built_for_cuda(False, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RunError, match="died, or got no answer within"):
        cuda.Cuda.driver.for_forks()


@pytest.mark.parametrize("device, gpus, ranks, message", [
    ("auto", 8, 8, None), ("auto", 0, 8, None), ("cpu", 2, 8, None), ("cuda", 4, 2, None),
    ("auto", 2, 8, "8 ranks would start on this machine, and each takes a GPU, but it has 2: lower"),
    ("cuda", 0, 1, "torch sees no GPU here")])
def test_gpus_are_enough(device, gpus, ranks, message, monkeypatch):
    monkeypatch.setattr(cuda.CudaDriver, "for_forks", lambda driver: gpus)
    if message is None:
        launcher.check_gpus(device, ranks)
    else:
        with pytest.raises(InputError, match=message):
            launcher.check_gpus(device, ranks)


def test_shapes_ask_for_no_gpu(monkeypatch):
    """torch's own mode asks at each entry, which starts CUDA in a launcher."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    with Shapes():
        assert (torch.ones(3, 4) @ torch.tensor([[1.0]] * 4)).shape == (3, 1)


def test_the_extras_of_megatron_are_hidden(monkeypatch):
    """And only while it is imported; what a script has imported stays."""
    for name in layers.EXTRAS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "apex", sys)
    with layers._without_extras():
        assert sys.modules["apex"] is sys
        for name in set(layers.EXTRAS) - {"apex"}:
            with pytest.raises(ImportError):
                __import__(name)
    assert sys.modules["apex"] is sys and "flash_attn" not in sys.modules


def test_the_compiler_is_not_imported_with_megatron(monkeypatch):
    """It takes two seconds of each start. What megatron-core has compiled is compiled at its first call."""
    code = "import sys, threed.tensor.layers; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    made: list[dict] = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: made.append(settings) or function)
    with layers._without_extras():
        twice = torch.compile(lambda x: 2 * x)
        thrice = torch.compile(dynamic=False)(lambda x: 3 * x)
    assert not made and [twice(1), twice(2), thrice(1)] == [2, 4, 3] and made == [{}, {"dynamic": False}]


# ---------------------------------------------------------------- a rank's GPU


class OtherDriver(CpuDriver):
    usable = True

    def available(self) -> bool:
        return self.usable

    def count(self) -> int:
        return 2


class Other(Cpu):
    """Another accelerator of a machine: a file of its own would hold as much."""

    driver = OtherDriver()
    kind, backend, asynchronous, visible, lister = "xpu", "xccl", True, "ZE_AFFINITY_MASK", "xpu-smi"


def test_another_accelerator_is_a_row(monkeypatch):
    monkeypatch.setitem(devices.KINDS, "xpu", f"{__name__}:Other")
    monkeypatch.setattr(devices, "ACCELERATORS", ("cuda", "xpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick("auto", 1) == pick("xpu", 1) == torch.device("xpu", 1) and pick("cpu", 1).type == "cpu"
    assert isinstance(devices.device_of(torch.device("xpu", 1)), Other)
    assert gpu.clash([("xpu", "", "a"), ("cpu", "", "b")]) == (
        "rank 1 on b sees no GPU, and rank 0 on a has one: see there whether xpu-smi lists GPUs, and what "
        "ZE_AFFINITY_MASK says; run.device=cpu uses none")
    with pytest.raises(InputError, match="local rank 2 has no GPU: there are 2 on this machine"):
        pick("auto", 2)
    devices.device_of.cache_clear()  # other tests know no such device
    monkeypatch.setattr(OtherDriver, "usable", False)
    assert pick("auto", 1).type == "cpu"
    with pytest.raises(InputError, match=r"run\.device=xpu, but torch sees no GPU here"):
        pick("xpu", 0)


def test_one_visible_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, local, chosen in ((8, 3, 3), (1, 0, 0), (1, 3, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert pick("auto", local) == torch.device("cuda", chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="local rank 3 has no GPU: there are 2"):
        pick("auto", 3)


def test_clashes():
    assert not gpu.clash([("cuda", "a", "host0"), ("cuda", "b", "host0"), ("cuda", "c", "host1")])
    assert not gpu.clash([("cpu", "", "host0")] * 2) and not gpu.clash([("cuda", "", "host0")] * 2)
    assert "ranks 0 and 2 have the same GPU, a on host0" in gpu.clash(
        [("cuda", "a", "host0"), ("cuda", "b", "host0"), ("cuda", "a", "host0")])
    assert "rank 1 on host1 sees no GPU, and rank 0 on host0 has one" in gpu.clash(
        [("cuda", "a", "host0"), ("cpu", "", "host1")])


# ---------------------------------------------------------------- the processors beside it


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """A machine of two NUMA nodes, with a GPU beside the second. sysfs(name=text) changes files."""
    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return tmp_path

    (tmp_path / "groups").write_text("")
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    write({"devices/system/node/node0/cpulist": "0-3,8-11", "devices/system/node/node1/cpulist": "4-7,12-15",
           "devices/system/cpu/online": "0-15", f"bus/pci/devices/{BUS}/numa_node": "1"})
    return write


ALL, SECOND = set(range(16)), {4, 5, 6, 7, 12, 13, 14, 15}


def test_processors_beside_a_gpu(sysfs):
    """On another socket, copies to pinned memory take twice the time."""
    root = sysfs({})
    assert gpu.near_cpus(BUS, ALL, root) == SECOND
    assert gpu.near_cpus(BUS, {0, 1, 4, 5}, root) is None, "somebody has bound it"
    assert gpu.near_cpus("0000:99:00.0", ALL, root) is None and gpu.near_cpus("", ALL, root) is None
    small = sysfs({f"bus/pci/devices/{BUS}/numa_node": "-1"})
    assert gpu.near_cpus(BUS, ALL, small) is None, "a small machine"
    assert gpu.near_cpus(BUS, ALL, root / "nothing") is None


@pytest.mark.parametrize("groups, file", [
    ("0::/job", "fs/cgroup/job/cpuset.cpus.effective"), ("0::/outside", "fs/cgroup/cpuset.cpus.effective"),
    ("4:cpuset:/job\n0::/", "fs/cgroup/cpuset/job/cpuset.effective_cpus"),
    ("4:memory:/a\n3:cpuset:/outside", "fs/cgroup/cpuset/cpuset.effective_cpus")])
def test_processors_of_a_job(sysfs, groups, file):
    """Slurm and containers give a part of a machine, which binds nobody."""
    root = sysfs({"groups": groups, file: "2-5"})
    assert gpu.near_cpus(BUS, {2, 3, 4, 5}, root) == {4, 5}
    assert gpu.near_cpus(BUS, {3, 4}, root) is None
    assert gpu.near_cpus(BUS, {4, 5}, sysfs({file: "4-5"})) is None, "all of them are there already"


@pytest.mark.parametrize("groups, files, limit", [
    ("", {}, None), ("0::/", {"memory.max": "max"}, None), ("0::/job", {"job/memory.max": "4096"}, 4096),
    ("0::/job/step", {"job/memory.max": "8192", "job/step/memory.max": "max"}, 8192),
    ("0::/outside", {"memory.max": "4096"}, 4096),
    ("4:cpu,memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "12288"}, 12288),
    ("3:cpuset:/a", {"memory/a/memory.limit_in_bytes": "4096"}, None)])
def test_memory_of_a_job(sysfs, groups, files, limit):
    """Of a container or a job that has less than its machine, as one of its groups says."""
    root = sysfs({"groups": groups, **{f"fs/cgroup/{name}": text for name, text in files.items()}})
    all_ = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.memory_bytes(root) == (all_ if limit is None else limit)


@pytest.mark.parametrize("cpus, hosts, threads", [
    ([range(16)], ["a"], 14), ([range(16)] * 4, ["a"] * 4, 2), ([range(16)] * 2, ["a", "b"], 14),
    ([range(8), range(8, 16)], ["a", "a"], 6), ([range(2)], ["a"], 1), ([range(4)] * 8, ["a"] * 8, 1)])
def test_threads_of_a_step_on_the_host(monkeypatch, cpus, hosts, threads):
    """Beside those that issue kernels, on the processors that a rank shares with others of its host."""
    everywhere = [(name, sorted(each)) for name, each in zip(hosts, cpus, strict=True)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*cpus[0]})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def comm(device: str) -> Any:
        return SimpleNamespace(rank=0, device=torch.device(device), all_gather=lambda mine: everywhere)

    assert gpu.step_threads(comm("cuda"), hosts) == threads
    assert gpu.step_threads(comm("cpu"), hosts) == 0, "torch's"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert gpu.step_threads(comm("cuda"), hosts) == 0, "somebody has chosen"


def test_a_rank_stays_beside_its_gpu(sysfs, monkeypatch):
    """All of its threads do; and they are no more than there are processors for them."""
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2:
        pytest.skip("needs two processors")
    near, far = here[-1:], here[:-1]
    root = sysfs({"devices/system/node/node0/cpulist": ",".join(map(str, far)),
                  "devices/system/node/node1/cpulist": ",".join(map(str, near)),
                  "devices/system/cpu/online": ",".join(map(str, here))})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(
        pci_domain_id=0, pci_bus_id=0x3b, pci_device_id=0))

    def bound() -> tuple[bool, int]:
        torch.set_num_threads(2)
        gpu.stay_beside(torch.device("cuda", 0), root)
        threads = map(int, os.listdir(gpu.THREADS))
        return all(sorted(os.sched_getaffinity(each)) == near for each in threads), torch.get_num_threads()

    assert forks.ask(bound, 30) == [True, 1]
    assert forks.ask(lambda: gpu.stay_beside(torch.device("cpu"), root), 30) is None
    assert sorted(os.sched_getaffinity(0)) == here
