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
from threed import extend
from threed.base.errors import ConfigError, InputError, PlanError
from threed.training import hooks as callback
from threed.training.hooks import METHODS, Callback, Guarded, Step, check_callbacks


@pytest.fixture(scope="module")
def plan():
    return threed.plan(threed.load("configs/toy.yaml"))


def test_names():
    """A handful of public names, sorted; each exists, and nothing else is promised."""
    assert sorted(threed.__all__) == list(threed.__all__) and 8 <= len(threed.__all__) <= 20
    for name in threed.__all__:
        assert getattr(threed, name) is not None and name in dir(threed)
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has Callback"):
        _ = threed.fit  # pyright: ignore[reportAttributeAccessIssue]


def test_names_for_extending():
    """Each exists, without torch, and each class and function says what it is."""
    code = ("import sys; from threed.extend import *; "
            "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules), sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    for name in extend.__all__:
        value = getattr(extend, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert len(_own_words(value)) > 15, name


def _own_words(value) -> str:
    """Its docstring: not a parent's, nor the signature that a dataclass has in place of one."""
    words = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return "" if (words or "").startswith(f"{value.__name__}(") else words or ""


VERBS = ("check", "evaluate", "generate", "load", "plan", "predict", "report", "search", "show", "train")


def test_documented_and_typed():
    """Each name says what it takes and raises, with an example; each argument of a verb has a type."""
    for name in VERBS:
        function = _function(name)
        hints = typing.get_type_hints(function, localns={"Run": threed.Run})
        assert set(inspect.signature(function).parameters) | {"return"} <= set(hints), name
        assert function.__doc__ and ">>>" in function.__doc__ and "Error" in function.__doc__, name
    for name in set(threed.__all__) - set(VERBS):
        assert len(inspect.getdoc(getattr(threed, name)) or "") > 60, name
    for kind in (threed.Callback, threed.Trainer, threed.Run):
        for method, value in vars(kind).items():
            assert method.startswith("_") or not callable(value) or value.__doc__, (kind, method)


def _function(name: str):
    from threed.api import plans as api

    return getattr(threed if name in ("evaluate", "generate", "load", "report", "search") else api, name)


@pytest.mark.parametrize("name", ["load", "plan", "check", "show", "predict"])
def test_examples(name, monkeypatch):
    """The examples in the docstrings run."""
    lines = re.findall(r"^>>> (.*)$", inspect.getdoc(_function(name)) or "", re.M)
    assert 1 <= len(lines) <= 2
    scope: dict = {"threed": threed}
    for line in lines:
        exec(line, scope)


def test_nothing_imports_torch():
    """Planning imports no torch, as a fresh Python shows: `predict` alone does, for temporaries; and it is a
    function before and after the package of that name is imported."""
    code = ("import sys, threed\n"
            "assert not [name for name in sys.modules if name.startswith('threed.')]\n"
            "config = threed.load('configs/toy.yaml', ['parallel.pp=4'])\n"
            "plan = threed.plan(config)\n"
            "threed.check(plan), threed.show(plan)\n"
            "threed.Callback, threed.Run, threed.train, threed.generate, threed.Sampling\n"
            "import threed.program.costs\n"
            "heavy = {'torch', 'megatron', 'numpy', 'wandb', 'typer'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
            "assert threed.predict(plan)['step_time'] == threed.predict(config)['step_time'] > 0\n"
            "assert not {'wandb', 'typer'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_verbs_take_configs_and_plans(plan):
    config = threed.load("configs/toy.yaml")
    assert threed.check(plan) == threed.check(config) and threed.check(plan)["world_size"] == 8
    assert threed.show(plan) == threed.show(config) and "pp1 dp1     r6   r7" in threed.show(plan)
    assert threed.show(plan, rank=4).count("\n") + 1 == len(plan.programs["train"][1])
    assert threed.predict(plan)["step_time"] > threed.predict(plan, "launch_us=1")["step_time"] > 0


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
    (lambda plan: threed.predict(plan, "tflop=1"), "'tflop' is not one of"),
    (lambda plan: threed.predict(plan, costs="nowhere"), "no measured costs"),
    (lambda plan: threed.load("nowhere.yaml"), "no config file nowhere.yaml"),
    (lambda plan: threed.train("nowhere.yaml"), "no config file nowhere.yaml"),
    (lambda plan: threed.train(plan.config, ["train.steps=3"]), "overrides belong to a YAML file"),
    (lambda plan: CALL.train(plan.config, callbacks=[len]), r"callbacks\[0\] is a builtin_function"),
    (lambda plan: CALL.train(plan.config, callbacks=Callback()), "give a list"),
    (lambda plan: threed.Run("nowhere"), "no such run"),
    (lambda plan: CALL.Run(None), "path is of type NoneType: give the folder"),
    (lambda plan: CALL.train(plan), "config is of type Plan: give a Config, or the path"),
    (lambda plan: CALL.train(None), "config is of type NoneType: give a Config, or the path"),
    (lambda plan: CALL.train("configs/toy.yaml", "train.steps=1"), "overrides is of type str: give a list"),
    (lambda plan: CALL.load("configs/toy.yaml", "parallel.pp=4"), "overrides is of type str: give a list"),
    (lambda plan: CALL.load("configs/toy.yaml", [3]), r"overrides\[0\] is of type int: give a text"),
    (lambda plan: CALL.load("configs/toy.yaml", world_size="8"), "world_size is of type str"),
    (lambda plan: CALL.load(7), "path is of type int"),
    (lambda plan: CALL.show(plan, rank="0"), "rank is of type str: give the number"),
    (lambda plan: CALL.show(plan, rank=True), "rank is of type bool: give the number"),
    (lambda plan: CALL.show(plan, program=["train"]), "program is of type list"),
    (lambda plan: CALL.show(plan, units=1), "units is of type int"),
    (lambda plan: threed.show(plan, rank=1, units="p"), "rank=1 and units=p: units are listed for all ranks"),
    (lambda plan: CALL.predict(plan, {"tflops": 1}), "hardware is of type dict: give a text"),
    (lambda plan: CALL.predict(plan, costs=1), "costs is of type int"),
    (lambda plan: threed.predict(plan, "foo=1"), "^hardware=foo=1: 'foo' is not one of"),
    (lambda plan: threed.check(dataclasses.replace(plan, programs={})), "no program 'train'.* has none"),
])
def test_bad_input(call, message, plan):
    with pytest.raises(InputError, match=message):
        call(plan)


@pytest.mark.parametrize("key, value, message", [
    ("zero.stage", 7, "zero.stage=7: must be one of"),
    ("parallel.tp", 3, "model.heads=8 is not divisible by parallel.tp=3"),
    ("offload.optimizer", "nvme", "needs offload.nvme_path"),
    ("parallel.schedule", "foo", "parallel.schedule=foo: must be one of"),
    ("optimizer.name", "foo", "optimizer.name=foo: must be one of"),
    ("parallel.dp", 0, "parallel.dp=0: must be 'auto' or an integer"),
    ("parallel.tp", "2", "parallel.tp='2': must be of type int"),
    ("zero.prefetch", True, r"zero.prefetch=True: must be of type int \| None"),
    ("optimizer.betas", [0.9, "x"], r"optimizer.betas=\[0.9, 'x'\]: must be of type list\[float\]"),
])
@pytest.mark.parametrize("verb", ["check", "plan", "show", "predict", "train"])
def test_a_config_that_a_script_changes(verb, key, value, message):
    """Every verb that takes a config validates it."""
    config = threed.load("configs/toy.yaml")
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=message):
        getattr(threed, verb)(config)


def test_a_config_that_a_script_makes():
    """All problems at once; `parallel.dp: auto` gets a number, and the script's config stays as it is."""
    config = threed.Config()
    assert threed.check(config)["world_size"] == 1 and config.parallel.dp == "auto"
    config.zero.stage, config.optimizer.name = 7, "foo"
    with pytest.raises(ConfigError) as caught:
        threed.check(config)
    assert len(caught.value.problems) == 2
    made: typing.Any = threed.Config
    with pytest.raises(ConfigError, match="parallel is of type dict: must be a ParallelConfig"):
        threed.plan(made(parallel={"pp": 2}))


def test_the_config_is_read_before_the_run(tmp_path, monkeypatch):
    """The file may be changed or gone when the run is over: the run is where the config said at its start."""
    from threed.api import plans as api

    file, folder = tmp_path / "mine.yaml", tmp_path / "run"
    file.write_text(f"run:\n  dir: {folder}\n")

    def start(source, callbacks):
        folder.mkdir()
        file.unlink()
        return 0, source.load(None)

    monkeypatch.setattr(api, "start", start)
    assert threed.train(file).path == folder


@pytest.mark.parametrize("argv, message", [
    ("show configs/toy.yaml --explain 3 --svg x.svg", "--explain and --svg"),
    ("show configs/toy.yaml --explain 3 --units zzz", "--explain and --units"),
    ("show configs/toy.yaml --units u --rank 4", "--units and --rank"),
    ("predict configs/toy.yaml --schedule zb-v", "CONFIG and --schedule"),
    ("predict configs/toy.yaml --pp 4", "CONFIG and --pp"),
    ("predict configs/toy.yaml --activation-limit 2x", "CONFIG and --activation-limit"),
    ("predict --schedule zb-v --hardware tflops=1", "--schedule and --hardware"),
    ("predict --schedule zb-v --costs nowhere", "--schedule and --costs"),
    ("memory configs/toy.yaml --dp 64", "CONFIG and --dp"),
    ("memory configs/toy.yaml --dtype fp16", "CONFIG and --dtype"),
    ("memory configs/toy.yaml --parameters 7e9", "give a CONFIG or --parameters N, and not both"),
])
def test_options_that_exclude_each_other(argv, message):
    """Are refused, and both are named: neither is left out in silence."""
    from threed.cli.main import app

    with pytest.raises(InputError, match=message):
        app(argv.split(), standalone_mode=False)


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("overrides", [
    [], ["model.tie_embeddings=false"], ["zero.stage=0"], ["zero.stage=3", "zero.persist_below=1000"],
    ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"], ["parallel.pp=1"],
])
def test_parameter_units(overrides):
    """p0 and all others, what is in them, who shares them, and bytes that add up to what a rank holds."""
    from threed.api.plans import list_units

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
    from threed.cli.main import app

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


class FailsWith(Callback):
    def __init__(self, metrics):
        self.metrics = metrics

    def on_step_end(self, trainer, step):
        step.metrics = self.metrics


def _step():
    trace: typing.Any = None
    return Step(7, 1.0, 1.0, True, trace, trace, {"train/loss": 1.0})


def test_a_callback_that_fails():
    """The message has the callback's name, its method, the rank and the line; errors meant for people pass
    unchanged."""
    trainer: typing.Any = FakeTrainer()
    where = f"ValueError: no such number \\({re.escape(__file__)}, line \\d+\\)"
    with pytest.raises(InputError, match=f"Fails: on_step_end after step 7 has failed on rank 3: {where}"):
        Guarded(Fails(ValueError("no such number"))).on_step_end(trainer, _step())
    with pytest.raises(InputError, match=r"^as it is$"):
        Guarded(Fails(InputError("as it is"))).on_step_end(trainer, _step())
    for metric in ("text", [0.5], True):
        with pytest.raises(InputError, match=r"metrics\['mine'\] = .* in step 7: a metric is a number"):
            Guarded(Fails(metric=metric)).on_step_end(trainer, _step())
    for metrics in (None, 7, {"mine": 1.0}):
        with pytest.raises(InputError, match=r"FailsWith.on_step_end has left step.metrics = .* add numbers"):
            Guarded(FailsWith(metrics)).on_step_end(trainer, _step())
    Guarded(Fails(metric=0.5)).on_step_end(trainer, _step())


def test_a_guard_passes_all_methods():
    """A new method of Callback that the guard forgets would never be called."""
    assert set(METHODS) <= set(vars(Guarded))
    assert all(method in (callback.__doc__ or "") for method in METHODS)


@pytest.mark.parametrize(("dp", "gpus", "sizes"), [("2", 8, [None]), ("auto", None, [None]),
                                                   ("auto", 8, [None, 8])])
def test_a_start_reads_its_file_once(dp, gpus, sizes, tmp_path, monkeypatch):
    """And validates it once, unless the number of GPUs decides dp, which the config must be read for."""
    from threed.api import start
    from threed.config import load as configs
    from threed.launcher import local

    file, read, asked, ran = tmp_path / "mine.yaml", [], [], []
    file.write_text(f"parallel:\n  dp: {dp}\n")
    of_file, of_values = configs._read_yaml, configs.of_values
    monkeypatch.setattr(configs, "_read_yaml", lambda path: read.append(path) or of_file(path))
    monkeypatch.setattr(configs, "of_values", lambda values, where, size: asked.append(size) or of_values(
        values, where, size))
    monkeypatch.setattr(local, "local_world_size", lambda device: gpus)
    monkeypatch.setattr(local, "run_local", lambda config, callbacks: ran.append(config.dp) or 0)
    assert start.start(configs.ConfigSource.read(file))[0] == 0
    assert read == [file] and asked == sizes and ran == [{"2": 2}.get(dp, gpus or 1)]
