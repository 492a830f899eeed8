"""Rows 13 to 22 of docs/silent-faults.md: what a run goes on from, and what it has written."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

import threed.launcher  # noqa: F401  (imported before the runs fork)
from tests import harness
from tests.harness import SETTINGS, Ranks, batches, drive, same_bits, tiny
from tests.loopback.test_checkpoint import (
    COUNTERS,
    DP,
    SMALL,
    at,
    manifest,
    named,
    on_ranks,
    saved_after,
    step,
    take,
)
from tests.loopback.test_hugging_face_files import LLAMA, folder
from tests.running import losses
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.read import Reader
from threed.checkpoint.save import Saver
from threed.comm import Comm
from threed.config import load
from threed.doors.hf.importing import import_model
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.errors import RunError
from threed.models.model import parameters
from threed.optimizers.rate import learning_rate
from threed.optimizers.table import OPTIMIZERS
from threed.planner import make_mesh, make_plan
from threed.schema import Config

TINY_RUN = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=16", "model.heads=2",
            "model.seq_len=16", "model.vocab=300", "train.global_batch_size=2", "train.micro_batch_size=1",
            "train.eval_every=0", "monitor.wandb=disabled", "monitor.trace_every=0", "parallel.dp=2",
            "parallel.tp=1", "parallel.pp=1", "zero.stage=2"]


def gathered(config: Config, results: list[Any]) -> dict[str, torch.Tensor]:
    return harness.collect(config, results).weights


def goes_on(config: Config, steps: int) -> tuple[dict[str, torch.Tensor], Ranks]:
    """Whole weights right after `train.resume` was read, and those after some more steps, with all numbers
    of these steps."""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> tuple[Any, Any]:
        engine = Engine(config, plan, comm)
        resume(config, engine.zero)
        first = engine.zero.step_number
        data = lambda config, comm, index: batches(config, comm, first + index)  # noqa: E731
        close, engine.close = engine.close, lambda: None
        return drive(config, engine, comm, 0), (setattr(engine, "close", close),
                                                drive(config, engine, comm, steps, data=data))[1]

    results = run_loopback(plan, make_mesh(config), work)
    return (gathered(config, [each for each, _ in results]),
            harness.collect(config, [each for _, each in results]))


# ---------------------------------------------------------------- 13: the weights that were loaded

LOADED: dict[str, list] = {
    "optimizer": ["adamw", "lion", "sgd"],
    "stage": [0, 1, 2, 3],
    "offload": ["none", "cpu", "nvme", "cpu+parameters", "nvme+parameters"],
    "ratio": [1.0, 0.5],
    "precision": ["fp32", "bf16"],
    "source": ["import", "run"],
}


def works(row: list) -> bool:
    if len(row) > 3 and row[3] != 1.0 and row[2] == "none":
        return False
    return not (len(row) > 2 and "parameters" in row[2] and row[1] < 3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints of a Llama: an import, with weights alone; and one of a run of two steps, whose optimizer
    state is of the optimizer."""
    base = tmp_path_factory.mktemp("sources")
    import_model(folder(base / "theirs", LLAMA), base / "import", ["model.seq_len=8"])
    made = {"import": base / "import" / "checkpoints" / "step-00000000"}
    for name in OPTIMIZERS:
        config = load(base / "import" / "config.yaml", [
            f"run.dir={base / name}", "train.global_batch_size=4", "train.steps=8", "optimizer.lr=0.01",
            f"optimizer.name={name}", f"train.resume={made['import']}", "parallel.dp=2"])

        def work(engine: Engine, comm: Comm) -> Path:
            resume(engine.config, engine.zero)
            step(engine, comm, 2)
            return saved(engine)

        made[name] = on_ranks(config, work)[0]
    return base / "import" / "config.yaml", made


def saved(engine: Engine) -> Path:
    saver = Saver(engine, Lineage("test-0"), lambda: None)
    saver.begin(COUNTERS)
    outcome = saver.drain()
    assert outcome is not None and outcome.problem is None, outcome
    return outcome.path


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("row", list(AllPairs(list(LOADED.values()), filter_func=works)),
                         ids=lambda row: "-".join(map(str, row)))
def test_the_weights_that_were_loaded(row, sources, tmp_path):
    """Bit by bit those of the files, right after the load and after a step whose learning rate is 0: an
    optimizer that keeps weights of its own, on the host or on a disk, would write back those with which it
    began. And a step whose rate is not 0 changes them all a little, and none by as much as another beginning
    would."""
    name, stage, offload, ratio, precision, source = row
    path, made = sources
    checkpoint = made["import" if source == "import" else name]
    config = load(path, [
        "train.global_batch_size=4", "train.steps=8", "optimizer.schedule=constant", f"optimizer.name={name}",
        "optimizer.warmup_steps=0", "parallel.dp=2", f"zero.stage={stage}", *SETTINGS["offload"][offload],
        *([f"offload.ratio={ratio}"] if offload != "none" else []), f"precision.dtype={precision}",
        f"train.resume={checkpoint}", f"run.dir={tmp_path}", "optimizer.lr=0", "optimizer.min_lr=0"])
    right = of_files(checkpoint, config)
    loaded, after = goes_on(config, 1)
    assert loaded.keys() == right.keys() == after.weights.keys()
    for key, value in right.items():
        assert torch.equal(loaded[key], value), f"{key}, after the load"
        assert torch.equal(after.weights[key], value), f"{key}, after a step"
    config.optimizer.lr = config.optimizer.min_lr = 1e-4
    moved = goes_on(config, 1)[1].weights
    changes = {key: (moved[key] - value).abs().max().item() for key, value in right.items()}
    assert all(0 < change < 1e-2 for change in changes.values()), changes


def of_files(path: Path, config: Config) -> dict[str, torch.Tensor]:
    """The whole weights in a checkpoint's files, read by the reader, and by no engine."""
    from threed.checkpoint.boxes import Box

    reader, values = Reader(path, manifest(path)), {}
    for each in parameters(config.model):
        values[each.name] = torch.empty(each.stored)
        shape = tuple(each.stored)
        reader.read("param", Box(each.name, (0,) * len(shape), shape, shape, 0, values[each.name].numel()),
                    values[each.name])
    reader.close()
    return values
