"""Ranks as threads. Without transformers there is no oracle: pip install -e '.[dev]'."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("transformers") else ["test_oracle.py"]


@pytest.fixture(autouse=True)
def _one_core(one_core):
    """Of each test here."""
