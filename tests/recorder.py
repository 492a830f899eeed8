"""CUDA graphs without a GPU: a recorder that notes each operation of a graph, and repeats it.

It refuses what a graph cannot hold: a host that reads a number, a shape that depends on data, and memory that
nobody keeps from step to step. It is as rough with memory as a GPU is: what has been freed when a graph was
recorded has no numbers any more when it is replayed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from threed.devices.cpu import Cpu
from threed.engine.engine import Engine
from threed.engine.graphs import _unowned

REFUSED = {torch.Tag.data_dependent_output: "the host reads a number of the device",
           torch.Tag.dynamic_output_shape: "the shape of the result depends on data"}


class Refused(RuntimeError):
    """What a graph cannot hold."""


class Pool(dict[int, Any]):
    """A set's memory: address -> storage. It holds all that has been made in it, and knows what is used."""

    def __init__(self) -> None:
        self.used: dict[int, Any] = {}
        self.peak = 0  # the most bytes that were used

    def add(self, tensor: torch.Tensor) -> None:
        self[_address(tensor)] = self.used[_address(tensor)] = tensor.untyped_storage()

    def free(self) -> list[torch.Tensor]:
        """The memory of what nobody has used since the last call."""
        gone = [address for address, storage in self.used.items()
                if torch._C._storage_Use_Count(storage._cdata) == 1]  # the pool's own
        return [_unowned(torch.empty(0, dtype=torch.uint8).set_(self.used.pop(address))) for address in gone]

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.used.values()
                   if torch._C._storage_Use_Count(storage._cdata) > 1)


class Repeater(TorchDispatchMode):
    """Records the graphs of a rank. It is active while the engine runs a program."""

    def __init__(self) -> None:
        super().__init__()
        self.piece: Noted | None = None
        self.made = 0  # graphs
        self.constants: list[torch.Tensor] = []
        self.pools: list[Pool] = []
        self.measures = False
        # storages that have been made in this program, outside of all graphs
        self._passing: dict[int, StorageWeakRef] = {}

    def begin_program(self) -> None:
        self._passing.clear()

    def ready(self) -> None:
        assert not self.made

    def pool(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    def piece_of(self, pool: Pool) -> Noted:
        self.made += 1
        return Noted(self, pool)

    def fixed(self, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(like)
        self._passing.pop(_address(made), None)
        return made

    def fill(self, empty: torch.Tensor, value: torch.Tensor) -> None:
        assert self.piece is not None
        self.piece.given.add(_address(empty))
        with _disable_current_modes():
            _unowned(empty).copy_(value)

    def passing(self, address: int) -> bool:
        return address in self._passing and not self._passing[address].expired()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.piece is not None:
            return self.piece.note(func, args, kwargs or {})
        before = set(map(_address, _tensors((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.set_.source_Storage_storage_offset:
            self._passing |= {_address(each): StorageWeakRef(each.untyped_storage())
                              for each in _tensors(result) if _address(each) not in before}
        return result


class Noted:
    """A graph: the operations that have been called, with where their tensors are."""

    empty = False

    def __init__(self, recorder: Repeater, pool: Pool):
        self.recorder, self.pool = recorder, pool
        self.given: set[int] = set()  # what it gets before it is replayed
        self._entries: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._dead: list[torch.Tensor] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._own: set[int] = set()

    def begin(self) -> None:
        with _disable_current_modes():
            self._dead = self.pool.free()
        assert self.recorder.piece is None
        self.recorder.piece = self

    def end(self) -> None:
        """A GPU does not compute what it records: whatever has changed is as before."""
        self.recorder.piece = None
        with _disable_current_modes():
            for memory, content in self._before.values():
                memory.copy_(content)
        self._before.clear()

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = _tensors((args, kwargs))
        for tag in func.tags:
            # (an index is a shape of the result only where it is a mask)
            if tag in REFUSED and (func is not torch.ops.aten.index.Tensor
                                   or any(each.dtype == torch.bool for each in _tensors(args[1]))):
                raise Refused(f"{func}: {REFUSED[tag]}")
        known = set(map(_address, inputs))
        for each in inputs:
            if _address(each) not in self.pool and self.recorder.passing(_address(each)):
                raise Refused(f"{func} reads {list(each.shape)} outside of the memory of its graphs")
        for value in _written(func, args, kwargs):
            address = _address(value)
            if address not in self._own and address not in self._before:
                whole = _unowned(torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()))
                self._before[address] = whole, whole.clone()
        if func is torch.ops.aten.lift_fresh.default:  # a constant, which a kernel gets as a number
            self.recorder.constants.append(args[0])
        places = tree_map(_place, (args, kwargs))
        result = func(*args, **kwargs)
        fresh = [each for each in _tensors(result) if _address(each) not in known]
        for each in fresh:
            self.pool.add(each)
            self._own.add(_address(each))
        self._entries.append((func, *places, list(map(_unowned, fresh))))
        if self.recorder.measures and fresh:
            self.pool.peak = max(self.pool.peak, self.pool.bytes())
        return result

    @torch.no_grad()
    def replay(self) -> None:
        with _disable_current_modes():
            for memory in self._dead:
                memory.fill_(255)
            for func, args, kwargs, outputs in self._entries:
                if "empty" in func.name():
                    for output in outputs:
                        if output.is_floating_point() and output.data_ptr() not in self.given:
                            output.fill_(torch.nan)
                    continue
                known = set(map(_address, _tensors((args, kwargs))))
                result = func(*args, **kwargs)
                fresh = [each for each in _tensors(result) if _address(each) not in known]
                for output, value in zip(outputs, fresh, strict=True):
                    output.copy_(value)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation changes."""
    values = [(argument.alias_info, args[index] if index < len(args) else kwargs.get(argument.name))
              for index, argument in enumerate(func._schema.arguments)]
    return [value for alias, value in values
            if alias is not None and alias.is_write and isinstance(value, torch.Tensor)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(value: Any) -> Any:
    return _unowned(value) if isinstance(value, torch.Tensor) else value


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Repeater]:
    """Let run.cuda_graphs work on a CPU. Returns the recorders of the ranks that are made after."""
    made: list[Repeater] = []

    def recorder() -> Repeater:
        made.append(Repeater())
        return made[-1]

    monkeypatch.setattr(Cpu, "recorder", lambda device: recorder())
    run = Engine._run

    def running(self: Engine, *arguments: Any) -> Any:
        if self.graphs is None:
            return run(self, *arguments)
        recorder = self.graphs.recorder
        assert isinstance(recorder, Repeater)
        recorder.begin_program()
        with recorder:
            return run(self, *arguments)

    monkeypatch.setattr(Engine, "_run", running)
    return made
