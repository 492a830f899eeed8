"""When a run is started again, and after what wait."""

from __future__ import annotations

import pytest

from threed.base.restart import LONGEST_WAIT_S, FailureNote, RankSteps, Restarts


def fails(step: int, cause: str | None = None, status: int = 1) -> FailureNote:
    return FailureNote("it failed", status, cause, step)


def test_waits_double_up_to_a_limit():
    restarts = Restarts(10, 5.0)
    waits = [restarts.after(fails(step), "step-4")[0] for step in range(5, 15)]
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S,
                     LONGEST_WAIT_S]
    assert restarts.after(fails(15), "step-4")[0] is None and restarts.total == 10
    assert Restarts(1, 1000.0).after(fails(1), "")[0] == 1000.0, "what was asked for is no less than that"


def test_a_newer_checkpoint_begins_the_count_anew():
    restarts = Restarts(2, 1.0)
    waits = [restarts.after(fails(9), newest)[0] for newest in ("", "", "a", "b", "b", "b")]
    assert waits == [1.0, 2.0, 1.0, 1.0, 2.0, None]


def test_the_same_twice_is_the_run_s():
    """A failure at the same step for the same reason, even with others between, is the run's own; one from
    outside is not."""
    restarts = Restarts(10, 1.0)
    assert restarts.after(fails(7, "a hang"), "")[0] and restarts.after(fails(8, "a hang"), "")[0]
    assert restarts.after(fails(7, "nan"),
                          "")[0] and restarts.after(fails(7), "")[0] and restarts.after(fails(7), "a")[0]
    wait_s, text = restarts.after(fails(7, "nan"), "b")
    assert wait_s is None and "failed twice with the same error at step 7" in text
    early = Restarts(10, 1.0)
    assert early.after(fails(0, "nan"), "")[1].endswith("it failed before the first step")
    assert early.after(fails(0, "nan"), "")[0] is None
    later = Restarts(10, 1.0)
    for newest in ("a", "b", "c"):
        assert later.after(fails(0, "a hang"),
                           newest)[0], "between two failures before the first step the run got on"
    assert later.after(fails(9, "nan"), "c")[0] and later.after(fails(9, "nan"), "d")[0] is None


def test_never():
    """After a mistake in the config, or with run.restarts=0: no restart, and no message about restarts."""
    assert Restarts(10, 1.0).after(fails(1, status=2),
                                   "") == (None, "") == Restarts(0, 1.0).after(fails(1), "")


def test_steps():
    steps = RankSteps(3)
    steps.of(2).begin(7)
    steps.of(2).begin(8)
    assert [steps.at(rank) for rank in range(3)] == [0, 0, 8]


def test_an_answer_to_a_request_to_stop(monkeypatch):
    """It says which step is under way, since when, and how long one takes: as predicted, then as measured."""
    now = 100.0
    monkeypatch.setattr("threed.base.restart.time.monotonic", lambda: now)
    pace = RankSteps(1).of(0)
    once_more = "; once more to stop now, without "
    assert pace.answer() == f"stopping after the first step, which has not begun{once_more}a checkpoint"
    pace.begin(1)
    now += 30.0
    assert pace.answer() == f"stopping after step 1 (started 30.0 s ago){once_more}a checkpoint"
    pace.expect(4542.0)
    assert "(started 30.0 s ago; a step takes about 75.7 min)" in pace.answer()
    pace.begin(2)
    now += 5.0
    assert "after step 2 (started 5.0 s ago; a step takes about 30.0 s)" in pace.answer()
    pace.end()
    assert pace.answer() == f"the run ends after step 2, and saves its last checkpoint{once_more}it"


@pytest.mark.parametrize(("first", "second", "same"), [
    # a full disk, as rank 1 and as rank 0 see it, in folders with random names
    ("rank 1 cannot write to a/checkpoints/step-00000006.936cdfbe.tmp: [Errno 28] No space left on device",
     "rank 0 cannot write to a/checkpoints/step-00000006.7cab30b4.tmp: [Errno 28] No space left on device",
     True),
    ("rank 1 on alpha: No space left on device", "rank 0 on beta: No space left on device", True),
    ("OSError: [Errno 5] Input/output error: '/my data/a.bin'",
     "OSError: [Errno 5] Input/output error: '/my data/b.bin'", True),
    ("KeyError: 'state of 0x7f12ab'", "KeyError: 'state of 0x7fe0cd'", True),
    ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 512 MiB free",
     "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has 20.5 MiB free", True),
    ("process 4711 at 10.0.0.1:29500 refused", "process 12 at 10.0.0.7:31000 refused", True),
    ("KeyError: 'exp_avg'", "KeyError: 'momentum'", False),
    ("rank 0: No space left on device", "rank 0: Input/output error", False)])
def test_what_a_repetition_has_otherwise(first, second, same):
    """The same failure is known again whichever rank sees it first, and wherever its files are."""
    restarts = Restarts(10, 1.0)
    assert restarts.after(fails(6, first), "")[0] == 1.0
    assert (restarts.after(fails(6, second), "")[0] is None) == same


def test_a_failure_that_would_surely_come_again():
    """It is not waited for: an error of the code before the first step, a last checkpoint that cannot be
    saved."""
    failure = FailureNote("AttributeError: flush\nmore", 1, "flush", 0, final=True)
    assert failure.text == "AttributeError: flush"
    assert Restarts(3, 1.0).after(failure, "") == (None, "not started again: a new start would fail in the "
                                                         "same way")
    assert Restarts(3, 1.0).after(fails(0), "")[0] == 1.0
