"""Whole runs on fake GPUs: `threed train` forks its ranks, each of which has a GPU, and they end with a
report: no race, and work on the GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda import build, commands
from tests.fakecuda.server import Server
from tests.running import losses, metrics

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tests/fakecuda/site"
TINY = ["train", "configs/toy.yaml", "run.device=auto", "run.restarts=0", "model.layers=2", "model.hidden=32",
        "model.heads=4", "model.seq_len=32", "model.vocab=300", "train.global_batch_size=4",
        "train.micro_batch_size=1", "train.steps=3", "train.eval_every=0", "checkpoint.every=0",
        "optimizer.warmup_steps=0", "monitor.wandb=disabled", "parallel.tp=1", "parallel.pp=1"]
TWO = [*TINY, "parallel.dp=2"]
FAKE = {"FAKE_CUDA": "2", "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Overrides for a small corpus, which the first run prepares for all."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for name in ("argparse", "datetime", "inspect"):
        shutil.copy(Path(os.__file__).parent / f"{name}.py", folder / "text")
    return [f"data.source={folder / 'text'}", f"data.cache={folder / 'cache'}"]


@pytest.fixture(scope="module")
def machine():
    """A process on a machine with two fake GPUs, from which commands are forked."""
    if why := build.missing():
        pytest.skip(why)
    build.extension()
    server = Server(**FAKE)
    yield server
    server.close()


class Runs:
    """Commands on the machine. Each has a log, and a report of what its ranks did on their GPUs."""

    def __init__(self, machine: Server, folder: Path, cache: list[str]):
        self.machine, self.folder, self.cache, self.number = machine, folder, cache, count()
        self.output, self.reports = "", []  # of the last command

    def call(self, function: Any, *arguments: Any, env: dict[str, str] | None = None) -> Any:
        number = next(self.number)
        log, report = self.folder / f"log-{number}", self.folder / f"report-{number}"
        variables = {"FAKE_CUDA_REPORT": str(report), **(env or {})}
        try:
            return self.machine.run(function, log, *arguments, variables)
        finally:
            self.output = log.read_text() if log.exists() else ""
            lines = report.read_text().splitlines() if report.exists() else []
            self.reports = list(map(json.loads, lines))

    def command(self, *argv: str, how: Any = commands.command, env: dict[str, str] | None = None) -> int:
        """`threed ARGV ...`, with the small corpus."""
        return self.call(how, [*argv, *self.cache], env=env)

    def train(self, name: str, *argv: str, ranks: int = 2, **more: Any) -> Path:
        """Train in a folder of this name, to the end, on as many GPUs as `ranks`, without a race."""
        folder = self.folder / name
        status = self.command(*argv, f"run.dir={folder}", **more)
        assert status == 0, self.output
        self.sound(ranks)
        return folder

    def sound(self, ranks: int) -> None:
        """Each rank has worked on its GPU, without a race."""
        assert sorted(report["rank"] for report in self.reports) == [*range(ranks)], self.output
        assert all(report["launches"] > 100 for report in self.reports)
        assert not [race for report in self.reports for race in report["races"]][:5]


@pytest.fixture
def runs(machine, tmp_path, cache):
    return Runs(machine, tmp_path, cache)


def close(first: Path, second: Path) -> None:
    """The losses and gradient norms of two runs."""
    ours, theirs = losses(first), losses(second)
    assert [*ours] == [*theirs]
    for step, pair in ours.items():
        assert pair == pytest.approx(theirs[step], rel=1e-4), step


# ---------------------------------------------------------------- what a run does


@pytest.mark.parametrize(("axis", "failing"), [("tp", []), ("tp", [1]), ("tp", [0, 1]), ("pp", [1])], ids=str)
def test_pieces_that_ranks_cannot_compile(axis, failing, runs):
    """In a step: of all ranks, they go on alike, and so of one stage; of one rank of a tensor-parallel group,
    the run stops, and says what to do."""
    status = runs.command(*TINY, f"parallel.{axis}=2", "parallel.dp=1", f"run.dir={runs.folder / 'run'}",
                          how=partial(commands.fused, failing=failing))
    assert runs.output.count("warning: model.fused=auto: a piece") == len(failing), runs.output
    assert (status != 0) == ((axis, failing) == ("tp", [1])), runs.output
    if status:
        assert "rank 1 could not compile a piece of the model in this step" in runs.output
        assert "and rank 0 could" in runs.output and "set model.fused=off" in runs.output
        assert len(losses(runs.folder / "run")) < 3
    else:
        assert len(losses(runs.folder / "run")) == 3


def test_a_rank_a_gpu_and_another_mesh(runs):
    """`dp: auto` is one rank a GPU; the run goes on, over tp and with ZeRO-3 over pp, to the losses that a
    CPU computes; and text and losses come from its checkpoint."""
    longer = ["train.steps=6", "checkpoint.every=3", "train.eval_every=3", "optimizer.schedule=constant"]
    folder = runs.train("gpu", *TINY, *longer, "parallel.dp=auto", "train.steps=3")
    assert "2 ranks" in runs.output or "dp1" in runs.output
    runs.train("gpu", *TINY, *longer, "parallel.dp=1", "parallel.tp=2", "train.steps=5")
    assert "after step 3" in runs.output
    runs.train("gpu", *TINY, *longer, "parallel.dp=1", "parallel.pp=2", "zero.stage=3")
    status = runs.command(*TWO, *longer, "run.device=cpu", f"run.dir={runs.folder / 'cpu'}")
    assert status == 0 and not runs.reports, runs.output
    close(folder, runs.folder / "cpu")
    for argv in (["generate", str(folder), "--prompt", "def f(", "--max-tokens", "4"], ["eval", str(folder)]):
        assert runs.call(commands.command, argv) == 0, runs.output
        runs.sound(1)


def test_the_first_command(runs):
    """The toy has 8 ranks, and a machine may have fewer GPUs: its config says that it is for processors."""
    small = [word for word in TINY if not word.startswith(("run.device", "parallel"))]
    folder = runs.folder / "run"
    status = runs.command(*small, "train.steps=1", "train.micro_batch_size=1", f"run.dir={folder}")
    assert status == 0 and not runs.reports and len(metrics(folder)) == 1, runs.output


@pytest.mark.parametrize("overrides", [
    ["zero.stage=2", "run.verify_every=2"],
    ["zero.stage=2", "run.verify_every=2", "offload.optimizer=cpu"],
    ["zero.stage=3", "offload.optimizer=nvme", "offload.ratio=0.5", "checkpoint.every=2"],
    ["model.lora_rank=2", "model.lora_alpha=4", "zero.stage=2"],
    ["data.document_mask=true", "data.packing=best-fit"]],
    ids=["verified", "verified, offloaded", "nvme", "lora", "documents"])
def test_settings(runs, overrides):
    """What a device cannot do that a CPU can."""
    extra = [f"offload.nvme_path={runs.folder}"] if "offload.optimizer=nvme" in overrides else []
    folder = runs.train("run", *TWO, *overrides, *extra)
    assert len(metrics(folder)) == 3
    away, chosen = any("offload.optimizer" in word for word in overrides), "OMP_NUM_THREADS" in os.environ
    assert ("the optimizer steps on the host with" in runs.output) == (away and not chosen), runs.output


@pytest.mark.parametrize("overrides", [
    ["checkpoint.background=true"], ["checkpoint.background=false"],
    ["offload.optimizer=nvme", "offload.ratio=0.5"]], ids=["background", "at once", "nvme"])
def test_a_checkpoint_comes_after_the_computation(runs, overrides):
    """The thread that writes is on the default stream, and the computation may be on another one: it read
    weights that a step was still writing, and their checksums were right."""
    extra = [f"offload.nvme_path={runs.folder}"] if "offload.optimizer=nvme" in overrides else []
    runs.train("run", *TWO, "zero.stage=1", "checkpoint.every=1", *overrides, *extra, how=commands.beside)


def test_killed_and_started_again(runs):
    """The launcher forks new ranks: nothing of it may have started CUDA in the meantime."""
    folder = runs.folder / "run"
    overrides = [*TWO[2:], *runs.cache, f"run.dir={folder}", "run.restarts=1", "run.restart_wait_s=0",
                 "checkpoint.every=2", "train.steps=4"]
    assert runs.call(commands.killed, TWO[1], overrides) == 0, runs.output
    assert "killed by SIGKILL" in runs.output and [*losses(folder)] == [1, 2, 3, 4]
    runs.reports = [report for report in runs.reports if report["launches"]][-2:]  # of the second start
    runs.sound(2)


# ---------------------------------------------------------------- how processes come to a GPU


OWN = ["parallel.dp=2", "parallel.pp=1", "train.steps=1", "monitor.wandb=disabled", "run.restarts=0"]


def test_own_layers(runs):
    """Layers are measured in the launcher, which then forks: torch's mode without memory asked whether there
    is a GPU, without NVML by starting CUDA, and every rank died."""
    argv = ["train", "examples/vit.yaml", *OWN, f"run.dir={runs.folder / 'run'}"]
    assert runs.call(commands.command, argv, env={"FAKE_CUDA_NVML": "0"}) == 0, runs.output
    runs.sound(2)


def test_a_script_that_asks_for_a_gpu(runs):
    """torch.cuda.is_available() before threed.train, as in many scripts: after `import threed` it starts
    nothing. Where it has started CUDA, that is said before the fork: ranks would see no GPU, and train on
    the CPU, or die."""
    llama, argv = ROOT / "examples/llama.py", [*OWN, f"run.dir={runs.folder / 'run'}"]
    assert runs.call(commands.script, llama, argv) == 0, runs.output
    runs.sound(2)
    toy = runs.folder / "toy.py"
    words = [*TWO[2:], *runs.cache, f"run.dir={runs.folder / 'toy'}"]
    toy.write_text(f"import threed\nthreed.train('configs/toy.yaml', {words})")
    assert runs.call(commands.starts, toy) == 2
    assert "this process has started CUDA, so ranks that are forked from it could not use" in runs.output
    toy.write_text(toy.read_text().replace("run.device=auto", "run.device=cpu"))
    assert runs.call(commands.starts, toy) == 0 and not runs.reports, runs.output


def test_nvml_is_missing(runs):
    """As in some containers: then torch counts GPUs by CUDA itself, which the launcher must not start."""
    runs.train("run", *TINY, "parallel.dp=auto", env={"FAKE_CUDA_NVML": "0"})


def test_a_driver_that_does_not_fit(runs):
    """NVML lists GPUs, and CUDA does not start: a run must not go to the CPU unseen, nor end in each rank."""
    assert runs.command(*TWO, f"run.dir={runs.folder}", env={"FAKE_CUDA_BROKEN": "1"}) == 2
    assert "the driver lists 2 GPUs, but a process that is forked from this one cannot" in runs.output


def test_fewer_gpus_than_ranks(runs):
    assert runs.command(*TINY, "parallel.dp=4", f"run.dir={runs.folder}") == 2
    assert "4 ranks would start on this machine, and each takes a GPU, but it has 2" in runs.output


def test_a_library_that_starts_cuda(tmp_path, cache):
    """Transformer Engine, say, which megatron-core imports where it is installed."""
    if why := build.missing():
        pytest.skip(why)
    package, report = tmp_path / "packages" / "transformer_engine", tmp_path / "report"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\ntorch.cuda._lazy_init()\nraise ModuleNotFoundError\n")
    env = {**os.environ, "FAKE_CUDA": "2", "FAKE_CUDA_REPORT": str(report),
           "PYTHONPATH": os.pathsep.join([str(SITE), str(package.parent)])}
    done = subprocess.run([sys.executable, "-m", "threed", *TWO, *cache, f"run.dir={tmp_path / 'run'}"],
                          cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(report.read_text().splitlines()) == 2


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def ranks(*visible: str) -> list[dict[str, str]]:
    """The variables of ranks as torchrun or Slurm starts them; `visible`: each one's GPUs."""
    port = free_port()
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(visible)),
             "LOCAL_WORLD_SIZE": str(len(visible)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
             "CUDA_VISIBLE_DEVICES": gpus} for rank, gpus in enumerate(visible)]


def test_one_visible_gpu_a_rank(runs):
    """`srun --gpus-per-task=1`, and many operators of Kubernetes: each rank sees one GPU, which is its number
    0, and all are different."""
    argv = [*TWO, *runs.cache, f"run.dir={runs.folder / 'run'}", "run.connect_timeout_s=60"]
    assert runs.call(commands.torchrun, argv, ranks("0", "1")) == [0, 0], runs.output
    runs.sound(2)


@pytest.mark.parametrize("visible, message", [
    (("1", "1"), "ranks 0 and 1 have the same GPU, "), (("0,1", ""), "rank 1 on .* sees no GPU, and rank 0"),
    (("", "0,1"), "rank 0 on .* sees no GPU, and rank 1")])
def test_ranks_that_have_no_gpu_of_their_own(runs, visible, message):
    """NCCL would say "duplicate GPU" of some ranks; a rank that sees no GPU would leave the others waiting,
    or would compute on the CPU."""
    argv = [*TWO, *runs.cache, f"run.dir={runs.folder / 'run'}", "run.connect_timeout_s=60"]
    assert runs.call(commands.torchrun, argv, ranks(*visible)) == [2, 2], runs.output
    assert re.search(message, runs.output), runs.output


@pytest.mark.parametrize("size, statuses", [(1, [0, 0]), (2, [2, 2])], ids=["one rank a node", "two"])
def test_agents_of_two_nodes(runs, size, statuses):
    """Each forks its node's ranks, after it has seen that there is a GPU for each of them."""
    port = free_port()
    nodes = [{"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "GPUS_PER_NODE": str(size), "CUDA_VISIBLE_DEVICES": str(node)} for node in range(2)]
    argv = [*TINY[1:], *runs.cache, f"run.dir={runs.folder / 'run'}", f"parallel.dp={2 * size}",
            "run.connect_timeout_s=60", "run.restarts=0"]
    assert runs.call(commands.agents, argv, nodes) == statuses, runs.output
    if size == 1:
        runs.sound(2)
    else:
        assert "2 ranks would start on this machine, and each takes a GPU, but it has 1" in runs.output
