"""A wheel and an sdist, built as by `make dist`, hold what they should; the wheel trains elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both, built without a network from a copy of what git knows."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a checkout of git: an sdist cannot say what belongs to it")
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
            target.chmod((ROOT / name).stat().st_mode)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", out, source], check=True,
                   capture_output=True)
    return out


def test_the_wheel(built, tmp_path):
    wheel, = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        assert archive.getinfo("threed/launch/torchrun.sh").external_attr >> 16 & 0o100
    assert wheel.name.startswith("threed_train-") and "-py3-none-" in wheel.name
    assert {"threed/py.typed", "threed/configs/toy.yaml", "threed/configs/hardware/h100-sxm.yaml",
            "threed/spec/parameter.py", "threed/launch/slurm.sbatch", "threed/launch/kubernetes.yaml",
            "threed/examples/vit.py", "threed/examples/vit.yaml"} <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "models/", "build/"))]
    assert "Author: the threed contributors" in metadata and "Home-page" not in metadata
    # Installed without what it needs, which this Python has, and used from another folder.
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target",
                    tmp_path / "site", wheel], check=True, capture_output=True)
    (tmp_path / "text.txt").write_text("a wheel trains in another folder. " * 400)
    done = subprocess.run(
        [sys.executable, "-m", "threed", "train", "configs/toy.yaml", "train.steps=1", "model.layers=2",
         "model.hidden=32", "model.heads=2", "model.vocab=300", "model.seq_len=16", "parallel.dp=1",
         "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=4", "data.source=text.txt",
         f"data.cache={tmp_path / 'cache'}"],
        cwd=tmp_path, text=True, capture_output=True, input="", timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "toy" / "checkpoints").is_dir()


def test_the_sdist_has_its_tests(built):
    sdist, = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("tests", "docs", "bench", "launch", "examples", "configs", "models")
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, text=True, capture_output=True,
                             check=True).stdout.split()
    assert not {name for name in tracked if (ROOT / name).exists()} - names
    assert {"Makefile", "constraints.txt", "uv.lock", "Containerfile", ".ci/run",
            "threed/optim/native.c"} <= names
