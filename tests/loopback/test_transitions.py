"""A tensor of a unit that is moved from where it is not: the transition says so, before a number is wrong."""

from __future__ import annotations

import pytest

from tests.harness import FILES, tiny
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.transition import TransitionError
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis

SMALL = ["model.layers=2", "model.hidden=8", "model.heads=2", "model.seq_len=8", "model.vocab=16",
         "model.vocab_multiple=16", "train.global_batch_size=2"]
CPU, NVME = "offload.optimizer=cpu", "offload.optimizer=nvme"
WEIGHTS_CPU, WEIGHTS_NVME = "offload.parameters=cpu", "offload.parameters=nvme"
SETTINGS = {
    **{f"zero{stage}": [f"zero.stage={stage}"] for stage in range(4)},
    **{f"zero{stage}-cpu": [f"zero.stage={stage}", CPU] for stage in range(4)},
    "zero2-cpu-host": ["zero.stage=2", CPU, "offload.gradients=host", "parallel.dp=2"],
    "nvme": ["zero.stage=1", NVME, FILES],
    "weights-cpu": ["zero.stage=3", CPU, WEIGHTS_CPU],
    "weights-nvme": ["zero.stage=3", NVME, WEIGHTS_NVME, FILES],
    "frozen": ["zero.stage=1", "model.lora_rank=2"],
    "frozen-zero3": ["zero.stage=3", "model.lora_rank=2"],
}
W, G, O = "weights", "gradient", "optimizer_state"
LEGAL = [
    ("zero0", W, "whole"),
    ("zero1", W, "gather whole release gather release"),
    ("zero3", W, "gather whole release gather release"),
    ("zero1-cpu", W, "step_output refresh gather release step_output refresh"),
    ("zero3-cpu", W, "gather step_output refresh release"),
    ("weights-cpu", W, "step_output fetch gather fetch whole release gather release fetch"),
    ("weights-nvme", W, "stage fetch gather stage fetch release gather release step_output offload stage"),
    ("frozen", W, "whole"),
    ("frozen-zero3", W, "gather whole release"),
    ("zero0", G, "whole sum_parts reduce sum_copies clip step reduce clip drop"),
    ("zero1", G, "reduce clip step whole reduce clip drop"),
    ("zero2", G, "whole whole reduce whole reduce sum_copies clip step whole reduce clip step"),
    ("zero3", G, "whole sum_parts reduce clip step"),
    ("zero1-cpu", G, "reduce clip offload step reduce clip offload step"),
    ("zero1-cpu", G, "reduce clip drop reduce clip offload step"),
    ("zero2-cpu", G, "whole reduce clip offload step whole reduce clip offload step"),
    ("zero2-cpu-host", G, "whole reduce offload whole reduce offload clip step whole reduce offload clip"),
    ("zero2-cpu-host", G, "whole reduce offload clip drop whole reduce offload clip step"),
    ("nvme", O, "fetch offload fetch offload"),
]
WRONG = [
    ("zero0", W, "", "gather"),  # every rank has all of them
    ("zero0", W, "", "release"),
    ("zero1", W, "", "whole"),  # used before they are gathered, or after their release
    ("zero3", W, "", "whole"),
    ("zero3", W, "gather release", "whole"),
    ("zero1", W, "gather", "gather"),
    ("zero3", W, "gather", "gather"),
    ("zero1", W, "", "release"),
    ("zero3", W, "gather release", "release"),
    ("frozen", W, "", "gather"),
    ("zero3", W, "", "fetch"),  # of what is on the device
    ("zero3", W, "gather", "fetch"),
    ("weights-cpu", W, "", "gather"),  # of what is on the host or the disk
    ("weights-cpu", W, "", "whole"),
    ("weights-cpu", W, "fetch", "fetch"),
    ("weights-cpu", W, "fetch gather release", "gather"),
    ("weights-cpu", W, "", "stage"),
    ("weights-cpu", W, "step_output", "refresh"),
    ("weights-nvme", W, "", "fetch"),  # before it is read
    ("weights-nvme", W, "stage", "gather"),
    ("weights-nvme", W, "stage", "stage"),
    ("weights-nvme", W, "stage", "step_output"),
    ("weights-nvme", W, "", "offload"),
    ("weights-nvme", W, "step_output offload", "offload"),
    ("weights-nvme", W, "step_output", "refresh"),  # to the device, which is not their home
    ("zero1-cpu", W, "", "refresh"),  # before a STEP
    ("zero1-cpu", W, "step_output", "offload"),  # to the disk, which is not their home
    ("zero1-cpu", W, "step_output", "step_output"),
    ("zero2", G, "", "reduce"),  # of nothing
    ("zero3", G, "whole reduce", "reduce"),
    ("zero2", G, "", "sum_parts"),
    ("frozen", G, "", "reduce"),
    ("frozen-zero3", G, "", "reduce"),
    ("zero0", G, "reduce", "reduce"),  # twice
    ("zero1", G, "reduce clip", "reduce"),  # of the next step, before this one's STEP
    ("zero2", G, "whole", "sum_copies"),  # before it is reduced
    ("zero2", G, "whole", "clip"),
    ("zero2", G, "whole reduce", "step"),  # before CLIP
    ("zero2", G, "whole reduce clip step", "step"),
    ("zero2", G, "whole reduce clip drop", "step"),
    ("zero1-cpu", G, "", "offload"),
    ("zero1-cpu", G, "reduce", "offload"),  # before CLIP has read it
    ("zero1-cpu", G, "reduce clip", "step"),  # before it is on the host, where the optimizer steps
    ("zero1-cpu", G, "reduce clip", "reduce"),
    ("zero1-cpu", G, "reduce clip offload", "offload"),
    ("zero1-cpu", G, "reduce clip offload", "reduce"),  # into what the host's STEP reads
    ("zero1-cpu", G, "reduce clip offload step", "step"),
    ("zero2-cpu-host", G, "whole reduce", "clip"),  # before it is on the host, where CLIP reads it
    ("zero2-cpu-host", G, "whole reduce offload whole reduce", "clip"),
    ("zero2-cpu-host", G, "whole reduce offload", "offload"),
    ("zero2-cpu-host", G, "whole reduce offload", "step"),
    ("zero2-cpu-host", G, "whole reduce offload clip", "offload"),
    ("zero1", G, "reduce", "offload"),  # to a host where nothing steps
    ("zero1", O, "", "fetch"),
    ("zero1-cpu", O, "", "fetch"),
    ("zero1-cpu", O, "", "offload"),
    ("nvme", O, "", "offload"),
    ("nvme", O, "fetch", "fetch"),
    ("nvme", O, "fetch offload", "offload"),
]


def moved(settings: str, noun: str, passes: str, raises: str = "") -> str | None:
    """The error of `raises`, after the calls that pass."""
    config = tiny(*SMALL, *SETTINGS[settings])
    plan = make_plan(config)

    def work(comm: Comm) -> str | None:
        engine = Engine(Analysis(plan), comm)
        trains = not settings.startswith("frozen")
        state = next(each for each in engine.states.values() if each.part.unit.trains is trains)
        thing, error = getattr(state, noun), None
        for call in passes.split():
            getattr(thing, call)()
        if raises:
            with pytest.raises(TransitionError) as caught:
                getattr(thing, raises)()
            error = str(caught.value)
            assert state.part.name in error
        engine.close()
        return error

    return run_loopback(plan, make_mesh(config), work)[0]


@pytest.mark.parametrize("settings, noun, passes", LEGAL, ids=str)
def test_a_legal_sequence_passes(settings, noun, passes):
    moved(settings, noun, passes)


@pytest.mark.parametrize("settings, noun, passes, raises", WRONG, ids=str)
def test_a_wrong_transition_raises(settings, noun, passes, raises):
    moved(settings, noun, passes, raises)


@pytest.mark.parametrize("settings, noun, passes, raises, said", [
    ("zero3", W, "gather", "gather", "GATHER of the weights of p1 (blocks.0) begins in SHARDED, and the "
                                     "state is GATHERED (the device has all of them)"),
    ("zero2", G, "", "reduce", "REDUCE of the gradient of p1 (blocks.0) begins in WHOLE, and the state is "
                               "NOTHING (it has no buffer)"),
    ("nvme", O, "fetch", "fetch", "FETCH of the optimizer state of p1 (blocks.0) begins in DISK, and the "
                                  "state is HOST (host)"),
])
def test_what_the_error_says(settings, noun, passes, raises, said):
    assert moved(settings, noun, passes, raises) == said
