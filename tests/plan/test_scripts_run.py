"""A run whose script has added a schedule or an optimizer, on the command line, which does not have it."""

from __future__ import annotations

import json

import pytest

import threed
from threed.base.errors import ConfigError
from threed.planner.from_config import load_config


@pytest.mark.parametrize(("key", "value", "led"), [
    ("parallel.schedule", "eager", True), ("optimizer.name", "mine", True), ("train.steps", -1, False)])
def test_the_message_leads_to_the_script(key, value, led, tmp_path):
    values, (section, name) = threed.load("configs/toy.yaml").to_dict(), key.split(".")
    values[section][name] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"{key}={value}") as caught:
        load_config(tmp_path)
    assert ("call threed.evaluate, threed.generate or threed.report there" in str(caught.value)) == led
    assert all(hasattr(threed, each) for each in ("evaluate", "generate", "report"))
