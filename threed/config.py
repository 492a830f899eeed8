"""The config: one YAML file, dotted overrides, and every cross-check in one place.

`load` reads a YAML file and `key=value` overrides into the dataclasses of `threed.schema` and validates them. Unknown keys,
wrong types and impossible combinations are all reported at once, as one `ConfigError`. A setting is honoured or refused.

Batch sizes count sequences and mean what they mean in Megatron-LM:
global_batch_size = micro_batch_size x dp x number of micro-batches.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from threed.errors import ConfigError, InputError
from threed.models.registry import SIZES
from threed.quantity import parse_bytes
from threed.schema import V_SHAPED, Config

# ---------------------------------------------------------------- reading


def load(path: str | Path | None, overrides: list[str] | None = None, world_size: int | None = None) -> Config:
    """YAML file (None: defaults) and dotted overrides -> a validated Config with `parallel.dp` resolved.

    Raises ConfigError, which lists every problem found.
    """
    given = _flatten(_read_yaml(path) if path is not None else {})
    for text in overrides or []:
        given.update(_read_override(text))
    where = str(path) if path is not None else "the config"
    config, problems = _build(given)
    resolve_dp(config, world_size)
    problems += validate(config, world_size)
    if problems:
        raise ConfigError(problems, where)
    return config


def find_file(path: str | Path) -> Path:
    """The file itself, or else the one that ships with the package under configs/."""
    path = Path(path)
    if path.is_file():
        return path
    if path.exists():
        raise InputError(f"{path} is not a file; give a YAML config such as configs/toy.yaml")
    shipped = Path(__file__).parent / "configs"
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    if not path.is_absolute() and (shipped / inside).is_file():
        return shipped / inside
    known = ", ".join(sorted(f"configs/{file.relative_to(shipped)}" for file in shipped.rglob("*.yaml")))
    raise InputError(f"no config file {path}; the package ships {known}")


def _read_yaml(path: str | Path) -> dict[str, Any]:
    path = find_file(path)
    try:
        node = OmegaConf.load(path)
        values = OmegaConf.to_container(node, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a mapping of sections (model:, parallel:, ...), not a {type(values).__name__}")
    return values  # pyright: ignore[reportReturnType]


def _read_override(text: str) -> dict[str, Any]:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"'{text}' is not an override; write section.key=value, for example train.steps=10")
    try:
        return _flatten(OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=True))  # pyright: ignore
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise InputError(f"override '{text}' cannot be read: {' '.join(str(error).split())}") from None


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> {dotted key: leaf}. An empty section (`model:` with nothing below) holds nothing."""
    sections = {section.name for section in dataclasses.fields(Config)}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(_flatten(value, name + "."))
        elif value is not None or prefix or key not in sections:
            flat[name] = value
    return flat


def known_keys() -> list[str]:
    """Every dotted key of the schema."""
    return [f"{section.name}.{leaf.name}" for section in dataclasses.fields(Config)
            for leaf in dataclasses.fields(section.default_factory)]  # pyright: ignore


def _build(given: dict[str, Any]) -> tuple[Config, list[str]]:
    keys = known_keys()
    problems = []
    name = given.get("model.name", "custom")
    if name in SIZES:
        given = {**{f"model.{key}": value for key, value in SIZES[name].items()}, **given}
    elif name != "custom":
        near = difflib.get_close_matches(str(name), list(SIZES), 1, 0.0)[0]
        problems.append(f"model.name={name}: no such size; did you mean {near}? There are {', '.join(SIZES)}; leave it out "
                        "to give the sizes yourself")
    schema: DictConfig = OmegaConf.structured(Config)
    for key, value in given.items():
        if key not in keys:
            problems.append(f"{key}: unknown key{_nearest(key, keys)}")
            continue
        if isinstance(OmegaConf.select(schema, key), bool) and not isinstance(value, bool):
            problems.append(f"{key}={value}: must be true or false")  # OmegaConf would take any number for one
            continue
        try:
            OmegaConf.update(schema, key, value)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            problems.append(f"{key}={value}: {reason[0].lower()}{reason[1:]}")
    for key in [key for key in keys if OmegaConf.is_missing(*_owner(schema, key))]:
        problems.append(f"{key} is '???', which stands for a value that is missing: give one")
        OmegaConf.update(schema, key, _get(Config(), key))
    config = OmegaConf.to_object(schema)
    assert isinstance(config, Config)
    return config, problems


def _owner(schema: DictConfig, key: str) -> tuple[DictConfig, str]:
    section, name = key.split(".")
    return schema[section], name


def _nearest(key: str, keys: list[str]) -> str:
    tails: dict[str, list[str]] = {}
    for known in keys:
        tails.setdefault(known.rsplit(".", 1)[-1], []).append(known)
    near = difflib.get_close_matches(key, keys, 1, 0.6) or [
        tails[tail][0] for tail in difflib.get_close_matches(key.rsplit(".", 1)[-1], list(tails), 1, 0.6)]
    return f"; did you mean {near[0]}?" if near else "; the keys are listed in configs/reference.yaml"


def resolve_dp(config: Config, world_size: int | None) -> None:
    """Turn `parallel.dp: auto` into what the world size leaves (1 when no world size is known)."""
    parallel = config.parallel
    if isinstance(parallel.dp, str) and parallel.dp.isdecimal():
        parallel.dp = int(parallel.dp)
    if parallel.dp == "auto":
        others = max(1, parallel.tp * parallel.pp)
        parallel.dp = max(1, world_size // others) if world_size else 1


# ---------------------------------------------------------------- checking

_CHOICES = {
    "model.position": ("rotary", "learned"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "swiglu"),
    "parallel.schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "breadth-first", "auto"),
    "precision.dtype": ("fp32", "bf16"),
    "optimizer.name": ("adamw", "sgd"),
    "optimizer.schedule": ("constant", "linear", "cosine", "wsd"),
    "train.on_nonfinite": ("stop", "skip"),
    "monitor.wandb": ("auto", "offline", "online", "disabled"),
    "run.device": ("auto", "cpu", "cuda"),
    "zero.stage": (0, 1),
    "activation.policy": ("none",),
    "offload.optimizer": ("none",),
    "offload.parameters": ("none",),
}
# What the field knows and this version does not do yet: refused by name rather than as a typing slip.
_NOT_YET = {
    "precision.dtype": ("fp16",),
    "zero.stage": (2, 3),
    "activation.policy": ("full", "selective", "budget"),
    "offload.optimizer": ("cpu", "nvme"),
    "offload.parameters": ("cpu", "nvme"),
}
_AT_LEAST = {  # key: least value
    "model.layers": 1, "model.hidden": 1, "model.heads": 1, "model.kv_heads": 1, "model.ffn_hidden": 1,
    "model.vocab": 2, "model.vocab_multiple": 1, "model.seq_len": 1, "model.init_std": 0, "model.dropout": 0,
    "model.attention_dropout": 0, "parallel.tp": 1, "parallel.pp": 1, "parallel.layers_per_unit": 1,
    "parallel.virtual_stages": 1,
    "optimizer.lr": 0, "optimizer.eps": 0, "optimizer.weight_decay": 0, "optimizer.clip_grad": 0,
    "optimizer.warmup_steps": 0, "optimizer.decay_steps": 1, "optimizer.wsd_decay_steps": 0, "optimizer.min_lr": 0,
    "train.steps": 0, "train.global_batch_size": 1, "train.micro_batch_size": 1, "train.seed": 0,
    "train.eval_every": 0, "train.eval_batches": 1, "checkpoint.every": 0, "checkpoint.keep": 0,
    "monitor.console_every": 1, "monitor.trace_every": 0, "monitor.timeline_every": 0,
    "run.timeout_s": 1, "data.validation_fraction": 0,
}
_ABOVE_ZERO = ("model.norm_eps", "model.rope_theta", "monitor.peak_tflops")


def validate(config: Config, world_size: int | None = None) -> list[str]:
    """Every problem of a config, one line each; empty when it can run. `world_size`: what will really be there."""
    problems = _check_values(config)
    wrong = {problem.split(".")[0] for problem in problems}  # sections with values that arithmetic may trip over
    problems += _check_model(config) if not wrong & {"model", "parallel"} else []
    problems += _check_parallel(config, world_size) if not wrong & {"model", "parallel"} else []
    problems += _check_batch(config) if not wrong & {"train", "parallel", "data"} else []
    problems += _check_schedule(config) if not wrong & {"train", "optimizer"} else []
    return problems


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _check_values(config: Config) -> list[str]:
    problems = []
    for key, choices in _CHOICES.items():
        value = _get(config, key)
        if key == "parallel.schedule" and str(value).startswith("file:"):
            continue
        if value in _NOT_YET.get(key, ()):
            listed = ", ".join(map(str, choices))
            problems.append(f"{key}={value}: not in this version of threed; use one of: {listed}")
        elif value not in choices:
            problems.append(f"{key}={value}: must be one of {', '.join(map(str, choices))}")
    for key, least in _AT_LEAST.items():
        value = _get(config, key)
        if value is not None and not value >= least:  # `not >=`: NaN is refused too
            problems.append(f"{key}={value}: must be at least {least}")
        elif value == math.inf:
            problems.append(f"{key}={value}: must be finite")
    for key in _ABOVE_ZERO:
        value = _get(config, key)
        if value is not None and not 0 < value < math.inf:
            problems.append(f"{key}={value}: must be above 0 and finite")
    dp = config.parallel.dp
    if not isinstance(dp, int) or dp < 1:
        problems.append(f"parallel.dp={dp}: must be 'auto' or an integer of at least 1")
    for key in ("model.dropout", "model.attention_dropout", "data.validation_fraction"):
        if _get(config, key) >= 1:
            problems.append(f"{key}={_get(config, key)}: must be less than 1")
    if not config.run.dir.strip():
        problems.append("run.dir is empty: give a folder for checkpoints and metrics")
    if sorted(config.parallel.axis_order.split("-")) != ["dp", "pp", "tp"]:
        problems.append(f"parallel.axis_order={config.parallel.axis_order}: must name each axis once, outermost first, "
                        "for example pp-dp-tp")
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        problems.append(f"optimizer.betas={betas}: must be two numbers in [0, 1)")
    return problems


def _check_model(config: Config) -> list[str]:
    model, tp = config.model, config.parallel.tp
    problems = []
    if model.hidden % model.heads:
        problems.append(f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}")
    elif model.position == "rotary" and model.head_dim % 2:
        problems.append(f"model.position=rotary needs an even head size; model.hidden / model.heads = {model.head_dim}")
    if model.heads % model.num_kv_heads:
        problems.append(f"model.heads={model.heads} is not divisible by model.kv_heads={model.kv_heads}")
    sizes = {"model.heads": model.heads, "model.kv_heads": model.num_kv_heads, "model.hidden": model.hidden,
             "model.ffn_hidden": model.num_ffn_hidden, "the padded vocabulary": model.padded_vocab}
    for name, size in sizes.items():
        if size % tp and not (name == "model.kv_heads" and model.kv_heads is None):
            problems.append(f"{name}={size} is not divisible by parallel.tp={tp}")
    if config.parallel.sequence_parallel:
        if tp == 1:
            problems.append("parallel.sequence_parallel=true needs parallel.tp > 1: it splits the sequence over tp")
        elif model.seq_len % tp:
            problems.append(f"parallel.sequence_parallel=true: model.seq_len={model.seq_len} is not divisible by "
                            f"parallel.tp={tp}")
    return problems


def _check_parallel(config: Config, world_size: int | None) -> list[str]:
    parallel = config.parallel
    problems = []
    others = parallel.tp * parallel.pp
    if world_size is not None and config.world_size != world_size:
        divides = f", which tp x pp = {others} does not divide" if world_size % others else ""
        problems.append(f"parallel.dp={config.dp} x tp={parallel.tp} x pp={parallel.pp} = {config.world_size} processes, "
                        f"but the world size is {world_size}{divides}")
    problems += _check_schedule_shape(config)
    units = num_units(config)
    if config.num_stages > units:
        problems.append(f"parallel.pp={parallel.pp} makes {config.num_stages} stages, more than the model's {units} units "
                        f"(embedding, {units - 2} of blocks, head)")
    if parallel.stage_units is not None:
        listed = list(parallel.stage_units)
        if len(listed) != config.num_stages:
            problems.append(f"parallel.stage_units={listed} has {len(listed)} stages, but there are {config.num_stages}")
        elif sum(listed) != units or min(listed) < 1:
            problems.append(f"parallel.stage_units={listed} must be positive and add up to the model's {units} units")
    return problems


def _check_schedule_shape(config: Config) -> list[str]:
    parallel, problems = config.parallel, []
    name, virtual = parallel.schedule, parallel.virtual_stages
    if name in V_SHAPED and virtual not in (None, 2):
        problems.append(f"parallel.schedule={name} has two stages a rank, not parallel.virtual_stages={virtual}")
    if name in ("interleaved", "breadth-first") and (virtual or 1) < 2:
        problems.append(f"parallel.schedule={name} needs parallel.virtual_stages of at least 2: with one stage a rank it would "
                        f"be {'1f1b' if name == 'interleaved' else 'gpipe'}")
    if name in ("gpipe", "1f1b", "zb-h1", "zb-h2") and (virtual or 1) != 1:
        problems.append(f"parallel.schedule={name} has one stage a rank, not parallel.virtual_stages={virtual}; interleaved "
                        "and breadth-first have more")
    if name == "auto" and virtual not in (None, 1, 2):
        problems.append(f"parallel.schedule=auto searches 1 or 2 stages a rank, not parallel.virtual_stages={virtual}")
    if parallel.activation_limit is not None:
        try:
            parse_limit(parallel.activation_limit)
        except InputError as error:
            problems.append(f"parallel.activation_limit: {error}")
    return problems


def parse_limit(text: str) -> tuple[float | None, int | None]:
    """'2x' -> (2.0, None): times 1F1B's peak. '30GiB' -> (None, bytes)."""
    if text.endswith("x"):
        try:
            times = float(text[:-1])
        except ValueError:
            times = -1.0
        if not 0 < times < math.inf:
            raise InputError(f"'{text}' is not a multiple of 1F1B's peak; write for example 1x or 1.5x")
        return times, None
    return None, parse_bytes(text)


def num_units(config: Config) -> int:
    """Compute units of the model: the embedding, runs of `layers_per_unit` blocks, the head."""
    return -(-config.model.layers // config.parallel.layers_per_unit) + 2


def _check_batch(config: Config) -> list[str]:
    train = config.train
    problems = []
    if train.global_batch_size % (train.micro_batch_size * config.dp):
        problems.append(f"train.global_batch_size={train.global_batch_size} is not divisible by "
                        f"train.micro_batch_size={train.micro_batch_size} x parallel.dp={config.dp}")
    if train.eval_every and not config.data.validation_fraction:
        problems.append(f"train.eval_every={train.eval_every} needs data.validation_fraction > 0: nothing is held out")
    return problems


def _check_schedule(config: Config) -> list[str]:
    train, problems = config.train, []
    decay = config.optimizer.decay_steps or train.steps
    if config.optimizer.schedule == "wsd" and (config.optimizer.wsd_decay_steps or 0) > decay:
        problems.append(f"optimizer.wsd_decay_steps={config.optimizer.wsd_decay_steps} is longer than "
                        f"optimizer.decay_steps={decay}")
    if config.optimizer.min_lr > config.optimizer.lr:
        problems.append(f"optimizer.min_lr={config.optimizer.min_lr} is above optimizer.lr={config.optimizer.lr}")
    return problems


def warnings(config: Config) -> list[str]:
    """What can run but may not be meant."""
    lines = []
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps > steps:
        lines.append(f"optimizer.warmup_steps={optimizer.warmup_steps} is longer than train.steps={steps}: "
                     "the learning rate never reaches optimizer.lr")
    if config.num_microbatches < config.num_stages and config.parallel.pp > 1:
        lines.append(f"{config.num_microbatches} micro-batches for {config.num_stages} pipeline stages: most of the step is "
                     "bubble; raise train.global_batch_size or lower train.micro_batch_size")
    return lines
