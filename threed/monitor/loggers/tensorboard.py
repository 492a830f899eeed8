"""TensorBoard: event files in run.dir/tensorboard, by torch's writer. `tensorboard --logdir runs` shows the
runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from threed.monitor.loggers.logger import About, Logger, Metrics, facts_of, known


class TensorBoard(Logger):
    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, about: About, run_id: str | None) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        folder = about.folder("tensorboard")
        self.place = str(folder)
        # The steps after `about.step` are repeated: TensorBoard then drops what it has of them.
        self._writer = SummaryWriter(str(folder), purge_step=about.step + 1)
        text = yaml.safe_dump({**about.config.to_dict(), "facts": facts_of(about.config)}, sort_keys=False)
        self._writer.add_text("config", f"```\n{text}```", about.step)
        self._writer.flush()
        self.kept = f"; {folder} has what came before"
        return None

    def metrics(self, rows: Sequence[tuple[int, Metrics]]) -> None:
        for step, numbers in rows:
            for name, value in known(numbers):
                self._writer.add_scalar(name, value, step, walltime=numbers.get("run/time"))
        self._writer.flush()  # a run that is killed keeps its steps

    def texts(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        for index, (prompt, text) in enumerate(rows):
            self._writer.add_text(f"texts/{index}", prompt + text, step)

    def finish(self, state: str) -> None:
        self._writer.close()
