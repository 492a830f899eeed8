"""What values of Megatron-LM's options are here: a function a row of `megatron` that needs one."""

from __future__ import annotations

from math import prod
from typing import Any

from threed.base.errors import InputError
from threed.config.keys.megatron_muon import NAMES
from threed.config.keys.table import Dropped, Given, Refused

DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
RANKS = (("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes"), ("num_processes", ""), ("world_size", ""))
GPT2_VOCABULARY = 50257
SHAPES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "lion": "lion", **NAMES}
NORMS = {"LayerNorm": "layernorm", "layernorm": "layernorm", "RMSNorm": "rmsnorm", "rmsnorm": "rmsnorm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "rotary": "rotary"}
DTYPES = {**dict.fromkeys(("fp32", "32", "float32", "float"), "fp32"),
          **dict.fromkeys(("bf16", "bfloat16", "bf16_mixed"), "bf16"),
          **dict.fromkeys(("fp16", "float16", "half", "fp16_mixed", "16_mixed"), "fp16")}
BACKENDS = {"auto": "auto", "flash": "flash", "fused": "cudnn"}
PIECES = {"core_attn": "attention", "layernorm": "norm"}
_YEAR = 365 * 24 * 60  # minutes
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def number(given: Given, name: str) -> int:
    """A size that another option's value depends on."""
    value = given.get(name)
    if value is None:
        raise Refused(f"it needs --{name.replace('_', '-')}, which is not given")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"--{name.replace('_', '-')} {value}: must be a whole number above 0")
    return value


def one_of(names: dict[str, Any], what: str):
    def take(value: Any, _: Given) -> Any:
        if value not in names:
            raise Refused(f"threed has no {what} like {value}")
        return names[value]

    return take


_OTHERS = {"tp": "tensor_model_parallel", "cp": "context_parallel", "pp": "pipeline_model_parallel"}


def dp(_: Any, given: Given) -> Any:
    """From a launcher's options, unless --devices says it."""
    if given["dp"] is not None:
        return {"parallel.dp": given["dp"]}
    each, machines = next((pair for pair in RANKS if pair[0] in given), RANKS[0])
    if each not in given:
        raise Dropped("how many ranks a machine has is not said: parallel.dp stays auto; give --devices")
    world = number(given, each) * (number(given, machines) if machines in given else 1)
    sizes = {axis: given.get(f"{name}_size", 1) for axis, name in _OTHERS.items()}
    others = prod(sizes.values())
    shown = " x ".join(axis for axis in sizes if axis != "cp" or sizes[axis] > 1)
    if world % others:
        raise Dropped(f"{world} processes are not a multiple of {shown} = {others}: parallel.dp stays auto; "
                      "give --devices")
    return {"parallel.dp": world // others}


def cp_form(value: Any, given: Given) -> Any:
    """Of --cp-comm-type, a name or one for each layer: how attention reaches whole sequences changes no
    number."""
    names = value if isinstance(value, list) else [value]
    if "a2a+p2p" in names:
        raise Refused("a2a+p2p: parallel.cp is one group of ranks, and has no groups in groups")
    if {*names} == {"a2a"} and given.get("context_parallel_size", 1) > 1:
        return {"parallel.cp_form": "heads"}
    others = sorted({str(name) for name in names} - {"all_gather"})
    instead = f", and not sent by {' or '.join(others)}" if others else ""
    raise Dropped(f"keys and values are gathered{instead}, to the same numbers")


def least_batch(given: Given) -> dict[str, Any]:
    """The batch size of a run that gives none: a micro-batch for each replica."""
    try:
        return {"global_batch_size": dp(None, given)["parallel.dp"] * given.get("micro_batch_size", 1)}
    except (Dropped, Refused, InputError, TypeError):
        return {}


def precision(value: Any, given: Given) -> str:
    """megatron.core's params_dtype, and the names of Megatron-Bridge's mixed_precision."""
    if given.get("bf16") or given.get("fp16"):
        raise Dropped("--bf16 or --fp16 says it")
    name = str(value).removeprefix("torch.").replace("-", "_")
    if name not in DTYPES:
        raise Refused(f"threed has no precision like {value}: precision.dtype is fp32, bf16 or fp16")
    return DTYPES[name]


def gated_width(hidden: int) -> int:
    """The hidden layer of a gated MLP where none is given."""
    return int(4 * hidden * 2 / 3 / 64) * 64


def steps_of(samples: Any, given: Given) -> int:
    return round(samples / number(given, "global_batch_size"))


def steps_of_tokens(tokens: Any, given: Given) -> int:
    return round(tokens / number(given, "global_batch_size") / number(given, "seq_length"))


def train_samples(samples: Any, given: Given) -> Any:
    if "train_tokens" in given:
        raise Dropped("--train-tokens says when the run ends")
    return steps_of(samples, given)


def warm_up_share(value: Any, given: Given) -> int:
    name = next((name for name in ("lr_decay_iters", "train_iters") if name in given), None)
    if name is not None:
        return round(value * number(given, name))
    name = next((name for name in ("lr_decay_samples", "train_samples") if name in given), "train_iters")
    return round(value * number(given, name) / number(given, "global_batch_size"))


def virtual(stages: int | None, given: Given) -> dict[str, Any]:
    if given.get("pipeline_model_parallel_size", 1) == 1:
        raise InputError("virtual pipeline stages need --pipeline-model-parallel-size above 1")
    if stages == 1:
        return {}
    return {"parallel.schedule": "interleaved", "parallel.virtual_stages": stages}


def layers_per_stage(value: Any, given: Given) -> dict[str, Any]:
    layers, positions = number(given, "num_layers"), given.get("pipeline_model_parallel_size", 1)
    if layers % (positions * value):
        raise InputError(f"--num-layers={layers} is not a multiple of "
                         f"--pipeline-model-parallel-size={positions}"
                         f" x --num-layers-per-virtual-pipeline-stage={value}")
    return virtual(layers // (positions * value), given)


def distributed(value: Any, given: Given) -> Any:
    if given.get("use_megatron_fsdp"):
        raise Dropped("--data-parallel-sharding-strategy says what is sharded")
    return 1


def units_of_stages(value: Any, _: Given) -> Any:
    raise Refused(f"stages are even by default: set parallel.stage_units for {value}")


def betas(names: tuple[str, str], optimizer: str):
    def take(_: Any, given: Given) -> list[float]:
        asked = given.get("optimizer", "adam")
        if ("adam" if asked in NAMES else asked) != optimizer:  # (Adam steps what Muon does not)
            raise Dropped(f"--optimizer is not {optimizer}")
        return [given[name] for name in names]

    return take


def sequence_parallel(value: Any, given: Given) -> Any:
    if given.get("tensor_model_parallel_size", 1) == 1:
        raise Dropped("Megatron-LM turns it off, too, where tensor-model-parallel-size is 1")
    return True


def recompute(value: Any, given: Given) -> dict[str, Any]:
    if value == "selective":
        pieces = given.get("recompute_modules", ["core_attn"])
        strange = [piece for piece in pieces if piece not in PIECES]
        if strange:
            raise Refused(f"threed computes attention, norm and mlp_act again (activation.pieces), not "
                          f"{', '.join(strange)}")
        return {"activation.policy": "selective", "activation.pieces": [PIECES[piece] for piece in pieces]}
    if value != "full":
        raise InputError(f"--recompute-granularity {value}: must be full or selective")
    count = given.get("recompute_num_layers", 1)
    if given.get("recompute_method", "uniform") == "uniform":
        per_unit = {"parallel.layers_per_unit": count} if count > 1 else {}
        return {"activation.policy": "full", **per_unit}
    layers = number(given, "num_layers") // given.get("pipeline_model_parallel_size", 1)
    if count < layers and layers % count:
        raise Refused(f"{count} of the {layers} layers of a stage: activation.every recomputes all, or every "
                      "second, third ...; activation.policy=budget recomputes as few as fit")
    return {"activation.policy": "full", **({"activation.every": layers // count} if count < layers else {})}


def positions(value: Any, given: Given) -> Any:
    length = given.get("seq_length")
    if given["position_embedding_type"] == "learned_absolute" and length is not None and value != length:
        raise Refused(f"a table of {value} positions for sequences of {length}: here it has as many rows as "
                      "a sequence has tokens")
    raise Dropped("there are as many positions as a sequence has tokens")


def qk_norm(value: Any, given: Given) -> Any:
    if NORMS.get(given.get("normalization", "")) != "rmsnorm":
        raise Refused("norms of queries and keys (model.qk_norm) are RMS norms here, without a bias: "
                      "--normalization RMSNorm")
    return True


def rope_scaling(value: Any, given: Given) -> Any:
    """Megatron-LM's numbers are those of Llama 3.1, but the factor."""
    if POSITIONS.get(given["position_embedding_type"]) != "rotary":
        raise Dropped("positions are not rotary")
    return [float(given.get("rope_scaling_factor", 8)), 1.0, 4.0, 8192.0]


def of_rotary(value: Any, given: Given) -> Any:
    if POSITIONS.get(given["position_embedding_type"]) != "rotary":
        raise Dropped("positions are not rotary")
    return float(value)


def whole_share(value: Any, given: Given) -> Any:
    if value != 1:
        raise Refused(f"all of a head is rotated, not {value} of it")
    raise Dropped("all of a head is rotated")


def groups(value: Any, given: Given) -> Any:
    if not given.get("group_query_attention"):
        raise Dropped("without --group-query-attention Megatron-LM does not read it")
    return value


def vocabulary(_: Any, given: Given) -> Any:
    """The size of GPT-2's vocabulary, where a file or a name says that it is GPT-2's."""
    kind = given.get("tokenizer_type", "GPT2BPETokenizer")
    if "vocab_size" in given or kind == "NullTokenizer":
        raise Dropped("--vocab-size says it")
    if kind == "GPT2BPETokenizer":
        return {"model.vocab": GPT2_VOCABULARY}
    raise Refused("the vocabulary's size is in the tokenizer: set model.vocab")


def tokenizer(value: Any, given: Given) -> Any:
    if str(value).endswith("tokenizer.json"):
        return value
    raise Dropped("data that are tokens already need none; for text, data.tokenizer takes a tokenizer.json")


def source(value: Any, given: Given) -> Any:
    names = [each for each in value if not isinstance(each, (int, float))]
    if len(names) == 1:
        return str(names[0])
    if len(value) != 2 * len(names) or names != value[1::2]:
        raise Refused("several sources without weights are taken by their sizes: give data.mix weights")
    return {"data.mix": [f"{weight} {name}" for weight, name in zip(value[::2], names, strict=True)]}


def documents(value: Any, given: Given) -> Any:
    if missing := [name for name in DOCUMENTS if not given.get(name)]:
        raise Refused(f"data.document_mask does all three of {', '.join(DOCUMENTS)}; not given: "
                      f"{', '.join(missing)}")
    return True


def held_out(value: Any, given: Given) -> Any:
    try:
        train, valid, *test = (float(each) for each in str(value).replace(" ", "").split(","))
        return round(valid / (train + valid + sum(test)), 6)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"--split {value}: give three shares, such as 969,30,1") from None


def eval_every(value: Any, given: Given) -> Any:
    shares = str(given.get("split", "1,1")).split(",")
    if given.get("eval_iters") == 0 or not given.get("eval_iters", 1) or (
            len(shares) > 1 and float(shares[1] or 0) == 0):
        raise Dropped("there is nothing to evaluate: --eval-iters or the second share of --split is 0")
    return value


def eval_batches(value: Any, given: Given) -> Any:
    if not value:
        raise Dropped("nothing is evaluated")
    return value


def resume(value: Any, given: Given) -> Any:
    if value == given.get("save"):
        raise Dropped("train.resume=auto goes on from run.dir, which --save names")
    raise Refused("threed does not read checkpoints of Megatron-LM")


def of_fp16(convert: Any = lambda value: value):
    def take(value: Any, given: Given) -> Any:
        if not given.get("fp16"):
            raise Dropped("--fp16 is not given")
        if "loss_scale" in given:
            raise Dropped("--loss-scale fixes the scale")
        return convert(value)

    return take


def fixed_scale(value: Any, given: Given) -> Any:
    if not given.get("fp16"):
        raise Dropped("--fp16 is not given")
    return value


def decay_of_wsd(value: Any, given: Given) -> Any:
    if given.get("lr_decay_style") != "WSD":
        raise Dropped("--lr-decay-style is not WSD")
    if value != "linear":
        raise Refused(f"wsd decays linearly here, not by {value} (Megatron-LM's default is exponential)")
    return {}


def gradients(dtype: str):
    return lambda _, given: {"precision.grad_dtype": dtype, "precision.reduce_dtype": dtype}


def instances(value: Any, given: Given) -> Any:
    dp = given["dp"]
    if value == 1:
        return {}
    if dp is None or dp % value:
        raise Refused("zero.shard_size is parallel.dp / it: give --devices")
    return dp // value


def stop_after(minutes: Any, _: Given) -> str:
    if not isinstance(minutes, (int, float)) or minutes <= 0:
        raise InputError(f"--exit-duration-in-mins {minutes}: must be a number of minutes above 0")
    if minutes >= _YEAR:
        raise Dropped("so many minutes are for ever")
    return f"{round(minutes)}m"


def exit_interval(steps: Any, given: Given) -> Any:
    if isinstance(steps, int) and isinstance(given.get("train_iters"), int) and steps >= given["train_iters"]:
        raise Dropped("the run ends before, or there")
    raise Refused(f"a job ends at each multiple of {steps} steps: run.stop_after ends one by its time")


def one_order(value: Any, _: Given) -> Any:
    if value != "single":
        raise Refused(f"threed has no order of samples like {value}: each source is shuffled by train.seed")
    raise Dropped("each source is shuffled by train.seed")


def of_gelu(_: Any, given: Given) -> Any:
    if given.get("swiglu"):
        raise Dropped("it is about GELU")
    raise Refused("threed has no exact GELU: it has the tanh form")


def rotary_alone(value: Any, given: Given) -> Any:
    if POSITIONS.get(given["position_embedding_type"]) != "rotary":
        raise Refused("threed has no model without positions: model.position is rotary or learned")
    raise Dropped("model.position=rotary has no table of positions")


def older_recompute(value: Any, given: Given) -> dict[str, Any]:
    """--activations-checkpoint-method, with the number of layers, before it was --recompute-method."""
    return recompute("full", {**given, "recompute_method": value, "recompute_num_layers": given.get(
        "activations_checkpoint_num_layers", 1)})


def checkpointed(value: Any, given: Given) -> dict[str, Any]:
    """--checkpoint-activations, with --checkpoint-num-layers."""
    return recompute("full", {**given, "recompute_method": "uniform", "recompute_num_layers": given.get(
        "checkpoint_num_layers", 1)})


def on_ranks(key: str, value: Any):
    """What is done to the kept input of a layer that is recomputed."""
    def take(_: Any, given: Given) -> Any:
        if not (given.get("checkpoint_activations") or given.get("deepspeed_activation_checkpointing")):
            raise Dropped("nothing is recomputed")
        return {key: value}

    return take


def ends(found: dict[str, Any]) -> list[str]:
    """Of --train-iters and --train-tokens, of which a run ends by what is reached first, leaves that one;
    a note about it."""
    iterations, tokens = found.get("train_iters"), found.get("train_tokens")
    sizes = found.get("global_batch_size"), found.get("seq_length")
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) and each > 0
               for each in (iterations, tokens, *sizes)):
        return []
    steps = steps_of_tokens(tokens, found)
    late = "train_iters" if steps <= iterations else "train_tokens"  # pyright: ignore[reportOperatorIssue]
    del found[late]
    return [f"--{late.replace('_', '-')} is not reached: --train-iters are {iterations} steps, and "
            f"--train-tokens {steps}"]
