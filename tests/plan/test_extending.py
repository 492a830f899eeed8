"""The guides in docs/extending do what they say: plans and texts. (tests/loopback/test_extending.py and
tests/gloo/test_api.py run them.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

import threed
import threed.extend
from tests.guides import EXTENDING, ROOT, added_pass, blocks, code
from tests.plan.test_docs import run
from threed.base.errors import ConfigError, PlanError
from threed.monitor.loggers.logger import About, Logger, check_installed, make
from threed.optim.registry import OPTIMIZERS
from threed.program.instruction import Instruction, Op
from threed.schema import LOGGERS

SCHEDULE = """
from tests.guides import EXTENDING, add_schedule
add_schedule()
from tests.plan.test_docs import run
from tests.plan.test_extending import check_sessions
check_sessions("schedule", run)
import threed
from threed.config.contract import Cell, axes
from threed.base.errors import ConfigError
assert axes()["schedule"][-3:] == ("1f1b-eager", "auto", "file")
for stage in range(4):
    config = threed.load("configs/toy.yaml", ["parallel.schedule=1f1b-eager", f"zero.stage={stage}"])
    assert threed.check(config)["ok"] and Cell.of(config).schedule == "1f1b-eager"
assert config.num_stages == 2
try:
    threed.load("configs/toy.yaml", ["parallel.schedule=1f1b-eager", "parallel.virtual_stages=2"])
except ConfigError as error:
    assert "1f1b-eager has one stage a rank" in str(error), error
else:
    raise AssertionError("virtual stages are not refused")
"""


def check_sessions(guide: str, call) -> None:
    """Each block `shell-session` of a guide is commands, and what they print once its code is added."""
    for block in blocks(EXTENDING / f"{guide}.md", "shell-session"):
        commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
        assert block == "\n".join(f"$ {command}\n{call(command)}" for command in commands)


def test_schedule():
    """The function and the row are enough: commands, checks and the contract know the schedule."""
    done = subprocess.run([sys.executable, "-c", SCHEDULE], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout


def test_pass():
    """The function and the line are enough; what is shown is what it does, and a fault of it is found."""
    page = " ".join((EXTENDING / "pass.md").read_text().split())
    shown, refused = blocks(EXTENDING / "pass.md", "shell-session")
    fresh = run.__wrapped__  # the runs that pages share do not have the pass
    with added_pass():
        command, _, printed = shown.partition("\n")
        assert fresh(command.removeprefix("$ ")) == printed
    forgets = "out.append(Instruction(Op.RECOMPUTE, item.unit, item.microbatch))", "pass"
    with added_pass(forgets):
        command, _, printed = refused.partition("\n")
        assert fresh(command.removeprefix("$ ")) == printed
        with pytest.raises(PlanError, match="reads 'saved u4 m0'"):
            threed.plan(threed.load("configs/toy.yaml", ["parallel.schedule=gpipe"]))
    assert "Add this to `STEP`, below the line of the pass `recompute`" in page


def test_pass_of_slots():
    """Of a program that gathers tensors and parameters, the guide's function tells them apart."""
    names: dict = {"Counter": Counter, "Op": Op, "Instruction": Instruction}
    exec(code("pass")[-1], names)
    plan = threed.plan(threed.load("configs/toy.yaml", [
        "model.family=tests/families/travelling.py:TRAVELLING", "model.by=gather", "zero.stage=1"]))
    program = plan.programs["train"][0]
    assert names["gathers"](program) == {False: len(plan.table.held(0)), True: sum(
        item.op == Op.FORWARD and bool(plan.table.units[item.unit].makes) for item in program)}


def test_picture_of_a_schedule():
    """The guide's command makes the file that tests/plan/test_orders.py compares: here of 1f1b."""
    text = "\n".join(blocks(EXTENDING / "schedule.md", "bash")).replace("\\\n", "")
    text = text.replace("1f1b-eager", "1f1b")
    command, file = re.findall(r"^(threed show .*) > (tests/golden/\S+)$", text, re.MULTILINE)[0]
    assert run(re.sub(" +", " ", command)) + "\n" == (ROOT / file).read_text()


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@pytest.mark.parametrize("others", [[], ["zero.stage=3"],
                                    ["activation.policy=full", "activation.offload=cpu"],
                                    ["offload.optimizer=cpu"],
                                    ["offload.optimizer=cpu", "offload.overlap=none"]])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pass_composes(schedule, others):
    """What comes later in the list needs no change."""
    virtual = ["parallel.virtual_stages=2"] if schedule == "interleaved" else []
    config = threed.load("configs/toy.yaml", [f"parallel.schedule={schedule}", *virtual, *others])
    before = threed.plan(config)
    with added_pass():
        assert threed.plan(config).digest != before.digest or "activation.policy=full" in others


@pytest.mark.parametrize("others", [[], ["parallel.schedule=zb-h1"], ["parallel.pair=true"]])
def test_pass_composes_with_what_travels(others):
    """What has come stays until it is used again: the pass recomputes what the table does not mark."""
    with added_pass():
        program = threed.plan(threed.load("configs/toy-moe.yaml", others)).programs["train"][0]
    assert any(item.op == Op.RECOMPUTE for item in program)


@pytest.fixture
def optimizers():
    """The table, which has the same rows in the same order afterwards."""
    rows = dict(OPTIMIZERS)
    yield OPTIMIZERS
    OPTIMIZERS.clear()
    OPTIMIZERS.update(rows)


def test_optimizer(monkeypatch, optimizers):
    """The guide's class is the one that threed ships, its row is enough, and its tests exist."""
    file, row = code("optimizer")
    shipped = (ROOT / "threed" / "optim" / "lion.py").read_text()
    assert file + "\n" == shipped.replace("threed.optim.base", "threed.extend")
    del optimizers["lion"]
    monkeypatch.setattr(threed, "train", lambda *given: plans.append(threed.plan(threed.load(*given))))
    scope, plans = {"threed": threed}, []
    with pytest.raises(ConfigError, match="must be one of adamw, sgd"):
        threed.load("configs/toy.yaml", ["optimizer.name=lion"])
    exec(file, scope)
    exec(row, scope)
    (plan,) = plans
    assert [buffer.name for buffer in optimizers["lion"].buffers] == ["exp_avg"] and plan.digest
    tests = (ROOT / "tests" / "loopback" / "test_optimizers.py").read_text()
    named = re.findall(r"^\| `(test_\w+)` \|", (EXTENDING / "optimizer.md").read_text(), re.MULTILINE)
    assert len(named) == 5 and all(f"def {name}(" in tests for name in named)


def test_logger(monkeypatch, tmp_path):
    """The guide's class and row are enough."""
    monkeypatch.delitem(LOGGERS, "table", raising=False)
    with pytest.raises(ConfigError, match="table is none of wandb"):
        threed.load("configs/toy.yaml", ["monitor.loggers=[table]"])
    monkeypatch.setattr(threed.extend, "LOGGERS", table := dict(LOGGERS))
    exec(code("logger")[0], {"__name__": "table"})
    monkeypatch.setitem(LOGGERS, "table", table["table"])
    config = threed.load("configs/toy.yaml", ["monitor.loggers=[table]", f"run.dir={tmp_path}"])
    check_installed(config)
    logger = make("table")
    logger.start(About(config, 0, False, print), None)
    rows = [{"train/loss": 5.5, "perf/step_s": 0.25}, {"train/loss": 5, "perf/step_s": None}]
    logger.metrics(list(enumerate(rows, 1)))
    logger.finish("ended")
    assert (tmp_path / "steps.csv").read_text().split() == ["1,5.5,0.25", "2,5,"]
    methods = {name for name in vars(Logger) if not name.startswith("_")} - {"place", "kept"}
    page = (EXTENDING / "logger.md").read_text()
    assert set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)) == methods


@pytest.mark.parametrize("guide", ["schedule", "pass", "optimizer", "matrices", "callback", "logger"])
def test_one_page(guide):
    assert len((EXTENDING / f"{guide}.md").read_text().splitlines()) <= 120
