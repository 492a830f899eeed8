"""bench/gpu/first_call.sh on fake GPUs: to its end, whatever a part comes to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.fakecuda import build

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu" / "first_call.sh"
PARTS = ["facts", "plain", "resume", "fused", "documents", "graphs", "offload", "verified", "own", "losses",
         "tests", "calibrate", "offloaded", "bench"]
# What a stand-in for Python is called with in a part. Everything else is another part's.
CALLS = {"facts": "*bench.gpu.facts*", "resume": "*threed\\ train\\ /*", "losses": "*bench.gpu.losses*",
         "tests": "*-m\\ pytest*", "calibrate": "*threed\\ calibrate*", "bench": "*bench.gpu.models*",
         "offloaded": "*bench.gpu.offload*"}
# Says what it is called with, makes what `resume` and `losses` want, and fails as it is told.
STAND_IN = """#!/usr/bin/env bash
all=" $* "
case $all in *device_count*) echo 1; exit ;; esac
echo "step 1 of$all"
[[ $all == {broken} ]] && {how}
for word; do
  [[ $word == run.dir=* ]] || continue
  mkdir -p "${{word#run.dir=}}/checkpoints/step-00000006"
  touch "${{word#run.dir=}}/metrics.jsonl"
done
exit 0
"""


def pattern(part: str) -> str:
    return CALLS.get(part, f"*run.dir=*/{part}\\ *")


def stand_in(folder: Path, broken: str = "nothing", how: str = "exit 3") -> Path:
    path = folder / "python"
    path.write_text(STAND_IN.format(broken=broken if broken == "nothing" else pattern(broken), how=how))
    path.chmod(0o755)
    return path


def environment(out: Path, python: str | Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "OUT": str(out), "PYTHON": str(python), "TMPDIR": str(out.parent), **more}


def call(out: Path, python: str | Path, *words: str, **more: str) -> int:
    """The exit status."""
    return subprocess.run([SCRIPT, *words], env=environment(out, python, **more), cwd=out.parent, check=False,
                          capture_output=True, timeout=400).returncode


def rows(out: Path) -> dict[str, tuple[str, str]]:
    """Part -> its status and what it says, in the summary's order."""
    lines = (out / "summary.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"]
    return {cell[0]: (cell[1], cell[3]) for cell in cells[2:]}


def test_every_part_on_a_fake_gpu(tmp_path):
    """What the fake has none of fails with a reason, and is named here."""
    if why := build.missing():
        pytest.skip(why)
    build.extension()
    out = tmp_path / "out"
    call(out, sys.executable, "--small", FAKE_CUDA="1", PYTHONPATH=str(Path(__file__).with_name("site")),
         OMP_NUM_THREADS="1")
    said = rows(out)
    assert list(said) == [part for part in PARTS if part != "calibrate"], "on the CPU, it would take an hour"
    lacks = {"fused": "triton"}
    for part, (status, text) in said.items():
        assert (status == "0") != (part in lacks), (part, status, text, (out / "log.txt").read_text())
        assert lacks.get(part, "") in text
    log = (out / "log.txt").read_text()
    assert "fork_after_count: a forked child uses the GPU" in log and "30 facts, 0 fail" in log
    assert "resumed from" in said["resume"][1] and ", cuda, attention" in log
    kept = json.loads((out / "gpu.json").read_text())
    tiny = kept["models"]["tiny"]
    assert kept["device"]["name"] == "fake GPU" and tiny["step_s"] > 0 and tiny["failure"] is None
    assert "USE_CUDA" in tiny["torch_failure"], "torch's FSDP wants a CUDA build: a row, and not the end"
    assert "| tiny |" in (out / "gpu.md").read_text()
    assert said["offloaded"][1].endswith("s)") and "| pinned " in (out / "offload.md").read_text()
    assert not list(tmp_path.glob("first-call-*")), "checkpoints are left behind"


@pytest.mark.parametrize("how", ["exit 3", "kill -SEGV $$"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_ends_no_other(part, how, tmp_path):
    out = tmp_path / "out"
    assert call(out, stand_in(tmp_path, part, how)) == 1
    said = rows(out)
    assert list(said) == PARTS
    # there is no checkpoint, and nothing to compare with
    other = {"resume": "left out", "losses": "left out"} if part == "plain" else {}
    for name, (status, text) in said.items():
        wanted = ("3" if how == "exit 3" else "139") if name == part else other.get(name, "0")
        assert status == wanted, (name, status, text)


def test_all_parts_are_good(tmp_path):
    out = tmp_path / "out"
    assert call(out, stand_in(tmp_path)) == 0
    assert [status for status, _ in rows(out).values()] == ["0"] * len(PARTS)


def test_a_part_that_hangs_is_stopped(tmp_path):
    """Also one that a signal does not end. What it has left behind does not hold up the script."""
    out = tmp_path / "out"
    python = stand_in(tmp_path, "facts", "{ echo so far; trap '' TERM; sleep 60 & sleep 60; }")
    begin = time.monotonic()
    assert call(out, python, "--seconds", "16", "facts") == 1
    assert time.monotonic() - begin < 30
    status, text = rows(out)["facts"]
    assert status in ("124", "137") and "stopped after" in text and "so far" in text


def test_without_time_parts_are_left_out(tmp_path):
    out = tmp_path / "out"
    assert call(out, stand_in(tmp_path), "--seconds", "24") == 0
    said = rows(out)
    assert list(said) == PARTS and said["facts"][0] == "0"
    assert said["plain"][0] == said["bench"][0] == "left out"
    assert "and it wants" in said["bench"][1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_is_killed_leaves_what_there_was(number, tmp_path):
    """A signal that can be caught also ends the part under way."""
    out = tmp_path / "out"
    python = stand_in(tmp_path, "documents", f"{{ echo $$ >{tmp_path}/started; exec sleep 60; }}")
    script = subprocess.Popen([SCRIPT], env=environment(out, python), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    under_way = psutil.Process(int((tmp_path / "started").read_text()))
    script.send_signal(number)
    assert script.wait(20) == (130 if number == signal.SIGTERM else -number)
    if number == signal.SIGKILL:
        under_way.kill()
    psutil.wait_procs([under_way], 10)
    assert not under_way.is_running()
    assert list(rows(out)) == PARTS[:PARTS.index("documents")]
    assert "#### documents" in (out / "log.txt").read_text()


def test_wheels_are_installed_where_there_are_some(tmp_path):
    """From a copy of the script, so that the repository gets no wheels."""
    bench = tmp_path / "bench" / "gpu"
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl" / "some-1-py3-none-any.whl").touch()
    bench.mkdir(parents=True)
    script = bench / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    out = tmp_path / "out"
    done = subprocess.run(["bash", script, "wheels", "facts"], env=environment(out, stand_in(tmp_path)),
                          check=False)
    assert done.returncode == 0 and list(rows(out)) == ["wheels", "facts"]
    assert "--no-index --no-deps" in (out / "log.txt").read_text()


@pytest.mark.parametrize(("words", "says"), [
    (["nonsense"], "there is no part nonsense; there are wheels facts"),
    (["--seconds", "soon"], "--seconds wants a number"), (["--seconds"], "--seconds wants a number"),
    (["--fast"], "there is no option --fast"),
])
def test_bad_words(words, says, tmp_path):
    done = subprocess.run([SCRIPT, *words], env=environment(tmp_path / "out", stand_in(tmp_path)),
                          capture_output=True, text=True, check=False)
    assert done.returncode == 2 and says in done.stderr
