"""DeepSpeed option: the file of --deepspeed_config, which Megatron-DeepSpeed is given with its options.

DeepSpeed's engine reads the file alone: it shards, clips, scales the loss and cuts batches by it, whatever
the options say. The optimizer and its schedule are those of the options. Where the two contradict each other,
a note says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from threed.config.keys.deepspeed import CLIPS_SINCE, DEEPSPEED
from threed.config.values import get
from threed.interop.arguments import Given
from threed.interop.converted import Converted, convert, shown
from threed.interop.deepspeed_file import read
from threed.schema import Config

OPTION = "deepspeed_config"
_OF_THE_ENGINE = ("zero", "offload", "precision", "train", "parallel", "monitor")
_OF_FP16 = tuple(f"precision.{key}" for key in ("loss_scale", "initial_loss_scale", "min_loss_scale",
                                                "loss_scale_window", "hysteresis"))


def take_file(done: Converted, given: Given, overrides: list[str]) -> None:
    """Takes the keys of the file into `done`. InputError where the file is no config of DeepSpeed."""
    name, option = str(given.found[OPTION]), shown(done.framework, OPTION)
    done.dropped.pop(option, None)
    if not given.found.get("deepspeed"):
        done.dropped[option] = "without --deepspeed it is not read"
        return
    path = next((path for path in (Path(name), given.folder / name) if path.is_file()), None)
    if path is None:
        done.refused[option] = (f"{name} is not there, and DeepSpeed shards, clips, scales and cuts batches "
                                f"by it: convert it, too (threed convert {name}), and take its keys over")
        return
    dp = done.values.get("parallel.dp")
    values = read(path)
    file = convert(DEEPSPEED, values, name, [], dp if isinstance(dp, int) else None, CLIPS_SINCE)
    if "train_batch_size" not in values:  # what follows from the rest of the file
        file.values = {key: value for key, value in file.values.items()
                       if key not in ("train.global_batch_size", "parallel.dp")}
    ours, theirs = (each.values.get("precision.dtype", "fp32") for each in (done, file))
    if theirs == "fp32" and ours != "fp32":
        done.notes.append(f"the options say {ours}, and {name} neither fp16 nor bf16, though DeepSpeed reads "
                          "the file alone: precision.* is that of the options")
        file.values = {key: value for key, value in file.values.items() if not key.startswith("precision.")}
    elif theirs == "fp16":
        file.values.setdefault("precision.loss_scale", "dynamic")
    fixed = {text.partition("=")[0] for text in overrides}
    for key, value in file.values.items():
        if key not in fixed:
            _take(done, file, key, value)
    if done.values.get("precision.dtype") != "fp16":
        done.values = {key: value for key, value in done.values.items() if key not in _OF_FP16}
    done.dropped[option] = "its keys are converted, too"
    done.dropped |= {f"{name}: {key}": why for key, why in file.dropped.items()}
    done.refused |= {f"{name}: {key}": why for key, why in file.refused.items()}


def _take(done: Converted, file: Converted, key: str, value: Any) -> None:
    """One key of the file."""
    section = key.partition(".")[0]
    has_default = "default" in file.why.get(key, "")
    was_given = key in done.values and "default" not in done.why.get(key, "")
    old = done.values.get(key, get(Config(), key))
    if section == "activation" and "activation.policy" not in done.values:
        return  # the section of the file recomputes nothing by itself
    if section in _OF_THE_ENGINE or key == "optimizer.clip_grad" or section == "activation":
        if was_given and old != value:
            done.notes.append(f"{key} is {old} by the options and {value} by {file.source}"
                              f"{', by default' * has_default}: DeepSpeed reads the file, whose value counts")
        if not (has_default and not was_given and old == value):
            done.values[key] = value
            done.why[key] = f"of {file.source}" + (f": {file.why[key]}" if has_default else "")
    elif was_given and old != value and not has_default:
        done.notes.append(f"{key} is {old} by the options and {value} by {file.source}: the optimizer is "
                          "that of the options, whose value counts")
