"""`threed init` chooses the mildest settings that fit: no single one of them can be milder."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from threed.base.errors import InputError
from threed.base.quantity import parse_memory
from threed.base.remember import remembering
from threed.cli.runs import _fits, _parameters
from threed.interop import init

# Key -> its values, from the mildest on
MILD: dict[str, list[Any]] = {
    "offload.parameters": ["none", "cpu"], "offload.optimizer": ["none", "cpu"],
    "activation.policy": ["none", "selective", "full"], "zero.stage": [1, 2, 3]}


def _milder(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The config with one setting milder, each."""
    return [{**values, key: value} for key, mild in MILD.items() if key in values
            for value in mild[:mild.index(values[key])]]


@cache
def _chosen(model: str, devices: int, memory: str) -> dict[str, Any]:
    return init.choose(model, devices, parse_memory(memory), _fits, _parameters(model))


@pytest.mark.parametrize("model, devices, memory", [
    ("mixtral-8x7b", 64, "80GB"), ("llama3.2-1b", 1, "24GB"),
    ("llama3.2-1b", 1, "16GB"), ("gpt2-xl", 8, "16GB"), ("gpt2-xl", 2, "12GB"), ("llama3.2-3b", 4, "24GB")])
@remembering()
def test_nothing_milder_fits(model: str, devices: int, memory: str):
    values, limit = _chosen(model, devices, memory), parse_memory(memory)
    assert _fits(values, limit)
    assert [each for each in _milder(values) if _fits(each, limit)] == []


def test_mixtral_on_64_devices_computes_nothing_again():
    values = _chosen("mixtral-8x7b", 64, "80GB")
    assert "activation.policy" not in values and values["zero.stage"] == 1
    assert (values["parallel.tp"], values["parallel.pp"]) == (8, 4)


def _needs(values: dict[str, Any], weight: list[float]) -> float:
    """What a made-up plan needs: less where settings are less mild."""
    strict = [mild.index(values.get(key, mild[0])) for key, mild in MILD.items()]
    ranks = values.get("parallel.tp", 1) * values.get("parallel.pp", 1)
    return 100 / ranks - sum(w * s for w, s in zip(weight, strict, strict=True))


@pytest.mark.parametrize("seed", range(200))
def test_nothing_milder_fits_whatever_a_setting_saves(seed: int):
    draw = random.Random(seed)
    name, devices = draw.choice(init.names()), draw.choice([1, 2, 3, 4, 6, 8, 16, 24, 64, 512])
    weight, limit = [draw.uniform(0, 30) for _ in MILD], draw.randrange(100)
    pp = draw.choice([None, None, 1, 2])

    def fits(values: dict[str, Any], limit: int) -> bool:
        return _needs(values, weight) <= limit

    try:
        values = init.choose(name, devices, limit, fits, 10**9, pp)
    except InputError as error:
        assert "give more --devices or --memory" in str(error) or "--pp" in str(error)
        return
    assert _needs(values, weight) <= limit
    assert all(_needs(each, weight) > limit for each in _milder(values))
    if pp is not None:
        assert values.get("parallel.pp", 1) == pp
    assert "parallel.sequence_parallel" not in values or values["parallel.tp"] > 1


def test_what_does_not_fit_is_said_with_what_was_tried():
    with pytest.raises(InputError, match=r"does not fit on 8 devices of .*, even with parameters"):
        init.choose("llama3-70b", 8, 2**30, lambda values, limit: False, 7 * 10**10)
