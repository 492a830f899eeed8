"""Orders written by a user: `parallel.schedule=file:PATH`, YAML or CSV, checked like any other order.

The file has one row a pipeline position, first to last. A task is its kind (F, B, or I and W for the two
halves of backward), the stage, a dot and the micro-batch. Stage 0 has the first layers; a position may have
any number of stages. For two positions and two micro-batches:

    YAML    - [F0.0, F0.1, B0.0, B0.1]          CSV    F0.0,F0.1,B0.0,B0.1
            - [F1.0, B1.0, F1.1, B1.1]                 F1.0,B1.0,F1.1,B1.1
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import yaml

from threed.base.errors import InputError
from threed.schedules.orders import Order, Task


def read_order(path: Path, p: int) -> tuple[Order, tuple[int, ...]]:
    """(order, position of each stage). Raises InputError with the row and the cell."""
    try:
        text = path.read_text()
        rows = list(csv.reader(text.splitlines())) if path.suffix == ".csv" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"schedule file {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise InputError(f"schedule file {path}: must be a list of rows, one a pipeline position, such as "
                         "[F0.0, B0.0]")
    rows = [row for row in rows if row]
    if len(rows) != p:
        raise InputError(f"schedule file {path} has {len(rows)} rows, but parallel.pp={p}")
    order: Order = []
    where: dict[int, int] = {}
    for position, row in enumerate(rows):
        tasks = []
        for column, cell in enumerate(row):
            match = re.fullmatch(r"\s*([FBIW])(\d+)\.(\d+)\s*", str(cell))
            if match is None:
                raise InputError(f"schedule file {path}, row {position + 1}, cell {column + 1}: '{cell}' is "
                                 "not a task; write for example F0.3, forward of stage 0, micro-batch 3")
            task = Task(match.group(1), int(match.group(2)), int(match.group(3)))
            if where.setdefault(task.stage, position) != position:
                raise InputError(f"schedule file {path}, row {position + 1}, cell {column + 1}: stage "
                                 f"{task.stage} is already on row {where[task.stage] + 1}")
            tasks.append(task)
        order.append(tasks)
    missing = sorted(set(range(max(where) + 1)) - set(where))
    if missing:
        raise InputError(f"schedule file {path}: stage {missing[0]} is on no row, but there is a stage "
                         f"{max(where)}")
    return order, tuple(where[stage] for stage in range(len(where)))
