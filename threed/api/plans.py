"""The verbs of the library. `import threed` has them, and the command line calls them. (`predict` is in
prediction/predict, `report` in html_report/report, `search` in layout_search/search.)"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threed.api.start import Loads, start
from threed.base.errors import InputError, RunError, check_type
from threed.base.mesh import Mesh
from threed.base.quantity import many, show_bytes, show_count
from threed.base.signals import ASKS, BEGAN, calm
from threed.comm.environment import RankPlace, place_of_environment
from threed.config import load as configs
from threed.config.load import checked
from threed.models.model import num_parameters
from threed.monitor.folders import to_train
from threed.planner import layouts, make_mesh, make_pipeline, saved_by_piece
from threed.planner.auto import chosen_for
from threed.planner.from_config import analysed, config_of
from threed.planner.passes import stages_of
from threed.planner.warnings import warnings_of
from threed.prediction.predict import predict
from threed.program import explain as explaining
from threed.program import show as shows
from threed.program import summary
from threed.program import units as listed
from threed.program.analysis import Analysis
from threed.program.check import check as check_plan
from threed.program.graphs import Graphs, graphs
from threed.program.instruction import Instruction
from threed.program.names import TRAIN
from threed.program.owned import owned
from threed.program.plan import Plan
from threed.schema import Config
from threed.training.hooks import Callback

if TYPE_CHECKING:
    from threed.monitor.run import Run

__all__ = ["check", "plan", "predict", "show", "train"]
MOST_UNITS = 24  # of which `show` prints a line each


def plan(config: Config) -> Plan:
    """Make the plan of a config: all ranks' programs of one optimizer step, with the table of units and
    sizes.

    The plan is checked: legal, complete, free of deadlock. Raises InputError where the config cannot be
    planned (a schedule that needs more micro-batches, a limit that is too small), PlanError where a schedule
    of its own is not legal.

    >>> plan = threed.plan(threed.load("configs/toy.yaml"))
    >>> plan.digest, plan.programs["train"][0][:3]
    """
    return analysed(config).plan


def check(what: Config | Plan, room: float | None = None) -> dict[str, Any]:
    """Check that a config can run on its number of ranks, or that a plan (one with a pass of your own, say)
    can.

    Returns the document of `threed check --json`: `world_size`, `instructions`, `digest`, `warnings` and
    `stages`, a row a pipeline position of what one of its ranks holds and sends (names that end in `_bytes`
    are bytes). `room`: bytes of a device that the plan may take, by which `parallel.group: auto` is chosen
    (`chosen` says it); None: what an A100 of 80 GB has for it. Raises InputError or PlanError, which says
    what cannot run and why.

    >>> threed.check(threed.load("configs/toy.yaml", ["zero.stage=3"]))["stages"][0]["optimizer_bytes"]
    """
    analysis = analysed(what, room)
    if isinstance(what, Plan):
        check_plan(analysis)
    return check_document(analysis, what)


def check_document(analysis: Analysis, what: Config | Plan) -> dict[str, Any]:
    """What `check` returns, of a plan that is legal."""
    plan, config = analysis.plan, config_of(analysis.plan)
    rows = [row.document() for row in summary.stages(analysis)]
    for row, held in zip(rows, _graphs(analysis), strict=False):
        row |= {"cuda_graphs": held.count, "graph_sets": len(held.peaks)}
    return {"ok": True, "world_size": config.world_size, "instructions": len(plan), "digest": analysis.digest,
            "chosen": chosen_for(what, config) if isinstance(what, Config) else [],
            "warnings": warnings_of(config, plan), "stages": rows,
            **({"turns": turns} if (turns := [each.document() for each in owned(plan.table)]) else {})}


def _graphs(analysis: Analysis) -> list[Graphs]:
    """By position; [] without CUDA graphs."""
    used = config_of(analysis.plan).run.cuda_graphs
    return [graphs(analysis, position) for position in range(analysis.table.num_positions) if used]


def show_check(analysis: Analysis, given: Config, fits: bool = True, columns: int | None = None) -> str:
    """The same of a config as text. `columns`: of a terminal into which tables are to fit."""
    plan, config = analysis.plan, config_of(analysis.plan)
    verdict, ranks = "ok: " if fits else "", many(config.world_size, "rank")
    lines = [f"{verdict}{ranks} ({make_mesh(config).text()}), {len(plan)} instructions, plan "
             f"{analysis.digest}",
             *chosen_for(given, config), *(f"warning: {line}" for line in warnings_of(config, plan)),
             summary.show(summary.stages(analysis), columns)]
    lines += map(str, owned(plan.table))
    ranks = f"{config.parallel.ep} ranks together hold" if config.parallel.ep > 1 else "each rank holds"
    if (active := num_parameters(config.model, True)) < (every := num_parameters(config.model)):
        lines.append(f"experts: {show_count(every)} parameters, of which {show_count(active)} compute a "
                     f"token; {ranks} all experts of a block")
    if config.pieces:
        saved = ", ".join(f"{piece} {show_bytes(size)}{'' if piece in config.pieces else ' (not chosen)'}"
                          for piece, size in saved_by_piece(config).items())
        lines.append(f"computed again, a block and micro-batch: {saved}")
    if config.run.cuda_graphs:
        counts = ", ".join(f"pp{position} {held.count} in {many(len(held.peaks), 'set')} of buffers"
                           for position, held in enumerate(_graphs(analysis)))
        lines.append(f"CUDA graphs: {counts}")
    return "\n".join(lines)


def show(what: Config | Plan, rank: int | None = None, program: str = "train",
         units: str | None = None, columns: int | None = None) -> str:
    """What will run, as text: the mesh, the compute units and the grid of a program.

    `rank`: that rank's instructions instead, one a line. `units`: the compute units (`u`) or the parameter
    units (`p`) alone, of all ranks. `columns`: of a terminal into which the grid is to fit. Raises InputError
    where the plan has no such rank, program or kind of unit.

    >>> print(threed.show(threed.load("configs/toy.yaml"), rank=4))
    """
    return show_text(analysed(what), rank, program, units, columns)


def show_text(analysis: Analysis, rank: int | None = None, program: str = "train",
              units: str | None = None, columns: int | None = None) -> str:
    """What `show` returns."""
    plan, config = analysis.plan, config_of(analysis.plan)
    position = _position(plan, rank, program)
    _no_rank_of_units(rank, units)
    if units is not None and _is_u(units):
        return listed.show_compute_units(plan)
    if units is not None:
        return listed.show_parameter_units(plan, _contents(plan))
    if position is not None:
        return shows.listing(plan, position, program)
    return (f"{make_mesh(config).draw()}\n\n{listed.show_compute_units(plan, MOST_UNITS)}\n\n"
            f"{config.parallel.schedule}, {config.num_microbatches} micro-batches{_groups(config)}"
            f"{_drawn(analysis, program, columns)}")


def _drawn(analysis: Analysis, program: str, columns: int | None) -> str:
    """The grid of a program, what its cells are, and what it does not draw."""
    legend, beside = shows.legend(analysis.plan, program), shows.beside(analysis.plan, program)
    drawn = [f" ({legend})", shows.grid(analysis, program, columns=columns)] if legend else [""]
    turns = map(str, owned(analysis.table)) if program == TRAIN else ()
    return "\n".join([*drawn, *([beside] if beside else []), *turns])


def _groups(config: Config) -> str:
    return f" in groups of {config.grouped}" if config.grouped is not None else ""


def show_document(plan: Plan, rank: int | None = None, program: str = "train",
                  units: str | None = None) -> dict[str, Any]:
    """The document of `threed show --json`."""
    position, mesh = _position(plan, rank, program), make_mesh(config_of(plan))
    _no_rank_of_units(rank, units)
    head = {"digest": plan.digest, "mesh": mesh.sizes}
    if units is not None:
        return {**head, "units": list_units(plan, units)}
    chosen = range(mesh.positions) if position is None else [position]
    return {**head, "programs": {f"pp{p}": [str(item) for item in plan.programs[program][p]] for p in chosen}}


def explain(what: Config | Plan | Analysis, index: int, rank: int = 0,
            program: str = "train") -> explaining.Explanation:
    """What instruction `index` of a rank's program is for: which pass put it there, what it reads and makes
    and on which tier, which ranks take part, what it sends and moves in bytes, and what waits for it. Raises
    InputError where there is no such instruction."""
    analysis = analysed(what)
    plan, config = analysis.plan, config_of(analysis.plan)
    position = _position(plan, rank, program)
    assert position is not None
    check_type("explain", index, int, "the number of an instruction")
    length = len(plan.programs[program][position])
    if not 0 <= index < length:
        raise InputError(f"explain={index}: program '{program}' of rank {rank} has instructions 0 to "
                         f"{length - 1}")
    stages = [(name, programs[position])
              for name, programs in stages_of(config, make_pipeline(config), plan.table, program)]
    item, mesh = plan.programs[program][position][index], make_mesh(config)
    explained = explaining.explain(analysis, program, position, index)
    others = {other for group in explained.groups for other in mesh.group(group, rank)} - {rank}
    if item.peer >= 0:
        others = {mesh.group("pp", rank)[item.peer]}
    return replace(explained, rank=rank, ranks=sorted(others), owns=_owns(item, plan, mesh, rank),
                   origin=explaining.origin(stages, plan.programs[program][position], index))


def _owns(item: Instruction, plan: Plan, mesh: Mesh, rank: int) -> list[str]:
    """The matrices that a rank turns in an instruction."""
    way = plan.table.parameters[item.unit].turning if item.part == "turn" else None
    owner = mesh.group(way.group, rank).index(rank) if way is not None else -1
    return [f"{each.parameter} {each.index} {list(each.shape)}"
            for each in (way.matrices if way is not None else ()) if each.owner == owner]


def list_units(plan: Plan, kind: str) -> list[dict[str, Any]]:
    """A row a compute unit (kind `u`) or a parameter unit (`p`)."""
    return listed.compute_units(plan) if _is_u(kind) else listed.parameter_units(plan, _contents(plan))


def _is_u(kind: str) -> bool:
    if kind not in ("u", "p"):
        raise InputError(f"units={kind}: give u (compute units) or p (parameter units)")
    return kind == "u"


def _contents(plan: Plan) -> listed.Contents:
    return {index: [(placed.parameter.name, placed.shape) for placed in laid.placed]
            for index, laid in layouts(config_of(plan)).items()}


def train(config: Config | str | Path, overrides: list[str] | None = None,
          callbacks: Sequence[Callback] = ()) -> Run:
    """Train to `train.steps`, or go on from the newest checkpoint (`train.resume`), as `threed train` does.

    Started with plain python it forks all ranks on this machine; under `python -m threed.torchrun`, torchrun
    or srun this process is one rank. Call it on the main thread, before torch has computed anything or used a
    GPU in this process. `config`: a Config, or a YAML file with `overrides`,
    which leaves `parallel.dp: auto` to the number of ranks, or the folder of a run, which goes on.
    `callbacks` run on every rank, in the given order. Returns the run, once it has ended or was asked to
    stop. Raises InputError where it cannot begin, RunError with the run's exit `status` where it has failed:
    the rank that failed first has then said why on stderr, and a process that is one rank ends with that
    status itself.

    >>> run = threed.train("configs/toy.yaml", ["train.steps=20"], callbacks=[MyCallback()])
    >>> run.metrics[-1]["train/loss"]
    """
    source = _source(config, overrides)
    place = place_of_environment()
    check_process(forks=not isinstance(place, RankPlace))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # threed says once what torch would in 40 lines
    os.environ[BEGAN] = repr(time.time())
    calm()
    with own_signals():
        status, trained = start(source, callbacks)
    if status and isinstance(place, RankPlace):
        from threed.launcher.rank import leave

        leave(status)
    if status:
        error = RunError(f"the run has failed, with exit status {status}; the rank that failed first has "
                         f"said why on stderr, and in {trained.run.dir}/log.txt")
        error.status = status
        raise error
    from threed.monitor.run import Run  # it reads what a run has measured; planning does not

    return Run(trained.run.dir)


def _source(config: Config | str | Path, overrides: list[str] | None) -> Loads:
    check_type("config", config, (Config, str, Path), "a Config, or the path of a YAML file or of a run")
    if not isinstance(config, Config):
        return configs.ConfigSource.read(*to_train(config, overrides))
    if overrides:
        raise InputError("overrides belong to a YAML file: give them to threed.load, or give the path of the "
                         "file to threed.train")
    return _Own(config)


class _Own:
    """A config that a script has loaded or made."""

    def __init__(self, config: Config):
        self._config, self.leaves_dp = config, config.parallel.dp == "auto"

    def load(self, world_size: int | None) -> Config:
        config = checked(self._config, world_size if self.leaves_dp else None)
        if world_size not in (None, config.world_size):
            raise InputError(f"the config is for {config.world_size} ranks, and there are {world_size}: give "
                             "threed.train the path of its YAML file, or load it with threed.load(path, "
                             f"world_size={world_size})")
        return config


def check_process(forks: bool) -> None:
    """InputError where this process cannot answer signals, or cannot be forked."""
    if threading.current_thread() is not threading.main_thread():
        raise InputError("threed.train answers signals, which Python allows on the main thread only: call it "
                         "there")
    torch = sys.modules.get("torch")
    if not forks or torch is None:
        return
    from threed import devices
    from threed.devices.forks import computes

    if devices.started():
        raise InputError("this process has used a GPU, so ranks cannot be forked from it: call threed.train "
                         "before, or start the script with torchrun")
    if torch.get_num_threads() > 1 and not computes():
        raise InputError("this process has computed with torch on several threads, which do not survive a "
                         "fork, so ranks forked from it would hang: call threed.train before, start the "
                         "script with torchrun, or set OMP_NUM_THREADS=1 in its environment")


@contextmanager
def own_signals() -> Iterator[None]:
    """Give the script its handlers back after the run."""
    before = {number: signal.getsignal(number) for number in ASKS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _position(plan: Plan, rank: int | None, program: str) -> int | None:
    """A rank's pipeline position; None without a rank. InputError where the plan lacks rank or program."""
    check_type("rank", rank, (int, None), "the number of a rank")
    check_type("program", program, str, "the name of a program, such as 'train'")
    if program not in plan.programs:
        raise InputError(f"program={program}: this plan has {', '.join(plan.programs)} (evaluate needs "
                         "train.eval_every > 0, generate train.sample_every > 0, verify run.verify_every > "
                         "0)")
    mesh = make_mesh(config_of(plan))
    if rank is None:
        return None
    if not 0 <= rank < mesh.size:
        raise InputError(f"rank={rank}: the mesh has ranks 0 to {mesh.size - 1}")
    return mesh.coordinate(rank).position


def _no_rank_of_units(rank: int | None, units: str | None) -> None:
    check_type("units", units, (str, None), "u (compute units) or p (parameter units)")
    if rank is not None and units is not None:
        raise InputError(f"rank={rank} and units={units}: units are listed for all ranks; leave one of them "
                         "out")
