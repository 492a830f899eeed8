"""Activation policies: whatever is kept of a forward, wherever it waits, the numbers are the reference's.

What is computed twice must come out the same twice (dropout too), so one mesh gives the same bits with and
without.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tests.harness import assert_contract, least_budget, loopback, tiny
from threed.planner import analyse, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Op
from threed.program.summary import stages
from threed.schema import Config

FULL = ["activation.policy=full"]
PARTITION, CPU, ARENA = "activation.partition=true", "activation.offload=cpu", "activation.contiguous=true"
SELECTIVE = ["activation.policy=selective"]
POLICIES = {
    "none": [], "full": FULL, "every-2": [*FULL, "activation.every=2"],
    "every-3": [*FULL, "activation.every=3"],
    "norm": [*SELECTIVE, "activation.pieces=[norm]"], "mlp-act": [*SELECTIVE, "activation.pieces=[mlp_act]"],
    "attention": [*SELECTIVE, "activation.pieces=[attention]"],
    "pieces": [*SELECTIVE, "activation.pieces=[attention,norm,mlp_act]"],
    "budget": ["activation.policy=budget", "activation.budget=1GiB"], "tight": ["activation.policy=budget"],
    "partition": [*FULL, PARTITION], "cpu": [*FULL, CPU], "arena": [*FULL, ARENA],
    "partition-cpu": [*FULL, PARTITION, CPU], "partition-arena": [*FULL, PARTITION, ARENA],
    "every-2-partition-cpu": [*FULL, "activation.every=2", PARTITION, CPU],
    "tight-cpu": ["activation.policy=budget", CPU],
}
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "breadth-first"]
TP = {"tp1": [], "tp2": ["parallel.tp=2"], "sp": ["parallel.tp=2", "parallel.sequence_parallel=true"]}
DROPOUT = ["model.dropout=0.2", "model.attention_dropout=0.1"]
MODELS = {
    "gpt": DROPOUT, "untied": [*DROPOUT, "model.tie_embeddings=false", "model.position=learned"],
    "llama": ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.kv_heads=2"],
    "bf16": ["precision.dtype=bf16"], "fp16": ["precision.dtype=fp16", "precision.loss_scale=1024"],
}


def sample(rng: random.Random, count: int) -> list[tuple[str, str, str, int, str]]:
    """Few cases, in which each value is met about as often as the others of its kind."""
    columns = [[values[i % len(values)] for i in range(count)] for values in (
        list(POLICIES), SCHEDULES, list(TP), (0, 1, 2, 3), list(MODELS))]
    for column in columns[1:]:
        rng.shuffle(column)
    return list(zip(*columns))


SAMPLE = sample(random.Random(4), 32)
# The contract has every policy with every schedule, stage and precision; here are more policies and models,
# with a drawn rest.
DRAW = random.Random(5)
PRODUCT = [(policy, schedule, DRAW.choice(list(TP)), DRAW.choice((0, 1, 2, 3)), model)
           for policy, schedule, model in itertools.product(POLICIES, SCHEDULES, MODELS)]


def small(*others: str, policy: str = "full") -> Config:
    """A config of a policy. A tight budget is the least that there can be."""
    looped = {"parallel.schedule=interleaved", "parallel.schedule=breadth-first"} & {*others}
    virtual = ["parallel.virtual_stages=2"] if looped else []
    base = ["model.layers=4", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
            "model.vocab_multiple=16", "parallel.pp=2", "train.global_batch_size=4", "train.eval_every=1",
            *virtual, *others]
    if policy.startswith("tight"):
        return tiny(*base, *POLICIES[policy], f"activation.budget={least_budget(*base)}")
    return tiny(*base, *POLICIES[policy])


def case_config(case: tuple[str, str, str, int, str]) -> Config:
    policy, schedule, tp, zero, model = case
    dp = 2 if zero else 1
    return small(f"parallel.schedule={schedule}", *TP[tp], f"zero.stage={zero}", f"parallel.dp={dp}",
                 f"train.global_batch_size={4 * dp}", *MODELS[model], policy=policy)


def counted(config: Config, op: Op) -> int:
    """Instructions of micro-batches."""
    return sum(item.op == op and item.microbatch >= 0
               for program in make_plan(config).programs["train"] for item in program)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case)))
def test_sample(case, references):
    """Policy x schedule x tensor and sequence parallelism x ZeRO x model: an input that is overwritten or
    lost before RECOMPUTE, a recipe that makes another tensor, a parameter that is not there when it is needed
    again; with evaluation after the steps."""
    assert_contract(case_config(case), references)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=lambda case: "-".join(map(str, case)))
def test_product(case, references):
    assert_contract(case_config(case), references)


@pytest.mark.parametrize("policy", POLICIES)
def test_alone(policy, references):
    """One is not a special case: pp=1, where every forward but the last micro-batch's last is followed by
    another unit's."""
    assert_contract(small("parallel.pp=1", *DROPOUT, policy=policy), references)


@pytest.mark.parametrize("schedule, zero, dtype", [
    ("1f1b", 1, "fp32"), ("1f1b", 1, "bf16"),
    ("zb-h1", 3, "bf16"), ("zb-h1", 3, "fp32"),
    ("zb-v", 2, "fp32"), ("zb-v", 2, "bf16")])
def test_same_bits(schedule, zero, dtype):
    """Dropout that draws another mask the second time, or a sum in another order: with and without
    recomputation the losses, norms and weights are equal to the bit."""
    mesh = [f"parallel.schedule={schedule}", f"zero.stage={zero}", "parallel.tp=2", "parallel.dp=2",
            "train.global_batch_size=8"]
    runs = [loopback(small(*mesh, *DROPOUT, f"precision.dtype={dtype}", policy=policy), 3)
            for policy in ("none", "full", "pieces", "partition-cpu")]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        assert run.evaluated == runs[0].evaluated
        assert all(value.equal(runs[0].weights[name]) for name, value in run.weights.items())


# ---------------------------------------------------------------- traps

@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v"])
def test_split_backward(schedule, references):
    """Activation checkpointing with a split backward: each forward is computed twice, not three times, and
    what BACKWARD_INPUT leaves is all that waits for BACKWARD_WEIGHT, however long."""
    config = small(f"parallel.schedule={schedule}", *DROPOUT)
    plan = make_plan(config)
    assert counted(config, Op.BACKWARD_INPUT)
    assert 0 < counted(config, Op.RECOMPUTE) <= counted(config, Op.FORWARD)
    for program in plan.programs["train"]:
        halves = [item[1:3] for item in program if item.op == Op.BACKWARD_INPUT]
        assert len(halves) == len(set(halves))
        recomputed = [item[1:3] for item in program if item.op == Op.RECOMPUTE]
        assert len(recomputed) == len(set(recomputed))
    unlimited = make_plan(small(f"parallel.schedule={schedule}", *DROPOUT, policy="budget"))
    for full, none in zip(stages(Analysis(plan)), stages(Analysis(unlimited))):
        assert full.activation_peak_bytes < none.activation_peak_bytes
        assert full.slot_peak_bytes.get("operands") == none.slot_peak_bytes.get("operands")
    assert_contract(config, references)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_partition_with_sequence_parallelism(schedule, references):
    """Partitioned activations together with sequence parallelism: inputs are cut by tokens already, and to
    cut them again, or to gather parts as if they were equal, would train on noise."""
    config = small(f"parallel.schedule={schedule}", *TP["sp"], *DROPOUT, policy="partition")
    assert counted(config, Op.RECOMPUTE) and not counted(config, Op.RELEASE)
    assert_contract(config, references)


@pytest.mark.parametrize("schedule, pp", [*((schedule, 2) for schedule in SCHEDULES), ("1f1b", 1),
                                          ("1f1b", 4), ("zb-h1", 4)])
def test_partition_with_tp_and_pp(schedule, pp, references):
    """Partitioned activations with tp and pp above 1 (elsewhere a crash): an input that came as a message is
    cut and joined as one that was made here is."""
    config = small(f"parallel.schedule={schedule}", f"parallel.pp={pp}", "parallel.tp=2", *DROPOUT,
                   policy="partition")
    assert counted(config, Op.RELEASE) == counted(config, Op.GATHER) > 0
    assert_contract(config, references)


def test_partition_over_four(references):
    """Parts of more than two, of micro-batches of two sequences."""
    config = small("parallel.tp=4", "train.micro_batch_size=2", "train.global_batch_size=8",
                   policy="partition-arena")
    assert_contract(config, references)


# ---------------------------------------------------------------- traffic

@pytest.mark.parametrize("tp", ["tp2", "sp"])
@pytest.mark.parametrize("policy", POLICIES)
def test_traffic(policy, tp):
    """A RECOMPUTE whose forward's sums over tp, or a GATHER that, the plan does not count: run and plan
    to the byte."""
    config = small("parallel.dp=2", *TP[tp], "train.global_batch_size=8", "zero.stage=3", policy=policy)
    config.train.eval_every = 0
    ranks, mesh, rows = loopback(config, steps=2), make_mesh(config), stages(analyse(config))
    for rank, sent in enumerate(ranks.sent):
        a_step = rows[mesh.coordinate(rank).position].sent_bytes
        two_steps = {axis: 2 * size for axis, size in a_step.items()}
        assert {axis: sent.get(axis, 0) for axis in a_step} == two_steps, rank
