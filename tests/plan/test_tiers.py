"""Tests in three sizes: each test runs in one of the smaller two; over its budget, a size fails."""

from __future__ import annotations

from tests.tiers import BUDGET_S, CORE, TESTS, is_core, over_budget, runs


def test_each_test_runs_once():
    """A test that neither `make test` nor `make verify` runs, or both do."""
    for core in (True, False):
        assert [tier for tier in ("test", "verify") if runs(tier, core)] == ["test" if core else "verify"]
        assert runs("matrix", core)
    assert is_core(TESTS / "plan" / "test_any.py", marked=False)
    assert [is_core(TESTS / "gloo" / "test_any.py", marked) for marked in (True, False)] == [True, False]
    assert all(folder.is_dir() for folder in CORE)


def test_budgets():
    """A size that grows without a word; one that fails where it has fewer cores than its budget is for."""
    for tier, budget_s in BUDGET_S.items():
        assert over_budget(tier, budget_s, 9 * budget_s, 2) == ("", False)
        assert over_budget(tier, 9 * budget_s, 2 * budget_s, 2) == ("", False)  # the machine was busy
        text, fails = over_budget(tier, budget_s + 1, 2 * budget_s + 2, 2)
        assert fails and f"make {tier} took {budget_s + 1} s" in text
        text, fails = over_budget(tier, budget_s + 1, 2 * budget_s + 2, 1)
        assert not fails and "Not a failure here" in text
