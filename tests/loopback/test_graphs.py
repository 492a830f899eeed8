"""CUDA graphs, recorded and replayed on a CPU: the same bits as without, and what a graph cannot hold."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

from tests.harness import batches, cell_config, covering, dense, each_value, loopback, same_bits, tiny
from tests.late import be_late
from tests.recorder import Repeater, record_on_cpu
from threed.base.errors import InputError, RunError
from threed.comm.group import Comm, Group
from threed.comm.lanes import Handle
from threed.engine.engine import Engine
from threed.engine.graphs import GraphRun, _Outside
from threed.engine.loopback import ThreadChannel, run_loopback
from threed.features.zero.storage import Storage
from threed.models.layers.block import Block
from threed.planner import make_mesh, make_plan
from threed.prediction.transient import temporaries_of
from threed.program.analysis import Analysis
from threed.program.graphs import graphs
from threed.schema import Config

GRAPHS = "run.cuda_graphs=true"
STEPS = 3  # without graphs; they are recorded; they are replayed


def test_every_collective_is_left_out_of_graphs():
    """One that goes to the group itself runs while a graph is recorded, and never again."""
    collectives = {name for name, value in vars(Group).items() if not name.startswith("_") and callable(value)
                   and signature(value, eval_str=True).return_annotation is Handle}
    assert "exchange" in collectives and collectives <= vars(_Outside).keys()


def both(config: Config) -> None:
    plain = loopback(config, STEPS)
    config.run.cuda_graphs = True
    same_bits([plain, loopback(config, STEPS)])


@pytest.mark.parametrize("cell", each_value(dense(covering())), ids=lambda cell: cell.id)
def test_the_contracts_sample(cell, monkeypatch):
    """An address that changes, memory that is used again too early, a number that is kept from the step that
    was recorded."""
    made = record_on_cpu(monkeypatch)
    both(cell_config(cell, ranks=8))
    assert all(each.made for each in made)


FEW = ["model.layers=2", "train.global_batch_size=4"]
OFFLOADED = ["parallel.pp=2", "activation.policy=full", "activation.offload=cpu"]
ZERO3 = ["zero.stage=3", "zero.residency=2", "zero.prefetch=1", "parallel.dp=2"]


SETTINGS = [
    ["model.dropout=0.1", "parallel.tp=2", "parallel.sequence_parallel=true", *FEW],
    ["model.tile_linears=4KiB", "model.tie_embeddings=false", *FEW],
    ["model.fused=auto", "model.family=llama", "model.activation=swiglu", "model.norm=rmsnorm"],
    ["model.loss_chunk=5", "parallel.tp=2", *FEW],
    ["parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true", "model.dropout=0.1", *FEW],
    ["parallel.cp=2", "model.family=llama", "model.kv_heads=2", "parallel.pp=2", "zero.stage=3",
     "activation.policy=full"],
    # a part that leaves is no memory of a graph
    ["parallel.tp=2", "parallel.pp=2", "parallel.split_messages=on", *FEW],
    ["parallel.tp=2", "parallel.pp=2", "parallel.split_messages=on", "parallel.schedule=zb-v", *ZERO3, *FEW],
    ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]"],
    [*ZERO3, "model.layers=5", "train.global_batch_size=6"],  # a buffer more or less than the last time
    [*ZERO3, "offload.optimizer=cpu", "offload.parameters=cpu"],
    ["zero.stage=1", "offload.optimizer=cpu"],
    ["zero.stage=1", "offload.optimizer=cpu", "offload.overlap=none"],
    OFFLOADED, ["parallel.pp=2", "activation.policy=full", "activation.contiguous=true"],
    ["model.lora_rank=4", "parallel.schedule=zb-h1", "parallel.pp=2", "parallel.tp=2", *ZERO3, *FEW],
    ["parallel.pp=2", "train.eval_every=1", "run.verify_every=2"],
    # the divisor of the loss is another in each step
    ["data.loss_mask=answers", "parallel.pp=2", "train.eval_every=1"],
    # what a micro-batch still needs before an instruction differs from that of another
    ["parallel.pp=2", "parallel.schedule=auto", "parallel.activation_limit=1.5x", "model.tile_linears=4KiB",
     "model.tie_embeddings=false", "model.layers=2"],
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_bits(settings, monkeypatch):
    record_on_cpu(monkeypatch)
    both(tiny(*settings))


def test_a_dynamic_loss_scale(monkeypatch):
    """The scale with which a graph was recorded is not that of later steps."""
    record_on_cpu(monkeypatch)
    both(tiny("precision.dtype=fp16", "precision.initial_loss_scale=64", "precision.loss_scale_window=1"))


# ---------------------------------------------------------------- what must not be


def refused(config: Config) -> str:
    config.run.cuda_graphs = True
    with pytest.raises(RunError) as failure:
        loopback(config, STEPS)
    return str(failure.value)


def test_a_layer_whose_numbers_the_host_reads(monkeypatch):
    record_on_cpu(monkeypatch)
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, *rest, **named: forward(
        self, x * (2.0 if x.sum().item() > 1e30 else 1.0), *rest, **named))
    assert "blocks.0: RuntimeError: aten._local_scalar_dense.default: the host reads" in refused(tiny())


def test_a_layer_whose_shapes_depend_on_data(monkeypatch):
    """If its class says so, no run begins; if not, a graph cannot be recorded."""
    record_on_cpu(monkeypatch)
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, *rest, **named: forward(
        self, x + x[x > 0].sum() * 0, *rest, **named))
    assert "blocks.0: RuntimeError: aten.index.Tensor: the shape of the result" in refused(tiny())
    monkeypatch.setattr(Block, "shapes_from", "how many tokens an expert gets", raising=False)
    make_plan(tiny())
    with pytest.raises(InputError, match=r"cuda_graphs=true: in layer blocks\.0 shapes depend on how many"):
        make_plan(tiny(GRAPHS))


def test_an_input_that_is_not_copied(monkeypatch):
    """A message comes to another address in each step."""
    record_on_cpu(monkeypatch)
    monkeypatch.setattr(GraphRun, "_place", lambda self, given, turn: given)
    assert "reads [16, 1, 32] outside of the memory of its graphs" in refused(tiny("parallel.pp=2"))


@pytest.mark.parametrize("copies", [True, False])
def test_a_message_is_a_copy(copies, monkeypatch):
    """The next graph could write over its memory, while it is under way."""
    made, send = record_on_cpu(monkeypatch), ThreadChannel._send
    in_a_set: list[bool] = []

    def noted(self: ThreadChannel, tensor: torch.Tensor) -> Handle:
        address = tensor.untyped_storage().data_ptr()
        in_a_set.append(any(address in pool for each in made for pool in list(each.pools)))
        return send(self, tensor)

    monkeypatch.setattr(ThreadChannel, "_send", noted)
    if not copies:
        monkeypatch.setattr(GraphRun, "leaving", lambda self, tensor: tensor)
    loopback(tiny("parallel.pp=2", "model.layers=2", GRAPHS), STEPS)
    assert any(in_a_set) != copies


def test_what_goes_to_the_host_is_a_copy(monkeypatch):
    record_on_cpu(monkeypatch)
    be_late(monkeypatch, seed=1)
    monkeypatch.setattr(GraphRun, "leaving", lambda self, tensor: tensor)
    with pytest.raises(AssertionError):
        both(tiny(*OFFLOADED))


def test_buffers_that_move(monkeypatch):
    """A parameter at another place than in the step that was recorded."""
    record_on_cpu(monkeypatch)
    monkeypatch.setattr(Storage, "rewind", lambda self: None)
    message = refused(tiny(*ZERO3, "model.layers=5"))
    assert "the CUDA graph of FORWARD u" in message and "now they are at" in message


def test_without_a_gpu():
    with pytest.raises(InputError, match=r"run\.cuda_graphs=true needs a GPU, and this run's device is a c"):
        loopback(tiny(GRAPHS), 1)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("settings", [
    [], ["activation.policy=full"], ["activation.policy=full", "activation.contiguous=true"],
    ["parallel.pp=2", "parallel.schedule=1f1b"],
    ["parallel.pp=2", "parallel.schedule=zb-h1"], ["precision.dtype=bf16", "parallel.tp=2"],
], ids=str)
def test_memory_of_the_sets(settings, monkeypatch):
    """What the plan says that a set holds at most, against what is alive in it."""
    record_on_cpu(monkeypatch)
    config = tiny("model.hidden=64", "model.seq_len=64", "model.vocab=256", "model.fused=off", GRAPHS,
                  *settings)
    plan = make_plan(config)

    def work(comm: Comm):
        engine = Engine(Analysis(plan), comm)
        assert engine.graphs is not None
        recorder = engine.graphs.recorder
        assert isinstance(recorder, Repeater)
        recorder.measures = True
        for step in range(STEPS):
            engine.train_step(batches(config, comm, step))
        return comm.here.position, sorted(pool.peak for pool in recorder.pools)

    transient = temporaries_of(plan)
    for position, peaks in run_loopback(plan, make_mesh(config), work):
        expected = sorted(graphs(Analysis(plan), position, transient).peaks.values())
        assert peaks == pytest.approx(expected, rel=0.05), position
