"""The seed of the cells: ORACLE_SEED, or the day."""

from __future__ import annotations

import datetime
import os


def seed_of_the_day() -> str:
    return os.environ.setdefault("ORACLE_SEED", f"{datetime.date.today():%Y%m%d}")
