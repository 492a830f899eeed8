"""A cell, in threed and by the oracle, and how far they are apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests.oracle import drive
from tests.oracle.cells import Cell, draw
from tests.oracle.corpus import LEFT_OUT, Corpus, write_tokens
from tests.oracle.oracle import CLASSES, Oracle, Outcome, Recipe, make_model
from tests.oracle.routers import Mixture
from threed.base.errors import ThreedError

# Relative; of weights relative to the largest of a tensor, and of updates to the largest change of it. In 16
# bits the oracle rounds the weights as threed does, and nothing else: all other roundings are seen.
LIMITS = {"fp32": {"loss": 1e-5, "norm": 1e-4, "weights": 1e-4, "updates": 1e-2},
          "bf16": {"loss": 5e-3, "norm": 5e-2, "weights": 5e-2, "updates": 1.0},
          "fp16": {"loss": 2e-3, "norm": 5e-3, "weights": 1e-2, "updates": 0.5}}
# Lion steps by signs, which rounding decides for elements whose gradient is nearly 0: all that comes after
# its first step moves with these few.
AFTER_LION = {"loss": 1e-4, "norm": 1e-3}


class Refused(NamedTuple):
    number: int
    text: str


class Compared(NamedTuple):
    cell: Cell
    worst: dict[str, float]  # quantity -> largest difference, as LIMITS has it
    refused: list[Refused]
    near: int

    def problems(self) -> list[str]:
        limits = dict(LIMITS[self.cell.values["dtype"]])
        if self.cell.values["optimizer"] == "lion":
            limits |= {f"later {what}": max(limits[what], limit) for what, limit in AFTER_LION.items()}
        return [f"{what}: {self.worst[what]:.1e}, at most {limit:.0e}" for what, limit in limits.items()
                if not self.worst[what] <= limit]


def compare(seed: str, number: int, folder: Path,
            fault: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Compared:
    """Draw cell `number` of a seed until threed takes it, and run it; threed within the context `fault`."""
    refused = []
    for attempt in range(40):
        cell, here = draw(seed, number, attempt), folder / str(attempt)
        (here / "nvme").mkdir(parents=True)
        made = make_model(cell.family, cell.model, number)
        made.save_pretrained(here / "model")
        write_tokens(here / "tokens", cell.documents)
        try:
            drive.bring(here / "model", here / "run", cell.overrides(here))
            plans = [drive.planned(here / "run", cell.overrides(here, resumed))
                     for resumed in ((False, True) if cell.resumed else (False,))]
        except ThreedError as error:
            refused.append(Refused(number, str(error)))
            continue
        try:
            with fault():
                ran = drive.run(plans, here / "export")
            worst, near = differences(cell, ran, expected(cell, ran, made), here / "export")
        except Exception as error:
            error.add_note(str(cell))
            raise
        return Compared(cell, worst, refused, near)
    raise AssertionError(f"threed refused all of 40 attempts at cell {number} of seed {seed}: {refused}")


def expected(cell: Cell, ran: drive.Ran, model: Any) -> Outcome:
    """What the oracle makes of a cell."""
    keys, size = cell.keys, cell.keys["train.global_batch_size"]
    corpus = Corpus(cell.documents, keys["model.seq_len"], keys["data.packing"], keys["data.document_mask"])
    oracle = Oracle(model, recipe_of(cell), mixture_of(cell))
    for step in range(keys["train.steps"]):
        rows = corpus.labels(ran.batch(step, size))
        assert (rows.labels != LEFT_OUT).any(), "no label counts: draw other documents"
        oracle.step(rows, ran.choices(step, size))
    corpus.check_epochs()
    return oracle.finish()


def recipe_of(cell: Cell) -> Recipe:
    keys = cell.keys
    beta1, beta2 = map(float, keys["optimizer.betas"].strip("[]").split(","))
    return Recipe(
        keys["optimizer.name"], keys["optimizer.lr"], (beta1, beta2), keys.get("optimizer.eps", 0.0),
        keys["optimizer.weight_decay"], keys["optimizer.clip_grad"], keys["optimizer.warmup_steps"],
        keys["optimizer.schedule"], keys.get("optimizer.min_lr", 0.0), keys["train.steps"],
        keys["precision.dtype"], keys.get("optimizer.balance_rate", 0.0))


def mixture_of(cell: Cell) -> Mixture | None:
    keys, model = cell.keys, cell.model
    if "model.balance" not in keys:
        return None
    dots = cell.family == "dots1"
    return Mixture(
        "sigmoid" if dots else "softmax", model.get("norm_topk_prob", True),
        model.get("routed_scaling_factor", 1.0), model.get("n_group", 1), model.get("topk_group", 1),
        keys.get("model.moe_capacity"),
        keys["model.balance_weight"] if keys["model.balance"] == "sequence" else 0.0,
        keys.get("model.z_loss", 0.0))


def differences(cell: Cell, ran: drive.Ran, want: Outcome, export: Path) -> tuple[dict[str, float], int]:
    """Quantity -> the largest difference; and the choices that rounding has decided."""
    assert len(ran.losses) == len(want.losses) == cell.keys["train.steps"]
    loaded = getattr(transformers, CLASSES[cell.family]).from_pretrained(export, dtype=torch.float32)
    got = {**dict(loaded.named_parameters()),
           **{name: value for name, value in loaded.named_buffers() if name.endswith("correction_bias")}}
    assert got.keys() == want.weights.keys(), got.keys() ^ want.weights.keys()
    lion, worst = cell.values["optimizer"] == "lion", {"weights": 0.0, "updates": 0.0}
    for name, value in want.weights.items():
        error, size = (got[name].detach().double() - value).abs(), float(value.abs().max())
        if lion and name in want.unsure:
            sure = error[~want.unsure[name]].sort().values
            error = sure[:max(0, len(sure) - 1 - len(sure) // 100)]
        most = float(error.max()) if error.numel() else 0.0
        worst["weights"] = max(worst["weights"], most / max(size, 1e-3))
        change = float((value - want.first[name]).abs().max()) if name in want.first else 0.0
        if change > 1e-6:  # beyond what fp32 cannot hold
            worst["updates"] = max(worst["updates"], max(0.0, most - 5e-7 * size) / change)
    for what, ours, theirs in (("loss", ran.losses, want.losses), ("norm", ran.norms, want.norms)):
        apart = [abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)]
        worst |= {what: apart[0], f"later {what}": max(apart)} if lion else {what: max(apart)}
    return worst, want.near
