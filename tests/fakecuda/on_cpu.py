"""The tests of tests/loopback that stay on the CPU where the others have fake GPUs (everywhere.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LOOPBACK = Path(__file__).parents[1] / "loopback"
# What a test here is about, where that is not the device: file, or file::test, and why it stays on the CPU.
ON_CPU: dict[str, str] = {
    "test_agree.py::test_who_takes_the_compiled_step": "the compiled step is the CPU's",
    "test_balance.py::test_memory_of_the_rows_that_come": "it measures a CPU's memory",
    "test_checkpoint.py::test_a_copy_of_one_moment": "it holds up a lane's thread; a GPU's is a stream",
    "test_checkpoint.py::test_a_step_waits_for_its_copy": "as above",
    "test_experts.py::test_for_whom_ranks_wait": "it holds up a lane's thread; a GPU's is a stream",
    "test_extending_models.py": "its guides are scripts, which begin before fake GPUs are there",
    "test_context.py::test_attention_is_that": "its tensors are a CPU's; test_contract.py has cp here",
    "test_context.py::test_gradients_of_keys": "as above",
    "test_context.py::test_other_documents": "as above",
    "test_context.py::test_heads_have_the_bits": "as above",
    "test_context_order.py::test_attention_is_that": "as above",
    "test_context_runs.py::test_sequences_of_four": "it measures a CPU's memory",
    "test_context_runs.py::test_what_attention": "as above",
    "test_context_overlap.py::test_graphs": "it records on a CPU",
    "test_context_overlap.py::test_kept_by_a_forward": "it measures a CPU's memory",
    "test_context_overlap.py::test_peak": "as above",
    "test_context_overlap.py::test_what_is_held": "as above",
    "test_documents.py::test_cell": "16-bit attention is plain here, and rounds more than the reference's",
    "test_fused.py::test_compiled": "inductor does not know fake GPUs; make kernels compiles for a GPU",
    "test_fused.py::test_what_a_compiler_lacks": "as above",
    "test_graphs.py": "it records on a CPU; tests/fakecuda/test_graphs.py does here",
    "test_hugging_face.py": "it joins the tensors of ranks that are on several GPUs",
    "test_late_lanes.py": "it makes threads late; what a stream does is always late here",
    "test_loopback.py": "it is about the transport of threads",
    "test_lora.py::test_kept_by_a_forward": "it measures the memory of a CPU's attention",
    "test_lora_files.py": "as test_hugging_face.py",
    "test_loss_kernel.py": "Triton's interpreter runs on a CPU",
    "test_pieces.py": "Triton's interpreter runs on a CPU, and separate operations are compared there",
    "test_measure.py": "it measures a CPU's memory",
    "test_memory.py": "it measures a CPU's memory",
    "test_mutation.py": "it replaces the lanes of a CPU by others",
    "test_native.py": "it is about code of the CPU",
    "test_offload.py::test_equal_to_the_device": "bits of a CPU's update; a GPU's kernel rounds otherwise",
    "test_offload.py::test_evaluation_in_between": "as above",
    "test_offload.py::test_tiers_stages_and_overlaps_are_equal_to_the_bit": "as above",
    "test_overlap.py::test_late_and_copied": "it makes threads late; what a stream does is always late here",
    "test_overlap.py::test_the_host_adds": "bits of a CPU's update; test_next_is_none has the rest",
    "test_overlap.py::test_to_the_bit": "as above",
    "test_offload_memory.py": "it measures a CPU's memory",
    "test_own_layers.py::test_cell[odd": "its loss resizes an output, as memory of fake GPUs cannot be",
    "test_own_layers.py::test_cell[vit-pp=2-dp=2-schedule=zb-h1-dtype=bf16": "16-bit attention is plain here",
    "test_own_layers.py::test_flat_over_steps": "its loss resizes an output",
    "test_own_layers.py::test_kept_is_what_the_plan_says": "it measures a CPU's memory",
    "test_prediction.py": "it measures time",
    "test_parity.py::test_mesh": "each mesh has fake GPUs in cells of test_contract.py",
    "test_release.py::test_an_engine_leaves_nothing[graphs": "it records on a CPU",
    "test_saved.py": "it measures a CPU's memory",
    "test_schedules.py::test_random_files": "orders of a file have fake GPUs in test_file",
    "test_schedules.py::test_sample": "each schedule has fake GPUs in cells of test_contract.py",
    "test_search.py": "it has no device",
    "test_travel.py::test_graphs": "it records on a CPU",
    "test_traffic.py": "it has no device",
    "test_transient.py": "it measures a CPU's memory",
    "test_verify.py::test_a_backward_in_two_halves": "on a GPU one bit is within the tolerance",
    "test_verify.py::test_a_message_that_comes_wrong": "as above",
    "test_verify.py::test_a_wrong": "as above",
    "test_verify.py::test_one_bit": "as above",
    "test_zero.py::test_dtypes": "NCCL's sums of 16-bit numbers have 16 bits",
}


def stays(item: Any) -> str:
    """Why an item of pytest stays on the CPU; "" for one of loopback that does not."""
    if item.path.parent != LOOPBACK:
        return "it is no test of tests/loopback"
    name = f"{item.path.name}::{item.name}"
    return next((why for place, why in ON_CPU.items() if name.startswith(place)), "")
