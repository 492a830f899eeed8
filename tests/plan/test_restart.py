"""When a run is started again, and after what wait."""

from __future__ import annotations

from threed.restart import LONGEST_WAIT_S, Failure, Restarts, Steps


def fails(step: int, cause: str | None = None, status: int = 1) -> Failure:
    return Failure("it failed", cause, step, status)


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
    assert wait_s is None and "failed at step 7 before" in text
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
    steps = Steps(3)
    steps.note(2, 7)
    steps.note(2, 8)
    assert [steps.at(rank) for rank in range(3)] == [0, 0, 8]
