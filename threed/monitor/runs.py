"""Runs: the runs below a folder, each with its state, last loss, speed and age."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TypeGuard

from threed.base.errors import InputError
from threed.base.quantity import show_count
from threed.monitor.compare import CONFIG
from threed.monitor.goodput import spent
from threed.monitor.state import FILE, LOCK, UNKNOWN, is_locked, last_word, state_of

DEPTH = 4  # folders below the given one
_TAIL_BYTES = 1 << 16  # more than a line of metrics.jsonl


def find(folder: Path, with_goodput: bool = False) -> list[dict[str, Any]]:
    """A row a run in `folder` or below, the one with the newest sign first. `with_goodput`: reads all
    steps of all runs. InputError where there is no such folder."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; give one that holds runs (run.dir)")
    rows = [_row(path) for path in _folders(folder, DEPTH)]
    for row in rows if with_goodput else ():
        found = spent(Path(row["run"]))
        row["goodput"] = found.document() if found else None
    return sorted(rows, key=lambda row: (row["age_s"] is None, row["age_s"] or 0.0, row["run"]))


def _folders(folder: Path, depth: int) -> list[Path]:
    """Folders of runs. What is inside one is its own: checkpoints, traces, wandb."""
    try:
        with os.scandir(folder) as entries:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:
        return []
    if {CONFIG, "metrics.jsonl", LOCK, FILE} & names.keys() and (LOCK in names or "metrics.jsonl" in names):
        return [folder]
    below = [name for name, is_folder in sorted(names.items()) if is_folder and not name.startswith(".")]
    return [path for name in below for path in _folders(folder / name, depth - 1)] if depth else []


def _row(path: Path) -> dict[str, Any]:
    word, last = last_word(path), _last(path / "metrics.jsonl")
    steps = _steps(path)
    step = int(next(filter(_is_number, (last.get("step"), word.get("step"))), 0))
    signs = list(filter(_is_number, (last.get("run/time"), word.get("time"), _changed(path))))
    age_s = max(0.0, time.time() - max(signs)) if signs else None
    state, remark = state_of(word, is_locked(path), age_s, bool(steps) and step >= (steps or 0))
    if state == UNKNOWN and not word and not last:
        remark = "no process has it, and it has made no step"
    return {"run": str(path), "state": state, "step": step, "steps": steps, "loss": last.get("train/loss"),
            "tokens_per_s": last.get("perf/tokens_per_s"),
            "samples_per_s": last.get("perf/samples_per_s"),
            "step_s": last.get("perf/step_s"), "age_s": age_s,
            "host": word.get("host"), "remark": remark}


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a file, which may be damaged, is one that counts."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _last(file: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; {} where there is none."""
    try:
        with file.open("rb") as metrics:
            metrics.seek(max(0, metrics.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = metrics.read().splitlines(keepends=True)
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    return {}


def _changed(path: Path) -> float | None:
    try:
        return (path / "metrics.jsonl").stat().st_mtime
    except OSError:
        return None


def _steps(path: Path) -> int | None:
    """Steps of the run, as its config.json says."""
    try:
        return int(json.loads((path / CONFIG).read_text())["train"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def show(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no runs here: a run is a folder with metrics.jsonl (run.dir)"
    cells = [("run", "state", "step", "loss", "tokens/s", "last sign", "")]
    for row in rows:
        loss, speed, unit, age_s = row["loss"], row["tokens_per_s"], "", row["age_s"]
        if speed is None:
            speed, unit = row["samples_per_s"], " samples"
        cells.append((row["run"], row["state"], f"{row['step']}/{row['steps'] or '?'}",
                      f"{loss:.4f}" if isinstance(loss, float) else str(loss or "-"),
                       f"{show_count(speed)}{unit}" if _is_number(speed) else "-",
                      f"{show_age(age_s)} ago" if age_s is not None else "-", row["remark"]))
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
                     for line in cells)


def show_age(age_s: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * size:
            return f"{age_s / size:.0f} {unit}"
    return f"{age_s:.0f} s"
