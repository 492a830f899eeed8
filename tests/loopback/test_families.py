"""Families of one's own: a parallel block in one file; layers that hand on several tensors and add to the
loss."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness import assert_contract, batches, loopback, tiny
from threed.base.errors import ThreedError
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.extend import measured_cost
from threed.models.tiling import layers_of
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config

FAMILY = "model.family=tests/families/{}"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=6", "parallel.dp=2"]
ZB, SP = ["parallel.pp=2", "parallel.schedule=zb-h1"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
PARALLEL = {
    "1f1b": ["parallel.pp=2", "zero.stage=0"], "zb-h1-sp": [*ZB, *SP, "zero.stage=2"],
    "zero-3-full": ["zero.stage=3", "activation.policy=full", "parallel.tp=2"],
    "selective": ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]", *SP],
    "tiles": ["model.tile_linears=1KiB", "zero.stage=3", *ZB], "tiles-sp": ["model.tile_linears=1KiB", *SP],
    "offload-tied": ["zero.stage=2", "offload.optimizer=cpu", "model.tie_embeddings=true", "parallel.pp=2"],
    "interleaved": ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2",
                    "zero.stage=1"],
}


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_block(name, references):
    """A branch with two bodies: products that share an input whose gradient is counted once, or twice."""
    assert_contract(tiny(*SMALL, FAMILY.format("parallel_block.py:PARALLEL"), *PARALLEL[name]), references)


HANDING = {
    "alone": [], "full": ["activation.policy=full", "zero.stage=3"], "zb-h1-sp": [*ZB, *SP],
    "one-unit": ["parallel.layers_per_unit=4"],
    "evaluate": ["parallel.pp=2", "train.eval_every=1", "zero.stage=2"],
}


@pytest.mark.parametrize("name", HANDING)
def test_hands_on_two_tensors_and_adds_to_the_loss(name, references):
    config = tiny(*SMALL, FAMILY.format("handing.py:HANDING"), *HANDING[name])
    units = make_plan(config).table.units
    if name != "one-unit":
        assert [tensor.name for tensor in units[1].makes] == ["gate", "skip"]
        assert [read[:3] for read in units[2].reads] == [("gate", 1, False)]
        assert sorted(read[:3] for read in units[3].reads) == [("gate", 1, True), ("skip", 1, True)]
        assert units[1].stage == units[3].stage and [unit.loss for unit in units].count(True) == 3
    assert_contract(config, references)


CHOOSING = {
    "alone": [], "tp-bf16": ["parallel.tp=2", "precision.dtype=bf16"],
    "full": ["activation.policy=full", "zero.stage=3"], "zb-h1": [*ZB, "zero.stage=2"],
    "full-offload": ["activation.policy=full", "activation.offload=cpu", *ZB],
    "evaluate-full": ["parallel.pp=2", "activation.policy=full", "train.eval_every=1"],
}


@pytest.mark.parametrize("name", CHOOSING)
def test_hands_on_what_has_no_gradient(name, references):
    """Integers that autograd would refuse; a choice that recomputation makes anew, perhaps another one."""
    config = tiny(*SMALL, FAMILY.format("choosing.py:CHOOSING"), *CHOOSING[name])
    units = make_plan(config).table.units
    assert [made[:3] for made in units[1].makes] == [("picks", 8 * 8 * config.train.micro_batch_size, False)]
    assert [read.grad for unit in units for read in unit.reads] == [False, False]
    assert not {"gpicks"} & make_plan(config).table.handed.keys()
    assert_contract(config, references)


def test_a_choice_is_made_once():
    config = tiny(*SMALL, FAMILY.format("choosing.py:CHOOSING"), "activation.policy=full", "parallel.dp=1")
    chosen = sys.modules[type(layers_of(config)[1]).__module__].chosen
    chosen.clear()
    loopback(config, 1)
    evaluated = "evaluate" in make_plan(config).programs
    assert len(chosen) == config.num_microbatches * (1 + evaluated)


def test_a_reader_says_that_there_is_no_gradient():
    with pytest.raises(ThreedError, match=r"blocks\.1 reads 'picks', which is made without a gradient, in i"):
        make_plan(tiny(*SMALL, FAMILY.format("choosing.py:CHOOSING"), "model.told=false"))


@pytest.mark.parametrize("name", HANDING)
def test_penalties_are_apart_from_the_loss(name, references):
    """They are trained on as the loss is, and neither reported with it nor evaluated."""
    handing, apart = FAMILY.format("handing.py:HANDING"), "model.reported=apart"
    config = tiny(*SMALL, handing, apart, *HANDING[name])
    assert_contract(config, references)
    together, alone = (references(each, 1) for each in (tiny(*SMALL, handing, *HANDING[name]), config))
    assert all(torch.equal(together.first_grads[key], grad) for key, grad in alone.first_grads.items())
    penalty, = penalties(config)
    assert penalty is not None and penalty == pytest.approx(together.losses[0] - alone.losses[0], rel=1e-4)
    assert penalties(tiny(*SMALL, handing, *HANDING[name])) == [None]


@pytest.mark.parametrize("reported", ["loss", "apart"])
def test_a_layer_says_that_it_adds_to_the_loss(reported, monkeypatch):
    config = tiny(*SMALL, FAMILY.format("handing.py:HANDING"), f"model.reported={reported}", "parallel.dp=1")
    plan = make_plan(config)
    units = tuple(replace(unit, loss=unit.loss and index == plan.table.last)
                  for index, unit in enumerate(plan.table.units))
    unsaid = replace(plan, table=replace(plan.table, units=units))
    with pytest.raises(ThreedError, match=r"blocks\.0 has returned a loss or a penalty.*set `loss = True`"):
        run_loopback(unsaid, make_mesh(config),
                     lambda comm: Engine(Analysis(unsaid), comm).train_step(batches(config, comm, 0)))


@pytest.mark.parametrize(("family", "index"), [("handing.py:HANDING", 1), ("choosing.py:CHOOSING", 1),
                                               ("choosing.py:CHOOSING", 2)])
def test_what_backward_begins_with_is_measured(family, index):
    """A penalty costs what it costs as part of the loss; a choice gets no gradient."""
    each = [tiny(*SMALL, FAMILY.format(family), *more) for more in (
        [["model.reported=loss"], ["model.reported=apart"]] if "handing" in family else [[]])]
    costs = [measured_cost(layers_of(config)[index], config) for config in each]
    assert costs[0] == costs[-1] and costs[0].flops > 0 and costs[0].operands > 0


def penalties(config: Config) -> list[float | None]:
    """Of a step: what all ranks say."""
    plan = make_plan(config)

    def work(comm: Comm) -> float | None:
        engine = Engine(Analysis(plan), comm)
        return engine.train_step(batches(config, comm, 0))[0].penalty

    return [*dict.fromkeys(run_loopback(plan, make_mesh(config), work))]


BAD = {
    "gtp": "there are gpt, llama", "nowhere/family.py:X": "there is no file nowhere/family.py",
    "tests/families/parallel_block.py:NOTHING": "has no name 'NOTHING'",
    "tests/families/parallel_block.py:block": "has a function of this name",
    "no_such_package:X": "cannot be imported",
}


@pytest.mark.parametrize("family", BAD)
def test_bad_families(family):
    with pytest.raises(ThreedError, match=BAD[family]):
        tiny(f"model.family={family}")
    assert Path("tests/families/parallel_block.py").is_file()


FAILS = """
from threed.base.later import F
from threed.models.families.base import Family
from threed.models.layers.base import Layer
from threed.models.layers.embedding import Embedding
from threed.models.layers.head import Head

class Fails(Layer):
    name = "the layer"

    def forward(self, x, batch):
        return F.relu(x.reshape(7, -1))

FAILS = Family(lambda model: [Embedding(model), Fails(), Head(model)])
"""


def test_a_layer_that_fails(tmp_path):
    """An error in a layer of one's own names the unit and the line, and not the line in torch."""
    file = tmp_path / "fails.py"
    file.write_text(FAILS)
    config = tiny(*SMALL[:-1], f"model.family={file}:FAILS")
    with pytest.raises(ThreedError, match=r"FORWARD u1 m0(?s:.*)\n  the layer: RuntimeError: .*invalid"
                                          rf".* \({re.escape(str(file))}, line 12\)$"):
        loopback(config)


def test_sizes_imply_their_family():
    assert tiny("model.name=llama3-8b").model.family == "llama"
    assert tiny("model.name=gpt2-small").model.family == "gpt"
    with pytest.raises(ThreedError, match=r"is a size of model.family=llama, not of gpt"):
        tiny("model.name=llama3-8b", "model.family=gpt")
    assert tiny("model.family=llama").model.norm == "rmsnorm"
