"""Compare the numbers of two versions of threed: every loss and gradient norm, to the bit, and checkpoints
that go from one to the other. For a change that is to change no number.

Each case is trained by the version of a commit, in a work tree of its own, and by this one: the same few
steps. Then this one goes on from the commit's checkpoint after half of them. All are the command line's runs
on a CPU, a process a rank.

    python -m bench.run.same_numbers --against COMMIT
    python -m bench.run.same_numbers --against COMMIT --only zb-v,tiles
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).parents[2]
STEPS = 4
BASE = ["model.layers=6", "model.hidden=32", "model.heads=4", "model.seq_len=32", "model.vocab=300",
        "train.global_batch_size=8",
        "train.micro_batch_size=1", "train.eval_every=0", "monitor.wandb=disabled", "monitor.trace_every=0",
        "optimizer.warmup_steps=0", "optimizer.decay_steps=10", f"checkpoint.every={STEPS // 2}",
        "run.restarts=0"]
FILE = [["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "F0.3", "B0.2", "B0.3"],
        ["F1.0", "B1.0", "F1.1", "B1.1", "F1.2", "B1.2", "F1.3", "B1.3"]]


def mesh(dp: int, tp: int, pp: int, schedule: str = "1f1b", *more: str) -> list[str]:
    return [f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.schedule={schedule}",
            *more]


# By name: overrides; {folder} is the case's own.
CASES = {
    "gpipe": mesh(2, 1, 2, "gpipe", "zero.stage=0", "optimizer.name=sgd"),
    "1f1b": mesh(2, 2, 1, "1f1b", "zero.stage=1", "precision.dtype=bf16", "activation.policy=selective"),
    "interleaved": mesh(2, 1, 2, "interleaved", "parallel.virtual_stages=2", "zero.stage=2",
                        "precision.dtype=fp16"),
    "zb-h1": mesh(2, 1, 2, "zb-h1", "zero.stage=3", "offload.optimizer=cpu"),
    "zb-h2": mesh(2, 1, 2, "zb-h2", "zero.stage=1", "offload.optimizer=nvme", "offload.nvme_path={folder}"),
    "zb-v": mesh(2, 1, 2, "zb-v", "zero.stage=2", "precision.dtype=bf16", "activation.policy=full"),
    "dualpipe-v": mesh(2, 1, 2, "dualpipe-v", "zero.stage=3", "offload.optimizer=nvme",
                       "offload.parameters=nvme",
                       "offload.nvme_path={folder}"),
    "breadth-first": mesh(2, 1, 2, "breadth-first", "parallel.virtual_stages=2", "zero.stage=3",
                          "zero.residency=step"),
    "auto": mesh(1, 2, 2, "auto", "parallel.sequence_parallel=true"),
    "file": mesh(2, 1, 2, "file:{folder}/order.yaml", "model.tie_embeddings=false"),
    "overlap": mesh(2, 1, 1, "1f1b", "zero.stage=2", "offload.optimizer=cpu"),
    "tiles": mesh(2, 2, 1, "1f1b", "zero.stage=3", "model.tile_linears=4KiB", "model.tie_embeddings=false",
                  "parallel.sequence_parallel=true"),
    "partition": mesh(1, 2, 2, "1f1b", "activation.policy=full", "activation.partition=true"),
    "activations on the host": mesh(2, 1, 2, "1f1b", "activation.policy=full", "activation.offload=cpu",
                                    "precision.dtype=fp16"),
    "shard groups": mesh(4, 1, 1, "1f1b", "zero.stage=3", "zero.shard_size=2", "offload.optimizer=cpu",
                         "offload.parameters=cpu"),
    "llama": mesh(2, 2, 1, "1f1b", "zero.stage=2", "precision.dtype=fp16", "model.norm=rmsnorm",
                  "model.activation=swiglu",
                  "model.bias=false", "model.kv_heads=2", "model.tie_embeddings=false",
                  "activation.policy=budget",
                  "activation.budget=1MiB"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="COMMIT",
                        help="the version whose numbers are the measure")
    parser.add_argument("--only", default=",".join(CASES), metavar="NAME,...", help="these cases")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown cases {', '.join(unknown)}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory(prefix="numbers-") as folder:
        base = Path(folder)
        other = work_tree(given.against, base / "other")
        try:
            failed = sum(not _compare(name, other, base) for name in track(names, "comparing"))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=False)
    print(f"{len(names) - failed} of {len(names)} cases are equal to the bit, and go on from "
          f"{given.against}'s checkpoints")
    sys.exit(failed > 0)


def work_tree(commit: str, folder: Path) -> Path:
    """A work tree of a commit, with its C code compiled."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=folder, check=True,
                   capture_output=True)
    return folder


def _compare(name: str, other: Path, base: Path) -> bool:
    """Whether a case has the same numbers; prints them if not."""
    own = base / name.replace(" ", "-")
    own.mkdir()
    (own / "order.yaml").write_text(json.dumps(FILE))  # JSON is YAML
    overrides = [*BASE, *(word.format(folder=own) for word in CASES[name]), f"data.cache={base / 'data'}",
                 f"train.steps={STEPS}"]
    theirs = _train(other, own / "theirs", overrides)
    ours = _train(ROOT, own / "ours", overrides)
    shutil.copytree(own / "theirs", own / "resumed")
    shutil.rmtree(own / "resumed" / "checkpoints" / f"step-{STEPS:08d}")
    resumed = _train(ROOT, own / "resumed", overrides)
    good = True
    for what, numbers in (("this version", ours), ("this version, from a checkpoint of the other", resumed)):
        if numbers != theirs:
            good = False
            print(f"{name}: {what}:\n  {numbers}\n  and the other:\n  {theirs}")
    return good


def _train(tree: Path, folder: Path, overrides: list[str]) -> object:
    """[(step, loss, gradient norm)] of a run; the last lines of its output if it fails."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    config = ROOT / "configs" / "toy.yaml"  # for both
    done = subprocess.run([sys.executable, "-m", "threed", "train", config, *overrides, f"run.dir={folder}"],
                          cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"exit status {done.returncode}: " + "\n".join((done.stdout + done.stderr).splitlines()[-5:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in rows]


if __name__ == "__main__":
    main()
