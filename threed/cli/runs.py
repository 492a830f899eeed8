"""Verbs of the command line around a run: convert, init, runs, trace. (`main` has the others.) They import
what they need when they are called, so that `threed train` does not wait for it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from threed.base.errors import ConfigError, InputError, PlanError
from threed.base.quantity import many
from threed.cli.options import Json, NewFile, RunPath, Size, Yes, keys

_OVERRIDE = re.compile(r"[a-z]+\.[a-z_]+=")

# A call of each command, which its help ends with.
EXAMPLES = {
    "train": "threed train configs/toy.yaml parallel.pp=4 parallel.dp=1 train.steps=20",
    "show": "threed show configs/toy.yaml --rank 4",
    "check": "threed check configs/llama3-8b.yaml --devices 64 --hardware h100-sxm",
    "predict": "threed predict configs/llama3-8b.yaml --devices 64 --hardware h100-sxm --tokens 1T",
    "search": "threed search configs/llama3-8b.yaml --devices 64 --write best.yaml",
    "calibrate": "threed calibrate -o my.yaml",
    "memory": "threed memory --parameters 7.5B --dp 64",
    "matrix": "threed matrix --refused",
    "data": "threed data my.yaml data.source=/data/web",
    "trace": "threed trace runs/toy --svg step.svg",
    "report": "threed report runs/toy -o report.html",
    "compare": "threed compare runs/toy",
    "import": "threed import ~/models/Llama-3.2-1B -o runs/mine",
    "export": "threed export runs/mine ~/models/mine --dtype bf16",
    "convert": "threed convert ds_config.json model.name=llama3-8b > my.yaml",
    "init": "threed init my.yaml --model llama3-8b --devices 64 --data data/text_document",
    "runs": "threed runs /shared/runs",
    "files": "threed files launch/slurm.sbatch",
    "generate": 'threed generate runs/toy --prompt "def main(" --temperature 0.8 --top-p 0.95',
    "eval": 'threed eval runs/toy --data "more/*.txt"',
}

DsConfig = Annotated[Path | None, typer.Argument(metavar="DS_CONFIG",
                                                 help="DeepSpeed's JSON; leave it out with --megatron")]
Overrides = Annotated[list[str] | None,
                      typer.Argument(metavar="[KEY=VALUE]...", autocompletion=keys,
                                     help="win over what is converted: model.name=llama3-8b")]
Options = Annotated[str | None,
                    typer.Option(metavar="FILE|-- ARGS",
                                 help="Megatron-LM's arguments: behind --, or a file: a list of them, a log "
                                      "of a run, which begins with them, or a YAML")]
Devices = Annotated[int | None, typer.Option(help="of all machines; tp and pp leave the rest to dp")]
Version = Annotated[str | None, typer.Option(metavar="X.Y.Z", help="whose defaults count (the newest)")]
Memory = Annotated[str | None, typer.Option(metavar="BYTES", help="of a device, such as 80GB")]
Positions = Annotated[int | None, typer.Option(min=1, help="pipeline positions: a pipeline of so many")]
Data = Annotated[str | None, typer.Option(metavar="PATH", help="text, JSONL, or a Megatron prefix")]


class ConvertCommand(TyperCommand):
    """Behind `--megatron --` stand the arguments of another program, and overrides of ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        begin = next((place for place, word in enumerate(args[1:], 1)
                      if word == "--" and args[place - 1] == "--megatron"), None)
        if begin is not None:
            theirs = [word for word in args[begin + 1:] if not _OVERRIDE.match(word)]
            ours = [word for word in args[begin + 1:] if _OVERRIDE.match(word)]
            args = [*args[:begin], shlex.join(theirs), *ours]
        return super().parse_args(ctx, args)


def convert(source: DsConfig = None, overrides: Overrides = None, megatron: Options = None,
            devices: Devices = None, deepspeed_version: Version = None, as_json: Json = False) -> None:
    """Convert a DeepSpeed config or Megatron-LM's arguments. Prints a YAML that `threed check` accepts, and
    at its end, as comments, each key that was dropped or refused, with the reason. Defaults that differ are
    written out.

    threed convert --devices 64 --megatron train.log > my.yaml

    threed convert --megatron -- --num-layers 24 --hidden-size 1024 > my.yaml
    """
    from threed.interop import convert as converting

    words = list(overrides or [])
    if megatron is not None:
        if source is not None:  # the first of the overrides
            words.insert(0, str(source))
        if deepspeed_version is not None:
            raise InputError("--megatron and --deepspeed-version exclude each other: leave one of them out")
        done = converting.megatron(megatron, words, devices)
    elif source is None:
        raise InputError("give DeepSpeed's ds_config.json, or --megatron with a file that has "
                         "Megatron-LM's arguments, or with -- and the arguments")
    else:
        done = converting.deepspeed(source, words, devices, deepspeed_version)
    print(json.dumps(converting.document(done), indent=1) if as_json else converting.show(done))
    if done.missing and not as_json:
        print(f"threed: not found, so threed's default: {', '.join(done.missing)}", file=sys.stderr)
    if done.refused and not as_json:
        count = len(done.refused)
        print(f"threed: {count} key{'s' if count > 1 else ''} refused: threed cannot do what "
              f"{'they ask' if count > 1 else 'it asks'} for (see the end of the YAML)", file=sys.stderr)


def init(path: NewFile = Path("config.yaml"), model: Size = None, devices: Devices = None,
         memory: Memory = None, data: Data = None, yes: Yes = False, pp: Positions = None) -> None:
    """Write a first config, with comments. Asks for what is not given. The mildest ZeRO stage, recomputation,
    tensor parallelism, pipeline and, last, offload to the host that fit are chosen by the plan's memory;
    --pp asks for a pipeline. `threed check FILE --advise` and `threed search` compare others.
    """
    from threed.base.quantity import parse_memory, show_count
    from threed.interop import init as first
    from threed.models.families.registry import size_of

    if path.exists():
        raise InputError(f"{path} exists: give another name, or remove it first")
    model = _ask(model, "Model (" + ", ".join(first.names()) + ")", first.TOY, yes)
    first.model_of(str(model))  # a wrong name is said before more is asked
    devices = int(_ask(devices, "Devices (GPUs, or processes on CPUs), of all machines", 1, yes))
    if devices < 1:
        raise InputError(f"--devices {devices}: must be at least 1")
    limit = parse_memory(_ask(memory, "Memory of a device", "80GB", yes))
    data = _ask(data, "Data: text, a folder, *.jsonl or a Megatron prefix (python-stdlib: a sample)",
                "python-stdlib", yes)
    name = size_of(str(model)) or first.TOY
    count = _parameters(name)
    values = first.choose(name, devices, limit, _fits, count, pp)
    values |= {"data.source": data, "run.dir": f"runs/{path.stem}"}
    what = f"{name}, {show_count(count)} parameters on {many(devices, 'device')}"
    text = first.text(values, f"{what}.", path)
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    print(f"wrote {path}: {what}\n"
          f"next: threed check {path}")


def runs(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="that holds the run.dir of runs")]
         = Path("runs"), as_json: Json = False) -> None:
    """List runs: running, ended, stopped (on request) or failed; their step, last loss, speed, and the age of
    their last sign. A run is under way while its process holds the lock of its folder.
    """
    from threed.monitor import runs as listing

    rows = listing.find(folder, with_goodput=as_json)
    print(json.dumps({"runs": rows}, indent=1) if as_json else listing.show(rows))


def files(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="one of them, such as "
                                                     "launch/slurm.sbatch, or a folder")] = None) -> None:
    """List the configs, launch scripts and examples that come with threed; or, with NAME, print where one is
    on this machine."""
    from threed.base import shipped

    print("\n".join(shipped.names()) if name is None else shipped.path_of(name))


def trace(run: RunPath,
          output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
                                                      help="file of trace events; default: RUN/trace.json, "
                                                           "unless --svg is given")] = None,
          step: Annotated[int | None, typer.Option(help="this step; default: all traced steps")] = None,
          svg: Annotated[Path | None, typer.Option(metavar="FILE",
                                                   help="draw the timeline of the step, or of the last "
                                                        "traced one, into FILE")] = None) -> None:
    """Merge the traces of a run's ranks for ui.perfetto.dev and chrome://tracing, or draw them."""
    from threed.monitor import timeline
    from threed.monitor.run import Run

    traced = Run(run).traces
    chosen = traced.pick(step)
    for note in traced.notes:
        print(f"note: {note}", file=sys.stderr)
    if svg is not None:
        write_file("--svg", svg, timeline.picture_of(traced, chosen[-1]))
        print(f"wrote {svg}: step {chosen[-1]}")
    if output is not None or svg is None:
        file = output or run / "trace.json"
        events = timeline.chrome(traced, chosen)
        write_file("-o", file, json.dumps(events, separators=(",", ":")))
        print(f"wrote {file}: {many(len(traced.ranks), 'rank')}, {many(len(chosen), 'step')}, "
              f"{len(events['traceEvents'])} events")


def write_file(option: str, file: Path, text: str) -> None:
    """Write what an option asked for. InputError where the file cannot be written."""
    try:
        file.write_text(text)
    except OSError as error:
        raise InputError(f"{option} {file}: {error.strerror}") from None


def _ask(given: Any, question: str, default: Any, yes: bool) -> Any:
    if given is not None:
        return given
    if yes:
        return default
    try:
        return typer.prompt(question, default=default)
    except typer.Abort:  # Ctrl-C, or no terminal and no more lines on stdin
        print(file=sys.stderr)
        raise InputError(f"no answer to '{question.partition(' (')[0]}', and no file was written: --yes "
                         "takes the default for what is not given, and each question has an option") from None


def _parameters(name: str) -> int:
    from threed.interop.init import model_of
    from threed.models.model import num_parameters

    return num_parameters(model_of(name))


def _fits(values: dict[str, Any], limit_bytes: int) -> bool:
    """Whether what a rank needs fits into a device, and of several into a host, by the plan; False where a
    config cannot run. A rank holds as much during twice as many micro-batches as positions as during more,
    which take longer to plan."""
    from threed.config.load import of_values
    from threed.planner.from_config import analysed
    from threed.prediction import host
    from threed.prediction.hardware import Hardware
    from threed.prediction.peak import peaks, plan_room, too_much
    from threed.program.summary import stages

    micro_batches = 2 * values.get("parallel.pp", 1)
    short = {**values, "train.global_batch_size": micro_batches * values["parallel.dp"]}
    machine = Hardware.parse("")
    try:
        config = of_values(dict(values), "the config")
        analysis = analysed(of_values(short, "the config"), plan_room(machine, config, limit_bytes))
    except (ConfigError, PlanError):
        return False
    rows = stages(analysis)
    if not host.fits(host.use_of(config, machine, rows), machine):
        return False
    return too_much(peaks(analysis, machine, rows=rows), machine, limit_bytes) is None
