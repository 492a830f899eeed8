"""Layers of somebody's own: torch modules as units, against the same modules in plain torch."""

from __future__ import annotations

import gc
import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import threed
from tests.harness import same_bits
from tests.loopback import test_saved
from tests.loopback.test_memory import storages
from tests.loopback.test_saved import quiet  # noqa: F401
from tests.own import USUAL, Reference, assert_own, batches, own, run
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm import Comm, initialized
from threed.config import checked, load
from threed.doors.layers.model import OwnLayer
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.errors import InputError
from threed.mesh import Mesh
from threed.models.model import layers
from threed.models.spec import Share
from threed.models.tiling import layers_of, share_of
from threed.planner import make_mesh, make_plan
from threed.program.instruction import Slot
from threed.tensor.context import Batch, Context
from threed.tensor.layers import WeightGrads
from threed.tensor.measure import silent_groups

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    vit, llama = example("vit"), example("llama")
    images = vit.Shapes(64), vit.Shapes(16, 1000)
    return {
        "vit": threed.Layers(vit.layers(4, 16), F.cross_entropy, images),
        "dropout": threed.Layers(vit.layers(4, 16, 0.2), F.cross_entropy, images),
        "llama": threed.Layers(llama.layers(llama.config_of(4, 16)), llama.loss, llama.Steps(64)),
        "untied": threed.Layers(llama.layers(llama.config_of(4, 16), False), llama.loss, llama.Steps(64)),
        "odd": threed.Layers(ODD, F.mse_loss, Numbers()),
    }


# ---------------------------------------------------------------- odd layers


class Odd(nn.Module):
    """Products that cannot wait for the weights' half: a weight that is used twice, one in an operation that is
    no product, one inside of somebody's own function. And outputs of several dtypes."""

    def __init__(self, size: int, first: bool = False):
        super().__init__()
        self.twice, self.usual = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.times = nn.Parameter(torch.randn(size, size) * 0.3)
        self.first, self.count = first, size
        self.register_buffer("scale", torch.full((size,), 0.5))

    def forward(self, given: Any) -> Any:
        x, (ids, more) = (given, (torch.arange(self.count), [given.double()])) if self.first else given
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) + torch.einsum("bi,ij->bj", x, self.times) * self.scale
        x = torch.tanh(Squared.apply(x * self.times[0]) + self.usual(x))
        return x, (ids + 1, [more[0] * 2 + x.double()])


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Sum(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.out = nn.Linear(size, 3)

    def forward(self, given: Any) -> torch.Tensor:
        x, (ids, more) = given
        return self.out(x + more[0].float() * 0.1 + ids)


class Numbers:
    """Items of numpy arrays."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(index)
        return draw.normal(size=6).astype(np.float32), draw.normal(size=3).astype(np.float32)


ODD = [threed.Spec(Odd, 6, True), *(threed.Spec(Odd, 6) for _ in range(4)), threed.Spec(Sum, 6)]


# ---------------------------------------------------------------- the contract's sample

PP, DP = "parallel.pp=2", "parallel.dp=2"
CORE = {
    "vit": [(PP, DP, "parallel.schedule=zb-h1", "zero.stage=3")],
    "llama": [(PP, DP, "zero.stage=2", "activation.policy=full", "activation.offload=cpu")],
}
SAMPLE = {
    "vit": [
        ("zero.stage=0",),
        (PP, DP, "parallel.schedule=gpipe", "zero.stage=0", "train.micro_batch_size=2"),
        (PP, DP, "parallel.schedule=interleaved", "parallel.virtual_stages=2", "zero.stage=1"),
        ("parallel.pp=4", "parallel.schedule=zb-h1", "zero.stage=2"),
        (PP, DP, "parallel.schedule=zb-v", "zero.stage=1", "activation.policy=full", "activation.contiguous=true",
         "train.eval_every=1"),
        (PP, DP, "parallel.schedule=dualpipe-v", "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"),
        (PP, DP, "parallel.schedule=auto", "zero.stage=2", "parallel.activation_limit=1.5x"),
        (PP, DP, "parallel.schedule=zb-h1", "precision.dtype=bf16", "zero.stage=2"),
        (PP, "parallel.dp=4", "zero.shard_size=2", "zero.stage=3", "zero.persist_below=100"),
    ],
    "dropout": [(PP, DP, "parallel.schedule=zb-h1", "activation.policy=full", "train.micro_batch_size=2",
                 "train.eval_every=1")],
    "llama": [
        (PP, DP, "parallel.schedule=zb-v", "zero.stage=3"),
        (PP, DP, "parallel.schedule=1f1b", "zero.stage=1", "precision.dtype=bf16"),
        (PP, DP, "parallel.schedule=zb-h2", "zero.stage=2", "optimizer.clip_grad=0.5"),
        (PP, DP, "parallel.layers_per_unit=2", "activation.policy=full", "offload.optimizer=cpu"),
    ],
    "untied": [(PP, DP, "parallel.schedule=zb-h1", "zero.stage=3", "activation.policy=full")],
    "odd": [
        (PP, DP, "parallel.schedule=zb-h1", "zero.stage=3"),
        (PP, DP, "parallel.schedule=zb-v", "zero.stage=1", "activation.policy=full", "activation.offload=cpu"),
    ],
}


def cells(some: dict[str, list[tuple[str, ...]]], *marks: Any) -> list[Any]:
    return [pytest.param(name, cell, id=f"{name}-{'-'.join(text.rpartition('.')[2] for text in cell)}", marks=marks)
            for name, each in some.items() for cell in each]


@pytest.mark.parametrize("name, cell", [*cells(CORE, pytest.mark.core), *cells(SAMPLE)])
def test_cell(models, name, cell):
    """Each schedule, ZeRO stage, recomputation, offload and precision, as for our own layers: losses, gradients
    and weights are those of plain torch."""
    assert_own(own(models[name], *cell))


def test_stages_of_zero_are_equal_to_the_bit(models):
    same_bits([run(own(models["llama"], PP, DP, f"zero.stage={stage}",
                       *["zero.reduce_every=step"] * (stage > 1)), 3) for stage in (0, 1, 2, 3)])


# ---------------------------------------------------------------- what is measured


class OurBlock(nn.Module):
    """threed's own block, as if it were somebody's."""

    def __init__(self, overrides: tuple[str, ...]):
        super().__init__()
        config = load(None, [*SMALL, *overrides])
        share = share_of(config)
        self.block, groups = layers_of(config)[1], silent_groups(share, Counter())
        context = Context(config.model, groups, False, torch.float32, WeightGrads())
        self.block.build(context, {p.key: nn.Parameter(torch.empty(p.module_shape({})))
                                   for p in self.block.parameters()})
        self.parts = nn.ModuleList(self.block.modules())
        empty = torch.empty(0, dtype=torch.int64)
        self.batch = Batch(empty, empty, empty, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, self.batch)


class Stream(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).transpose(0, 1).contiguous()


class Vectors:
    """One item."""

    def __init__(self, *shape: int):
        self.shape = shape

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index:
            raise IndexError(index)
        return torch.ones(self.shape), torch.ones(())


SMALL = ["model.layers=1", "model.hidden=32", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.micro_batch_size=2", "train.global_batch_size=2"]
BLOCKS = {
    "gelu": (), "no bias": ("model.bias=false",), "rmsnorm": ("model.norm=rmsnorm",),
    "learned": ("model.position=learned",),
    "llama": ("model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.kv_heads=2"),
    "qk norm": ("model.qk_norm=true", "model.qkv_bias=true", "model.bias=false"),
}


def mean(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


@pytest.mark.parametrize("name", BLOCKS)
def test_our_block_costs_what_it_declares(name):
    """FLOPs or saved bytes that are counted twice, or not at all: our block is measured as somebody's, and its
    declaration is another account."""
    specs = [threed.Spec(Stream, 32), threed.Spec(OurBlock, BLOCKS[name]), threed.Spec(nn.Linear, 32, 1)]
    family = threed.Layers(specs, mean, Vectors(8, 32))
    config = load(None, [*SMALL, *BLOCKS[name]])
    declared = layers_of(config)[1].cost(share_of(config))
    with initialized():
        measured = family.layers(None)[1].cost(Share(sequences=2))
    assert (measured.flops, measured.saved_bytes()) == (declared.flops, declared.saved_bytes())


def test_attention_and_convolutions_have_flops(models):
    """By the formulas: of the block 24 B S D^2 + 4 B S^2 D; of the patches, each 3 x 8 x 8 numbers times D."""
    first, block, *_ = (layer.cost(Share(sequences=3)) for layer in layers(own(models["vit"]).model))
    assert block.flops == 24 * 3 * 17 * 16**2 + 4 * 3 * 17**2 * 16
    assert first.flops == 2 * 3 * 16 * (3 * 8 * 8) * 16


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name, others", [("llama", []), ("llama", ["zero.stage=3"]), ("odd", []),
                                          ("vit", ["precision.dtype=bf16"])])
def test_kept_is_what_the_plan_says(models, monkeypatch, name, others):
    """The slots `saved` and `operands`, against the storages that are alive in a step, within 2%. The plan counts
    data that are saved, which here were there before."""
    config = checked(own(models[name], "parallel.schedule=zb-h1", "train.micro_batch_size=2",
                         "train.global_batch_size=2", *others))
    monkeypatch.setattr(test_saved, "fresh", lambda config: batches(config, HERE, 0)(0))
    plan, sizes = test_saved.measured(config)
    batch = batches(config, HERE, 0)(0)
    data = sum(each.nbytes for each in tree_leaves((batch.inputs, batch.targets)))
    assert len(sizes) == 2 * len(plan.table.units)
    for (kind, unit), size in sizes.items():
        expected = plan.table.size(Slot(kind, unit))
        ends = data if unit in (0, plan.table.last) else 0
        assert 0.98 * expected - ends - 64 <= size <= 1.02 * expected + 64, (kind, plan.table.units[unit].name)


class Here:
    """The place of the only rank."""

    here = Mesh().coordinate(0)


HERE: Any = Here()


def test_flat_over_steps(models):
    """A graph that nobody frees: with its own result saved, and with halves of backward that do not free what
    they have used. The garbage collector is off."""
    config = checked(own(models["odd"], PP, DP, "parallel.schedule=zb-h1", "zero.stage=3"))
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> list[int]:
        engine, counts = Engine(config, plan, comm), []
        for step in range(13):
            engine.train_step(batches(config, comm, step))
            comm.exchange(None)
            if comm.rank == 0 and step in (4, 12):
                counts.append(len(storages(gc.get_objects())))
            comm.exchange(None)
        return counts

    gc.collect()
    gc.disable()
    try:
        early, late = run_loopback(plan, make_mesh(config), work)[0]
    finally:
        gc.enable()
    assert early == late
