"""The digest of a plan: two ranks with equal digests will do the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import itemgetter, mod
from typing import Any, NamedTuple

from threed.program.entries import ComputeUnit, MadeTensor, ParameterUnit
from threed.program.instruction import MICROBATCH_AT, Instruction, form_key
from threed.program.settings import WHOLE_MESSAGES, UpdateSettings
from threed.spec.kernels import AttentionKernel, Kernel, Moved

# The format of what is hashed. Traces and costs hold digests of older versions: a plan that could be made
# before a field was there keeps its digest. So a new field needs a line in SINCE and no new format. Only a
# change to what older plans hash to needs a new FORMAT, and with it all plans get new digests.
FORMAT = 1


class Since(NamedTuple):
    """A field that came after format 1 did: it is left out while it has this value."""

    of: str  # the name of its class
    field: str
    default: Any


SINCE = (Since("Table", "logits", None), Since("Table", "trains", True),
         Since("Table", "messages", WHOLE_MESSAGES), Since("Table", "pair", None),
         Since("ZeroSettings", "streams", False), Since("UpdateSettings", "overlap", False),
         Since("ParameterUnit", "trains", True), Since("ParameterUnit", "fold", ""),
         Since("ParameterUnit", "optimizer", ""), Since("ParameterUnit", "dtype", ""),
         Since("ParameterUnit", "turning", None),
         Since("ComputeUnit", "exchanged", {}))


class _Formats(dict[tuple[Any, ...], str]):
    """A cache. Key: an instruction's fields but its micro-batch; value: its JSON, with %d for the
    micro-batch."""

    def __missing__(self, rest: tuple[Any, ...]) -> str:
        told = rest if rest[-1] else rest[:-1]  # (`part`, which came after format 1)
        fields = [json.dumps(field).replace("%", "%%") for field in told]
        fields.insert(MICROBATCH_AT, "%d")
        self[rest] = text = f"[{', '.join(fields)}]"
        return text


_MICROBATCH = itemgetter(MICROBATCH_AT)


def _values(entry: Any) -> dict[str, Any]:
    """The fields of a dataclass, as they are hashed."""
    values = {field.name: getattr(entry, field.name) for field in fields(entry)}
    if isinstance(entry, ParameterUnit):
        del values["kind"]  # its name says it
    if isinstance(entry, ComputeUnit):
        del values["rings"]  # a matter of prices: `traffic` says what is sent
    if isinstance(entry, UpdateSettings):
        values["delayed"] = False  # updates that came a step late, which are gone
    for since in SINCE:
        if since.of == type(entry).__name__ and values[since.field] == since.default:
            del values[since.field]
    if isinstance(entry, ComputeUnit):  # what was there first was a running softmax: its bytes
        output = values.pop("output")
        values["running_bytes"] = (output and (list(output) if output[2] else output[0])) or 0
        values["makes"], values["reads"] = [*map(_made, entry.makes)], [*map(_first, entry.reads)]
        values["kernels"], values["again"] = ([*map(_kernel, each)] for each in (entry.kernels, entry.again))
    return values


def _made(tensor: MadeTensor) -> list[Any]:
    """How a tensor travels was one field, the last."""
    way = tensor.becomes, tensor.over, tensor.by, tensor.ranks, tensor.arriving_bytes, tensor.counts
    again = [True] if tensor.again else []
    return [tensor.name, tensor.bytes, tensor.grad, way, *again] if tensor.over else _first(tensor)


def _kernel(kernel: Kernel) -> Kernel | tuple[Any, ...]:
    """Without how fast its bytes move, which is a matter of prices. How many keys attention has was not said
    where they are as many as its queries."""
    if isinstance(kernel, Moved):
        return kernel[:Moved._fields.index("columns")]
    return kernel[:-1] if isinstance(kernel, AttentionKernel) and kernel.keys is None else kernel


def _first(entry: Any) -> list[Any]:
    """The fields of a named tuple up to the last that has not its default: fields that came later are at the
    end."""
    values = list(entry)
    while values[-1] == entry._field_defaults.get(entry._fields[len(values) - 1], _NONE):
        values.pop()
    return values


_NONE = object()


def digest_of(table: Any, programs: Mapping[str, Sequence[Sequence[Instruction]]]) -> str:
    """Of a program.table.Table and the programs of all positions, by name."""
    # Of json.dumps([table, programs], default=_values, sort_keys=True), but instructions that differ by their
    # micro-batch alone are formatted once.
    begin = "" if FORMAT == 1 else f"{FORMAT} "  # format 1 did not say so
    digest = hashlib.sha256(f"{begin}[{json.dumps(table, default=_values, sort_keys=True)}, {{".encode())
    formats = _Formats()
    for number, (name, positions) in enumerate(sorted(programs.items())):
        digest.update(f"{', ' if number else ''}{json.dumps(name)}: [".encode())
        for position, program in enumerate(positions):
            texts = map(formats.__getitem__, map(form_key, program))
            text = ", ".join(map(mod, texts, map(_MICROBATCH, program)))
            digest.update(f"{', ' if position else ''}[{text}]".encode())
        digest.update(b"]")
    digest.update(b"}]")
    return digest.hexdigest()[:16]
