"""The library: its names, their documentation, what they import, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import threed
from threed import callback
from threed.callback import METHODS, Callback, Guarded, Step, check_callbacks
from threed.errors import InputError, PlanError, RunError


@pytest.fixture(scope="module")
def plan():
    return threed.plan(threed.load("configs/toy.yaml"))


def test_names():
    """About ten public names, sorted; each exists, and nothing else is promised."""
    assert sorted(threed.__all__) == list(threed.__all__) and 8 <= len(threed.__all__) <= 14
    for name in threed.__all__:
        assert getattr(threed, name) is not None and name in dir(threed)
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has Callback"):
        _ = threed.fit  # pyright: ignore[reportAttributeAccessIssue]


VERBS = ("check", "load", "plan", "predict", "show", "train")


def test_documented_and_typed():
    """Each name says what it takes and raises, with an example; each argument of a verb has a type."""
    for name in VERBS:
        function = _function(name)
        hints = typing.get_type_hints(function)
        assert set(inspect.signature(function).parameters) | {"return"} <= set(hints), name
        assert function.__doc__ and ">>>" in function.__doc__ and "Error" in function.__doc__, name
    for name in set(threed.__all__) - set(VERBS):
        assert len(inspect.getdoc(getattr(threed, name)) or "") > 60, name
    for kind in (threed.Callback, threed.Trainer, threed.Run):
        for method, value in vars(kind).items():
            assert method.startswith("_") or not callable(value) or value.__doc__, (kind, method)


def _function(name: str):
    from threed import api

    return threed.load if name == "load" else getattr(api, name)


@pytest.mark.parametrize("name", ["load", "plan", "check", "show", "predict"])
def test_examples(name, monkeypatch):
    """The examples in the docstrings run."""
    lines = re.findall(r"^>>> (.*)$", inspect.getdoc(_function(name)) or "", re.M)
    assert 1 <= len(lines) <= 2
    scope: dict = {"threed": threed}
    for line in lines:
        exec(line, scope)


def test_nothing_imports_torch():
    """Only training imports torch, as a fresh Python shows; and `predict` is a function before and after the
    package of that name is imported."""
    code = ("import sys, threed\n"
            "assert not [name for name in sys.modules if name.startswith('threed.')]\n"
            "config = threed.load('configs/toy.yaml', ['parallel.pp=4'])\n"
            "plan = threed.plan(config)\n"
            "threed.check(plan), threed.show(plan), threed.predict(plan)\n"
            "threed.Callback, threed.Run, threed.train\n"
            "import threed.prediction.cost\n"
            "assert threed.predict(plan)['step_time'] == threed.predict(config)['step_time'] > 0\n"
            "heavy = {'torch', 'megatron', 'numpy', 'wandb', 'typer'} & set(sys.modules)\n"
            "assert not heavy, heavy\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_verbs_take_configs_and_plans(plan):
    config = threed.load("configs/toy.yaml")
    assert threed.check(plan) == threed.check(config) and threed.check(plan)["world_size"] == 8
    assert threed.show(plan) == threed.show(config) and "pp1 dp1     r6   r7" in threed.show(plan)
    assert threed.show(plan, rank=4).count("\n") + 1 == len(plan.programs["train"][1])
    assert threed.predict(plan)["step_time"] > threed.predict(plan, "tflops=1000000")["step_time"] > 0


def test_check_finds_an_edited_plan(plan):
    """A plan that a user's own pass has broken."""
    programs = {**plan.programs, "train": [plan.programs["train"][0][:-1], *plan.programs["train"][1:]]}
    with pytest.raises(PlanError, match="pp0, instruction 68 of 69"):
        threed.check(dataclasses.replace(plan, programs=programs))


CALL: typing.Any = threed  # with arguments of the wrong types


@pytest.mark.parametrize("call, message", [
    (lambda plan: CALL.plan("configs/toy.yaml"), "neither a Config nor a Plan: give what threed.load"),
    (lambda plan: threed.show(plan, rank=8), "rank=8: the mesh has ranks 0 to 7"),
    (lambda plan: threed.show(plan, program="tarin"), "program=tarin: this plan has train"),
    (lambda plan: threed.show(plan, units="x"), "units=x: give u"),
    (lambda plan: threed.show(dataclasses.replace(plan, config=None)), "does not know its config"),
    (lambda plan: threed.predict(plan, "tflop=1"), "'tflop=1' is not one of"),
    (lambda plan: threed.predict(plan, costs="nowhere"), "no measured costs"),
    (lambda plan: threed.load("nowhere.yaml"), "no config file nowhere.yaml"),
    (lambda plan: threed.train("nowhere.yaml"), "no config file nowhere.yaml"),
    (lambda plan: threed.train(plan.config, ["train.steps=3"]), "overrides belong to a YAML file"),
    (lambda plan: CALL.train(plan.config, callbacks=[len]), r"callbacks\[0\] is a builtin_function"),
    (lambda plan: CALL.train(plan.config, callbacks=Callback()), "give a list"),
    (lambda plan: threed.Run("nowhere"), "no such run"),
])
def test_bad_input(call, message, plan):
    with pytest.raises(InputError, match=message):
        call(plan)


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("overrides", [
    [], ["model.tie_embeddings=false"], ["zero.stage=0"], ["zero.stage=3", "zero.persist_below=1000"],
    ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"], ["parallel.pp=1"],
])
def test_parameter_units(overrides):
    """p0 and all others, what is in them, who shares them, and bytes that add up to what a rank holds."""
    from threed.api import list_units

    plan = threed.plan(threed.load("configs/toy.yaml", overrides))
    rows, table = list_units(plan, "p"), plan.table
    assert [row["unit"] for row in rows] == [f"p{index}" for index in table.parameters]
    text = threed.show(plan, units="p")
    for row in rows:
        assert row["unit"] in text and row["parameters"]
        assert sum(_numel(each["shape"]) for each in row["parameters"]) == row["elements"]
        assert all(f"{each['name']} [" in text for each in row["parameters"])
        assert row["used_by"] and row["shard_bytes"] * row["ranks"] == row["whole_bytes"]
    kinds = [row["kind"] for row in rows]
    assert kinds.count("tied") == ("model.tie_embeddings=false" not in overrides)
    assert ("small" in kinds) == ("zero.persist_below=1000" in overrides)
    for position, stage in enumerate(threed.check(plan)["stages"]):
        held = [row for row in rows if position in row["positions"]]
        assert sum(row["elements"] for row in held) == stage["parameters"]
        on_device = [row["optimizer_bytes"] for row in held if row["optimizer"] == "device"]
        assert sum(on_device) == stage["optimizer_bytes"]


def _numel(shape):
    result = 1
    for size in shape:
        result *= size
    return result


def test_units_on_the_command_line(capsys):
    """As text and as JSON, of both kinds."""
    from threed.cli import app

    def command(*argv):
        app(["show", "configs/toy.yaml", *argv], standalone_mode=False)
        return capsys.readouterr().out

    assert command("--units", "u").splitlines()[0] == "u0   pp0   embedding           uses p10"
    assert "tied embedding" in command("--units", "p")
    rows = json.loads(command("--units", "p", "--json"))["units"]
    assert rows[0]["kind"] == "own" and rows[0]["used_by"] == [rows[0]["unit"].replace("p", "u")]
    assert json.loads(command("--units", "u", "--json"))["units"][0] == {
        "unit": "u0", "name": "embedding", "position": 0, "stage": 0, "uses": ["p10"]}


# ---------------------------------------------------------------- runs and callbacks


def test_a_run_is_read(tmp_path):
    """A half-written last line is left out; a damaged line is named."""
    file = tmp_path / "metrics.jsonl"
    run = threed.Run(tmp_path)
    with pytest.raises(InputError, match="has not ended a step"):
        _ = run.metrics
    with pytest.raises(InputError, match=r"config\.json: there is none"):
        _ = run.config
    with pytest.raises(InputError, match="A run is traced where"):
        _ = run.traces
    file.write_text('{"step": 1, "train/loss": 5.0}\n{"step": 2, "tr')
    assert threed.Run(tmp_path).metrics == [{"step": 1, "train/loss": 5.0}]
    file.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(InputError, match=r"metrics.jsonl, line 2 is damaged"):
        _ = threed.Run(str(tmp_path)).metrics


class Misspelt(Callback):
    def on_step_ended(self, trainer, step):
        pass


class Fine(Callback):
    def helper(self):
        pass


@pytest.mark.parametrize("callbacks, message", [
    ([Fine(), Misspelt()], r"callbacks\[1\], a Misspelt, has on_step_ended, which nobody .* has on_start"),
    ([Fine], r"is the class Fine: give an object, Fine\(\)"),
    ([object()], "inherits from threed.Callback"),
    (7, "give a list"),
])
def test_callbacks_are_checked(callbacks, message):
    with pytest.raises(InputError, match=message):
        check_callbacks(callbacks)
    check_callbacks([Fine(), Fine()])


class Watch:
    def phase(self, text, waits=True):
        import contextlib

        assert not waits and "Fails" in text
        return contextlib.nullcontext()


class FakeTrainer:
    rank, step_number, watch = 3, 7, Watch()


class Fails(Callback):
    def __init__(self, error=None, metric=None):
        self.error, self.metric = error, metric

    def on_step_end(self, trainer, step):
        step.metrics["mine"] = self.metric
        if self.error:
            raise self.error


def _step():
    return Step(7, 1.0, 1.0, True, None, None)  # pyright: ignore[reportArgumentType]


def test_a_callback_that_fails():
    """The message has the callback's name, its method, the rank and the line; errors meant for people pass
    unchanged."""
    trainer: typing.Any = FakeTrainer()
    where = f"ValueError: no such number \\({re.escape(__file__)}, line \\d+\\)"
    with pytest.raises(RunError, match=f"Fails: on_step_end after step 7 has failed on rank 3: {where}"):
        Guarded(Fails(ValueError("no such number"))).on_step_end(trainer, _step())
    with pytest.raises(InputError, match=r"^as it is$"):
        Guarded(Fails(InputError("as it is"))).on_step_end(trainer, _step())
    with pytest.raises(RunError, match=r"metrics\['mine'\] = 'text' in step 7: a metric is a number"):
        Guarded(Fails(metric="text")).on_step_end(trainer, _step())
    Guarded(Fails(metric=0.5)).on_step_end(trainer, _step())


def test_a_guard_passes_all_methods():
    """A new method of Callback that the guard forgets would never be called."""
    assert set(METHODS) <= set(vars(Guarded))
    assert all(method in (callback.__doc__ or "") for method in METHODS)
