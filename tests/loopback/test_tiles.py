"""Layers cut into tiles against the reference, which is never cut; tiles and whole layers read each other's
checkpoints."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness import FP32, SIXTEEN, Ranks, assert_parity, batches, collect, loopback, tiny
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.models.model import own_parameters
from threed.models.tiling import cut_layers, layers_of, tile_of
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.tensor.random import initial_values

# Embedding and head of 4 tiles, attention of 4, MLPs of 8 (fewer where tp or 16 bit make a rank's part
# smaller).
SMALL = ["model.layers=2", "model.tie_embeddings=false"]
TILED = [*SMALL, "model.tile_linears=4KiB"]
TP, SP = ["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
FULL, BF16 = ["activation.policy=full"], ["precision.dtype=bf16"]
LLAMA = ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.kv_heads=4"]
ZB, ZERO_3 = ["parallel.pp=2", "parallel.schedule=zb-h1"], ["parallel.dp=2", "zero.stage=3"]
INTERLEAVED = ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"]
OFFLOAD = ["offload.optimizer=cpu", "offload.parameters=cpu"]

CASES = {
    "alone": [], "tp": ["model.tile_linears=2KiB", *TP], "sp": ["model.tile_linears=2KiB", *SP],
    "1f1b": ["parallel.pp=2", "train.eval_every=1"], "zb-h1-sp": [*ZB, *SP],
    "interleaved": [*INTERLEAVED, *ZERO_3],
    "zero-0": ["parallel.dp=2", "zero.stage=0"], "zero-1": ["parallel.dp=2", "zero.stage=1"],
    "zero-2-zb-h1": ["parallel.dp=2", "zero.stage=2", *ZB], "zero-3-full": [*ZERO_3, *FULL],
    "zero-3-window": [*ZERO_3, "zero.residency=3", "zero.prefetch=2", "zero.persist_below=100"],
    "full-zb-h1": [*FULL, *ZB], "every-2": [*FULL, "activation.every=2"],
    "selective": ["activation.policy=selective"],
    "partition": [*FULL, *TP, "activation.partition=true"],
    "kept-on-cpu": [*FULL, *INTERLEAVED, "activation.offload=cpu"],
    "arena": [*FULL, "activation.contiguous=true", "parallel.pp=2"], "offload": [*ZERO_3, *OFFLOAD],
    "llama": [*LLAMA, *TP], "llama-zb-h1-sp": [*LLAMA, *ZB, *SP],
    "qk-norm": [*LLAMA, "model.qk_norm=true", *TP],
    "qk-norm-zb-h1-sp": [*LLAMA, "model.qk_norm=true", *ZB, *SP],
    "qk-norm-zero-3-full": ["model.qk_norm=true", "model.head_dim=8", *ZERO_3, *FULL],
    "learned": ["model.position=learned", *ZB, *SP],
    "dropout": ["model.dropout=0.1", "model.attention_dropout=0.1", *TP, *ZB],
    "bf16": [*BF16, *ZERO_3], "bf16-zb-h1-sp": [*BF16, *ZB, *SP], "bf16-full": [*BF16, *FULL, *TP],
    "fp16": ["precision.dtype=fp16", "precision.loss_scale=1024", "parallel.dp=2"],
    # most tiles hold no token at all
    "padding": ["model.vocab=30", "model.vocab_multiple=128", "model.tile_linears=4KiB", *TP],
    # its blocks alone are cut
    "tied": ["model.tie_embeddings=true", "model.tile_linears=16KiB", "parallel.pp=2"],
    "branches": ["model.tile_linears=32KiB"],  # blocks are cut in two, and no further
}
SLOW = {"1f1b", "zero-0", "zero-1", "zero-3-window", "every-2", "selective", "arena", "offload", "learned",
        "bf16-full", "fp16",
        "llama", "branches", "interleaved", "bf16"}


def compare(overrides: list[str], references) -> None:
    config = tiny(*TILED, *overrides)
    steps, tolerance = (3, FP32) if config.precision.dtype == "fp32" else (4, SIXTEEN)
    assert_parity(loopback(config, steps),
                  references(tiny(*TILED, *overrides, "model.tile_linears=null"), steps), tolerance)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
                                  for name in CASES])
def test_parity(name, references):
    """A part of a layer that is in no tile, or in two: loss, norm, every gradient and the weights."""
    compare(CASES[name], references)


PRODUCT = list(itertools.product(("1f1b", "zb-h1", "zb-v", "interleaved"), range(4), ("none", "full"),
                                 ("", "tp", "sp")))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, stage, policy, cut", PRODUCT)
def test_product(schedule, stage, policy, cut, references):
    virtual = ["parallel.virtual_stages=2"] if schedule == "interleaved" else []
    compare(["parallel.pp=2", "parallel.dp=2", f"parallel.schedule={schedule}", f"zero.stage={stage}",
             f"activation.policy={policy}", *virtual, *{"": [], "tp": TP, "sp": SP}[cut]], references)


@pytest.mark.core
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("others", [[], LLAMA])
def test_initial_values(others, tp):
    """Tiles whose weights are drawn anew, or for another place: put together they are the whole parameter, to
    the bit."""
    whole, cut = (layers_of(tiny(*SMALL, *others, f"parallel.tp={tp}", *tiled))
                  for tiled in ([], ["model.tile_linears=4KiB"]))
    assert any(tile_of(layer).count > 1 for layer in cut)
    parts: dict[str, list] = {}
    for parameter in (p for layer in cut for p in own_parameters(layer)):
        assert len(parts.setdefault(parameter.name, [])) == parameter.tile.index, "in order"
        parts[parameter.name].append(parameter)
    names = [p.name for layer in whole for p in own_parameters(layer)]
    assert sorted(names) == sorted(parts)
    for p in (p for layer in whole for p in own_parameters(layer)):
        want, seen = initial_values(p, {}, {}, 5), torch.full(p.stored, torch.nan)
        for part, rank in itertools.product(parts[p.name], range(tp)):
            offset, shape = part.part({"tp": tp}, {"tp": rank})
            seen[tuple(slice(at, at + size) for at, size in zip(offset, shape))] = initial_values(
                part, {"tp": tp}, {"tp": rank}, 5)
        assert torch.equal(want, seen), p.name


# ---------------------------------------------------------------- memory

LARGE = ["model.layers=4", "model.hidden=64", "model.vocab=1000", "model.tie_embeddings=false",
         "zero.stage=3", "parallel.dp=2"]


def gathered(config: Config) -> int:
    """Bytes of the buffers in which whole parameters lie in turn, as the engine makes them."""
    plan = make_plan(config)

    def work(comm: Comm) -> int:
        params = Engine(Analysis(plan), comm).storage.params
        return sum(first.untyped_storage().nbytes() for first in params.first.values())

    (allocated,) = set(run_loopback(plan, make_mesh(config), work))
    planned = sum(numel * count for numel, count in Analysis(plan).buffers(0).params.items())
    assert allocated == planned * plan.table.elements.param
    return allocated


def test_no_more_than_tiles_is_gathered():
    """Under ZeRO-3 with one unit resident and the next on its way, two tiles are whole, not two blocks and a
    head; and no buffers of another size are made for the tiles that have a norm or a bias besides."""
    limit = 16 * 1024
    rest = 4 * 4 * 64  # a tile's norm, bias and padding come on top
    whole, tiled = (gathered(tiny(*LARGE, *others)) for others in ([], [f"model.tile_linears={limit}"]))
    assert whole > 256 * 1024  # the head alone
    assert 2 * limit <= tiled <= 2 * (limit + rest)


# ---------------------------------------------------------------- checkpoints


def from_checkpoint(config: Config, path: Path) -> Config:
    return replace(config, train=replace(config.train, resume=str(path)))


def go_on(config: Config, steps: int, path: Path | None = None) -> tuple[Ranks, Path]:
    """Take some steps from a checkpoint (or from the start), and save a checkpoint."""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm):
        engine = Engine(Analysis(plan), comm)
        if path is not None:
            resume(from_checkpoint(config, path), engine.zero)
        first = engine.zero.step_number
        done = [engine.train_step(batches(config, comm, first + step))[0] for step in range(steps)]
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin({"samples": 0, "skipped": 0, "wandb_id": None})
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None
        state = {unit: torch.clone(each.optimizer_state.master) for unit, each in engine.states.items()}
        places = {unit: (each.part.owned, each.part.layout) for unit, each in engine.states.items()}
        moments = {unit: torch.clone(each.optimizer_state.buffers["exp_avg"])
                   for unit, each in engine.states.items()}
        losses, norms = [clipped.loss for clipped in done], [clipped.grad_norm for clipped in done]
        return losses, norms, moments, state, places, comm.here, {}, outcome.path

    results = run_loopback(plan, make_mesh(config), work)
    return collect(config, results), results[0][-1]


def test_checkpoints_know_no_tiles(tmp_path, references):
    """Tiles -> whole layers -> other tiles, each on another mesh: weights and moments to the bit, then as
    without a stop."""
    def at(name: str, *others: str) -> Config:
        return tiny(*SMALL, f"run.dir={tmp_path / name}", *others)

    tiled = at("tiled", "model.tile_linears=4KiB", *TP, *ZERO_3)
    first, path = go_on(tiled, 2)
    whole = at("whole", "parallel.pp=2")
    same, _ = go_on(whole, 0, path)
    for mine, theirs in ((same.weights, first.weights), (same.first_grads, first.first_grads)):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    second, path = go_on(whole, 1, path)
    third, _ = go_on(at("other", "model.tile_linears=8KiB", *SP), 1, path)
    assert first.losses + second.losses + third.losses == pytest.approx(references(whole, 4).losses, rel=1e-5)


@pytest.mark.core
def test_fewest_tiles():
    """More tiles than needed, or unequal ones: heads and the vocabulary divide."""
    for limit, counts in (("4KiB", (4, 4, 8, 4)), ("6KiB", (4, 4, 8, 4)), ("8KiB", (2, 2, 4, 2)),
                          ("16KiB", (1, 1, 2, 1))):
        embedding, block, _, head = cut_layers(tiny(*SMALL, f"model.tile_linears={limit}"))
        tiles = [sum(".attention" in layer.name for layer in block),
                 sum(".mlp" in layer.name for layer in block)]
        assert (len(embedding), *tiles, len(head)) == counts
