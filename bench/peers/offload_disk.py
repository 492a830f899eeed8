"""The disk tier beside fio and dd: the same bytes, in files as large, in the same folder, past the page
cache."""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from threed.comm.lanes import ThreadLane
from threed.tensor.disk import BLOCK, Disk
from threed.tensor.pool import Pool

TARGET = 0.8  # of the best of the others' speed


class Files:
    """threed's files, through its lanes and from memory as the engine has it."""

    def __init__(self, folder: Path, count: int, nbytes: int):
        self.disk, self.names = Disk(str(folder), 0), [f"p{number}.state" for number in range(count)]
        for name in self.names:
            self.disk.make(name, nbytes)
        pool = Pool({nbytes: 2}, torch.uint8, torch.device("cpu"), for_disk=True)
        self.buffers = [pool.take(nbytes).random_() for _ in range(2)]
        self.lanes = {name: ThreadLane(name, torch.device("cpu")) for name in ("write", "read")}

    def run(self, what: str) -> float:
        move = self.disk.write if what == "write" else self.disk.read
        begin = time.monotonic()
        handles = [self.lanes[what].submit(partial(move, name, self.buffers[number % 2]))
                   for number, name in enumerate(self.names)]
        for handle in handles:
            handle.wait()
        return time.monotonic() - begin

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.disk.close()


def fio(folder: Path, count: int, nbytes: int, what: str, block: int, depth: int) -> float:
    """Seconds; `depth` requests in flight."""
    engine = ["--ioengine=libaio", f"--iodepth={depth}"] if depth > 1 else ["--ioengine=psync"]
    run = subprocess.run(["fio", "--name=unit", f"--directory={folder}", f"--nrfiles={count}",
                          f"--size={count * nbytes}",
                          f"--rw={what}", f"--bs={block}", "--direct=1", "--fallocate=posix", "--overwrite=1",
                          "--file_service_type=sequential", "--output-format=json", *engine],
                         capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"fio failed: {run.stderr or run.stdout}")
    result = json.loads(run.stdout[run.stdout.index("{"):])["jobs"][0][what]
    return count * nbytes / result["bw_bytes"]


def dd(folder: Path, count: int, nbytes: int, what: str) -> float:
    """Seconds, as dd counts them, file by file."""
    seconds = 0.0
    for number in range(count):
        file, size = folder / f"dd.{number}", [f"bs={BLOCK}", "count=" + str(-(-nbytes // BLOCK))]
        how = (["if=/dev/zero", f"of={file}", "oflag=direct", "conv=notrunc"] if what == "write"
               else [f"if={file}", "of=/dev/null", "iflag=direct"])
        run = subprocess.run(["dd", *how, *size], capture_output=True, text=True,
                             env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"})
        match = re.search(r"copied, ([0-9.e-]+) s", run.stderr)
        if run.returncode or not match:
            raise SystemExit(f"dd failed: {run.stderr}")
        seconds += float(match[1])
    return seconds


def measure_disk(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[str, list[str]]:
    """A title, and lines of text."""
    nbytes = -(-(args.mib << 20) // BLOCK) * BLOCK
    total, order = args.files * nbytes, random.Random(0)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="threed-bench-") as scratch:
        folder = Path(scratch)
        files = Files(folder, args.files, nbytes)
        sides: dict[str, Callable[[str], float]] = {
            "threed": files.run,
            "dd": lambda what: dd(folder, args.files, nbytes, what),
        }
        if shutil.which("fio"):
            sides["fio, as threed"] = lambda what: fio(folder, args.files, nbytes, what, BLOCK, 1)
            sides["fio, 1 MiB x 16"] = lambda what: fio(folder, args.files, nbytes, what, 1 << 20, 16)
        took: dict[str, dict[str, list[float]]] = {what: {name: [] for name in sides}
                                                   for what in ("write", "read")}
        for number in range(args.rounds + 1):
            say(f"disk, round {number} of {args.rounds}")
            for what, seconds_of in took.items():
                for name in order.sample(list(sides), len(sides)):
                    seconds = sides[name](what)
                    if number:
                        seconds_of[name].append(seconds)
        files.close()
    return "The disk tier", list(lines(args, nbytes, total, took))


def lines(args: argparse.Namespace, nbytes: int, total: int,
          took: dict[str, dict[str, list[float]]]) -> list[str]:
    out = [f"{args.files} files of {nbytes >> 20} MiB; the best of {args.rounds} rounds" +
           ("" if shutil.which("fio") else "; fio is not installed"), "", "| side | write MB/s | read MB/s |",
           "|---|---:|---:|"]
    speed = {what: {name: total / min(each) for name, each in rates.items()} for what, rates in took.items()}
    out += [f"| {name} | {speed['write'][name] / 1e6:.0f} | {speed['read'][name] / 1e6:.0f} |"
            for name in speed["write"]]
    out.append("")
    for what, rates in speed.items():
        peer = max((name for name in rates if name != "threed"), key=rates.__getitem__)
        ratio = rates["threed"] / rates[peer]
        out += [f"`{'met   ' if ratio >= TARGET else 'missed'}`  {what} at least {TARGET:g} x the best, "
                f"{peer}: {ratio:.3f}", ""]
    return out
