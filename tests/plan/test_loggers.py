"""Loggers: what each is told, by its own library; and that none of them ends or holds up a run."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.servers import MLFLOW, nobody, server, silent
from threed.base.errors import InputError
from threed.config.load import load
from threed.monitor.loggers import logger
from threed.monitor.loggers import threaded as beside
from threed.monitor.loggers.logger import (
    About,
    Logger,
    check_installed,
    make,
    unreachable,
)
from threed.monitor.loggers.mlflow import MLflow
from threed.monitor.loggers.prometheus import Prometheus
from threed.monitor.loggers.threaded import Beside
from threed.monitor.loggers.trackio import Trackio
from threed.monitor.loggers.wandb import Wandb, wandb_mode
from threed.monitor.state import ENDED, STOPPED
from threed.schema import LOGGERS, Config

ROW = {"train/loss": 5.5, "time/compute": 0.4, "time/compute/0": 0.3, "time/compute/1": 0.5, "perf/mfu": None,
       "val/loss": float("nan"), "run/time": 1.7e9}
KEY = 40 * "a"


@pytest.fixture(autouse=True)
def environment():
    """Loggers set variables of their libraries."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def toy(folder: Path | str, *overrides: str) -> Config:
    return load("configs/toy.yaml", [f"run.dir={folder}", *overrides])


def about(config: Config, step: int = 0, said: list[str] | None = None) -> About:
    return About(config, step, step > 0, [].append if said is None else said.append)


# ---- wandb

@pytest.fixture
def told(monkeypatch) -> dict[str, Any]:
    """What `wandb.init` was given, and the metrics that were defined."""
    found: dict[str, Any] = {"metrics": {}, "rows": []}

    def define(name: str, **how: Any) -> None:
        found["metrics"][name] = how

    def init(**given: Any) -> Any:
        found.update(given)
        return SimpleNamespace(define_metric=define, id="id1", dir="runs/wandb/run/files",
                               log=lambda row, step: found["rows"].append((step, row)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    return found


def test_a_run_has_a_name(told):
    """Two runs side by side can be told apart, found by their settings, and put into a group."""
    first = Wandb()
    config = toy("runs/first", "monitor.wandb=offline", "parallel.pp=4")
    assert first.start(about(config), None) == "id1" and first.place == "runs/wandb/run"
    assert told["name"] == "first pp4 dp2 tp2" and told["group"] is None and told["id"] is None
    assert told["tags"] == ["pp4", "dp2", "tp2", "1f1b", "zero1", "fp32"]
    assert told["config"]["facts"] == {"parameters": 1_651_968, "world_size": 16, "tokens_per_step": 4096,
                                       "micro_batches": 4}
    config = toy("runs/a", "monitor.wandb=offline", "monitor.name=mine", "monitor.group=all",
                 "monitor.tags=[a,b]")
    Wandb().start(about(config), "id7")
    assert (told["name"], told["group"], told["tags"][:2], told["id"]) == ("mine", "all", ["a", "b"], "id7")


def test_single_positions_get_no_charts(told):
    """At pp=16 they would be 128; their means over positions have charts."""
    Wandb().start(about(toy("runs/a", "monitor.wandb=offline")), None)
    hidden = {name for name, how in told["metrics"].items() if how.get("hidden")}
    assert {"time/compute/*", "time/idle/*", "pipeline/bubble_measured/*", "run/*"} <= hidden
    assert not {"time/compute", "train/loss", "time/*", "pipeline/*"} & hidden
    assert told["metrics"]["train/loss"] == {"summary": "min"}
    assert all("*" not in name[:-1] for name in told["metrics"])  # wandb knows a star at the end only


@pytest.mark.parametrize(("setting", "env", "mode"), [
    ("auto", {}, "offline"), ("auto", {"WANDB_API_KEY": KEY}, "online"), ("offline", {"WANDB_MODE": "online"},
                                                                         "offline"),
    ("auto", {"WANDB_MODE": "online"}, "online"), ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
    ("auto", {"WANDB_MODE": "Disabled"}, "disabled"), ("online", {"WANDB_MODE": "nonsense"}, "online"),
    ("auto", {"WANDB_MODE": "nonsense", "WANDB_API_KEY": KEY}, "offline")])
def test_modes(setting, env, mode, monkeypatch):
    os.environ.update(env)
    found, problem = wandb_mode(setting)
    assert found == mode and (problem is None) == (setting != "auto" or env.get("WANDB_MODE") != "nonsense")


# ---- the others

def test_mlflow(tmp_path):
    """A local store, read back by MLflow; a run that goes on is the same run."""
    config = toy(tmp_path / "run", "monitor.project=mine", "monitor.group=sweep")
    run = MLflow()
    run_id = run.start(about(config), None)
    run.metrics([(1, ROW), (2, {**ROW, "train/loss": 5.0})])
    run.texts(2, [("to be", " or not")])
    run.picture(2, "<svg/>")
    run.finish(STOPPED)
    (metrics,) = (tmp_path / "run" / "mlflow").glob(f"*/{run_id}/metrics")
    (metrics / "train" / "killed").touch()  # before its first number was written
    again = MLflow()
    assert again.start(about(config, 2), run_id) == run_id
    again.metrics([(3, {"train/loss": 4.0})])
    again.finish(ENDED)
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "run" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None and run_id is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == run_id and found.info.status == "FINISHED"
    assert found.info.run_name == "run pp2 dp2 tp2" and found.data.tags["group"] == "sweep"
    assert found.data.params["model.hidden"] == "128" and found.data.params["facts.world_size"] == "8"
    history = client.get_metric_history(run_id, "train/loss")
    assert [(item.step, item.value, item.timestamp) for item in history] == [
        (1, 5.5, 1_700_000_000_000), (2, 5.0, 1_700_000_000_000), (3, 4.0, 0)]
    assert found.data.metrics["time/compute_by_position/1"] == 0.5 and "perf/mfu" not in found.data.metrics
    assert {file.path for file in client.list_artifacts(run_id)} == {"texts", "timeline"}


def off(name: str, made: Logger, config: Config) -> str:
    """The line with which a logger that fails while it starts is off."""
    said: list[str] = []
    run = Beside(name, made, said.append)
    run.start(about(config, 0, said), None, print)
    run.call("metrics", 1, ROW)
    run.finish(ENDED)
    assert run.wait(10) and run.is_off
    (line,) = said
    assert "\n" not in line and line.startswith(f"warning: {name} is off: ")
    return line


def test_mlflow_is_not_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "PROBE_S", 0.5)
    monkeypatch.setitem(os.environ, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

    def with_address(url: str) -> str:
        os.environ["MLFLOW_TRACKING_URI"] = url
        return off("mlflow", MLflow(), toy(tmp_path))

    assert "Connection refused" in with_address(nobody())
    assert "URI" in with_address("nonsense://x")
    with silent() as url:
        assert "does not answer within 0.5 s" in with_address(url)
    for answer, words in (("hang", "does not answer"), (500, "status 500"), (401, "401"), (200, "")):
        with server(answer) as found:
            assert words in with_address(found.url)
    said: list[str] = []
    with server(200, MLFLOW) as found:
        os.environ["MLFLOW_TRACKING_URI"] = found.url
        run = Beside("mlflow", MLflow(), said.append)
        noted: list[str] = []
        run.start(about(toy(tmp_path)), None, noted.append)
        while not noted and not said:
            time.sleep(0.05)
        assert noted == ["r1"] and not said
    run.call("metrics", 1, ROW)  # the server has gone
    assert run._over.wait(30) and run.is_off and said[0].startswith("warning: mlflow is off: ")


def test_trackio(tmp_path):
    """A local database, read back by its own library."""
    run = Trackio()
    assert run.start(about(toy(tmp_path / "run", "monitor.project=mine")), None) == "run pp2 dp2 tp2"
    run.metrics([(1, ROW), (2, {**ROW, "train/loss": 5.0})])
    run.texts(2, [("to be", " or not")])
    run.finish(ENDED)
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("mine", "run pp2 dp2 tp2")
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [(1, 5.5), (2, 5.0)]
    assert list((tmp_path / "run" / "trackio").glob("mine.db"))


def scraped(address: str) -> dict[str, Any]:
    """Samples by name, position."""
    from prometheus_client.parser import text_string_to_metric_families

    text = (urllib.request.urlopen(address, timeout=10).read() if address.startswith("http")
            else Path(address).read_bytes()).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"run pp2 dp2 tp2"}
    return {sample.name + sample.labels.get("position", ""): sample.value for sample in samples}


def test_prometheus(tmp_path):
    """Text on a port, and the same in a file."""
    file, said = tmp_path / "collector" / "threed.prom", []
    run = Prometheus()
    run.start(about(toy(tmp_path / "run", "monitor.loggers=[prometheus]", "monitor.prometheus_port=0",
                        f"monitor.prometheus_file={file}"), 4, said), None)
    url = run.place.split(", ")[0]
    assert said == [f"prometheus reads {url}"]
    assert scraped(url) == scraped(str(file)) == {"threed_running": 1, "threed_step": 4}
    run.metrics([(5, ROW), (6, {**ROW, "train/loss": 5.0})])
    found = scraped(url)
    assert (found["threed_step"], found["threed_train_loss"], found["threed_time_compute"]) == (6, 5.0, 0.4)
    assert found["threed_time_compute_by_position0"] == 0.3 and math.isnan(found["threed_perf_mfu"])
    run.finish(ENDED)
    assert scraped(str(file))["threed_running"] == 0 and os.listdir(file.parent) == ["threed.prom"]
    with pytest.raises(OSError):
        scraped(url)


def test_prometheus_cannot(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port, file = taken.getsockname()[1], tmp_path / "threed.prom"
        here = [f"monitor.prometheus_port={port}", "monitor.loggers=[prometheus]"]
        line = off("prometheus", Prometheus(), toy(tmp_path, *here))
        assert f"monitor.prometheus_port={port} cannot be used: Address already in use" in line
        said, run = [], Prometheus()
        run.start(about(toy(tmp_path / "run", *here, f"monitor.prometheus_file={file}"), 0, said), None)
        assert "the run goes on with" in said[0] and scraped(str(file))["threed_running"] == 1
    line = off("prometheus", Prometheus(), toy(tmp_path, "monitor.loggers=[prometheus]",
                                               "monitor.prometheus_file=/proc/none/threed.prom"))
    assert "/proc/none" in line


# ---- beside the training

class Bad(Logger):
    """Does what it is told in each method."""

    kept = "; it is in x"

    def __init__(self, **what: Callable[[], Any]):
        self.what, self.calls = what, []

    def start(self, about: About, run_id: str | None) -> str | None:
        self.what.get("start", lambda: None)()
        return "me"

    def metrics(self, rows: Any) -> None:
        self.calls += rows
        self.what.get("metrics", lambda: None)()

    def picture(self, step: int, svg: str) -> None:
        self.calls.append((step, svg))

    def finish(self, state: str) -> None:
        self.what.get("finish", lambda: None)()
        self.calls.append(state)


def fails() -> None:
    raise OSError(28, "No space left on device")


def test_calls_keep_their_order(tmp_path):
    made, said, noted = Bad(), [], []
    run = Beside("x", made, said.append)
    run.start(about(toy(tmp_path)), None, noted.append)
    run.call("metrics", 1, {})
    run.call("picture", 2, "svg")
    run.call("metrics", 2, {})
    run.call("metrics", 3, {})
    run.finish("ended")
    assert run.wait(10) and not said and noted == ["me"]
    assert made.calls == [(1, {}), (2, "svg"), (2, {}), (3, {}), "ended"]


@pytest.mark.parametrize("where", ["start", "metrics", "finish"])
@pytest.mark.parametrize("how", [fails, sys.exit, lambda: 1 / 0])
def test_a_failure_is_a_line(where, how, tmp_path):
    """Once, whatever comes later; SystemExit of a library too."""
    said: list[str] = []
    run = Beside("x", Bad(**{where: how}), said.append)
    run.start(about(toy(tmp_path)), None, print)
    for step in range(3):
        run.call("metrics", step, {})
    run.finish("ended")
    assert run._over.wait(10) and run.is_off
    (line,) = said
    assert line.startswith("warning: x is off: ") and line.endswith(
        "The run goes on, and metrics.jsonl has every step; it is in x")


def test_a_logger_that_hangs(tmp_path, monkeypatch):
    """At its start, too, the run does not wait; it is told, and at last gives the logger up."""
    monkeypatch.setattr(beside, "LATE_S", 0.2)
    monkeypatch.setattr(beside, "MOST_WAITING", 5)
    for where in ("start", "metrics"):
        over, said, noted = threading.Event(), [], []
        run, began = Beside("x", Bad(**{where: over.wait}), said.append), time.monotonic()
        run.start(about(toy(tmp_path)), None, noted.append)
        run.call("metrics", 1, {})
        assert time.monotonic() - began < 0.2
        time.sleep(0.4)
        run.call("metrics", 2, {})
        assert "x has not answered for 0.2 s; the run goes on" in said[0]
        run.finish("ended")
        assert not run.wait(0.1) and not run.is_off and bool(noted) == (where == "metrics")
        for step in range(3, 8):
            run.call("metrics", step, {})
        assert run.is_off and " steps behind" in said[1] and len(said) == 2
        over.set()


def test_a_logger_that_starts_late_gets_all_steps(tmp_path):
    over, made = threading.Event(), Bad(start=lambda: over.wait(10))
    run = Beside("x", made, print)
    run.start(about(toy(tmp_path)), None, print)
    for step in range(1, 4):
        run.call("metrics", step, {})
    over.set()
    run.finish("ended")
    assert run.wait(10) and made.calls == [(1, {}), (2, {}), (3, {}), "ended"]


@pytest.mark.parametrize("name", LOGGERS)
def test_no_library_holds_up_the_first_step(name, tmp_path, monkeypatch):
    """Each imports its library, or asks its server, beside the training, however long that takes."""
    over, asked = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        asked.set()
        over.wait(10)
        raise ConnectionError("it has taken long")

    made, said, began = make(name), [], time.monotonic()
    monkeypatch.setattr(made, "start", slow)
    run = Beside(name, made, said.append)
    run.start(about(toy(tmp_path)), None, print)
    assert time.monotonic() - began < 2 and asked.wait(10)
    over.set()
    assert run._over.wait(10) and run.is_off and said[0].startswith(f"warning: {name} is off: ")


def test_a_server_that_is_asked_for_is_waited_for(tmp_path, monkeypatch):
    """monitor.wandb=online: the run does not start without it; for so long alone."""
    monkeypatch.setattr(beside, "START_S", 0.2)
    config, over, said = toy(tmp_path, "monitor.wandb=online"), threading.Event(), []
    made = make("wandb")
    assert made.required(about(config)) and not made.required(about(toy(tmp_path)))

    def refuses(*_: object) -> None:
        raise InputError("no server")

    monkeypatch.setattr(made, "start", refuses)
    with pytest.raises(InputError, match="no server"):
        Beside("wandb", made, said.append).start(about(config), None, print)
    monkeypatch.setattr(made, "start", lambda *_: over.wait(10))
    Beside("wandb", made, said.append).start(about(config), None, print)
    assert "has not started within 0.2 s" in said[0]
    over.set()


def test_a_library_that_is_not_here(monkeypatch):
    config = toy("runs/a", "monitor.loggers=[wandb,mlflow]")
    check_installed(config)
    monkeypatch.setattr(logger, "find_spec", lambda name: None if name == "mlflow" else name)
    with pytest.raises(InputError, match=r"has mlflow, whose library .* pip install mlflow-skinny, or leave"):
        check_installed(config)


def test_names():
    assert all(isinstance(make(name), Logger) for name in LOGGERS)


@pytest.mark.parametrize(("overrides", "says"), [
    (["monitor.loggers=[tensorbord]"], "tensorbord is none of wandb, .*; did you mean tensorboard"),
    (["monitor.loggers=[mine]"], "or a row of threed.extend.LOGGERS"),
    (["monitor.loggers=[wandb,wandb]"], "wandb is named twice"),
    (["monitor.loggers=[prometheus]"], "give monitor.prometheus_port"),
    (["monitor.prometheus_port=9400"], r"port=9400 has no effect: monitor.loggers=\[wandb\] lacks"),
    (["monitor.prometheus_file=x.prom"], "monitor.prometheus_file=x.prom has no effect"),
    (["monitor.loggers=[prometheus]", "monitor.prometheus_port=70000"], "between 0 and 65535"),
    (["monitor.loggers=tensorboard"], "must be a list")])
def test_wrong_settings(overrides, says):
    with pytest.raises(InputError, match=says):
        toy("runs/a", *overrides)


def test_servers_that_do_not_answer(monkeypatch):
    """Within seconds, in words that name the address."""
    monkeypatch.setattr(logger, "PROBE_S", 0.3)
    assert "cannot be reached: Connection refused" in (unreachable(nobody()) or "")
    with silent() as url:
        assert unreachable(url) == f"{url} does not answer within 0.3 s"
    with server("hang") as found:
        assert unreachable(found.url) == f"{found.url} does not answer within 0.3 s"
    for answer in (200, 401, 404, 429):
        with server(answer) as found:
            assert unreachable(found.url) is None  # it is for a library to say what is wrong
    with server(502) as found:
        assert unreachable(found.url) == f"{found.url} answers with status 502"


def test_certificates_are_not_judged(monkeypatch):
    """A server may have one that another library accepts."""
    import ssl

    def refuses(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError(ssl.SSLCertVerificationError("self-signed"))

    monkeypatch.setattr(urllib.request, "urlopen", refuses)
    assert unreachable("https://example.org") is None and unreachable("file:///x") is None
