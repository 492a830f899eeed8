"""Every check of a config, in one place. A setting is honoured, or refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from threed.base.address import is_store, local_path
from threed.base.address import problem as address_problem
from threed.base.errors import Idle, InputError, Problem
from threed.base.quantity import parse_bytes
from threed.config.context import check_heads, check_order, check_overlap, check_tokens, no_keys
from threed.config.contract import Cell, refusal
from threed.config.named import unlike
from threed.config.own_layers import unused
from threed.config.stages import check_folds, check_group, check_pair, check_parallel, check_stages
from threed.config.suits import check_data, check_monitor
from threed.config.turned import check_matrices, check_turned
from threed.config.values import check_values
from threed.models.check import unsound
from threed.models.families.registry import calling, family_of
from threed.models.layers.experts import ExpertsConfig
from threed.models.tiling import cut_layers, layers_of, share_of
from threed.schema import (
    KEYS,
    PIECES,
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
)


def validate(config: Config, world_size: int | None = None) -> list[Problem]:
    """Every problem of a config; empty when it can run. `world_size`: the number of ranks that the run really
    has; None: not known."""
    problems = check_values(config)
    # sections with a wrong value, with which the checks below cannot calculate
    wrong = {problem.section for problem in problems}
    problems += check_monitor(config)
    if "precision" in wrong:  # so that bytes can be counted
        config = replace(config, precision=PrecisionConfig())
    if not wrong & {"model", "parallel"}:
        of_model = list(_check_model(config))
        of_layers = unsound(config.model) or ([] if of_model else [*_check_tiling(config),
                                                                   *check_overlap(config)])
        problems += [*of_model, *of_layers, *check_parallel(config, world_size)]
        sound = not of_layers and not (of_model and config.model.tile_linears is not None)
        problems += [*check_folds(config), *check_pair(config), *check_stages(config)] if sound else []
        problems += check_matrices(config) if sound and "optimizer" not in wrong else []
    problems += _check_batch(config) if not wrong & {"train", "parallel", "data"} else []
    problems += check_data(config) if not wrong & {"data", "run"} else []
    problems += _check_schedule(config) if not wrong & {"train", "optimizer"} else []
    problems += check_turned(config) if not wrong & {"optimizer", "offload"} else []
    problems += _check_zero(config) if not wrong & {"zero", "parallel", "train"} else []
    problems += _check_activation(config) if "activation" not in wrong else []
    problems += _check_offload(config) if "offload" not in wrong else []
    problems += _check_precision(config) if "precision" not in wrong else []
    problems += _check_copies(config) if not wrong & {"checkpoint", "run"} else []
    refused = refusal(Cell.of(config)) if not wrong & {"parallel", "zero", "precision"} else None
    return [*problems, *([refused] if refused else [])]


def _check_model(config: Config) -> Iterator[Problem]:
    model = config.model
    yield from unused(config) if model.own_layers else _check_sizes(config)
    with calling(model.family, "check()"):
        for text in family_of(model.family).check(model, share_of(config).ranks):
            yield Problem("model.family", text)


def _check_sizes(config: Config) -> Iterator[Problem]:
    model, tp = config.model, config.parallel.tp
    if model.hidden % model.heads and model.head_dim is None:
        yield Problem.of("model.hidden", f"={model.hidden} is not divisible by model.heads={model.heads}; "
                         "model.head_dim gives heads another size")
    elif model.position == "rotary" and model.head_size % 2:
        given = "model.hidden / model.heads" if model.head_dim is None else "model.head_dim"
        yield Problem.of("model.position", f"=rotary needs an even head size; {given} = {model.head_size}")
    yield from _check_scaling(model)
    if config.parallel.cp_form == "heads":
        yield from check_heads(config)
    if model.heads % model.num_kv_heads:
        yield Problem.of("model.heads", f"={model.heads} is not divisible by model.kv_heads={model.kv_heads}")
    sizes = {"model.heads": model.heads, "model.kv_heads": model.num_kv_heads, "model.hidden": model.hidden,
             "model.ffn_hidden": model.num_ffn_hidden}
    for name, size in sizes.items():
        if size % tp and not (name == "model.kv_heads" and model.kv_heads is None):
            yield Problem.of(name, f"={size} is not divisible by parallel.tp={tp}")
    if model.padded_vocab % tp:
        yield Problem("model.vocab_multiple", f"the padded vocabulary={model.padded_vocab} is not divisible "
                      f"by parallel.tp={tp}; set model.vocab_multiple={math.lcm(model.vocab_multiple, tp)}")
    yield from check_order(config)
    if config.token_ranks > 1:
        yield from check_tokens(config)
    if config.parallel.sequence_parallel:
        if tp == 1:
            yield Idle.of("parallel.sequence_parallel", "=true needs parallel.tp > 1: tp splits the "
                          "sequence")
        elif model.seq_len % tp:
            yield Problem.of("parallel.sequence_parallel", f"=true: model.seq_len={model.seq_len} is not "
                             f"divisible by parallel.tp={tp}")


def _check_scaling(model: ModelConfig) -> Iterator[Problem]:
    if model.rope_scaling is None:
        return
    given = f"={[float(each) for each in model.rope_scaling]}"
    if model.position != "rotary":
        yield Problem.of("model.rope_scaling", f"{given} needs model.position=rotary, and it is "
                         f"{model.position}; leave it out")
    elif len(model.rope_scaling) != 4:
        yield Problem.of("model.rope_scaling", f"{given}: must be the four numbers of Llama 3's scaling: "
                         "[factor, low_freq_factor, high_freq_factor, tokens of the sequences before], such "
                         "as [8, 1, 4, 8192]")
    else:
        factor, low, high, before = model.rope_scaling
        if not (all(map(math.isfinite, model.rope_scaling))
                and factor > 0 and 0 < low < high and before > 0):
            yield Problem.of("model.rope_scaling", f"{given}: factor, low_freq_factor and tokens must be "
                             "above 0, and high_freq_factor above low_freq_factor")


def _check_tiling(config: Config) -> Iterator[Problem]:
    asked, per_unit = config.model.tile_linears, config.parallel.layers_per_unit
    if asked is None:
        return
    if per_unit > 1:
        yield Problem.of("model.tile_linears", f"={asked} with parallel.layers_per_unit={per_unit}: one "
                         "makes units smaller, the other larger; leave one of the two out")
        return
    try:
        cut_layers(config)
    except InputError as error:
        yield Problem("model.tile_linears", str(error))


def _check_zero(config: Config) -> Iterator[Problem]:
    """Settings that have no effect at the ZeRO stage, and wrong values."""
    zero = config.zero
    for key, least in (("reduce_every", 2), ("residency", 3), ("prefetch", 3), ("persist_below", 3)):
        value = getattr(zero, key)
        if value not in (None, "auto") and zero.stage < least:
            yield Idle.of(f"zero.{key}", f"={value} needs zero.stage of at least {least}, and it is "
                          f"{zero.stage}: below, {_WHOLE[key]}; leave it out")
    for key, words in (("reduce_every", ("auto", "step")), ("residency", ("stage", "step"))):
        value = getattr(zero, key)
        if value is not None and value not in words and not (isinstance(value, int) and value >= 1):
            yield Problem.of(f"zero.{key}", f"={value}: must be a whole number of at least 1, or "
                             f"{' or '.join(words)}")
    if zero.shard_size is not None and config.data_ranks % zero.shard_size:
        yield Problem.of("zero.shard_size", f"={zero.shard_size} does not divide parallel.dp={config.dp}: "
                         "each group shares one copy, and all groups are of one size")


_WHOLE = {
    "reduce_every": "gradients are reduced once a step",
    **dict.fromkeys(("residency", "prefetch", "persist_below"),
                    "all parameters stay whole for the whole step"),
}


def _check_activation(config: Config) -> Iterator[Problem]:
    """Settings that have no effect with the activation policy, and wrong values."""
    activation = config.activation
    policy = activation.policy
    for key, policies in (("every", ("full",)), ("pieces", ("selective", "budget")), ("budget", ("budget",)),
                          ("partition", ("full", "budget")), ("offload", ("full", "budget")),
                          ("contiguous", ("full", "budget"))):
        value = getattr(activation, key)
        if value not in (None, False, "none") and policy not in policies:
            kept = policies == ("full", "budget")
            yield Idle.of(f"activation.{key}", f"={value} needs "
                          f"activation.policy={' or '.join(policies)}, and it is {policy}: "
                          f"{_KEPT if kept else 'leave it out'}")
    if activation.budget is None and policy == "budget":
        yield Problem.of("activation.policy", "=budget needs activation.budget, the most bytes of "
                         "activations that a rank may keep, such as 8GiB")
    elif activation.budget is not None:
        try:
            parse_bytes(activation.budget)
        except InputError as error:
            yield Problem.of("activation.budget", f": {error}")
    some = (KEYS,) if policy == "budget" else (*PIECES, KEYS)
    strange = [piece for piece in activation.pieces or () if piece not in some]
    if strange or (activation.pieces == [] and policy != "budget"):
        yield Problem.of("activation.pieces", f"={list(activation.pieces or ())}: must be some of "
                         f"{', '.join(some)}" + " with activation.policy=budget" * (policy == "budget"))


def _check_offload(config: Config) -> Iterator[Problem]:
    offload = config.offload
    if offload.ratio < 1 and offload.optimizer == "none":
        yield Idle.of("offload.ratio", f"={offload.ratio} needs offload.optimizer=cpu or nvme: it is a "
                      "share of what is offloaded")
    if offload.overlap == "next" and offload.optimizer == "none":
        yield Idle.of("offload.overlap", "=next needs offload.optimizer=cpu or nvme: with the optimizer "
                      "on the device there is no delay to overlap")
    if offload.gradients != "auto" and offload.optimizer == "none":
        yield Idle.of("offload.gradients", f"={offload.gradients} needs offload.optimizer=cpu or nvme: a "
                      "gradient goes to the host where it is stepped there")
    elif offload.gradients == "host" and config.zero.stage < 2:
        yield Idle.of("offload.gradients", f"=host needs zero.stage of at least 2, and it is "
                      f"{config.zero.stage}: below, whole gradients stay on the device until the step's end")
    if offload.optimizer != "none" and config.precision.master == "none":
        yield Problem.of("offload.optimizer", f"={offload.optimizer} with precision.master=none: the host "
                         "steps fp32 weights of its own; leave one of the two out")
    if "nvme" in (offload.optimizer, offload.parameters):
        if not offload.nvme_path:
            yield Problem("offload.nvme_path", "offload to nvme needs offload.nvme_path, a folder on a fast "
                          "disk of each machine")
    elif offload.nvme_path is not None:
        yield Idle.of("offload.nvme_path", f"={offload.nvme_path} needs offload.optimizer or "
                      "offload.parameters to be nvme")


def _check_copies(config: Config) -> Iterator[Problem]:
    """Addresses of copies that cannot be used, and settings of copies without an address."""
    checkpoint = config.checkpoint
    places = {"checkpoint.copy_to": checkpoint.copy_to}
    if is_store(config.train.resume):
        places["train.resume"] = config.train.resume
    for key, address in places.items():
        if address is not None and (problem := address_problem(address)) is not None:
            yield Problem.of(key, f"={address}: {problem}")
    if checkpoint.copy_to is None:
        for key in ("copy_keep", "copy_wait_s"):
            if (value := getattr(checkpoint, key)) != getattr(CheckpointConfig(), key):
                yield Idle.of(f"checkpoint.{key}", f"={value} needs checkpoint.copy_to, where copies go")
    elif (folder := local_path(checkpoint.copy_to)) is not None:
        if folder.expanduser().resolve() == (Path(config.run.dir) / "checkpoints").resolve():
            yield Problem.of("checkpoint.copy_to", f"={checkpoint.copy_to} is the folder of run.dir's "
                             "checkpoints: copies would replace what they are made from; give another folder")


_KEPT = "only a unit that is recomputed has a kept input"


def _check_precision(config: Config) -> Iterator[Problem]:
    precision = config.precision
    for key in ("grad_dtype", "reduce_dtype"):
        value = getattr(precision, key)
        if value not in ("fp32", precision.dtype):
            yield Problem.of(f"precision.{key}", f"={value}: must be fp32, or what precision.dtype is "
                             f"({precision.dtype})")
    if isinstance(config.model, ExpertsConfig) and precision.dtype != "fp32" and config.model.hidden % 2:
        yield Problem.of("model.hidden", f"={config.model.hidden} with precision.dtype={precision.dtype}: a "
                         "row of a token travels to experts with its weight in fp32 behind it, which must "
                         "begin at a multiple of 4 bytes; take an even one, or precision.dtype=fp32")
    if precision.dtype == "fp32" and precision.master == "none":
        yield Problem.of("precision.master", "=none: fp32 weights have no other copy to leave out; it is for "
                         "bf16 and fp16")
    if config.loss_scale is not None:
        for key in ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"):
            if (value := getattr(precision, key)) != getattr(PrecisionConfig(), key):
                yield Idle.of(f"precision.{key}", f"={value} is for a dynamic loss scale, and here it is "
                              f"{config.loss_scale:g}; leave it out, or set precision.loss_scale=dynamic")
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield Problem.of("precision.min_loss_scale", f"={precision.min_loss_scale} is above "
                         f"precision.initial_loss_scale={precision.initial_loss_scale}")


def _check_batch(config: Config) -> Iterator[Problem]:
    train = config.train
    if not train.global_batch_size % (train.micro_batch_size * config.dp):
        yield from check_group(config)
    else:
        yield Problem.of("train.global_batch_size", f"={train.global_batch_size} is not divisible by "
                         f"train.micro_batch_size={train.micro_batch_size} x parallel.dp={config.dp}")
    if train.eval_every and not config.data.validation_fraction:
        yield Idle.of("train.eval_every", f"={train.eval_every} needs data.validation_fraction > 0: "
                      "nothing is held out")
    if train.sample_every and not train.sample_prompts:
        yield Idle.of("train.sample_every", f"={train.sample_every} needs train.sample_prompts, the "
                      "beginnings of the texts that the model writes")


def _check_schedule(config: Config) -> Iterator[Problem]:
    train = config.train
    decay = config.optimizer.decay_steps or train.steps
    if config.optimizer.schedule == "wsd" and (config.optimizer.wsd_decay_steps or 0) > decay:
        yield Problem.of("optimizer.wsd_decay_steps", f"={config.optimizer.wsd_decay_steps} is longer than "
                         f"optimizer.decay_steps={decay}")
    if config.optimizer.min_lr > config.optimizer.lr:
        yield Problem.of("optimizer.min_lr", f"={config.optimizer.min_lr} is above "
                         f"optimizer.lr={config.optimizer.lr}")


def warnings(config: Config) -> list[str]:
    """Settings that can run, but that a person may not have meant."""
    lines, steps = [*filter(None, [unlike(config)])], config.train.steps
    if config.data.loss_mask != "none" and config.data.packing == "stream":
        lines.append(f"data.loss_mask={config.data.loss_mask} with data.packing=stream: windows cut "
                     "examples, and may part an answer from its prompt; data.packing=best-fit keeps them "
                     "whole")
    if config.data.packing == "best-fit" and not config.data.document_mask:
        lines.append("data.packing=best-fit without data.document_mask=true: attention sees the other "
                     "documents of the window")
    lines += _of_the_rate(config.optimizer, steps)
    if config.num_microbatches < config.num_stages and config.parallel.pp > 1:
        lines.append(f"{config.num_microbatches} micro-batches for {config.num_stages} pipeline stages: most "
                     "of the step is bubble; raise train.global_batch_size or lower train.micro_batch_size")
    group, pp = config.parallel.group, config.parallel.pp
    if isinstance(group, int) and config.grouped and group < pp:
        lines.append(f"parallel.group={group} is less than parallel.pp={pp}: each group fills and drains the "
                     "pipeline, most of which is idle meanwhile; use groups of several times as many "
                     "micro-batches as positions")
    if config.activation.partition and (config.parallel.sequence_parallel or config.parallel.tp == 1):
        why = ("sequence parallelism has cut kept inputs over tp already" if config.parallel.sequence_parallel
               else "parallel.tp=1: there is nobody to share kept inputs with")
        lines.append(f"activation.partition=true does nothing here: {why}")
    parallel = config.parallel
    if parallel.split_messages == "on" and (parallel.sequence_parallel or 1 in (parallel.tp, parallel.pp)):
        why = (f"parallel.pp={parallel.pp}: there are no messages" if parallel.pp == 1 else
               f"parallel.tp={parallel.tp}: there is nobody to share messages with" if parallel.tp == 1 else
               "sequence parallelism has cut messages over tp already")
        lines.append(f"parallel.split_messages=on does nothing here: {why}")
    if config.model.tile_linears is not None and all(len(cut) == 1 for cut in cut_layers(config)):
        lines.append(f"model.tile_linears={config.model.tile_linears} does nothing here: no layer is larger")
    elif "norm" in config.pieces and not any(
            kept.piece == "norm" for layer in layers_of(config)
            for kept in layer.cost(share_of(config)).saved):
        lines.append("activation.pieces: norm does nothing here: the tiles of a layer share its norm's "
                     "output, which is kept")
    if KEYS in config.pieces and (why := no_keys(config)):
        lines.append(f"activation.pieces: {KEYS} does nothing here: {why}")
    kept, every = config.checkpoint.keep * config.checkpoint.every, config.run.verify_every
    if 0 < kept < every:
        lines.append(f"run.verify_every={every} is longer than checkpoint.keep x checkpoint.every = {kept}: "
                     "when a machine computes wrongly, no checkpoint is left from before it was last "
                     "verified")
    if config.activation.contiguous and config.activation.offload == "cpu":
        lines.append("activation.contiguous=true does nothing here: activation.offload=cpu has an arena of "
                     "the host for kept inputs")
    return lines


def _of_the_rate(optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    """Schedules of the learning rate that end before they begin, or have keys without an effect."""
    warmup, decay, last = optimizer.warmup_steps, optimizer.decay_steps, optimizer.wsd_decay_steps
    decays, falls = optimizer.schedule != "constant", "the learning rate falls from optimizer.lr="
    falls += f"{optimizer.lr:g} to optimizer.min_lr={optimizer.min_lr:g} in one step"
    if not optimizer.lr:
        yield "optimizer.lr=0: no step changes a weight"
    if warmup > steps:
        yield (f"optimizer.warmup_steps={warmup} is longer than train.steps={steps}: the learning rate never "
               "reaches optimizer.lr")
    elif decays and warmup == steps and (decay or 0) <= steps:
        yield (f"optimizer.warmup_steps={warmup} is all of train.steps={steps}: the learning rate reaches "
               "optimizer.lr in the last step, and never decays")
    if not decays:
        for key, value, usual in (("decay_steps", decay, None), ("min_lr", optimizer.min_lr, 0.0)):
            if value != usual:
                yield f"optimizer.{key}={value:g} does nothing here: optimizer.schedule=constant"
    elif decay is not None and decay <= warmup < steps:
        yield (f"optimizer.decay_steps={decay} is over when optimizer.warmup_steps={warmup} are: {falls}, "
               "and stays there; decay_steps count from the first step of the run, warm-up included")
    elif decay is not None and decay < steps and not optimizer.min_lr:
        yield (f"optimizer.decay_steps={decay} is less than train.steps={steps}, and optimizer.min_lr is 0: "
               f"the last {steps - decay} of the steps change no weight")
    if optimizer.schedule != "wsd":
        if last is not None:
            yield (f"optimizer.wsd_decay_steps={last} does nothing here: "
                   f"optimizer.schedule={optimizer.schedule}")
    elif last is not None and warmup < (end := decay or steps) < warmup + last:
        yield (f"optimizer.wsd_decay_steps={last} and optimizer.warmup_steps={warmup} are more than the "
               f"{end} steps of the schedule: the decay has the last {end - warmup}")
    elif last == 0:
        yield f"optimizer.wsd_decay_steps=0: {falls}, after optimizer.decay_steps={decay or steps}"
