"""Where this process stands among the others of a run, as torchrun, Slurm or an operator's pods say in the environment."""

from __future__ import annotations

import os

from threed.errors import InputError

RESTARTS = ("THREED_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # so often, so far


def rank_of_environment() -> tuple[int, int, int] | None:
    """(rank, local rank, world size) where torchrun or Slurm started this process, else None."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        try:
            return int(env["RANK"]), int(env.get("LOCAL_RANK", "0")), int(env["WORLD_SIZE"])
        except ValueError:
            raise InputError(f"RANK={env['RANK']}, LOCAL_RANK={env.get('LOCAL_RANK')} and WORLD_SIZE={env['WORLD_SIZE']} in the "
                             "environment must be numbers; unset them to start all ranks here") from None
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        if "MASTER_ADDR" not in env:
            raise InputError("under srun with several tasks MASTER_ADDR must name the first node; launch/slurm.sbatch does so")
        rank, world = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        env.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=env.get("MASTER_PORT", "29500"))
        return rank, int(env["SLURM_LOCALID"]), world
    return None


def restarted() -> bool:
    """Whether this start of the run follows a failed one by itself: the launcher, torchrun or Slurm says so."""
    return any(_number(name) > 0 for name in RESTARTS)


def launch() -> str:
    """What all restarts of one start of the run have in common; '' where nobody says so."""
    return next((os.environ[name] for name in ("THREED_LAUNCH", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID") if name in os.environ), "")


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0
