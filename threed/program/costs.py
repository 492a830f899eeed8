"""Costs of instructions, as measured: {(position, op, unit): mean seconds}, in `costs.json` of a run.

A message has no cost here: the time from its send to its end cannot be read off the clocks of two hosts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.base.files import write_whole
from threed.program.instruction import Op

FILE = "costs.json"


def save_costs(path: Path, costs: Mapping[tuple[int, Op, int], float], digest: str, steps: int,
               device: str = "") -> None:
    """Write costs, which are means over `steps` steps of the plan with this digest, on a kind of `device`. A
    failed write leaves no file."""
    rows = [{"position": position, "op": str(op), "unit": unit, "seconds": round(seconds, 9)}
            for (position, op, unit), seconds in sorted(costs.items())]
    values = {"digest": digest, "steps": steps, "device": device, "costs": rows}
    write_whole(path, json.dumps(values, indent=1) + "\n")


def load_costs(path: str | Path) -> dict[tuple[int, Op, int], float]:
    """Costs from a run's folder or from its costs.json."""
    return read_costs(path)[0]


def read_costs(path: str | Path) -> tuple[dict[tuple[int, Op, int], float], str, int]:
    """(costs, digest of their plan, number of steps over which they are means)."""
    file, values = _read(path)
    try:
        costs = {}
        for row in values["costs"]:
            position, unit, seconds = _whole(row["position"]), _whole(row["unit"]), row["seconds"]
            if isinstance(seconds, bool) or not math.isfinite(seconds) or seconds < 0:
                raise ValueError(f"seconds: {seconds}")
            costs[position, Op(row["op"]), unit] = float(seconds)
        return costs, str(values["digest"]), _whole(values["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged ({type(error).__name__}: {error}); each of its costs must have "
                         "position, op, unit and seconds") from None


def device_of(path: str | Path) -> str:
    """The kind of device on which costs were measured; "" where their file does not say."""
    values = _read(path)[1]
    return str(values.get("device", "")) if isinstance(values, dict) else ""


def _read(path: str | Path) -> tuple[Path, Any]:
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        return file, json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(f"{file}: there are no measured costs. A run with monitor.trace_every > 0 writes "
                         "them into its folder at its first traced step") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value} is not a whole number")
    return value
