"""What a disk does to a run, from the command line: one message that names the place and what to do, and the
last checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, losses, metrics
from threed.base.errors import InputError, RunError
from threed.tensor.disk import Disk
from threed.tensor.pool import aligned

SMALL = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=32", "model.seq_len=32",
         "model.vocab=300",
         "train.global_batch_size=4", "train.micro_batch_size=1", "train.eval_every=0",
         "monitor.wandb=disabled",
         "monitor.trace_every=0", "optimizer.warmup_steps=0", "optimizer.decay_steps=12", "parallel.tp=1",
         "parallel.pp=1",
         "parallel.dp=2", "run.timeout_s=60", "zero.stage=3", "offload.optimizer=nvme",
         "offload.parameters=nvme"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, cache):
    """A run of 12 steps without faults, with a checkpoint after 4."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "disk").mkdir()
    run = Run(folder, *SMALL, *cache, f"run.dir={folder / 'run'}", f"offload.nvme_path={folder / 'disk'}",
              "train.steps=12",
              "checkpoint.every=4", "checkpoint.keep=0")
    assert run.wait() == 0, run.output
    return folder / "run"


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def start(tmp_path, cache, disk):
    """start(*overrides) -> a run in tmp_path/run with its files in `disk`; what still runs at the end is
    killed."""
    runs = []

    def begin(*overrides: str, name: str = "run") -> Run:
        run = Run(tmp_path, *SMALL, *cache, f"run.dir={tmp_path / name}", f"offload.nvme_path={disk}",
                  *overrides)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.kill()


def said_once(run: Run, status: int, *words: str) -> None:
    """The run ended with this status and one message, which contains these words."""
    assert run.wait() == status, run.output
    assert "Traceback" not in run.output and run.output.count("offload.nvme_path=") == 1, run.output
    (line,) = (line for line in run.output.splitlines() if "offload.nvme_path=" in line)
    for word in ("threed: ", *words):
        assert word in line, run.output


def files_of(run: Run) -> list[Path]:
    """The open files of a run's ranks in the offload folder, as Linux shows them: of each the descriptor that
    stays. (A file that is mapped into memory has another, whose number soon is another file's.)"""
    links: dict[tuple[int, int], Path] = {}
    for rank in run.ranks():
        for link in sorted(Path(f"/proc/{rank.pid}/fd").iterdir(), key=lambda link: int(link.name)):
            # one that was closed after it was listed is not open
            with contextlib.suppress(FileNotFoundError):
                if "/disk/" in os.readlink(link):
                    links.setdefault((rank.pid, link.stat().st_ino), link)
    return [*links.values()]


def resumes(start, tmp_path: Path, unbroken: Path) -> None:
    """The checkpoint is whole: the run resumes from it as if there had been no fault."""
    again = start("train.steps=12")
    assert again.wait() == 0, again.output
    assert "resumed from" in again.output
    # the last of each
    rows = {row["step"]: (row["train/loss"], row["train/grad_norm"]) for row in metrics(tmp_path / "run")}
    assert rows == losses(unbroken)


# ---------------------------------------------------------------- before the first step


def test_no_folder(start, tmp_path):
    said_once(start("train.steps=2", f"offload.nvme_path={tmp_path / 'nowhere'}"), 2,
              f"offload.nvme_path={tmp_path / 'nowhere'} is not a folder: make it")


def test_a_file(start, tmp_path):
    (tmp_path / "file").write_text("")
    said_once(start("train.steps=2", f"offload.nvme_path={tmp_path / 'file'}"), 2,
              f"offload.nvme_path={tmp_path / 'file'} is not a folder: make it")


def test_a_folder_without_files(start):
    """A folder in which even root cannot create a file."""
    said_once(start("train.steps=2", "offload.nvme_path=/proc/self"), 2,
              "offload.nvme_path=/proc/self cannot be used")


def test_read_only(start, mount):
    said_once(start("train.steps=2", f"offload.nvme_path={mount('ro')}"), 2,
              "cannot be used: Read-only file system")


def test_too_small(start, mount):
    """Refused before the first step, not hours into the run; and the space that was taken is given back."""
    small = mount("size=200k")
    said_once(start("train.steps=2", f"offload.nvme_path={small}"), 2,
              f"offload.nvme_path={small} has no room for", "of rank",
              "No space left on device", "free some, give a folder on a larger disk, or offload less")
    assert shutil.disk_usage(small).used == 0 and not list(small.iterdir())


def test_a_limit_on_files(start, unbroken):
    """ulimit -f: the signal that comes with it must not end the run without a word."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        run = start("train.steps=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said_once(run, 2, "has no room for", "File too large")


# ---------------------------------------------------------------- in the middle of a run


@pytest.mark.parametrize("size", [0, 4096])
def test_a_file_is_cut_short(size, start, tmp_path, unbroken):
    """Zeros, or old memory, in place of the state: the run would train with them."""
    assert start("train.steps=4").wait() == 0
    run = start("train.steps=100000")
    run.wait_for("step      6/100000")
    victim = max(files_of(run), key=lambda link: link.stat().st_size)
    while run.process.is_alive():  # it may be about to be written whole
        try:
            os.truncate(victim, size)
        except OSError:
            break
        time.sleep(0.002)
    said_once(run, 1, "of rank", "was cut short while the run used it. The last checkpoint is intact")
    resumes(start, tmp_path, unbroken)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call, done", [("pwritev", "written"), ("preadv", "read")])
def test_a_disk_that_fails(call, done, number, start, tmp_path, unbroken, monkeypatch):
    """A failure beside the computation, of one rank, that nobody waits for: the others would train on."""
    assert start("train.steps=4").wait() == 0
    original, calls, make, failing = getattr(os, call), [], Disk.__init__, []

    def init(self: Disk, path: str, rank: int) -> None:
        failing.append(rank == 1)
        make(self, path, rank)

    def fail(*arguments):
        calls.append(None)
        if len(calls) >= 60 and failing == [True]:
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "__init__", init)
        patch.setattr(os, call, fail)
        run = start("train.steps=100000")
    said_once(run, 1, f"of rank 1 could not be {done}: {os.strerror(number)}. The last checkpoint is intact")
    resumes(start, tmp_path, unbroken)


def test_the_folder_goes(start, disk, tmp_path, unbroken):
    """Files that are open live on without a folder."""
    assert start("train.steps=4").wait() == 0
    run = start("train.steps=12", "checkpoint.every=4")
    run.wait_for("step  5/12")
    shutil.rmtree(disk)
    assert run.wait() == 0, run.output
    assert losses(tmp_path / "run") == losses(unbroken)


@pytest.mark.parametrize("how", ["end", "SIGTERM", "one rank", "SIGKILL"])
def test_nothing_is_left(how, start, disk):
    """Files of a run that ended, or was killed, fill the disk: they are in no folder, and go with the
    process."""
    run = start("train.steps=100000" if how != "end" else "train.steps=8")
    run.wait_for("step      3/100000" if how != "end" else "step 3/8")
    assert len(files_of(run)) > 4 or how == "end"
    assert not list(disk.iterdir())
    ranks = run.ranks()
    if how == "SIGTERM":
        os.kill(run.process.pid or 0, signal.SIGTERM)
    elif how != "end":
        for rank in ranks if how == "SIGKILL" else ranks[:1]:
            rank.kill()
    assert (run.wait(30) == 0) == (how in ("end", "SIGTERM")), run.output
    assert not list(disk.iterdir())


def test_two_runs_in_one_folder(start, tmp_path, unbroken):
    """A second run that removes or overwrites the files of the first: both train on, with each other's
    state."""
    runs = [start("train.steps=12", "checkpoint.every=4", name=name) for name in ("one", "two")]
    for run, name in zip(runs, ("one", "two")):
        assert run.wait() == 0, run.output
        assert losses(tmp_path / name) == losses(unbroken)


# ---------------------------------------------------------------- the files alone


def memory(numel: int) -> torch.Tensor:
    return aligned(numel, torch.float32, torch.device("cpu"), False)


def test_what_is_written_is_read(disk):
    """By reads and by the view for checkpoints, in whichever order: past the page cache and through it."""
    files = Disk(str(disk), 0)
    files.make("a", 10_000)
    view, buffer = files.map("a", 2500, torch.float32), memory(3072)
    view.fill_(3.0)
    files.read("a", buffer.view(torch.uint8))
    assert buffer[:2500].eq(3).all()
    files.write("a", buffer.fill_(5.0).view(torch.uint8))
    assert view.eq(5).all() and files.map("a", 2500, torch.float32).eq(5).all()
    files.close()
    assert view.eq(5).all()


def test_in_pieces(disk, monkeypatch):
    """The system may move less than was asked for."""
    files, value = Disk(str(disk), 0), torch.arange(4096.0)
    files.make("a", 4 * 4096)
    for call in ("preadv", "pwritev"):
        original = getattr(os, call)

        def partly(number, parts, at, original=original):
            return original(number, [parts[0][:4096]], at)

        monkeypatch.setattr(os, call, partly)
    buffer, again = memory(4096), memory(4096)
    files.write("a", buffer.copy_(value).view(torch.uint8))
    files.read("a", again.view(torch.uint8))
    assert again.equal(value)


def test_a_system_without_direct_access(mount):
    """A file system in memory, which has no direct I/O: the same, through the page cache."""
    files, buffer = Disk(str(mount("size=1m")), 0), memory(1024)
    files.make("a", 4096)
    files.write("a", buffer.fill_(2.0).view(torch.uint8))
    files.read("a", buffer.zero_().view(torch.uint8))
    assert buffer.eq(2).all()


def test_messages(disk):
    """Each names the setting, the folder, the unit and the rank."""
    files = Disk(str(disk), 3)
    files.make("p1.state", 8192)
    os.truncate(f"/proc/self/fd/{files._files['p1.state'].fileno()}", 4096)
    with pytest.raises(RunError, match=rf"nvme_path={disk}: p1.state of rank 3 could be read up to byte 4096 "
                                       rf"of 8192 only"):
        files.read("p1.state", memory(2048).view(torch.uint8))
    with pytest.raises(RunError, match=rf"nvme_path={disk}: p1.state of rank 3 was cut short"):
        files.map("p1.state", 2048, torch.float32)
    with pytest.raises(InputError, match=rf"nvme_path={disk} has no room for .* TiB, p2.state of rank 3"):
        files.make("p2.state", 1 << 50)
