"""`threed calibrate` on this machine: what it writes and prints, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import threed
from threed import devices
from threed.base.errors import InputError, RunError
from threed.calibration import calibrate as verb
from threed.cli.main import app
from threed.prediction.hardware import load


def test_two_ranks(tmp_path):
    """Two processes measure together; the file predicts a step."""
    file = tmp_path / "my.yaml"
    command = [sys.executable, "-m", "threed", "calibrate", "-o", str(file), "--quick", "--ranks", "2",
               "--device", "cpu", "--folder", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    for kind in ("products", "products in 16 bits", "attention", "units", "collectives", "all-to-alls",
                 "messages"):
        assert re.search(rf"^{kind} +[\d.]+% on average, +[\d.]+% at most, of \d+$", done.stdout, re.M), kind
    assert f"wrote {file}" in done.stdout
    assert re.search(r"^\.\.\. +\d+ s  products$", done.stderr, re.M)
    hardware = load(str(file))
    assert hardware.waits and hardware.devices == len(os.sched_getaffinity(0))
    assert 0.001 < hardware.tflops_fp32 < 10 and 0 <= hardware.contention <= 1
    assert threed.predict(threed.load("configs/toy.yaml", ["run.device=cpu"]), str(file))["step_time"] > 0
    assert os.listdir(tmp_path) == ["my.yaml"], "nothing else is left"


@pytest.mark.core
@pytest.mark.parametrize("arguments, message", [
    (["-o", "my.yaml", "--ranks", "0"], "--ranks 0: give at least 1"),
    (["-o", "my.yaml", "--device", "tpu"], "--device tpu: give auto, cpu or cuda"),
    (["-o", "nowhere/my.yaml"], "-o nowhere/my.yaml: no file can be written there"),
    (["-o", "."], "-o .: no file can be written there"),
    (["-o", "my.yaml", "--folder", "nowhere"], "--folder nowhere: not a folder")])
def test_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(message)):
        CliRunner().invoke(app, ["calibrate", *arguments], catch_exceptions=False)
    assert not os.listdir(tmp_path)


@pytest.mark.core
def test_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "for_forks", lambda device: ("cpu", 0))
    with pytest.raises(InputError, match="torch sees no GPU here"):
        verb.calibrate(tmp_path / "my.yaml", device="cuda")
    monkeypatch.setattr(devices, "for_forks", lambda device: ("cuda", 2))
    with pytest.raises(InputError, match="--ranks 4: there are 2 GPUs"):
        verb.calibrate(tmp_path / "my.yaml", ranks=4, device="cuda")


def test_no_room(mount):
    """The disk is measured with a file of some size; that there is no room for it is known before."""
    folder = mount("size=8m")
    with pytest.raises(InputError, match=r"8.0 MiB are free, and 128.0 MiB are written.*--quick"):
        verb.calibrate(folder / "my.yaml", ranks=2, quick=True, folder=folder, device="cpu")


@pytest.mark.parametrize("body, message", [
    (lambda rank, task, pipe: os._exit(3) if rank else 0, "rank [01] has ended before it had measured all"),
    (lambda rank, task, pipe: pipe.send(("failed", "no space left")), "no space left; nothing was written")])
def test_a_rank_that_fails(body, message, tmp_path, monkeypatch):
    monkeypatch.setattr(verb, "measure", body)
    with pytest.raises(RunError, match=message):
        verb.calibrate(tmp_path / "my.yaml", ranks=2, folder=tmp_path, device="cpu", say=lambda line: None)
    assert not os.listdir(tmp_path)


def test_no_write(tmp_path, monkeypatch):
    """Where the file cannot be written in the end, the message says so."""
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verb, "write_whole", full)
    monkeypatch.setattr(verb, "_measured", lambda *arguments: [])
    monkeypatch.setattr(verb, "fitted", lambda *arguments: (load("cpu-core"), []))
    with pytest.raises(InputError, match="No space left on device"):
        verb.calibrate(tmp_path / "my.yaml", ranks=1, folder=tmp_path, device="cpu", say=lambda line: None)
