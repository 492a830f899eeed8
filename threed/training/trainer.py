"""Trainer: the steps of a run on one rank. Callbacks do everything around the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from threed.base.errors import Stopped
from threed.base.mesh import Coordinate, Mesh
from threed.base.requests import Requests
from threed.checkpoint.differences import tokens_seen
from threed.checkpoint.load import Resumed
from threed.comm.environment import restarted
from threed.data.mix import AnySplit, Mixture, Splits, Trees
from threed.data.samples import Split, stacked
from threed.engine.engine import Engine
from threed.engine.verify import Verifier
from threed.engine.watch import Watch
from threed.monitor.log import Log
from threed.monitor.meter import Meter
from threed.optim.registry import turning
from threed.program.names import EVALUATE
from threed.program.plan import Plan
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.documents import Documents
from threed.training.agreement import Agreement, SamePieces
from threed.training.checkpoints import Checkpoints
from threed.training.deadline import Deadline
from threed.training.hooks import Callback, Step
from threed.training.nonfinite import Skipped


class Trainer:
    """One rank's run, from the step after its checkpoint to `train.steps`. Every method of a callback is
    given the trainer.

        config, plan        of the run; the same on all ranks
        rank, mesh, here    this rank, the mesh, and this rank's coordinate (pp, dp, tp)
        step_number         steps done
        stopping            whether the run ends after this step because it was asked to
        engine              runs programs; `engine.states` has this rank's parameters, `engine.comm` its
                            groups

    >>> class Stop(threed.Callback):
    ...     def on_step_end(self, trainer, step): step.loss < 2.0 and trainer.stop()
    """

    def __init__(self, engine: Engine, data: Splits, watch: Watch, log: Log | None,
                 requests: Requests, resumed: Resumed, tokenizer: Path | None = None):
        """`data`: the splits to train on and to validate with. `log`: on rank 0. `tokenizer`: the file of the
        data's tokenizer, if they have one."""
        self.config: Config = engine.config
        self.plan: Plan = engine.plan
        self.engine, self.comm, self.watch, self.log = engine, engine.comm, watch, log
        self.rank: int = self.comm.rank
        self.mesh: Mesh = self.comm.mesh
        self.here: Coordinate = self.comm.here
        self.train_split, self.validation_split = data
        self.tokenizer = tokenizer
        self._requests, self.agreement = requests, Agreement(requests)
        self._pieces = SamePieces(engine.fused, self.mesh)
        self.verifier = Verifier(engine)
        self.checkpoints = Checkpoints(self.config, engine, watch, log, resumed, self._saved)
        turned = engine.zero.matrices.turned if turning(self.config.optimizer.name) is not None else None
        self.meter = Meter(self.config, engine.analysis, self.comm, engine.arrivals,
                           (self.agreement, self.checkpoints, self._pieces), turned)
        self.skipped = Skipped(engine, self.checkpoints, self.say, resumed.manifest.skipped)
        self.samples: int = resumed.manifest.samples  # of the training split, so far
        self.tokens = tokens_seen(resumed.manifest)  # of them; the length of samples may change
        self.identity = resumed.data  # of the data; known to rank 0
        self.made_for = resumed.manifest.made_for  # as an import has written it
        self.begun = False  # whether this start changes anything: a step is due, and nothing has refused it
        self.deadline: Deadline | None = None  # on rank 0, where run.stop_after sets one
        if log and self.config.run.stop_after is not None:
            self.deadline = Deadline(self.config, len(set(watch.hosts)), lambda: self.checkpoints.longest_s)
            requests.late = self.deadline.late
        self._callbacks: Sequence[Callback] = ()

    @property
    def step_number(self) -> int:
        """Steps done, those before a resume included."""
        return self.engine.zero.step_number

    @property
    def stopping(self) -> bool:
        """Whether the run ends after this step because it was asked to."""
        return self.agreement.stop

    @property
    def over(self) -> bool:
        """Whether no step follows."""
        return self.stopping or self.step_number >= self.config.train.steps

    @property
    def hurried(self) -> bool:
        """Whether the run ends before `train.steps`, or this rank was asked to stop."""
        return self.step_number < self.config.train.steps or self._requests.stop

    def stop(self) -> None:
        """Ask the run to save and stop. One rank's request is enough; all ranks learn of it at the end of the
        next step."""
        self._requests.stop = True

    def save(self) -> None:
        """Ask for a checkpoint, which begins after the next step, when all ranks have learned of the
        request."""
        self._requests.save = True

    def say(self, text: str, always: bool = False) -> None:
        """A line on the run's console: rank 0's; the others say nothing. `always`: as of `Log.say`."""
        if self.log:
            self.log.say(text, always)

    def run(self, callbacks: Sequence[Callback], begin: Callable[[], None] = lambda: None) -> None:
        """Run the steps that are left, with these callbacks in this order. `begin` makes the run's folder
        this start's: it is called once all ranks are ready, if a step is due."""
        self._callbacks = callbacks
        for callback in callbacks:
            callback.on_start(self)
        if not self.over or self.checkpoints.newest is None:
            with self.watch.phase("begin"):  # loading, or an attempt before this one, took time
                late = self.deadline is not None and self.deadline.late()
                self.agreement.begin(self.comm, late)
            if self.deadline and late and not restarted():
                self.deadline.refuse(self.step_number + 1)
            self.begun = not self.stopping
        if self.begun:
            begin()
        if self.log and not self.config.monitor.quiet:
            self.watch.first = self.step_number + 1
        while self.begun and not self.over:
            for callback in callbacks:
                callback.on_step_begin(self)
            step = self._step()
            for callback in callbacks:
                callback.on_step_end(self, step)
        with self.watch.phase("settle"):
            self.engine.settle()
        self.watch.pace.end()
        for callback in callbacks:
            callback.on_end(self)

    def _saved(self, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_save(self, path)

    def _step(self) -> Step:
        """Run one step. All ranks then exchange what they measured, and whether they were asked to stop or to
        save."""
        config, zero = self.config, self.engine.zero
        lr, hopeless, number = zero.lr, zero.scaler.exhausted, self.step_number + 1
        self.watch.at(number)
        batch, every = self.batches(self.train_split, self.samples), config.run.verify_every
        verify = bool(every) and number % every == 0
        rehearsal = None
        if verify:
            with self.meter.excluded():
                rehearsal = self.verifier.rehearse(batch)
        self.meter.begin()
        clipped, trace = (self.verifier.step if verify else self.engine.train_step)(batch)
        self.skipped.look(number, clipped, hopeless, batch)
        self.samples += config.train.global_batch_size
        self.tokens += config.tokens_per_step
        with self.watch.phase(f"metrics of step {number}"):
            measured = self.meter.report(trace, self.meter.lap())
        self.agreement.learn(measured)
        self._pieces.learn(measured)
        step = Step(number, clipped.loss, clipped.grad_norm, clipped.finite, trace, measured)
        step.metrics |= {"train/loss": clipped.loss, "train/lr": lr, "train/grad_norm": clipped.grad_norm,
                         "train/skipped_steps": float(self.skipped.total),
                         f"run/{config.model.counted}": float(self.tokens),
                         "run/time": time.time()}
        if clipped.penalty is not None:
            step.metrics["train/penalty"] = clipped.penalty
        if zero.scaler.dynamic:
            step.metrics["train/loss_scale"] = clipped.loss_scale
        if every:
            step.metrics["integrity/verified_steps"] = float(self.verifier.verified)
        if rehearsal is not None:
            step.metrics["integrity/rehearsal_s"] = rehearsal.total_s
        return step

    def batches(self, split: AnySplit | Trees, start: int, train: bool = True) -> Callable[[int], Batch]:
        """As `batches_of`."""
        return batches_of(self.engine, split, start, train)


def mean_loss(engine: Engine, split: AnySplit | Trees, asked: Callable[[], bool] = lambda: False,
              done: Callable[[int], None] = lambda sequences: None) -> tuple[float, int]:
    """The mean loss of the tokens that count in the first `train.eval_batches` global batches of a split, and
    their number; (0.0, 0) where none counts. What a user's loss counts by itself is the weight of
    a batch, and its number stays that of samples. Raises Stopped once `asked` says so. `done`: gets the
    number of sequences of each batch."""
    config, size = engine.config, engine.config.train.global_batch_size
    total, counted, weights = 0.0, 0, 0.0
    for first in range(0, config.train.eval_batches * size, size):
        if asked():
            raise Stopped("stopped on request, while the loss was being measured")
        # Where all tokens count, batches have the same weight.
        count = split.count(first, first + size) if config.masked else 1
        clipped = engine.run(EVALUATE, batches_of(engine, split, first, train=False))[0]
        weight = count if clipped.counted is None else clipped.counted
        total, counted, weights = total + clipped.loss * weight, counted + count, weights + weight
        done(size)
    return total / (weights or 1), counted * (1 if config.masked else config.tokens_per_step)


def batches_of(engine: Engine, split: AnySplit | Trees, start: int,
               train: bool = True) -> Callable[[int], Batch]:
    """A function from micro-batch to data on the host, for the global batch that begins at sample `start`.
    Its samples depend on their global numbers alone."""
    config, table, here = engine.config, engine.plan.table, engine.comm.here
    reads_tokens = here.position in (table.position(0), table.position(table.last))
    micro, size = config.train.micro_batch_size, config.train.global_batch_size
    # Every rank counts for itself, from the order of samples and the index of their tokens: nobody waits.
    count = torch.tensor(max(1, split.count(start, start + size))) if config.masked else None

    def batch(microbatch: int) -> Batch:
        first = start + (microbatch * config.dp + here.replica) * micro
        which, samples = range(first, first + micro), torch.arange(first, first + micro)
        inputs = labels = torch.empty(0, dtype=torch.int64)
        if not isinstance(split, Split | Mixture):
            trees = split.batch(which) if reads_tokens else (None, None)
            return Batch(inputs, labels, samples, config.train.seed, config.tokens_per_step, train,
                         inputs=trees[0], targets=trees[1], first=first)
        if reads_tokens:  # the others see activations only
            inputs, labels = map(torch.from_numpy, stacked(map(split.sample, which)))
        documents = None
        if config.data.document_mask:
            documents = Documents.of(torch.from_numpy(np.stack(list(map(split.positions, which)))))
        return Batch(inputs, labels, samples, config.train.seed,
                     config.tokens_per_step if count is None else count, train, documents)

    return batch
