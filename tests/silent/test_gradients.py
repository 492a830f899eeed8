"""Rows 1 to 7 of docs/silent-faults.md: gradients, the divisor of the loss, initial values. Against one plain
process, in fp32, with plain SGD and no clipping: Adam would hide a wrong scale."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allpairspy import AllPairs

from tests import harness, reference
from tests.harness import SETTINGS, Ranks, assert_parity, drive, loopback, same_bits, tiny
from tests.late import be_late
from tests.loopback.test_checkpoint import COUNTERS, manifest, named, on_ranks, step
from tests.reference import Data, Reference, tokens_of
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.data.samples import Sample, Split
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.gradient import Accumulated, Gradient
from threed.models.model import parameters
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.spec.parameter import NOT_COUNTED
from threed.tensor.context import Batch
from threed.tensor.random import initial_values
from threed.training.trainer import mean_loss

pytestmark = pytest.mark.usefixtures("one_core")

SGD = ["optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0"]
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", *SGD]
TP, SP = ["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]


def schedule(name: str) -> list[str]:
    return SETTINGS["schedule"].get(name, [f"parallel.schedule={name}"])


# ---------------------------------------------------------------- 1: the divisor, stage by stage

COUNTS = [(name, p, count) for name, p, count in itertools.product(SCHEDULES, (2, 4), (1, 2, 8))
          if count >= SCHEDULES[name].least(p)]


@pytest.mark.parametrize(("name", "p", "count"), COUNTS)
def test_the_divisor_on_every_stage(name, p, count, references):
    """The norm of each unit's gradient: a stage that divides once more, or not at all, is off by a factor of
    the number of micro-batches."""
    config = tiny(*SMALL, "model.layers=8", f"parallel.pp={p}", *schedule(name), "train.micro_batch_size=2",
                  f"train.global_batch_size={2 * count}")
    ranks, want = loopback(config, 1), references(config, 1)
    units = {unit_of(name) for name in want.first_grads}
    assert len(units) == 8 + 2  # each block, the table of words, the last norm
    for unit in units:
        got, right = norm(ranks.first_grads, unit), norm(want.first_grads, unit)
        assert right > 1e-4 and got == pytest.approx(right, rel=1e-5), unit
    assert_parity(ranks, want)


def unit_of(name: str) -> str:
    return ".".join(name.split(".")[:2 if name.startswith("blocks") else 1])


def norm(gradients: dict[str, torch.Tensor], unit: str) -> float:
    return sum(each.double().square().sum().item() for name, each in gradients.items()
               if unit_of(name) == unit) ** 0.5


# ---------------------------------------------------------------- 2: each micro-batch once

ACCUMULATED: dict[str, list] = {
    "count": [8, 1, 2, 3, 4, 5, 6, 7],
    "stage": [0, 1, 2, 3],
    "offload": ["none", "cpu", "nvme", "cpu+parameters", "nvme+parameters"],
    "every": [1, 2, 3, "step"],
    "precision": ["fp32", "bf16"],
    "overlap": ["next", "none"],
    "gradients": ["device", "host"],
}


def works(row: list) -> bool:
    """What a config does not refuse, of the beginning of a row of ACCUMULATED."""
    _, stage, offload, every, _, overlap, gradients = (*row, *[None] * (7 - len(row)))
    if stage is None or (stage < 3 and "parameters" in (offload or "")):
        return stage is None
    if stage < 2 and every not in (None, 1):
        return False  # the key is of stages 2 and 3
    if offload == "none" and (overlap == "none" or gradients == "host"):
        return False  # there is one value of each
    return not (gradients == "host" and stage < 2)


@pytest.mark.parametrize("row", list(AllPairs(list(ACCUMULATED.values()), filter_func=works)),
                         ids=lambda row: "-".join(map(str, row)))
def test_each_micro_batch_counts_once(row, references):
    """The gradient before STEP: without the last micro-batch, with it alone, or with one of the step before.
    (Two steps: what is left over would be seen in the second.)"""
    count, stage, offload, every, precision, overlap, gradients = row
    away = [f"offload.overlap={overlap}", f"offload.gradients={gradients}"] if offload != "none" else []
    config = tiny(*SMALL, "parallel.dp=2", f"zero.stage={stage}", f"train.global_batch_size={2 * count}",
                  *SETTINGS["offload"][offload], f"precision.dtype={precision}",
                  *([f"zero.reduce_every={every}"] if stage >= 2 else []),
                  *away)
    most = harness.FP32 if precision == "fp32" else harness.SIXTEEN
    ranks, want = loopback(config, 2), references(config, 2)
    assert_parity(ranks, want, most)
    for name, right in want.first_grads.items():  # of the largest element SIXTEEN allows a twentieth
        error = (ranks.first_grads[name] - right).norm() / right.norm()
        assert error < (1e-5 if precision == "fp32" else 2e-2), (name, error)


# ---------------------------------------------------------------- 3: buffers that are used again

LATE: dict[str, list] = {
    "stage": [0, 1, 2, 3],
    "offload": ["none", "cpu", "nvme", "cpu+parameters", "nvme+parameters"],
    "every": [1, 2, "step"],
    "schedule": ["1f1b", "interleaved", "zb-v"],
}


@pytest.mark.parametrize("row", list(AllPairs(list(LATE.values()),
                                              filter_func=lambda row: works([8, *row[:3]]))),
                         ids=lambda row: "-".join(map(str, row)))
def test_a_buffer_that_another_lane_reads(row, references, monkeypatch):
    """Lanes are late, and what they will write is no number. Nor is a gradient's buffer, from the moment that
    BACKWARD takes it: a REDUCE that still reads it, or a sum that begins with what is in it, gives NaN."""
    stage, offload, every, name = row
    config = tiny(*SMALL, "parallel.dp=2", "parallel.pp=2", f"zero.stage={stage}", *schedule(name),
                  *SETTINGS["offload"][offload], *([f"zero.reduce_every={every}"] if stage >= 2 else []))
    be_late(monkeypatch, seed=stage)
    take = Gradient.whole

    def poisoned(self: Gradient) -> torch.Tensor:
        fresh = self.accumulated is Accumulated.NOTHING
        return take(self).fill_(torch.nan) if fresh else take(self)

    monkeypatch.setattr(Gradient, "whole", poisoned)
    assert_parity(loopback(config, 2), references(config, 2))


# ---------------------------------------------------------------- 4: few tokens that count

FEW, MANY = 1, 500  # tokens that count on the two ranks, or in the two micro-batches
LONG = ["model.seq_len=256", "parallel.dp=2", "train.global_batch_size=4", "data.loss_mask=answers"]


def uneven(over: str):
    """`data_of`, of two micro-batches of two ranks: FEW tokens count on dp 0, or in the first micro-batch,
    and MANY in the rest. Sequence 2 m + r is micro-batch m of rank r. The next step has it the other way
    round."""
    def made(config: Config, step: int) -> Data:
        tokens = tokens_of(config, step)
        inputs, labels = tokens[:, :-1], torch.full((4, config.model.seq_len), NOT_COUNTED)
        few = (step % 2, step % 2 + 2) if over == "dp" else (2 * (step % 2), 2 * (step % 2) + 1)
        for row in range(4):
            count = FEW * (row == few[0]) if row in few else MANY // 2
            labels[row, :count] = tokens[row, 1:count + 1]
        return Data(inputs, labels, None, FEW + MANY)
    return made


@pytest.mark.parametrize("over", ["dp", "micro-batches"])
@pytest.mark.parametrize("others", [
    ["zero.stage=0"], ["zero.stage=2"], ["zero.stage=3", "zero.reduce_every=2"],
    ["parallel.pp=2", "parallel.schedule=zb-h1"], [*SP, "model.loss_chunk=100"], ["model.fused=auto"]],
    ids=lambda others: others[-1])
def test_few_tokens_that_count(others, over, monkeypatch):
    """Losses, gradients, norms and the loss of an evaluation: a mean of the ranks' means, or of the
    micro-batches', gives the one token the weight of five hundred."""
    for module in (reference, harness):
        monkeypatch.setattr(module, "data_of", uneven(over))
    config = tiny(*SMALL, *LONG, "train.eval_every=1", *others)
    ranks, want = loopback(config, 2), reference.run(config, 2)
    assert ranks.evaluated is not None
    assert_parity(ranks, want)


class Uneven(Split):
    """Held-out sequences, of which the first counts one label and the others all."""

    def __init__(self, config: Config):
        self.tokens = torch.cat([tokens_of(config, step) for step in range(config.train.eval_batches)])

    def counted(self, index: int) -> int:
        return int((self.sample(index).labels != NOT_COUNTED).sum())

    def count(self, first: int, stop: int) -> int:
        return sum(map(self.counted, range(first, stop)))

    def sample(self, index: int) -> Sample:
        row = self.tokens[index]
        labels = row[1:].clone()
        labels[1 if index < 4 else len(labels):] = NOT_COUNTED
        return Sample(row[:-1].numpy(), labels.numpy())


@pytest.mark.parametrize("others", [["parallel.dp=2"], ["parallel.pp=2"], []], ids=str)
def test_an_evaluation_of_uneven_batches(others):
    """Three global batches, of which the first has 4 tokens that count and the others 32: a mean of the
    batches' means would give the first a third of the weight."""
    config = tiny(*SMALL, "data.loss_mask=answers", "train.eval_every=1", "train.eval_batches=3",
                  "train.global_batch_size=4", *others)
    split, plan = Uneven(config), make_plan(config)
    losses = run_loopback(plan, make_mesh(config),
                          lambda comm: mean_loss(Engine(Analysis(plan), comm), split))
    samples = [split.sample(index) for index in range(12)]
    with initialized(), torch.no_grad():
        inputs, labels = (torch.from_numpy(np.stack(rows)) for rows in zip(*samples))
        batch = Batch(inputs, labels, torch.arange(12), 0, torch.tensor(4 + 2 * 32), train=False)
        want = Reference(config).loss(batch).item()
    assert set(losses) == {(losses[0][0], 4 + 2 * 32)}
    assert losses[0][0] == pytest.approx(want, rel=1e-6)


# ---------------------------------------------------------------- 5: what all ranks of tp hold

MODELS = {
    "gpt": ["model.position=learned"],  # biases of q, k, v and of the output, gains and offsets of norms
    "qwen": ["model.family=llama", "model.bias=false", "model.qkv_bias=true", "model.kv_heads=4",
             "model.heads=8"],
    "qk-norm": ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.qk_norm=true",
                "model.head_dim=6"],
    "everything": ["model.bias=true", "model.qk_norm=true", "model.qkv_bias=true", "model.head_dim=6"],
}
TENSOR: dict[str, list] = {
    "model": list(MODELS),
    "tp": [2, 4],
    "sequence_parallel": [False, True],
    "pp": [1, 2],
    "stage": [0, 1, 2, 3],
    "tied": [True, False],
}


@pytest.mark.parametrize("row", list(AllPairs(list(TENSOR.values()))),
                         ids=lambda row: "-".join(map(str, row)))
def test_what_all_ranks_of_tp_hold(row, references):
    """The gradient of every replicated parameter, on every rank that holds it; the norm that clips, and the
    step after it. Without sequence parallelism a gain's gradient is whole on each rank, with it a part; a
    norm of queries and keys has a part on each rank, of its own heads, either way."""
    name, tp, sequence_parallel, pp, stage, tied = row
    config = tiny(*SMALL, *MODELS[name], f"parallel.tp={tp}", f"parallel.pp={pp}", "parallel.dp=2",
                  f"parallel.sequence_parallel={sequence_parallel}", f"zero.stage={stage}",
                  f"model.tie_embeddings={tied}", "train.global_batch_size=4", "optimizer.clip_grad=0.5")
    plan, want = make_plan(config), references(config, 2)
    assert want.norms[0] > 1.0  # clipped
    results = run_loopback(plan, make_mesh(config),
                           lambda comm: drive(config, Engine(Analysis(plan), comm), comm, 2))
    replicated = {spec.name for spec in parameters(config.model) if not spec.axes}
    seen = {(result[5].position, result[5].on["tp"], each) for result in results
            for each in parts_that_agree(result, want.first_grads, replicated)}
    assert {each for _, _, each in seen} == replicated and len(seen) == tp * len(replicated)
    assert_parity(harness.collect(config, results), want)


def parts_that_agree(result, want: dict[str, torch.Tensor], names: set[str]) -> set[str]:
    """Of a rank: those of some parameters of whose gradient it has a part, which is the reference's."""
    found, (_, _, gradients, _, places, *_) = set(), result
    for unit, gradient in gradients.items():
        (start, stop), layout = places[unit]
        for placed in layout.placed:
            low, high = max(start, placed.start), min(stop, placed.stop)
            if placed.parameter.name in names and low < high:
                right = want[placed.parameter.name].flatten()
                part = gradient[low - start:high - start] - right[low - placed.start:high - placed.start]
                assert part.abs().max() <= 1e-5 * max(right.abs().max().item(), 1e-3), placed.parameter.name
                found.add(placed.parameter.name)
    return found


def test_layers_keep_their_names_over_pp(tmp_path):
    """Saved with one position, loaded with two and saved, loaded with four, and back: each layer has its own
    weights and optimizer state, to the bit. (A layer's number within its stage is no name.)"""
    small = ["model.layers=8", "train.global_batch_size=4", "model.qk_norm=true", f"run.dir={tmp_path / 'a'}"]

    def mesh(pp: int, tp: int, *others: str) -> Config:
        return tiny(*SMALL, *small, "optimizer.name=adamw", f"parallel.pp={pp}", f"parallel.tp={tp}", *others)

    def look(engine: Engine, comm: Comm) -> tuple[Path, Any]:
        if engine.config.train.resume == "auto":
            step(engine, comm, 2)
        else:
            resume(engine.config, engine.zero)
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin(COUNTERS)
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None, outcome
        return outcome.path, drive(engine.config, engine, comm, 0)

    results = on_ranks(mesh(1, 1), look)
    first = harness.collect(mesh(1, 1), [each for _, each in results])
    assert len({each.flatten()[0].item() for name, each in first.weights.items() if "qkv.w" in name}) == 8
    sums = manifest(results[0][0])["parameters"]
    for config in (mesh(2, 1), mesh(4, 1), mesh(2, 2, "parallel.schedule=zb-v"), mesh(1, 1)):
        again = named(config, results[0][0])
        results = on_ranks(again, look)
        got = harness.collect(again, [each for _, each in results])
        assert got.weights.keys() == first.weights.keys()
        assert all(torch.equal(got.weights[name], value) for name, value in first.weights.items())
        assert {name: entry["sums"] for name, entry in manifest(results[0][0])["parameters"].items()} == {
            name: entry["sums"] for name, entry in sums.items()}


# ---------------------------------------------------------------- 6: documents under a pipeline

DOCUMENTS = [(name, tp) for name, tp in itertools.product([*SCHEDULES], (1, 2))]


@pytest.mark.parametrize(("name", "tp"), DOCUMENTS)
def test_a_document_does_not_see_another(name, tp, monkeypatch):
    """In each sequence document B comes after document A, and only B's labels count. With other tokens in A
    the loss and all gradients have the same bits; without data.document_mask they do not."""
    def run(mask: bool, first: int) -> Ranks:
        def made(config: Config, step: int) -> Data:
            tokens = tokens_of(config, step)
            tokens[:, :first_of_b] = (tokens[:, :first_of_b] + first) % config.model.vocab
            places, first_row = torch.arange(8), torch.zeros(8, dtype=torch.int64)
            first_row[first_of_b:] = first_of_b
            labels = tokens[:, 1:].clone()
            labels[:, :first_of_b] = NOT_COUNTED
            positions = (places - first_row).expand(len(tokens), 8) if mask else None
            return Data(tokens[:, :-1], labels, positions, len(tokens) * (8 - first_of_b))

        monkeypatch.setattr(harness, "data_of", made)
        return loopback(tiny(*SMALL, "parallel.pp=2", f"parallel.tp={tp}", *schedule(name),
                             "data.loss_mask=answers", f"data.document_mask={mask}",
                             f"train.global_batch_size={max(3, SCHEDULES[name].least(2))}"), 1)

    first_of_b = 3
    same_bits([run(True, 0), run(True, 7)])
    assert run(False, 0).losses != run(False, 7).losses


# ---------------------------------------------------------------- 7: initial values

MESHES: dict[str, list[str]] = {
    "one": [], "dp": ["parallel.dp=4"], "tp": TP, "tp4": ["parallel.tp=4"], "sp": SP, "pp": ["parallel.pp=4"],
    "order": ["parallel.pp=2", *TP, "parallel.dp=2", "parallel.axis_order=tp-dp-pp"],
    "units": ["parallel.layers_per_unit=4"], "tiles": ["model.tile_linears=1KiB", *TP],
    "groups": ["parallel.dp=4", "zero.stage=3", "zero.shard_size=2"],
    **{f"zero-{stage}": ["parallel.dp=2", f"zero.stage={stage}"] for stage in range(4)},
    **{f"{offload}": ["parallel.dp=2", "zero.stage=3", *SETTINGS["offload"][offload]]
       for offload in ("cpu", "nvme", "cpu+parameters", "nvme+parameters")},
    **{name: ["parallel.pp=2", *schedule(name), *TP] for name in SCHEDULES},
}


@pytest.mark.parametrize("name", MESHES)
def test_initial_values(name):
    """Before the first step: the same bits on every mesh, under every schedule and stage of ZeRO; and no two
    layers, of one rank or of one chunk, begin equal."""
    config = tiny(*SMALL, "model.layers=8", "model.tie_embeddings=false", "train.global_batch_size=8",
                  *MESHES[name])
    weights = loopback(config, 0).weights
    specs = parameters(config.model)
    assert weights.keys() == {spec.name for spec in specs}
    for spec in specs:
        assert torch.equal(weights[spec.name], initial_values(spec, {}, {}, config.train.seed)), spec.name
    drawn = [each for spec in specs if spec.std for each in (weights[spec.name],)]
    for a, b in itertools.combinations(drawn, 2):
        count = min(a.numel(), b.numel())
        assert not torch.equal(a.flatten()[:count] / a.std(), b.flatten()[:count] / b.std())
