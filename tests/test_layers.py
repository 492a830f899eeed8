"""Imports point down (DESIGN, "Layers"): what a module may know, and the budgets that keep files readable.

    6  trainer; callbacks; assemble; then launcher; then start, api, cli     words in, run out
    5  engine | prediction | checkpoint | monitor  read a plan: do it, time it, save it, measure it
    4  */run, zero/state, zero/optimizer; then prediction/, planner (no torch)
    3  */plan, */shard, pipeline/split          passes: program -> program              (no torch)
    2  program/                                 the heart                               (no torch); then slots
    1  comm; then tensor/, data/
    0  errors; quantity; pipeline/orders; schema; config, mesh, models/      (no torch)
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The levels, lowest first. Inside a level a row may import the rows above it here. A name with a dot at
# its end is a folder; the longest name that fits a module counts.
LEVELS = (
    (  # 0
        "console errors models",
        "base. address doors.table later marks native pipeline.orders quantity sampling template texttable words",
        "paths restart shipped",
        "doors.deepspeed doors.megatron_switches doors.megatron_values doors.peft doors.shell. "
        "doors.torchtitan",
        "doors.deepspeed_file doors.launchers doors.megatron_rest",
        "doors.megatron",
        "doors.script synonyms",
        "early progress",
        "requests",
        "callback mesh",
        "environment schema",
        "contract models.kernels optimizers. rendezvous",
        "models.spec",
        "models.layers.",
        "models.families.",
        "models.model",
        "models.sound models.tiling optimizers.registry",
        "suits unused values",
        "validate",
        "config",
        "doors.converted",
        "doors.beside",
        "doors.convert doors.init",
    ),
    (  # 1
        "forks lanes store",
        "comm",
        "pool",
        "data. tensor.",
        "doors.layers.",
    ),
    (  # 2
        "program.",
        "slots",
    ),
    (  # 3
        "activation. offload. pipeline. zero.",
    ),
    (  # 4
        "pipeline.feed",
        "activation.run offload.run offload.tiers pipeline.run zero.optimizer zero.snapshot",
        "zero.storage",
        "zero.state",
        "zero.states",
        "zero.run",
        "prediction.",
        "planner.",
        "planner",
        "planned prediction.analytic prediction.beside",
        "prediction.memory prediction.peak prediction.transient prediction.verb",
        "prediction.advise",
        "choosing. prediction.fit",
    ),
    (  # 5
        "monitor.attribute monitor.state",
        "monitor.goodput monitor.loggers.logger",
        "monitor.loggers. monitor.loggers.beside",
        "engine. monitor.",
        "checkpoint.",
        "folders",
        "monitor.run monitor.runs",
        "page.",
        "checkpoints generation",
        "nonfinite",
        "children deadline doors. stopped",
        "trainer",
        "callbacks calibration.",
    ),
    (  # 6
        "assemble",
        "elastic",
        "attend rank",
        "launcher",
        "agents",
        "torchrun",
        "calibration.verb",
        "forward start",
        "api",
        "inference",
        "options",
        "cli_foreign cli_learned verbs",
        "cli_data",
        "cli",
        "__main__",
        "extend",
    ),
)
LAYERS = {name: (level, row) for level, rows in enumerate(LEVELS) for row, names in enumerate(rows)
          for name in names.split()}
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 420, 70, 7  # lines, lines, arguments besides self


def paths() -> dict[str, Path]:
    """Module (without `threed.`) -> file. The models' files are those of models/, to which threed/models is a
    link."""
    files = {}
    for path in sorted([*(ROOT / "threed").rglob("*.py"), *(ROOT / "models").rglob("*.py")]):
        parts = path.relative_to(ROOT / "threed" if ROOT / "threed" in path.parents
                                 else ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if parts[0] not in ("configs", "__init__"):
            files[name] = path
    return files


MODULES = paths()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def layer(module: str) -> tuple[int, int]:
    """The level, and the row in it."""
    fits = [key for key in LAYERS if module == key or (key.endswith(".") and f"{module}.".startswith(key))]
    assert fits, f"{module} has no layer yet: give it one here"
    return LAYERS[module if module in fits else max(fits, key=len)]


def imports(module: str) -> set[str]:
    """Modules that a module imports anywhere; imports for the type checker alone do not count."""
    names = set()
    only_types = {child for node in ast.walk(TREES[module]) if isinstance(node, ast.If)
                  and ast.unparse(node.test) == "TYPE_CHECKING" for child in ast.walk(node)}
    for node in ast.walk(TREES[module]):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            base = node.module or ""
            names |= {f"{base}.{alias.name}" if f"{base}.{alias.name}".removeprefix("threed.") in MODULES
                      else base
                      for alias in node.names}
    return names


def ours(module: str) -> set[str]:
    return {name.removeprefix("threed.") for name in imports(module)
            if name.startswith("threed.")} & set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    """A module that knows what is above it, or another feature beside it, cannot be read or changed alone."""
    here, folder = layer(module), module.rpartition(".")[0]
    near = {other for other in MODULES if folder not in ("", "models") and other.rpartition(".")[0] == folder}
    wrong = {other for other in ours(module) - near if layer(other) >= here}
    wrong |= {other for other in ours(module) & near if layer(other)[0] > here[0]}
    listed = ", ".join(f"{other} (layer {layer(other)})" for other in sorted(wrong))
    assert not wrong, f"{module} (level, row {here}) imports {listed}"


def test_models_are_found_under_one_name():
    """Imported as `models` and as `threed.models`, a class exists twice and isinstance fails."""
    wrong = [module for module in MODULES for name in imports(module)
             if name.split(".")[0] in ("models", "tests")]
    assert not wrong


# ---------------------------------------------------------------- what may be imported from outside


def users(package: str) -> set[str]:
    return {module for module in MODULES
            if any(f"{name}.".startswith(f"{package}.") for name in imports(module) | _attributes(module))}


# Files that say what a plan needs to know, and hold methods that compute, which have torch imported when they
# are called.
COMPUTE_LATER = {"optimizers.adamw", "later",
                 *(module for module in MODULES if module.startswith("models.layers."))}


def _attributes(module: str) -> set[str]:
    """Dotted names that are read, so that `torch.distributed.x` counts without an import of its own."""
    return {ast.unparse(node) for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)}


def test_one_door_to_other_ranks():
    """A collective outside comm is counted by nobody, has no name, and shows in no trace."""
    agents = {"torchrun", "agents", "elastic"}  # they start ranks, and connect none
    assert users("torch.distributed") <= {"comm", "store", "engine.loopback"} | agents


def test_one_door_to_megatron():
    """Megatron-core changes from version to version: what depends on it is in two folders."""
    assert all(module.startswith(("tensor.", "data.")) for module in users("megatron"))


def torch_free() -> list[str]:
    return [module for module in MODULES
            if (layer(module)[0] in (0, 2, 3) and module != "slots") or module.startswith("planner")]


def test_planning_imports_no_torch():
    """`threed check` of 4096 ranks on a laptop takes seconds; torch alone takes longer. Transitively, in a
    fresh Python."""
    assert set(torch_free()) & users("torch") <= COMPUTE_LATER
    code = ("import importlib, sys\n"
            f"for name in {torch_free()!r}:\n"
            "    importlib.import_module(f'threed.{name}')\n"
            "    heavy = {'torch', 'megatron', 'numpy', 'wandb'} & set(sys.modules)\n"
            "    assert not heavy, f'{name} brings {heavy}'\n"
            "from threed.config import load\n"
            "from threed.planner import make_plan\n"
            "from threed.program.check import check\n"
            "make_plan(load(None, ['parallel.dp=2', 'parallel.pp=2']))\n"
            "assert 'torch' not in sys.modules, 'to make a plan brings torch'")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(torch_free()) > 15


# ---------------------------------------------------------------- habits


@pytest.mark.parametrize("module", MODULES)
def test_no_global(module):
    """State that belongs to nobody: two meshes in one process, as in loopback, would share it."""
    lines = [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.Global)]
    assert not lines, f"global in {MODULES[module]}, line {lines}"


@pytest.mark.parametrize("module", MODULES)
def test_budgets(module):
    """A file or function that is longer than a screen or two is not read."""
    length = len(MODULES[module].read_text().splitlines())
    assert length <= MAX_FILE, f"{module} has {length} lines"
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION, f"{module}.{node.name} has {lines} lines"
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls", "ctx")])
            # A verb of the command line has an argument for each of its options.
            allowed = count <= MAX_ARGUMENTS or module in ("cli", "cli_learned")
            assert allowed, f"{module}.{node.name} takes {count} arguments"


@pytest.mark.parametrize("module", MODULES)
def test_a_note_opens_every_file(module):
    """A file that does not say what it is."""
    assert ast.get_docstring(TREES[module]) or not TREES[module].body


def test_layers_knows_no_ghosts():
    """A module that was renamed keeps its place in this test, and the new one has none."""
    planned = {"activation.", "offload.", "activation.run", "offload.run", "offload.tiers"}
    for key in set(LAYERS) - planned:
        assert key in MODULES or (key.endswith(".") and any(name.startswith(key) for name in MODULES)), key
