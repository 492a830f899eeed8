"""Ranks as threads."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_core(one_core):
    """Of each test here."""
