"""The digest of a plan: two ranks with equal digests will do the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter, mod
from typing import Any

from threed.program.instruction import Instruction
from threed.program.settings import WHOLE_MESSAGES

# Fields of a table that are left out while they have this value: digests of plans without them stay.
_LATER = {"logits": None, "trains": True, "messages": asdict(WHOLE_MESSAGES)}


class _Formats(dict[tuple[Any, ...], str]):
    """The other fields -> the JSON of an instruction, with %d for its micro-batch."""

    def __missing__(self, rest: tuple[Any, ...]) -> str:
        fields = [json.dumps(field).replace("%", "%%") for field in rest]
        fields.insert(_AT, "%d")
        self[rest] = text = f"[{', '.join(fields)}]"
        return text


_AT = Instruction._fields.index("microbatch")
_MICROBATCH = itemgetter(_AT)
_REST = itemgetter(*(at for at in range(len(Instruction._fields)) if at != _AT))


def digest_of(table: Any, programs: Mapping[str, Sequence[Sequence[Instruction]]]) -> str:
    """Of a program.table.Table and the programs of all positions, by name."""
    # Of json.dumps([asdict(table), programs], sort_keys=True), but instructions that differ by their
    # micro-batch alone are formatted once.
    values = asdict(table)
    for name, usual in _LATER.items():
        if values[name] == usual:
            del values[name]
    for unit in values["parameters"].values():
        if unit["trains"]:
            del unit["trains"]
    for unit in values["units"]:  # what was there first was a running softmax: its bytes
        output = unit.pop("output")
        unit["running_bytes"] = (output and (list(output) if output[2] else output[0])) or 0
    digest = hashlib.sha256(f"[{json.dumps(values, sort_keys=True)}, {{".encode())
    formats = _Formats()
    for number, (name, positions) in enumerate(sorted(programs.items())):
        digest.update(f"{', ' if number else ''}{json.dumps(name)}: [".encode())
        for position, program in enumerate(positions):
            lines = map(mod, map(formats.__getitem__, map(_REST, program)), map(_MICROBATCH, program))
            text = ", ".join(lines)
            digest.update(f"{', ' if position else ''}[{text}]".encode())
        digest.update(b"]")
    digest.update(b"}]")
    return digest.hexdigest()[:16]
