"""What thousands of ranks cost one of them: at the start, and in a step.

    python -m bench.run.scale --markdown bench/results/scale.md     # two minutes

One rank of a model of 405 B parameters (pp 16, tp 8) runs the code of a start over torch's fake backend,
which sends nothing, and counts what it gives to it. Gloo and the store are real: their ranks are
threads of this process.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pickle
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from threed.base.quantity import show_bytes
from threed.checkpoint.load import resume
from threed.comm.process import ProcessComm, connecting_late
from threed.comm.rendezvous import POLL_S, POLLS
from threed.comm.store import of_this_start
from threed.config.load import load
from threed.data.tokens import Prepared
from threed.engine import shared
from threed.engine.watch import Watch
from threed.features.travel.arrivals import Arrivals
from threed.models.measure import SilentGroup
from threed.monitor.meter import Meter
from threed.monitor.traces import encode
from threed.planner import analyse
from threed.program.analysis import Analysis
from threed.program.trace import Trace
from threed.schema import Config
from threed.training import setup as assemble
from threed.training.host_room import check_hosts

RANKS, STARTS, GLOO = (1024, 4096, 10240), (128, 512, 1024), (16, 32, 64)
LIMIT = datetime.timedelta(seconds=60)


class Counting(ProcessComm):
    """Rank 0 over the fake backend, where the other ranks have what it has."""

    def __init__(self, *args: Any):
        self.calls = self.received = 0
        super().__init__(*args)

    def _count(self, num_bytes: int) -> None:
        self.calls, self.received = self.calls + 1, self.received + num_bytes

    def all_gather(self, value: Any) -> list[Any]:
        self._count((self.mesh.size - 1) * len(pickle.dumps(value)))
        return super().all_gather(value)

    def numbers(self, number: float) -> torch.Tensor:
        self._count(8 * (self.mesh.size - 1))
        return super().numbers(number)

    def broadcast(self, value: Any) -> Any:
        self._count(len(pickle.dumps(value)))
        return value


def config_of(ranks: int, folder: str) -> Config:
    """As Llama 3 405B; a unit a layer."""
    dp = ranks // 128
    return load(None, [
        "model.layers=126", "model.hidden=16384", "model.heads=128", "model.kv_heads=8",
        "model.ffn_hidden=53248", "model.vocab=128256", "model.seq_len=8192", "model.activation=swiglu",
        "model.norm=rmsnorm", "model.position=rotary", "model.tie_embeddings=false", "zero.stage=1",
        "precision.dtype=bf16", "parallel.pp=16", "parallel.tp=8", f"parallel.dp={dp}",
        f"train.global_batch_size={16 * dp}", f"run.dir={folder}", "train.resume=never",
        "checkpoint.background=false"])


def of_ranks(ranks: int, folder: str) -> dict[str, str]:
    """One rank's start, without its weights, and a step's exchange of numbers."""
    config, made = config_of(ranks, folder), [0]
    init, new_group = dist.init_process_group, dist.new_group
    spent = {}

    def counted(*args: Any, **options: Any) -> Any:
        made[0] += 1
        return new_group(*args, **options)

    def timed(*args: Any) -> Any:
        begin = time.thread_time()
        analysis = analyse(*args)
        spent["plan"] = time.thread_time() - begin
        return analysis

    dist.init_process_group = lambda backend, **options: init("fake", **{**options, "store": FakeStore()})
    dist.new_group, assemble.ProcessComm = counted, Counting
    prepared = Prepared(Path(folder) / "data", None, 1, 1, 1, None, True)
    for suffix in (".bin", ".idx"):
        Path(f"{prepared.prefix}{suffix}").write_bytes(bytes(1 << 17))
    begin = time.thread_time()
    watch = Watch(0, dist.HashStore(), 600.0, ranks)
    comm, analysis = assemble.connect(config, watch, torch.device("cpu"), None, timed)
    assert isinstance(comm, Counting)
    hosts = watch.hosts
    shared.same_data(comm, prepared, hosts, True)
    check_hosts(config, analysis, comm, hosts)
    shared.same_folder(comm, Path(folder), hosts, 60.0, True)
    resume(config, SimpleNamespace(comm=comm))  # pyright: ignore[reportArgumentType]
    start_s = time.thread_time() - begin
    watch.close()
    dist.init_process_group, dist.new_group = init, new_group
    row = {"processor s": f"{start_s:.1f}", "of it the plan": f"{spent['plan']:.1f}",
           "calls of new_group": str(made[0]), "collectives": str(comm.calls),
           "received in them": show_bytes(comm.received),
           "polls of the store, one a": f"{max(POLL_S, ranks / POLLS):.2g} s"}
    row |= of_a_step(config, analysis, comm)
    comm.close()
    return row


def of_a_step(config: Config, analysis: Analysis, comm: ProcessComm) -> dict[str, str]:
    comm.groups["world"] = SilentGroup("world", range(comm.mesh.size), comm.rank, comm.sent)
    count = len(analysis.plan.programs["train"][comm.here.position])
    times = [0.01 * index for index in range(count)]
    trace = Trace("train", 0.0, times, times, [at + 0.005 for at in times])
    trace.total_s = times[-1] + 1
    run = SimpleNamespace(columns=("stop", "save", "saving"), row=lambda: (0.0, 0.0, 1.0))
    meter = Meter(config, analysis, comm, Arrivals(analysis.table), [run])
    meter.begin()
    before, begin = comm.sent["world"], time.thread_time()
    step = meter.report(trace, trace.total_s)
    exchanged_s = time.thread_time() - begin
    step._rows[:] = step._rows[comm.rank]
    meter._predicted = [0.0] * comm.mesh.positions  # no prediction: a rank knows its own costs alone here
    meter.metrics(step, 0.0)  # it counts the model's FLOPs, once
    begin = time.thread_time()
    meter.metrics(step, 0.0)
    return {"its line of a trace": show_bytes(len(encode(1, trace))),
            "bytes of metrics a step": show_bytes(comm.sent["world"] - before),
            "processor ms": f"{1000 * exchanged_s:.0f}",
            "rank 0's metrics, processor ms": f"{1000 * (time.thread_time() - begin):.0f}"}


class Client(dist.Store):
    """A rank's client of a store, which counts its reads."""

    def __init__(self, port: int):
        super().__init__()
        self.inner, self.reads, self.read = dist.TCPStore("127.0.0.1", port, None, False), 0, 0

    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.inner.get(key)
        self.reads, self.read = self.reads + 1, self.read + len(value)
        return value

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.inner.wait(keys, LIMIT)


def of_gloo(count: int) -> dict[str, str]:
    """What a rank reads from the store to meet the others: an all-gather, a broadcast and an all-reduce."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores, groups = [Client(server.port) for _ in range(count)], []

    def be(rank: int) -> None:
        group: Any = dist.ProcessGroupGloo(stores[rank], rank, count, LIMIT)
        groups.append(group)
        group.allgather([list(torch.zeros(count).split(1))], [torch.zeros(1)]).wait()
        group.broadcast(torch.zeros(1), 0).wait()
        group.allreduce(torch.zeros(1)).wait()

    files = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(count) as ranks:
        list(ranks.map(be, range(count)))
    files = len(os.listdir("/proc/self/fd")) - files
    return {"reads": f"{sum(each.reads for each in stores) / count:.1f}",
            "read": f"{sum(each.read for each in stores) / count:,.0f} B",
            "open files": f"{files / count:.0f}"}


def of_starts(count: int) -> dict[str, str]:
    """How long ranks take to agree on a start in one store (threads with clients of their own), and what of a
    processor the process that serves it, rank 0 and all others use meanwhile."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def be(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, LIMIT)
        return of_this_start(store, rank, count, 60.0)

    begin, used = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(count) as ranks:
        prefixes = set(ranks.map(be, range(count)))
    assert len(prefixes) == 1
    return {"agreed after": f"{time.monotonic() - begin:.1f} s",
            "processor": f"{time.process_time() - used:.1f} s"}


def table(head: str, rows: dict[str, dict[str, str]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [f"| {head} | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row.values())} |" for name, row in rows.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    torch.set_num_threads(1)
    by_starts = {f"{count:,}": of_starts(count) for count in STARTS}
    with tempfile.TemporaryDirectory() as folder:
        by_ranks = {f"{ranks:,}": of_ranks(ranks, folder) for ranks in RANKS}
    by_gloo = {}
    for count in GLOO:
        with connecting_late():
            by_gloo[f"{count}, late"] = of_gloo(count)
        by_gloo[f"{count}, at once"] = of_gloo(count)
    text = "\n\n".join([table("ranks", by_ranks), table("ranks that connect", by_gloo),
                        table("ranks that agree on a start", by_starts)])
    print(text)
    if args.markdown:
        args.markdown.write_text(f"# What thousands of ranks cost one of them\n\n`python -m bench.run.scale "
                                 f"--markdown {args.markdown}`; see [bench/README.md](../README.md).\n\n"
                                 f"{text}\n")


if __name__ == "__main__":
    main()
