"""Forward: ranks that train nothing. They load the weights of a checkpoint, whatever mesh has saved it, and
run one program that only runs forward. They hold no gradients and no optimizer state.

A **task** is what a rank does instead of training. Rank 0 leaves the answer in the store where the ranks have
met, and the process that has started them reads it there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from threed.base.console import put_error, say
from threed.base.errors import InputError, Reported, RunError
from threed.base.progress import Progress
from threed.base.requests import Requests
from threed.base.restart import RankSteps
from threed.checkpoint.load import Resumed, resume
from threed.config.load import checked
from threed.data.mix import AnySplit, Mixture, open_splits
from threed.data.prompts import added, encode
from threed.data.samples import Split, Tokens
from threed.data.sampling import Sampling
from threed.data.tokens import Prepared
from threed.devices import pick
from threed.engine.device import set_up
from threed.engine.engine import Engine
from threed.engine.watch import Watch
from threed.launcher.local import ANSWER, LocalLauncher
from threed.planner import forward_plan
from threed.planner.from_config import config_of
from threed.program.analysis import Analysis
from threed.program.names import EVALUATE, GENERATE
from threed.schema import Config
from threed.training.generation import TextWriter
from threed.training.setup import Job, Task, connect, running
from threed.training.trainer import mean_loss

MOST_BATCH = 32  # micro-batches of an evaluated batch


def texts(config: Config, how: Sampling) -> dict[str, Any]:
    """Continue `train.sample_prompts` with the tokenizer `data.tokenizer`, from the checkpoint that
    `train.resume` names: `checkpoint`, `step` and `samples`."""
    return _ask(config, partial(_write, how=how))


def loss(config: Config, whole: bool, limit: int | None) -> dict[str, Any]:
    """The loss on the data of a config: on all (`whole`), or on what is held out; on no more than `limit`
    sequences: `checkpoint`, `step`, `loss`, `tokens` that count, `sequences`, `left_out`."""
    prepared = LocalLauncher(config).prepare(_to_stderr)
    split = _split(config, prepared, whole)
    count, left_out = _cut(config, min(split.num_windows, limit or split.num_windows))
    answer = _ask(checked(config), partial(_measure, whole=whole), prepared)
    return {**answer, "sequences": count, "left_out": left_out}


# ---------------------------------------------------------------- data


def _split(config: Config, prepared: Prepared, whole: bool) -> AnySplit:
    """What is measured: all data, or what was held out."""
    model = config.model
    if not whole:
        split = open_splits(config, prepared)[1]
        assert isinstance(split, Split | Mixture), "inference refuses user layers"
        return split
    tokens = Tokens(prepared.prefix)
    split = Split(tokens, 0, tokens.num_tokens, model.seq_len, None, model.vocab, config.data)
    if not split.num_windows:
        raise InputError(f"{config.data.source} has {tokens.num_tokens} tokens, fewer than one sequence and "
                         f"its last label: model.seq_len + 1 = {model.seq_len + 1}; give more text")
    return split


def _cut(config: Config, windows: int) -> tuple[int, int]:
    """Set the batches of a config for so many sequences. How many they hold, and how many are left out: as
    few as there can be."""
    train, least = config.train, config.train.micro_batch_size * config.dp
    turns = windows // least
    if not turns:
        raise InputError(f"{windows} sequences are fewer than train.micro_batch_size x parallel.dp = "
                         f"{least}: lower one of them")
    each = max(k for k in range(1, min(MOST_BATCH, turns) + 1) if turns % k == 0)
    train.global_batch_size, train.eval_batches = each * least, turns // each
    return turns * least, windows - turns * least


# ---------------------------------------------------------------- ranks


def _ask(config: Config, task: Task, prepared: Prepared | None = None) -> dict[str, Any]:
    """Start the ranks of a config on this machine; the answer of rank 0. Raises Reported."""
    launcher = LocalLauncher(config, task=task)
    failure = launcher.start(prepared, RankSteps(config.world_size))
    if launcher.hurried:
        say("stopped at once, as asked")
        error = Reported("stopped at once, as asked")
        error.status = 128 + launcher.hurried
        raise error
    if failure is not None or launcher.answer is None:
        error = Reported(f"the ranks have failed and said why on stderr: {failure.text if failure else ''}")
        error.status = failure.status if failure else 1
        raise error
    return json.loads(launcher.answer)


@contextmanager
def _ready(job: Job, name: str, local_rank: int, watch: Watch,
           store: Any) -> Iterator[tuple[Engine, Resumed]]:
    """An engine for one program that runs forward, with the weights of a checkpoint."""
    config = job.config
    set_up(config)
    comm, analysis = connect(config, watch, pick(config.run.device, local_rank), store,
                             lambda config, pipeline: Analysis(forward_plan(config, name, pipeline)))
    config = config_of(analysis.plan)
    with running(analysis, comm, watch) as engine:
        with watch.phase("load a checkpoint", waits=False):
            resumed = resume(config, engine.zero, _to_stderr if watch.rank == 0 else _silently)
        if resumed.path is None:  # it has gone in the meantime
            raise InputError(f"{config.run.dir} has no complete checkpoint any more: start again")
        yield engine, resumed


def _write(job: Job, local_rank: int, requests: Requests, watch: Watch, store: Any, _: ExitStack, *,
           how: Sampling) -> None:
    """What each rank runs for `texts`: continue the prompts. Rank 0 puts the samples into the store."""
    config, prompts = job.config, job.config.train.sample_prompts
    with _ready(job, GENERATE, local_rank, watch, store) as (engine, resumed):
        given, opened = None, None
        if watch.rank == 0:
            from threed.data import tokenizer as tokenizers

            opened = tokenizers.load(Path(config.data.tokenizer))
            given = tuple(encode(opened, prompts, config.data, config.model))
        with watch.phase("encode the prompts"):
            encoded, vocab, ends = engine.comm.broadcast(given)
        texts = TextWriter(engine, vocab, ends).write(encoded, how, lambda: requests.stop)
        if opened is not None:
            samples = [{"prompt": prompt, "text": added(opened, ids, text.ids), "tokens": text.ids,
                        "ended": text.ended}
                       for prompt, ids, text in zip(prompts, encoded, texts, strict=True)]
            _answer(store, resumed, {"chat": config.data.loss_mask == "chat", "samples": samples})


def _measure(job: Job, local_rank: int, requests: Requests, watch: Watch, store: Any, _: ExitStack, *,
             whole: bool) -> None:
    """The task of `loss`."""
    assert job.prepared is not None
    split = _split(job.config, job.prepared, whole)
    with _ready(job, EVALUATE, local_rank, watch, store) as (engine, resumed):
        total = job.config.train.eval_batches * job.config.train.global_batch_size
        progress = Progress("measured", total, lambda count: f"{count:.0f} sequences",
                            _to_stderr if watch.rank == 0 else _silently)
        mean, counted = mean_loss(engine, split, lambda: requests.stop, progress.add)
        if not counted:
            raise InputError("no token of these sequences counts in the loss (data.loss_mask): give more")
        if not math.isfinite(mean):
            raise RunError(f"the loss is {mean}: the weights of {resumed.path} are broken; take another "
                           "checkpoint")
        if watch.rank == 0:
            _answer(store, resumed, {"loss": mean, "tokens": counted})


def _answer(store: Any, resumed: Resumed, values: dict[str, Any]) -> None:
    store.set(ANSWER, json.dumps({"checkpoint": str(resumed.path), "step": resumed.manifest.step,
                                  **values}))


def _to_stderr(line: str) -> None:
    put_error(line)


def _silently(_: str) -> None:
    pass
