"""The command line. Its commands are verbs; all settings of a run are keys of the config."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from threed import __version__, api, cli_data, cli_foreign, cli_learned
from threed import config as configs
from threed.early import begin
from threed.errors import ConfigError, InputError, Reported, ThreedError
from threed.program import explain as explaining
from threed.program.picture import picture
from threed.quantity import parse_count, parse_memory
from threed.schema import Config
from threed.start import start
from threed.verbs import EXAMPLES, RunPath, convert, exclude, init, keys, runs, trace, write_file

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Pretrain GPT-style models over data, tensor and pipeline parallelism, from one plan.\n\n"
         "A run is one YAML file and dotted overrides: threed train configs/toy.yaml train.steps=20 "
         "parallel.pp=4. configs/reference.yaml lists every key with its default and meaning.",
)
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG",
                                            help="YAML file, or one that ships: configs/toy.yaml")]
Overrides = Annotated[list[str] | None,
                      typer.Argument(metavar="[KEY=VALUE]...", help="overrides, such as parallel.tp=4",
                                     autocompletion=keys)]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else")]

# of `predict`
BareConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG",
                                                       help="YAML file; leave it out for a bare pipeline")]
HELP_COSTS = "measured costs: a run's folder, or its costs.json"
HELP_HARDWARE = ("a name of configs/hardware or a file, then single numbers: h100-sxm,adapter_gbps=200 ... "
                 "(default: a100-sxm, or cpu-core where run.device=cpu)")
HELP_MEMORY = "of a device, such as 80GB (default: the hardware's)"
HELP_TOKENS = "to train on, such as 15e12: print days, device-hours and dollars"
HELP_ROUNDING = "compare gradients that are sent in 16 bits, too: it rounds their sums"
HELP_SECONDS = ("search this much longer with --schedule auto, or until no order can be better; the result "
                "then depends on the machine")
HELP_SCHEDULE = "of a bare pipeline: 1f1b, zb-v, auto, file:PATH ..."
HELP_TIMES = "seconds of a position's forward, of backward's two halves, of a message"
HELP_LIMIT = "most activations that a position may keep"


def _version(value: bool) -> None:
    if value:
        print(f"threed {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                help="print the version and exit")] = False) -> None:
    pass


@app.command(short_help="train a model, or go on from its newest checkpoint")
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train. The command starts all ranks on this machine; with NNODES, NODE_RANK and MASTER_ADDR in the
    environment, the ranks of one of several nodes (launch/torchrun.sh); under torchrun or srun it is one
    rank.

    SIGTERM and Ctrl-C save a checkpoint and end the run; SIGUSR1 saves one and the run goes on. A run that is
    started again goes on from its newest complete checkpoint (train.resume).
    """
    parent = os.getppid()
    path = configs.find_file(config)
    status = start(lambda world_size: configs.load(path, overrides, world_size), parent=parent)
    from threed.rank import leave

    leave(status)


@app.command(short_help="show what will run: mesh, units, schedule, programs")
def show(context: typer.Context, config: ConfigPath, overrides: Overrides = None,
         rank: Annotated[int | None,
                         typer.Option(help="print this rank's program, an instruction a line")] = None,
         program: Annotated[str, typer.Option(help="train, evaluate, generate, snapshot, verify; delayed "
                                                   "updates: plain, enter, drain")] = "train",
         units: Annotated[str | None, typer.Option(metavar="u|p", help="list compute units (u), or parameter "
                                                                       "units (p)")] = None,
         explain: Annotated[int | None, typer.Option(metavar="INDEX",
                                                     help="say what this instruction of --rank R (0) is "
                                                          "for")] = None,
         svg: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the timeline into FILE")] = None,
         as_json: Json = False) -> None:
    """Show what will run: the mesh, the units and the schedule's grid; or one rank's program; or the units of
    one kind; or what one instruction is for."""
    if explain is not None:
        exclude(context, "--explain", "units", "svg")
    if units is not None:
        exclude(context, "--units", "rank", "program")
    gc.disable()  # as in predict
    plan = api.plan(_load(config, overrides))
    if explain is not None:
        explained = api.explain(plan, explain, rank or 0, program)
        print(json.dumps(explained, indent=1) if as_json else explaining.show(explained))
        return
    document = json.dumps(api.show_document(plan, rank, program, units), indent=1) if as_json else None
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    # Raises for bad input before a file is written.
    text = document or api.show(plan, rank, program, units, columns)
    if svg is not None:
        write_file("--svg", svg, picture(plan, program))
    print(text)


@app.command(short_help="check a config for any mesh, and show what each rank holds and sends")
def check(config: ConfigPath, overrides: Overrides = None,
          advise: Annotated[bool, typer.Option("--advise",
                                               help="compare other settings with this one")] = False,
          memory: Annotated[str | None, typer.Option(metavar="BYTES",
                                                     help="memory of a device: advise settings that fit")]
          = None,
          hardware: Annotated[str, typer.Option(help="for --advise, as in predict")] = "",
          as_json: Json = False) -> None:
    """Check that a config can run, on any number of ranks, without starting any: the plan is built and
    walked.

    Prints what a rank of each pipeline position holds and sends in a step; with --advise, other settings
    beside it. Exit status 2 where it cannot run.
    """
    gc.disable()  # as in predict
    try:
        loaded = _load(config, overrides)
        checked = api.check(loaded)
    except ThreedError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        _print_json({"ok": False, "problems": problems})
        raise typer.Exit(error.status) from None
    limit = parse_memory(memory) if memory is not None else None
    advised, advice = None, None
    if advise or limit is not None:
        gc.enable()  # it makes one plan after the other
        from threed.prediction import advise as advising
        from threed.prediction.hardware import DEFAULT, OF_CPUS, Hardware

        machine = Hardware.parse(hardware, OF_CPUS if loaded.run.device == "cpu" else DEFAULT)
        advice = advising.show(advised := advising.advise(loaded, machine, limit, _progress), limit)
    if as_json:
        _print_json({**checked, **({"advice": advised} if advised else {})})
    else:
        print(api.show_check(checked, loaded) + (f"\n\n{advice}" if advice else ""))


@app.command(short_help="predict step time, bubble, memory and bytes")
def predict(context: typer.Context, config: BareConfigPath = None, overrides: Overrides = None,
            costs: Annotated[Path | None, typer.Option(metavar="RUN|FILE", help=HELP_COSTS)] = None,
            hardware: Annotated[str, typer.Option(help=HELP_HARDWARE)] = "",
            tokens: Annotated[float | None, typer.Option(metavar="N", min=1, help=HELP_TOKENS)] = None,
            schedule: Annotated[str | None, typer.Option(help=HELP_SCHEDULE)] = None,
            pp: Annotated[int, typer.Option(min=1, help="positions of a bare pipeline")] = 4,
            micro_batches: Annotated[int, typer.Option(min=1, help="micro-batches of a bare pipeline")] = 8,
            times: Annotated[str, typer.Option(help=HELP_TIMES)] = "f=1,b=1,w=1,comm=0",
            virtual_stages: Annotated[int | None, typer.Option(min=1, help="stages a position")] = None,
            activation_limit: Annotated[str | None, typer.Option(metavar="2x|BYTES", help=HELP_LIMIT)] = None,
            seconds: Annotated[float | None, typer.Option(min=0, help=HELP_SECONDS)] = None,
            as_json: Json = False) -> None:
    """Predict a step: time, bubble, memory and bytes of each pipeline position, by walking the plan with a
    clock.

    With a CONFIG, costs are analytic, or measured by a run (--costs). Without a CONFIG, a bare pipeline is
    walked: its bubble rate is that of the zero-bubble paper, (cost - m (f + b + w)) / cost, where cost is the
    longest span of a position.
    """
    gc.disable()  # plans are millions of small objects that all live until the end
    if config is not None:
        from threed.prediction.report import show as show_report

        exclude(context, "CONFIG", "schedule", "pp", "micro_batches", "times", "virtual_stages",
                 "activation_limit", "seconds")
        _print(api.predict(_load(config, overrides), hardware, costs, tokens), show_report, as_json)
        return
    from threed.prediction import bare

    if schedule is None:
        raise InputError("give a CONFIG, or --schedule NAME for a bare pipeline; threed predict --help shows "
                         "both")
    exclude(context, "--schedule", "costs", "hardware", "tokens")
    limit = None
    if activation_limit is not None:
        limit = bare.parse_limit_of_bare(activation_limit, pp, micro_batches)
    values = bare.predict_bare(schedule, pp, micro_batches, bare.parse_times(times), virtual_stages, limit,
                               seconds)
    _print(values, bare.show, as_json)


@app.command(short_help="search the best layout of a config on so many devices")
def search(config: ConfigPath, devices: Annotated[int, typer.Option(min=1, help="ranks, one a device")],
           overrides: Overrides = None,
           memory: Annotated[str | None, typer.Option(metavar="BYTES", help=HELP_MEMORY)] = None,
           hardware: Annotated[str, typer.Option(help=HELP_HARDWARE)] = "",
           rounding: Annotated[bool, typer.Option("--rounding", help=HELP_ROUNDING)] = False,
           top: Annotated[int, typer.Option(min=1, help="rows to print")] = 10,
           write: Annotated[Path | None, typer.Option(metavar="FILE", help="for the fastest, as a config")]
           = None, as_json: Json = False) -> None:
    """Search mesh, schedule, micro-batch, ZeRO, recomputation, sequence parallelism, offload and tiles for
    the shortest step. What overrides say of them stays fixed; the file's own layout is left out."""
    from threed.choosing import verb

    values = verb.search(config, devices, overrides, hardware, memory, _progress, rounding)
    if write is not None:
        verb.write_best(values, write)
    _print(values, lambda found: verb.show(found, top), as_json)


@app.command(short_help="measure this machine, and write a file for predict --hardware")
def calibrate(output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE",
                                                   help="hardware file to write, such as my.yaml")],
              ranks: Annotated[int | None,
                               typer.Option(help="processes that measure together; default: one a GPU, or a "
                                                 "processor (8 at most)")] = None,
              quick: Annotated[bool, typer.Option("--quick", help="fewer sizes, less time for each")] = False,
              folder: Annotated[Path, typer.Option(help="whose disk is measured")] = Path("."),
              device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
              as_json: Json = False) -> None:
    """Measure this machine, in less than two minutes: products, element-wise kernels, attention and layers;
    collectives and messages of several ranks, and what they take from computation; copies, the disk, and the
    host's optimizer step.

    Writes a file for `threed predict CONFIG --hardware FILE`, and prints how far its prices are from what was
    measured. Let nothing else run meanwhile.
    """
    from dataclasses import asdict

    from threed.calibration import fitted, points, verb

    machine, found = verb.calibrate(output, ranks, quick, folder, device, _progress)
    if as_json:
        _print_json({"hardware": asdict(machine), "errors": points.errors(found, machine)})
    else:
        print(f"{fitted.table(found, machine)}\nwrote {output}: {machine.title}")


@app.command(short_help="bytes of parameters, gradients and optimizer state at each ZeRO stage")
def memory(context: typer.Context,
           config: Annotated[Path | None, typer.Argument(metavar="CONFIG",
                                                         help="YAML file; leave it out with --parameters")]
           = None, overrides: Overrides = None,
           parameters: Annotated[str | None, typer.Option(metavar="N",
                                                          help="parameters of the whole model, such as 7.5e9 "
                                                               "or 7.5B")] = None,
           dp: Annotated[int, typer.Option(min=1, help="ranks that share one copy (zero.shard_size, if it is "
                                                       "set)")] = 1,
           tp: Annotated[int, typer.Option(min=1)] = 1, pp: Annotated[int, typer.Option(min=1)] = 1,
           dtype: Annotated[str,
                            typer.Option(help="of parameters and gradients: bf16, fp16 or fp32")] = "bf16",
           master: Annotated[str, typer.Option(help="of 16-bit weights: fp32 or none")] = "fp32",
           optimizer: Annotated[str, typer.Option(help="adamw, lion or sgd")] = "adamw",
           as_json: Json = False) -> None:
    """Bytes of parameters, gradients and optimizer state that a rank holds at ZeRO stages 0 to 3: by the ZeRO
    paper's formulas for --parameters, or exactly, from the plan of a CONFIG, for the position that holds
    most."""
    from threed.prediction import memory as memories

    if (config is None) == (parameters is None):
        raise InputError("give a CONFIG or --parameters N, and not both; for example threed memory "
                         "--parameters 7.5e9 --dp 64")
    if config is not None:
        exclude(context, "CONFIG", "dp", "tp", "pp", "dtype", "master", "optimizer")
        values = memories.of_config(configs.load(config, overrides))
    else:
        values = memories.of_size(parse_count(parameters or "") / (tp * pp), dp, dtype, master, optimizer)
    _print(values, memories.show, as_json)


@app.command(short_help="show which features work together, and why others do not")
def matrix(as_json: Json = False,
           refused: Annotated[bool, typer.Option("--refused",
                                                 help="list every refused cell")] = False) -> None:
    """Show the contract: every combination of schedule, ZeRO stage, offload, activation policy, precision,
    sequence parallelism, tied weights and shard groups either works and has a test, or is refused with a
    reason. `make matrix` runs the tests."""
    from threed import contract

    if as_json:
        _print_json(contract.document())
    else:
        print(contract.show(refused))


app.command(short_help="prepare the data ahead of a run, list or clean what is prepared")(cli_data.data)


app.command(short_help="merge a run's traces for Perfetto, or draw them")(trace)


@app.command(short_help="draw a plan or a run as one HTML page")
def report(what: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="YAML file, or the run.dir of a "
                                                                           "run")],
           overrides: Overrides = None,
           output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
                                                       help="default: report.html, in RUN if one is "
                                                            "given")] = None,
           costs: Annotated[Path | None, typer.Option(metavar="RUN|FILE",
                                                      help=f"{HELP_COSTS}; default: RUN's own")] = None,
           hardware: Annotated[str, typer.Option(help=HELP_HARDWARE)] = "") -> None:
    """Draw what will run, as one HTML file that needs no network: mesh, stages and units, the timeline of
    every lane, where the time goes, memory over time, and bytes on each axis.

    With a RUN, what was measured is drawn beside the prediction: a traced step, the causes of waiting, and
    the loss, throughput and bubble of all steps.
    """
    from threed.monitor.run import Run
    from threed.page.verb import report as draw

    gc.disable()  # as in predict
    if what.is_dir() and overrides:
        raise InputError(f"{' '.join(overrides)}: {what} is the folder of a run, which has its config "
                         "already; leave the overrides out, or give a CONFIG")
    file = output or (what / "report.html" if what.is_dir() else Path("report.html"))
    draw(Run(what) if what.is_dir() else configs.load(what, overrides), file, hardware, costs)
    print(f"wrote {file}: {file.stat().st_size / 1e6:.1f} MB; open it in a browser")


@app.command(short_help="compare predicted and measured times; show where the time went")
def compare(run: RunPath, as_json: Json = False) -> None:
    """Compare the times that a run measured with those that its plan predicts, and show where each rank's
    time went."""
    from threed.monitor import compare as comparing
    from threed.monitor.run import Run

    _print(Run(run).compare(), comparing.show, as_json)


cli_foreign.register(app)
app.command(short_help="convert a config of DeepSpeed or options of Megatron-LM")(convert)
app.command(short_help="write a first config, with comments")(init)
app.command(short_help="list runs: state, step, loss, speed, age")(runs)
cli_learned.register(app)
for _command in app.registered_commands:
    _command.epilog = f"Example: {EXAMPLES[str(_command.name or _command.callback.__name__)]}"  # pyright: ignore


def _progress(line: str) -> None:
    print(f"... {line}", file=sys.stderr, flush=True)


def _load(path: Path, overrides: list[str] | None) -> Config:
    """The config, with a word where the number of its ranks is left open."""
    config = configs.load(path, overrides)
    if configs.leaves_dp(path, overrides):
        print(f"note: parallel.dp=auto is taken as 1, so {config.world_size} ranks: give parallel.dp=N",
              file=sys.stderr)
    return config


def _print(values: dict[str, Any], show: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    print(json.dumps(values, indent=1) if as_json else show(values))


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=1))


def main() -> None:
    begin()
    try:
        app()
    except ThreedError as error:
        if not isinstance(error, Reported):
            print(f"threed: {error}", file=sys.stderr)
        sys.exit(error.status)
    except SystemExit as ended:
        if ended.code == InputError.status:  # of the command line itself: an unknown option, say
            from threed.synonyms import ours

            for word in sys.argv[2:]:
                if word.startswith("--") and (known := ours(word.partition("=")[0])) is not None:
                    print(f"threed: {word}: {known}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()


