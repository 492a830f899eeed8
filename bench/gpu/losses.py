"""Whether runs of the same model and data have the same losses, whatever computes them.

    python -m bench.gpu.losses runs/plain runs/graphs runs/offload
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def losses(run: Path) -> dict[int, float]:
    """Step -> loss, of a run's metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the run with which the others are compared")
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=10, help="the first ones, before rounding has grown "
                                                               "(default: 10)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of a loss (default: 0.02, for bf16)")
    args = parser.parse_args(argv)
    known, said, good = losses(args.run), [], True
    for run in args.others:
        try:
            other = losses(run)
        except OSError as error:
            said.append(f"{run.name} cannot be read ({type(error).__name__})")
            continue
        steps = sorted(step for step in known.keys() & other.keys() if step <= args.steps)
        if not steps:
            said.append(f"{run.name} has no step in common")
            continue
        worst = max(abs(known[step] - other[step]) for step in steps)
        close = worst <= args.tolerance
        said.append(f"{run.name} {worst:.4f} in {len(steps)} steps{'' if close else ' WRONG'}")
        good &= close
    print(f"largest difference of a loss from {args.run.name}: {', '.join(said)}")
    return not good


if __name__ == "__main__":
    raise SystemExit(main())
