"""Write docs/reference/config.md, cli.md, api.md and keys.md, configs/reference.yaml, and the first table of
docs/metrics.md, from the code.

    python docs/reference/generate.py

What is told of a key stands at its field in threed/schema. A command's section is what --help prints. The
Python reference begins with the docstring of `threed` and the first sentence about each of its names. Other
frameworks' keys are the rows of threed/config/keys, metrics those of threed/monitor/metrics. `make docs` runs
this; tests/plan/test_docs.py compares the pages that are checked in with what it makes.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import yaml
from typer.testing import CliRunner

import threed
from threed import extend, schema
from threed.cli import main as cli
from threed.config.keys.table import NO_KEY, NOTHING, Framework, Key
from threed.config.synonyms import FRAMEWORKS
from threed.monitor.metrics import METRICS, Metric
from threed.prediction.hardware import Hardware
from threed.schema.keys import specs

HERE = Path(__file__).parent
METRICS_PAGE, METRICS_HEAD = HERE.parent / "metrics.md", "| name | unit | meaning |"
WIDTH = {"TERMINAL_WIDTH": "80"}
CONFIG_HEAD = """# Configuration reference

Written by `docs/reference/generate.py` from `threed/schema`: do not edit.

A config is a YAML file of these sections. Every key has a default, so a file holds only what differs, and
`section.key=value` on the command line wins over the file.
[`configs/reference.yaml`](../../configs/reference.yaml) is the same list as YAML. In the column "default",
`null` means that threed chooses, as the meaning says."""
YAML_HEAD = """# Every key, with its default and meaning.
# Written by docs/reference/generate.py from threed/schema: do not edit."""
CLI_HEAD = """# Command-line reference

Written by `docs/reference/generate.py` from `threed/cli/main.py`: do not edit.

| exit status | means |
|---|---|
| 0 | done |
| 1 | the run failed |
| 2 | the input is at fault |
| 3 | a machine computes wrongly: [faults](../faults.md#a-machine-that-computes-wrongly) |"""

API_HEAD = """# Python reference

Written by `docs/reference/generate.py` from the docstrings of `threed`: do not edit.

`import threed` offers these names; the command line calls the same code."""
API_MIDDLE = "## threed.extend"
API_TAIL = """## Methods and arguments

The built site has them here; `help(threed.train)` prints them, too.

```{eval-rst}
.. automodule:: threed
   :members:

.. automodule:: threed.extend
   :members:
```"""

KEYS_HEAD = """# Other frameworks' keys

Written by `docs/reference/generate.py` from `threed/config/keys`: do not edit.

What each key of DeepSpeed, Megatron-LM, torchtitan, transformers and PEFT is here. [`threed
convert`](../coming-from.md#convert-a-config) reads these rows, and so does the error about a key that threed
does not know. Keys are named by their last part where that is clear; `*` stands for any text. *No key* means
that none is needed; **none** means that threed cannot do it: `threed convert` refuses it."""


def config_page() -> str:
    """Every key of the config, a table a section."""
    lines = [CONFIG_HEAD]
    for section in dataclasses.fields(schema.Config):
        assert isinstance(section.default_factory, type)
        lines += ["", f"## {section.name}", "", *_table(section.default_factory, f"{section.name}.")]
    return "\n".join(lines) + "\n"


def _table(kind: type, prefix: str = "") -> list[str]:
    """A row for each field: its default, and what is told of it."""
    rows, usual = ["| key | default | meaning |", "|---|---|---|"], kind()
    return rows + [f"| `{prefix}{name}` | `{_yaml(getattr(usual, name))}` | {_cell(spec.text)} |"
                   for name, spec in specs(kind).items()]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def reference_config() -> str:
    """Every key as YAML, with its default, and what is told of it as a comment."""
    lines = [YAML_HEAD]
    for section in dataclasses.fields(schema.Config):
        assert isinstance(section.default_factory, type)
        usual = section.default_factory()
        lines += ["", f"{section.name}:"]
        for name, spec in specs(type(usual)).items():
            row = f"{name}: {_yaml(getattr(usual, name))}  # {spec.text}"
            lines += textwrap.wrap(row, 110, initial_indent="  ", subsequent_indent="  # ",
                                   break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """What `--help` of every command prints."""
    lines = [CLI_HEAD]
    for command in cli.app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        shown = CliRunner().invoke(cli.app, [name, "--help"], prog_name="threed", color=False, env=WIDTH)
        lines += ["", f"## threed {name}", "", "```text", shown.output.strip(), "```"]
    lines += ["", "## Hardware", "", "`--hardware NAME,key=value,...` of `predict` and "
              "`check --hardware`. Names: the files of configs/hardware.", "",
              inspect.getdoc(Hardware) or "", "", *_table(Hardware)]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """The public names, a row each."""
    title, _, rest = (inspect.getdoc(threed) or "").partition("\n\n")
    example, _, about = rest.partition("\n\n")
    lines = [API_HEAD, "", title, "", "```text", inspect.cleandoc(example), "```", "", about, "",
             "| name | what it is |", "|---|---|"]
    lines += [_name_row(f"threed.{name}", getattr(threed, name)) for name in threed.__all__]
    title, _, rest = (inspect.getdoc(extend) or "").partition("\n\n")
    example, _, about = rest.partition("\n\n")
    lines += ["", API_MIDDLE, "", title.partition(": ")[2].capitalize(), "", "```python",
              inspect.cleandoc(example), "```", "", about, "", "| name | what it is |", "|---|---|"]
    lines += [_name_row(name, value) for name in extend.__all__ if callable(value := getattr(extend, name))
              and not name.isupper() and get_origin(value) is None]
    return "\n".join([*lines, "", API_TAIL]) + "\n"


def _name_row(name: str, value: Any) -> str:
    words = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    call = name + (_signature(value) if inspect.isfunction(inspect.unwrap(value)) else "")
    return f"| `{call}` | {_cell(words.partition('. ')[0].rstrip('.:'))} |"


def keys_page() -> str:
    """Every key of the other frameworks that threed knows, a table a framework."""
    lines = [KEYS_HEAD]
    for framework in FRAMEWORKS:
        lines += ["", f"## {framework.name}", "", f"| {framework.name} | threed |", "|---|---|",
                  *(f"| `{_name(framework, row)}` | {_cell(_ours(row))} |" for row in framework.rows)]
    return "\n".join(lines) + "\n"


def _name(framework: Framework, row: Key) -> str:
    return "--" + row.theirs.replace("_", "-") if framework.name == "Megatron-LM" else row.theirs


def _ours(row: Key) -> str:
    """Our key, as code, and the remark on it."""
    for prefix, mark in ((NO_KEY, "no key"), (NOTHING, "**none**")):
        if row.ours.startswith(prefix):
            return f"{mark}: {row.ours.removeprefix(prefix)}"
    key, space, rest = row.ours.partition(" ")
    return f"`{key}`{space}{rest}"


def metrics_page() -> str:
    """docs/metrics.md, with the table of all metrics behind its first paragraph."""
    head, _, rest = METRICS_PAGE.read_text().partition(METRICS_HEAD)
    rows = [f"| {' '.join(f'`{name}`' for name in row.names)} | {row.unit} | {_cell(_meaning(row))} |"
            for row in METRICS]
    return "\n".join([head + METRICS_HEAD, "|---|---|---|", *rows]) + "\n\n" + rest.partition("\n\n")[2]


def _meaning(row: Metric) -> str:
    return row.meaning + "; `/0`, `/1`, ... for each position" * row.by_position


def _signature(function: Any) -> str:
    """The names of a function's arguments."""
    return f"({', '.join(inspect.signature(function).parameters)})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> Iterator[tuple[Path, str]]:
    yield HERE.parents[1] / "configs" / "reference.yaml", reference_config()
    yield HERE / "config.md", config_page()
    yield HERE / "cli.md", cli_page()
    yield HERE / "api.md", api_page()
    yield HERE / "keys.md", keys_page()
    yield METRICS_PAGE, metrics_page()


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
        print(f"wrote {path}")
