"""This process's place among the processes of a run, as the environment says it: torchrun's, Slurm's, a
Kubernetes operator's or a person's variables.

    LOCAL_RANK, RANK, WORLD_SIZE          one rank: an agent of torch has started it      -> Place
    SLURM_PROCID, SLURM_NTASKS, ...       one rank: a task of srun                        -> Place
    NNODES, NODE_RANK, GPUS_PER_NODE ...  what `threed.torchrun` starts on one of several nodes
    PET_NNODES, PET_NODE_RANK, ...        the same, in torchrun's names (PyTorchJob sets them, and RANK = the
                                          pod's number)

A value that is set under two names must be the same under both: a pod must not train alone because a name was
not read.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from threed.base.errors import InputError
from threed.base.signals import BEGAN

PORT = 29500
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # processes, by Open MPI, MPICH, MVAPICH
RESTARTS = ("THREED_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # restarts so far



@dataclass(frozen=True)
class RankPlace:
    """One rank among all."""

    rank: int
    local_rank: int
    local_size: int  # ranks on this machine
    world_size: int


def place_of_environment(env: Mapping[str, str] = os.environ) -> RankPlace | None:
    """A rank's place; None where this process starts all ranks. Under srun it also sets RANK, WORLD_SIZE and
    MASTER_PORT, which torch reads."""
    if "LOCAL_RANK" in env:
        return _rank(env)
    if "SLURM_STEP_ID" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        if "MASTER_ADDR" not in env:
            raise InputError("under srun with several tasks MASTER_ADDR must name the first node; "
                             "launch/slurm.sbatch does so")
        world = _number(env, "SLURM_NTASKS")
        os.environ.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=str(world),
                          MASTER_PORT=env.get("MASTER_PORT", str(PORT)))
        return RankPlace(_number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID"), _tasks_here(env), world)
    _refuse_part(env)
    return None


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks of the step on this node: of "4(x2),3" those of node 0, 1 or 2. (SLURM_NTASKS_PER_NODE is the
    job's, or absent.)"""
    if "SLURM_STEP_TASKS_PER_NODE" not in env:
        return _number(env, "SLURM_NTASKS_PER_NODE", _number(env, "SLURM_NTASKS"))
    counts = []
    for part in env["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [_whole("SLURM_STEP_TASKS_PER_NODE", count, part)] * int(times or 1)
    return counts[_number(env, "SLURM_NODEID", 0)]


def restarted() -> bool:
    """Whether the launcher, torchrun or Slurm has started the run again after a failure."""
    return any(_number(os.environ, name, 0) > 0 for name in RESTARTS)


def began_s() -> float:
    """When this run was started, in seconds since 1970, restarts by its launcher or by torchrun included."""
    if BEGAN in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        return float(os.environ[BEGAN])
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return time.time() - _age_s(agent)


def _age_s(process: int) -> float:
    """How long a process has lived; 0 where the kernel does not say."""
    ticks = _ticks(process)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, now_s - ticks / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def _ticks(process: int) -> int:
    """When a process began, in the kernel's ticks since the machine did; 0 where it does not say."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def agent() -> str:
    """An id of the elastic agent that has started this rank; '' where none has."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return f"{socket.gethostname()}-{os.getppid()}-{_ticks(os.getppid())}"


def launch() -> str:
    """An id that all restarts of one launch share; '' where the environment has none."""
    return next((os.environ[name] for name in ("SLURM_JOB_ID", "THREED_LAUNCH", "TORCHELASTIC_RUN_ID")
                 if name in os.environ), "")


def _refuse_part(env: Mapping[str, str]) -> None:
    """InputError where this process is one of several, and would train alone."""
    name, text = _node_count(env) or ("", "1")
    if text != "1":
        raise InputError(f"{name}={text} is in the environment: this process would train alone beside those "
                         "of other nodes. Start each node by launch/torchrun.sh CONFIG, or python -m "
                         f"threed.torchrun CONFIG, which read it; unset {name} to train on this machine "
                         "alone")
    for name, other in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")):
        if env.get(name) and (name == "RANK" or _number(env, name) > 1):
            raise InputError(f"{name}={env[name]} is in the environment, but not {other}: this process would "
                             "train alone beside the others. Set RANK (this process's number), LOCAL_RANK "
                             f"and WORLD_SIZE (all processes), as torchrun does, or unset {name} to start "
                             "all ranks here")
    for name in MPI:
        if _number(env, name, 1) > 1:
            raise InputError(f"{name}={env[name]} is in the environment: mpirun has started this process as "
                             f"one of {env[name]}, and each would train alone. Start one process a machine, "
                             "with NNODES, NODE_RANK and MASTER_ADDR, or use torchrun or srun")


def _rank(env: Mapping[str, str]) -> RankPlace:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        raise InputError(f"LOCAL_RANK={env['LOCAL_RANK']} is in the environment, but not "
                         f"{' and '.join(missing)}: torchrun sets all three. Unset LOCAL_RANK to start all "
                         "ranks here")
    world = _number(env, "WORLD_SIZE")
    place = RankPlace(_number(env, "RANK"), _number(env, "LOCAL_RANK"),
                      _number(env, "LOCAL_WORLD_SIZE", world), world)
    for name, number, least, most in (("RANK", place.rank, "WORLD_SIZE", place.world_size),
                                      ("LOCAL_RANK", place.local_rank, "LOCAL_WORLD_SIZE", place.local_size),
                                      ("LOCAL_RANK", place.local_rank, "RANK + 1", place.rank + 1),
                                      ("LOCAL_WORLD_SIZE", place.local_size - 1, "WORLD_SIZE", world)):
        if number >= most:
            shown = env.get(name, str(number))
            raise InputError(f"{name}={shown} and {least}={most} in the environment contradict each other: "
                             "ranks are counted from 0, and those of this machine are some of all")
    return place


def _node_count(env: Mapping[str, str]) -> tuple[str, str] | None:
    """(name, number of nodes). Until version 1.7 PyTorchJob counts its pods in WORLD_SIZE and RANK alone."""
    pods = "RANK" in env and "WORLD_SIZE" in env and "LOCAL_RANK" not in env
    return _one(env, "NNODES", "PET_NNODES") or (("WORLD_SIZE", env["WORLD_SIZE"]) if pods else None)


def torchrun_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """torchrun's variables (PET_NNODES, ...) for those that people, Slurm and operators set. InputError where
    two contradict each other, or one is no number."""
    name, text = _node_count(env) or ("NNODES", "1")
    least, _, most = text.partition(":")
    few, many = _whole(name, least, text), _whole(name, most or least, text)
    if not 1 <= few <= many:
        raise InputError(f"{name}={text} must be a number of nodes, or least:most such as 2:4")
    given = {"PET_NNODES": text}
    number = _one(env, "NODE_RANK", "PET_NODE_RANK", *(["RANK"] if "WORLD_SIZE" in env else []))
    node = _whole(*number) if number else None
    size = _size(env)
    if "WORLD_SIZE" in env and few == many and _number(env, "WORLD_SIZE") not in (many, many * (size or 1)):
        raise InputError(f"WORLD_SIZE={env['WORLD_SIZE']} and {name}={text} contradict each other: "
                         f"WORLD_SIZE is the number of nodes, or of all ranks ({many} x "
                         f"{size or 'ranks a node'}). Unset one of them")
    if node is not None and node >= many:
        raise InputError(f"{number[0] if number else ''}={node} must be below the number of nodes, "
                         f"{name}={text}: the first is 0")
    host, port = endpoint(env.get("PET_RDZV_ENDPOINT", ""))
    env = {**env, "the host of PET_RDZV_ENDPOINT": host, "the port of PET_RDZV_ENDPOINT": port}
    pairs = {"PET_NODE_RANK": number, "PET_NPROC_PER_NODE": ("", str(size)) if size else None,
             # An operator may give node 0 an address of itself that differs from the others'.
             "PET_MASTER_ADDR": _one(env, "MASTER_ADDR", "PET_MASTER_ADDR", "the host of PET_RDZV_ENDPOINT",
                                     agree=node != 0),
             "PET_MASTER_PORT": _one(env, "MASTER_PORT", "PET_MASTER_PORT", "the port of PET_RDZV_ENDPOINT"),
             "PET_MAX_RESTARTS": _one(env, "MAX_RESTARTS", "PET_MAX_RESTARTS"),
             "PET_LOCAL_ADDR": _one(env, "LOCAL_ADDR", "PET_LOCAL_ADDR")}
    given |= {name: pair[1] for name, pair in pairs.items() if pair is not None}
    for name in ("PET_MASTER_PORT", "PET_MAX_RESTARTS"):
        if pair := pairs[name]:
            _port(*pair) if name == "PET_MASTER_PORT" else _whole(*pair)
    return given


def endpoint(text: str) -> tuple[str, str]:
    """host:port, or host; an IPv6 address with a port is in brackets."""
    if text.count(":") > 1 and not text.startswith("["):
        return text, ""
    host, _, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", "")
    return host.strip("[]"), port


def _port(name: str, text: str) -> int:
    port = _whole(name, text)
    if not 0 < port < 2**16:
        raise InputError(f"{name}={text} in the environment must be a port, from 1 to {2**16 - 1}")
    return port


def _size(env: Mapping[str, str]) -> int | None:
    given = _one(env, "GPUS_PER_NODE", "PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE")
    if given is None or given[1] in ("auto", "gpu"):
        return None
    size = _whole(*given)
    if size < 1:
        raise InputError(f"{given[0]}={given[1]}: a node has at least one rank")
    return size


def _one(env: Mapping[str, str], *names: str, agree: bool = True) -> tuple[str, str] | None:
    """(name, value) of a value that may be set under several names: of the first name that is set. `agree`:
    it must be the same under all of them."""
    pairs = [(name, env[name]) for name in names if env.get(name)]
    other = next((pair for pair in pairs if pair[1] != pairs[0][1]), None)
    if other is not None and agree:
        raise InputError(f"{pairs[0][0]}={pairs[0][1]} and {other[0]}={other[1]} in the environment "
                         "contradict each other: unset one")
    return pairs[0] if pairs else None


def _number(env: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """A variable as a number; of Slurm's "2(x3)" the first one."""
    if name not in env and otherwise is not None:
        return otherwise
    return _whole(name, env.get(name, "").partition("(")[0])


def _whole(name: str, text: str, shown: str | None = None) -> int:
    if not text.isdecimal():
        raise InputError(f"{name}={shown or text} in the environment must be a whole number; unset it to "
                         "start all ranks here")
    return int(text)
