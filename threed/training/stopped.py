"""Stopped: the end of a run that was asked to stop twice, and so leaves without a checkpoint."""

from __future__ import annotations

from pathlib import Path

from threed.base.restart import Pace
from threed.checkpoint.format import folder
from threed.checkpoint.lineage import read_latest
from threed.monitor import state
from threed.schema import Config

AT_ONCE = "stopped at once, as asked"


def stopped_now(config: Config, pace: Pace) -> str:
    """Leave a word of a run whose ranks have ended at a second request, and return what to say."""
    run = Path(config.run.dir)
    if state.last_word(run).get("state") in (state.RUNNING, state.FAILED):
        state.note(run, state.STOPPED, max(0, pace.step - (pace.since_s is not None)))
    newest = read_latest(config)[0]
    there = f"the newest checkpoint is {folder(config) / newest}"
    return f"{AT_ONCE}; {there if newest not in ('', 'none') else 'there is no checkpoint'}"
