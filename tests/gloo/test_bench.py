"""Each bench runs, at its smallest sizes: what it calls of threed moves, and a bench is run once a month.
(gpu/facts and gpu/models: test_gpu_bench.py. gpu/kernels needs triton, and foresight/measured minutes.)"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "foresight.context": "",
    "foresight.offload": "",
    "foresight.published": "",
    "foresight.regret": "--hardware cpu-core --layouts 2 --ranks 2",
    "foresight.search": "--layouts 3",
    "gpu.offload": "--quick",
    "peers.context": "--quick --hidden 64 --heads 4 --seq-len 64 --layers 1",
    "peers.moe": "--quick --ep 2 --layers 1 --hidden 64 --heads 2 --inner 32 --only threed",
    "peers.muon": "--quick --ranks 2 --layers 1 --hidden 64 --heads 2 --seq-len 32 --only threed",
    "peers.offload": "--quick --only adam disk --folder {folder}",
    "peers.pipeline": "--schedule 1f1b --p 3 --m 3 --times 1 1 1 --repeat 1",
    "peers.sleeping_keys": "--quick --schedule 1f1b --m 4 --times 1 1 1",
    "peers.steps": "--quick --only threed",
    "peers.tp": "--quick",
    "peers.zero": "--quick --only threed --ranks 2",
    "run.checkpoint": "--ranks 2 --layers 1 --hidden 64 --steps 1 --rounds 1",
    "run.fused": "--hidden 64 --tokens 32 --rounds 1",
    "run.import": "--gb 0.01 --ranks 2 --hidden 64 --vocab 256",
    "run.muon_loss": "model.layers=1 model.hidden=32 model.seq_len=32 --quick",
    "run.planning": "--only advice --rounds 1",
    "run.recovery": "--ranks 2 --rounds 1",
    "run.same_numbers": "--against HEAD --only gpipe",
    "run.scale": "",
}
ELSEWHERE = {"gpu.facts", "gpu.models", "gpu.kernels", "foresight.measured", "gpu.losses"}


def test_each_bench_is_tried():
    """A file that has a command line is a bench."""
    names = {".".join(path.relative_to(ROOT / "bench").with_suffix("").parts): path.read_text()
             for path in (ROOT / "bench").rglob("*.py")}
    assert {name for name, text in names.items() if "__main__" in text} == {*SMALLEST, *ELSEWHERE}


@pytest.mark.parametrize("name", sorted({*SMALLEST, *ELSEWHERE} - {"gpu.kernels"}))  # (it needs triton)
def test_what_each_bench_imports(name):
    """A function that it calls moved, and only `make matrix` saw it."""
    importlib.import_module(f"bench.{name}")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "peers.pipeline" else pytest.mark.slow) for name in SMALLEST])
def test_smallest(name, tmp_path):
    assert run(name, SMALLEST[name].format(folder=tmp_path), tmp_path).strip()


@pytest.mark.slow
@pytest.mark.parametrize("name, title", [("peers.context", "Beside plain torch"),
                                         ("peers.sleeping_keys", "Overlap")])
def test_benches_of_one_file(name, title, tmp_path):
    """Each writes its own section of it, and the others stay."""
    file = tmp_path / "context.md"
    file.write_text(f"# All\n\n## Before\n\nstays\n\n## {title}\n\nold\n\n## Behind\n\nstays\n")
    run(name, f"{SMALLEST[name]} --markdown {file}", tmp_path)
    _, *sections = file.read_text().split("\n## ")
    assert [text.partition("\n")[0] for text in sections] == ["Before", title, "Behind"]
    assert f"python -m bench.{name} " in sections[1] and "old" not in sections[1]
    assert [text.partition("\n")[2].strip() for text in sections[::2]] == ["stays", "stays"]


def test_experts_that_sleep(tmp_path):
    """Each schedule that has pairs is there without and with them, and the targets stand below."""
    options = "--sleep --p 2 --m 4 --times 1 1 1 --repeat 1 --schedule 1f1b dualpipe-v"
    out = run("peers.moe", options, tmp_path)
    first = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert first == ["schedule", "1f1b", "1f1b, paired", "dualpipe-v (v=2)", "dualpipe-v (v=2), paired"], out
    assert "x predicted" in out and "dualpipe-v (v=2), paired: at least 85% of the exchanges hidden" in out


def test_offload_that_sleeps(tmp_path):
    """Each plan steps all units on the host, and the criterion stands below; a section of a file is replaced,
    and the others stay."""
    file = tmp_path / "offload.md"
    file.write_text("# Offload\n\n## On an engine that sleeps\n\nold\n\n## Another\n\nstays\n")
    options = f"--sleep --quick --times 1 1 1 1 1 --markdown {file}"
    out = run("peers.offload", options, tmp_path)
    first = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")][1:]
    orders = [f"{what}, {m}, {order}" for what in ("optimizer", "parameters")
              for m, groups in ((2, (2,)), (8, (8, 4)))
              for order in ("1f1b", *(f"vertical by {group}" for group in groups))]
    assert {each.rpartition(", ")[0] for each in first} == set(orders)
    assert "optimizer, 2, 1f1b, none" in first and "x predicted" in out
    jobs = re.findall(r"jobs: OFFLOAD 4, FETCH (\d+), STEP 4", out)
    assert len(jobs) == len(first), "a unit's step, and the copies around it, sleep on their lanes"
    assert all(int(count) == 4 for count, name in zip(jobs, first, strict=True) if name.startswith("opt"))
    text = file.read_text()
    assert "old" not in text and text.endswith("## Another\n\nstays\n") and f"| {first[0]} " in text


def test_offload_on_a_device_goes_on(tmp_path):
    """A setting that does not fit is a row, and a bench without time says so; neither is a failure."""
    file = tmp_path / "offload.md"
    run("gpu.offload", f"--quick --memory 16MiB --settings optimizer --markdown {file}", tmp_path)
    text = file.read_text()
    assert "* nothing: does not fit: " in text
    cells = next(line for line in text.splitlines() if line.startswith("| optimizer")).split("|")
    tokens, predicted, host, resident = (cells[index].strip() for index in (4, 6, 10, 11))
    assert float(tokens) > 0 and float(predicted) > 0 and host.endswith("MiB") and resident.endswith("B")
    assert "| plain " in text, "the host's step comes after the rows"
    out = run("gpu.offload", "--quick --seconds 1 --settings optimizer", tmp_path)
    assert "* optimizer: left out: " in out


def run(name: str, options: str, folder: Path) -> str:
    """What a bench prints."""
    command = [sys.executable, "-m", f"bench.{name}", *options.split()]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)})
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout[-3000:]
    return done.stdout
