"""The SVG timeline: what it says, and that its numbers can be read."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import threed
from threed.program.analysis import Analysis
from threed.program.show import timeline
from threed.program.timeline_svg import nice_step, picture, svg

NAME = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("schedule", "micro_batches"), [("1f1b", 8), ("zb-h1", 64), ("zb-v", 160)])
def test_numbers_do_not_run_together(schedule, micro_batches):
    """Each number is narrower than its block. The picture grows so that most blocks have one, up to a
    width."""
    plan = threed.plan(threed.load("configs/toy.yaml", [
        "parallel.pp=4", "parallel.dp=1", "parallel.tp=1", "model.layers=14", "train.micro_batch_size=1",
        f"parallel.schedule={schedule}", f"train.global_batch_size={micro_batches}"]))
    drawn = ElementTree.fromstring(picture(Analysis(plan)))
    width = float(drawn.attrib["width"])
    assert 1000 < width < 4200 and (width > 1100) == (micro_batches > 8)
    boxes, numbered = list(drawn), 0
    for box, text in zip(boxes, boxes[1:]):
        if box.tag == f"{NAME}rect" and text.tag == f"{NAME}text" and (text.text or "").isdecimal():
            assert 6 * len(text.text or "") < float(box.attrib["width"])
            numbered += 1
    blocks = sum(box.find(f"{NAME}title") is not None for box in boxes)
    assert numbered > 0.6 * blocks or (width > 4000 and micro_batches == 160)


def test_title_legend_and_axis():
    """The bubble is that of the walk; the legend has the ops that are drawn; the axis counts forwards."""
    plan = threed.plan(threed.load("configs/toy.yaml", ["parallel.pp=4", "parallel.dp=1", "parallel.tp=1"]))
    text = picture(Analysis(plan))
    total = timeline(Analysis(plan)).total_s
    computed = plan.table.num_microbatches * 3.0
    assert f"micro-batches, train, bubble {1 - computed / total:.1%}</text>" in text
    texts = re.findall(r">([^<>]+)</text>", text)
    assert {"FORWARD", "BACKWARD", "0 forwards of a stage", "5"} <= set(texts) and "RECOMPUTE" not in texts
    drawn = ElementTree.fromstring(text)
    width, height = drawn.attrib["width"], drawn.attrib["height"]
    assert drawn.attrib["viewBox"] == f"0 0 {width} {height}"  # it shrinks to a narrow page
    ground = drawn[0].attrib  # under all the rest: the page around it may be dark
    assert (ground["width"], ground["height"], ground["fill"]) == (width, height, "#fff")
    measured = svg(plan.programs["train"], timeline(Analysis(plan)), "measured")
    assert "5.0 s</text>" in measured  # seconds, where nothing else is said


@pytest.mark.parametrize(("total", "least", "step"), [(10.0, 0.8, 1.0), (0.0123, 0.0011, 0.002),
                                                      (600.0, 60.0, 100.0), (1.0, 0.5, 0.5)])
def test_marks_are_round(total, least, step):
    assert nice_step(total, least) == pytest.approx(step)
