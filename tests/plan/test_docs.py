"""The documents say what the commands print, and their links lead somewhere."""

from __future__ import annotations

import ast
import functools
import io
import re
import runpy
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.guides import blocks
from threed.base.axes import AXES
from threed.base.errors import ThreedError
from threed.base.mesh import FOLDS
from threed.cli.main import app
from threed.config.keys.deepspeed import DEEPSPEED
from threed.config.keys.megatron import MEGATRON
from threed.config.load import known_keys, load
from threed.config.synonyms import FRAMEWORKS
from threed.models.families.registry import FAMILIES
from threed.monitor.attribute import BESIDE, CAUSES
from threed.monitor.goodput import PARTS
from threed.monitor.metrics import METRICS
from threed.prediction.schedule_only import Times, predict_bare
from threed.schedules.orders import SCHEDULES
from threed.schema import Config
from threed.schema.config import keys_of

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = sorted({*GUIDES, *ROOT.glob("*.md"), *(ROOT / "bench").rglob("*.md")})


def named(paths: list[Path]):
    return pytest.mark.parametrize("page", paths, ids=lambda path: str(path.relative_to(ROOT)))


@functools.cache
def run(line: str) -> str:
    """What `threed ...` prints, with `| head -n N` and `| tail -n N` done here. Pages share the runs."""
    command, *pipes = line.split(" | ")
    words = shlex.split(command)
    assert words[0] == "threed", line
    output = io.StringIO()
    with redirect_stdout(output):
        try:
            app(words[1:], standalone_mode=False)
        except ThreedError as error:
            print(f"threed: {error}")
    lines = output.getvalue().splitlines()
    for pipe in pipes:
        end, _, count = pipe.rpartition(" ")
        lines = {"head -n": lines[:int(count)], "tail -n": lines[-int(count):]}[end]
    return "\n".join(lines)


@named([page for page in GUIDES if blocks(page, "console")])
def test_console_blocks(page, monkeypatch):
    """Each ```console block is commands, and exactly what they print."""
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "console"):
        commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
        assert block == "\n".join(f"$ {command}\n{run(command)}" for command in commands)


@named([page for page in GUIDES if blocks(page, "yaml")])
def test_yaml_blocks(page, tmp_path):
    """Each ```yaml block is a config that loads. (A list of rows is a schedule.)"""
    for block in blocks(page, "yaml"):
        if not block.startswith("- ["):
            (tmp_path / "config.yaml").write_text(block)
            load(tmp_path / "config.yaml")


@named(PAGES)
def test_links(page):
    """Each relative link leads to a file, and to a heading of it."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:", link):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    """Anchors of headings, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_twelve_files():
    """Of docs/reading.md: they exist, and are read in an evening."""
    page = ROOT / "docs" / "reading.md"
    files = [page.parent / path for path in re.findall(r"^\|.*?\]\((\S+)\)", page.read_text(), re.MULTILINE)]
    assert len(set(files)) == 12 and sum(len(file.read_text().splitlines()) for file in files) <= 2500


def test_navigation():
    """Each page of docs/ is in the index of the site."""
    trees = blocks(ROOT / "docs" / "index.md", r"\{toctree\}")
    entries = [entry for tree in trees for entry in tree.splitlines()]
    names = {re.sub(r".*<(.*)>", r"\1", entry) for entry in entries}
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        assert {str(name), f"{name.parent}/*"} & names or str(name) == "index", name


def test_only_public_names_are_imported():
    """A guide, README or example that imports from inside the package breaks when that moves."""
    public = re.compile(r"(import threed|from threed\.extend import .*|from threed import .*)$")
    texts = [(page, "\n".join(blocks(page, "python"))) for page in GUIDES]
    texts += [(path, path.read_text()) for folder in ("examples", "tests/families")
              for path in (ROOT / folder).glob("*.py")]
    lines = [(path.name, line) for path, text in texts
             for line in re.findall(r"^ *((?:from|import) +threed\b.*)$", text, re.MULTILINE)]
    assert len(lines) > 15 and not [each for each in lines if not public.match(each[1])]


def test_two_machines_train_on_what_they_prepared(tmp_path):
    """Each command of the tutorial reads one config, and changes nothing of its data."""
    page = ROOT / "docs" / "tutorials" / "two-machines.md"
    lines = [shlex.split(line) for line in "\n".join(blocks(page, "sh")).splitlines()]
    ((_, shipped, copy),) = (line for line in lines if line[0] == "cp")
    (own,) = blocks(page, "yaml")
    config = tmp_path / "copy.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(ROOT / shipped), OmegaConf.create(own)), config)
    assert sum(shipped in line for line in lines) == 1
    commands = [line for line in lines if copy in line and line[0] != "cp"]
    assert [line[line.index(copy) - 1] for line in commands] == [
        "data", "launch/torchrun.sh", "launch/slurm.sbatch"]
    prepared, *trained = (load(config, line[line.index(copy) + 1:]) for line in commands)
    assert all(each.data == prepared.data and each.run.dir == prepared.run.dir for each in trained)
    for path in (prepared.data.source, prepared.data.tokenizer, prepared.data.cache, prepared.run.dir):
        assert path is not None and Path(copy).parent in Path(path).parents


def test_front_page_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


@named([page for page in GUIDES if page.name != "ARCHITECTURE.md" and page.parent.name != "reference"])
def test_prose_is_wrapped(page):
    """Lines of prose have at most 110 columns; tables, blocks, pictures and commands may be longer."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not [line for line in text.splitlines() if len(line) > 110 and line[0] not in "|!`#"]


def test_reference_pages():
    """The references are what docs/reference/generate.py makes of the code."""
    for path, text in runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))["pages"]():
        assert path.read_text() == text, "run: .venv/bin/python docs/reference/generate.py"


def test_every_key_is_explained():
    assert not re.findall(r".*\|  \|$", (ROOT / "docs" / "reference" / "config.md").read_text(), re.MULTILINE)


def test_messages():
    """Messages in docs/troubleshooting.md are those of the code; `…` stands for a value."""
    files = (ROOT / "threed").rglob("*.py")
    known = "\n".join(text.replace("\n", " ") for file in files for text in _texts(file))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for cell in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", cell):
            words = [re.escape(part) for part in message.strip("… ").split("…")]
            assert re.search("[^\n]*?".join(words), known) or message == "out of memory", message


def _texts(file: Path) -> list[str]:
    """The strings of a file, with … for the values of f-strings. A Problem.of(key, rest) is one."""
    texts = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            texts.append(_text(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Problem.of", "Idle.of"):
            texts.append("".join(map(_text, node.args)))
    return texts


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def test_named_sizes():
    """The guide about training has every size of `model.name`: whole, or its end behind a comma, or between
    two others."""
    (text,) = re.findall(r"^`model.name` is(.*?)^$", (ROOT / "docs" / "training.md").read_text(),
                         re.DOTALL | re.MULTILINE)
    for name in (name for family in FAMILIES.values() for name in family.sizes):
        start, _, end = name.rpartition("-")
        assert re.search(rf"\b{name}\b|\b{start}\b[^;]*-{end}\b|{start}-\S+ to\s+{start}-", text), name


def test_metrics():
    """The table of metrics, of which docs/metrics.md shows the rows, has those that the code writes, and no
    others."""
    values = {"counted": ("tokens", "samples"), "cause": CAUSES, "part": PARTS, "lane": BESIDE,
              "axis": (*AXES, *FOLDS), "name": ("measured", "predicted")}  # of the variables in their names
    written: set[str] = set()
    for file in (ROOT / "threed").rglob("*.py"):
        for key in filter(re.compile(r"[a-z]+/[\w{}.]+").match, _keys(ast.parse(file.read_text()))):
            ((name, variable, rest),) = re.findall(r"^([^{]+)(?:{(?:.*\.)?(\w+)})?(.*)$",
                                                   key.removesuffix("/{stage}"))
            written |= {f"{name}{value}{rest}" for value in values[variable]} if variable else {name}
    named = [name for row in METRICS for name in row.names]
    assert len(written) > 40 and set(named) == written and len(named) == len(written)


def _keys(tree: ast.AST) -> Iterator[str]:
    """Keys of dictionaries, and of what is put into one: `perf/{counted}_per_s` of an f-string."""
    for node in ast.walk(tree):
        keys = (node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else
                [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else [])
        for key in keys:
            if isinstance(key, ast.JoinedStr):
                yield "".join(f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else
                              str(ast.literal_eval(part)) for part in key.values)
            elif isinstance(key, ast.Constant):
                yield str(key.value)


def test_other_frameworks_keys():
    """Options and keys of others in docs/coming-from.md are in the tables of `threed convert` and of errors;
    docs/reference/keys.md, written from them, has every row."""
    text = (ROOT / "docs" / "coming-from.md").read_text()
    options = set(re.findall(r"--([a-z][\w-]+)", text)) - {"megatron", "json", "devices", "deepspeed-version"}
    assert options and not [option for option in options if MEGATRON.row(option) is None]
    section = text[text.index("## DeepSpeed"):text.index("## Megatron-LM")]
    keys = {key for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)`", section) if "_" in key}
    theirs = {key for key in keys if key not in known_keys()}
    assert theirs and not [key for key in theirs if DEEPSPEED.row(key) is None]
    page = (ROOT / "docs" / "reference" / "keys.md").read_text()
    for framework in FRAMEWORKS:
        dashes = "--" if framework is MEGATRON else ""
        for row in framework.rows:
            name = row.theirs.replace("_", "-") if dashes else row.theirs
            assert f"| `{dashes}{name}` | " in page, row


def test_guides_are_listed():
    """The first page about extending leads to every guide, family and layer first."""
    listed = re.findall(r"\]\((\w+)\.md\)", (ROOT / "docs" / "extending" / "index.md").read_text())
    guides = {path.stem for path in (ROOT / "docs" / "extending").glob("*.md")} - {"index"}
    assert set(listed) == guides and listed[:2] == ["family", "layer"]


def test_named_keys_exist():
    """What the guides write as a key is a key of the schema, or of a family."""
    keys = {*known_keys(), *(key for family in FAMILIES.values() for key in keys_of(family.config))}
    sections = "|".join({key.split(".")[0] for key in known_keys()})
    for page in GUIDES:
        if page.name in ("coming-from.md", "keys.md"):
            continue  # it has other frameworks' keys, too
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+)[`:=]", text):
            assert key in keys or key.endswith((".py", ".json", ".yaml")), f"{page.name}: {key}"


def test_pictures(tmp_path, monkeypatch):
    """Each picture is what the command below it draws."""
    monkeypatch.chdir(ROOT)
    for page in (ROOT / "README.md", ROOT / "docs" / "schedules.md"):
        text = page.read_text()
        commands = re.findall(r"^`(threed show .*?) --svg docs/schedules/([\w-]+\.svg)`$", text, re.MULTILINE)
        assert {name for _, name in commands} == set(re.findall(r"schedules/([\w-]+\.svg)\)", text))
        for command, name in commands:
            run(f"{command} --svg {tmp_path / name}")
            assert (tmp_path / name).read_text() == (ROOT / "docs" / "schedules" / name).read_text(), command


def test_rates():
    """The schedules' rates are those that `threed predict` gives."""
    rows = re.findall(r"\| `([\w-]+)` \| .* \| (0\.\d{3}) \|", (ROOT / "docs" / "schedules.md").read_text())
    assert len(rows) == len(SCHEDULES)
    for name, rate in rows:
        report = predict_bare(name, 8, 24, Times(1.0, 1.0, 1.0))
        assert f"{report.bubble_rate:.3f}" == rate, name


def test_named_files_exist():
    """Paths in the documents are there."""
    folders = "threed|models|configs|launch|tests|docs"
    for page in PAGES:
        for path in re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", page.read_text()):
            assert (ROOT / path).exists() or page.name == "CHANGELOG.md", f"{page.name}: {path}"


def test_reference_config():
    """configs/reference.yaml holds every key with its default."""
    given = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "reference.yaml"))
    assert isinstance(given, dict)
    assert [f"{section}.{key}" for section, values in given.items() for key in values] == known_keys()
    default = Config().to_dict()
    assert given == default


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    assert load(path).world_size >= 1
