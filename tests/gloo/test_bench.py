"""Each bench runs, at its smallest sizes: what it calls of threed moves, and a bench is run once a month.
(facts.py and gpu.py: test_gpu_bench.py. kernels.py needs triton, and foresight.py minutes of calibration.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "checkpoint": "--ranks 2 --layers 1 --hidden 64 --steps 1 --rounds 1",
    "fused": "--hidden 64 --tokens 32 --rounds 1",
    "gpu_offload": "--quick",
    "import": "--gb 0.01 --ranks 2 --hidden 64 --vocab 256",
    "offload": "--quick --only adam disk --folder {folder}",
    "pipeline": "--schedule 1f1b --p 3 --m 3 --times 1 1 1 --repeat 1",
    "planning": "--only advice --rounds 1",
    "published": "",
    "recovery": "--ranks 2 --rounds 1",
    "same_numbers": "--against HEAD --only gpipe",
    "scale": "",
    "search": "--layouts 3",
    "steps": "--quick --only threed",
    "tp": "--quick",
    "zero": "--quick --only threed --ranks 2",
}
PARTS = {"apart", "fact", "facts_gpu", "facts_host", "gpu_side", "offload_disk", "offload_step",
         "pipeline_peers", "sizes", "sleepers", "slow_link", "turns", "zero_peers"}  # imported by benches


def test_each_bench_is_tried():
    elsewhere = {"facts", "gpu", "kernels", "foresight", "losses"}
    assert {path.stem for path in (ROOT / "bench").glob("*.py")} == {*SMALLEST, *PARTS, *elsewhere}


@pytest.mark.parametrize("name", [name if name == "pipeline" else pytest.param(name, marks=pytest.mark.slow)
                                  for name in SMALLEST])
def test_smallest(name, tmp_path):
    command = [sys.executable, f"bench/{name}.py", *SMALLEST[name].format(folder=tmp_path).split()]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=500, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout[-3000:]
    assert done.stdout.strip()
