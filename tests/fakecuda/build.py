"""The extension, compiled once for each version of its sources and of torch, and kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
TORCH = "2.13"  # the version whose insides it knows


def missing() -> str:
    """Why there are no fake GPUs here; "" where there are."""
    if not version("torch").startswith(TORCH):
        return f"fake GPUs know the insides of torch {TORCH}, and torch {version('torch')} is installed"
    if "+cu" in version("torch") or _cuda_build():
        return "fake GPUs take the place of CUDA, and this torch has its own"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "fake GPUs are compiled, and Python.h is not here (python3-dev)"
    if shutil.which("g++") is None:
        return "fake GPUs are compiled, and g++ is not here"
    return ""


def extension() -> Path:
    """The compiled extension. RuntimeError with the compiler's words where it does not compile."""
    digest = hashlib.sha256(f"{version('torch')} {sys.version} {_command(Path('x'))}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "threed", "fakecuda")
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / digest.hexdigest()[:16] / f"_fakecuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    with open(cache / "lock", "w") as lock:  # several processes of a session may come at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            scratch = path.with_suffix(".new")
            done = subprocess.run(_command(scratch), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{SOURCES} does not compile:\n{done.stderr[-3000:]}")
            scratch.rename(path)
    return path


def torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _cuda_build() -> bool:
    return (torch_folder() / "lib" / "libtorch_cuda.so").exists()


def _command(output: Path) -> list[str]:
    torch = torch_folder()
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return ["g++", "-O1", "-g0", "-std=c++20", "-shared", "-fPIC", "-Wall", "-Wno-sign-compare",
            *(f"-isystem{folder}" for folder in include), str(SOURCES / "fakecuda.cpp"), "-o", str(output),
            f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
            f"-Wl,-rpath,{torch / 'lib'}"]
