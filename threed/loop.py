"""The loop: the steps of a run on one rank, and what happens between them: metrics, evaluation, saving, requests to stop."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from threed.checkpoint.load import Resumed
from threed.checkpoints import Checkpoints
from threed.data.samples import Split
from threed.early import STOPS, handle
from threed.engine.diagnose import find_nonfinite
from threed.engine.engine import Engine
from threed.engine.verify import Verifier
from threed.engine.watch import Watch
from threed.errors import RunError
from threed.monitor.log import Log
from threed.monitor.measure import Meter, Step
from threed.monitor.timeline import picture
from threed.monitor.traces import TraceWriter
from threed.program.trace import Trace
from threed.quantity import show_bytes, show_count, show_seconds
from threed.schema import Config
from threed.tensor.context import Batch
from threed.zero.run import Clipped


class Requests:
    """What signals asked for: SIGTERM, SIGINT and SIGHUP save and stop, SIGUSR1 saves and goes on."""

    def __init__(self) -> None:
        self.stop = self.save = False
        handle(STOPS, self._on_stop)
        handle([signal.SIGUSR1], self._on_save)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*STOPS, signal.SIGUSR1])  # those that have waited since the launcher forked

    def _on_stop(self, *_: Any) -> None:
        self.stop = True

    def _on_save(self, *_: Any) -> None:
        self.save = True


class Loop:
    """The steps, and what happens between them."""

    def __init__(self, config: Config, engine: Engine, data: tuple[Split, Split], watch: Watch,
                 log: Log | None, requests: Requests, resumed: Resumed):
        comm = engine.comm
        self.config, self.engine, self.comm, self.watch, self.log = config, engine, comm, watch, log
        table = engine.plan.table
        self.reads_tokens = comm.here.position in (table.position(0), table.position(table.last))
        self.train_split, self.validation_split = data
        self.requests = requests
        self.meter, self.verifier = Meter(config, engine.plan, comm), Verifier(engine)
        self.traces = TraceWriter(Path(config.run.dir), engine.plan, comm, engine.zero.step_number + 1)
        self.begin = time.monotonic()
        self.checkpoints = Checkpoints(config, engine, watch, log, resumed)
        self.skipped: int = resumed.manifest.get("skipped", 0)
        self.barren = 0  # steps in a row that were not finite, up to now
        self.samples: int = resumed.manifest.get("samples", 0)  # of the training split, so far
        self.losses: list[float] = []
        self.last: dict[str, float | None] = {}

    def run(self) -> None:
        config, zero = self.config, self.engine.zero
        last, saved = config.train.steps, zero.step_number if self.checkpoints.newest else -1
        while zero.step_number < last:
            stop, save_now = self._step()
            number = zero.step_number
            due = bool(config.checkpoint.every) and number % config.checkpoint.every == 0
            if stop or number == last:
                break
            if (save_now or due) and self._worth_saving():
                self.checkpoints.save(self._counters())
        if zero.step_number > saved:
            self.checkpoints.save_last(self._counters())
        if zero.step_number < last:
            self._say(f"stopped on request after step {zero.step_number}; train.resume=auto goes on from here")
        self.checkpoints.close(lambda: zero.step_number < last or self.requests.stop)
        self._summary()

    def _worth_saving(self) -> bool:
        """Not while steps are left out: it would push a checkpoint out of those that are kept, and have the same weights."""
        if self.barren:
            self._say(f"no checkpoint of step {self.engine.zero.step_number}: {self.barren} steps in a row were not finite")
        return not self.barren

    def _step(self) -> tuple[bool, bool]:
        """One step, its metrics, its evaluation. Whether somebody asked to stop, to save."""
        config, zero = self.config, self.engine.zero
        lr, index, hopeless = zero.lr, zero.step_number, zero.scaler.exhausted
        self.watch.at(index + 1)
        batch, every = self._batches(self.train_split, self.samples), config.run.verify_every
        verify = bool(every) and (index + 1) % every == 0
        rehearsal = self.verifier.rehearse(batch) if verify else None
        started = self.meter.begin()
        clipped, trace = (self.verifier.step if verify else self.engine.train_step)(batch)
        number = zero.step_number
        if clipped.finite:
            self.barren = 0
        else:
            self._nonfinite(index, clipped, hopeless)
        self.samples += config.train.global_batch_size
        asked, self.requests.save = (self.requests.stop, self.requests.save), False
        with self.watch.phase(f"metrics of step {number}"):
            step = self.meter.exchange(trace, time.monotonic() - started, asked, self.checkpoints.status)
        self.checkpoints.after_step([row["saving"] for row in step.rows], trace)
        self._trace(number, trace, step)
        metrics: dict[str, float | None] = {"train/loss": clipped.loss, "train/lr": lr, "train/grad_norm": clipped.grad_norm,
                                            "train/skipped_steps": float(self.skipped)}
        if zero.scaler.dynamic:
            metrics["train/loss_scale"] = clipped.loss_scale
        if every:
            metrics["integrity/verified_steps"] = float(self.verifier.verified)
        if rehearsal is not None:
            metrics["integrity/rehearsal_s"] = rehearsal.total_s
        if config.train.eval_every and number % config.train.eval_every == 0:
            metrics["val/loss"] = self._evaluate()
        if self.log:
            metrics |= self.meter.metrics(step, time.monotonic() - self.begin) | self.checkpoints.metrics()
            self.losses.append(clipped.loss)
            self.last = metrics
            self.log.step(number, metrics)
            for line in self.meter.stragglers.warnings:
                self.log.say(line)
        return step.asked("stop"), step.asked("save")

    def _trace(self, number: int, trace: Trace, step: Step) -> None:
        """A traced step into this rank's file; a picture of the timeline to wandb."""
        monitor, mesh, here = self.config.monitor, self.comm.mesh, self.comm.here
        if trace.name != "train":  # with delayed updates there are a few others
            return
        last = number == self.config.train.steps - self.engine.plan.table.update.delayed or step.asked("stop")
        if monitor.trace_every and (last or number % monitor.trace_every == 0):
            if problem := self.traces.write(number, trace, step.costs):
                print(f"threed: warning: {problem}", file=sys.stderr, flush=True)
        if monitor.wandb != "disabled" and monitor.timeline_every and number % monitor.timeline_every == 0:
            with self.watch.phase(f"timeline of step {number}"):
                traces = self.comm.exchange(trace if here.is_first(axis for axis in here.on if axis != "pp") else None)
            if self.log:
                row = [traces[rank] for rank in mesh.group("pp", 0)]
                title = f"{self.config.run.dir}, step {number}, measured on dp 0 tp 0"
                self.log.picture(number, picture(self.engine.plan.programs["train"], row, title))

    def _batches(self, split: Split, start: int, train: bool = True) -> Callable[[int], Batch]:
        """Micro-batch -> data, of the global batch that begins at sample `start`. Which sample goes where depends on the
        sample's global number alone."""
        config, here, device = self.config, self.comm.here, self.comm.device
        micro = config.train.micro_batch_size

        def batch(microbatch: int) -> Batch:
            first = start + (microbatch * config.dp + here.replica) * micro
            samples = torch.arange(first, first + micro, device=device)
            tokens = torch.empty(0, dtype=torch.int64)
            if self.reads_tokens:  # the others see activations only
                tokens = torch.stack([torch.from_numpy(split.window(i)) for i in range(first, first + micro)]).to(device)
            return Batch(tokens[..., :-1], tokens[..., 1:], samples, config.train.seed, config.tokens_per_step, train)

        return batch

    def _evaluate(self) -> float:
        """Mean loss of the validation split's first `train.eval_batches` global batches."""
        size = self.config.train.global_batch_size
        losses = [self.engine.run("evaluate", self._batches(self.validation_split, index * size, train=False))[0].loss
                  for index in range(self.config.train.eval_batches)]
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss) and self.config.train.on_nonfinite == "stop":
            self.checkpoints.finish_before_failing()
            raise RunError(f"val/loss after step {self.engine.zero.step_number} is {loss}: the last update has broken the "
                           "weights. Lower optimizer.lr and resume from a checkpoint before it")
        return loss

    def _nonfinite(self, index: int, clipped: Clipped, hopeless: bool) -> None:
        """A step that changed no weight. `hopeless`: a smaller loss scale could not have helped."""
        self.skipped += 1
        if math.isfinite(clipped.loss) and not hopeless:  # how a dynamic loss scale finds its level
            self._say(f"step {index + 1}: gradients overflowed at loss scale {clipped.loss_scale:.10g}: the step is skipped, "
                      f"{self.skipped} so far; the scale is now {self.engine.zero.scaler.scale:.10g}")
            return
        what = f"step {index + 1}: not finite (loss {clipped.loss}, gradient norm {clipped.grad_norm})"
        if self.config.train.on_nonfinite == "skip":
            self.barren += 1
            self._say(f"{what}: the step is skipped, {self.skipped} so far")
            if self.barren >= self.config.train.max_skipped > 0:
                self.checkpoints.finish_before_failing()
                raise RunError(f"{what}: {self.barren} steps in a row were left out (train.max_skipped): the run "
                               "learns nothing any more. Lower optimizer.lr, and go on from a checkpoint before them")
            return
        self.checkpoints.finish_before_failing()
        # The learning rate's clock does not matter: the repeated step updates nothing either.
        where = find_nonfinite(self.engine, self._batches(self.train_split, self.samples))
        scale = "precision.min_loss_scale" if self.engine.zero.scaler.dynamic else "precision.loss_scale"
        high = scale if math.isfinite(clipped.loss) and clipped.loss_scale > 1 else "optimizer.lr"
        raise RunError(f"{what}; {where}. No weight has changed for it. Lower {high}, or set "
                       "train.on_nonfinite=skip to leave such steps out")

    def _counters(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loop."""
        return {"samples": self.samples, "skipped": self.skipped, "wandb_id": self.log.run_id if self.log else None}

    def _summary(self) -> None:
        if not self.log:
            return
        log, recent = self.log, self.losses[-10:]
        if recent:
            last, start = {name: value or 0.0 for name, value in self.last.items()}, self.losses[0]
            log.say(
                f"\nloss       {start:.4f} -> {sum(recent) / len(recent):.4f} (mean of the last {len(recent)} steps)\n"
                f"speed      {show_count(last['perf/tokens_per_s'])} tokens/s, {show_seconds(last['perf/step_s'])} a step\n"
                f"bubble     {last['pipeline/bubble_measured']:.1%} measured, "
                f"{last['pipeline/bubble_predicted']:.1%} predicted\n"
                f"memory     {show_bytes(last['memory/peak_bytes'])} at the peak of the largest rank")
        else:
            log.say(f"nothing to do: {self.engine.zero.step_number} steps are done, and train.steps={self.config.train.steps}")
        saved = self.checkpoints.newest or "none was saved"
        log.say(f"checkpoint {saved}\nmetrics    {log.path}\nwandb      {log.wandb_dir or 'off'}")

    def _say(self, text: str) -> None:
        if self.log:
            self.log.say(text)
