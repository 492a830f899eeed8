"""The verbs of the command line for models of Hugging Face: import, export."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from threed.base.quantity import show_bytes, show_count

_HELP_OUTPUT = ("run.dir of the run to come, which gets the checkpoint and config.yaml; or the folder of a "
                "checkpoint, such as PATH/step-00000000")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Meanwhile SIGTERM ends the command as Ctrl-C does: nothing half done stays."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def import_(source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="folder with config.json and "
                                                                          "*.safetensors, or the model's in "
                                                                          "the hub's cache")],
            overrides: Annotated[list[str] | None,
                                 typer.Argument(metavar="[KEY=VALUE]...",
                                                help="for the YAML, such as model.seq_len=8192")] = None,
            output: Annotated[Path | None, typer.Option("-o", "--output", metavar="RUN|CHECKPOINT",
                                                        help=_HELP_OUTPUT)] = None,
            config: Annotated[Path | None, typer.Option(metavar="FILE",
                                                        help="YAML to write; default: config.yaml in RUN")]
            = None) -> None:
    """Import a model of transformers, from a folder on this machine: weights into a checkpoint for any mesh,
    config.json into a YAML, the tokenizer into data.tokenizer.

    GPT-2, Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3, and with experts Mixtral, Qwen 3 MoE and dots.llm1. What
    such a model has and threed has not is refused by name. One parameter is in memory at a time.
    """
    from threed.base.errors import InputError
    from threed.interop.hf.importing import import_model

    if output is None:
        raise InputError("give -o RUN, the folder of the run to come, such as -o runs/mine")
    with _stoppable():
        done = import_model(source, output, overrides, config, _say)
    for note in done.notes:
        _say(f"note: {note}")
    print(f"wrote {done.checkpoint}: {show_count(done.parameters)} parameters of a {done.family}, "
          f"{show_bytes(done.bytes)}\nwrote {done.config}\n"
          f"go on with: threed train {done.config} data.source=YOUR_DATA")


def export(run: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT",
                                               help="run.dir of a run, or one checkpoint")],
           output: Annotated[Path, typer.Argument(metavar="HF_DIR", help="folder to write, which must not be "
                                                                         "there")],
           dtype: Annotated[str | None, typer.Option(help="of the tensors: fp32, bf16 or fp16 (biases of "
                                                          "routers are fp32); default: as imported, else "
                                                          "precision.dtype")] = None,
           like: Annotated[Path | None, typer.Option(metavar="HF_DIR",
                                                     help="follow this folder's config.json and tokenizer; "
                                                          "default: those of the import")] = None,
           adapters: Annotated[bool, typer.Option("--adapters", help="of a run with model.lora_rank: its "
                                                                     "adapters alone, for PEFT")] = False,
           ) -> None:
    """Export a run's newest checkpoint, of any mesh, as a model of transformers: safetensors with an index,
    config.json, generation_config.json and the files of the tokenizer. Adapters are merged into the weights.
    One parameter is in memory at a time."""
    from threed.interop.hf.adapters import export_adapters
    from threed.interop.hf.exporting import export_model

    with _stoppable():
        done = (export_adapters if adapters else export_model)(run, output, dtype, like, _say)
    for note in done.notes:
        _say(f"note: {note}")
    print(f"wrote {done.folder}: a {done.family} of step {done.step}, {show_bytes(done.bytes)}\n"
          + "\n".join(f"  {name}" for name in done.files))


def register(app: typer.Typer) -> None:
    app.command("import", short_help="import a model of Hugging Face transformers")(import_)
    app.command(short_help="export a run as a model of Hugging Face transformers")(export)
