"""A step's result, which the host reads when it is asked for: later steps, skipped or not, do not depend on
when that is. (The functions without `test` run in a process that has fake GPUs.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.fakecuda import mutants, shim
from tests.fakecuda.test_mutants import ON_DISK, SMALL, STEP_ON_HOST
from tests.harness import EXPERTS, batches, tiny
from tests.loopback.test_loss_scale import poison
from threed.base.errors import RunError
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.monitor.meter import Meter
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config

# A rate that changes with each update, and gradients that are clipped.
CHANGING = ["optimizer.warmup_steps=8", "optimizer.clip_grad=0.5", "optimizer.lr=0.05"]
DP, BF16, FP16 = ["parallel.dp=2"], ["precision.dtype=bf16"], ["precision.dtype=fp16"]
CELLS: dict[str, list[str]] = {
    "one rank": [],
    "bf16": BF16,
    "bf16 gradients": [*BF16, "precision.grad_dtype=bf16"],
    "bf16 without master weights": [*BF16, "precision.master=none"],
    "fp16": [*FP16, "precision.loss_scale=1024"],
    "fp16, dynamic": [*FP16, "precision.initial_loss_scale=1024", "precision.hysteresis=1"],
    "ZeRO-1": [*DP, "zero.stage=1"],
    "ZeRO-3": [*DP, "zero.stage=3"],
    "dp, pp": [*DP, "parallel.pp=2", "zero.stage=2"],
    "the host steps": STEP_ON_HOST,
    "the host steps half": [*STEP_ON_HOST, "offload.ratio=0.5"],
    "the host steps half, no overlap": [*STEP_ON_HOST, "offload.ratio=0.5", "offload.overlap=none"],
    "all on disk": ON_DISK,
    "Lion": ["optimizer.name=lion"],
    "SGD": ["optimizer.name=sgd"],
    "experts": [*EXPERTS, *DP],
}
SPOILT = {1: 0, 2: 0, 4: 0}  # step -> micro-batch whose gradient is not finite
STEPS = 6


class Seen(NamedTuple):
    """Of one rank, by step or by tensor."""

    losses: list[float]
    norms: list[str]
    finite: list[bool]
    updates: int
    lr: float
    scale: float
    tensors: list[torch.Tensor]  # weights as they are read, master weights and moments


def steps_of(config: Config, spoilt: dict[int, int], at_once: bool) -> list[Seen]:
    """What each rank sees. `at_once`: the host reads each step's result before the next step."""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> Seen:
        engine, clipped = Engine(Analysis(plan), comm), []
        if comm.rank == comm.mesh.size - 1:
            poison(engine, spoilt, torch.inf)
        for step in range(STEPS):
            clipped.append(engine.train_step(batches(config, comm, step))[0])
            if at_once:
                assert clipped[-1].finite == (step not in spoilt) and engine.zero.updates >= 0
        engine.settle()
        zero, states = engine.zero, engine.states.values()
        numbers = zero.updates, zero.lr, zero.scaler.scale
        tensors = [tensor.cpu().clone() for state in states for tensor in (
            state.weights.at_home, state.optimizer_state.master, *state.optimizer_state.buffers.values())]
        engine.close()
        return Seen([each.loss for each in clipped], [str(each.grad_norm) for each in clipped],
                    [each.finite for each in clipped], *numbers, tensors)

    return run_loopback(plan, make_mesh(config), work)


def is_like(ours: list[Seen], others: list[Seen], rtol: float = 0.0) -> bool:
    """Whether two runs are equal, or (`rtol`) nearly so in losses and tensors."""
    for a, b in zip(ours, others, strict=True):
        if a[2:6] != b[2:6] or (not rtol and a[:2] != b[:2]):
            return False
        pairs = [(torch.tensor(a.losses), torch.tensor(b.losses)), *zip(a.tensors, b.tensors, strict=True)]
        for one, other in pairs:
            atol = rtol * float(other.float().abs().max())
            if not torch.allclose(one.float(), other.float(), rtol=0.0, atol=atol, equal_nan=True):
                return False
    return True


@pytest.mark.parametrize("name", CELLS)
def test_when_the_host_reads_changes_nothing(name, fake_gpus):
    """To the bit, with steps that are skipped among others. And a CPU has done the same."""
    config = tiny(*SMALL, *CHANGING, *CELLS[name])
    late, at_once = (fake_gpus.run(steps_of, config, SPOILT, each) for each in (False, True))
    assert is_like(late, at_once)
    assert late[0].finite == [step not in SPOILT for step in range(STEPS)]
    assert late[0].updates == STEPS - len(SPOILT)
    near = 1e-5 if not any("dtype" in each for each in CELLS[name]) else 2e-2
    assert is_like(late, steps_of(config, SPOILT, False), near)


def changed(mutant: Callable[[], None], config: Config) -> list[Seen]:
    mutant()
    return steps_of(config, SPOILT, False)


@pytest.mark.parametrize("mutant", [pytest.param(each, id=each.__name__) for each in (
    mutants.a_skipped_step_is_an_update, mutants.a_skipped_step_is_taken, mutants.gradients_are_not_clipped,
    mutants.the_rate_is_of_the_last_step_that_was_counted, mutants.the_host_reads_before_it_has_come)])
def test_a_fault_is_seen(mutant, fake_gpus):
    config = tiny(*SMALL, *CHANGING)
    right, outcome = steps_of(config, SPOILT, False), fake_gpus.outcome(changed, mutant, config)
    assert outcome.error or not is_like(outcome.value, right, 1e-5)


def a_chosen_expert_stays(mutated: bool) -> bool:
    """Whether a skipped step leaves the biases of a router as they are."""
    if mutated:
        mutants.a_skipped_step_moves_biases()
    config = tiny(*SMALL, *EXPERTS)
    plan = make_plan(config)

    def work(comm: Comm) -> bool:
        engine = Engine(Analysis(plan), comm)
        poison(engine, {0: 0}, torch.nan)
        biases = [state.optimizer_state.master for state in engine.states.values()
                  if state.part.unit.optimizer == "balance"]
        assert biases
        engine.train_step(batches(config, comm, 0))
        return not any(bool(each.any()) for each in biases)

    return all(run_loopback(plan, make_mesh(config), work))


def test_a_skipped_step_moves_no_bias(fake_gpus):
    assert fake_gpus.run(a_chosen_expert_stays, False) and not fake_gpus.run(a_chosen_expert_stays, True)


def waits_by_step(config: Config) -> list[int]:
    """How often the host has waited in each of some steps whose results it does not read."""
    plan, waits = make_plan(config), ("synchronisations", "pageable", "blocking")

    def work(comm: Comm) -> list[int]:
        engine, counts = Engine(Analysis(plan), comm), []
        for step in range(4):
            engine.train_step(batches(config, comm, step))
            counts.append(sum(count for name, count in shim.installed.counts().items()
                              if any(word in name for word in waits)))
        return [after - before for before, after in zip(counts, counts[1:])]

    return run_loopback(plan, make_mesh(config), work)[0]


@pytest.mark.parametrize("more", [[], BF16, [*BF16, "precision.grad_dtype=bf16"], ["run.cuda_graphs=true"]],
                         ids=["fp32", "bf16", "bf16-gradients", "graphs"])
def test_the_host_waits_for_nothing(more, fake_gpus):
    counts = fake_gpus.run(waits_by_step, tiny(*SMALL, *CHANGING, *more))
    assert counts[-1] == 0, counts


def waits_of_reports(config: Config, sizes: bool) -> int:
    """How often the host has waited in the last of some steps and its report. `sizes`: of updates, too."""
    plan, waits = make_plan(config), ("synchronisations", "pageable", "blocking")

    def work(comm: Comm) -> int:
        engine, counts = Engine(Analysis(plan), comm), []
        meter = Meter(config, Analysis(plan), comm, engine.arrivals,
                      turned=engine.zero.matrices.turned if sizes else None)
        for step in range(4):
            meter.begin()
            _, trace = engine.train_step(batches(config, comm, step))
            values = meter.metrics(meter.report(trace, 1.0), 1.0)
            assert bool(values.get("optimizer/update_rms")) == (sizes and step > 0)
            counts.append(sum(count for name, count in shim.installed.counts().items()
                              if any(word in name for word in waits)))
        return counts[-1] - counts[-2]

    return run_loopback(plan, make_mesh(config), work)[0]


def test_the_host_waits_for_no_size_of_an_update(fake_gpus):
    config = tiny(*SMALL, *CHANGING, "optimizer.name=muon")
    assert fake_gpus.run(waits_of_reports, config, True) == fake_gpus.run(waits_of_reports, config, False)


def failure_while_it_waits(config: Config) -> Any:
    """Where a rank says that it is while the host waits for a result, and what it says if that fails."""
    plan, said = make_plan(config), []

    def work(comm: Comm) -> str:
        engine = Engine(Analysis(plan), comm)
        clipped, _ = engine.train_step(batches(config, comm, 0))

        def fails() -> None:
            said.append((engine.current, engine.where()))
            raise ValueError("CUDA error: of the device")

        clipped._arrives.block, clipped._arrives.done = fails, lambda: False
        try:
            clipped.loss  # noqa: B018
        except RunError as error:
            return f"{error} {engine.current}"
        return ""

    return run_loopback(plan, make_mesh(config), work)[0], said


def test_a_rank_that_waits_for_a_result_says_where_it_is(fake_gpus):
    """A watchdog asks; and so it is said where the device has failed."""
    error, ((current, where),) = fake_gpus.run(failure_while_it_waits, tiny(*SMALL))
    assert current[0] == "train" and "between programs" not in where
    assert "ValueError: CUDA error: of the device" in error and error.startswith("rank 0") and "None" in error
