"""DeepSpeed's numbers of Muon, and what each is here."""

from __future__ import annotations

from typing import Any

from threed.config.keys.table import Dropped, Given, Key, Refused


def _is_muon(given: Given) -> bool:
    return str(given.get("optimizer.type")).lower() == "muon"


def _momentum(value: Any, given: Given) -> Any:
    if not _is_muon(given):
        raise Refused("threed's sgd has no momentum")
    return value


def _rate(value: Any, given: Given) -> Any:
    if not _is_muon(given):
        raise Dropped("the optimizer is not Muon")
    return value


KEYS = (
    Key("optimizer.params.momentum", "optimizer.momentum (of muon)", _momentum),
    Key("optimizer.params.muon_lr", "optimizer.lr", _rate),
    Key("optimizer.params.adam_lr", "optimizer.adamw_lr", _rate),
)
