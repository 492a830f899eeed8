"""Imports point down: what a folder may know, and the budgets that keep files readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Folders, lowest first: a module imports from its own folder and from the lines above its own, and a module
# of a feature from no other feature. Each folder's __init__ says what it is.
FLOORS = (
    "base",
    "devices",
    "spec schedules comm optim",
    "schema",
    "tensor",
    "models",
    "data config",
    "program",
    "features",
    "planner",
    "engine prediction",
    "checkpoint",
    "monitor",
    "html_report layout_search",
    "training interop",
    "launcher",
    "api calibration",
    "cli",
    "__main__ torchrun extend",
)
FLOOR = {folder: number for number, folders in enumerate(FLOORS) for folder in folders.split()}
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 420, 70, 7  # lines, lines, arguments besides self
MAX_METHODS = 20  # of a class: one that has more has two jobs
MAX_KEYS = 300  # reads of dicts by a literal key, most of them of foreign files


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


def folder(module: str) -> str:
    """The folder that counts: the first, and below features the second too."""
    parts = module.split(".")
    return ".".join(parts[:2 if parts[0] == "features" else 1])


def floor(module: str) -> int:
    top = module.split(".")[0]
    assert top in FLOOR, f"{module} is in no folder that has a floor: give {top} one here"
    return FLOOR[top]


@cache
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
    """A module that knows what is above it, or another feature, cannot be read or changed alone."""
    wrong = {other for other in ours(module)
             if folder(other) != folder(module) and floor(other) >= floor(module)}
    assert not wrong, f"{module} (floor {floor(module)}) imports {', '.join(sorted(wrong))}"


def test_no_circles():
    """Modules that import each other are one module in two files."""
    state: dict[str, bool] = {}  # module -> whether it is done; else it is on the way

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert state.get(module, True), " -> ".join([*way[way.index(module):], module])
        if module not in state:
            state[module] = False
            for other in sorted(ours(module)):
                visit(other, (*way, module))
            state[module] = True

    for module in MODULES:
        visit(module, ())


def test_folders_say_what_they_are():
    for path in sorted([*(ROOT / "threed").rglob("__init__.py"), *(ROOT / "models").rglob("__init__.py")]):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(text) > 60, f"{path.relative_to(ROOT)} does not say what its folder is"
    loose = {path.stem for path in (ROOT / "threed").glob("*.py")}
    assert loose == {"__init__", "__main__", "extend", "torchrun"}
    assert set(FLOOR) <= {name.split(".")[0] for name in MODULES}, "a folder that was renamed"


def test_a_module_begins_with_its_name():
    """A label at its head ("Local launcher: ...") that is another name: the module's old one."""
    wrong = []
    for path in sorted([*(ROOT / "threed").rglob("*.py"), *(ROOT / "models").rglob("*.py")]):
        label, colon, _ = (ast.get_docstring(ast.parse(path.read_text())) or "").partition(": ")
        words = [word for word in re.findall("[a-z]+", label.lower()) if word not in ("the", "a", "an")]
        name = path.parent.name if path.stem == "__init__" else path.stem
        begins = {part[:3] for part in name.split("_")}
        if colon and len(words) <= 2 and begins.isdisjoint(word[:3] for word in words):
            wrong.append(f"{path.relative_to(ROOT)}: {label}")
    assert not wrong


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
COMPUTE_LATER = {"optim.adamw", "optim.muon", "optim.polar", "base.later",
                 *(module for module in MODULES if module.startswith("models.layers."))}


@cache
def _attributes(module: str) -> set[str]:
    """Dotted names that are read, so that `torch.distributed.x` counts without an import of its own."""
    return {ast.unparse(node) for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)}


def test_one_door_to_other_ranks():
    """A collective outside comm is counted by nobody, has no name, and shows in no trace."""
    agents = {"torchrun", "launcher.agents", "launcher.elastic"}  # they start ranks, and connect none
    assert users("torch.distributed") <= {"comm.process", "comm.store", "engine.loopback"} | agents


def test_one_door_to_accelerators():
    """Another kind of device is one file, and a row of `devices.KINDS`."""
    named = re.compile(r"(?<!\w)cuda(?!\w)|is_cuda")
    assert not {module for module, path in MODULES.items() if named.search(path.read_text())
                if not module.startswith("devices")}


def test_one_door_to_megatron():
    """Megatron-core changes from version to version: what depends on it is in two folders."""
    assert all(module.startswith(("tensor.", "data.")) for module in users("megatron"))


# What a plan is made of. The second names are for ranks.
TORCH_FREE = ["base", "spec", "schedules", "schema", "models", "config", "program", "planner", "optim",
              "interop.convert", "interop.dump", "comm.environment", "comm.rendezvous", "data.sampling",
              "training.hooks"]
RUN_LATER = ["models.measure", "models.own", "optim.step", "program.slots", "program.costs",
             "program.simulate"]


def torch_free() -> list[str]:
    def within(module: str, names: list[str]) -> bool:
        return any(f"{module}.".startswith(f"{name}.") for name in names)

    passes = [module for module in MODULES if module.startswith("features.")
              and module.rpartition(".")[2] in ("plan", "parts", "shard")]
    return passes + [module for module in MODULES if within(module, TORCH_FREE)
                     and not within(module, RUN_LATER)]


def test_planning_imports_no_torch():
    """`threed check` of 4096 ranks on a laptop takes seconds; torch alone takes longer. Transitively, in a
    fresh Python."""
    assert set(torch_free()) & users("torch") <= COMPUTE_LATER
    code = ("import importlib, sys\n"
            f"for name in {torch_free()!r}:\n"
            "    importlib.import_module(f'threed.{name}')\n"
            "    heavy = {'torch', 'megatron', 'numpy', 'wandb'} & set(sys.modules)\n"
            "    assert not heavy, f'{name} brings {heavy}'\n"
            "from threed.config.load import load\n"
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
def test_instructions_are_read_by_name(module):
    """item[:3] says nothing, and means something else once a field is added."""
    by_number = re.compile(r"\b(item|instruction|slot)\[-?[\d:]|\*_ = (item|instruction|slot)\b")
    assert not by_number.findall(MODULES[module].read_text())


def test_a_setting_of_a_layout_has_two_homes():
    """What a search tries besides mesh, schedule and micro-batch is named in layout.py, which says what it
    does, and in space.py, which says when to try it. (request.py knows which other keys go with it.)"""
    homes, usual = ("layout", "space", "request"), {"tp", "pp", "dp", "schedule", "micro_batch_size"}
    (fields,) = (node for node in TREES["layout_search.layout"].body
                 if isinstance(node, ast.ClassDef) and node.name == "Layout")
    names = {node.target.id for node in fields.body
             if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)} - usual
    assert "residency" in names
    for module, tree in TREES.items():
        if module.startswith("layout_search.") and module.rpartition(".")[2] not in homes:
            said: list[object] = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                                  and ast.unparse(node.value).endswith("layout")]
            said += [key.arg for node in ast.walk(tree) if isinstance(node, ast.Call)
                     and ast.unparse(node.func).endswith(("_replace", "Layout")) for key in node.keywords]
            said += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            assert not names.intersection(said), f"{MODULES[module]} names {names.intersection(said)}"


def test_values_have_named_fields():
    """A dict that is made and then read by literal keys: a wrong key is found when it is read, if ever."""
    reads = [node for tree in TREES.values() for node in ast.walk(tree)
             if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
             and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)]
    assert len(reads) <= MAX_KEYS


def test_a_name_is_one_class():
    """Two public classes of one name: a reader must look at the imports to know which is meant."""
    homes: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


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
            # A kernel of a GPU gets tensors and numbers, and no object that holds several.
            free = module in ("cli.main", "cli.inference", "tensor.pieces_kernel")
            allowed = count <= MAX_ARGUMENTS or free
            assert allowed, f"{module}.{node.name} takes {count} arguments"


@pytest.mark.parametrize("module", MODULES)
def test_a_class_has_one_job(module):
    """A class whose methods nobody can list: it is two."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ClassDef):
            count = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            assert count <= MAX_METHODS, f"{module}.{node.name} has {count} methods"


@pytest.mark.parametrize("module", MODULES)
def test_a_note_opens_every_file(module):
    """A file that does not say what it is."""
    assert ast.get_docstring(TREES[module]) or not TREES[module].body
