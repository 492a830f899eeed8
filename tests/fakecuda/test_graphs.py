"""CUDA graphs on fake GPUs: recorded and replayed as on a GPU, the same bits as without, and no race."""

from __future__ import annotations

import pytest

from tests.harness import cell_config, covering, dense, each_value, loopback, same_bits, tiny
from tests.loopback.test_graphs import GRAPHS, OFFLOADED, SETTINGS, STEPS
from threed.devices import cuda
from threed.engine.graphs import GraphRun
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
