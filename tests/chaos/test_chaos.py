"""A small sample of the campaign, and the campaign's own instruments: the interposer, the reader, what is
drawn."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import campaign, interposer
from tests.chaos.faults import KINDS

ROOT = Path(__file__).parents[2]
SEED, NUMBER = 29, 10


def test_a_sample(tmp_path):
    """Ten faults. What failed is in the output, with the command that repeats it."""
    report, log = tmp_path / "report.json", tmp_path / "log"
    argv = [sys.executable, "-m", "tests.chaos", "--faults", str(NUMBER), "--seed", str(SEED), "--jobs", "2",
            "--verbose", "--report", report]
    with log.open("w") as output, subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output) as process:
        try:
            status = process.wait(500)
        except subprocess.TimeoutExpired:
            process.kill()
            status = "none: it did not end"
    assert status == 0, log.read_text()
    results = json.loads(report.read_text())
    assert len(results) == NUMBER
    assert sum(bool(result["struck"]) for result in results) >= NUMBER // 2, log.read_text()


def test_what_is_drawn():
    """A trial depends on the seed and its number alone, not on the number of trials; each kind comes by its
    weight."""
    short, long = (list(itertools.islice(campaign.kinds(7), count)) for count in (20, 400))
    assert long[:20] == short
    block = sum(kind.weight for kind in KINDS.values())
    first = [kind.name for kind, _ in itertools.islice(campaign.kinds(7), block)]
    assert all(first.count(kind.name) == kind.weight for kind in KINDS.values())
    assert [index for kind, index in long if kind.walks
            and kind.name == "save: kill at a call"][:5] == [0, 1, 2, 3, 4]


PROGRAM = """
import os, shutil, sys
from pathlib import Path
from tests.chaos.interposer import Site, Strike, report
folder = Path(sys.argv[1])
(folder / "run").mkdir()
if len(sys.argv) > 2:
    Strike(Site(0, sys.argv[2], sys.argv[3], 0), sys.argv[4], 28).arm(folder / "run", folder / "marker")
else:
    report(folder / "run", folder / "calls")
(folder / "run/a").mkdir()
with open(folder / "run/a/one", "wb") as file:
    file.write(b"12345678")
    file.flush()
    os.fsync(file.fileno())
(folder / "elsewhere").write_text("")
os.replace(folder / "run/a/one", folder / "run/a/two")
shutil.rmtree(folder / "run/a")
print("done")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """program(*what) -> (status, output, folder) of a small program with the interposer in front of libc."""
    library = interposer.compile_into(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("no gcc to compile the interposer with")

    def run(*what: str) -> tuple[int, str, Path]:
        folder = tmp_path_factory.mktemp("folder")
        done = subprocess.run([sys.executable, "-c", PROGRAM, folder, *what], cwd=ROOT, capture_output=True,
                              text=True,
                              env={**os.environ, "LD_PRELOAD": str(library)}, check=False)
        return done.returncode, done.stdout + done.stderr, folder

    return run


def test_calls_are_seen(program):
    """Python's calls, those relative to a folder's descriptor as well; none outside the folder."""
    status, output, folder = program()
    assert status == 0, output
    assert [f"{site.op} {site.path}" for site in interposer.read_report(0, folder / "calls")] == [
        "mkdir a", "create a/one", "write a/one", "fsync a/one", "close a/one", "rename a/one -> a/two",
        "open a", "unlink a/two",
        "close a", "rmdir a"]


@pytest.mark.parametrize(("op", "path", "left"), [("create", "a/one", ["a"]),
                                                  ("rename", "a/one -> *", ["a", "a/one"]),
                                                  ("unlink", "a/t*", ["a", "a/two"]), ("rmdir", "a", ["a"])])
def test_a_kill_at_a_call(op, path, left, program):
    """The process dies before the call and after the previous one, once."""
    status, output, folder = program(op, path, "kill")
    assert status == -9 and "done" not in output
    assert sorted(str(file.relative_to(folder / "run")) for file in (folder / "run").rglob("*")) == left
    assert (folder / "marker").read_text().split("\t")[1] == op


def test_a_torn_write_and_an_error(program):
    status, _, folder = program("write", "a/one", "tear")
    assert status == -9 and (folder / "run/a/one").read_bytes() == b"1234"
    status, output, _ = program("fsync", "a/*", "fail")
    assert status == 1 and "No space left on device" in output
    shutil.rmtree(folder)
