"""The callbacks that every run has: checkpoints, traces, evaluation, the log. `ORDER` is the order of
calls."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from threed.base.console import say
from threed.base.errors import InputError, RunError
from threed.base.quantity import many, show_bytes, show_count, show_seconds
from threed.data.prompts import added, encode
from threed.data.sampling import Sampling
from threed.models.families.registry import GIVEN
from threed.monitor.state import ENDED, STOPPED
from threed.monitor.stepline import waiting
from threed.monitor.timeline import picture
from threed.monitor.traces import TraceWriter
from threed.schema import Config
from threed.training.generation import TextWriter
from threed.training.hooks import Callback, Guarded, Step
from threed.training.trainer import Trainer, mean_loss

REPORT_S = 120.0  # how long the page may take at the end of a run

class Saving(Callback):
    """Saves checkpoints: those that are due, those that were asked for, and the last."""

    def on_start(self, trainer: Trainer) -> None:
        self.first = trainer.step_number
        self.saved = self.first if trainer.checkpoints.newest else -1  # step of the newest checkpoint

    def on_step_begin(self, trainer: Trainer) -> None:
        """Begin a checkpoint of the steps done. (After the run's last step `on_end` saves.)"""
        every, number = trainer.config.checkpoint.every, trainer.step_number
        due = bool(every) and number % every == 0 and number > self.first
        if (trainer.agreement.save or due) and self._worthwhile(trainer):
            trainer.checkpoints.save(self._counters(trainer))

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        """Go on with the checkpoint under way."""
        trainer.checkpoints.after_step(step.measured.column("saving"), step.trace)

    def on_end(self, trainer: Trainer) -> None:
        number = trainer.step_number
        if trainer.log and trainer.begun:
            trainer.log.doing("save")
        if number > self.saved and trainer.begun:
            trainer.checkpoints.save_last(self._counters(trainer))
        if number < trainer.config.train.steps and trainer.begun:
            if trainer.deadline is not None and trainer.deadline.reached:
                limit = trainer.config.run.stop_after
                why = f"stopped after step {number}, before run.stop_after={limit} is over"
            else:
                why = f"stopped on request after step {number}"
            trainer.say(f"{why}; the same command goes on from here (train.resume=auto)", always=True)
        trainer.checkpoints.close(lambda: trainer.hurried)

    def _worthwhile(self, trainer: Trainer) -> bool:
        """Whether a checkpoint would hold new weights: not while steps are skipped, when it would only push
        an older checkpoint out."""
        if in_a_row := trainer.skipped.in_a_row:
            trainer.say(f"no checkpoint of step {trainer.step_number}: the last "
                        f"{many(in_a_row, 'step')} had gradients that are not finite")
        return not in_a_row

    def _counters(self, trainer: Trainer) -> dict[str, object]:
        """The values that a checkpoint holds besides weights and optimizer state."""
        return {"samples": trainer.samples, "tokens": trainer.tokens, "skipped": trainer.skipped.total,
                "data": trainer.identity, "made_for": trainer.made_for,
                "wandb_id": trainer.log.run_id if trainer.log else None}


class Tracing(Callback):
    """Writes this rank's times of every `monitor.trace_every`th step, and of the last step, to its file."""

    def on_start(self, trainer: Trainer) -> None:
        folder, first = Path(trainer.config.run.dir), trainer.step_number + 1
        self.writer = TraceWriter(folder, trainer.engine.analysis, trainer.comm, first)

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        if step.trace.name != "train":  # where the host's updates overlap, a few steps run another program
            return
        every, last = trainer.config.monitor.trace_every, trainer.config.train.steps
        if every and (step.number == last or trainer.stopping or step.number % every == 0):
            if problem := self.writer.write(step.number, step.trace, step.measured.costs):
                say(f"warning: {problem}")

    def on_end(self, trainer: Trainer) -> None:
        self.writer.close()


class Timeline(Callback):
    """Sends a picture of every `monitor.timeline_every`th step, as measured, to the loggers."""

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        monitor, here, number = trainer.config.monitor, trainer.here, step.number
        if not monitor.draws or not monitor.timeline_every or number % monitor.timeline_every:
            return
        if step.trace.name != "train":
            return
        with trainer.watch.phase(f"timeline of step {number}"):
            first = here.is_first(axis for axis in here.on if axis != "pp")
            traces = trainer.comm.gather(step.trace if first else None)
        if trainer.log and traces is not None:
            row = [traces[rank] for rank in trainer.mesh.group("pp", 0)]
            title = f"{trainer.config.run.dir}, step {number}, measured on dp 0 tp 0"
            trainer.log.picture(number, picture(trainer.plan.programs["train"], row, title))


class Evaluation(Callback):
    """Computes val/loss every `train.eval_every` steps."""

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        every = trainer.config.train.eval_every
        if every and step.number % every == 0:
            with trainer.meter.excluded():
                step.metrics["val/loss"] = self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> float:
        """`mean_loss` of the validation split."""
        loss, _ = mean_loss(trainer.engine, trainer.validation_split)
        if not math.isfinite(loss) and trainer.config.train.on_nonfinite == "stop":
            trainer.checkpoints.finish_before_failing()
            raise RunError(f"val/loss after step {trainer.step_number} is {loss}: the last update has broken "
                           "the weights. Lower optimizer.lr and resume from a checkpoint before it")
        return loss


class Writing(Callback):
    """Continues `train.sample_prompts` every `train.sample_every` steps, for the console and the
    loggers."""

    def on_start(self, trainer: Trainer) -> None:
        train, model = trainer.config.train, trainer.config.model
        if not train.sample_every:
            return
        prompts = None
        if trainer.rank == 0:
            from threed.data import tokenizer as tokenizers

            if trainer.tokenizer is None:
                raise InputError(f"train.sample_every={train.sample_every} needs a tokenizer, and "
                                 f"data.source={trainer.config.data.source} brings none: name its "
                                 "tokenizer.json in data.tokenizer")
            self.tokenizer = tokenizer = tokenizers.load(trainer.tokenizer)
            prompts = tuple(encode(tokenizer, train.sample_prompts, trainer.config.data, model))
        with trainer.watch.phase("encode train.sample_prompts"):
            self.prompts, vocab, ends = trainer.comm.broadcast(prompts)
        self.writer = TextWriter(trainer.engine, vocab, ends)

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        train = trainer.config.train
        if not train.sample_every or step.number % train.sample_every:
            return
        with trainer.meter.excluded():
            texts = self.writer.write(self.prompts, Sampling(train.sample_tokens, train.sample_temperature,
                                                             seed=train.seed))
        if trainer.log:
            between = "\n" if trainer.config.data.loss_mask == "chat" else ""
            rows = [(given + between, added(self.tokenizer, prompt, text.ids))
                    for given, prompt, text in zip(train.sample_prompts, self.prompts, texts, strict=True)]
            trainer.log.texts(step.number, rows)


class Logging(Callback):
    """On rank 0: writes the metrics of each step to metrics.jsonl, the loggers and the console, and a summary
    at the end."""

    def on_start(self, trainer: Trainer) -> None:
        self.begin_s = time.monotonic()
        self.first_loss, self.first = math.nan, trainer.step_number + 1
        self.first_ended_s = math.nan  # when the first step has ended, which takes longer than the others
        self.recent: deque[dict[str, float | None]] = deque(maxlen=10)  # the metrics of the last steps

    def on_step_end(self, trainer: Trainer, step: Step) -> None:
        if trainer.log is None:
            return
        measured = trainer.meter.metrics(step.measured, time.monotonic() - self.begin_s)
        step.metrics |= measured | trainer.checkpoints.metrics()
        now_s, left = time.monotonic(), trainer.config.train.steps - step.number
        step.metrics |= trainer.log.ledger.step(step.metrics)
        if not self.recent:
            self.first_loss, self.first_ended_s = step.loss, now_s
            left_s = left * (measured["perf/step_s"] or 0.0)
        else:  # with what is done between steps
            left_s = left * (now_s - self.first_ended_s) / (step.number - self.first)
        self.recent.append(step.metrics)
        trainer.log.step(step.number, step.metrics, left_s)
        for line in (*trainer.meter.stragglers.warnings, *trainer.meter.spread.warnings):
            trainer.log.say(line)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.log is None:
            return
        log, ended = trainer.log, trainer.step_number >= trainer.config.train.steps
        if not trainer.begun:
            late = trainer.deadline is not None and trainer.deadline.reached
            log.say(_why_nothing(trainer.step_number, trainer.config, late), always=True)
            return
        log.doing("end")
        log.over(ENDED if ended else STOPPED, trainer.step_number)
        if self.recent:
            first = f"step {self.first} had {self.first_loss:.4f}"
            log.say("\n" + _summary(first, self.recent, trainer.config), always=True)
            log.say(f"goodput    {log.ledger.spent().text()}", always=True)
        saved = trainer.checkpoints.newest or "none was saved"
        places = log.places() or [("loggers", "none")]
        log.say("\n".join(f"{what:<10} {where}" for what, where in
                          [("checkpoint", saved), ("metrics", log.path), *places]), always=True)


class Reporting(Callback):
    """Sends the page of `threed report` to wandb at the end of a run, and keeps it in run.dir. Another
    process makes it, so that nothing that goes wrong with a page ends a run that has done its work."""

    def on_end(self, trainer: Trainer) -> None:
        log, folder = trainer.log, Path(trainer.config.run.dir)
        if log is None or not log.has("wandb") or not trainer.config.monitor.report or trainer.hurried:
            return
        if trainer.config.model.family.startswith(GIVEN):
            log.say("no report for wandb: threed.report draws it in the script that has the layers")
            return
        if find_spec("plotly") is None:
            log.say("no report for wandb: it is drawn with plotly (pip install plotly)")
            return
        file = folder / "report.html"
        argv = [sys.executable, "-m", "threed", "report", str(folder), "-o", str(file)]
        here = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        try:
            done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": here}, timeout=REPORT_S, text=True,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
            problem = done.stderr.strip()[-500:] if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as error:
            problem = str(error)
        if problem:
            log.say(f"warning: no report for wandb; threed report {folder} draws it: {problem}")
            return
        log.report(file)
        log.say(f"report     {file}")


def _why_nothing(done: int, config: Config, late: bool) -> str:
    """Why a start has made no step. Nothing in run.dir has changed. `late`: there is no time for a step."""
    steps, folder = config.train.steps, config.run.dir
    if done < steps:
        why = f"run.stop_after={config.run.stop_after} leaves no time" if late else "stopped on request"
        return f"{why} before step {done + 1}; nothing in {folder} has changed"
    return (f"nothing to do: {done} steps are done, and train.steps={steps}; nothing in {folder} has "
            f"changed. To go on give more, such as train.steps={done + max(1, steps)}")


def _summary(first: str, recent: Collection[Mapping[str, float | None]], config: Config) -> str:
    """The numbers at the end of a run: means over its last steps. `first`: the loss at its start."""
    loss, step_s, measured, predicted = (
        sum(row[name] or 0.0 for row in recent) / len(recent)
        for name in ("train/loss", "perf/step_s", "pipeline/bubble_measured", "pipeline/bubble_predicted"))
    peak = max(row["memory/peak_bytes"] or 0.0 for row in recent)
    return (f"mean of the last {many(len(recent), 'step')}:\n"
            f"loss       {loss:.4f} ({first})\n"
            f"speed      {show_count(config.tokens_per_step / step_s)} {config.model.counted}/s, "
            f"{show_seconds(step_s)} a step\n"
            f"{waiting(config):10} {measured:.1%} measured, {predicted:.1%} predicted\n"
            f"memory     {show_bytes(peak)} at the peak of the largest rank")


# Each method is called in this order. Saving comes first: after a step it uses what all ranks have just
# exchanged, before a rank does anything that takes long; at the end it saves before the other callbacks run.
# A script's callbacks come before Logging: they see val/loss, and may add to the metrics.
ORDER: tuple[type[Callback], ...] = (Saving, Tracing, Timeline, Evaluation, Writing, Guarded, Logging,
                                    Reporting)


def in_order(yours: Sequence[Callback]) -> list[Callback]:
    """All callbacks of a run, in `ORDER`. `yours`: a script's, each wrapped in a `Guarded`, in the given
    order."""
    callbacks: list[Callback] = []
    for kind in ORDER:
        callbacks += map(Guarded, yours) if kind is Guarded else [kind()]
    return callbacks
