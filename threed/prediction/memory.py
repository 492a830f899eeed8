"""Bytes of model states by formula, without a plan: what each ZeRO stage leaves on a rank. (Of a plan:
program/summary.)

ZeRO (Rajbhandari et al. 2020, section 5) for Psi parameters over N ranks, with P, G and O bytes a parameter
for parameters, gradients and optimizer state (2, 2 and 12 in 16 bit with fp32 master weights and Adam's two
moments):

    stage 0   Psi (P + G + O)
    stage 1   Psi (P + G) + Psi O / N
    stage 2   Psi P + Psi (G + O) / N
    stage 3   Psi (P + G + O) / N

The formulas neglect padding, the buffers that units share in turn, and activations. Under tp and pp, Psi is a
rank's own share, as if the model were cut evenly. With 16-bit parameters, fp32 gradients take 2 bytes more;
the output gives both.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from threed.base.errors import InputError
from threed.base.quantity import BYTES, many, show_bytes, show_count
from threed.optim.registry import OPTIMIZERS
from threed.planner import analyse
from threed.program.summary import stages
from threed.schema import Config, ZeroConfig

STAGES = (0, 1, 2, 3)


def model_states(parameters: float, shards: int, dtype: str, master: bool,
                 optimizer: str = "adamw") -> dict[str, Any]:
    """Bytes a rank by stage, with gradients in `dtype` and in fp32. `parameters`: of a rank, before ZeRO."""
    element = BYTES[dtype]
    state = OPTIMIZERS[optimizer].bytes + (4 if dtype != "fp32" and master else 0)
    by_grad = {grad: {f"stage_{stage}": _bytes(stage, parameters, shards, element, grad, state)
                      for stage in STAGES}
               for grad in (element, 4)}
    return {"parameters": parameters, "shards": shards,
            "bytes_per_parameter": {"parameter": element, "gradient": element, "optimizer": state},
            **by_grad[element], "fp32_gradients": by_grad[4]}


def of_size(parameters: float, shards: int, dtype: str, master: str, optimizer: str) -> dict[str, Any]:
    """`model_states` for options of the command line. Raises InputError for an unknown value."""
    if dtype not in ("fp32", "bf16", "fp16") or master not in ("fp32", "none"):
        raise InputError(f"--dtype {dtype} --master {master}: give fp32, bf16 or fp16, and fp32 or none")
    if optimizer not in OPTIMIZERS:
        raise InputError(f"--optimizer {optimizer}: must be one of {', '.join(OPTIMIZERS)}")
    return model_states(parameters, shards, dtype, master == "fp32", optimizer)


def _bytes(stage: int, parameters: float, shards: int, param: int, grad: int, state: int) -> float:
    divisor = [shards if stage >= least else 1 for least in (3, 2, 1)]
    return parameters * sum(part / by for part, by in zip((param, grad, state), divisor, strict=True))


def of_config(config: Config) -> dict[str, Any]:
    """The exact bytes from the plan of a config: at each ZeRO stage, for the pipeline position that holds
    most."""
    values: dict[str, Any] = {"parameters": 0, "shards": config.shard_size}
    for stage in STAGES:
        rows = stages(analyse(at_stage(config, stage)))
        most = max(rows, key=lambda row: row.fixed_bytes)
        values["parameters"] = max(values["parameters"], *(row.parameters for row in rows))
        values[f"stage_{stage}"] = most.fixed_bytes - most.buffer_bytes
        values[f"buffers_{stage}"] = most.buffer_bytes
    return values


def at_stage(config: Config, stage: int) -> Config:
    """A config with another ZeRO stage, without the settings that have no meaning at that stage."""
    other, zero = copy.deepcopy(config), config.zero
    other.zero = replace(zero, stage=stage) if stage >= 3 else ZeroConfig(
        stage, zero.shard_size if stage >= 1 else None, zero.reduce_every if stage >= 2 else "auto")
    return other


def show(values: dict[str, Any]) -> str:
    """The values of `of_size` or `of_config` as a table."""
    exact = "buffers_0" in values  # from `of_config`
    lines = [f"a rank has {show_count(values['parameters'])} parameters before ZeRO, and "
             + (f"shares copies with {many(values['shards'] - 1, 'other')}" if values["shards"] > 1 else
                "shares copies with none"),
             "stage".ljust(8) + "model states".rjust(14)
             + ("buffers" if exact else "fp32 gradients").rjust(16)]
    for stage in STAGES:
        other = values[f"buffers_{stage}"] if exact else values["fp32_gradients"][f"stage_{stage}"]
        lines.append(f"{stage}".ljust(8) + show_bytes(values[f"stage_{stage}"]).rjust(14)
                     + show_bytes(other).rjust(16))
    ask = ("threed check CONFIG --memory 80GB says whether it fits" if exact else
           "threed init FILE --model NAME --devices N --memory 80GB finds what fits")
    return "\n".join([*lines, f"activations come on top: {ask}"])
