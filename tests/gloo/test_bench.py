"""Each bench runs, at its smallest sizes: what it calls of threed moves, and a bench is run once a month.
(gpu/facts and gpu/models: test_gpu_bench.py. gpu/kernels needs triton, and foresight/measured minutes.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "foresight.published": "",
    "foresight.search": "--layouts 3",
    "gpu.offload": "--quick",
    "peers.moe": "--quick --ep 2 --layers 1 --hidden 64 --heads 2 --inner 32 --only threed",
    "peers.offload": "--quick --only adam disk --folder {folder}",
    "peers.pipeline": "--schedule 1f1b --p 3 --m 3 --times 1 1 1 --repeat 1",
    "peers.steps": "--quick --only threed",
    "peers.tp": "--quick",
    "peers.zero": "--quick --only threed --ranks 2",
    "run.checkpoint": "--ranks 2 --layers 1 --hidden 64 --steps 1 --rounds 1",
    "run.fused": "--hidden 64 --tokens 32 --rounds 1",
    "run.import": "--gb 0.01 --ranks 2 --hidden 64 --vocab 256",
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


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "peers.pipeline" else pytest.mark.slow) for name in SMALLEST])
def test_smallest(name, tmp_path):
    command = [sys.executable, "-m", f"bench.{name}", *SMALLEST[name].format(folder=tmp_path).split()]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout[-3000:]
    assert done.stdout.strip()
