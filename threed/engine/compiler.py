"""Whether this machine can compile pieces of a model (model.fused), and what it lacks where it cannot."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from threed.devices import device_of
from threed.schema import Config
from threed.tensor.fused import Fused, in_short
from threed.tensor.pieces import DropOf, Normed, Statistics

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@cache
def lacks(device: torch.device) -> str:
    """What keeps pieces from being compiled for a device here, in words for "... is missing" or the
    compiler's own error; "" where a small piece was compiled and ran."""
    triton = device_of(device).triton
    if triton and find_spec("triton") is None:
        return "the package triton is missing"
    _one_thread()
    try:
        pieces = Fused(compile=True)
        pieces.swiglu(torch.zeros(2, 16, device=device))
        if (kernels := pieces.kernels(device)) is not None:  # triton itself starts them, torch the others
            kernels.statistics(torch.zeros(1, 1, 16, device=device),
                               torch.zeros(1, 1, dtype=torch.int64, device=device), 16, None)
        _try_sums(pieces, device)
        return ""
    except Exception as error:  # of a compiler, which may raise anything
        return _missing(triton) or f"a small piece was not compiled: {in_short(error)}"


def _try_sums(fused: Fused, device: torch.device) -> None:
    """Run each kernel of the pieces with sums over tokens once."""
    sums, x = fused.sums(device), torch.zeros(2, 1, 16, device=device)
    drop = DropOf(0.5, (0, ""), torch.zeros(1, dtype=torch.int64, device=device), ((range(2),),))
    norm = Normed(x[0, 0], x[0, 0], 1e-5)
    sums.gelu_backward(sums.gelu(x), x, True)
    sums.joined([x.view(2, 1, 1, 1, 16)] * 3, True)
    stream, _, *kept = sums.ended(x, x, x[0, 0], drop, norm)
    sums.ended_backward(x, x, Statistics(stream, *kept), norm, drop, (True, True))
    sums.add_rows(torch.zeros(2, 16, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device), x)


def uncompiled(config: Config, device: torch.device) -> list[str]:
    """What the log of a run says where model.fused=auto does without a compiler; nothing where it compiles
    nothing anyway."""
    if config.model.fused != "auto" or config.model.own_layers or not device_of(device).triton:
        return []
    return [f"model.fused=auto compiles nothing here, so a step takes longer: {why}"
            ] if (why := lacks(device)) else []


def _missing(triton: bool) -> str:
    """What a compiler needs and cannot find; "" where it has all that is known. triton is Python, and
    compiles C that calls Python; so does torch's compiler for CPUs, in C++."""
    variable, usual = ("CC", ("gcc", "clang")) if triton else ("CXX", ("g++",))
    named = os.environ.get(variable)
    if not any(map(shutil.which, [named] if named else usual)):
        return f"{named} (which {variable} names) is missing" if named else f"{' or '.join(usual)} is missing"
    # Debian's own scheme says where packages go, not where Python's headers are; triton corrects it so, too.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    return "" if header.exists() else f"{header} is missing (package python3-dev or python3-devel)"


def _one_thread() -> None:
    """Compile in this process, unless the user says otherwise. By itself torch starts a pool of up to 32
    processes in each rank, for a dozen kernels."""
    threads = os.environ.setdefault(THREADS, "1")
    from torch._inductor import config as inductor  # a second, which no other run needs

    if threads == "1":  # it may have read the variable before
        inductor.compile_threads = 1
