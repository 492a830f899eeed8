"""Banner: what a run says before its first step: how large the model is, and how long a step will take."""

from __future__ import annotations

import torch

from threed.base.errors import ThreedError
from threed.base.quantity import BYTES, show_count, show_seconds
from threed.devices import device_of
from threed.models.model import model_flops, num_parameters
from threed.prediction.hardware import DEFAULT, OF_CPUS, Hardware
from threed.prediction.predict import priced
from threed.program.analysis import Analysis
from threed.schema import Config

LONG_S = 60.0  # a step that takes longer is said before it begins
IDEAL_S = 2.0  # a step that takes less at the peak of its devices is not predicted: that would take a while
BOARDS = {"H100": "h100-sxm", "H200": "h200-sxm", "B200": "b200-sxm", "A100": "a100-sxm"}


def size_line(config: Config) -> str:
    """How many parameters the model has, and how many of them train."""
    size, trained = num_parameters(config.model), num_parameters(config.model, trained=True)
    trains = f", of which {show_count(trained)} train" if trained < size else ""
    return (f"{show_count(size)} parameters{trains}; steps of {show_count(config.tokens_per_step)} "
            f"{config.model.counted}")


def like(device: torch.device) -> str:
    """The name of the hardware that a device is most like."""
    if (known := device_of(device)).kind == "cpu":
        return OF_CPUS
    called = known.name()
    return next((board for part, board in BOARDS.items() if part in called), DEFAULT)


def predicted_s(config: Config, analysis: Analysis, device: torch.device) -> tuple[float, str] | None:
    """Seconds of a step on the hardware that a device is most like, as `threed predict` has it, and the
    hardware's name. None where a step is surely short, or cannot be predicted."""
    name = like(device)
    try:
        machine = Hardware.parse(name)
        train = config.train
        flops = model_flops(config.model, train.global_batch_size, train.micro_batch_size)
        if flops / config.world_size / machine.peak(BYTES[config.precision.dtype]) < IDEAL_S:
            return None
        return priced(analysis, name, None)[1].step.total_s, name
    except ThreedError:  # such as user layers, which have no price
        return None


def step_line(step_s: float, name: str) -> str:
    """What to say of a step that takes long."""
    return (f"note: a step will take about {show_seconds(step_s)}, as predicted for {name} (threed predict); "
            "a request to stop is honoured after the step under way")
