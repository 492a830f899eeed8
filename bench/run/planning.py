"""How long planning takes: whole commands on one core, of this version and of a commit, in turn. What they
print must be equal, or nothing is compared.

    python -m bench.run.planning --against COMMIT --markdown bench/results/planning.md    # 20 minutes
    python -m bench.run.planning --only ranks                                             # this version alone
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.run.same_numbers import ROOT, work_tree

VERBS = ("check", "predict", "show")
DEEP = ("configs/gpt3-175b.yaml", "parallel.dp=1", "parallel.pp=64", "model.layers=254",
        "train.global_batch_size=512")
# name -> (what it is, config and overrides, what comes after the name of the program)
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "ranks": ("GPT-3 175B on 4,096 ranks", ("configs/gpt3-175b.yaml", "parallel.dp=32"), VERBS),
    "zero-3": ("the same, ZeRO-3 and recomputation",
               ("configs/gpt3-175b.yaml", "parallel.dp=32", "zero.stage=3", "activation.policy=full"), VERBS),
    "1f1b": ("64 positions, 512 micro-batches, 1f1b", DEEP, VERBS),
    "interleaved": ("the same, interleaved, 4 stages each",
                    (*DEEP, "parallel.schedule=interleaved", "parallel.virtual_stages=4"), VERBS),
    "advice": ("GPT-2 small on 8 ranks", ("configs/gpt2-small.yaml", "parallel.dp=2", "parallel.pp=4"),
               ("check --advise", "check --memory 24GB")),
}


class Spent(NamedTuple):
    wall_s: float
    processor_s: float


def run(tree: Path, words: list[str]) -> tuple[Spent, str]:
    """Run a command of the version in a work tree on one core. Returns what it prints, too."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([sys.executable, "-m", "threed", *words], cwd=tree, check=False,
                          capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                          preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
    wall_s, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"threed {' '.join(words)} in {tree} failed:\n{done.stderr}")
    return Spent(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), done.stdout


def measure(trees: list[Path], words: list[str], rounds: int) -> list[Spent]:
    """The least times of each version, which take turns."""
    best = [Spent(float("inf"), float("inf"))] * len(trees)
    for _ in range(rounds):
        printed = []
        for index, tree in enumerate(trees):
            spent, text = run(tree, words)
            printed.append(text)
            best[index] = Spent(*map(min, best[index], spent))
        if len(set(printed)) > 1:
            sys.exit(f"threed {' '.join(words)}: the two versions print different things")
    return best


def line(what: str, verb: str, times: list[Spent]) -> str:
    """A row of the table; the version before, if any, is the last of `times`."""
    cells = [f"{each[kind]:.2f}" for kind in range(2) for each in reversed(times)]
    if len(times) > 1:
        cells.append(f"{times[0].processor_s / times[1].processor_s:.2f}")
    return f"| {what} | `{verb}` | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="the version to compare with")
    parser.add_argument("--only", default=",".join(CASES), metavar="NAME,...", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3, help="the least time of so many counts")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown cases {', '.join(unknown)}; there are {', '.join(CASES)}")
    heads = ["plan", "command", "wall s", "processor s"]
    if given.against:
        heads = ["plan", "command", "wall s before", "wall s", "processor s before", "processor s", "ratio"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'---:|' * (len(heads) - 2)}"]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory(prefix="planning-") as folder:
        trees = [ROOT]
        try:
            if given.against:
                trees.append(work_tree(given.against, Path(folder) / "before"))
            for what, overrides, verbs in (CASES[name] for name in names):
                for verb in verbs:
                    name, *options = verb.split()
                    lines.append(line(what, verb, measure(trees, [name, *overrides, *options], given.rounds)))
                    print(lines[-1], flush=True)
        finally:
            for tree in trees[1:]:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)
    if given.markdown:
        given.markdown.write_text(f"# How long planning takes\n\n`python -m bench.run.planning "
                                  f"{' '.join(sys.argv[1:])}`; see [bench/README.md](../README.md).\n\n"
                                  + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
