"""Load: all ranks take the checkpoint that rank 0 chooses, read the boxes that they need, and check them.

    rank 0      choose the newest complete checkpoint of this run's lineage         choose.py
    all ranks   compare the manifest's checksum with rank 0's                       `_confirm`
    all ranks   read boxes                                                          read.py
    all ranks   compare checksums of whole tensors, as they are in memory now       `_prove`

Where one of these fails on any rank, all ranks take the checkpoint before it, if `train.resume` allows that:
a new lineage begins, and the damaged checkpoint is not tried again. Each of these may take long, and longer
on one rank than on another, so they run on threads (`_together`). A rank that reads nothing for
`run.timeout_s` ends the run, and is named. Nothing in a checkpoint is executed: a manifest is JSON, tensors
are safetensors. Any mesh can read what any mesh wrote.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from threed.base.axes import axes_of
from threed.base.errors import InputError, RunError
from threed.base.quantity import round_up, show_bytes
from threed.checkpoint.box_reader import BoxReader
from threed.checkpoint.choose import as_begun, begun, candidates, is_base, notes, read_manifest
from threed.checkpoint.format import POLL_S, Manifest, Unusable, patiently
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.manifest import unseal
from threed.checkpoint.proof import MASK, checksum
from threed.comm.group import Comm
from threed.comm.lanes import in_order
from threed.features.zero.boxes import Box, boxes
from threed.features.zero.run import ZeroRun
from threed.schema import Config, ModelConfig

T = TypeVar("T")
# What a manifest or an index that threed did not write makes its reader raise, even with a right checksum.
_MALFORMED = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError, MemoryError)
PATIENCE = 0.1  # share of run.timeout_s after which a rank that reads nothing is said
_DONE, _STOP, _SLOW, _STUCK = 1, 2, 4, 8  # what a rank says of itself in an exchange


class Resumed(NamedTuple):
    """Where a run goes on, the same on all ranks."""

    path: Path | None  # the checkpoint; None: from the start
    manifest: Manifest
    lineage: Lineage
    notes: list[str]  # for the run's output
    data: dict[str, Any]  # the identity of what the run is trained on (data/identity), known to rank 0


def resume(config: Config, zero: ZeroRun, say: Callable[[str], None] = lambda line: None,
           data: dict[str, Any] | None = None) -> Resumed:
    """Bring this rank to the state that `train.resume` asks for. All ranks call this together, and all resume
    from the same checkpoint.

    `say` gets a line before work that may take long. `data`: on rank 0, the identity of the run's data; None:
    they are not compared with the checkpoint's. InputError where the named checkpoint cannot be used, or
    none of several.
    """
    comm, said, data = zero.comm, [], data or {}
    chosen = candidates(config, say) if comm.rank == 0 else iter(())
    while (choice := _on_first(comm, lambda: next(chosen, None))) is not None:
        path, lineage, may_fall_back = choice
        manifest, problem = _read_manifest(path, config, zero, data, say)
        if problem is None:
            say(f"reading {path}: {show_bytes(manifest.bytes)}, all ranks together")
            manifest = as_begun(manifest, config)
            problem = _load(path, manifest, zero, say)
        if problem is None:
            if lineage is None or said:
                lineage = comm.broadcast(Lineage.new(config, manifest))
            return Resumed(path, manifest, lineage, said + notes(path, manifest, data, config), data)
        if not may_fall_back:
            raise InputError(f"checkpoint {path} {problem}; resume from another one with train.resume=PATH")
        said.append(f"checkpoint {path} {problem}: going on from the one before it")
    if said:
        reasons = "\n  ".join(said)
        raise InputError(f"none of the checkpoints can be used:\n  {reasons}\nrepair one, name one with "
                         "train.resume=PATH, or begin anew in another run.dir, or here with "
                         "train.resume=never")
    return Resumed(None, Manifest(), comm.broadcast(Lineage.new(config)), begun(config), data)


class Reading(NamedTuple):
    """Work that reads files, and is to go on."""

    what: str  # what is read
    timeout_s: float  # after it, a rank whose work does not go on ends the run
    last_s: Callable[[], float]  # when the work last went on, in time.monotonic()
    stop: threading.Event  # once it is set on one rank, it is set on all: none need go on
    say: Callable[[str], None]

    def state(self) -> int:
        idle_s = time.monotonic() - self.last_s()
        return _SLOW * (idle_s > PATIENCE * self.timeout_s) + _STUCK * (idle_s > self.timeout_s)


def _together(comm: Comm, work: Callable[[], T], reading: Reading | None = None) -> T:
    """Do some work on a thread; its result, once the work of all ranks is done. The ranks exchange often
    meanwhile, because a rank that waits long for an answer ends the run. RunError where a rank is stuck."""
    future, said, work = Future[T](), False, in_order(comm.device, work)

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True, name=f"load, rank {comm.rank}").start()
    while True:
        wait([future], POLL_S)
        if future.done():
            future.result()  # raises what the work raised
        mine = _DONE if future.done() else reading.state() if reading else 0
        everywhere = comm.numbers(float(mine + _STOP * (reading is not None and reading.stop.is_set()))).int()
        if reading is not None and (everywhere & _STOP).any():
            reading.stop.set()
        if (everywhere & _DONE).all():
            return future.result()
        if reading is not None and (everywhere & (_SLOW if not said else _STUCK)).any():
            _look(comm, reading, everywhere)
            said = True


def _look(comm: Comm, reading: Reading, everywhere: torch.Tensor) -> None:
    """Say which ranks read nothing; RunError once that has been so for long."""
    hosts = comm.all_gather(socket.gethostname())
    idle = [rank for rank, state in enumerate(everywhere.tolist()) if state & (_SLOW | _STUCK)]
    more = f" and {len(idle) - 1} more ranks" if len(idle) > 1 else ""
    who = f"rank {idle[0]} on {hosts[idle[0]]}{more}"
    if (everywhere & _STUCK).any():
        raise RunError(f"{who} read nothing of {reading.what} for run.timeout_s={reading.timeout_s:g}, and "
                       "all others wait: look at the file system there; a slow one needs a larger "
                       "run.timeout_s")
    if comm.rank == 0:
        reading.say(f"{who} read nothing of {reading.what} for {PATIENCE * reading.timeout_s:g} s, and all "
                    "others wait")


def _on_first(comm: Comm, work: Callable[[], Any]) -> Any:
    """Do some work on rank 0; its result, on all ranks."""
    return comm.broadcast(_together(comm, lambda: work() if comm.rank == 0 else None))


def _first(problems: list[str | None]) -> str | None:
    return next((each for each in problems if each is not None), None)


def _read_manifest(path: Path, config: Config, zero: ZeroRun, data: dict[str, Any],
                   say: Callable[[str], None]) -> tuple[Manifest, str | None]:
    """The manifest, read by rank 0 and then by all ranks; or why it cannot be used, the same on all ranks."""
    comm, begun_s = zero.comm, [time.monotonic()]
    reading = Reading(f"{path}/manifest.json", config.run.timeout_s, lambda: begun_s[-1], threading.Event(),
                      say)

    def choose() -> tuple[Manifest, str | None]:
        try:
            reads = comm.rank == 0
            return (read_manifest(path, config, zero.table.trains, data) if reads else Manifest()), None
        except Unusable as error:
            return Manifest(), error.what
        except InputError:  # no other checkpoint would do
            raise
        except _MALFORMED as error:
            reason = f"its manifest is not as threed writes it ({type(error).__name__}: {error})"
            return Manifest(), f"cannot be used: {reason}"

    manifest, problem = _together(comm, choose, reading)
    checksum_, problem = comm.broadcast((manifest.checksum, problem))
    if problem is not None:
        return Manifest(), problem
    begun_s.append(time.monotonic())
    manifest, blind = _together(comm, lambda: _confirm(path, checksum_) if comm.rank else (manifest, None),
                                reading)
    # An older checkpoint would not help: the ranks do not share their folder.
    if blind := _first(comm.all_gather(blind)):
        raise RunError(blind)
    return manifest, None


def _confirm(path: Path, checksum_: str) -> tuple[Manifest, str | None]:
    """The manifest as this rank sees it, if it is the one that rank 0 sees."""
    def same() -> Manifest:
        manifest = unseal(path)
        if manifest.checksum != checksum_:
            raise InputError("it sees another manifest.json")
        return manifest

    try:
        return patiently(same), None
    except InputError as error:
        return Manifest(), (f"{socket.gethostname()} does not see {path} as rank 0 does ({error}): run.dir "
                            "must be on a file system that all hosts share")


def _load(path: Path, manifest: Manifest, zero: ZeroRun, say: Callable[[str], None]) -> str | None:
    """Read the checkpoint and check the result. The first problem of any rank, the same on all ranks."""
    comm, reader = zero.comm, BoxReader(path, manifest)
    reading = Reading(str(path), zero.config.run.timeout_s, lambda: reader.last_s, reader.stop, say)
    problem = _first(comm.all_gather(_together(comm, lambda: _read(reader, manifest, zero), reading)))
    if problem is None:
        problem = _first(comm.all_gather(_prove(manifest, zero, reader.rounded)))
    zero.step_number, zero.updates = manifest.step, manifest.updates
    zero.scaler.restore(manifest.loss_scaler)
    return problem


def _read(reader: BoxReader, manifest: Manifest, zero: ZeroRun) -> str | None:
    """Read this rank's part of a checkpoint. Why the checkpoint cannot be used, if this rank is among the
    first to notice: then the others stop."""
    problem, place, padded = None, zero.comm.here.on, _padded_otherwise(manifest, zero)
    try:
        for state in zero.states.values():
            if state.part.unit.trains and is_base(manifest, zero.config):  # adapters, which it does not have
                state.fill(place, zero.config.train.seed)
                for buffer in state.optimizer_state.buffers.values():
                    buffer.zero_()
                continue
            for box in boxes(state.part.layout, place, *state.part.owned):
                part = slice(box.start - state.part.owned[0], box.stop - state.part.owned[0])
                for kind, whole in state.kept().items():
                    if kind != "param" and manifest.weights_only:
                        whole[part].zero_()
                    else:
                        _read_box(reader, kind, box, padded.get(box.name), whole[part].view(box.shape))
            state.optimizer_state.publish()
    except Unusable as error:
        problem = error.what
    except _MALFORMED as error:
        problem = f"cannot be used: its index is not as threed writes it ({type(error).__name__}: {error})"
    finally:
        reader.close()
    if problem is None or reader.stop.is_set():
        return None
    reader.stop.set()
    return problem


class Padded(NamedTuple):
    """A parameter with another padding of the vocabulary than in the checkpoint."""

    rows: int  # without padding
    difference: int  # of its checksum from the checkpoint's: padding is zero


def _padded_otherwise(manifest: Manifest, zero: ZeroRun) -> dict[str, Padded]:
    """Parameters whose vocabulary is padded to another multiple here than in the checkpoint."""
    model, found = {**asdict(ModelConfig()), **manifest.config["model"]}, {}
    before = round_up(model["vocab"], model["vocab_multiple"])
    everything = (placed.parameter for state in zero.states.values() for placed in state.part.layout.placed)
    for parameter in everything:
        now, *rest = parameter.stored
        if parameter.unpadded is not None and now != before:
            low, high = sorted((before, now))
            box = Box(parameter.name, (low, *(0 for _ in rest)), (high - low, *rest), parameter.stored, 0, ())
            change = checksum(torch.zeros((high - low) * math.prod(rest)), box)
            found[parameter.name] = Padded(parameter.unpadded, change if now > before else -change)
    return found


def _read_box(reader: BoxReader, kind: str, box: Box, padded: Padded | None, into: torch.Tensor) -> None:
    if padded is None:
        return reader.read(kind, box, into)
    rows = min(max(padded.rows - box.offset[0], 0), box.shape[0])
    into[rows:] = 0.0
    if rows:
        reader.read(kind, replace(box, shape=(rows, *box.shape[1:])), into[:rows])


def _prove(manifest: Manifest, zero: ZeroRun, rounded: dict[tuple[str, str], int]) -> str | None:
    """Compare checksums of whole tensors with the manifest's, and return the first problem. They are of what
    is in memory now, summed over the ranks that share a tensor. Every copy is checked: those of other shard
    groups, of other tp ranks, of both ends of a tie. `rounded`: by how much checksums of 16-bit weights are
    smaller than those of the fp32 values that were read."""
    comm, table, padded = zero.comm, zero.table, _padded_otherwise(manifest, zero)
    buffers = dict.fromkeys(buffer.name for unit in table.parameters for buffer in table.shards.buffers(unit))
    kinds = "param", *buffers
    sums, problem = _together(comm, lambda: _sums(zero, rounded))
    kept = {(name, kind) for state in zero.states.values() for kind in state.kept()
            for name in (placed.parameter.name for placed in state.part.layout.placed)
            if name in manifest.parameters}
    # All parameters of the position, in an order that all ranks share: a rank may have no part of some.
    everything = [placed.parameter for state in zero.states.values() for placed in state.part.layout.placed]
    names = sorted({parameter.name for parameter in everything})
    axes = {parameter.name: parameter.axes for parameter in everything}
    total = torch.tensor([_signed(sums.get((name, kind), 0)) for name in names for kind in kinds],
                         dtype=torch.int64, device=comm.device)
    shared: dict[str, set[str]] = {}  # shard group -> parameters that are cut over it
    for state in (state for state in zero.states.values() if state.part.sharded):
        shared.setdefault(state.part.unit.shard_group, set()).update(
            placed.parameter.name for placed in state.part.layout.placed)
    for group, among in (*sorted(shared.items()),
                         *((axis, {name for name in names if axis in axes[name]})
                           for axis in (*axes_of("parameters"), *sorted(comm.mesh.folded)))):
        over = total.clone()
        comm.groups[group].all_reduce(over).wait()
        cut = torch.tensor([name in among for name in names for _ in kinds], device=comm.device)
        total = torch.where(cut, over, total)
    for name, values in zip(names, total.view(-1, len(kinds)).tolist(), strict=True):
        for kind, value in zip(kinds, values, strict=True):
            if (name, kind) not in kept or (kind != "param" and manifest.weights_only):
                continue
            value -= padded[name].difference if name in padded else 0
            if f"{value & MASK:016x}" != manifest.parameters[name].sums.get(kind):
                return (f"is damaged: {kind} {name}, as rank {comm.rank} on {socket.gethostname()} and those "
                        "who share it have it in memory, does not have the checksum of its manifest")
    return problem


def _sums(zero: ZeroRun,
          rounded: dict[tuple[str, str], int]) -> tuple[dict[tuple[str, str], int], str | None]:
    """(parameter, kind) -> the checksum of this rank's part; and a problem, where the weights that this rank
    computes with are not those that it read."""
    comm, sums, problem = zero.comm, dict(rounded), None
    for unit, state in zero.states.items():
        if not state.optimizer_state.is_published():
            problem = (f"was read, but the weights of {zero.table.parameters[unit].name} that rank "
                       f"{comm.rank} on {socket.gethostname()} computes with are not those that were read: "
                       "look at the memory of that machine")
        for box in boxes(state.part.layout, comm.here.on, *state.part.owned):
            part = slice(box.start - state.part.owned[0], box.stop - state.part.owned[0])
            for kind, whole in state.kept().items():
                key = box.name, kind
                sums[key] = (sums.get(key, 0) + checksum(whole[part], box)) & MASK
    return sums, problem


def _signed(value: int) -> int:
    """An unsigned 64-bit number as torch's signed int64."""
    return value - 2**64 if value >= 2**63 else value
