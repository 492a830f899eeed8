"""What ranks and copies share at the host: the link, whose two ways slow each other down, and the memory, of
which each rank's optimizer step has a part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness import tiny
from threed.planner import make_pipeline, make_plan
from threed.prediction.analytic import cost
from threed.prediction.contention import timed
from threed.prediction.hardware import Hardware, load
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op
from threed.program.walk import seconds_of

ALONE = Hardware(link_gbps=1.0, link_both=1.0, contention=0.0, kernel_us=0.0)
AWAY = ["precision.dtype=bf16", "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu",
        "run.device=auto"]


def walked(over: list[str], hardware: Hardware):
    """The plan's links, and the seconds and the walk of its train step."""
    config = tiny(*over)
    analysis = Analysis(make_plan(config, make_pipeline(config)))
    seconds = seconds_of(analysis.simulated("train"), cost(analysis.plan, hardware))
    return analysis, seconds, timed(analysis, seconds, hardware)


def took(analysis: Analysis, when, lane: str) -> list[float]:
    """Of each instruction of a lane of the first position."""
    return [end - start for start, end, form in zip(when.start[0], when.end[0],
            analysis.simulated("train")[0].forms, strict=True) if form.effect.lane == lane]


def test_ways_of_a_link_slow_each_other_down():
    """Each copy takes longer by what runs the other way meanwhile: 55 GB/s alone, 44.9 at the same time."""
    over = [*AWAY, "zero.reduce_every=step"]  # no sum comes up
    analysis, seconds, alone = walked(over, ALONE)
    shared = timed(analysis, seconds, replace(ALONE, link_both=0.8))
    for lane, other in (("d2h", "h2d"), ("h2d", "d2h")):
        before, after = (took(analysis, when, lane) for when in (alone, shared))
        spans = [(alone.start[0][at], alone.end[0][at]) for at, form
                 in enumerate(analysis.simulated("train")[0].forms) if form.effect.lane == other]
        begun = [(alone.start[0][at], alone.end[0][at]) for at, form
                 in enumerate(analysis.simulated("train")[0].forms) if form.effect.lane == lane]
        inside = [sum(max(0.0, min(end, stop) - max(start, first)) for first, stop in spans)
                  for start, end in begun]
        assert any(inside), "some are at the same time"
        assert after == pytest.approx([was + 0.25 * beside for was, beside
                                       in zip(before, inside, strict=True)])
    assert shared.total_s > alone.total_s


def test_ranks_of_a_node_share_its_memory():
    """Eight would have had eight times what one has."""
    hardware = Hardware(devices=8, host_gbps=800, host_all_gbps=1600)
    assert [hardware.host_rate(ranks) * 8e-9 for ranks in (1, 2, 4, 8)] == [800, 800, 400, 200]
    of_cpus = replace(hardware, waits=True, devices=4)
    assert of_cpus.host_rate(64) == of_cpus.host_rate(4), "the others take turns"
    step = Instruction(Op.STEP, 1)
    one, eight = (make_plan(tiny(*AWAY, f"parallel.dp={dp}", "train.global_batch_size=16"))
                  for dp in (1, 8))
    # an eighth of the work, at a fourth of the speed
    assert cost(eight, hardware)(0, step) == pytest.approx(cost(one, hardware)(0, step) / 2, rel=0.02)


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm"])
def test_files_have_what_machines_have(name):
    """Not more at the same time than the links and the memory carry."""
    hardware = load(name)
    assert 0.5 <= hardware.link_both < 1 and hardware.host_gbps <= hardware.host_all_gbps
