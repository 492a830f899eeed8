"""CUDA graphs on fake GPUs: recorded and replayed as on a GPU, the same bits as without, and no race."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.harness import cell_config, covering, dense, each_value, loopback, same_bits, tiny
from tests.loopback.test_graphs import GRAPHS, OFFLOADED, SETTINGS, STEPS
from threed.devices import cuda
from threed.engine.graphs import UPDATES, GraphRun
from threed.optim.adamw import AdamW
from threed.optim.base import Update, View
from threed.planner import make_plan
from threed.program.instruction import Tier
from threed.schema import Config


def both(config: Config, steps: int = STEPS) -> None:
    plain = loopback(config, steps)
    config.run.cuda_graphs = True
    recorders: list[object] = []
    cuda.Cuda.recorder = lambda self: recorders.append(made := cuda.CudaRecorder()) or made
    same_bits([plain, loopback(config, steps)])
    assert len(recorders) == config.world_size


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id) for cell in each_value(dense(covering()))])
def test_the_contracts_sample(cell, fake_gpus):
    fake_gpus.run(both, cell_config(cell, ranks=8))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_bits(settings, fake_gpus):
    fake_gpus.run(both, tiny(*settings))


def updates(config: Config, skips: bool) -> None:
    """Updates are recorded once, and their numbers are those of each step."""
    recorded, recording, losses = Counter(), GraphRun._recording, []
    GraphRun._recording = lambda self, home: recorded.update([home]) or recording(self, home)
    for graphs in (False, True):
        config.run.cuda_graphs = graphs
        losses.append(loopback(config, 7))
    same_bits(losses)
    assert any(map(math.isinf, losses[0].norms)) == skips
    table = make_plan(config).table
    stepped = [unit for position in range(table.num_positions) for unit in table.stepped(position)
               if table.parameters[unit].state_home == Tier.DEVICE and table.parameters[unit].turning is None]
    assert recorded[UPDATES] == len(stepped) * config.world_size // table.num_positions > 0


RATES = ["optimizer.warmup_steps=3", "optimizer.schedule=cosine", "train.steps=7",
         "optimizer.weight_decay=0.1"]


@pytest.mark.parametrize("settings", [
    ["optimizer.clip_grad=0.2"], ["zero.stage=3", "parallel.dp=2", "run.verify_every=3"],
    ["precision.dtype=bf16", "precision.grad_dtype=bf16", "parallel.tp=2"],
    ["parallel.pp=2", "zero.stage=1", "parallel.dp=2", "offload.optimizer=cpu", "offload.ratio=0.5"],
    ["optimizer.name=muon"],
], ids=str)
def test_updates(settings, fake_gpus):
    fake_gpus.run(updates, tiny(*RATES, *settings), False)


def test_updates_that_are_skipped(fake_gpus):
    fake_gpus.run(updates, tiny(*RATES, "precision.dtype=fp16", "precision.initial_loss_scale=262144",
                                "precision.loss_scale_window=2"), True)


def numbers_are_not_copied() -> None:
    GraphRun.numbers = lambda self, given: given
    updates(tiny(*RATES), False)


def test_numbers_of_another_step(fake_gpus):
    """An update that reads the rate where it was when the graph was recorded."""
    assert fake_gpus.outcome(numbers_are_not_copied).error


def an_optimizer_that_waits() -> None:
    def update_all(self: AdamW, views: Sequence[View], by: Update) -> None:
        assert by.device is not None
        views[0].weight.sub_(by.device.lr.item())

    AdamW.update_all = update_all
    loopback(tiny(GRAPHS), STEPS)


def test_an_update_that_no_graph_can_hold(fake_gpus):
    assert "run.cuda_graphs=false runs without" in fake_gpus.outcome(an_optimizer_that_waits).error


def inputs_are_not_copied() -> None:
    GraphRun._place = lambda self, given, turn: given
    loopback(tiny("parallel.pp=2", "model.layers=2", GRAPHS), STEPS + 1)


def messages_are_no_copies() -> None:
    GraphRun.leaving = lambda self, tensor: tensor
    loopback(tiny(*OFFLOADED, "model.layers=2", GRAPHS), STEPS)


def test_an_input_that_is_not_copied(fake_gpus):
    """Data that a graph reads where it was when the graph was recorded: it is freed, and no number."""
    outcome = fake_gpus.outcome(inputs_are_not_copied)
    assert outcome.races or outcome.error


def test_what_leaves_a_graph_is_a_copy(fake_gpus):
    """The next replay writes where a message under way still reads."""
    outcome = fake_gpus.outcome(messages_are_no_copies)
    assert any("what a collective read" in race for race in outcome.races), outcome
