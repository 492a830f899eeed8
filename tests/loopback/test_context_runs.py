"""Runs with context parallelism: their memory, their checkpoints, a model of transformers, and what surrounds
training."""

from __future__ import annotations

import pytest
import torch

from tests import reference
from tests.harness import batches, tiny
from tests.loopback import test_transient as transient
from tests.loopback.test_axis import train
from tests.loopback.test_checkpoint import manifest
from tests.loopback.test_context import DP, LLAMA, PP, SMALL, SP, TP, with_cp
from threed.base.errors import InputError
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan
from threed.prediction.transient import _Kernels, peak_bytes, temporaries_of
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.tensor.alive import Alive

# ---------------------------------------------------------------- memory

LONG = ["model.layers=6", "model.hidden=64", "model.heads=8", "model.kv_heads=2", "model.vocab=64",
        "model.vocab_multiple=64", "model.family=llama", "model.position=rotary", "train.global_batch_size=1"]
S = 64  # tokens


def peak(config: Config) -> int:
    """The most bytes that are alive in a step, above those before it, on the rank that has most."""
    torch.set_num_threads(1)

    def work(comm: Comm) -> int:
        engine = Engine(Analysis(make_plan(config)), comm)
        with Alive() as alive:
            engine.train_step(batches(config, comm, 0))  # makes what is made once
            before = alive.peak = alive.bytes()
            engine.train_step(batches(config, comm, 1))
            return alive.peak - before

    return max(run_loopback(make_plan(config), make_mesh(config), work))


def predicted(config: Config) -> int:
    plan = make_plan(config)
    return peak_bytes(Analysis(plan), 0, temporaries_of(plan))


@pytest.mark.parametrize("more", [[], ["precision.dtype=bf16"], [*TP, *SP]], ids=["fp32", "bf16", "sp"])
def test_sequences_of_four_times_the_length_on_four_ranks(more, monkeypatch):
    """Activations as before, beside gathered keys and values of one layer. The plan says as much."""
    transient.alike(monkeypatch)
    short = tiny(*LONG, *more, f"model.seq_len={S}")
    long = tiny(*LONG, *more, f"model.seq_len={4 * S}", "parallel.cp=4")
    model, element = long.model, 4 if long.precision.dtype == "fp32" else 2
    keys = 2 * model.seq_len * model.num_kv_heads * model.head_size // long.parallel.tp * element
    assert peak(long) <= 1.05 * peak(short) + keys
    assert peak(long) == pytest.approx(predicted(long), rel=0.005)


@pytest.mark.parametrize("more", [[], ["precision.dtype=bf16"], [*TP, *SP], ["activation.policy=full"],
                                  transient.selective("attention,norm"), transient.selective("keys"),
                                  ["model.attention_dropout=0.1"]])
def test_what_attention_holds(more, monkeypatch):
    """Of every instruction, gathered keys and the sums of their gradients included."""
    transient.alike(monkeypatch)
    monkeypatch.setattr(_Kernels, "kernels", lambda *_: None)  # there are none of the loss
    transient.compare(tiny(*LONG, *more, "model.vocab=512", f"model.seq_len={S}", "parallel.cp=4"))


# ---------------------------------------------------------------- checkpoints


def test_a_run_grows(tmp_path):
    """4 steps of short sequences on one rank, then 4 of four times the length on four: losses are those of
    the reference, which goes on with its weights and moments, too."""
    growing = ["model.family=llama", *SMALL, f"run.dir={tmp_path}"]
    short = tiny(*growing)
    long = tiny(*growing, "model.seq_len=64", "parallel.cp=4", "train.resume=auto")
    losses = train(short, 4)[0] + train(long, 4)[0]
    assert losses == pytest.approx(grown(short, long, 4), rel=1e-5)


def grown(short: Config, long: Config, steps: int) -> list[float]:
    """The reference's losses of so many steps with each config, one after the other."""
    with initialized():
        one = reference.Reference(short)
        before = one.run(steps).losses
        one.config = long
        return before + one.run(steps, steps).losses


def test_learned_positions_do_not_grow(tmp_path):
    learned = [*SMALL, "model.position=learned", f"run.dir={tmp_path}"]
    train(tiny(*learned), 1)
    with pytest.raises(InputError) as error:
        train(tiny(*learned, "model.seq_len=64", "parallel.cp=4", "train.resume=auto"), 1)
    assert str(error.value).endswith(
        "is of another model: model.seq_len=16 there, 64 here; model.position=learned has a row of weights "
        "for each place, and none for others: only with model.position=rotary does a run go on at another "
        "model.seq_len; give the model its sizes, or a new run a run.dir of its own")


MESHES = {2: [*PP, *TP, "zero.stage=1"], 4: [*DP, "zero.stage=3"], 1: [*PP, *TP, *SP, "zero.stage=2"]}


def test_checkpoints_are_equal_to_the_bit(tmp_path):
    """Of 2 ranks, 4 and 1, with dp, tp and pp changing: weights and moments that are read are those that
    were written."""
    _, path = train(with_cp(2, *LLAMA, *MESHES[2], f"run.dir={tmp_path}/2"), 2)
    for size in (4, 1):
        chosen = [*LLAMA, *MESHES[size], f"run.dir={tmp_path}/{size}", f"train.resume={path}"]
        _, again = train(with_cp(size, *chosen), 0)
        one, other = (manifest(each)["parameters"] for each in (path, again))
        assert {name: row["sums"] for name, row in one.items()} == {
            name: row["sums"] for name, row in other.items()}
        path = again
