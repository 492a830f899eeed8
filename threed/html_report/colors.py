"""Colours: of kinds of bytes, and of causes of time. What can stand in one figure has colours apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from threed.monitor.attribute import CAUSES, WAITS
from threed.program.in_words import slot_words
from threed.program.instruction import Op, SlotKind
from threed.program.summary import activations
from threed.program.table import Table
from threed.program.timeline_svg import COLORS

GROUNDS = ("#ffffff", "#161b22")  # of the sections of a page, light and dark
IDLE = "#dfe2e6"
_CAUSES = {"compute": COLORS[Op.FORWARD], "p2p_wait": "#72b7b2", "dp_wait": COLORS[Op.REDUCE],
           "ep_wait": COLORS[Op.EXCHANGE], "optimizer": COLORS[Op.STEP], "offload": COLORS[Op.OFFLOAD],
           "idle": IDLE}
FIXED = {"parameters": "#4c78a8", "gradients": "#e45756", "optimizer state": "#b279a2", "buffers": "#bab0ac",
         "CUDA and NCCL": "#79706e", "process and libraries": "#79706e"}  # of the last two, a page has one
_SLOTS = {SlotKind.ACT: "#f2cf5b", SlotKind.GRAD: "#f58518", SlotKind.SAVED: "#54a24b",
          SlotKind.KEPT: "#83bcb6", SlotKind.KEPT_PART: "#d6a5c9",
          SlotKind.ACT_PART: "#9ecae9", SlotKind.GRAD_PART: "#ff9da6", SlotKind.OPERANDS: "#9d755d"}
TEMPORARIES = "temporaries"
OTHER = COLORS[Op.OFFLOAD]


def of_kinds(table: Table) -> dict[str, str]:
    """The colour of each kind of bytes by its name, in the order in which they are drawn. It is the same in
    all figures and at all positions. A model's family adds kinds: the tensors that its units hand on."""
    named = {slot_words(kind, table): color for kind, color in _SLOTS.items()}
    colors = spread({**FIXED, **named, TEMPORARIES: "#b4b42d"},
                    [slot_words(kind, table) for kind in activations(table)])
    return {**{name: color for name, color in colors.items() if name != TEMPORARIES},
            TEMPORARIES: colors[TEMPORARIES]}


def of_causes() -> dict[str, str]:
    """The colour of each cause. Which groups are waited for, a family decides, too."""
    return spread(_CAUSES, CAUSES)


def of_lanes() -> dict[str, str]:
    """The colour of the bytes sent over an axis: where a rank waits for them, that of waiting."""
    causes = of_causes()
    return {"tp": "#72b7b2", "pp": "#f58518", **{lane: causes[cause] for lane, cause in WAITS.items()}}


def spread(given: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    """`given`, and a colour for each other name: as far from all before it, and from the grounds, as a colour
    of medium lightness and strength can be. Far: to the eye, in the space OKLab."""
    import numpy

    steps = numpy.arange(0, 256, 15)
    choice = numpy.stack(numpy.meshgrid(steps, steps, steps), -1).reshape(-1, 3)
    places = oklab(choice)
    medium = (abs(places[:, 0] - 0.675) < 0.225) & (numpy.hypot(places[:, 1], places[:, 2]) < 0.2)
    choice, places = choice[medium], places[medium]
    taken = oklab([rgb(color) for color in (*GROUNDS, *given.values())])
    distance = numpy.linalg.norm(places[:, None] - taken, axis=-1).min(1)
    colors = dict(given)
    for name in names:
        if name not in colors:
            best = distance.argmax()
            distance = numpy.minimum(distance, numpy.linalg.norm(places - places[best], axis=-1))
            colors[name] = "#" + "".join(f"{part:02x}" for part in choice[best])
    return colors


def oklab(rgb: Any) -> Any:
    """An array [..., 3] of 0 to 255 as lightness and two axes of colour.
    https://bottosson.github.io/posts/oklab"""
    import numpy

    part = numpy.asarray(rgb) / 255.0
    linear = numpy.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    cones = linear @ numpy.array([[0.4122, 0.2119, 0.0883], [0.5363, 0.6807, 0.2817],
                                  [0.0514, 0.1074, 0.6300]])
    return numpy.cbrt(cones) @ numpy.array([[0.2105, 1.9780, 0.0259], [0.7936, -2.4286, 0.7828],
                                            [-0.0041, 0.4506, -0.8087]])


def rgb(color: str) -> list[int]:
    return [int(color[at:at + 2], 16) for at in (1, 3, 5)]
