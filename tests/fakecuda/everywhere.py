"""A plugin of pytest: loopback's ranks have fake GPUs, in every test, and a test with a race fails.

    python -m pytest -p tests.fakecuda.everywhere tests/loopback
"""

from __future__ import annotations

import os

import pytest

from tests.fakecuda import build, shim

WHY_NOT = build.missing()
if not WHY_NOT:
    shim.install()

# What a test here is about, where that is not the device: file, or file::test, and why it stays on the CPU.
ON_CPU: dict[str, str] = {}


def pytest_configure(config):
    if WHY_NOT:
        pytest.exit(f"skipped: {WHY_NOT}", returncode=0)
    from tests.fakecuda import transport

    transport.use()


def pytest_collection_modifyitems(items):
    for item in items:
        name = os.path.basename(item.path)
        reasons = [why for place, why in ON_CPU.items() if f"{name}::{item.name}".startswith(place)]
        if reasons:
            item.add_marker(pytest.mark.skip(reason=reasons[0]))


@pytest.fixture(autouse=True)
def _no_race():
    shim.installed.reset()
    yield
    races = shim.installed.races()
    assert not races, "\n".join(sorted(set(races))[:8])
