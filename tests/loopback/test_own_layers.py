"""User layers: torch modules as units, against the same modules in plain torch."""

from __future__ import annotations

import gc
import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import threed
from tests.harness import same_bits
from tests.loopback import test_saved
from tests.loopback.test_memory import storages
from tests.loopback.test_saved import quiet  # noqa: F401
from tests.own import Reference, assert_own, batches, own, run
from threed.base.errors import InputError, RunError
from threed.base.mesh import Mesh
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.config.load import checked, load
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.models.measure import silent_groups
from threed.models.model import layers
from threed.models.own.samples import Samples
from threed.models.tiling import layers_of, share_of
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Slot
from threed.schema import Config
from threed.spec.parameter import Share
from threed.tensor.context import Batch, Context
from threed.tensor.layers import WeightGrads

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Models(dict[str, Any]):
    """The models of the examples, small, and an odd one; each is made when it is first used."""

    def __missing__(self, name: str) -> threed.Layers:
        if name == "odd":
            made = threed.Layers(ODD, F.mse_loss, Numbers())
        elif name in ("vit", "dropout"):
            vit = example("vit")
            specs = vit.layers(4, 16, 0.2 if name == "dropout" else 0.0)
            made = threed.Layers(specs, F.cross_entropy, (vit.Shapes(64), vit.Shapes(16, 1000)))
        else:
            llama = example("llama")
            specs = llama.layers(llama.config_of(4, 16), tied=name != "untied")
            made = threed.Layers(specs, llama.loss, llama.Steps(64))
        self[name] = made
        return made


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return Models()


# ---------------------------------------------------------------- odd layers


class Odd(nn.Module):
    """Products that cannot wait for the weights' half: a weight that is used twice, one in an operation that
    is no product, one inside of a user's function. And outputs of several dtypes."""

    def __init__(self, size: int, first: bool = False):
        super().__init__()
        self.twice, self.usual = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.times = nn.Parameter(torch.randn(size, size) * 0.3)
        self.first, self.count = first, size
        self.scale: Any
        self.register_buffer("scale", torch.full((size,), 0.5))

    def forward(self, given: Any) -> Any:
        x, (ids, more) = (given, (torch.arange(self.count), [given.double()])) if self.first else given
        products = torch.einsum("bi,ij->bj", x, self.times)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) + products * self.scale
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

PP, DP, FULL = "parallel.pp=2", "parallel.dp=2", ["activation.policy=full"]
CORE = {"odd": [(PP, DP, "parallel.schedule=zb-h1", "zero.stage=3", *FULL)]}
SAMPLE = {
    "vit": [
        ("zero.stage=0",),
        (PP, DP, "parallel.schedule=gpipe", "zero.stage=0", "train.micro_batch_size=2"),
        (PP, DP, "parallel.schedule=zb-h1", "zero.stage=3"),
        (PP, DP, "parallel.schedule=interleaved", "parallel.virtual_stages=2", "zero.stage=1"),
        ("parallel.pp=4", "parallel.schedule=zb-h1", "zero.stage=2"),
        (PP, DP, "parallel.schedule=zb-v", "zero.stage=1", *FULL, "activation.contiguous=true",
         "train.eval_every=1"),
        (PP, DP, "parallel.schedule=dualpipe-v", "zero.stage=3", "offload.optimizer=cpu",
         "offload.parameters=cpu"),
        (PP, DP, "parallel.schedule=auto", "zero.stage=2", "parallel.activation_limit=1.5x"),
        (PP, DP, "parallel.schedule=zb-h1", "precision.dtype=bf16", "zero.stage=2"),
        (PP, "parallel.dp=4", "zero.shard_size=2", "zero.stage=3", "zero.persist_below=100"),
    ],
    "dropout": [(PP, DP, "parallel.schedule=zb-h1", "activation.policy=full", "train.micro_batch_size=2",
                 "train.eval_every=1")],
    "llama": [
        (PP, DP, "parallel.schedule=zb-v", "zero.stage=3"),
        (PP, DP, "zero.stage=2", *FULL, "activation.offload=cpu"),
        (PP, DP, "parallel.schedule=1f1b", "zero.stage=1", "precision.dtype=bf16"),
        (PP, DP, "parallel.schedule=zb-h2", "zero.stage=2", "optimizer.clip_grad=0.5"),
        (PP, DP, "parallel.layers_per_unit=2", "activation.policy=full", "offload.optimizer=cpu"),
    ],
    "untied": [(PP, DP, "parallel.schedule=zb-h1", "zero.stage=3", "activation.policy=full")],
    "odd": [
        (PP, DP, "parallel.schedule=1f1b", "zero.stage=3"),
        (PP, DP, "parallel.schedule=zb-v", "zero.stage=1", *FULL, "activation.offload=cpu"),
    ],
}


def cells(some: dict[str, list[tuple[str, ...]]], *marks: Any) -> list[Any]:
    return [pytest.param(name, cell, id="-".join([name, *(text.rpartition(".")[2] for text in cell)]),
                         marks=marks)
            for name, each in some.items() for cell in each]


@pytest.mark.parametrize("name, cell", [*cells(CORE, pytest.mark.core), *cells(SAMPLE)])
def test_cell(models, name, cell):
    """Each schedule, ZeRO stage, recomputation, offload and precision, as for our own layers: losses,
    gradients and weights are those of plain torch."""
    assert_own(own(models[name], *cell))


def test_stages_of_zero_are_equal_to_the_bit(models):
    same_bits([run(own(models["llama"], PP, DP, f"zero.stage={stage}",
                       *["zero.reduce_every=step"] * (stage > 1)), 3) for stage in (0, 1, 2, 3)])


# ---------------------------------------------------------------- what is measured


class OurBlock(nn.Module):
    """threed's own block, as if it were a user's."""

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
    """FLOPs or saved bytes that are counted twice, or not at all: our block is measured as a user's, and
    its declaration is another account."""
    specs = [threed.Spec(Stream, 32), threed.Spec(OurBlock, BLOCKS[name]), threed.Spec(nn.Linear, 32, 1)]
    family = threed.Layers(specs, mean, Vectors(8, 32))
    config = load(None, [*SMALL, *BLOCKS[name]])
    declared = layers_of(config)[1].cost(share_of(config))
    with initialized():
        measured = family.layers(None)[1].cost(Share(sequences=2))
    assert (measured.flops, measured.saved_bytes()) == (declared.flops, declared.saved_bytes())


def test_attention_and_convolutions_have_flops(models):
    """By the formulas: of the block 24 B S D^2 + 4 B S^2 D; of the patches, each 3 x 8 x 8 numbers times
    D."""
    first, block, *_ = (layer.cost(Share(sequences=3)) for layer in layers(own(models["vit"]).model))
    assert block.flops == 24 * 3 * 17 * 16**2 + 4 * 3 * 17**2 * 16
    assert first.flops == 2 * 3 * 16 * (3 * 8 * 8) * 16


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name, others", [("llama", []), ("llama", ["zero.stage=3"]), ("odd", []),
                                          ("vit", ["precision.dtype=bf16"])])
def test_kept_is_what_the_plan_says(models, monkeypatch, name, others):
    """The slots `saved` and `operands`, against the storages that are alive in a step, within 2%. The plan
    counts data that are saved, which here were there before."""
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
        name = plan.table.units[unit].name
        assert 0.98 * expected - ends - 64 <= size <= 1.02 * expected + 64, (kind, name)


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
        engine, counts = Engine(Analysis(plan), comm), []
        for step in range(13):
            engine.train_step(batches(config, comm, step))
            comm.all_gather(None)
            if comm.rank == 0 and step in (4, 12):
                counts.append(len(storages(gc.get_objects())))
            comm.all_gather(None)
        return counts

    gc.collect()
    gc.disable()
    try:
        early, late = run_loopback(plan, make_mesh(config), work)[0]
    finally:
        gc.enable()
    assert early == late


# ---------------------------------------------------------------- checkpoints


def on_ranks(config: Config, work: Callable[[Engine, Comm], Any]) -> Any:
    config = checked(config)
    plan = make_plan(config)
    torch.set_num_threads(1)
    return run_loopback(plan, make_mesh(config), lambda comm: work(Engine(Analysis(plan), comm), comm))[0]


def losses(engine: Engine, comm: Comm, count: int) -> list[float]:
    first = engine.zero.step_number
    return [engine.train_step(batches(engine.config, comm, first + step))[0].loss for step in range(count)]


def test_another_mesh_goes_on(models, tmp_path):
    """A checkpoint of one mesh, schedule and ZeRO stage is that of another: with the tied matrix once."""
    def save(engine: Engine, comm: Comm) -> list[float]:
        losses(engine, comm, 2)
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin({"samples": 0, "skipped": 0, "wandb_id": None})
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None
        return losses(engine, comm, 2)

    def go_on(engine: Engine, comm: Comm) -> list[float]:
        resume(engine.config, engine.zero, lambda _: None)
        assert engine.zero.step_number == 2
        return losses(engine, comm, 2)

    there = f"run.dir={tmp_path}"
    wanted = on_ranks(own(models["llama"], PP, DP, "zero.stage=3", there), save)
    for cell in ((PP, DP, "zero.stage=3"), ("parallel.pp=4", "parallel.schedule=zb-h1", "zero.stage=1"), ()):
        got = on_ranks(own(models["llama"], *cell, there), go_on)
        assert got == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(InputError, match=r"is of another model: model\.family"):
        on_ranks(own(models["vit"], there), go_on)


# ---------------------------------------------------------------- what is refused


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(x)


class Varying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return [self.out(x)] * self.calls


def linear(**others: Any) -> threed.Spec:
    return threed.Spec(nn.Linear, 6, 6, **others)


def of(function: Callable[[nn.Module, Any], Any]) -> threed.Spec:
    return linear(forward=function)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.bias.requires_grad_(False)


LAST, NO_MODULE = threed.Spec(nn.Linear, 6, 3), cast(Any, dict)
GIVEN = {  # what is wrong when it is given: (layers, loss, data), message
    "no list": ((5, F.mse_loss, Numbers()), "layers is a int: give a list of threed.Spec"),
    "a module": (([nn.Linear(6, 6), LAST], F.mse_loss, Numbers()),
                 r"layers\[0\] is a Linear: give threed.Spec(cls, *args)"),
    "empty": (([], F.mse_loss, Numbers()), "layers has 0 layers: give two at least"),
    "one": (([LAST], F.mse_loss, Numbers()), "layers has 1 layers: give two at least"),
    "no loss": (([linear(), LAST], None, Numbers()), "loss is a NoneType: give a function"),
    "a loss that learns": (([linear(), LAST], nn.Linear(3, 1), Numbers()), "loss has parameters"),
    "no data": (([linear(), LAST], F.mse_loss, None), "data is a NoneType: give a map-style data set"),
    "no items": (([linear(), LAST], F.mse_loss, []), "data has no items"),
    "no pairs": (([linear(), LAST], F.mse_loss, [torch.ones(6)] * 3), "item 0 of the data set is a Tensor"),
    "a text": (([linear(), LAST], F.mse_loss, [("a", torch.ones(3))]), "item 0 of the data set holds a str"),
    "tied in the middle": (([linear(), linear(tied="a"), LAST], F.mse_loss, Numbers()),
                           r"layers[1] (Linear) is tied as 'a': only the first and the last layer"),
    "tied alone": (([linear(tied="a"), LAST], F.mse_loss, Numbers()), "tied='a' is the name of one layer"),
}
PLANNED = {  # when it is planned: layers, loss, message
    "shape of a tie": ([linear(tied="a"), threed.Spec(nn.Linear, 6, 3, tied="a")], F.mse_loss,
                       "Linear.1: weight has the shape [3, 6], and shares tied.a.weight of shape [6, 6]"),
    "path of a tie": ([linear(tied={"a": "table"}), linear(tied={"a": "weight"})], F.mse_loss,
                      "layer Linear.0 is tied as 'a' by its parameter table, and has weight, bias"),
    "arguments": ([threed.Spec(nn.Linear, 6), LAST], F.mse_loss, "Linear.0: Linear(6) failed"),
    "no module": ([threed.Spec(NO_MODULE), LAST], F.mse_loss, "layer dict.0: dict() returned a dict"),
    "frozen": ([threed.Spec(Frozen), LAST], F.mse_loss, "parameter bias does not require a gradient"),
    "buffer": ([linear(), threed.Spec(Counting), LAST], F.mse_loss, "buffer calls (in a Counting)"),
    "batch norm": ([linear(), threed.Spec(nn.BatchNorm1d, 6), LAST], F.mse_loss, "(in a BatchNorm1d)"),
    "varying": ([threed.Spec(Varying), of(lambda m, x: m(x[0])), LAST], F.mse_loss, "and when it is called"),
    "unused": ([linear(), of(lambda m, x: x @ m.weight), LAST], F.mse_loss, "parameter bias gets no"),
    "no gradient": ([linear(), of(lambda m, x: m(x).argmax(-1)), LAST], F.mse_loss, "none of it needs"),
    "a text": ([linear(), of(lambda m, x: {"x": m(x), "y": object()}), LAST], F.mse_loss, "is a object"),
    "values": ([linear(), of(lambda m, x: m(x) * m(x).sum().item()), LAST], F.mse_loss, "cannot be measured"),
    "checkpoint": ([linear(), of(lambda m, x: checkpoint(m, x, use_reentrant=False)), LAST], F.mse_loss,
                   "layer Linear.1 keeps by itself what backward needs"),
    "reentrant": ([linear(), of(lambda m, x: checkpoint(m, x, use_reentrant=True)), LAST], F.mse_loss,
                  "set activation.policy to full or budget"),
    "sizes": ([linear(), threed.Spec(nn.Linear, 7, 6), LAST], F.mse_loss,
              "layer Linear.1 cannot be measured: RuntimeError"),
    "no scalar": ([linear(), LAST], lambda out, _: out, "the loss of layer Linear.1's output is float32"),
    "no number": ([linear(), LAST], lambda out, _: 1.0, "the loss of layer Linear.1's output is a float"),
}
KEYS = {
    "parallel.tp=2": "parallel.tp=2: the layers of a model of your own are whole on each rank",
    "model.hidden=64": "model.hidden=64: the layers are your own",
    "model.tile_linears=1KiB": "model.tile_linears=1KiB: the layers are your own",
    "data.source=x": "data.source=x: the data were given with the layers",
    "data.document_mask=true": "data.document_mask=True: the data were given with the layers",
    "activation.policy=selective": "threed does not know the pieces of layers of your own",
    "train.eval_every=2": "there are no samples to validate with",
    "train.sample_every=2": "layers of your own write no text",
    "run.cuda_graphs=true": "in layer Linear.0 shapes depend on what its module does",
}


@pytest.mark.parametrize("name", GIVEN)
def test_bad_layers(name):
    given, message = GIVEN[name]
    with pytest.raises(InputError, match=re.escape(message.replace("\\", ""))):
        threed.Layers(*given)


@pytest.mark.parametrize("name", PLANNED)
def test_bad_modules(name):
    """A mistake that would show up on some rank, in the middle of a step, or never."""
    specs, loss, message = PLANNED[name]
    with pytest.raises(InputError, match=re.escape(message)):
        threed.plan(own(threed.Layers(specs, loss, Numbers()), "train.micro_batch_size=2"))


@pytest.mark.parametrize("key", KEYS)
def test_keys_without_effect(key):
    """A key that is read and has no effect."""
    family = threed.Layers([linear(), LAST], F.mse_loss, Numbers())
    with pytest.raises(InputError, match=re.escape(KEYS[key])):
        threed.plan(own(family, key))


def test_items_that_differ():
    items = [(torch.ones(6), torch.ones(3)), (torch.ones(5), torch.ones(3))]
    samples = Samples(items, None)
    with pytest.raises(InputError, match=r"item 1 of the data set has float32 \[5\], float32 \[3\]"):
        samples.batch(range(2))


def test_an_output_that_changes_in_a_run(models):
    """Shapes that depend on what is in a tensor, which nothing measures."""
    def narrow(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)[:, :6 if isinstance(x, FakeTensor) else 5]

    specs = [linear(), of(narrow), LAST]
    config = checked(own(threed.Layers(specs, F.mse_loss, Numbers())))
    with pytest.raises(RunError, match=r"Linear\.1 has returned float32 \[1, 5\], and when it was measured"):
        run(config, 1)


def test_a_backward_without_a_second_half():
    """A schedule that fills bubbles with nothing, and says nothing."""
    def doubled(module: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, module.weight * 2, module.bias)

    specs = [linear(), of(doubled), linear(), LAST]
    family = threed.Layers(specs, F.mse_loss, Numbers())
    warned = threed.check(own(family, "parallel.pp=2", "parallel.schedule=zb-h1"))["warnings"]
    assert [line.partition(":")[0] for line in warned] == ["layer Linear.1"]
    assert not threed.check(own(family, "parallel.pp=2"))["warnings"]


def test_initial_values_come_from_the_modules_own_code(models):
    """Values that another generator drew, or those of another layer."""
    weights = Reference(own(models["llama"])).masters
    assert weights["Decoder.1.layer.self_attn.q_proj.weight"].std() > 0
    assert not torch.equal(weights["Decoder.1.layer.self_attn.q_proj.weight"],
                           weights["Decoder.2.layer.self_attn.q_proj.weight"])
    other = Reference(own(models["llama"], "train.seed=5")).masters
    assert not torch.equal(weights["tied.word"], other["tied.word"])
    again = Reference(own(models["llama"], "parallel.dp=4")).masters
    assert torch.equal(weights["tied.word"], again["tied.word"])
