"""Forms: what instructions have in common that differ by their micro-batch alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from threed.program.access import Effects
from threed.program.effects import effects
from threed.program.instruction import MICROBATCH_AT, Instruction, form_key
from threed.program.table import Table


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """What instructions have in common that differ by their micro-batch alone: a plan has millions of
    instructions of a few hundred forms. The slots of a micro-batch are used by its own instructions alone."""

    item: Instruction  # one of them: of micro-batch 0, or of none
    effect: Effects  # of that one
    own: Effects | None  # the part that is about slots of the micro-batch
    shared: Effects | None  # the part that is about slots of no micro-batch


class Forms:
    """The forms of instructions of one table, each made once: passes and links of the table share them.
    KeyError as for `effects`."""

    def __init__(self, table: Table):
        self._table = table
        self._known = _forms_of(table)

    def of(self, program: Sequence[Instruction], position: int) -> list[Form]:
        """The form of each instruction of a program."""
        known = self._at(position)
        forms: list[Any] = list(map(known.__getitem__, map(form_key, program)))  # written for speed
        for index in [index for index, (item, form) in enumerate(zip(program, forms, strict=True))
                      if form is None or item.microbatch < 0]:
            forms[index] = self.form(program[index], position)
        return forms

    def form(self, instruction: Instruction, position: int) -> Form:
        """The form of one instruction of a position's program."""
        # Instructions without a micro-batch are rare. The fields of the others, without the micro-batch, are
        # fewer: the keys differ.
        known = self._at(position)
        key = form_key(instruction) if instruction.microbatch >= 0 else instruction
        form = known.get(key)
        if form is None:
            form = known[key] = _form(instruction, self._table, position)
        return form

    def effects(self, instruction: Instruction, position: int) -> Effects:
        """As the function of that name."""
        return self.form(instruction, position).effect.of(instruction.microbatch)

    def _at(self, position: int) -> _Known:
        if position not in self._known:
            self._known.setdefault(position, _Known(self._table, position))
        return self._known[position]


class _Known(dict[tuple[Any, ...], Any]):
    """Forms of instructions of micro-batches, by their other fields; None where there is no such form."""

    def __init__(self, table: Table, position: int):
        super().__init__()
        self.table, self.position = weakref.ref(table), position

    def __missing__(self, fields: tuple[Any, ...]) -> Form | None:
        table = self.table()
        assert table is not None, "who asks holds the table"
        try:
            item = Instruction._make([*fields[:MICROBATCH_AT], 0, *fields[MICROBATCH_AT:]])
            form = _form(item, table, self.position)
        except KeyError:
            form = None
        return self.setdefault(fields, form)


# The forms of each table that is alive, by its id and by position. Ranks that are threads share a table.
_ALIVE: dict[int, dict[int, _Known]] = {}
_CHANGING = threading.Lock()


def _forms_of(table: Table) -> dict[int, _Known]:
    with _CHANGING:
        if id(table) not in _ALIVE:
            _ALIVE[id(table)] = {}
            weakref.finalize(table, _ALIVE.pop, id(table)).atexit = False
        return _ALIVE[id(table)]


def _form(instruction: Instruction, table: Table, position: int) -> Form:
    effect = effects(instruction, table, position)
    if instruction.microbatch > 0:
        instruction = instruction._replace(microbatch=0)
        effect = effects(instruction, table, position)
    return Form(instruction, effect, *effect.parts(lambda slot: slot.microbatch >= 0))
