"""torchrun for threed: python -m threed.torchrun [OPTION]... CONFIG [KEY=VALUE]...

It is torch.distributed.run, with its options, its PET_* variables and its agent, and reads NNODES, NODE_RANK,
MASTER_ADDR, MASTER_PORT, GPUS_PER_NODE, LOCAL_ADDR and MAX_RESTARTS as well. Run it on each machine. It adds
what the agent lacks: requests to stop and to save go to the ranks, libraries are imported once, and what
fails is said in a line (`launcher.attend` and `launcher.agents` name the faults that torchrun would miss).
CONFIG may be a script that trains (FILE.py [ARGUMENT]...).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NoReturn

from threed.base import console, marks
from threed.base import signals as early
from threed.base.errors import InputError, ThreedError
from threed.comm.environment import torchrun_variables
from threed.launcher.attend import Attendant

if TYPE_CHECKING:
    from argparse import Namespace

USE = "python -m threed.torchrun [OPTION]... CONFIG [KEY=VALUE]..."


def main(argv: list[str] | None = None) -> int:
    """Start this machine's ranks, and return the exit status of the run here."""
    attendant = Attendant()  # before libraries are imported, which takes seconds
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    early.calm()
    os.environ[early.BEGAN] = repr(time.time())
    marks.begin("start", marks.age_s())
    try:
        args = parse(argv)
        from threed.launcher import agents

        return agents.run(args, attendant)
    except ThreedError as error:
        console.say(str(error))
        return error.status
    finally:
        attendant.close()


def parse(argv: list[str] | None) -> Namespace:
    """torchrun's arguments. InputError where they cannot be honoured."""
    os.environ.update(torchrun_variables())
    from torch.distributed import run

    parser = run.get_args_parser()
    parser.prog, parser.description = "python -m threed.torchrun", __doc__
    for name in ("node_rank", "master_addr", "master_port", "nproc_per_node", "max_restarts"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    setattr(parser, "error", _refuse)  # noqa: B010
    args = parser.parse_args(argv)
    if args.training_script == "train" and not os.path.exists("train"):
        raise InputError(f"threed.torchrun trains by itself, without the word train: {USE}")
    for name in ("module", "no_python", "run_path"):
        if getattr(args, name):
            option = name.replace("_", "-")
            raise InputError(f"threed.torchrun takes no --{option}: it starts CONFIG [KEY=VALUE]..., or "
                             "SCRIPT.py [ARGUMENT]...; torchrun itself starts anything else")
    if args.start_method != "spawn":  # torchrun's default, and nobody else's choice
        raise InputError(f"threed.torchrun takes no --start-method={args.start_method}: it forks its ranks")
    return args


def _refuse(message: str) -> NoReturn:
    """InputError in place of argparse's pages of options."""
    if "arguments are required" in message:
        message = "give a config file, or a script that trains"
    raise InputError(f"{message}; the use is {USE}; --help lists the options")


if __name__ == "__main__":
    status = main()
    console.flush()
    os._exit(status)  # no destructor may wait for a peer that has gone
