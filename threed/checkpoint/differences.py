"""Differences: what a run that goes on from a checkpoint does otherwise than the run that saved it.

Every key of the config is compared, so that a new one is, too. Keys of NOT_COMPARED are not, each for its
reason. Those of IN_ONE_LINE change how a step is computed and not what, and share a line. Each other key has
a line of its own, with what becomes of the checkpoint's state where that is not plain (`_effect`).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threed.base.axes import AXES, QUIET
from threed.checkpoint.format import Manifest
from threed.optim.rate import learning_rate
from threed.optim.registry import OPTIMIZERS, kept_by
from threed.schema import Config, OptimizerConfig

_BESIDE = "what is measured, written or shown beside the training"
_FAILS = "when a run ends, or starts again"
_PLACE = "a place, whatever is in it"
NOT_COMPARED = {
    "model.family": "another family is refused",
    "model.name": "the sizes that it stands for are compared",
    "model.init_std": "weights are drawn once, at the start of the run",
    **{f"parallel.{axis}": "the line about the mesh has it" for axis in AXES},
    "parallel.axis_order": "which rank is where",
    "offload.nvme_path": _PLACE,
    "data.cache": _PLACE,
    "data.on_change": "it is about this start",
    **{f"train.{key}": _BESIDE for key in ("eval_every", "sample_every", "sample_prompts", "sample_tokens",
                                           "sample_temperature")},
    "train.resume": "it is about this start",
    **{f"checkpoint.{key}": _BESIDE for key in ("every", "keep", "background", "copy_to", "copy_keep",
                                                "copy_wait_s")},
    **{f"monitor.{key}": _BESIDE for key in ("wandb", "project", "name", "group", "tags", "peak_tflops",
                                             "console_every", "trace_every", "timeline_every", "report")},
    "run.dir": _PLACE,
    "run.verify_every": _BESIDE,
    **{f"run.{key}": _FAILS for key in ("timeout_s", "connect_timeout_s", "restarts", "restart_wait_s",
                                        "stop_after")},
}
# A name that ends with a dot is a section.
IN_ONE_LINE = ("parallel.", "zero.", "activation.", "offload.optimizer", "offload.ratio",
               "offload.parameters", "model.fused", "model.loss_chunk", "model.tile_linears",
               "model.moe_room", "model.vocab_multiple", "train.micro_batch_size", "run.")
_WINDOWS = "; windows are cut anew, in another order: of this epoch some text is seen again, and some is not"
_EFFECTS = {
    "train.seed": "; the order of samples and dropout are others from here on: some samples are seen again",
    "data.validation_fraction": _WINDOWS + ", and some may have been trained on that are held out now",
    "data.packing": _WINDOWS,
    "data.document_mask": "; the loss is of another task, and is not comparable",
    "data.loss_mask": "; the loss is a mean over other tokens, and is not comparable",
    "train.eval_batches": "; val/loss is a mean over other samples",
    "optimizer.warmup_steps": "; counted from the first step of the run",
}
_NEW_TOKENS = "; the text becomes other tokens, in another order"
_EFFECTS |= dict.fromkeys(("data.append_eod", "data.prepend_bos"), _NEW_TOKENS)


def notes(path: Path, manifest: Manifest, config: Config) -> list[str]:
    """The lines about a checkpoint that was saved by a run."""
    name, lines, together = path.name, [], []
    for key, before, now in changed_keys(manifest.config, config):
        text = f"{key} was {_show(before)}, is {_show(now)}"
        if key.startswith(IN_ONE_LINE):
            together.append(text)
        else:
            lines.append(text + _effect(key, manifest, config))
    if together:
        lines.append("a step is computed otherwise, to the same result within rounding: "
                     f"{'; '.join(together)}")
    before, now = manifest.mesh, config.axis_sizes
    if any(before.get(axis, 1) != size for axis, size in now.items()):
        lines.append(f"{name} was saved by {_mesh(before)}, and goes on on {_mesh(now)}; the global "
                     f"batch is {config.train.global_batch_size} sequences")
    lines += _of_the_rate(manifest, config)
    head = [f"not as in {name}; from step {manifest.step + 1} on, the settings of this start count:"]
    return head + lines if lines else []


def tokens_seen(manifest: Manifest) -> int:
    """The tokens of a run so far, by the manifest of its checkpoint. An older one knows samples
    alone, which then had one length."""
    length = manifest.config.get("model", {}).get("seq_len", 1)
    return manifest.samples * length if manifest.tokens is None else manifest.tokens


def changed_keys(theirs: dict[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of each key that is compared and differs. `theirs`: the config in the
    manifest. The old value of a key that it lacks is the key's default."""
    usual, found = asdict(Config()), []
    for section, values in config.to_dict().items():
        known = {**usual.get(section, {}), **theirs.get(section, {})}
        if section == "model":
            known = {**asdict(type(config.model)()), **known}
        for name, now in values.items():
            if (key := f"{section}.{name}") not in NOT_COMPARED and known.get(name) != now:
                found.append((key, known.get(name), now))
    return found


def _effect(key: str, manifest: Manifest, config: Config) -> str:
    """What becomes of the checkpoint's state by another value of a key; "" where that is plain."""
    if key == "optimizer.name":
        return _of_the_optimizer(manifest.config.get("optimizer", {}).get("name"), config)
    if key == "precision.dtype":
        return ("; weights and the optimizer's state are fp32 in a checkpoint"
                f"{_of_the_scale(manifest, config)}")
    if key == "precision.loss_scale":
        return _of_the_scale(manifest, config)
    if key == "precision.master" and config.precision.master == "none":
        return f"; fp32 weights are rounded to {config.precision.dtype}"
    if key == "train.global_batch_size":
        return f"; the run has seen {manifest.samples} sequences, and goes on with the next"
    if key == "model.seq_len":
        return f"{_WINDOWS}; the run has seen {tokens_seen(manifest)} tokens"
    return _EFFECTS.get(key, "")


def _of_the_optimizer(before: str | None, config: Config) -> str:
    mine, theirs = kept_by(config.optimizer.name), kept_by(before) if before in OPTIMIZERS else ()
    parts = [f"its {name} goes on" for name in mine if name in theirs]
    parts += [f"{name} is left behind" for name in theirs if name not in mine]
    return f"; {', '.join(parts)}" if parts else ""


def _of_the_scale(manifest: Manifest, config: Config) -> str:
    saved, dynamic = manifest.loss_scaler.get("scale"), config.loss_scale is None
    if dynamic:
        return (f"; the dynamic loss scale goes on at {saved:g}" if saved is not None else
                f"; the dynamic loss scale begins at precision.initial_loss_scale="
                f"{config.precision.initial_loss_scale:g}")
    return f"; the loss scale is {config.loss_scale:g}" if saved is not None or config.loss_scale != 1 else ""


def _of_the_rate(manifest: Manifest, config: Config) -> list[str]:
    """How the learning rate of the next step differs from what it would have been, and why, where the
    schedule follows from the number of steps."""
    theirs, mine, done = manifest.config, config.optimizer, manifest.updates
    known, given = asdict(OptimizerConfig()), theirs.get("optimizer", {})
    old = OptimizerConfig(**{key: given.get(key, usual) for key, usual in known.items()})
    steps, now_steps = theirs.get("train", {}).get("steps", config.train.steps), config.train.steps
    would, now = learning_rate(old, done, steps), learning_rate(mine, done, now_steps)
    lines, step = [], manifest.step
    if not math.isclose(would, now, rel_tol=1e-6):
        last = f"{learning_rate(old, done - 1, steps):.2e} in step {step}" if done else f"{would:.2e}"
        lines.append(f"the learning rate goes from {last} to {now:.2e} in step {step + 1}"
                     + (f" (before, it would have been {would:.2e})" if done and steps > step else ""))
    follows = mine.schedule != "constant" and mine.schedule == old.schedule
    if follows and steps != now_steps and old.decay_steps is None and mine.decay_steps is None:
        how = "stretches" if now_steps > steps else "squeezes"
        lines.append(f"optimizer.schedule={mine.schedule} ends at train.steps, so train.steps={now_steps} "
                     f"{how} it; optimizer.decay_steps={steps} keeps it as it was, and later steps have "
                     f"optimizer.min_lr={mine.min_lr:g}")
    return lines


def _mesh(sizes: dict[str, Any]) -> str:
    """`sizes`: as in a manifest, which may name axes that this version does not know."""
    along = {axis: size for axis, size in sizes.items() if axis != "order"}
    count = math.prod(along.values())
    text = " x ".join(f"{axis} {size}" for axis, size in along.items() if axis not in QUIET or size > 1)
    return f"{count} rank{'s' * (count != 1)} ({text})"


def _show(value: Any) -> str:
    """A value, as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
