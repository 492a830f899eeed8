"""A plugin of pytest: loopback's ranks have fake GPUs, in every test, and a test with a race fails.

    python -m pytest -p tests.fakecuda.everywhere tests/loopback
"""

from __future__ import annotations

import os

import pytest

from tests.fakecuda import build, shim

WHY_NOT = build.missing()
if not WHY_NOT:
    shim.install()

# What a test here is about, where that is not the device: file, or file::test, and why it stays on the CPU.
ON_CPU: dict[str, str] = {
    "test_agree.py::test_who_takes_the_compiled_step": "the compiled step is the CPU's",
    "test_checkpoint.py::test_a_copy_of_one_moment": "it holds up the thread of a lane; a GPU's lane is a stream",
    "test_checkpoint.py::test_a_step_waits_for_its_copy": "as above",
    "test_extending_models.py": "its guides are scripts, which begin before fake GPUs are there",
    "test_fused.py::test_compiled": "inductor does not know fake GPUs; make kernels compiles for a GPU",
    "test_graphs.py": "it records on a CPU; tests/fakecuda/test_graphs.py is this test on fake GPUs",
    "test_hugging_face.py": "it joins the tensors of all ranks in one process, which knows no other ranks' GPUs",
    "test_late_lanes.py": "it makes threads late; what a stream does is always late here",
    "test_loopback.py": "it is about the transport of threads",
    "test_lora.py::test_kept_by_a_forward": "it measures the memory of a CPU's attention",
    "test_lora_files.py": "as test_hugging_face.py",
    "test_loss_kernel.py": "Triton's interpreter runs on a CPU",
    "test_measure.py": "it measures a CPU's memory",
    "test_memory.py": "it measures a CPU's memory",
    "test_native.py": "it is about code of the CPU",
    "test_offload.py::test_equal_to_the_device": "the bits of a CPU's update; a GPU's kernel rounds otherwise",
    "test_offload.py::test_evaluation_in_between": "as above",
    "test_offload_memory.py": "it measures a CPU's memory",
    "test_prediction.py": "it measures time",
    "test_search.py": "it has no device",
    "test_traffic.py": "it has no device",
    "test_transient.py": "it measures a CPU's memory",
}


def pytest_configure(config):
    if WHY_NOT:
        pytest.exit(f"skipped: {WHY_NOT}", returncode=0)
    from tests.fakecuda import transport

    transport.use()


def pytest_collection_modifyitems(items):
    for item in items:
        name = os.path.basename(item.path)
        reasons = [why for place, why in ON_CPU.items() if f"{name}::{item.name}".startswith(place)]
        if reasons:
            item.add_marker(pytest.mark.skip(reason=reasons[0]))


@pytest.fixture(autouse=True)
def _no_race():
    shim.installed.reset()
    yield
    races = shim.installed.races()
    assert not races, "\n".join(sorted(set(races))[:8])
