"""Whether ranks that an elastic agent has started again go on: rank 0 decides by the failures so far."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from tests.harness import tiny
from threed.base.errors import InputError, WrongResult
from threed.base.restart import FailureNote
from threed.comm.environment import RankPlace, agent
from threed.launcher import elastic

KILLED = FailureNote("rank 1 on host2 was killed by SIGKILL", 137, step=3)
NAN = FailureNote("step 2: not finite", 1, "not finite", 2, rank=0)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    store = dist.HashStore()
    store.set(elastic.AGENT, agent())
    return store


def decide(tmp_path, *words: str):
    return elastic.decide(tiny(f"run.dir={tmp_path}", "run.restart_wait_s=1", *words))


@pytest.mark.parametrize(("notes", "wait_s", "words"), [
    ([], 0.0, ""),
    ([KILLED], 1.0, "restart 1 of 2 since the newest checkpoint, in 1 s: rank 1 on host2 was killed"),
    ([KILLED, KILLED], 2.0, "restart 2 of 2"),
    ([KILLED, KILLED, KILLED], None, "run.restarts=2 starts from the newest checkpoint have failed"),
    ([NAN], 1.0, "restart 1 of 2"),
    ([NAN, NAN], None, "it failed twice with the same error at step 2"),
    ([NAN, replace(NAN, step=5)], 2.0, "restart 2 of 2"),
    ([replace(NAN, final=True)], None, "a new start would fail in the same way"),
    ([replace(NAN, status=WrongResult.status)], None, "may hold wrong results of a machine"),
    ([replace(NAN, status=InputError.status)], None, "")])
def test_the_policy(notes, wait_s, words, store, tmp_path):
    for note in notes:
        elastic.note_failure(tmp_path, store, note)
    decided, text, status = decide(tmp_path, "run.restarts=2")
    assert decided == wait_s and words in text and status == (notes[-1].status if notes else 0)


def test_failures_before_a_newer_checkpoint_do_not_count(store, tmp_path, monkeypatch):
    for newest in ("step-00000002", "step-00000002", "step-00000004", "step-00000006"):
        monkeypatch.setattr(elastic, "latest_in", lambda folder, newest=newest: (newest, None))
        elastic.note_failure(tmp_path, store, KILLED)
    assert decide(tmp_path, "run.restarts=2")[:2] == (
        1.0,
        "restart 1 of 2 since the newest checkpoint, in 1 s: rank 1 on host2 was killed by SIGKILL at step 3")


def test_failures_of_another_launch_do_not_count(store, tmp_path):
    """Nor does a row that a rank has not finished. A launch begins with its agent."""
    elastic.note_failure(tmp_path, store, NAN)
    with (tmp_path / elastic.FAILURES).open("a") as file:
        file.write(json.dumps({**asdict(NAN), "agent": "host1-1-1", "newest": ""}) + '\n{"agent": "ho')
    assert decide(tmp_path, "run.restarts=2")[0] == 1.0


def test_torchruns_option_asks_for_restarts_too(store, tmp_path, monkeypatch):
    elastic.note_failure(tmp_path, store, KILLED)
    assert decide(tmp_path, "run.restarts=0")[0] is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert decide(tmp_path, "run.restarts=0")[0] == 1.0


def test_all_ranks_hear_of_a_refusal(store, tmp_path):
    for _ in range(2):
        elastic.note_failure(tmp_path, store, NAN)
    for rank in range(2):
        with pytest.raises(elastic.NoRestart, match="twice with the same error at step 2") as refused:
            elastic.begin(tiny(f"run.dir={tmp_path}"), RankPlace(rank, rank, 2, 2), store, "")
        assert refused.value.status == 1


def test_a_folder_that_cannot_be_written(store, tmp_path):
    (tmp_path / "run").write_text("no folder")
    elastic.note_failure(tmp_path / "run", store, KILLED)
    assert decide(tmp_path / "run")[0] == 0.0


@pytest.mark.parametrize(("note", "final"), [
    (KILLED, False), (NAN, False), (replace(NAN, status=2), True), (replace(NAN, status=143), True),
    (replace(KILLED, final=True), True), (FailureNote("", 137), False)])
def test_after_what_no_start_is_of_use(note, final, store):
    assert elastic.is_final(note) == final


@pytest.mark.parametrize(("local", "count", "ends"), [("0", "0", True), ("1", "0", False), ("0", "3", False)])
def test_the_first_rank_of_a_machine_ends_its_agent(local, count, ends, store, monkeypatch):
    """Where the agent would start ranks again."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("LOCAL_RANK", local)
    sent = []
    monkeypatch.setattr(elastic, "HEARD_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    elastic.end_agent(1)
    assert sent == ([(os.getppid(), signal.SIGQUIT)] if ends else [])


def test_torch_reads_the_reason(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    elastic.error_file("rank 3: no space left")
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "RunError: rank 3: no space left"
