"""Stepline: the line of a step on the console, in as many columns as the terminal has."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping

from threed.base.quantity import show_bytes, show_count, show_left_s
from threed.schema import Config

NARROW = 80  # columns that a line takes at least


def waiting(config: Config) -> str:
    """What 1 - (compute time / step time) is called: idle time of the pipeline, or, without one, traffic that
    nothing hides."""
    return "bubble" if config.parallel.pp > 1 else "exposed traffic"


def width() -> int | None:
    """Columns of the terminal; None where the console is none."""
    try:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    except (AttributeError, ValueError, OSError):
        return None


class Parts:
    """The parts of a step's line, in their order. Where they do not fit, the least needed are shortened, then
    left out: waiting, peak, lr, norm, tok/s."""

    def __init__(self, step: int, steps: int, metrics: Mapping[str, float | None], left_s: float | None,
                 waits: str):
        """`left_s`: until the last step; None where it is not known. `waits`: as `waiting`."""
        def number(name: str) -> float:
            value = metrics.get(name)
            return math.nan if value is None else value

        measured, predicted = number("pipeline/bubble_measured"), number("pipeline/bubble_predicted")
        short = f"{waits.partition(' ')[0]} {measured:.0%}"
        self.parts = {
            "step": f"step {step:>{len(str(steps))}}/{steps}",
            "loss": f"loss {number('train/loss'):.4f}",
            **({"val": f"val {number('val/loss'):.4f}"} if "val/loss" in metrics else {}),
            "norm": f"norm {number('train/grad_norm'):.2f}",
            "lr": f"lr {number('train/lr'):.2e}",
            "time": f"{number('perf/step_s'):.2f} s",
            "speed": _speed(metrics),
            **({"left": f"{show_left_s(left_s)} left"} if left_s is not None and step < steps else {}),
            "waits": f"{waits} {measured:.0%} (predicted {predicted:.0%})",
            "peak": f"peak {show_bytes(number('memory/peak_bytes'))}",
        }
        self._less = [("waits", short), ("waits", None), ("peak", None), ("lr", None), ("norm", None),
                      ("speed", None)]

    def fit(self, columns: int | None) -> str:
        """The line, in no more than `columns` if that is possible."""
        parts, less = dict(self.parts), list(self._less)
        while columns is not None and less and len("  ".join(parts.values())) > max(columns, NARROW):
            name, shorter = less.pop(0)
            if shorter is None:
                parts.pop(name, None)
            else:
                parts[name] = shorter
        return "  ".join(parts.values())


def _speed(metrics: Mapping[str, float | None]) -> str:
    name, unit = next((pair for pair in (("perf/tokens_per_s", "tok/s"), ("perf/samples_per_s", "samples/s"))
                       if pair[0] in metrics), ("", "tok/s"))
    value = metrics.get(name)
    return f"{show_count(math.nan if value is None else value)} {unit}"
