"""Waits of the engine, each kind taken out: the fake GPUs find that it is missing, in every run."""

from __future__ import annotations

import pytest

from tests.fakecuda import mutants
from tests.harness import FILES, tiny

ZERO3 = ["parallel.dp=2", "zero.stage=3", "zero.prefetch=1"]
ON_HOST = ["parallel.dp=2", "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"]
STEP_ON_HOST = ["parallel.dp=2", "zero.stage=2", "offload.optimizer=cpu"]
ADDED_ON_HOST = [*STEP_ON_HOST, "offload.gradients=host", "zero.reduce_every=1"]
ON_DISK = ["parallel.dp=2", "zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme", FILES]
KEPT_ON_HOST = ["activation.policy=full", "activation.offload=cpu"]
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16"]

# mutant: a config, and a word of the races that find it ("": other numbers, or ranks that disagree)
CASES = {
    mutants.computation_does_not_wait_for_lanes: (ZERO3, "reads on"),
    mutants.collectives_are_not_waited_for: (ZERO3, "a collective wrote"),
    mutants.lane_does_not_wait_for_what_its_job_needs: (ZERO3, "a collective writes"),
    mutants.lane_does_not_wait_for_the_step_before: (ON_HOST, "zero_ wrote"),
    mutants.memory_of_copies_is_not_held: (KEPT_ON_HOST, "copy_ read"),
    mutants.host_adds_a_piece_before_it_has_arrived: (ADDED_ON_HOST, ""),
    mutants.host_does_not_wait_for_copies: (ON_DISK, "the host writes to pinned memory"),
    mutants.thread_waits_for_nothing: (ON_DISK, "the host writes to pinned memory"),
}

@pytest.mark.parametrize("mutant", [pytest.param(each, id=each.__name__) for each in CASES])
def test_it_is_found(mutant, fake_gpus):
    overrides, word = CASES[mutant]
    config = tiny(*SMALL, *overrides)
    outcome = fake_gpus.outcome(mutants.train, mutant, config, 2)
    if word:
        assert any(word in race for race in outcome.races), outcome.races
    elif not outcome.error:
        right = fake_gpus.run(mutants.train, None, config, 2)
        assert repr(outcome.value.losses) != repr(right.losses)
