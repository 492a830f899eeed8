"""Shared fixtures, and the choice of tests by tier. Each process has one thread: otherwise tests with many
processes would compete for few cores."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.pop("COLUMNS", None)  # what is printed here has no terminal to fit

import pytest

from tests.fakecuda import build
from tests.fakecuda.on_cpu import stays
from tests.tiers import BUDGET_S, CORES, cores, is_core, over_budget, processor_s, runs, sample

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what is started here must not see that pytest is under nohup


def pytest_addoption(parser):
    parser.addoption("--tier", choices=list(BUDGET_S), help="one tier's tests (tests/tiers.py)")
    parser.addoption("--cases", type=int, help="of a test with more, so many and an eighth of the others")


def pytest_ignore_collect(collection_path, config):
    """A file of which a tier runs no test is not read: reading all takes each worker some seconds more."""
    if collection_path.suffix == ".py":
        if config.getoption("tier") == "test" and not is_core(collection_path, False):
            return "mark.core" not in collection_path.read_text() or None
        if config.getoption("tier") == "verify" and is_core(collection_path, False):
            return True
    return None


def pytest_collection_modifyitems(config, items):
    cases = config.getoption("cases")
    chosen = list(items) if cases is None else sample(items, cases)
    if tier := config.getoption("tier"):
        # What has fake GPUs in `make verify` does not run there on the CPU, too.
        elsewhere = tier == "verify" and not build.missing()
        chosen = [item for item in chosen
                  if runs(tier, is_core(item.path, item.get_closest_marker("core") is not None))
                  and not (elsewhere and not stays(item))]
    if len(chosen) < len(items):
        left = {*items} - {*chosen}
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = chosen


class Budget:
    """Fails a session that took longer than its tier may."""

    def __init__(self, tier: str):
        self.tier, self.begin, self.text = tier, time.monotonic(), ""
        self.workers_s = 0.0  # processor time

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.workers_s += getattr(node, "workeroutput", {}).get("processor_s", 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        wall_s, used_s = time.monotonic() - self.begin, self.workers_s or processor_s()
        self.used = f"make {self.tier}: {wall_s:.0f} s, and {used_s / CORES:.0f} s of each of {CORES} cores"
        self.text, fails = over_budget(self.tier, wall_s, used_s, cores())
        if fails and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)  # below the slowest tests
    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(self.used)
        if self.text:
            terminalreporter.write_line(self.text, red=True)


def pytest_sessionfinish(session):
    """A worker of xdist reports its processor time."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processor_s"] = processor_s()


def pytest_terminal_summary(terminalreporter):
    """The worst differences of the cells of tests/oracle, if some ran."""
    calls = [each for some in terminalreporter.stats.values() for each in some
             if getattr(each, "when", "") == "call"]
    rows = [value for each in calls for name, value in each.user_properties if name == "oracle"]
    if rows:
        from tests.oracle import report

        for line in report.lines(rows):
            terminalreporter.write_line(line)


def pytest_configure(config):
    """Only a whole tier has a budget; a part of one, or a worker of xdist, has none."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.getoption("keyword")
    if config.getoption("tier") and whole and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budget(config.getoption("tier")), "budget")


def pytest_collection_finish():
    """Imported objects live until the end: freeze them, so that the garbage collector here and in forked
    processes does not visit them again and again. And collect less often: it takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def _remembering():
    """What plans of one model share is computed once a file: a third of the time of tests/plan."""
    from threed.base.remember import remembering

    with remembering():
        yield


@pytest.fixture
def one_core(worker_id):
    """For ranks as threads. They share Python's lock, and so take turns. On several cores most of their time
    goes into waking one another: a cell of the contract takes 3 to 5 times as much of a processor."""
    allowed = os.sched_getaffinity(0)
    number = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture(scope="session")
def workers():
    """Eight processes over gloo, started at first use."""
    import tests.harness  # noqa: F401  (imported before the fork: the workers start with everything)
    from tests.workers import Workers

    pool = Workers(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def references(tmp_path_factory, worker_id):
    """Reference runs, one for each set of values that changes the numbers: computed once, and shared by all
    workers in a file."""
    from tests import reference

    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "references"
    folder.mkdir(exist_ok=True)
    by_key = {}

    def get(config, steps: int = 5):
        model = replace(config.model, loss_chunk=None, fused="off")
        key = str((model, config.precision, config.optimizer, config.train,
                   config.data.document_mask, config.data.loss_mask, steps))
        if key not in by_key:
            path = folder / hashlib.sha256(key.encode()).hexdigest()
            by_key[key] = kept(path, lambda: reference.run(config, steps))
        return by_key[key]

    return get


def kept(path: Path, make):
    """The content of the file; if no other process has written it, `make()` is called and written."""
    if not path.exists():
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_bytes(pickle.dumps(make()))
        scratch.replace(path)
    return pickle.loads(path.read_bytes())
