"""The loss scaler alone: when it halves, when it doubles, where it stops, and what it remembers."""

from __future__ import annotations

import json
import math
import random

import pytest

from threed.config.load import load
from threed.optim.loss_scale import LossScaler


def scaler(*overrides: str) -> LossScaler:
    return LossScaler.of(load(None, ["precision.dtype=fp16", *overrides]))


def scales(subject: LossScaler, steps: str) -> list[float]:
    """The scale after each step: `x` overflows, `.` does not."""
    after = []
    for step in steps:
        subject.update(step == "x")
        after.append(subject.scale)
    return after


SMALL = ("precision.initial_loss_scale=1024", "precision.loss_scale_window=3")


@pytest.mark.parametrize("hysteresis, steps, expected", [
    (1, "x", [512]), (1, "xx", [512, 256]),
    (2, "xxx", [1024, 512, 256]),  # the second halves, and every one after it
    (2, "x.x", [1024, 1024, 512]),  # good steps between do not begin the count anew
    (3, "xxxx", [1024, 1024, 512, 256]),
    (2, "...", [1024, 1024, 2048]), (2, "......", [1024, 1024, 2048, 2048, 2048, 4096]),
    (2, "..x...", [1024, 1024, 1024, 1024, 1024, 2048]),  # an overflow begins the row of good steps anew
    (2, "x...xx", [1024, 1024, 1024, 2048, 2048, 1024]),  # doubling begins the count of overflows anew
    (2, "xx..x", [1024, 512, 512, 512, 256]),  # before it doubles, each overflow halves
])
def test_hysteresis_and_window(hysteresis, steps, expected):
    """A scale that halves too soon loses small gradients; one that halves too late loses steps."""
    assert scales(scaler(*SMALL, f"precision.hysteresis={hysteresis}"), steps) == expected


def test_never_below_the_minimum():
    """A scale that goes to zero, and the gradients with it; and whether a smaller scale can still help."""
    subject = scaler("precision.initial_loss_scale=16", "precision.min_loss_scale=3",
                     "precision.hysteresis=1")
    states = [(subject.scale, subject.exhausted)]
    for _ in range(4):
        subject.update(True)
        states.append((subject.scale, subject.exhausted))
    assert states == [(16, False), (8, False), (4, False), (3, True), (3, True)]


def test_finite_however_long():
    """A scale that doubles to infinity: no step is finite again."""
    subject = scaler("precision.loss_scale_window=1")
    assert max(scales(subject, "." * 3000)) == 2.0**96
    assert math.isfinite(subject.scale * 2.0**31)  # a bound on gradients times scale that fp32 holds


@pytest.mark.parametrize("overrides", [["precision.loss_scale=64"], ["precision.dtype=bf16"],
                                       ["precision.dtype=fp32"]])
def test_fixed(overrides):
    """A fixed scale that changes; an overflow under it that is treated as one that will pass."""
    subject = scaler(*overrides)
    assert subject.exhausted and not subject.dynamic
    assert set(scales(subject, "x.x" * 2000)) == {64.0 if "64" in overrides[0] else 1.0}


def test_dynamic_where_asked_for():
    """loss_scale=dynamic that is obeyed in fp16 only, or not even there."""
    assert LossScaler.of(load(None, ["precision.dtype=bf16", "precision.loss_scale=dynamic"])).dynamic
    assert scaler().dynamic and scaler("precision.loss_scale=dynamic").dynamic and scaler().scale == 65536


@pytest.mark.parametrize("seed", range(20))
def test_goes_on_where_it_was(seed):
    """A checkpoint that forgets good steps or overflows: after a resume the scale changes at other steps."""
    rng = random.Random(seed)
    steps = "".join(rng.choice("....x") for _ in range(60))
    at = rng.randrange(60)
    unbroken, before, after = (scaler(*SMALL) for _ in range(3))
    scales(before, steps[:at])
    after.restore(json.loads(json.dumps(before.state())))
    assert scales(unbroken, steps)[at:] == scales(after, steps[at:])


def test_what_a_checkpoint_does_not_change():
    """A fixed scale is the config's, whatever was saved; and a checkpoint from before there was a scale says
    nothing."""
    saved = {"scale": 4.0, "good": 2, "left": 1}
    fixed, dynamic = scaler("precision.loss_scale=64"), scaler()
    fixed.restore(saved)
    dynamic.restore({})
    assert fixed.scale == 64 and dynamic.scale == 65536
    dynamic.restore(saved)
    assert dynamic.state() == saved


def test_from_a_fixed_scale_to_a_dynamic_one():
    """A bf16 run that goes on in fp16 began with a scale of 1, and lost its small gradients for thousands of
    steps."""
    subject = scaler()
    subject.restore(scaler("precision.dtype=bf16").state())
    assert subject == scaler()
