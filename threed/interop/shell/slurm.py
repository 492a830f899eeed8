"""Slurm: the variables that it sets by the #SBATCH lines of a script."""

from __future__ import annotations

import re
import shlex


def variables(text: str) -> dict[str, str]:
    """Name -> value."""
    found: dict[str, str] = {}
    for line in re.findall(r"(?m)^#SBATCH\s+(.*)", text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        name, equals, value = words[0].partition("=") if words else ("", "", "")
        if re.fullmatch(r"-[a-zA-Z]\d+", name):
            name, value = name[:2], name[2:]
        elif not equals and len(words) > 1:
            value = words[1]
        found[name] = value
    nodes = found.get("--nodes") or found.get("-N") or ""
    tasks = found.get("--ntasks") or found.get("-n") or ""
    each = found.get("--ntasks-per-node") or ""
    gpus = re.search(r"(\d+)$", found.get("--gpus-per-node") or found.get("--gres") or "")
    if not tasks and nodes.isdigit() and each.isdigit():
        tasks = str(int(nodes) * int(each))
    values = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": tasks,
              "SLURM_NPROCS": tasks, "SLURM_NTASKS_PER_NODE": each, "SLURM_GPUS_ON_NODE":
              gpus[1] if gpus else "", "SLURM_GPUS_PER_NODE": gpus[1] if gpus else "",
              "SLURM_JOB_NAME": found.get("--job-name") or found.get("-J") or ""}
    return {name: value for name, value in values.items() if value}
