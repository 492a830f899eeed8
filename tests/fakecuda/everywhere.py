"""A plugin of pytest: loopback's ranks have fake GPUs, in every test, and a test with a race fails.

    python -m pytest -p tests.fakecuda.everywhere tests/loopback
"""

from __future__ import annotations

import pytest

from tests.fakecuda import build, shim
from tests.fakecuda.on_cpu import stays

WHY_NOT = build.missing()
if not WHY_NOT:
    shim.install()


def pytest_configure(config):
    if WHY_NOT:
        pytest.exit(f"skipped: {WHY_NOT}", returncode=0)
    from tests.fakecuda import transport

    transport.use()


def pytest_collection_modifyitems(items):
    for item in items:
        if why := stays(item):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def _no_race():
    shim.installed.reset()
    yield
    races = shim.installed.races()
    assert not races, "\n".join(sorted(set(races))[:8])
