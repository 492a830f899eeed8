"""What is kept of a forward until its backward, in storages that are really alive: no slot and no table is
asked for it.

A storage counts from the operation that makes it until nobody holds it (tests/alive.py). Each rank is looked
at before each instruction, when all that the one before it frees is gone.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from tests.harness import tiny
from threed.comm.group import Comm
from threed.engine import loopback
from threed.engine.engine import Engine
from threed.planner import make_mesh, make_plan, saved_by_piece
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.instruction import Op, Slot
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.schema import Config
from threed.tensor.alive import Alive
from threed.tensor.context import Batch
from threed.tensor.fused import Fused
from threed.tensor.loss_sum import NUMBERS

SIZES = ["model.layers=1", "model.hidden=256", "model.seq_len=128", "model.vocab=1000",
         "model.vocab_multiple=128",
         "train.global_batch_size=2", "train.micro_batch_size=2"]
SPLIT = ["parallel.schedule=zb-h1"]  # the two halves of backward


class Seen(NamedTuple):
    """Of one rank: bytes made since the start of the step and alive, for each instruction."""

    before: list[int]  # it runs
    after: list[int]  # it ran, and before what it frees is gone
    arena: int  # bytes of the arena of kept inputs, which is made once
    host: int  # and of the host's


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Leave out the copies by which loopback carries tensors between threads: they are not a rank's."""
    for kind, name in ((loopback.ThreadGroup, "_call"), (loopback.ThreadChannel, "_send")):
        monkeypatch.setattr(kind, name, _unseen(getattr(kind, name)))


def _unseen(call):
    def unseen(*arguments):
        with _disable_current_modes():
            return call(*arguments)

    return unseen


def watch(config: Config, plan: Plan) -> list[Seen]:
    """A step of every rank, after one in which what is made once was made."""
    torch.set_num_threads(1)

    def work(comm: Comm) -> Seen:
        engine = Engine(Analysis(plan), comm)
        pools = engine.activation.arena, engine.handlers[Op.OFFLOAD].__self__.kept  # pyright: ignore
        seen = Seen([], [], *(sum(first.untyped_storage().nbytes() for first in pool.first.values())
                              for pool in pools))
        with Alive() as alive:
            data = [fresh(config) for _ in range(config.num_microbatches)]  # which no plan counts
            engine.train_step(data.__getitem__)
            comm.all_gather(None)  # all ranks have taken what was sent to them
            gc.collect()
            begin = alive.bytes()

            def seeing(handler):
                def handle(instruction, slots):
                    seen.before.append(alive.bytes() - begin)
                    return handler(instruction, slots)

                return handle

            engine.handlers = {op: seeing(handler) for op, handler in engine.handlers.items()}
            engine.after = lambda *_: seen.after.append(alive.bytes() - begin)
            engine.train_step(data.__getitem__)
            comm.all_gather(None)
            assert alive.bytes() == begin, f"left behind:\n{alive.describe()}"
        return seen

    return loopback.run_loopback(plan, make_mesh(config), work)


def fresh(config: Config) -> Batch:
    """A micro-batch in newly allocated memory."""
    shape = (config.train.micro_batch_size, config.model.seq_len)
    tokens, labels = (torch.randint(0, config.model.vocab, shape) for _ in range(2))
    return Batch(tokens, labels, torch.arange(config.train.micro_batch_size), 0, config.tokens_per_step)


LLAMA = ["model.norm=rmsnorm", "model.activation=swiglu", "model.kv_heads=2", "model.bias=false"]
TP, SP = ["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
# 4 of an embedding, 4 of attention, 8 of an MLP, in fp32
TILES = ["model.tile_linears=256KiB", "model.tie_embeddings=false"]
BF16, LEARNED, UNFUSED = ["precision.dtype=bf16"], ["model.position=learned"], ["model.attention_dropout=0.1"]
CASES = {
    "fp32": [], "bf16": BF16, "tp": TP, "sp": SP,
    "untied-bf16-tp": ["model.tie_embeddings=false", *BF16, *TP],
    "learned": LEARNED, "learned-bf16-sp": [*LEARNED, *BF16, *SP], "grouped": ["model.kv_heads=2"],
    "grouped-learned": ["model.kv_heads=2", *LEARNED], "rmsnorm": ["model.norm=rmsnorm"],
    "llama": LLAMA, "llama-bf16": [*LLAMA, *BF16], "llama-tp": [*LLAMA, *TP],
    "llama-bf16-sp": [*LLAMA, *BF16, *SP],
    "dropout": ["model.dropout=0.1"], "dropout-bf16-sp": ["model.dropout=0.1", *BF16, *SP],
    "unfused": UNFUSED, "unfused-bf16": [*UNFUSED, *BF16], "unfused-learned": [*UNFUSED, *LEARNED],
    "unfused-grouped-learned": [*UNFUSED, *LEARNED, "model.kv_heads=2"],
    "unfused-llama-tp": [*UNFUSED, *LLAMA, *TP],
    "blocks-of-two": ["model.layers=2", "parallel.layers_per_unit=2"], "zero-3": ["zero.stage=3"],
    "zero-3-llama-bf16": ["zero.stage=3", *LLAMA, *BF16],
    "tiles": TILES, "tiles-sp": [*TILES, *SP], "tiles-llama-bf16-tp": [*TILES, *LLAMA, *BF16, *TP],
    "tiles-dropout-bf16-sp": [*TILES, "model.dropout=0.1", *LEARNED, *BF16, *SP],
    "tiles-unfused": [*TILES, *UNFUSED],
}
PIECES = ("attention", "norm", "mlp_act", "attention,norm,mlp_act")


def selective(pieces: str) -> list[str]:
    return ["activation.policy=selective", f"activation.pieces=[{pieces}]"]


def measured(config: Config) -> tuple[Plan, dict[tuple[str, int], float]]:
    """(saved or operands, unit) -> bytes: what an instruction of the only micro-batch makes, and what it lets
    go of."""
    plan = make_plan(config)
    table, sizes, alive = plan.table, {}, set()
    before = watch(config, plan)[0].before
    for index, item in enumerate(plan.programs["train"][0]):
        effect = effects(item, table, 0)
        created = {*effect.writes, *effect.adds} - alive
        alive = (alive | created) - set(effect.frees)
        kind = {Op.FORWARD: "saved", Op.BACKWARD_INPUT: "operands"}.get(item.op)
        if kind:  # whatever else is made or freed is a stream, or what tiles share, in full
            others = sum(8 * NUMBERS if slot.kind == "loss" else table.size(slot)
                         for slot in created if slot.kind != kind)
            freed = sum(sizes["saved", item.unit] if slot.kind == "saved" else table.size(slot)
                        for slot in effect.frees)
            sizes[kind, item.unit] = before[index + 1] - before[index] - others + freed
    return plan, sizes


SELECTIVE = [f"{case} but {pieces}" for case in ("fp32", "llama-bf16", "unfused", "sp") for pieces in PIECES]


@pytest.mark.parametrize("name", [*CASES, *SELECTIVE])
def test_kept_by_a_forward(name):
    """A tensor that the table of a layer forgets, or that is kept although nobody needs it (an fp32 copy, a
    graph with the unit's input in it): of FORWARD, and of BACKWARD_INPUT for BACKWARD_WEIGHT. Within 2%, or a
    few bytes a token (ids)."""
    case, _, pieces = name.partition(" but ")
    plan, sizes = measured(tiny(*SIZES, *SPLIT, *CASES[case], *(selective(pieces) if pieces else ())))
    assert len(sizes) == 2 * len(plan.table.units)
    for (kind, unit), size in sizes.items():
        expected = plan.table.size(Slot(kind, unit))
        close = pytest.approx(expected, rel=0.02, abs=0.02 * plan.table.act_bytes)
        assert size == close, (kind, plan.table.units[unit].name)


@pytest.mark.parametrize("case", ["fp32", "llama-bf16", "unfused", "unfused-learned", "unfused-llama-tp",
                                  "llama-bf16-sp"])
def test_saved_by_each_piece(case):
    """A piece that saves less than advice says, or nothing."""
    kept = [measured(tiny(*SIZES, *SPLIT, *CASES[case], *more))[1]["saved", 1]
            for more in ([], *map(selective, PIECES))]
    saves = saved_by_piece(tiny(*SIZES, *CASES[case]))
    for pieces, size in zip(PIECES, kept[1:]):
        expected = sum(saves[piece] for piece in pieces.split(","))
        assert expected > 0, pieces
        assert kept[0] - size == pytest.approx(expected, rel=0.02, abs=0.005 * kept[0]), pieces


# ---------------------------------------------------------------- whole programs

PP = ["model.layers=4", "model.hidden=128", "model.seq_len=64", "model.vocab=120", "parallel.pp=2",
      "train.micro_batch_size=1",
      "train.global_batch_size=16", "model.tie_embeddings=false"]
FULL = ["activation.policy=full"]
PROGRAMS = {
    **{f"{schedule}-{policy}": [f"parallel.schedule={schedule}", f"activation.policy={policy}"]
       for schedule in ("1f1b", "gpipe") for policy in ("none", "full", "selective")},
    "interleaved-every-2": ["parallel.schedule=interleaved", "parallel.virtual_stages=2", *FULL,
                            "activation.every=2"],
    "gpipe-partition": ["parallel.schedule=gpipe", *TP, *FULL, "activation.partition=true"],
    "1f1b-partition": [*TP, *FULL, "activation.partition=true"],
    "gpipe-cpu": ["parallel.schedule=gpipe", *FULL, "activation.offload=cpu"],
    "gpipe-partition-cpu": ["parallel.schedule=gpipe", *TP, *FULL, "activation.partition=true",
                            "activation.offload=cpu"],
    "gpipe-contiguous": ["parallel.schedule=gpipe", *FULL, "activation.contiguous=true"],
    **{f"tiles-{name}": ["model.tile_linears=64KiB", *others] for name, others in {
        "1f1b": [], "full": FULL, "full-gpipe": [*FULL, "parallel.schedule=gpipe"],
        "cpu": [*FULL, "activation.offload=cpu"],
        "partition": [*TP, *FULL, "activation.partition=true"]}.items()},
    "zero-3-full": ["parallel.dp=2", "zero.stage=3", "train.global_batch_size=32", *FULL],
}


# Each of these is like two others, and takes long.
LONG = ("tiles-full-gpipe", "tiles-cpu", "tiles-1f1b", "gpipe-partition-cpu", "1f1b-partition",
        "gpipe-selective", "gpipe-cpu")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG))
                                  for name in PROGRAMS])
def test_peak(name):
    """An activation that is held longer than its slot lives, or one that no slot stands for: over a step, of
    every rank. The plan counts what BACKWARD makes beside all that it uses: one gradient more than is there
    before or after an instruction. What waits on the host, and what lies in the arena, was made once and is
    counted by its pool."""
    config = tiny(*SIZES, *PP, *PROGRAMS[name])
    plan, mesh = make_plan(config), make_mesh(config)
    act_bytes = plan.table.act_bytes
    for rank, seen in enumerate(watch(config, plan)):
        position = mesh.coordinate(rank).position
        peak = stages(Analysis(plan))[position].activation_peak_bytes
        measured_peak = max(*seen.before, *seen.after) + seen.arena
        assert seen.host == Analysis(plan).memory(position).peak("host_kept", "host_kpart")
        kept = sum(numel * count for numel, count in Analysis(plan).buffers(position).kept.items())
        assert seen.arena == kept * plan.table.elements.param
        # An input that leaves the arena for RECOMPUTE: its place there stays. One that is still on its way to
        # the host.
        again = act_bytes * bool(seen.arena or seen.host)
        # Token ids and labels that the plan counts are the data's memory here, which was there before.
        data = 2 * 8 * config.train.global_batch_size // config.dp * config.model.seq_len
        assert peak - act_bytes - data <= measured_peak <= peak - act_bytes + again + 0.02 * peak, (
            rank,
            (measured_peak - peak) / act_bytes,
        )


@pytest.mark.parametrize("others", [[], ["activation.contiguous=true"]])
def test_partition_cuts_kept_inputs_by_tp(others):
    """A part that is a view of the whole, and so keeps all of it: when the first backward begins, each kept
    input has shrunk to 1/tp, to the byte."""
    alive, plans = [], []
    for partition in ("false", "true"):
        config = tiny(*SIZES, *PP, *TP, *FULL, "parallel.schedule=gpipe", f"activation.partition={partition}",
                      *others)
        plan = make_plan(config)
        seen, turns = watch(config, plan), []
        for position, program in enumerate(plan.programs["train"]):
            turn = next(index for index, item in enumerate(program) if item.op == Op.RECOMPUTE
                        or (item.op == Op.GATHER and item.of_slot))
            turns.append(seen[2 * position].before[turn] + seen[2 * position].arena)
        alive.append(turns)
        plans.append(plan)
    for position, (whole, cut) in enumerate(zip(*alive)):
        kept = sum(item.keep == "input" and item.unit > 0 for item in plans[0].programs["train"][position])
        assert whole - cut == kept * plans[0].table.act_bytes // 2 and kept >= 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    """Ours, which keeps less, against torch's: output and both gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator).to(dtype)
                       for shape in ((6, 2, 32), (32,), (6, 2, 32)))
    results = []
    for function in (lambda x, weight: Fused().rms_norm(x, weight, 1e-5),
                     lambda x, weight: F.rms_norm(x, (32,), weight, 1e-5)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = function(*leaves)
        out.backward(grad)
        results.append([out, *(leaf.grad for leaf in leaves)])
    for ours, torchs in zip(*results):
        assert ours.dtype == dtype
        near = None if dtype == torch.float32 else 0.02
        torch.testing.assert_close(ours, torchs, rtol=near, atol=near)
