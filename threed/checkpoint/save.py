"""Save: every rank writes what it owns; the checkpoint becomes visible only when it is whole.

    run.dir/checkpoints/
        step-00000100/              made aside as step-00000100.tmp, then renamed
            manifest.json           step, counters, mesh, config, plan digest, files with sizes and checksums
            rank-00000.safetensors  tensors 'param:NAME@ROW,COLUMN', 'exp_avg:...', 'exp_avg_sq:...', all fp32
        latest                      name of the newest; written last

`param` is the fp32 master weight; 'waiting:...' are gradients that the next step applies (offload.delayed_update). Where several
ranks hold the same values, one writes them. The folder must be on a file system that all ranks share.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file

from threed.checkpoint.boxes import boxes
from threed.comm import Comm
from threed.schema import Config
from threed.zero.run import ZeroRun
from threed.zero.state import UnitState

FORMAT = 1
POLL_S = 0.2  # between two exchanges of ranks that write


def kept(state: UnitState, waiting: bool) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a parameter unit, by kind: flat tensors over `owned`."""
    found = {"param": state.weights, "exp_avg": state.moments.exp_avg, "exp_avg_sq": state.moments.exp_avg_sq}
    if waiting and state.host_prev is not None:
        found["waiting"] = state.host_prev
    return found


def folder(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


def save(zero: ZeroRun, digest: str, counters: dict[str, Any]) -> tuple[Path, str | None]:
    """Save after a step, on all ranks. Returns the checkpoint's folder, and what went wrong if it could not be written:
    then nothing has changed and the older checkpoints stand."""
    comm, checksums = zero.comm, []
    final = folder(zero.config) / f"step-{zero.step_number:08d}"
    aside = final.with_suffix(".tmp")

    def prepare() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def write() -> None:
        checksums.append(_write(aside / f"rank-{comm.rank:05d}.safetensors", zero))

    def publish() -> None:
        _publish(zero, {"plan": digest, **counters, "crc32": everybody}, aside, final)

    problem = _together(comm, prepare if comm.rank == 0 else None, aside)
    problem = problem or _together(comm, write, aside)
    if problem is None:
        everybody = comm.exchange(checksums[0])
        problem = _together(comm, publish if comm.rank == 0 else None, aside)
    if comm.rank == 0:
        if problem is not None:
            shutil.rmtree(aside, ignore_errors=True)
        else:
            _prune(zero.config, final)
    return final, problem


def _together(comm: Comm, work: Callable[[], None] | None, aside: Path) -> str | None:
    """Do this rank's work while the others do theirs; the first problem of any rank, or None once all are done.

    The work runs on a thread and the ranks keep talking: a disk may be slow, and a rank that stops answering is noticed.
    """
    problems: list[str] = []

    def body() -> None:
        try:
            if work is not None:
                work()
        except (OSError, SafetensorError) as error:
            problems.append(f"rank {comm.rank} cannot write to {aside}: {error}")

    thread = threading.Thread(target=body)
    thread.start()
    while True:
        thread.join(POLL_S)
        states = comm.exchange("busy" if thread.is_alive() else problems[0] if problems else None)
        if "busy" not in states:
            return next((state for state in states if state), None)


def _write(path: Path, zero: ZeroRun) -> int:
    """Write this rank's tensors; the file's CRC-32."""
    tensors, comm = {}, zero.comm
    for unit, state in zero.states.items():
        if zero.table.parameters[unit].positions[0] != comm.here.pp:
            continue  # a tied embedding: the first position writes it
        if comm.here.dp >= zero.table.shard_size:
            continue  # the first of several shard groups writes
        for box in boxes(state.layout, comm.here.tp, *state.shard):
            if box.replicated and comm.here.tp != 0:
                continue
            where = slice(box.start - state.owned[0], box.stop - state.owned[0])
            place = ",".join(map(str, box.offset))
            for kind, whole in kept(state, zero.waiting is not None).items():
                tensors[f"{kind}:{box.name}@{place}"] = whole[where].detach().float().cpu().view(box.shape).numpy()
    save_file(tensors, path)
    _sync(path)
    return checksum(path)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _publish(zero: ZeroRun, counters: dict[str, Any], aside: Path, final: Path) -> None:
    mesh = zero.comm.mesh
    manifest = {
        "format": FORMAT, "step": zero.step_number, "updates": zero.updates, "loss_scaler": zero.scaler.state(),
        "waiting": asdict(zero.waiting) if zero.waiting else None, **counters,
        "mesh": {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp, "order": list(mesh.order)},
        "torch": torch.__version__, "config": zero.config.to_dict(),
        "files": {path.name: path.stat().st_size for path in sorted(aside.glob("rank-*.safetensors"))},
    }
    replace_text(aside / "manifest.json", json.dumps(manifest, indent=1))
    older = final.with_suffix(".old.tmp")
    if final.exists():  # a step that is run again after a resume from an older checkpoint
        os.replace(final, older)
    os.replace(aside, final)
    shutil.rmtree(older, ignore_errors=True)
    _sync(final.parent)
    replace_text(final.parent / "latest", final.name + "\n")


def _prune(config: Config, newest: Path) -> None:
    if config.checkpoint.keep:
        old = sorted(path for path in newest.parent.glob("step-*") if path.suffix != ".tmp" and path <= newest)
        for path in old[:-config.checkpoint.keep]:
            shutil.rmtree(path, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text)
    _sync(aside)
    os.replace(aside, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
