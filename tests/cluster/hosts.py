"""Hosts on one machine: network namespaces with addresses, host names and /etc/hosts of their own, joined by
a bridge.

    host1 10.77.0.1 --veth--+
    host2 10.77.0.2 --veth--+-- bridge, in a namespace of its own
    host3 10.77.0.3 --veth--+

Needs root and `ip` (iproute2). This machine's own network is not touched. What runs on a host is forked from
the tests' process, which has imported everything, and is killed with the hosts, whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from tests.running import Forked, torchrun_main
from threed.launcher.processes import die_with_parent

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
PREFIX = "threed"
PLACE = {"MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE", "LOCAL_ADDR", "MAX_RESTARTS",
         "RANK", "WORLD_SIZE", "LOCAL_RANK"}  # variables that say what part of a run a process is


def missing() -> str | None:
    """Why there can be no hosts here."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (package iproute2) or unshare (util-linux) is missing"
    name = f"{PREFIX}-{os.getpid()}-probe"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"this kernel gives no network namespaces: {added.stderr.strip()}" if added.returncode else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """`count` hosts; `with Hosts(2, folder) as (first, second)`."""

    def __init__(self, count: int, folder: Path):
        self.count, self.folder, self.all = count, folder, []
        self.switch = f"{PREFIX}-{os.getpid()}-switch"

    def __enter__(self) -> list[Host]:
        remove_stale()
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
            for number in range(1, self.count + 1):
                self.all.append(Host(number, self.switch, self.folder))
        except BaseException:
            self.__exit__()
            raise
        return self.all

    def __exit__(self, *_: object) -> None:
        for host in self.all:
            host.kill_all()
            for run in host.runs:
                run.process.join(10)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)


def remove_stale() -> None:
    """Namespaces of test processes that were killed."""
    for path in Path("/var/run/netns").glob(f"{PREFIX}-*"):
        owner = path.name.split("-")[1]
        if not psutil.pid_exists(int(owner)):
            for process in inside(path):
                process.kill()
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True)


def inside(namespace: Path) -> list[psutil.Process]:
    """Processes whose network this is."""
    processes, wanted = [], os.stat(namespace).st_ino
    for process in psutil.process_iter():
        try:
            if (
                os.stat(f"/proc/{process.pid}/ns/net").st_ino == wanted
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                processes.append(process)
        except (OSError, psutil.Error):
            continue
    return processes


class Host:
    """A host. Its name resolves nowhere, unless `etc_hosts` says otherwise."""

    def __init__(self, number: int, switch: str, folder: Path):
        self.name, self.address, self.folder = f"host{number}", f"10.77.0.{number}", folder
        self.namespace = f"{PREFIX}-{os.getpid()}-{self.name}"
        self.path = Path("/var/run/netns") / self.namespace
        self.switch, self.port = switch, f"port{number}"
        self.etc_hosts = "127.0.0.1 localhost\n"
        self.runs: list[HostRun] = []
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", self.namespace, "type", "veth", "peer", "name", self.port, "netns",
           switch)
        ip("-n", switch, "link", "set", self.port, "master", "bridge", "up")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "up")

    def start(self, *argv: str, env: dict[str, str] | None = None, own: Path | None = None) -> HostRun:
        """`python -m threed.torchrun ARGV ...` on this host. `own`: a folder that it does not share with the
        others."""
        return HostRun(self, partial(torchrun_main, argv, env or {}), own)

    def execute(self, *argv: str, env: dict[str, str] | None = None) -> HostRun:
        """A program, by its path, on this host."""
        return HostRun(self, lambda: os.execve(argv[0], argv, os.environ | (env or {})))

    def processes(self) -> list[psutil.Process]:
        return inside(self.path)

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def link(self, up: bool) -> None:
        """The cable: pulled out at the switch, so that the host itself sees nothing."""
        ip("-n", self.switch, "link", "set", self.port, "up" if up else "down")

    def off(self) -> None:
        """Power off: no word reaches the others."""
        self.link(False)
        self.kill_all()

    def slow(self, rate: str) -> None:
        """Its way out carries no more than this."""
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "100ms"]
        subprocess.run(["ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", "eth0",
                        "root", *shape],
                       check=True, capture_output=True)

    def lossy(self, percent: int) -> None:
        """So many of the packets that come to it are lost. Needs `nft` (package nftables)."""
        nft = ["ip", "netns", "exec", self.namespace, "nft"]
        rule = f"iifname eth0 numgen random mod 100 < {percent} drop"
        for words in ("add table inet loss", "add chain inet loss in { type filter hook input priority 0; }",
                      "flush chain inet loss in", f"add rule inet loss in {rule}"):
            subprocess.run([*nft, words], check=True, capture_output=True)

    def enter(self, own: Path | None = None) -> None:
        """Make this process one of the host's."""
        libc = ctypes.CDLL(None, use_errno=True)
        with self.path.open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS | CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "setns")
        socket.sethostname(self.name)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        file = self.folder / f"hosts-{self.name}"
        file.write_text(self.etc_hosts)
        subprocess.run(["mount", "--bind", str(file), "/etc/hosts"], check=True)
        if own is not None:
            own.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(own)], check=True)


class HostRun(Forked):
    """An agent on a host, or another program."""

    def __init__(self, host: Host, body: Callable[[], int], own: Path | None = None):
        self.host, self._own, self._body, self._parent = host, own, body, os.getpid()
        super().__init__(host.folder, self._be)
        host.runs.append(self)

    def _be(self) -> int:
        die_with_parent(self._parent)
        for name in list(os.environ):
            if name in PLACE or name.startswith(("PET_", "TORCHELASTIC_")):
                del os.environ[name]
        self.host.enter(self._own)
        return self._body()

    def ranks(self) -> list[psutil.Process]:
        """The processes of this agent's ranks, in order; each has its own process group."""
        assert self.process.pid is not None
        children = [child for child in psutil.Process(self.process.pid).children()
                    if os.getpgid(child.pid) == child.pid]
        return sorted(children, key=lambda child: (child.create_time(), child.pid))

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Send the agent a signal, and nothing to its ranks."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
