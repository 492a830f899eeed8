"""Megatron-LM's options of Muon, and what each is here."""

from __future__ import annotations

from typing import Any

from threed.config.keys.table import NO_KEY, Dropped, Given, Key, Refused

NAMES = {"muon": "muon", "dist_muon": "muon"}  # values of --optimizer


def _of_muon(row: Key) -> Key:
    """The row, which says nothing of a run with another optimizer."""
    def take(value: Any, given: Given) -> Any:
        if given.get("optimizer") not in NAMES:
            raise Dropped("the optimizer is not muon")
        return row.taken(value, given)

    return row._replace(take=take)


_NESTEROV = "muon_nesterov", "muon_use_nesterov"


def _momentum(value: Any, given: Given) -> dict[str, Any]:
    """optimizer.momentum and nesterov: Megatron-LM has a switch for what is the default here."""
    return {"optimizer.momentum": value, "optimizer.nesterov": any(given.get(each) for each in _NESTEROV)}


def _split(value: Any, _: Given) -> Any:
    if not value:
        raise Refused("queries, keys and values are matrices of their own, or each of their heads is "
                      "(optimizer.matrices)")
    raise Dropped("queries, keys and values are always turned apart")


def _scale(value: Any, given: Given) -> Any:
    factor = given.get("muon_extra_scale_factor", 1.0)
    if value == "spectral" and factor == 0.2:
        return "match_rms_adamw"
    if value == "shape_scaling" and factor == 1.0:
        return "original"
    raise Refused(f"{value} with --muon-extra-scale-factor {factor:g}: threed has spectral with 0.2 "
                  "(match_rms_adamw) and shape_scaling with 1 (original)")


def _tp_mode(value: Any, given: Given) -> Any:
    if value == "blockwise" and given.get("tensor_model_parallel_size", 1) > 1:
        raise Refused("blockwise turns the parts of a matrix apart, and numbers would depend on tp; threed "
                      "turns whole matrices")
    raise Dropped("whole matrices are turned, whatever parallel.tp is")


def _coefficients(value: Any, _: Given) -> Any:
    if value == "simple":
        raise Dropped("optimizer.turn_coefficients has the same")
    raise Dropped(f"{value} has other coefficients in each iteration, and optimizer.turn_coefficients the "
                  "same in all: both bring singular values to about 1, and numbers differ")


def _beside(value: Any, _: Given) -> Any:
    if value != "adam":
        raise Refused(f"what is in no matrix is stepped by adamw, not by {value}")
    raise Dropped("what is in no matrix is stepped by adamw")


KEYS = tuple(map(_of_muon, (
    Key("muon_momentum", "optimizer.momentum", _momentum),
    *(Key(name, "optimizer.nesterov=true") for name in _NESTEROV),
    Key("muon_num_ns_steps", "optimizer.turns"),
    Key("muon_split_qkv", NO_KEY + "queries, keys and values are always turned apart", _split),
    Key("muon_no_split_qkv", NO_KEY + "queries, keys and values are always turned apart",
        lambda value, given: _split(not value, given)),
    Key("muon_scale_mode", "optimizer.turn_scale (spectral with a factor of 0.2 is match_rms_adamw, "
        "shape_scaling is original)", _scale),
    Key("muon_extra_scale_factor", NO_KEY + "optimizer.turn_scale has its factor"),
    Key("muon_tp_mode", NO_KEY + "whole matrices are turned", _tp_mode),
    Key("muon_fp32_matmul_prec", NO_KEY + "optimizer.turn_dtype says in what matrices are turned"),
    Key("muon_coefficient_type", NO_KEY + "optimizer.turn_coefficients", _coefficients),
    Key("muon_scalar_optimizer", NO_KEY + "adamw steps what is in no matrix", _beside),
)))


def defaults_of_muon(given: Given) -> dict[str, Any]:
    """Values for the options of Muon that are not given."""
    if given.get("optimizer") not in NAMES:
        return {}
    return {"muon_momentum": 0.95, "muon_num_ns_steps": 5, "muon_scale_mode": "spectral",
            "muon_tp_mode": "blockwise", "muon_coefficient_type": "quintic"}
