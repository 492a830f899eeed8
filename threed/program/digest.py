"""The digest of a plan: two ranks with equal digests will do the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter, mod
from typing import Any, NamedTuple

from threed.program.instruction import Instruction
from threed.program.settings import WHOLE_MESSAGES

# The format of what is hashed. Traces and costs hold digests of older versions: a plan that could be made
# before a field was there keeps its digest. So a new field needs a line in SINCE and no new format. Only a
# change to what older plans hash to needs a new FORMAT, and with it all plans get new digests.
FORMAT = 1


class Since(NamedTuple):
    """A field that came after format 1 did: it is left out while it has this value."""

    of: str  # table, or parameter: of each parameter unit
    field: str
    default: Any


SINCE = (Since("table", "logits", None), Since("table", "trains", True),
         Since("table", "messages", asdict(WHOLE_MESSAGES)), Since("parameter", "trains", True))


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
    places = {"table": [values], "parameter": [*values["parameters"].values()]}
    for since in SINCE:
        for place in places[since.of]:
            if place[since.field] == since.default:
                del place[since.field]
    for unit in values["units"]:  # what was there first was a running softmax: its bytes
        output = unit.pop("output")
        unit["running_bytes"] = (output and (list(output) if output[2] else output[0])) or 0
    begin = "" if FORMAT == 1 else f"{FORMAT} "  # format 1 did not say so
    digest = hashlib.sha256(f"{begin}[{json.dumps(values, sort_keys=True)}, {{".encode())
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
