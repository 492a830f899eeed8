"""What one device makes of a model: units beside their rooflines, steps beside torch's and the prediction,
and what each setting gains.

    python -m bench.gpu.models --markdown bench/results/gpu.md   # 8 minutes on a GPU; 1 on a CPU, tiny models
    python -m bench.gpu.models --models 1.3B-2k --settings       # one model, no setting
    python -m bench.gpu.models --help

Peaks are measured first: of a product of large matrices in the dtype of the run, and of a copy. A unit's
roofline is the longer of its FLOPs at the first and its bytes at the second. torch's model is plain modules,
each block compiled where there is a compiler, under fully_shard (FSDP2) with the same dtypes. Initial values
are drawn on the device. Each measurement has a process of its own: one that fails is a row that says why. The
tables are written after each. The exit status is 1 if a measurement of threed failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import Sizes
from bench.gpu.apart import Outcome, outcomes
from bench.gpu.side import NO_ROOM, Machine, gain, machine, ours, torchs
from bench.peers.pipeline import machine as cores
from threed.base.errors import InputError
from threed.base.quantity import show_bytes, show_count
from threed.tensor.precision import DTYPES

# Name -> a GPT: layers, width, heads, vocabulary, sequence, micro-batch, micro-batches, dtype. On a GPU some
# 16,384 tokens a micro-batch, or as many as a sequence has.
LARGE = {
    "125M-2k": Sizes(12, 768, 12, 50304, 2048, 8, 4, "bf16"),
    "1.3B-2k": Sizes(24, 2048, 16, 50304, 2048, 8, 4, "bf16"),
    "1.3B-8k": Sizes(24, 2048, 16, 50304, 8192, 2, 4, "bf16"),
    "2.7B-4k": Sizes(32, 2560, 20, 50304, 4096, 4, 4, "bf16"),
    "6.7B-4k": Sizes(32, 4096, 32, 50304, 4096, 2, 4, "bf16"),
}
SMALL = {"tiny": Sizes(2, 128, 4, 512, 64, 2, 4), "tiny-long": Sizes(2, 128, 4, 512, 256, 1, 4)}
# Settings, and the model of LARGE on which they are tried, if it is not that in TRIED_ON.
TRIED = "1.3B-2k"
LLAMA = ["model.family=llama", "model.position=rotary", "model.activation=swiglu", "model.norm=rmsnorm",
         "model.bias=false"]
SETTINGS: dict[str, tuple[list[str], list[str]]] = {  # name -> (without, with)
    "fused": ([*LLAMA, "model.fused=off"], [*LLAMA, "model.fused=on"]),
    "fused-gpt": (["model.fused=off"], ["model.fused=on"]),
    "fused-gpt-125M": (["model.fused=off"], ["model.fused=on"]),
    "loss_chunk": ([], ["model.loss_chunk=1024"]),
    "cudnn": (["run.attention_backend=flash"], ["run.attention_backend=cudnn"]),
    "cuda_graphs": ([], ["run.cuda_graphs=true"]),
    # where launches are not hidden behind kernels
    "cuda_graphs-125M": ([], ["run.cuda_graphs=true"]),
    "cuda_graphs-micro-batch-1": (["train.micro_batch_size=1"],
                                  ["train.micro_batch_size=1", "run.cuda_graphs=true"]),
    "deterministic": ([], ["run.deterministic=true"]),
}
TRIED_ON = {"fused-gpt-125M": "125M-2k", "cuda_graphs-125M": "125M-2k"}
LEAST_S = 10  # a measurement that would have less does not begin


class Bench:
    """Measures, and writes what it has after each measurement."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begin = args, time.monotonic()
        self.end = self.begin + args.seconds
        self.sizes = SMALL if args.small else LARGE
        self.machine = Machine("unknown", 0, 0.0, 0.0)
        self.failed: list[str] = []
        self.models: dict[str, dict[str, Any]] = {}
        self.settings: dict[str, dict[str, Any]] = {}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:4.0f} s  {text}", file=sys.stderr, flush=True)

    def apart(self, what: str, call: Callable[[], Any], mild: tuple[str, ...] = (NO_ROOM,)) -> Outcome:
        """What a call comes to, in a process of its own, within the time that is left. `mild`: what failures
        begin with that do not count."""
        if (left := self.end - time.monotonic()) < LEAST_S:
            return Outcome(None, f"left out: {max(left, 0):.0f} s are left", 0.0)
        outcome, = outcomes([call], lambda: left)
        if outcome.failure is None:
            return outcome
        if outcome.seconds >= left:
            return outcome._replace(failure=f"left out: stopped after {left:.0f} s, when the time was over")
        if not outcome.failure.startswith(mild):
            self.failed.append(what)
        return outcome

    def run(self) -> None:
        dtype = DTYPES[next(iter(self.sizes.values())).dtype]
        found = self.apart("peaks", partial(machine, dtype, self.args.small))
        if found.failure is not None:
            self.say(f"the device cannot be measured: {found.failure}")
            self.write()
            return
        self.machine = found.value
        for name in self.args.models:
            self.models[name] = self.model(name)
            self.write()
            self.say(f"{name}: {summary(self.models[name], self.machine)}")
        for name in self.args.settings:
            self.settings[name] = self.setting(name)
            self.write()
            row = self.settings[name]
            self.say(f"{name}: {row['failure'] or ratio(row['with_s'], row['without_s'])}")
        self.write()

    def model(self, name: str) -> dict[str, Any]:
        """threed's row of a model and torch's seconds, or why there are none."""
        size, args = self.sizes[name], self.args
        mine = self.apart(name, partial(ours, size, self.machine, args.steps, self.hardware))
        if mine.failure is not None:
            return {"failure": mine.failure, "torch_failure": None}
        self.models[name] = {**mine.value._asdict(), "failure": None, "torch_failure": None}
        self.write()
        peer = self.apart(name, partial(torchs, size, mine.value.policy, args.steps), ("",))
        return self.models[name] | {"torch_s": peer.value, "torch_failure": peer.failure}

    def setting(self, name: str) -> dict[str, Any]:
        size = self.sizes.get(TRIED_ON.get(name, TRIED)) or next(iter(self.sizes.values()))
        found = self.apart(name, partial(gain, size, self.machine, max(1, self.args.steps // 2),
                                         SETTINGS[name]), (NO_ROOM, InputError.__name__))
        (without, with_), peaks = found.value or ((None, None), (0, 0))
        return {"without_s": without, "with_s": with_, "peak_bytes": list(peaks), "failure": found.failure}

    def write(self) -> None:
        if self.args.json:
            replace(self.args.json, json.dumps(
                {"device": self.machine._asdict(), "host": cores(), "date": time.strftime("%Y-%m-%d"),
                 "models": self.models, "settings": self.settings}, indent=1) + "\n")
        if self.args.markdown:
            replace(self.args.markdown, self.text())

    @property
    def hardware(self) -> str:
        return self.args.hardware or self.machine.hardware

    def line(self) -> str:
        """All of it, in a line."""
        said = [f"{name} {summary(row, self.machine)}" for name, row in self.models.items()]
        said += [f"{name} {row['failure'] or ratio(row['with_s'], row['without_s'])}"
                 for name, row in self.settings.items()]
        return "; ".join([*said, f"failed: {', '.join(self.failed) or 'none'}"])

    def text(self) -> str:
        here = self.machine
        return "\n".join([
            "# One device", "",
            f"`{self.args.command}`, {time.strftime('%Y-%m-%d')}. {here.name}; {cores()}.",
            f"Measured peaks: {here.flops / 1e12:.2f} TFLOPS of products, {here.bytes / 1e9:.0f} GB/s of "
            f"copies. Predictions: `--hardware {self.hardware}`.",
            *(["Without a GPU they only show that they can be made."] if here.name == "no GPU" else []), "",
            *steps_table(self.models, here), *units_table(self.models), *settings_table(self.settings)])


# ---------------------------------------------------------------- the tables


def replace(path: Path, text: str) -> None:
    """Whoever is killed meanwhile leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text)
    scratch.replace(path)


def ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.2f}"


def ratio(value: float | None, of: float | None) -> str:
    return "-" if value is None or not of else f"{value / of:.2f}"


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [f"## {title}", "", "| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1),
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows), ""]


def summary(model: dict[str, Any], here: Machine) -> str:
    if model["failure"] is not None:
        return model["failure"]
    peer = model["torch_failure"] or f"{model['torch_s']:.3f}"
    return (f"{model['step_s']:.3f} s a step, {model['flops'] / here.flops:.1%} of the measured peak, "
            f"{model['predicted_s']:.3f} predicted, torch {peer}")


def steps_table(models: dict[str, dict[str, Any]], here: Machine) -> list[str]:
    head = ["model", "parameters", "recomputed", "attention", "step, ms", "tokens/s", "TFLOPS",
            "of the measured peak", "predicted, ms", "predicted / measured", "planned", "measured",
            "torch, ms", "threed / torch", "failed or left out"]
    rows = []
    for name, row in models.items():
        if row["failure"] is not None:
            rows.append([name, *["-"] * (len(head) - 2), row["failure"]])
            continue
        peer, failure = row.get("torch_s"), row["torch_failure"]
        rows.append([name, show_count(row["parameters"]), row["policy"], row["attention"], ms(row["step_s"]),
                     f"{row['tokens'] / row['step_s']:.0f}", f"{row['flops'] / 1e12:.3g}",
                     f"{row['flops'] / here.flops:.1%}", ms(row["predicted_s"]),
                     ratio(row["predicted_s"], row["step_s"]), show_bytes(row["planned_bytes"]),
                     show_bytes(row["peak_bytes"]) if row["peak_bytes"] else "-", ms(peer),
                     ratio(row["step_s"], peer), f"torch: {failure}" if failure else ""])
    return markdown("Steps", head, rows)


def units_table(models: dict[str, dict[str, Any]]) -> list[str]:
    head = ["model", "unit", "op", "ms", "ms of products", "ms of bytes", "of the roofline"]
    rows = [[name, unit["unit"], unit["op"], ms(unit["s"]), ms(unit["by_flops_s"]), ms(unit["by_bytes_s"]),
             f"{max(unit['by_flops_s'], unit['by_bytes_s']) / unit['s']:.0%}"]
            for name, row in models.items() for unit in row.get("units", ())]
    return markdown("Units", head, rows)


def settings_table(settings: dict[str, dict[str, Any]]) -> list[str]:
    head = ["setting", "without, ms", "with, ms", "ratio", "peak", "failed or left out"]
    rows = []
    for name, row in settings.items():
        before, after = row["peak_bytes"]
        rows.append([name, ms(row["without_s"]), ms(row["with_s"]), ratio(row["with_s"], row["without_s"]),
                     f"{show_bytes(int(before))} -> {show_bytes(int(after))}" if before else "-",
                     row["failure"] or ""])
    return markdown("Settings", head, rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", metavar="NAME",
                        help=f"these, in this order (default: all of {', '.join(LARGE)})")
    parser.add_argument("--settings", nargs="*", metavar="NAME", default=list(SETTINGS),
                        help=f"these (default: all of {', '.join(SETTINGS)})")
    parser.add_argument("--steps", type=int, default=6, help="steps that count (default: 6)")
    parser.add_argument("--seconds", type=float, default=480,
                        help="what is not measured by then is left out (default: 480)")
    parser.add_argument("--small", action="store_true", help="tiny models, as without a GPU")
    parser.add_argument("--hardware", metavar="FILE",
                        help="of predictions, as `threed predict` has it (default: that of such a GPU, or "
                             "80%% of the measured peaks)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here too")
    args = parser.parse_args(argv)
    args.command = " ".join(["python -m bench.gpu.models", *(sys.argv[1:] if argv is None else argv)])
    gpu, = outcomes([torch.cuda.is_available], lambda: 60.0)  # this process must not use it: it forks
    args.small = args.small or not gpu.value
    known = list(SMALL if args.small else LARGE)
    args.models = known if args.models is None else args.models
    for what, names, there in (("models", args.models, known), ("settings", args.settings, list(SETTINGS))):
        if unknown := [name for name in names if name not in there]:
            parser.error(f"--{what}: there is no {', '.join(unknown)}; there are {', '.join(there)}")
    if args.steps < 1 or not args.seconds > 0:
        parser.error("--steps must be at least 1, --seconds above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    bench = Bench(parse(argv))
    bench.run()
    print(bench.text())
    print(f"measured: {bench.line()}")
    return bool(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
