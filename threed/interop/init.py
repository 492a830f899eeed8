"""Init: a first config, with comments, from a model's size, a number of devices and a path of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.base.quantity import divisors, many, show_bytes
from threed.base.remember import remembering
from threed.models.families.registry import FAMILIES, instead_of, size_of, sizes
from threed.schema import Config, ModelConfig

TOY = "toy"
_TOYS = ("family", "layers", "hidden", "heads", "vocab", "seq_len")  # keys that say how large the toy is
_PER_PARAMETER = 20  # tokens to train on: Hoffmann et al. 2022
# Parameters up to, tokens a step, learning rate: Brown et al. 2020, table 2.1; Touvron et al. 2023; rounded.
_SCALES = ((5e8, 2**19, 6e-4), (5e9, 2**20, 2e-4), (4e10, 2**21, 1.5e-4),
           (float("inf"), 2**21 * 3 // 2, 6e-5))
_POSITIONS = (4, 2)  # of a pipeline
_JOINED = 8  # devices that a fast link joins
# What is made milder again once a way fits, in this order: its values, the mildest and default first.
_MILDER: dict[str, tuple[Any, ...]] = {
    "offload.parameters": ("none",), "offload.optimizer": ("none",),
    "activation.policy": ("none", "selective"), "zero.stage": (1, 2), "parallel.tp": (1, 2, 4),
    "parallel.pp": (1, 2)}
_WITH = {"parallel.sequence_parallel": "parallel.tp", "parallel.schedule": "parallel.pp"}  # without it unused


def names() -> list[str]:
    return [TOY, *sizes()]


def settings(devices: int, model: ModelConfig, pp: int | None = None) -> Iterator[dict[str, Any]]:
    """Ways to train that need less and less memory, and more and more time, a device. `pp`: pipeline
    positions that are asked for; None: a pipeline is one of the ways, where each layer is shared already."""
    if pp is not None and pp > 1:
        pipeline = {"parallel.pp": pp, "parallel.schedule": "1f1b"}
        yield from ({**setting, **pipeline} for setting in settings(devices // pp, model, 1))
        return
    full, least = {"activation.policy": "full"}, {"zero.stage": 3, "activation.policy": "full"}
    yield {}
    if devices > 1:
        yield {"zero.stage": 2}
    yield full
    if devices > 1:
        yield least
    tp = next((tp for tp in (_JOINED, 4, 2) if devices % tp == 0 and model.heads % tp == 0
               and model.num_kv_heads % tp == 0), 1)
    if tp > 1:
        joined = {"parallel.tp": tp, "parallel.sequence_parallel": True}
        pp = next((pp for pp in _POSITIONS if pp * tp <= devices and devices % (tp * pp) == 0
                   and model.layers % pp == 0), None) if pp is None else None
        if pp is not None:
            yield {**full, **joined, "parallel.pp": pp, "parallel.schedule": "1f1b"}
        least |= joined
        yield least
    yield {**least, "offload.optimizer": "cpu"}
    yield {**least, "offload.optimizer": "cpu", "offload.parameters": "cpu"}


def milder(setting: dict[str, Any], pp: int | None = None) -> Iterator[dict[str, Any]]:
    """Settings that take less time than `setting`, and more memory. Each differs in one key: first in what
    costs most time. `pp`: as in `settings`."""
    for key, values in _MILDER.items():
        if key in setting and not (key == "parallel.pp" and pp is not None):
            for value in values:
                if value == setting[key]:
                    break
                other = {**setting, key: value}
                unused = {each for each, needs in _WITH.items() if other.get(needs) == _MILDER[needs][0]}
                yield {name: value for name, value in other.items() if name not in unused
                       and value != _MILDER.get(name, (None,))[0]}


@remembering()
def choose(name: str, devices: int, limit_bytes: int, fits: Callable[[dict[str, Any], int], bool],
           num_parameters: int, pp: int | None = None) -> dict[str, Any]:
    """The values of a config, as few and as fast as fit in a device's memory. `fits(values, bytes)` asks the
    plan. `pp`: as in `settings`. InputError where nothing fits."""
    model = model_of(name)
    if pp is not None and (devices % pp or pp > model.layers):
        raise InputError(f"--pp {pp}: must divide --devices {devices}, and be at most the {model.layers} "
                         f"layers of {name}")

    def first(ways: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
        return next((way for way in ways if _divides(way, devices, model)
                     and fits(_values(name, model, devices, num_parameters, way), limit_bytes)), None)

    found = first(settings(devices, model, pp))
    if found is None:
        raise InputError(f"--model {name} does not fit on {many(devices, 'device')} of "
                         f"{show_bytes(limit_bytes)}, even with parameters and the optimizer on the host "
                         "(ZeRO 3), recomputation and tensor parallelism: give more --devices or --memory")
    while (better := first(milder(found, pp))) is not None:
        found = better
    return _values(name, model, devices, num_parameters, found)


def _divides(setting: dict[str, Any], devices: int, model: ModelConfig) -> bool:
    tp, pp = setting.get("parallel.tp", 1), setting.get("parallel.pp", 1)
    return not (devices % (tp * pp) or model.heads % tp or model.num_kv_heads % tp)


def _values(name: str, model: ModelConfig, devices: int, num_parameters: int,
            setting: dict[str, Any]) -> dict[str, Any]:
    """The values of a config with a setting."""
    fast = name != TOY
    _, tokens_a_step, lr = next(scale for scale in _SCALES if num_parameters <= scale[0])
    tp = setting.get("parallel.tp", 1)
    dp = devices // tp // setting.get("parallel.pp", 1)
    ep = _together(model, dp * tp)
    batch = dp * max(1, round((tokens_a_step if fast else 2048) / model.seq_len / dp))
    steps = max(1, round(_PER_PARAMETER * num_parameters / batch / model.seq_len)) if fast else 100
    return {
        **({"model.name": name} if fast else {f"model.{key}": getattr(model, key) for key in _TOYS}),
        "parallel.dp": dp, **({"parallel.ep": ep} if ep > 1 else {}), "zero.stage": 1, **setting,
        "precision.dtype": "bf16" if fast else "fp32", "optimizer.lr": lr if fast else 3e-3,
        "optimizer.warmup_steps": min(2000, steps // 20), "optimizer.min_lr": (lr if fast else 3e-3) / 10,
        "train.steps": steps, "train.global_batch_size": batch, "train.micro_batch_size": 1,
        "train.eval_every": max(1, min(1000, steps // 10)),
        "checkpoint.every": max(1, min(1000, steps // 10))}


def _together(model: ModelConfig, ranks: int) -> int:
    """The size of expert parallelism: the largest number that divides both `ranks` and the number of
    experts, and is at most `_JOINED`, the devices of one machine."""
    experts = getattr(model, "experts", 1)
    return max(ep for ep in divisors(math.gcd(ranks, experts)) if ep <= _JOINED)


def model_of(name: str) -> ModelConfig:
    if name == TOY:
        return FAMILIES["llama"].config()
    size = size_of(name)
    if size is None:
        raise InputError(f"--model {name}: no such size{instead_of(name)} There are "
                         f"{', '.join(names())}")
    family = FAMILIES[sizes()[size]]
    return family.config(**family.sizes[size])


_WORDS = {
    "model.name": "its sizes; single keys may be given beside it: seq_len: 2048",
    "model.family": "threed export writes it for transformers",
    "model.layers": "blocks", "model.hidden": "numbers of a token", "model.heads": "of attention",
    "model.vocab": "tokens of the tokenizer that is trained on the data",
    "model.seq_len": "tokens of a sequence",
    "parallel.pp": "pipeline positions: the model is cut into as many parts",
    "parallel.schedule": "of the pipeline; threed search compares them: zb-v, interleaved ...",
    "parallel.dp": "replicas; auto: what the number of devices leaves",
    "parallel.tp": "devices that share each layer: on one machine",
    "parallel.sequence_parallel": "what tp does not cut is cut by sequence",
    "parallel.ep": "devices that together hold all experts of a block: on one machine",
    "zero.stage": "0: replicate all; shard over dp 1: optimizer state, 2: + gradients, 3: + parameters",
    "activation.policy": "computed again in backward; none is faster, and selective in between",
    "offload.optimizer": "Adam's moments and fp32 weights live on the host, which steps them",
    "offload.parameters": "what ZeRO 3 leaves of them on a device waits on the host",
    "precision.dtype": "fp32 | bf16 | fp16",
    "optimizer.lr": "after warm-up; the schedule is cosine",
    "optimizer.warmup_steps": "linear from 0",
    "optimizer.min_lr": "at the end",
    "train.steps": "optimizer steps; 20 tokens a parameter are a usual choice (Hoffmann et al. 2022)",
    "train.global_batch_size": "sequences a step, over all devices",
    "train.micro_batch_size": "sequences a forward: larger is faster while it fits",
    "train.eval_every": "steps between losses of data that are held out",
    "checkpoint.every": "steps; the newest two are kept",
    "data.source": "text, a folder, a glob, *.jsonl, or a Megatron .bin/.idx prefix",
    "run.dir": "checkpoints, metrics and traces",
}
_MORE = {"parallel": "# pp: 2                       # pipeline positions, with schedule: 1f1b, zb-v ...",
         "run": "# device: cpu                 # auto: a GPU where there is one"}


def text(values: dict[str, Any], title: str, path: Path) -> str:
    """The YAML file of a config's values, with a comment a line."""
    lines = [f"# {title}",
             f"#   threed check {path}       what each device holds and sends",
             f"#   threed predict {path}     how long it takes",
             f"#   threed train {path}", "# All keys: configs/reference.yaml."]
    for section in Config().to_dict():
        mine = {key: value for key, value in values.items() if key.startswith(f"{section}.")}
        lines += ["", f"{section}:"] if mine else []
        for key, value in mine.items():
            shown = f"{value:.1e}" if isinstance(value, float) else str(value).lower() if isinstance(
                value, bool) else value
            given, word = f"  {key.split('.')[1]}: {shown}", _WORDS.get(key)
            lines.append(f"{given:<31} # {word}" if word else given)
        more = mine and section in _MORE and "parallel.pp" not in mine
        lines += [f"  {_MORE[section]}"] if more else []
    return "\n".join(lines) + "\n"
