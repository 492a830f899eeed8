"""wandb fails in every way that a server, a key or an environment can: the run goes on. (Each test has a
process of its own, which alone imports wandb.)"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import WANDB, nobody, server, silent
from threed.base.errors import InputError
from threed.config.load import load
from threed.monitor.loggers import logger, wandb
from threed.monitor.loggers.logger import About
from threed.monitor.loggers.threaded import Beside
from threed.monitor.loggers.wandb import Wandb
from threed.monitor.state import ENDED
from threed.schema import Config

KEY = 40 * "a"


def toy(folder: Path, *overrides: str) -> Config:
    return load("configs/toy.yaml", [f"run.dir={folder}", *overrides])


def about(config: Config, said: list[str]) -> About:
    return About(config, 0, False, said.append)


def alone(body: Callable[[], None]) -> None:
    """Call in a process of its own, which alone imports wandb; an error in it is this test's."""
    receive, send = multiprocessing.Pipe(False)

    def run() -> None:
        for name in list(os.environ):
            if name.startswith("WANDB_"):
                del os.environ[name]
        try:
            body()
        except BaseException:
            send.send(traceback.format_exc())
        send.close()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    send.close()
    try:
        problem = receive.recv() if receive.poll(60) else "it hangs"
    except EOFError:
        problem = None
    process.kill()
    process.join()
    assert problem is None, problem


def goes_offline(folder: Path, url: str, key: str = KEY, **env: str) -> str:
    """The one line that is said when a run with monitor.wandb=auto goes offline."""
    os.environ.update(WANDB_BASE_URL=url, WANDB_API_KEY=key, **env)
    said: list[str] = []
    run, begin = Wandb(), time.monotonic()
    assert run.start(about(toy(folder), said), None)
    assert time.monotonic() - begin < 30
    run.metrics([(1, {"train/loss": 5.5, "perf/mfu": None})])
    run.finish(ENDED)
    os.environ.update(WANDB_MODE="")
    forget()
    (line,) = said
    assert "\n" not in line and line.startswith("warning: ") and line.endswith(
        "; wandb goes on offline, and `wandb sync` sends it later")
    assert len(list((folder / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    return line


def forget() -> None:
    """wandb reads the environment once in a process; a run has one of its own."""
    import wandb

    wandb.teardown()


def test_wandb_is_not_reached(tmp_path, monkeypatch):
    """Whatever a server does, the run goes on offline after one try, and leaves nothing beside its folder."""
    monkeypatch.setattr(logger, "PROBE_S", 0.5)
    monkeypatch.setattr(wandb, "INIT_S", 2.0)
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def body() -> None:
        import tempfile

        tempfile.tempdir = str(scratch)
        assert "cannot be reached: Connection refused" in goes_offline(tmp_path / "refuses", nobody())
        with silent() as url:
            assert "does not answer within 0.5 s" in goes_offline(tmp_path / "silent", url)
        for answer, words in (("hang", "does not answer"), (500, "answers with status 500"),
                              (503, "answers with status 503"), (401, "CommError"), (404, "CommError"),
                              (429, "wandb does not start"), (200, "invalid character '<'")):
            with server(answer) as found:
                assert words in goes_offline(tmp_path / f"answers {answer}", found.url)
        with server(404) as found:
            assert "API key must have" in goes_offline(tmp_path / "short key", found.url, "abc")
        assert "cannot be reached" in goes_offline(tmp_path / "name", "http://no-such-host.invalid")
        assert "WANDB_BASE_URL=nonsense is no address" in goes_offline(tmp_path / "no address", "nonsense")
        assert "WANDB_MODE=nonsense is none of" in goes_offline(tmp_path / "mode", nobody(),
                                                                WANDB_MODE="nonsense")
        assert not list(scratch.iterdir()), list(scratch.iterdir())

    alone(body)


def test_wandb_online(tmp_path, monkeypatch):
    """Asked for, it is needed for the first start; a run that has started once goes on without."""
    def body() -> None:
        os.environ.update(WANDB_BASE_URL=nobody(), WANDB_API_KEY=KEY)
        config = toy(tmp_path / "a", "monitor.wandb=online")
        with pytest.raises(InputError, match=r"wandb=online, but wandb's server .* cannot be reached"):
            Wandb().start(about(config, []), None)
        os.environ["THREED_RESTARTS"] = "1"
        said: list[str] = []
        assert Wandb().start(about(config, said), None) and "goes on offline" in said[0]
        forget()
        os.environ.update(WANDB_MODE="online")
        with server(200, WANDB) as found:
            os.environ["WANDB_BASE_URL"] = found.url
            run = Beside("wandb", Wandb(), said.append)
            noted: list[str] = []
            run.start(about(toy(tmp_path / "b"), said), None, noted.append)
            until = time.monotonic() + 60
            while not noted and time.monotonic() < until:
                time.sleep(0.1)
            assert noted == ["fake0001"]
            assert len(said) == 1 and "/run-" in run.logger.place
            found.answer = 500  # from now on: what it is sent stays on the disk
            run.call("metrics", 1, {"train/loss": 5.5})
            import psutil

            for child in psutil.Process().children(recursive=True):
                child.kill()  # wandb's own process
            until = time.monotonic() + 20
            while not run.is_off and time.monotonic() < until:
                run.call("metrics", 2, {"train/loss": 5.0})
                time.sleep(0.1)
            assert run.is_off and len(said) == 2
            assert said[1].startswith("warning: wandb is off: ") and "for `wandb sync`" in said[1]

    alone(body)
