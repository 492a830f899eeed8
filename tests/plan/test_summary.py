"""The summary at the end of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from threed.monitor.goodput import Ledger
from threed.training.callbacks import Logging


def test_numbers_are_of_the_same_steps():
    """A loss that is a mean of ten steps above the speed of the last step alone, which was interrupted."""
    said: list[str] = []
    log = SimpleNamespace(step=lambda *_: None, say=lambda text, always: said.append(text),
                          path="metrics.jsonl", ledger=Ledger(),
                          over=lambda *_: None, doing=lambda _: None,
                          places=lambda: [("wandb", "runs/x/wandb/run"), ("prometheus", "x.prom")])
    steps: Any = iter([9.0, 9.0, *[1.0] * 9, 3.0])

    def metrics(*_: Any) -> dict[str, float]:
        step_s = next(steps)
        return {"perf/step_s": step_s, "perf/tokens_per_s": 600.0 / step_s, "memory/peak_bytes": 2.0**20,
                "pipeline/bubble_measured": 0.5 if step_s == 3.0 else 0.1, "pipeline/bubble_predicted": 0.1}

    meter = SimpleNamespace(metrics=metrics, stragglers=SimpleNamespace(warnings=[]),
                            spread=SimpleNamespace(warnings=[]))
    checkpoints = SimpleNamespace(metrics=dict, newest="runs/x/checkpoints/step-00000012")
    trainer: Any = SimpleNamespace(log=log, meter=meter, checkpoints=checkpoints, step_number=12, begun=True,
                                   deadline=None,
                                   config=SimpleNamespace(tokens_per_step=600, parallel=SimpleNamespace(pp=2),
                                                          model=SimpleNamespace(counted="tokens"),
                                                          train=SimpleNamespace(steps=12)))
    logging = Logging()
    trainer.step_number = 0
    logging.on_start(trainer)
    trainer.step_number = 12
    for number in range(1, 13):
        step: Any = SimpleNamespace(number=number, loss=13.0 - number, measured=None,
                                    metrics={"train/loss": 13.0 - number})
        logging.on_step_end(trainer, step)
    logging.on_end(trainer)
    assert said[0].splitlines() == [
        "", "mean of the last 10 steps:", "loss       5.5000 (step 1 had 12.0000)",
        "speed      500 tokens/s, 1.2 s a step", "bubble     14.0% measured, 10.0% predicted",
        "memory     1.0 MiB at the peak of the largest rank"]
    assert said[1] == "goodput    -"
    assert said[2].splitlines() == ["checkpoint runs/x/checkpoints/step-00000012", "metrics    metrics.jsonl",
                                    "wandb      runs/x/wandb/run", "prometheus x.prom"]
