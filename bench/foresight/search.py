"""What `threed search` is worth: its short plans beside the full plan over random layouts, and three whole
searches with their seconds.

    python -m bench.foresight.search --layouts 300 --searches --markdown bench/results/search.md  # 20 minutes
    python -m bench.foresight.search --layouts 60                                                 # a minute

Layouts are drawn as in tests/layouts.py, over three models and two machines: one whose links are fast, and
one on which traffic decides. A step's time, and the memory of the fullest rank, are compared with those of
`threed predict`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import threed
from tests.layouts import Compared, compared
from threed.base.remember import remembering
from threed.prediction.hardware import Hardware

QUIET = ("train.eval_every=0", "checkpoint.every=0")
# name, layers, global batch, most micro-batches
MODELS = (("llama3-8b", 10, 64, 16), ("llama3-8b", 16, 256, 64), ("gpt2-small", 12, 64, 16))
MACHINES = ("h100-sxm", "a100-sxm,adapter_gbps=25")
SEARCHES = (("configs/llama3-8b.yaml", 64), ("configs/llama3-8b.yaml model.name=mixtral-8x22b", 128),
            ("configs/gpt3-175b.yaml", 1024))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def errors(count: int) -> Iterator[str]:
    """Rows of the table, and the layouts that are farthest off."""
    yield ("| model | machine | layouts | step: mean | 99th percentile | worst | memory: mean | 99th "
           "percentile | least | most |")
    yield "|---|---|" + "--:|" * 8
    rows = list[Compared]()
    cases = [(model, machine) for model in MODELS for machine in MACHINES]
    for (name, layers, batch, most), machine in cases:
        base = threed.load(f"configs/{name}.yaml",
                           [f"model.layers={layers}", f"train.global_batch_size={batch}", *QUIET])
        with remembering():
            some = list(compared(base, Hardware.parse(machine), 11, -(-count // len(cases)), most))
        yield line(f"{name}, {layers} layers, batch {batch}", machine, some)
        rows += some
    yield line("all", "", rows)
    yield ""
    for row in sorted(rows, key=lambda row: -row.error)[:3]:
        yield f"* {row.error:.2%} off: {row.layout.text()}"


def line(model: str, machine: str, rows: Sequence[Compared]) -> str:
    steps = [row.error for row in rows]
    held = [row.fast_bytes / row.full_bytes - 1 for row in rows]
    sizes = [abs(each) for each in held]
    return (f"| {model} | {machine} | {len(rows)} | {mean(steps):.3%} | {percentile(steps, 0.99):.2%} | "
            f"{max(steps):.2%} | {mean(sizes):.1%} | {percentile(sizes, 0.99):.1%} | {min(held):+.1%} | "
            f"{max(held):+.1%} |")


def searched(config: str, devices: int) -> Iterator[str]:
    """What a search prints, and how long it takes. `config`: with overrides."""
    words = ["search", *config.split(), "--devices", str(devices), "--hardware", "h100-sxm"]
    begin, before = time.monotonic(), os.times()
    done = subprocess.run([sys.executable, "-m", "threed", *words], capture_output=True, text=True,
                          check=True)
    seconds, after = time.monotonic() - begin, os.times()
    own = after.children_user + after.children_system - before.children_user - before.children_system
    found = re.search(r"^(\d+) layouts in ([\d.]+) s", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    rate = int(found[1]) / float(found[2]) * 60
    yield (f"`threed {' '.join(words)}`: {seconds:.0f} s in all, {own:.0f} s of a core, {rate:,.0f} layouts "
           "a minute\n\n"
           f"```\n{done.stdout.rstrip()}\n```")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", type=int, default=300,
                        help="random ones, as many of each model and machine")
    parser.add_argument("--searches", action="store_true", help="and the whole searches")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    lines = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    for text in errors(given.layouts) if given.layouts else ():
        say(text)
    for config, devices in SEARCHES if given.searches else ():
        say("")
        for text in searched(config, devices):
            say(text)
    if given.markdown:
        given.markdown.write_text(
            f"# threed search\n\n`python -m bench.foresight.search {' '.join(sys.argv[1:])}` on one core "
            f"({machine_name()}); see [bench/README.md](../README.md).\n\n" + "\n".join(lines) + "\n")


def machine_name() -> str:
    """The processor's."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE) if Path(
        "/proc/cpuinfo").exists() else []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
