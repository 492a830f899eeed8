"""Arguments and options of the command line, each written once, with what a shell completes for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from threed import devices
from threed.base.errors import ConfigError, InputError, Reported, ThreedError
from threed.base.remember import remembering

HELP_COSTS = "measured costs: a run's folder, or its costs.json"
HELP_HARDWARE = ("a name of configs/hardware or a file, then single numbers: h100-sxm,adapter_gbps=200 ... "
                 "(default: a100-sxm, or cpu-core where run.device=cpu)")


# ---------------------------------------------------------------- what a shell completes


def keys(args: list[str], incomplete: str) -> list[str]:
    """Overrides: keys, and the values of those that have a few. (To bash `=` is a word of its own.)"""
    from threed.config.load import known_keys

    if args[-1:] == ["="] and len(args) > 1:
        return [str(value) for value in choices(args[-2]) if str(value).startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    every = [f"{key}={value}" for value in choices(key)] if equals else [
        f"{known}=" for known in known_keys()]
    return [text for text in every if text.startswith(incomplete)]


def choices(key: str) -> tuple[object, ...]:
    """The values of a key that has a few."""
    from threed.models.families.registry import sizes
    from threed.schema import keys_of

    told = keys_of().get(key)
    return tuple(sizes() if key == "model.name" else told.choices if told else ())


def machines(incomplete: str) -> list[str]:
    """Values of --hardware: names, and after a comma single numbers."""
    from threed.prediction.hardware import NUMBERS, names

    before, comma, last = incomplete.rpartition(",")
    known = [f"{before},{name}=" for name in NUMBERS] if comma else names()
    return [text for text in known if text.startswith(f"{before}{comma}{last}")]


def models(incomplete: str) -> list[str]:
    """Values of --model."""
    from threed.interop.init import names

    return [name for name in names() if name.startswith(incomplete)]


def _one_of(*values: str):
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def schedules(incomplete: str) -> list[str]:
    """Values of --schedule."""
    from threed.schedules.orders import SCHEDULES

    return [name for name in (*SCHEDULES, "auto", "file:") if name.startswith(incomplete)]


def optimizers(incomplete: str) -> list[str]:
    """Values of --optimizer."""
    from threed.optim.registry import OPTIMIZERS

    return [name for name in OPTIMIZERS if name.startswith(incomplete)]


# ---------------------------------------------------------------- what is planned, and for what

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG",
                                            help="YAML file, or one that ships: configs/toy.yaml")]
TrainPath = Annotated[Path, typer.Argument(metavar="CONFIG|RUN",
                                           help="YAML file, or one that ships; or the run.dir of a run")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="on the console only warnings, errors and the "
                                                           "summary (monitor.quiet)")]
Overrides = Annotated[list[str] | None,
                      typer.Argument(metavar="[KEY=VALUE]...", help="overrides, such as parallel.tp=4",
                                     autocompletion=keys)]
Devices = Annotated[int | None,
                    typer.Option(metavar="N", min=1, help="ranks, one a device: what tp and pp leave of them "
                                                          "is dp, where parallel.dp is auto")]
Hardware = Annotated[str, typer.Option(help=HELP_HARDWARE, autocompletion=machines)]
Costs = Annotated[Path | None, typer.Option(metavar="RUN|FILE", help=HELP_COSTS)]
Memory = Annotated[str | None, typer.Option(metavar="BYTES",
                                            help="of a device, such as 80GB (default: the hardware's)")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else")]

# ---------------------------------------------------------------- of `show`

Rank = Annotated[int | None, typer.Option(help="print this rank's program, an instruction a line")]
Program = Annotated[str, typer.Option(help="train, evaluate, generate, snapshot, verify; "
                                           "offload.overlap: enter, settle",
                                      autocompletion=_one_of("train", "evaluate", "generate", "snapshot",
                                                             "verify", "enter", "settle"))]
UnitKind = Annotated[str | None, typer.Option(metavar="u|p", autocompletion=_one_of("u", "p"),
                                              help="list compute units (u), or parameter units (p)")]
Explain = Annotated[int | None, typer.Option(metavar="INDEX", help="say what this instruction of --rank R "
                                                                   "(0) is for")]
Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="draw the timeline into FILE")]

# ---------------------------------------------------------------- of `check`

Advise = Annotated[bool, typer.Option("--advise", help="compare other settings with this one")]
Fits = Annotated[str | None, typer.Option(metavar="BYTES", help="memory of a device, such as 80GB: check "
                                                                "that a rank fits, and advise settings")]
OfMachine = Annotated[str, typer.Option(help="as in predict: check that a rank fits into its memory; with "
                                             "--advise, its prices", autocompletion=machines)]

# ---------------------------------------------------------------- of `predict`

BareConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG",
                                                       help="YAML file; leave it out for a bare pipeline")]
Tokens = Annotated[str | None, typer.Option(metavar="N", help="to train on, such as 15T or 15e12: print "
                                                              "days, device-hours and dollars")]
Imbalance = Annotated[float, typer.Option(help="with experts: rows of the busiest rank over those of "
                                               "balanced ones (the metric moe/imbalance)")]
Schedule = Annotated[str | None, typer.Option(help="of a bare pipeline: 1f1b, zb-v, auto, file:PATH ...",
                                              autocompletion=schedules)]
Positions = Annotated[int, typer.Option(min=1, help="positions of a bare pipeline")]
MicroBatches = Annotated[int, typer.Option(min=1, help="micro-batches of a bare pipeline")]
Times = Annotated[str, typer.Option(help="seconds of a position's forward, of backward's two halves, of a "
                                         "message")]
VirtualStages = Annotated[int | None, typer.Option(min=1, help="stages a position")]
ActivationLimit = Annotated[str | None, typer.Option(metavar="2x|BYTES",
                                                     help="most activations that a position may keep")]
Seconds = Annotated[float | None,
                    typer.Option(min=0, help="search this much longer with --schedule auto, or until no "
                                             "order can be better; the result then depends on the machine")]

# ---------------------------------------------------------------- of `search`

Many = Annotated[int, typer.Option(min=1, help="ranks, one a device")]
Rounding = Annotated[bool, typer.Option("--rounding", help="compare gradients that are sent in 16 bits, too: "
                                                           "it rounds their sums")]
Top = Annotated[int, typer.Option(min=1, help="layouts to print")]
Write = Annotated[Path | None, typer.Option(metavar="FILE", help="for the fastest, as a config")]

# ---------------------------------------------------------------- of `calibrate`

NewHardware = Annotated[Path, typer.Option("-o", "--output", metavar="FILE",
                                           help="hardware file to write, such as my.yaml")]
Ranks = Annotated[int | None, typer.Option(help="processes that measure together; default: one a GPU, or a "
                                                "processor (8 at most)")]
Quick = Annotated[bool, typer.Option("--quick", help="fewer sizes, less time for each")]
DiskFolder = Annotated[Path, typer.Option(help="whose disk is measured")]
Device = Annotated[str, typer.Option(help=devices.NAMED, autocompletion=_one_of(*devices.CHOICES))]

# ---------------------------------------------------------------- of `memory`

SizedConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML file; leave it out with "
                                                                               "--parameters")]
Parameters = Annotated[str | None, typer.Option(metavar="N", help="parameters of the whole model, such as "
                                                                  "7.5e9 or 7.5B")]
Shards = Annotated[int, typer.Option(min=1, help="ranks that share one copy (zero.shard_size, if it is set)")]
Axis = Annotated[int, typer.Option(min=1)]
Dtype = Annotated[str, typer.Option(help="of parameters and gradients: bf16, fp16 or fp32",
                                    autocompletion=_one_of("bf16", "fp16", "fp32"))]
Master = Annotated[str, typer.Option(help="of 16-bit weights: fp32 or none",
                                     autocompletion=_one_of("fp32", "none"))]
Optimizer = Annotated[str, typer.Option(help="adamw, lion or sgd", autocompletion=optimizers)]

# ---------------------------------------------------------------- of runs, and of others

Refused = Annotated[bool, typer.Option("--refused", help="list every refused cell")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="the run.dir of a run")]
What = Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="YAML file, or the run.dir of a run")]
Page = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
                                           help="default: report.html, in RUN if one is given")]
PageCosts = Annotated[Path | None, typer.Option(metavar="RUN|FILE",
                                                help=f"{HELP_COSTS}; default: RUN's own")]
NewFile = Annotated[Path, typer.Argument(metavar="FILE", help="to write; an existing one is left alone")]
Size = Annotated[str | None, typer.Option(help="toy, or a size such as gpt2-small or llama3-8b",
                                          autocompletion=models)]
Yes = Annotated[bool, typer.Option("--yes", help="ask nothing: defaults for what is not given")]


def exclude(context: typer.Context, given: str, *others: str, why: str = "") -> None:
    """InputError where the command line has one of the parameters `others` beside `given`: it would have no
    effect."""
    for name in others:
        if is_given(context, name):
            raise InputError(f"{given} and --{name.replace('_', '-')} exclude each other"
                             f"{f' ({why})' if why else ''}: leave one of them out")


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# ---------------------------------------------------------------- what a command prints where it fails

UsageError: Any = typer.BadParameter.__bases__[0]  # of click, or of the click that typer brings


ARGUMENTS = ("config", "config_file", "config_path", "cfg", "conf", "c", "f", "file", "yaml")


def instead(error: Exception, words: list[str]) -> list[str]:
    """What to write in place of an option or a command that there is not. `words`: of the command line."""
    from threed.base.words import COMMANDS

    option = getattr(error, "option_name", None)
    if option is not None:
        said = hint(option, words)
    else:
        said = COMMANDS.get(words[0].lower()) if words and "No such command" in str(error) else None
    return [said] if said else []


def hint(option: str, words: list[str]) -> str | None:
    """What to write in place of an option that there is not; None where that is not known."""
    from threed.base.words import meant
    from threed.config.load import known_keys
    from threed.config.synonyms import ours

    at, word = next(((index, word) for index, word in enumerate(words)
                     if word.partition("=")[0] == option), (-1, option))
    name, equals, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if not equals:
        value = words[at + 1] if 0 <= at < len(words) - 1 and not words[at + 1].startswith("-") else "VALUE"
    keys = known_keys()
    known = [key for key in (name, f"{name}.name") if key in keys] or [
        key for key in keys if key.rpartition(".")[2] == name]
    if known:
        return f"{option} is a key of the config: leave out the dashes: {known[0]}={value}"
    if name in ARGUMENTS:
        return (f"{option} is no option: CONFIG is the first word, as in threed {words[0]} "
                f"{value if value != 'VALUE' else 'my.yaml'}")
    said = meant(option) or ours(option)
    return said and f"{option}: {said}"


def documented(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that prints one JSON document under --json where it fails, too: with `error` and `problems`,
    a line each. stderr says the same. What plans of one model share is computed once."""
    @wraps(command)
    def run(*args: Any, **given: Any) -> Any:
        try:
            with remembering():
                return command(*args, **given)
        except ThreedError as error:
            if not given.get("as_json"):
                raise
            print(json.dumps(error_document(error), indent=1))
            if not isinstance(error, Reported):
                print(f"threed: {error}", file=sys.stderr)
            raise typer.Exit(error.status) from None

    return run


def error_document(error: ThreedError | str) -> dict[str, Any]:
    """What `--json` prints of an error."""
    problems = list(map(str, error.problems)) if isinstance(error, ConfigError) else [str(error)]
    return {"ok": False, "error": str(error), "problems": problems}
