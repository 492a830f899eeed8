"""What ranks must have in common before the first step, and what is said of the host's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import loopback, tiny
from threed.base.errors import InputError
from threed.config.load import load
from threed.optim import native
from threed.training import setup as assemble

pytestmark = pytest.mark.core


@pytest.mark.parametrize("settings", [
    [], ["offload.optimizer=cpu", "precision.dtype=bf16"], ["optimizer.name=sgd"], ["precision.dtype=bf16"],
    ["precision.dtype=bf16", "precision.master=none"],
    ["precision.dtype=fp16", "offload.optimizer=cpu", "zero.stage=3"]])
def test_who_takes_the_compiled_step(settings, monkeypatch):
    """The config alone decides whether a run on a CPU takes the compiled step."""
    calls = []
    monkeypatch.setattr(native, "ADAMW", lambda *args: calls.append(args))
    config = tiny("parallel.dp=2", *settings)
    loopback(config, 1)
    assert bool(calls) == assemble._steps_on_host(config, torch.device("cpu"))


@pytest.mark.parametrize(("settings", "said"), [
    ([], 1), (["optimizer.name=sgd"], 0), (["precision.dtype=bf16", "precision.master=none"], 0)])
def test_it_is_said_that_there_is_none(settings, said, monkeypatch):
    monkeypatch.setattr(native, "ADAMW", print)
    assert not assemble._without_compiler(load(None, settings), torch.device("cpu"))
    monkeypatch.setattr(native, "ADAMW", None)
    monkeypatch.setattr(native, "MISSING", "because")
    lines = assemble._without_compiler(load(None, settings), torch.device("cpu"))
    assert len(lines) == said and all("AdamW on the host is torch's" in line and "because" in line
                                      for line in lines)


class Two:
    """Rank 0 of two. The second has something else."""

    rank = 0

    def __init__(self, device: str, other: Callable[[Any], Any]):
        self.device, self.other = torch.device(device), other

    def broadcast(self, mine: Any) -> Any:
        self.first = mine
        return mine

    def all_gather(self, differs: str) -> list[str]:
        return [differs, assemble._difference(1, self.other(self.first), self.first)]


@pytest.mark.parametrize(("device", "settings", "fine"), [
    ("cpu", [], False), ("cuda", [], True), ("cuda", ["offload.optimizer=cpu"], False),
    ("cpu", ["optimizer.name=sgd"], True),
    ("cpu", ["precision.dtype=bf16", "precision.master=none"], True)])
def test_ranks_round_alike(device, settings, fine, monkeypatch):
    """A rank without the compiled step would drift from those that hold the same weights: refused where it
    would take it."""
    config = load(None, settings)
    here = []
    monkeypatch.setattr(assemble, "attention", lambda *_: "flash")  # which asks the device
    monkeypatch.setattr(native, "ADAMW", None)
    assemble._agree(Two(device, lambda mine: here.append(mine) or mine), config, "digest")  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(native, "ADAMW", print)

    def run() -> None:
        assemble._agree(Two(device, lambda mine: here[0]), config, "digest")  # pyright: ignore[reportArgumentType]

    if fine:
        run()
    else:
        with pytest.raises(InputError, match="rank 1 and rank 0 differ in the AdamW of the host, which rank "
                                             "1 has not compiled"):
            run()


def test_ranks_have_one_config():
    config, other = load(None, []), load(None, ["train.seed=5"])
    with pytest.raises(InputError, match=r"rank 1 and rank 0 differ in train\.seed: every rank must be given "
                                         r"the same config"):
        assemble._agree(Two("cpu", lambda mine: (other.to_dict(), *mine[1:])), config, "a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"differ in plan or version \(b, 1; rank 0 has a, "):
        assemble._agree(Two("cpu", lambda mine: (mine[0], ("b", "1"), mine[2])), config, "a")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("here", "said"), [
    ((True, False, "flash"), "model.fused=auto, which rank 1 cannot compile"),
    ((True, True, "math"), r"attention, which is math on rank 1 and flash on rank 0 \(choose one by")])
def test_ranks_compute_by_the_same_kernels(here, said, monkeypatch):
    """Copies of the same numbers would drift apart: one host without a compiler, or with another GPU."""
    monkeypatch.setattr(assemble, "compiles", lambda *_: True)
    monkeypatch.setattr(native, "ADAMW", print)
    with pytest.raises(InputError, match=f"rank 1 and rank 0 differ in {said}"):
        assemble._agree(Two("cpu", lambda mine: (*mine[:2], here)), load(None, []), "digest")  # pyright: ignore[reportArgumentType]
