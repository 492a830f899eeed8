"""The guides on axes, layers and families do what they say.

The python blocks of a page are run in their order, in one namespace and an empty folder. One that begins with
`# name.py` is a file there: that of tests/families with the same name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from threed.base import mesh
from threed.models.families.registry import family_of
from threed.schema import ParallelConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_new_axis():
    """The tables afterwards as they were."""
    yield
    mesh.AXES.pop("xp", None)
    mesh.FOLDS.pop("fp", None)
    for name in ("xp", "block", "fp", "rest", "rest_shard", "rest_replica"):
        mesh.GROUPS.pop(name, None)
    for name in ("xp", "fp"):
        if hasattr(ParallelConfig, name):
            delattr(ParallelConfig, name)


@pytest.mark.parametrize("page", ["axis", "family", "layer", "modules"])
def test_guide(page, tmp_path, monkeypatch, no_new_axis):
    monkeypatch.chdir(tmp_path)
    family_of.cache_clear()
    text = (ROOT / "docs" / "extending" / f"{page}.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        file = re.match(r"# (\w+\.py)\n", block)
        if file is None:
            exec(compile(block, f"{page}.md", "exec"), names)
        else:
            content = block[file.end():]
            original = ROOT / "tests" / "families" / file[1]
            assert content == original.read_text(), f"{page}.md: {file[1]} is another"
            Path(file[1]).write_text(content)
    assert names
