"""bench/gpu where a measurement fails, dies or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib import import_module

import pytest
import torch


def fails() -> None:
    try:
        raise ZeroDivisionError("the cause\nand more")
    except ZeroDivisionError as error:
        raise RuntimeError("where it was") from error


def test_a_call_that_goes_wrong_ends_no_other():
    outcomes = import_module("bench.gpu.apart").outcomes

    def process() -> int:
        return os.getpid()

    calls = [process, process, fails, process, lambda: os.kill(os.getpid(), 9), lambda: os._exit(7),
             lambda: time.sleep(60), process]
    got = list(outcomes(calls, lambda: 1.0))
    assert [outcome.failure for outcome in got] == [
        None, None, "ZeroDivisionError: the cause", None, "its process ended with signal 9",
        "its process ended with status 7", "took longer than 1 s", None]
    first, second, third, last = (got[index].value for index in (0, 1, 3, 7))
    assert first == second and len({first, third, last, os.getpid()}) == 4
    assert got[6].seconds < 5


def test_facts_go_on(monkeypatch, capsys):
    facts, fact = map(import_module, ("bench.gpu.facts", "bench.gpu.fact"))

    def hangs(at):
        time.sleep(60)

    def lacks(at):
        raise fact.Missing("no such thing")

    def raises(at):
        fails()

    def works(at):
        return f"{at.device} here"

    monkeypatch.setattr(facts, "LIMIT_S", 1)
    monkeypatch.setattr(facts, "FACTS", [fact.Fact(ask, gpu, alone) for ask, gpu, alone in (
        (hangs, False, False), (works, False, False), (lacks, False, True), (raises, False, True),
        (works, False, False))])
    assert facts.main([]) == 1
    lines = [line.rpartition(" [")[0] or line for line in capsys.readouterr().out.splitlines()]
    assert lines == ["hangs: FAILS: took longer than 1 s", "works: cpu here", "lacks: none: no such thing",
                     "raises: FAILS: ZeroDivisionError: the cause", "works: cpu here",
                     "5 facts, 2 fail: hangs, raises"]


def test_facts_of_this_machine():
    """Without a GPU most say so, which is no failure."""
    done = subprocess.run([sys.executable, "-m", "bench.gpu.facts", "--only", "versions,host,compilers,gpu"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gpu: none: no GPU" in done.stdout and done.stdout.endswith("4 facts, 0 fail\n")
    wrong = subprocess.run([sys.executable, "-m", "bench.gpu.facts", "--only", "vresions"],
                           capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "there is no fact vresions; there are versions, " in wrong.stderr


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """bench/gpu/models.py with measurements that are given."""
    gpu, side = map(import_module, ("bench.gpu.models", "bench.gpu.side"))

    def call(ours, torchs, *more: str):
        monkeypatch.setattr(gpu, "machine", lambda dtype, small: side.Machine("a GPU", 1 << 30, 1e12, 1e12))
        monkeypatch.setattr(gpu, "ours", ours)
        monkeypatch.setattr(gpu, "torchs", torchs)
        monkeypatch.setattr(gpu, "gain", lambda *args: [[2.0, 1.0], [1 << 20, 1 << 20]])
        status = gpu.main(["--small", *more, "--markdown", str(tmp_path / "gpu.md"),
                           "--json", str(tmp_path / "gpu.json")])
        return status, json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()

    call.row = side.Row(10, "none", "flash", 0.5, 1000, 4e11, 0.4, 1 << 20, 1 << 20,
                   [{"unit": "head", "op": "FORWARD", "s": 0.2, "by_flops_s": 0.1, "by_bytes_s": 0.05}])
    call.out = capsys
    return call


def test_models_that_fail_are_rows(run):
    def ours(size, *rest):
        if size.seq_len == 64:
            os.kill(os.getpid(), 9)
        return run.row

    status, kept, text = run(ours, lambda *args: fails(), "--settings", "cuda_graphs")
    assert status == 1
    assert kept["models"]["tiny"]["failure"] == "its process ended with signal 9"
    other = kept["models"]["tiny-long"]
    assert (other["step_s"], other["torch_failure"]) == (0.5, "ZeroDivisionError: the cause")
    assert "| tiny | - |" in text and "| 40.0% |" in text
    assert "| cuda_graphs | 2000.00 | 1000.00 | 0.50 |" in text
    assert "failed: tiny\n" in run.out.readouterr().out


def test_a_peer_that_fails_is_no_failure_of_threed(run):
    status, _, text = run(lambda *args: run.row, lambda *args: fails(), "--settings")
    assert status == 0 and "torch: ZeroDivisionError: the cause" in text and "## Settings" not in text


def test_a_model_that_does_not_fit_is_a_row_with_its_bytes(run):
    fitting = import_module("bench.gpu.side").fitting

    status, kept, text = run(lambda size, *rest: fitting(size, 1 << 20), lambda *args: 1.0,
                             "--models", "tiny", "--settings")
    why = kept["models"]["tiny"]["failure"]
    assert status == 0 and "MiB are planned with everything recomputed; 85% of" in why
    assert why in text


def test_when_the_time_is_over_the_rest_is_left_out(run, monkeypatch):
    """What is under way then is stopped."""
    monkeypatch.setattr("bench.gpu.models.LEAST_S", 1)
    status, kept, _ = run(lambda *args: time.sleep(60), lambda *args: 1.0, "--seconds", "3", "--settings")
    assert status == 0
    tiny, other = (model["failure"] for model in kept["models"].values())
    assert tiny.startswith("left out: stopped after") and other.startswith("left out: 0 s are left")


def test_each_measurement_is_written_at_once(run, tmp_path):
    """The second model reads what the first one has left."""
    def ours(size, *rest):
        if size.seq_len > 64:
            assert json.loads((tmp_path / "gpu.json").read_text())["models"]["tiny"]["torch_s"] == 1.0
        return run.row

    status, _, _ = run(ours, lambda *args: 1.0, "--settings")
    assert status == 0


@pytest.mark.parametrize(("words", "says"), [
    (["--models", "9T"], "there is no 9T; there are tiny, tiny-long"),
    (["--settings", "fast"], "there is no fast"), (["--seconds", "0"], "--seconds above 0"),
])
def test_bad_words(words, says, run):
    with pytest.raises(SystemExit):
        run(partial(fails), partial(fails), *words)
    assert says in run.out.readouterr().err


def test_losses_of_runs_are_compared(tmp_path, capsys, monkeypatch):
    losses = import_module("bench.gpu.losses")

    def write(name: str, *values: float) -> str:
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "train/loss": value}) for step, value in enumerate(values, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2, "val/loss": 9}', ""]))
        return str(tmp_path / name)

    runs = [write("plain", 3.0, 2.0, 1.0), write("same", 3.0, 2.01), write("other", 3.0, 2.1),
            str(tmp_path / "absent")]
    assert losses.main(runs) == 1
    assert ("same 0.0100 in 2 steps, other 0.1000 in 2 steps WRONG, absent cannot be read (FileNotFoundError)"
            in capsys.readouterr().out)
    assert losses.main(runs[:2]) == 0


def test_a_job_that_waits_is_told_to_its_lane():
    """A lane of copies has a thread for jobs that wait for the device, also where it is watched."""
    watched, lanes = map(import_module, ("bench.gpu.watched", "threed.comm.lanes"))
    given = []

    class Takes(lanes.Lane):
        at_once, defers = False, False

        def submit(self, job, after=()):
            given.append(job)
            job()
            return lanes.DONE

    lane = watched.TimedLane(Takes(torch.device("cpu")), time.monotonic)
    ran = []
    lane.submit(partial(ran.append, 1))
    lane.submit(lanes.Waiting(partial(ran.append, 2)))
    assert ran == [1, 2] and [isinstance(job, lanes.Waiting) for job in given] == [False, True]
    assert len(lane.marks) == 2 and (lane.at_once, lane.defers) == (False, False)


def test_the_host_steps_the_same_in_any_memory():
    """And leaves the number of threads as it was."""
    host_step = import_module("bench.gpu.host_step")
    before = torch.get_num_threads()
    for memory in host_step.memories(False):
        assert host_step.zeros(1000, memory).count_nonzero() == 0
        rates = host_step.rates(memory, 1000, [1, 2], 1, False)
        assert [(rate.memory, rate.threads, rate.beside) for rate in rates] == [(memory, 1, 0),
                                                                                (memory, 2, 0)]
        assert all(rate.alone > 0 for rate in rates)
    assert torch.get_num_threads() == before
