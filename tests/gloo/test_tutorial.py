"""The tutorial of a chat model, as a reader would follow it: its files are written, its commands run, and
transformers answers as threed does."""

from __future__ import annotations

import json
import os
import runpy
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.guides import ROOT, blocks
from tests.running import Run, metrics

pytest.importorskip("transformers", reason="the peer is transformers: pip install -e '.[dev]'")
PAGE = ROOT / "docs" / "tutorials" / "fine-tune.md"


def script(folder: Path, name: str, text: str) -> str:
    """Run a script as `python NAME`; what it prints."""
    (folder / name).write_text(text)
    output = StringIO()
    with redirect_stdout(output):
        runpy.run_path(str(folder / name))
    return output.getvalue()


def test_fine_tune(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, ask = blocks(PAGE, "python")
    script(tmp_path, "make.py", make)
    outputs = []
    for line in "\n".join(blocks(PAGE, "sh")).splitlines():
        word, *argv = shlex.split(line)
        assert word == "threed", line
        more = ["monitor.wandb=disabled", f"data.cache={tmp_path / 'cache'}"] * (argv[0] == "train")
        run = Run(tmp_path, *argv, *more, env={"PWD": os.getcwd()})
        assert run.wait() == 0, run.output
        outputs.append(run.output)
    (answer,) = blocks(PAGE, "text")
    assert outputs[3].endswith(f"{answer}\n"), outputs[3]
    assert script(tmp_path, "ask.py", ask) == answer.splitlines()[1] + "\n"
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text())["eos_token_id"] == 3
    assert metrics(tmp_path / "run")[-1]["step"] == 40
