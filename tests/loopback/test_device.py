"""Settings of torch that hold for a rank's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from tests.harness import loopback, same_bits, tiny
from threed.base.errors import ConfigError, InputError
from threed.devices import pick
from threed.engine import device as subject
from threed.engine.device import attention, set_up, shortcomings
from threed.launcher.local import LocalLauncher
from threed.prediction.hardware import peak_tflops
from threed.tensor.products import Way

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Leave this process as it was."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "of the machine")
    for name in ALLOCATOR:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield
    for enable in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp,
                   torch.backends.cuda.enable_cudnn_sdp):
        enable(True)
    for name in ("bf16", "fp16"):
        setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def enabled() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {"flash": cuda.flash_sdp_enabled(), "efficient": cuda.mem_efficient_sdp_enabled(),
            "cudnn": cuda.cudnn_sdp_enabled()}


@pytest.mark.parametrize("others, want", [
    ([], ["flash", "efficient", "cudnn"]), (["run.deterministic=true"], ["flash"]),
    (["run.attention_backend=cudnn"], ["cudnn"]),
    (["run.attention_backend=efficient", "run.deterministic=true"], ["efficient"]),
    (["data.document_mask=true"], ["flash", "efficient"]),
    (["data.document_mask=true", "run.attention_backend=cudnn"], ["cudnn"])])
def test_backends_that_may_run(others, want):
    """Deterministic runs do not get a backward that adds with atomics, unless a config asks for it: then
    torch says that it is not deterministic. Documents do not get a kernel that is planned for each length."""
    before = enabled()
    set_up(tiny(*others))
    assert [name for name, on in enabled().items() if on] == want
    assert others or enabled() == before, "torch's own choice is left alone"
    assert torch.are_deterministic_algorithms_enabled() == ("run.deterministic=true" in others)


def test_the_machine_may_have_a_workspace(monkeypatch):
    """cuBLAS needs a workspace of its own for each stream; a machine that has set one keeps it."""
    set_up(tiny("run.deterministic=true"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == "of the machine"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_up(tiny("run.deterministic=true"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


# ---------------------------------------------------------------- pinned memory

EXACT = "pinned_max_round_threshold_mb:1"


def test_torch_does_not_round_pinned_memory():
    """Torch itself, in a process of its own, has the setting and knows it: 2.6 GB that are pinned would take
    4.3. (A key that torch does not know it passes over.)"""
    code = ("from tests.harness import tiny\n"
            "from threed.devices.settings import PINNED\n"
            "from threed.engine.device import set_up\n"
            "import torch\n"
            "set_up(tiny())\n"
            "print(torch._C._accelerator_getAllocatorSettings())\n"
            "try:\n"
            "    torch._C._accelerator_setAllocatorSettings(f'{PINNED}:many')\n"
            "except ValueError:\n"
            "    print('known')\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={name: value for name, value in os.environ.items() if name not in ALLOCATOR})
    assert done.stdout.split() == [EXACT, "known"], done.stdout + done.stderr


@pytest.mark.parametrize("before, after", [
    ({}, {"PYTORCH_ALLOC_CONF": EXACT}),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
     {"PYTORCH_ALLOC_CONF": f"expandable_segments:True,{EXACT}"}),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,"},
     {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64,{EXACT}"}),
    ({"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:64"},) * 2])
def test_the_machine_may_have_settings_of_the_allocator(before, after, monkeypatch):
    """They stand: torch reads one of the two variables, and what is in it."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        set_up(tiny())
        assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == after


def test_an_older_torch_gets_no_setting(monkeypatch):
    """It refuses settings that it does not know, when memory is pinned first."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    set_up(tiny())
    assert not ALLOCATOR & os.environ.keys()


@pytest.mark.parametrize("others", [[], ["model.kv_heads=4", "precision.dtype=bf16"], ["parallel.tp=2"]])
def test_what_torch_chooses(others):
    set_up(config := tiny(*others))
    assert attention(config, CPU) == "flash"
    assert attention(tiny(*others, "model.attention_dropout=0.1"), CPU) == "math"


@pytest.mark.parametrize("name, others", [
    ("cudnn", []), ("efficient", []), ("flash", ["model.attention_dropout=0.1"])])
def test_what_cannot_run_is_refused(name, others):
    set_up(config := tiny(f"run.attention_backend={name}", *others))
    with pytest.raises(InputError, match=f"run.attention_backend={name} cannot run here.*torch uses math"):
        attention(config, CPU)


@pytest.mark.parametrize("override", ["run.attention_backend=math", "run.attention_backend=sdpa",
                                      "run.deterministic=yes please"])
def test_what_is_no_value(override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        tiny(override)


def test_the_backend_that_was_asked_for_runs(monkeypatch):
    """The choice that is printed is the one that layers get."""
    set_up(tiny("run.attention_backend=flash"))
    q = torch.randn(1, 2, 8, 4)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert any("flash" in event.key for event in profile.key_averages())


def test_a_deterministic_run():
    """On a CPU nothing changes; every operation of a step has a deterministic kernel there."""
    settings = ["precision.dtype=bf16", "model.loss_chunk=5", "zero.stage=3", "parallel.tp=2",
                "parallel.dp=2"]
    plain = loopback(tiny(*settings), 2)
    set_up(config := tiny(*settings, "run.deterministic=true"))
    same_bits([plain, loopback(config, 2)])


def test_devices():
    assert pick("cpu", 0) == CPU
    if not torch.cuda.is_available():
        assert pick("auto", 0) == CPU
        with pytest.raises(InputError, match="torch sees no GPU here"):
            pick("cuda", 0)


def test_collectives_come_first(monkeypatch):
    """NCCL's streams have a high priority, unless the machine says otherwise."""
    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY", raising=False)
    set_up(tiny())
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    set_up(tiny())
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "0"


@pytest.mark.parametrize("asked", ["1", "8"])
def test_lanes_have_queues_of_their_own(asked, monkeypatch):
    """As many as a GPU has, unless the machine says otherwise: 1 is a habit of Megatron's users."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    set_up(tiny())
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", asked)
    set_up(tiny())
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == asked


def test_parts_of_a_product_are_added_in_fp32():
    """torch rounds them to 16 bits by itself, where cuBLAS cuts the dim that is summed over."""
    set_up(tiny("precision.dtype=bf16"))
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.fixture
def gpu(monkeypatch) -> dict[str, Any]:
    """A GPU as `attention` asks for one: the kernel that torch would choose, and how the one for documents is
    called."""
    says: dict[str, Any] = {"chosen": SDPBackend.CUDNN_ATTENTION, "varlen": None, "way": Way.IN_PLACE}
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **others: empty(*sizes, **others))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: says["chosen"].value)
    monkeypatch.setattr(subject, "varlen_call", lambda *_: says["varlen"])
    monkeypatch.setattr(subject, "way_of", lambda *_: says["way"])
    monkeypatch.setattr(subject, "uncompiled", lambda *_: [])
    return says


GPU, MASK = torch.device("cuda", 0), ["precision.dtype=bf16", "data.document_mask=true"]


@pytest.mark.parametrize("chosen", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_documents_take_their_kernel_where_torch_would_choose_another(chosen, gpu):
    gpu.update(chosen=chosen, varlen={"is_causal": True})
    assert attention(tiny(*MASK), GPU) == "varlen" and not shortcomings(tiny(*MASK), GPU)
    gpu["chosen"] = SDPBackend.FLASH_ATTENTION
    assert attention(tiny(*MASK, "run.attention_backend=flash"), GPU) == "varlen"
    for others in (["precision.dtype=bf16"], [*MASK, "model.attention_dropout=0.1"]):
        assert attention(tiny(*others), GPU) in ("flash", "math")
    gpu["chosen"] = SDPBackend.CUDNN_ATTENTION
    assert attention(tiny(*MASK, "run.attention_backend=cudnn"), GPU) == "cudnn"


def test_what_a_run_says_that_torch_cannot_do(gpu):
    gpu["chosen"] = SDPBackend.FLASH_ATTENTION
    assert shortcomings(tiny("precision.dtype=bf16"), GPU) == []
    (line,) = shortcomings(tiny(*MASK), GPU)
    assert line.startswith("data.document_mask: each document is a call of attention (flash)")
    gpu.update(chosen=SDPBackend.MATH, way=Way.ROUNDED)
    fused, rounded = shortcomings(tiny("precision.dtype=bf16"), GPU)
    assert "not fused" in fused and "weight gradients are rounded to bf16" in rounded
    assert shortcomings(tiny(*MASK, "model.attention_dropout=0.1"), GPU) == [rounded]
    assert shortcomings(tiny(*MASK), CPU) == [], "which is for tests, and where that is so by nature"


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", None)])
def test_peaks_of_cards(name, tflops):
    """A card that is plugged in was taken for the board of the same name, which has a third more."""
    assert peak_tflops(name) == tflops


def test_a_gpu_that_is_missing_is_said_before_the_data_are_prepared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="torch sees no GPU here"):
        LocalLauncher(tiny("run.device=cuda", "data.source=/nowhere")).prepare()
