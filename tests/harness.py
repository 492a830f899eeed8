"""Run a config on all ranks, in loopback, on the reference's data; and put its shards together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.reference import tokens_of
from threed.comm import Comm, ProcessComm
from threed.config import load
from threed.engine.engine import Engine
from threed.engine.loopback import channel_pairs, run_loopback
from threed.models.gpt import Batch
from threed.planner import make_mesh, make_plan
from threed.program.instruction import Op
from threed.program.table import Plan
from threed.schema import Config

TINY = ["model.layers=6", "model.hidden=32", "model.heads=8", "model.vocab=120", "model.vocab_multiple=64",
        "model.seq_len=16", "train.global_batch_size=8", "train.micro_batch_size=1", "train.steps=5",
        "optimizer.lr=1e-3", "optimizer.eps=1e-2", "optimizer.clip_grad=0", "optimizer.schedule=constant",
        "model.init_std=0.1"]


def tiny(*overrides: str) -> Config:
    """A model small enough for thousands of runs; no clipping, no warm-up, so that no fault can hide."""
    return load(None, [*TINY, *overrides])


def schedule_config(name: str, p: int, tp: int, zero: int, count: str, *others: str) -> Config:
    """A model with a unit for each stage (two a rank), and `count` micro-batches (a number, or p, p+1, 2p, 3p+1)."""
    m = {"p": p, "p+1": p + 1, "2p": 2 * p, "3p+1": 3 * p + 1}.get(count) or int(count)
    virtual = ["parallel.virtual_stages=2"] if name in ("interleaved", "breadth-first") else []
    return tiny(f"model.layers={2 * p}", "model.hidden=16", "model.seq_len=8", f"parallel.pp={p}", f"parallel.tp={tp}",
                f"parallel.schedule={name}", f"zero.stage={zero}", f"train.global_batch_size={m}", *virtual, *others)


@dataclass
class Ranks:
    losses: list[float]
    norms: list[float]
    first_grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    sent: list[dict[str, int]]


def batches(config: Config, comm: Comm, step: int) -> Callable[[int], Batch]:
    tokens = tokens_of(config, step)
    micro, size = config.train.micro_batch_size, config.train.global_batch_size

    def batch(microbatch: int) -> Batch:
        first = (microbatch * config.dp + comm.here.dp) * micro
        part = tokens[first:first + micro]
        samples = torch.arange(step * size + first, step * size + first + micro)
        return Batch(part[:, :-1], part[:, 1:], samples, config.train.seed, config.tokens_per_step)

    return batch


def loopback(config: Config, steps: int = 5, plan: Plan | None = None) -> Ranks:
    plan = plan or make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm):
        engine = Engine(config, plan, comm)
        return drive(config, engine, comm, steps)

    return collect(config, run_loopback(config, plan, make_mesh(config), work))


def drive(config: Config, engine: Engine, comm: Comm, steps: int):
    """Train for some steps; this rank's numbers and its parts of gradients and weights."""
    losses, norms, grads = [], [], {}

    def after(instruction, slots):
        if instruction.op == Op.CLIP:
            for unit, state in engine.states.items():
                grads[unit] = state.gradient.clone()

    engine.after = after
    for step in range(steps):
        clipped, _ = engine.train_step(batches(config, comm, step))
        losses.append(clipped.loss)
        norms.append(clipped.grad_norm)
        engine.after = None
    weights = {unit: torch.clone(state.weights) for unit, state in engine.states.items()}
    places = {unit: (state.owned, state.layout) for unit, state in engine.states.items()}
    return losses, norms, grads, weights, places, comm.here, dict(comm.sent)


def collect(config: Config, results: list) -> Ranks:
    """Whole tensors from every rank's parts. Parts that several ranks hold must agree."""
    whole: list[dict[str, torch.Tensor]] = [{}, {}]
    buffers: list[dict] = [{}, {}]
    layouts = {}
    for _, _, grads, weights, places, here, _ in results:
        for which, parts in enumerate((grads, weights)):
            for unit, part in parts.items():
                (start, stop), layout = places[unit]
                key = (unit, here.tp, here.pp)
                buffer = buffers[which].setdefault(key, torch.full((layout.numel,), torch.nan))
                buffer[start:stop] = part
                layouts[key] = layout
    for which in (0, 1):
        shards: dict[str, dict[int, torch.Tensor]] = {}
        for (unit, tp, pp), buffer in buffers[which].items():
            for placed in layouts[unit, tp, pp].placed:
                value = buffer[placed.start:placed.stop].view(placed.shape)
                name, cut = placed.parameter.name, placed.parameter.tp_dim
                shards.setdefault(name, {})[tp] = value
                whole[which][name] = value if cut is None else torch.cat(
                    [shards[name][rank] for rank in sorted(shards[name])], cut)
    for losses, norms, *_ in results:
        assert losses == results[0][0] and norms == results[0][1], "ranks disagree"
    return Ranks(results[0][0], results[0][1], whole[0], whole[1], [result[6] for result in results])


def assert_parity(ranks: Ranks, reference, loss: float = 1e-5, norm: float = 1e-4, grad: float = 1e-5) -> None:
    """The numerics contract, fp32 by default."""
    for got, want in zip(ranks.losses, reference.losses, strict=True):
        assert abs(got - want) <= loss * abs(want), (ranks.losses, reference.losses)
    for got, want in zip(ranks.norms, reference.norms, strict=True):
        assert abs(got - want) <= norm * abs(want), (ranks.norms, reference.norms)
    assert ranks.first_grads.keys() == reference.first_grads.keys()
    for name, want in reference.first_grads.items():
        error = (ranks.first_grads[name] - want).abs().max().item()
        assert error <= grad * max(want.abs().max().item(), 1e-3), (name, error, want.abs().max().item())
    for name, want in reference.weights.items():
        error = (ranks.weights[name] - want).abs().max().item()
        assert error <= 10 * grad * max(want.abs().max().item(), 1e-3), (name, error)


def over_gloo(rank: int, store_path: str, config: Config, steps: int):
    """`loopback` for one real process of tests.workers."""
    plan = make_plan(config)
    store = dist.FileStore(store_path, config.world_size)
    comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), 60.0, store)
    try:
        comm.open_channels(channel_pairs(plan))
        return drive(config, Engine(config, plan, comm), comm, steps)
    finally:
        comm.close()
