"""The command line. Its commands are verbs; all settings of a run are keys of the config."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from threed.api import plans as api
from threed.api.start import start
from threed.base.console import say, speaks_for_machine
from threed.base.errors import InputError, Reported, ThreedError
from threed.base.paths import arguments
from threed.base.quantity import parse_memory, parse_parameters
from threed.base.signals import begin
from threed.base.texttable import terminal
from threed.base.version import __version__
from threed.cli import data as cli_data
from threed.cli import hf as cli_foreign
from threed.cli import inference as cli_learned
from threed.cli import options as of
from threed.cli.options import UsageError, documented, error_document, exclude, instead, is_given
from threed.cli.runs import EXAMPLES, ConvertCommand, convert, files, init, runs, trace, write_file
from threed.config import load as configs
from threed.monitor.folders import to_train
from threed.planner.from_config import analysed
from threed.program import explain as explaining
from threed.program.timeline_svg import picture

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Pretrain GPT-style models over data, tensor and pipeline parallelism, from one plan.\n\n"
         "A run is one YAML file and dotted overrides: threed train configs/toy.yaml train.steps=20 "
         "parallel.pp=4. configs/reference.yaml lists every key with its default and meaning.",
)


def _version(value: bool) -> None:
    if value:
        print(f"threed {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                help="print the version and exit")] = False) -> None:
    pass


@app.command(short_help="train a model, or go on from its newest checkpoint")
def train(config: of.TrainPath, overrides: of.Overrides = None, quiet: of.Quiet = False) -> None:
    """Train. The command starts all ranks on this machine; under torchrun or srun it is one rank. On several
    machines, start each by launch/torchrun.sh CONFIG, which is python -m threed.torchrun CONFIG.

    SIGTERM and Ctrl-C save a checkpoint and end the run; SIGUSR1 and SIGUSR2 save one and the run goes on. A
    run that is started again goes on from its newest complete checkpoint (train.resume): threed train RUN.
    """
    parent = os.getppid()
    path, words = to_train(config, overrides)
    words = [*words, *(["monitor.quiet=true"] if quiet else [])]
    status, _ = start(configs.ConfigSource.read(path, words), parent=parent)
    from threed.launcher.rank import leave

    leave(status)


@app.command(short_help="show what will run: mesh, units, schedule, programs")
def show(context: typer.Context, config: of.ConfigPath, overrides: of.Overrides = None,
         rank: of.Rank = None, program: of.Program = "train", units: of.UnitKind = None,
         explain: of.Explain = None, svg: of.Svg = None, devices: of.Devices = None,
         as_json: of.Json = False) -> None:
    """Show what will run: the mesh, the units and the schedule's grid; or one rank's program; or the units of
    one kind; or what one instruction is for."""
    if explain is not None:
        exclude(context, "--explain", "units", "svg")
    if units is not None:
        exclude(context, "--units", "rank", "program")
    gc.disable()  # as in predict
    analysis = analysed(configs.for_devices(config, overrides, devices, "show"))
    if explain is not None:
        explained = api.explain(analysis, explain, rank or 0, program)
        _print_json(explained.document()) if as_json else print(explaining.show(explained))
        return
    # Raises for bad input before a file is written.
    if as_json:
        text = json.dumps(api.show_document(analysis.plan, rank, program, units), indent=1)
    else:
        text = api.show_text(analysis, rank, program, units, terminal())
    if svg is not None:
        write_file("--svg", svg, picture(analysis, program))
    print(text)


@app.command(short_help="check a config for any mesh, and show what each rank holds and sends")
def check(config: of.ConfigPath, overrides: of.Overrides = None, devices: of.Devices = None,
          advise: of.Advise = False, memory: of.Fits = None, hardware: of.OfMachine = "",
          as_json: of.Json = False) -> None:
    """Check that a config can run, on any number of ranks, without starting any: the plan is built and
    walked.

    Prints what a rank of each pipeline position holds and sends in a step; with --hardware or --memory,
    whether that fits into a device, with temporaries, CUDA and NCCL; with --advise or --memory, other
    settings beside it. Exit status 2 where it cannot run, or does not fit.
    """
    gc.disable()  # as in predict
    loaded = configs.for_devices(config, overrides, devices, "check")
    if not (advise or memory is not None or hardware):
        analysis, found, texts, small = analysed(loaded), {}, [], None
    else:
        from threed.prediction import fit

        asked = fit.FitRequest(hardware, parse_memory(memory) if memory is not None else None,
                               advise or memory is not None, terminal())
        analysis = analysed(loaded, fit.room_of(loaded, asked))
        gc.enable()  # advice makes one plan after the other
        found, texts, small = fit.fit(loaded, asked, _progress)
    if as_json:
        _print_json({**api.check_document(analysis, loaded), **found, "ok": small is None,
                     **({"error": small, "problems": [small]} if small else {})})
    else:
        print("\n\n".join([api.show_check(analysis, loaded, small is None, terminal()), *texts]))
    if small is not None:
        say(small)
        raise typer.Exit(InputError.status)


@app.command(short_help="predict step time, bubble, memory and bytes")
def predict(context: typer.Context, config: of.BareConfigPath = None, overrides: of.Overrides = None,
            devices: of.Devices = None, costs: of.Costs = None, hardware: of.Hardware = "",
            tokens: of.Tokens = None, imbalance: of.Imbalance = 1.0, schedule: of.Schedule = None,
            pp: of.Positions = 4, micro_batches: of.MicroBatches = 8, times: of.Times = "f=1,b=1,w=1,comm=0",
            virtual_stages: of.VirtualStages = None, activation_limit: of.ActivationLimit = None,
            seconds: of.Seconds = None, as_json: of.Json = False) -> None:
    """Predict a step: time, bubble, memory and bytes of each pipeline position, by walking the plan with a
    clock.

    With a CONFIG, costs are analytic, or measured by a run (--costs). Without a CONFIG, a bare pipeline is
    walked: its bubble rate is that of the zero-bubble paper, (cost - m (f + b + w)) / cost, where cost is the
    longest span of a position.
    """
    gc.disable()  # plans are millions of small objects that all live until the end
    if config is not None:
        from threed.prediction.predict import predicted
        from threed.prediction.report import show as show_report

        exclude(context, "CONFIG", "schedule", "pp", "micro_batches", "times", "virtual_stages",
                 "activation_limit", "seconds")
        loaded = configs.for_devices(config, overrides, devices, "predict")
        found = predicted(loaded, hardware, costs, tokens, imbalance)
        _print_json(found.document()) if as_json else print(show_report(found, terminal()))
        return
    from threed.prediction import schedule_only as bare

    if schedule is None:
        raise InputError("give a CONFIG, or --schedule NAME for a bare pipeline; threed predict --help shows "
                         "both")
    exclude(context, "--schedule", "costs", "hardware", "tokens", "imbalance", "devices")
    limit = None
    if activation_limit is not None:
        limit = bare.parse_limit_of_bare(activation_limit, pp, micro_batches)
    found = bare.predict_bare(schedule, pp, micro_batches, bare.parse_times(times), virtual_stages, limit,
                              seconds)
    _print_json(found.document()) if as_json else print(bare.show(found))


@app.command(short_help="search the best layout of a config on so many devices")
def search(context: typer.Context, config: of.ConfigPath, devices: of.Many,
           overrides: of.Overrides = None, memory: of.Memory = None, hardware: of.Hardware = "",
           rounding: of.Rounding = False, top: of.Top = 10, write: of.Write = None,
           as_json: of.Json = False) -> None:
    """Search mesh, schedule, micro-batch, ZeRO, recomputation, sequence parallelism, offload and tiles for
    the shortest step. What overrides say of them stays fixed; the file's own layout is left out."""
    from threed.layout_search import search as searching

    ranking = searching.ranked(config, devices, overrides, hardware, memory, _progress, rounding)
    if write is not None:
        searching.write_best(ranking, write)
    if is_given(context, "top"):
        ranking = replace(ranking, layouts=ranking.layouts[:top])
    _print_json(ranking.document()) if as_json else print(searching.show(ranking, top, terminal()))


@app.command(short_help="measure this machine, and write a file for predict --hardware")
def calibrate(output: of.NewHardware, ranks: of.Ranks = None, quick: of.Quick = False,
              folder: of.DiskFolder = Path("."), device: of.Device = "auto",
              as_json: of.Json = False) -> None:
    """Measure this machine, in less than two minutes: products, element-wise kernels, attention and layers;
    collectives and messages of several ranks, and what they take from computation; copies, the disk, and the
    host's optimizer step.

    Writes a file for `threed predict CONFIG --hardware FILE`, and prints how far its prices are from what was
    measured. Let nothing else run meanwhile.
    """
    from threed.calibration import calibrate as measuring
    from threed.calibration import fitted, points

    machine, found = measuring.calibrate(output, ranks, quick, folder, device, _progress)
    if as_json:
        _print_json({"hardware": asdict(machine), "errors": points.errors(found, machine)})
    else:
        print("how far predicted times are from measured ones, by kind (far above 20%: other work disturbed\n"
              "the machine, or it has what prices miss: then compare layouts, and do not count on times)\n"
              f"{fitted.table(found, machine)}\nwrote {output}: {machine.title}")


@app.command(short_help="bytes of parameters, gradients and optimizer state at each ZeRO stage")
def memory(context: typer.Context, config: of.SizedConfigPath = None, overrides: of.Overrides = None,
           devices: of.Devices = None, parameters: of.Parameters = None, dp: of.Shards = 1,
           tp: of.Axis = 1, pp: of.Axis = 1, dtype: of.Dtype = "bf16", master: of.Master = "fp32",
           optimizer: of.Optimizer = "adamw", as_json: of.Json = False) -> None:
    """Bytes of parameters, gradients and optimizer state that a rank holds at ZeRO stages 0 to 3: by the ZeRO
    paper's formulas for --parameters, or exactly, from the plan of a CONFIG, for the position that holds
    most."""
    from threed.prediction import memory as memories

    if (config is None) == (parameters is None):
        raise InputError("give a CONFIG or --parameters N, and not both; for example threed memory "
                         "--parameters 7.5e9 --dp 64")
    if config is not None:
        exclude(context, "CONFIG", "dp", "tp", "pp", "dtype", "master", "optimizer")
        values = memories.of_config(configs.for_devices(config, overrides, devices, "memory"))
    else:
        exclude(context, "--parameters", "devices", why="its ranks are --dp, --tp and --pp")
        if dtype == "fp32":
            exclude(context, "--dtype fp32", "master", why="master weights are a copy of 16-bit ones")
        count = parse_parameters(parameters or "")
        values = memories.of_size(count / (tp * pp), dp, dtype, master, optimizer)
    _print(values, memories.show, as_json)


@app.command(short_help="show which features work together, and why others do not")
def matrix(as_json: of.Json = False, refused: of.Refused = False) -> None:
    """Show the contract: every combination of schedule, ZeRO stage, offload, activation policy, precision,
    sequence parallelism, tied weights, shard groups and experts either works and has a test, or is refused
    with a reason. `make matrix` runs the tests; of those with experts, one for each schedule, ZeRO stage and
    precision."""
    from threed.config import contract

    if as_json:
        _print_json(contract.document(refused))
    else:
        print(contract.show(refused))


app.command(short_help="prepare the data ahead of a run, list or clean what is prepared")(cli_data.data)


app.command(short_help="merge a run's traces for Perfetto, or draw them")(trace)


@app.command(short_help="draw a plan or a run as one HTML page")
def report(what: of.What, overrides: of.Overrides = None, output: of.Page = None,
           devices: of.Devices = None, costs: of.PageCosts = None, hardware: of.Hardware = "") -> None:
    """Draw what will run, as one HTML file that needs no network: mesh, stages and units, the timeline of
    every lane, where the time goes, memory over time, and bytes on each axis.

    With a RUN, what was measured is drawn beside the prediction: a traced step, the causes of waiting, and
    the loss, throughput and bubble of all steps.
    """
    from threed.html_report.report import report as draw
    from threed.monitor.run import Run

    gc.disable()  # as in predict
    if what.is_dir() and overrides:
        raise InputError(f"{' '.join(overrides)}: {what} is the folder of a run, which has its config "
                         "already; leave the overrides out, or give a CONFIG")
    if what.is_dir() and devices is not None:
        raise InputError(f"--devices {devices}: {what} is the folder of a run, which has its ranks already; "
                         "leave --devices out, or give a CONFIG")
    file = output or (what / "report.html" if what.is_dir() else Path("report.html"))
    drawn = Run(what) if what.is_dir() else configs.for_devices(what, overrides, devices, "report")
    draw(drawn, file, hardware, costs)
    print(f"wrote {file}: {file.stat().st_size / 1e6:.1f} MB; open it in a browser")


@app.command(short_help="compare predicted and measured times; show where the time went")
def compare(run: of.RunPath, as_json: of.Json = False) -> None:
    """Compare the times that a run measured with those that its plan predicts, and show where each rank's
    time went."""
    from threed.monitor import compare as comparing
    from threed.monitor.run import Run

    found = comparing.compare(Run(run).path)
    _print_json(asdict(found)) if as_json else print(comparing.show(found, terminal()))


cli_foreign.register(app)
app.command(cls=ConvertCommand,
            short_help="convert a config of DeepSpeed or arguments of Megatron-LM")(convert)
app.command(short_help="write a first config, with comments")(init)
app.command(short_help="list runs: state, step, loss, speed, age")(runs)
app.command(short_help="list the files that come with threed, or say where one is")(files)
cli_learned.register(app)
for _command in app.registered_commands:
    _command.callback = documented(_command.callback)  # pyright: ignore
    _command.epilog = f"Example: {EXAMPLES[str(_command.name or _command.callback.__name__)]}"  # pyright: ignore


def _progress(line: str) -> None:
    print(f"... {line}", file=sys.stderr, flush=True)


def _print(values: dict[str, Any], show: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    print(json.dumps(values, indent=1) if as_json else show(values))


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=1))


def main() -> None:
    begin()
    try:
        sys.argv[1:] = arguments(sys.argv[1:])
        status = app(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except ThreedError as error:
        # All ranks that a launcher has started read the same config.
        if not isinstance(error, Reported) and (sys.argv[1:2] != ["train"] or speaks_for_machine()):
            say(str(error))
        sys.exit(error.status)
    except UsageError as error:  # an unknown option, say
        hints = instead(error, sys.argv[1:])
        error.show()
        for hint in hints:
            print(f"threed: {hint}", file=sys.stderr)
        if "--json" in sys.argv:
            _print_json(error_document(". ".join([error.format_message(), *hints])))
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit("Aborted!")


