"""Settings of torch that hold for a rank's process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.harness import loopback, same_bits, tiny
from threed.engine.device import attention, pick_device, set_up
from threed.errors import ConfigError, InputError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Leave this process as it was."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "of the machine")
    yield
    for enable in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp,
                   torch.backends.cuda.enable_cudnn_sdp):
        enable(True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def enabled() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {"flash": cuda.flash_sdp_enabled(), "efficient": cuda.mem_efficient_sdp_enabled(),
            "cudnn": cuda.cudnn_sdp_enabled()}


@pytest.mark.parametrize("others, want", [
    ([], ["flash", "efficient", "cudnn"]), (["run.deterministic=true"], ["flash"]),
    (["run.attention_backend=cudnn"], ["cudnn"]),
    (["run.attention_backend=efficient", "run.deterministic=true"], ["efficient"])])
def test_backends_that_may_run(others, want):
    """Deterministic runs do not get a backward that adds with atomics, unless a config asks for it: then
    torch says that it is not deterministic."""
    before = enabled()
    set_up(tiny(*others))
    assert [name for name, on in enabled().items() if on] == want
    assert others or enabled() == before, "torch's own choice is left alone"
    assert torch.are_deterministic_algorithms_enabled() == ("run.deterministic=true" in others)


def test_the_machine_may_have_a_workspace(monkeypatch):
    """cuBLAS needs a workspace of its own for each stream; a machine that has set one keeps it."""
    import os

    set_up(tiny("run.deterministic=true"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == "of the machine"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_up(tiny("run.deterministic=true"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


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
    assert pick_device(tiny("run.device=cpu"), 0) == CPU
    if not torch.cuda.is_available():
        assert pick_device(tiny(), 0) == CPU
        with pytest.raises(InputError, match="torch sees no GPU here"):
            pick_device(tiny("run.device=cuda"), 0)
