"""Fake GPUs for the tests here."""

from __future__ import annotations

import pytest

from tests.fakecuda import build
from tests.fakecuda.server import Server


@pytest.fixture(scope="session")
def fake_gpus():
    """A process with sixteen fake GPUs (server.py). Skips, with the reason, where they cannot be made."""
    if why := build.missing():
        pytest.skip(why)
    build.extension()
    server = Server()
    yield server
    server.close()
