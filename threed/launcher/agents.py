"""Agents: how `threed.torchrun` starts torch's elastic agent, and what it says where that fails.

These rows of bench/results/cluster.md need it. Under plain torchrun a run hangs, or goes on without
some nodes:

* NNODES=1:3, a node comes to two that run: the agents take it for success, one after the other, and the run
  goes on without some of them (`_refuse_joining`).
* NNODES=1:2, a second node comes: ranks read the store of the start before, and the node that comes waits in
  vain (`_c10d`); an agent waits for ranks that have ended (`_await_no_agent`).
* 3 hosts started out of order, names: unresolvable: a host must resolve its own name (`_c10d`).

The rows of nodes that do not meet need it for their words alone (`_why`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import runpy
import signal
import socket
import sys
import threading
import traceback
from argparse import Namespace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from threed.base import marks
from threed.base import signals as early
from threed.base.console import RECORD, flush, put_error, say
from threed.base.errors import InputError, RunError, ThreedError
from threed.comm.environment import PORT, RankPlace, endpoint, place_of_environment
from threed.comm.rendezvous import is_here, is_loopback, route
from threed.config.load import ConfigSource
from threed.launcher import elastic
from threed.launcher.attend import Attendant
from threed.launcher.local import check_gpus, local_world_size
from threed.launcher.processes import be_child
from threed.launcher.rank import run_place
from threed.monitor.folders import to_train
from threed.schema import Config
from threed.training.setup import Job

CONNECT_S = 300.0  # how long nodes of a script wait for each other; a config says it by run.connect_timeout_s
MOST = 100  # starts by torch's own count, where any are allowed: ranks decide about each
READ_S, CLOSE_S = 20, 5  # limits of c10d's own messages
LATER_S = 5.0
LOOK_S = 2  # for the store of nodes that train already


class Script(NamedTuple):
    """A script that trains, and its arguments."""

    path: Path
    words: list[str]


def run(args: Namespace, attendant: Attendant) -> int:
    """Start this machine's ranks under torch's agent and return the exit status. `args`: torchrun's.
    InputError if the arguments, the config or this machine do not allow it."""
    body, first = _work(args)
    limit_s = first.run.connect_timeout_s if first else CONNECT_S
    args.nproc_per_node = str(_size(args.nproc_per_node, first))
    where = _meeting(args, limit_s)
    if first:
        args.max_restarts = MOST if first.run.restarts else 0
    for name in list(logging.root.manager.loggerDict):  # pages about what is said in a line
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    attendant.restarts = bool(args.max_restarts)
    config = _launch_config(args)
    wanted = args.log_dir or args.logs_specs or args.redirects != "0" or args.tee != "0"
    if config.logs_specs and not wanted:
        attendant.folder = config.logs_specs.root_log_dir
    if first and isinstance(body, ConfigSource):
        RECORD.open(Path(first.run.dir))
        body.load(config.max_nodes * config.nproc_per_node)  # raises where it does not fit so many ranks
        check_gpus(first.run.device, config.nproc_per_node)
    if config.max_nodes > 1:
        why = partial(_why, "", args, where, limit_s)
        attendant.await_nodes(where, limit_s, _later_s(args, limit_s), why)
    try:
        _launch(config, body)
        return 0
    except ChildFailedError as error:
        attendant.linger()  # as long as the error is known, torch keeps its store
        return attendant.status or abs(error.get_first_failure()[1].exitcode)
    except SignalException as error:  # a rank has seen that another start is of no use
        return attendant.status or 128 + error.sigval
    except (DistError, RendezvousError, OSError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if "EADDRINUSE" in text:
            raise InputError(f"MASTER_PORT={args.master_port} is taken by another program on "
                             f"{socket.gethostname()}: end it, or give all nodes another port") from None
        raise RunError(_why(text, args, where, limit_s)) from None


def _launch(config: LaunchConfig, body: ConfigSource | Script) -> None:
    """Start the ranks; return when all have ended successfully."""
    try:
        elastic_launch(config, be_rank)(body, os.getpid())
    finally:
        # By it the attendant has the agent end, which would raise an exception later: the agent has ended.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)


def _work(args: Namespace) -> tuple[ConfigSource | Script, Config | None]:
    """What ranks run, and its config if it is known yet."""
    if args.training_script.endswith(".py"):
        if args.max_restarts is None:
            args.max_restarts = 0
        return Script(Path(args.training_script), args.training_script_args), None
    words = list(args.training_script_args)
    if args.max_restarts is not None:
        words = [f"run.restarts={args.max_restarts}", *words]
    source = ConfigSource.read(*to_train(args.training_script, words))
    return source, source.load(None)


def be_rank(work: ConfigSource | Script, parent: int) -> None:
    """Run one of the processes that the agent forks. Returns on success, because the agent must see that;
    otherwise the process ends here."""
    be_child(parent)
    early.handle(early.STOPS, early.leave)
    early.handle(early.SAVES, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # torch's, for the agent, raises an exception
    elastic.tell_launcher()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        marks.begin("start")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*early.ASKS, signal.SIGCHLD])
    status = 0
    try:
        if isinstance(work, Script):
            sys.argv = [str(work.path), *work.words]
            sys.path.insert(0, str(work.path.parent.absolute()))
            runpy.run_path(str(work.path), run_name="__main__")
        else:
            place = place_of_environment()
            assert isinstance(place, RankPlace)
            status = run_place(Job(work.load(place.world_size)), place, parent)
    except ThreedError as error:
        say(str(error))
        elastic.error_file(str(error).splitlines()[0])
        status = error.status
        elastic.end_agent(status)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    except Exception:  # of a script; the agent would show it among pages of its own
        put_error(traceback.format_exc().rstrip())
        status = 1
    flush()
    if status:
        os._exit(status)
    _await_no_agent()


def _await_no_agent() -> None:
    """Do not wait in torch's `Event.wait` until the agent has collected the results of all ranks. The agent
    hangs if a rank died in that wait; and an agent that stops its ranks because another node joins collects
    no results, and would kill the ranks after 30 s. Results need no wait: they are in pipes that the agent
    has open."""
    waits = Event.wait

    def wait(self: Event, timeout: float | None = None) -> bool:
        return threading.current_thread() is threading.main_thread() or waits(self, timeout)

    Event.wait = wait  # threads of a script may wait for events as before


def _size(given: str | None, first: Config | None) -> int:
    """Number of ranks on this machine. torch would count GPUs in this process, which must not touch a GPU
    before it forks."""
    if given not in (None, "gpu", "auto"):
        if not given.isdecimal() or not int(given):
            raise InputError(f"--nproc-per-node={given} (GPUS_PER_NODE) must be a number of ranks, or gpu")
        return int(given)
    size = local_world_size(first.run.device if first else "auto")
    if not size:
        raise InputError("this node has no GPU, so GPUS_PER_NODE (or PET_NPROC_PER_NODE) must say how many "
                         "ranks a node starts")
    return size


def _meeting(args: Namespace, limit_s: float) -> str:
    """Complete the arguments of the rendezvous, and return its address."""
    least, _, most = str(args.nnodes).partition(":")
    if args.rdzv_backend == "static" and most and most != least:
        args.rdzv_backend = "c10d"  # nodes may leave
    if args.rdzv_backend not in ("static", "c10d"):
        raise InputError(f"threed.torchrun takes no --rdzv-backend={args.rdzv_backend}: give static or c10d")
    args.master_port = args.master_port or PORT
    if args.standalone or (args.nnodes in ("1", "1:1") and args.rdzv_backend == "static"):
        args.standalone, args.rdzv_backend, args.node_rank = False, "static", 0
        args.master_addr, args.master_port = "127.0.0.1", _free_port()
    host, port = endpoint(args.rdzv_endpoint) if args.rdzv_endpoint else (args.master_addr, "")
    if not host:
        raise InputError(f"NNODES={args.nnodes} needs MASTER_ADDR, an address of node 0 that every node "
                         "reaches")
    port = port or str(args.master_port)
    args.rdzv_endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if args.rdzv_backend == "static":
        if args.node_rank is None:
            raise InputError(f"NNODES={args.nnodes} needs NODE_RANK, the number of this node: 0 to "
                             f"{int(most or least) - 1}")
        # Other nodes give up before torch does, which shows pages of C++ frames then (`Attendant`).
        options = {"timeout": limit_s + (2 * LATER_S if args.node_rank else 0)}
    else:
        options = _c10d(args, host, int(port), limit_s)
    own = dict(pair.split("=", 1) for pair in args.rdzv_conf.split(",") if "=" in pair)
    args.rdzv_conf = ",".join(f"{name}={value if isinstance(value, str) else int(value)}"
                              for name, value in {**options, **own}.items())
    return args.rdzv_endpoint


def _c10d(args: Namespace, host: str, port: int, limit_s: float) -> dict[str, float]:
    """Settings for c10d: without the variable, ranks of a later start would read the store of the one before,
    and a late node would wait in vain; and a host's own name need not resolve."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    args.local_addr = args.local_addr or route(host, port) or "127.0.0.1"
    serves = is_here(host) if args.node_rank is None else args.node_rank == 0
    if not serves:
        _refuse_joining(args, args.rdzv_endpoint)
    return {"is_host": serves, "join_timeout": limit_s, "last_call_timeout": max(1.0, limit_s / 10),
            "read_timeout": min(limit_s, READ_S), "close_timeout": CLOSE_S}


def _refuse_joining(args: Namespace, where: str) -> None:
    """InputError if two or more nodes are training already. When another node joins, torch's agents stop
    their ranks, some take that for success, and the run would continue without those ranks."""
    least, _, most = str(args.nnodes).partition(":")
    if least == (most or least):
        return
    try:
        parameters = RendezvousParameters("c10d", where, args.rdzv_id, int(least), int(most), is_host=False,
                                          read_timeout=LOOK_S)
        state = create_backend(parameters)[0].get_state()
    except RendezvousError:  # nobody is there
        return
    if state is None:
        return
    now = pickle.loads(state[0])
    if now.complete and len(now.participants) > 1:
        raise InputError(f"{len(now.participants)} nodes train already, and torch's agents allow no other to "
                         "join two or more: start this node again when the run is over, or stop the run (it "
                         "saves), and start all nodes")


def _launch_config(args: Namespace) -> LaunchConfig:
    """torch's config of the agent. The attendant handles all signals but the one by which ranks end the
    agent."""
    args.signals_to_handle, args.start_method = "SIGQUIT", "fork"
    given = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun sets it, with a warning
    try:
        config, _, _ = torchrun.config_from_args(args)
    except (ValueError, AssertionError) as error:
        raise InputError(f"torchrun refuses its options: {error}") from None
    if not given:  # ranks choose it themselves
        del os.environ["OMP_NUM_THREADS"]
    return config


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return probe.getsockname()[1]


def _later_s(args: Namespace, limit_s: float) -> float:
    """Seconds that this node waits beyond the limit: torch tells node 0 how many nodes came, and c10d waits a
    while for nodes beyond the least number."""
    if args.rdzv_backend == "c10d":
        return LATER_S + limit_s / 10
    return 0.0 if args.node_rank else LATER_S


def _why(text: str, args: Namespace, where: str, limit_s: float) -> str:
    """Why the rendezvous failed. `text`: torch's error."""
    within = f"within run.connect_timeout_s={limit_s:g}"
    if came := re.search(r"(\d+)/(\d+) clients joined", text):
        text = f"{came[1]} of {came[2]} nodes came {within}"
    elif not text or "client socket has" in text:
        error = re.search(r"errno: \d+ - ([^)]*)", text)
        why = f" ({error[1].lower()})" if error else ""
        text = f"node 0 did not answer at {where} {within}{why}"
        if not args.node_rank:
            text = f"other nodes did not come back to {where} {within}"
    elif "Failed to recv" in text or "Connection" in text:
        text = f"node 0 has ended: the connection to {where} is gone"
    return f"{text}; {_hint(args, where)}"


def _hint(args: Namespace, where: str) -> str:
    """A likely cause of the failed rendezvous."""
    host, port = endpoint(where)
    here = socket.gethostname()
    try:
        socket.getaddrinfo(host, int(port))
    except (OSError, UnicodeError, ValueError):
        return f"the name {host} does not resolve on {here}"
    own = route(host, int(port))
    if own is None:
        return f"no network leads from {here} to {host}"
    if not args.node_rank:
        return (f"are all {args.nnodes} nodes started, with MASTER_ADDR={host} and MASTER_PORT={port}, and "
                "do firewalls let them reach node 0?")
    if is_loopback(own):
        return f"MASTER_ADDR={host} leads back to {here} itself, and this is node {args.node_rank}"
    return (f"is node 0 started, is MASTER_ADDR={host} its address, is MASTER_PORT={port} the same on all "
            "nodes, and do firewalls let nodes reach each other?")
