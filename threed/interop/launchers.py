"""Launchers: what starts a command that trains, and on how many ranks.

`split` cuts a command into the launcher's words, the program and the program's words; `ranks` reads
torchrun's, deepspeed's, accelerate's, mpirun's and srun's options for the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os.path import basename
from types import MappingProxyType
from typing import Any

from threed.interop.shell.opaque import is_opaque, show

_MODULES = ("torch.distributed.launch", "torch.distributed.run", "torch.distributed.elastic", "deepspeed",
            "deepspeed.launcher.runner", "deepspeed.launcher.launch", "accelerate.commands.launch")
_STARTERS = re.compile(r"(torchrun|deepspeed|python[\d.]*|accelerate|srun|mpirun|mpiexec|msrun)$")
_TOTALS = {"num_processes": ("num_processes",), "mpirun": ("np", "n"), "mpiexec": ("np", "n"),
           "srun": ("ntasks", "n")}


def split(words: list[str]) -> tuple[list[str], str, list[str]]:
    """(words of the launcher, the program, its words). A program is a file of Python, a module of python -m,
    or what a launcher starts; else the first word."""
    places = [index for index, word in enumerate(words) if word.endswith(".py")]
    if places and re.search(r"launch|run\.py$|elastic", basename(words[places[0]])) and len(places) > 1:
        places = places[1:]  # python launch.py ... train.py
    module = next((index + 1 for index, word in enumerate(words[:-1]) if word == "-m"
                   and words[index + 1] not in _MODULES), None)
    if module is not None and (not places or module < places[0]):
        places = [module]
    if not places and any(_STARTERS.match(basename(word)) for word in words):
        places = [index for index, word in enumerate(words[1:], 1) if is_opaque(word)
                  and words[index + 1:index + 2] and words[index + 1].startswith("--")
                  and not (words[index - 1].startswith("-") and "=" not in words[index - 1])]
    if not places:
        return [], words[0] if words else "", words[1:]
    return words[:places[0]], words[places[0]], words[places[0] + 1:]


def ranks(words: list[str], outside: Mapping[str, Any] = MappingProxyType({})
          ) -> tuple[dict[str, int], dict[str, str]]:
    """Options of launchers that give the number of ranks -> their values: nproc_per_node and nnodes,
    num_gpus and num_nodes, or num_processes; and those whose value cannot be known -> what stands for it.
    `outside`: variables, of which SLURM_* say what srun takes where its options do not."""
    given = _options(words)
    names = {basename(word) for word in words}
    pairs = [("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes")]
    for each, machines in pairs:
        if each in given:
            return _numbers({name: given[name] for name in (each, machines) if name in given})
    if "include" in given and "deepspeed" in names and not is_opaque(given["include"]):
        count = sum(len(_devices(host)) for host in given["include"].split("@"))
        return ({"num_gpus": count} if count else {}), {}
    for name, options in _TOTALS.items():
        found = next((option for option in options if option in given), None)
        if found is not None and (name in names or found == "num_processes"):
            return _numbers({"num_processes": given[found]})
    each = given.get("ntasks_per_node") or outside.get("SLURM_NTASKS_PER_NODE")
    if "srun" in names and each:
        machines = given.get("nodes") or given.get("N") or outside.get("SLURM_NNODES", "1")
        return _numbers({"nproc_per_node": each, "nnodes": machines})
    if "srun" in names and (total := outside.get("SLURM_NTASKS")):
        return _numbers({"num_processes": total})
    return {}, {}


def _devices(host: str) -> list[str]:
    return [each for each in host.partition(":")[2].split(",") if each.strip()]


def _options(words: list[str]) -> dict[str, str]:
    """--name value, --name=value, -n 4, -np 4 and -N2, the last of each."""
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else following
        elif re.fullmatch(r"-[nN]\d+", word):
            found[word[1]] = word[2:]
        elif word in ("-n", "-np", "-N", "-c"):
            found[word[1:]] = following
    return found


def _numbers(given: dict[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    known = {name: int(text) for name, text in given.items() if text.isdecimal()}
    unknown = {name: show(text) for name, text in given.items() if name not in known}
    return ({}, unknown) if unknown else (known, {})
