"""What must be true at the end of a trial. Each broken rule has a name and a line that says what was seen.

    lost      the last step is never saved            hang      neither a step nor an end for 60 s
    wrong     weights or losses are other than those of the undisturbed run
    steps     metrics.jsonl has a step twice, or not at all
    orphan    processes outlive the run               leftover  temporary files do
    silent    no message names the fault              noise     a traceback, or a library's own words
    status    exit status 0 although the checkpoint that it promises is not there, or another after a stop
    late      hosts that are asked to stop take longer than they may
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from tests.chaos import tensors
from tests.chaos.sister import STEPS
from tests.chaos.trial import Fault, Trial

NOISE = (r"Traceback|terminate called|\[.*gloo.*\]|gloo/transport|Connection closed by peer|Exception raised "
         r"from|frame #\d|"
         r"Fatal Python error|Segmentation fault|Exception in thread")
TOLERANCE = 1e-5  # of losses on another mesh, relative


def judge(trial: Trial, fault: Fault) -> dict[str, str]:
    """Name of a broken rule -> what was seen."""
    broken = dict(trial.verdicts)
    if trial.done():
        broken |= _numbers(trial)
    if left := _leftovers(trial):
        broken["leftover"] = ", ".join(left)
    expected = fault.says and trial.marker.exists() and not trial.too_late()
    if expected and not re.search(fault.says, trial.output):
        broken["silent"] = f"no message has /{fault.says}/"
    elif expected and fault.everywhere:
        for log in trial.runs[0].logs:
            if not re.search(fault.says, log.read_text(errors="replace")):
                broken["silent"] = f"{log.name} has not /{fault.says}/"
    if noise := re.search(NOISE, trial.output):
        lines = trial.output[:noise.start()].count("\n")
        broken["noise"] = trial.output.splitlines()[lines][:200]
    return broken


def _numbers(trial: Trial) -> dict[str, str]:
    """Final weights, and the steps of metrics.jsonl."""
    broken: dict[str, str] = {}
    newest = tensors.newest(trial.run_dir)
    assert newest is not None
    if trial.other is None:
        try:
            if wrong := tensors.differences(newest, trial.reference.folder):
                broken["wrong"] = f"{len(wrong)} differ from the undisturbed run: {', '.join(wrong[:4])}"
        except (OSError, ValueError, AssertionError, KeyError) as error:
            broken["wrong"] = f"the last checkpoint cannot be read: {type(error).__name__}: {error}"
    lines = (trial.run_dir / "metrics.jsonl").read_text(errors="replace").splitlines()
    try:
        rows = [json.loads(line) for line in lines]
        steps = [row["step"] for row in rows]
    except (ValueError, KeyError) as error:
        return {**broken, "steps": f"metrics.jsonl cannot be read: {error}"}
    if steps != list(range(1, STEPS + 1)):
        twice = sorted({step for step in steps if steps.count(step) > 1})
        missing = sorted(set(range(1, STEPS + 1)) - set(steps))
        broken["steps"] = (
            f"twice: {twice}, missing: {missing}" if twice or missing else f"in this order: {steps}"
        )
    for row in rows:
        loss, norm = trial.reference.losses.get(row["step"], (math.nan, math.nan))
        if trial.other is None:
            good = (row["train/loss"], row["train/grad_norm"]) == (loss, norm)
        else:
            good = math.isclose(row["train/loss"], loss, rel_tol=TOLERANCE)
        if not good and "wrong" not in broken:
            broken["wrong"] = f"step {row['step']}: loss {row['train/loss']!r}, undisturbed {loss!r}"
    return broken


def _leftovers(trial: Trial) -> list[str]:
    """Temporary files, wherever a run may make some."""
    root = trial.folder
    left = [path for path in trial.run_dir.rglob("*") if ".tmp" in path.name]
    left += [path for path in (trial.run_dir / "checkpoints").glob("*")
             if not re.fullmatch(r"latest|step-\d{8}", path.name) and path not in left]
    left += [path for path in [*(root / "tmp").iterdir(), *(root / "disk").iterdir()]
             if not _of_an_agent(path, trial)]
    left += [path for cache in trial.caches for path in cache.glob("*.tmp")]
    return sorted({str(path.relative_to(root)) if path.is_relative_to(root) else str(path) for path in left})


def _of_an_agent(path: Path, trial: Trial) -> bool:
    """Whether it is the folder for logs that torch makes for an agent, which one that is killed cannot
    remove."""
    killed = any(status and status < 0 for run in trial.runs for status in [*run.replaced, *run.statuses()])
    return path.name.startswith("torchelastic_") and killed
