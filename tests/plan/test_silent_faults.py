"""docs/silent-faults.md: its rows, each with tests that exist and run."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "silent-faults.md"
SILENT = ROOT / "tests" / "silent"
RESULTS = r"passes$|passes; was wrong until this release: .|in part: .|record: .|not tried: .|not tried yet$"
UNSEEN = ("skip", "skipif", "xfail", "importorskip", "slow", "cluster", "gpu")  # of pytest; of other tiers


class Row(NamedTuple):
    number: int
    reported: str
    fault: str
    tests: list[str]  # path::name
    result: str


def rows() -> list[Row]:
    found = []
    for line in re.findall(r"^\| \d.*$", PAGE.read_text(), re.MULTILINE):
        number, reported, fault, tests, result = (cell.strip() for cell in line.strip("|").split("|"))
        found.append(Row(int(number), reported, fault, re.findall(r"`([^`]+)`", tests), result))
    return found


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The functions at the top of a file, by name."""
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def unseen(node: ast.AST) -> set[str]:
    """What in some code keeps a test, or a case of it, from running in `make test` and `make verify`."""
    names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return names & set(UNSEEN)


def kept_out(path: Path, test: ast.FunctionDef) -> set[str]:
    """The same, of a test with its file's marks and the fixtures it takes."""
    above = [node for node in ast.parse(path.read_text()).body
             if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    fixtures = {name: node for each in (ROOT / "tests").rglob("conftest.py")
                for name, node in functions(each).items()}
    taken = [fixtures[each.arg] for each in test.args.args if each.arg in fixtures]
    return set().union(*map(unseen, [test, *above, *taken]))


def test_all_rows():
    """A fault that falls off the page when it is edited; a reader who cannot find the report."""
    assert [row.number for row in rows()] == list(range(1, 41))
    for row in rows():
        links = re.findall(r"\[(\d+)\]\(https://github\.com/[\w.-]+/[\w.-]+/issues/(\d+)\)", row.reported)
        assert all(shown == led for shown, led in links) and row.fault.endswith((".", ".)")), row
        assert len(links) == row.reported.count("]("), row


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.number))
def test_results_have_tests(row):
    """A result without a test, or with one that is gone, or that is not run."""
    assert re.match(RESULTS, row.result), row.result
    assert bool(row.tests) != row.result.startswith("not tried"), row
    for text in row.tests:
        path, _, name = text.partition("::")
        assert (ROOT / path).is_file() and name in functions(ROOT / path), text
        if row.result.startswith("passes"):
            assert not kept_out(ROOT / path, functions(ROOT / path)[name]), text


def test_each_trial_has_a_row():
    """A trial that no row names: nobody reads what it found."""
    named = {text for row in rows() for text in row.tests}
    here = {f"{path.relative_to(ROOT)}::{name}" for path in SILENT.glob("test_*.py")
            for name in functions(path) if name.startswith("test_")}
    assert here <= named


@pytest.mark.parametrize("code", [
    "@pytest.mark.skip\ndef test(): ...", "@pytest.mark.skipif(True, reason='')\ndef test(): ...",
    "@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.slow)])\ndef test(a): ...",
    "def test():\n    pytest.skip('no')", "def test(mount): ...",
    "pytestmark = pytest.mark.gpu\ndef test(): ..."])
def test_a_test_that_does_not_run_is_seen(code, tmp_path):
    (tmp_path / "test_it.py").write_text(code)
    assert kept_out(tmp_path / "test_it.py", functions(tmp_path / "test_it.py")["test"])
