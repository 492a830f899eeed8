"""Initial values drawn where they are, as benches draw them: other values of the same distributions."""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness import batches, tiny
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.models.model import parameters
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.spec.parameter import Parameter
from threed.tensor.random import draw, draw_in_place

ALL, WAYS = {}, (draw, draw_in_place)


def drawn(way, parameter: Parameter, ranks=ALL, place=ALL, start: int = 0) -> torch.Tensor:
    """A rank's part from its element `start` on."""
    into = torch.full((math.prod(parameter.local_shape(ranks)) - start,), math.nan)
    way(into, parameter, parameter.part(ranks, place), 7, start)
    return into


def test_distributions_are_those_of_a_run():
    config = tiny("model.hidden=128", "model.vocab=1000", "model.layers=1")
    for parameter in parameters(config.model):
        ours, others = (drawn(way, parameter) for way in WAYS)
        if parameter.std == 0:
            assert torch.equal(ours, others)
            continue
        assert not torch.equal(ours, others)
        torch.testing.assert_close(ours.std(), others.std(), rtol=0.05, atol=0)
        assert abs(others.mean()) < 4 * parameter.std / len(others)**0.5


def test_uniform_values_stay_within_their_bounds():
    values = drawn(draw_in_place, Parameter("weight", (100, 100), uniform=0.25))
    assert 0.24 < values.max() <= 0.25 and -0.25 <= values.min() < -0.24


def test_made_values_are_made():
    parameter = Parameter("table", (4, 3), init=lambda seed: torch.arange(12.0).view(4, 3) + seed)
    assert drawn(draw_in_place, parameter, start=5).tolist() == [12.0, 13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize("start", [0, 3, 56 * 32 - 8, 56 * 32 + 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_pad_the_vocabulary_are_zero(start, rank):
    """120 rows of 128 are the vocabulary's; the second of two ranks has 56 of its 64."""
    embedding = next(each for each in parameters(tiny("parallel.tp=2").model) if each.unpadded)
    assert embedding.unpadded == 120
    parts = [drawn(way, embedding, {"tp": 2}, {"tp": rank}, start) for way in WAYS]
    assert torch.equal(parts[0] == 0, parts[1] == 0)


def test_an_engine_draws_so():
    """A first loss is that of knowing nothing; it is another one than a run's."""
    config = tiny("parallel.dp=2", "zero.stage=1", "model.init_std=0.02", "model.tie_embeddings=false")
    plan = make_plan(config)

    def first(way) -> float:
        def work(comm) -> float:
            engine = Engine(Analysis(plan), comm, way)
            loss = engine.train_step(batches(config, comm, 0))[0].loss
            engine.close()
            return loss

        return run_loopback(plan, make_mesh(config), work)[0]

    run, bench = map(first, WAYS)
    assert run != bench and abs(bench - math.log(120)) < 0.1
