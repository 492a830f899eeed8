"""The command line: verbs, not knobs. Everything else is a key of the config."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from threed import __version__, validate
from threed import config as configs
from threed.early import begin
from threed.environment import Nodes
from threed.errors import ConfigError, InputError, ThreedError
from threed.mesh import AXES
from threed.optimizers.registry import OPTIMIZERS
from threed.planner import make_mesh, make_plan, saved_by_piece
from threed.program import show as shows
from threed.program.summary import stages
from threed.quantity import parse_bytes, show_bytes, show_count

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Pretrain GPT-style models over data, tensor and pipeline parallelism, from one plan.\n\n"
         "A run is one YAML file and dotted overrides: threed train configs/toy.yaml train.steps=20 parallel.pp=4. "
         "configs/reference.yaml lists every key with its default and meaning.",
)
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, or one that ships: configs/toy.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="overrides, such as parallel.tp=4")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="the run.dir of a run")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else")]


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
    """Train. It starts all ranks on this machine; with NNODES, NODE_RANK and MASTER_ADDR in the environment, those of one of
    several nodes (launch/torchrun.sh); under torchrun or srun it is one rank.

    SIGTERM and Ctrl-C save a checkpoint and end; SIGUSR1 saves one and goes on. A run that is started again goes on
    from its newest complete checkpoint (train.resume).
    """
    parent = os.getppid()
    path = configs.find_file(config)
    configs.load(path, overrides)  # bad input is told before torch is imported, which takes seconds
    from threed import environment, launcher, rank

    place = environment.place_of_environment()
    if isinstance(place, environment.Place):
        loaded = configs.load(path, overrides, place.world_size)
        raise typer.Exit(rank.run_place(loaded, place, parent))
    first = configs.load(path, overrides)
    if place is not None:
        raise typer.Exit(_train_nodes(place, path, overrides, first.run.device))
    open_dp = _dp_is_auto(path, overrides)
    loaded = configs.load(path, overrides, launcher.local_world_size(first.run.device)) if open_dp else first
    raise typer.Exit(launcher.run_local(loaded))


def _train_nodes(nodes: Nodes, path: Path, overrides: list[str] | None, device: str) -> int:
    """This node's part of a run whose environment says how many nodes there are."""
    from threed import launcher
    from threed.nodes import run_node

    size = nodes.size or launcher.local_world_size(device)
    if size is None:
        raise InputError("this node has no GPU, so GPUS_PER_NODE (or PET_NPROC_PER_NODE) must say how many ranks a node starts")
    if nodes.most == 1:
        return launcher.run_local(configs.load(path, overrides, size))
    return run_node(nodes, size, lambda world_size: configs.load(path, overrides, world_size))


@app.command(short_help="show what will run: mesh, units, schedule, programs")
def show(config: ConfigPath, overrides: Overrides = None,
         rank: Annotated[int | None, typer.Option(help="print this rank's program, an instruction a line")] = None,
         program: Annotated[str, typer.Option(help="train, evaluate, snapshot, verify; delayed updates: plain, enter, drain")]
         = "train",
         svg: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the timeline into FILE")] = None,
         as_json: Json = False) -> None:
    """Show what will run: the mesh, the units and the schedule's grid, or one rank's program."""
    loaded = configs.load(config, overrides)
    plan, mesh = make_plan(loaded), make_mesh(loaded)
    if program not in plan.programs:
        raise InputError(f"--program {program}: this plan has {', '.join(plan.programs)} (evaluate needs "
                         "train.eval_every > 0, verify needs run.verify_every > 0)")
    if rank is not None and not 0 <= rank < mesh.size:
        raise InputError(f"--rank {rank}: the mesh has ranks 0 to {mesh.size - 1}")
    if svg is not None:
        title = f"{loaded.parallel.schedule}, {mesh.positions} positions, {loaded.num_microbatches} micro-batches, {program}"
        try:
            svg.write_text(shows.svg(plan.programs[program], shows.timeline(plan, program), title))
        except OSError as error:
            raise InputError(f"--svg {svg}: {error.strerror}") from None
    if as_json:
        chosen = range(mesh.positions) if rank is None else [mesh.coordinate(rank).position]
        _print_json({"digest": plan.digest, "mesh": mesh.sizes,
                     "programs": {f"pp{p}": [str(item) for item in plan.programs[program][p]] for p in chosen}})
    elif rank is not None:
        print(shows.listing(plan, mesh.coordinate(rank).position, program))
    else:
        print(f"{mesh.draw()}\n\n{shows.units(plan)}\n\n{loaded.parallel.schedule}, {loaded.num_microbatches} micro-batches "
              f"(a forward of a stage drawn as 1, a backward as 2)\n{shows.grid(plan, program)}")


@app.command(short_help="check a config for any mesh, and what each rank holds and sends")
def check(config: ConfigPath, overrides: Overrides = None,
          advise: Annotated[bool, typer.Option("--advise", help="compare other settings with this one")] = False,
          memory: Annotated[str | None, typer.Option(metavar="BYTES", help="of a device: advise what fits")] = None,
          hardware: Annotated[str, typer.Option(help="for --advise, as in predict")] = "", as_json: Json = False) -> None:
    """Check that a config can run, on any number of ranks, without starting any: the plan is built and walked.

    Prints what a rank of each pipeline position holds and sends in a step; with --advise, other settings beside it. Exit status 2
    where it cannot run.
    """
    try:
        loaded = configs.load(config, overrides)
        plan = make_plan(loaded)
    except ThreedError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        _print_json({"ok": False, "problems": problems})
        raise typer.Exit(error.status) from None
    rows = stages(plan)
    lines = validate.warnings(loaded)
    limit = parse_bytes(memory) if memory is not None else None
    advised = None
    if advise or limit is not None:
        from threed.predict import advise as advising
        from threed.predict.analytic import Hardware

        advised = advising.advise(loaded, Hardware.parse(hardware), limit, lambda line: print(f"... {line}", file=sys.stderr))
    if as_json:
        _print_json({"ok": True, "world_size": loaded.world_size, "instructions": len(plan), "digest": plan.digest,
                     "warnings": lines, "stages": rows, **({"advice": advised} if advised else {})})
        return
    print(f"ok: {loaded.world_size} ranks ({make_mesh(loaded).text()}), "
          f"{len(plan)} instructions, plan {plan.digest}")
    for line in lines:
        print(f"warning: {line}")
    head = ("a rank of", "parameters", "param", "grad", "optimizer", "buffers", "activations",
            *(f"sends {axis}" for axis in AXES), "gathers", "reduces")
    print("".join(text.rjust(12) for text in head))
    for position, row in enumerate(rows):
        cells = [f"pp{position}", show_count(row["parameters"]),
                 *(show_bytes(row[key]) for key in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes",
                                                    "activation_peak_bytes")),
                 *(show_bytes(row["sent_bytes"][axis]) for axis in AXES),
                 *(str(row[key]) for key in ("gathers", "reduces"))]
        print("".join(cell.rjust(12) for cell in cells))
    for position, row in enumerate(rows):
        if row["moved_bytes"]:
            moved = ", ".join(f"{lane} {show_bytes(size)}" for lane, size in sorted(row["moved_bytes"].items()))
            print(f"pp{position} holds {show_bytes(row['host_bytes'])} on the host and {show_bytes(row['disk_bytes'])} on disk; "
                  f"moves a step: {moved}")
    copied = [row["snapshot_bytes"] for row in rows]
    if any(copied):
        print(f"a rank's copy on the host for checkpoints: {show_bytes(max(copied))} (checkpoint.background)")
    if loaded.pieces:
        saved = ", ".join(f"{piece} {show_bytes(size)}{'' if piece in loaded.pieces else ' (not chosen)'}"
                          for piece, size in saved_by_piece(loaded).items())
        print(f"computed again, a block and micro-batch: {saved}")
    if advised:
        print(f"\n{advising.show(advised, limit)}")


@app.command(short_help="predict step time, bubble, memory and bytes")
def predict(config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML file; leave it out for a bare "
                                                                                  "pipeline")] = None,
            overrides: Overrides = None,
            costs: Annotated[Path | None, typer.Option(metavar="RUN|FILE", help="measured costs: a run's folder, or its "
                                                                                "costs.json")] = None,
            hardware: Annotated[str, typer.Option(help="for analytic costs, and for what --costs has none of (offload): "
                                                    "tflops=989,efficiency=0.4,dp_gbps=400 ...")] = "",
            schedule: Annotated[str | None, typer.Option(help="of a bare pipeline: 1f1b, zb-v, auto, file:PATH ...")] = None,
            pp: Annotated[int, typer.Option(min=1, help="its positions")] = 4,
            micro_batches: Annotated[int, typer.Option(min=1, help="its micro-batches")] = 8,
            times: Annotated[str, typer.Option(help="seconds of a position's forward, backward's two halves, a message")]
            = "f=1,b=1,w=1,comm=0",
            virtual_stages: Annotated[int | None, typer.Option(min=1, help="stages a position")] = None,
            activation_limit: Annotated[str | None, typer.Option(metavar="2x|BYTES", help="most that a position may keep")]
            = None,
            as_json: Json = False) -> None:
    """Predict a step: time, bubble, memory and bytes of each pipeline position, by walking the plan with a clock.

    With a CONFIG, costs are analytic, or measured by a run (--costs). Without one, a bare pipeline is walked: the bubble rate
    is the zero-bubble paper's, (cost - m (f + b + w)) / cost, where cost is the longest span of a position.
    """
    import gc

    gc.disable()  # plans are millions of small objects that all live until the end
    if config is None:
        from threed.predict.bare import parse_times, predict_bare

        if schedule is None:
            raise InputError("give a CONFIG, or --schedule NAME for a bare pipeline; threed predict --help shows both")
        limit = None
        if activation_limit is not None:
            multiple, size = validate.parse_limit(activation_limit)
            if multiple is None:
                raise InputError(f"--activation-limit {activation_limit}: a bare pipeline has no sizes ({size} bytes of what?); "
                                 "give a multiple of 1F1B's peak such as 2x, or a CONFIG")
            limit = multiple * min(pp, micro_batches)
        found = predict_bare(schedule, pp, micro_batches, parse_times(times), virtual_stages, limit)
        if as_json:
            _print_json(found)
            return
        print(f"{found['schedule']} ({found['order']}, {found['virtual_stages']} stages a position): bubble rate "
              f"{found['bubble_rate']:.4f}, step time {found['step_time']:.3f}")
        for position, row in enumerate(found["stages"]):
            print(f"pp{position}".ljust(6) + f"busy {row['busy']:.3f}  span {row['span']:.3f}  keeps {row['peak_activations']:g}")
        return
    from threed.predict.analytic import Hardware
    from threed.predict.cost import load_costs
    from threed.predict.report import report
    from threed.predict.report import show as show_report

    loaded = configs.load(config, overrides)
    plan = make_plan(loaded)
    cost = Hardware.parse(hardware).cost(plan.table, load_costs(costs) if costs is not None else None)
    values = report(plan, cost, str(costs) if costs is not None else "analytic", loaded.run.verify_every)
    if as_json:
        _print_json(values)
    else:
        print(show_report(values))


@app.command(short_help="bytes of parameters, gradients and optimizer state at each ZeRO stage")
def memory(config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML file; leave it out with --parameters")]
           = None, overrides: Overrides = None,
           parameters: Annotated[float | None, typer.Option(metavar="N", help="of the whole model, such as 7.5e9")] = None,
           dp: Annotated[int, typer.Option(min=1, help="ranks that share a copy (or zero.shard_size)")] = 1,
           tp: Annotated[int, typer.Option(min=1)] = 1, pp: Annotated[int, typer.Option(min=1)] = 1,
           dtype: Annotated[str, typer.Option(help="of parameters and gradients: bf16, fp16 or fp32")] = "bf16",
           master: Annotated[str, typer.Option(help="of 16-bit weights: fp32 or none")] = "fp32",
           optimizer: Annotated[str, typer.Option(help="its name: adamw, lion or sgd")] = "adamw",
           as_json: Json = False) -> None:
    """Bytes that a rank holds of a model's states at ZeRO stages 0 to 3: by the ZeRO paper's formulas for --parameters, or
    exactly, from the plan of a CONFIG (the position that holds most)."""
    from threed.predict import memory as memories

    if (config is None) == (parameters is None):
        raise InputError("give a CONFIG or --parameters N, and not both; for example threed memory --parameters 7.5e9 --dp 64")
    if config is not None:
        found = memories.of_config(configs.load(config, overrides))
    else:
        if dtype not in ("fp32", "bf16", "fp16") or master not in ("fp32", "none"):
            raise InputError(f"--dtype {dtype} --master {master}: give fp32, bf16 or fp16, and fp32 or none")
        if optimizer not in OPTIMIZERS:
            raise InputError(f"--optimizer {optimizer}: must be one of {', '.join(OPTIMIZERS)}")
        if parameters is None or not 0 < parameters < 1e18:
            raise InputError(f"--parameters {parameters}: give a number above 0, such as 7.5e9")
        found = memories.model_states(parameters / (tp * pp), dp, dtype, master == "fp32", optimizer)
    if as_json:
        _print_json(found)
    else:
        print(memories.show(found))


@app.command(short_help="which features work together, and why others do not")
def matrix(as_json: Json = False,
           refused: Annotated[bool, typer.Option("--refused", help="list every refused cell")] = False) -> None:
    """The contract: every combination of schedule, ZeRO stage, offload, activation policy, precision, sequence parallelism, tied
    weights and shard groups works and names its test, or is refused with the reason. `make matrix` runs the tests."""
    from threed import contract

    rows = [{**cell._asdict(), "verdict": "refused" if (reason := contract.refusal(cell)) else "works", "reason": reason,
             "test": cell.test} for cell in contract.cells()]
    if as_json:
        _print_json({"axes": contract.AXES, "works": sum(row["verdict"] == "works" for row in rows),
                     "refused": sum(row["verdict"] == "refused" for row in rows), "cells": rows})
    else:
        print(contract.show(refused))


@app.command(short_help="prepare the data ahead of a run")
def data(config: ConfigPath, overrides: Overrides = None, as_json: Json = False) -> None:
    """Prepare a config's data ahead of a run: read the source, train or load the tokenizer, tokenize, cache."""
    loaded = configs.load(config, overrides)
    from threed.data.samples import splits
    from threed.data.tokens import prepare

    made = prepare(loaded.data, loaded.model, lambda line: print(line, file=sys.stderr, flush=True))
    halves = splits(made.prefix, loaded.model.seq_len, loaded.train.seed, loaded.data.validation_fraction)
    values = {"prefix": str(made.prefix), "tokenizer": str(made.tokenizer) if made.tokenizer else None,
              "documents": made.num_documents, "tokens": made.num_tokens, "vocab": made.vocab_size, "cached": made.cached,
              "train_samples": halves[0].num_windows, "validation_samples": halves[1].num_windows}
    if as_json:
        _print_json(values)
    else:
        print("\n".join(f"{name:20}{value}" for name, value in values.items()))


@app.command(short_help="merge a run's traces for Perfetto, or draw them")
def trace(run: RunPath,
          output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
                                                      help="trace events; RUN/trace.json where neither is given")] = None,
          step: Annotated[int | None, typer.Option(help="this step; all that were traced where it is not given")] = None,
          svg: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the timeline of the step, or of the last "
                                                                        "one that was traced, into FILE")] = None) -> None:
    """Merge what a run's ranks traced for ui.perfetto.dev and chrome://tracing, or draw it."""
    from threed.monitor import timeline
    from threed.monitor.traces import read_run

    traced = read_run(run)
    chosen = traced.pick(step)
    for note in traced.notes:
        print(f"note: {note}", file=sys.stderr)
    if svg is not None:
        _write("--svg", svg, timeline.picture_of(traced, chosen[-1]))
        print(f"wrote {svg}: step {chosen[-1]}")
    if output is not None or svg is None:
        file = output or run / "trace.json"
        events = timeline.chrome(traced, chosen)
        _write("-o", file, json.dumps(events, separators=(",", ":")))
        print(f"wrote {file}: {len(traced.ranks)} ranks, {len(chosen)} steps, {len(events['traceEvents'])} events")


@app.command(short_help="compare predicted and measured; where the time went")
def compare(run: RunPath, as_json: Json = False) -> None:
    """Compare what a run measured with what its plan predicts, and say where each rank's time went."""
    from threed.monitor import compare as comparing

    found = comparing.compare(run)
    if as_json:
        _print_json(found)
    else:
        print(comparing.show(found))


def _write(option: str, file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise InputError(f"{option} {file}: {error.strerror}") from None


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _dp_is_auto(path: Path, overrides: list[str] | None) -> bool:
    """Whether the world size decides dp: it does if another world size would give another dp."""
    one = configs.load(path, overrides)
    try:
        return configs.load(path, overrides, 2 * one.world_size).dp != one.dp
    except ConfigError:
        return False


def main() -> None:
    begin()
    try:
        app()
    except ThreedError as error:
        print(f"threed: {error}", file=sys.stderr)
        sys.exit(error.status)


if __name__ == "__main__":
    main()


