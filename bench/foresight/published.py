"""Compare predictions with steps that others have measured and published, and with our own on a GPU.

    python -m bench.foresight.published           # the table, with the hardware files as they are
    python -m bench.foresight.published --fit     # fit four efficiencies of a100-sxm, one of the H100

Of our own models on the H100, parts are compared, too: errors of parts that cancel are none of a step.

Rows of vTrain (Bang et al. 2024) ran Megatron-LM on A100 nodes with 4 adapters of 200 Gbit/s: 1F1B, full
recomputation, fp16, attention that stores its matrix, and gradients reduced after backward. So attention is
priced with passes over that matrix (`attention_passes`), and nothing is computed while gradients travel
(`contention=1`). Its tp ranks send a part each of a message (`parallel.split_messages`). Rows of torchtitan
ran FSDP2 with flash attention on H100 of 96 GB at 2.4 TB/s and 500 W. Neither had a loss by kernels that
write the gradient over the logits, as threed's fused pieces have: theirs is priced as separate operations.
Rows of threed are those of results/gpu.md: one H100 SXM of 80 GB, one H200, bf16, cuDNN's attention. They ran
when GPT had one fused piece, the loss: all else is priced as separate operations.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import NamedTuple
from unittest import mock

import threed
from bench.common import make_config
from bench.gpu.models import LARGE
from threed.models.layers.head import Head
from threed.planner import make_pipeline, make_plan
from threed.prediction.analytic import cost
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Op
from threed.program.plan import Plan
from threed.schema import Config
from threed.spec.kernels import Moved

FITTED = ("efficiency", "memory_efficiency", "node_efficiency", "adapter_efficiency")
MEGATRON = "attention_passes=6,contention=1"


class Model(NamedTuple):
    name: str
    devices: int
    batch: int  # global
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    rows: str  # tp dp pp: ms


VTRAIN = (
    Model("3.6B", 64, 512, 4, 3072, 32, 30,
          "1 64 1: 3638.3, 2 32 1: 4078.2, 4 16 1: 4764, 1 32 2: 4382.1, 8 8 1: 5618, 16 4 1: 11960.1"),
    Model("18.4B", 256, 1024, 2, 6144, 48, 40,
          "8 32 1: 10453.3, 4 32 2: 10031.6, 8 16 2: 10434.8, 8 8 4: 10926.4, 16 16 1: 20414.8"),
)
# torchtitan, docs/performance.md: ranks, compiled, tokens a second and GPU
TORCHTITAN = ((8, False, 5762), (8, True, 6667), (128, False, 5605), (128, True, 6514))
# At 500 W instead of 700 the clock is lower under load; `efficiency` is fitted to these rows.
H100_96GB = "h100-sxm,memory_gb=96,memory_gbps=19200,efficiency=0.47"

# threed, results/gpu.md: hardware -> what is recomputed, and milliseconds of a step
THREED = {
    "h100-sxm": {"125M-2k": ("none", 165.5), "1.3B-2k": ("none", 1074.5), "1.3B-8k": ("none", 1335.1),
                 "2.7B-4k": ("full", 2786.6)},
    "h200-sxm": {"125M-2k": ("none", 166.9), "1.3B-2k": ("none", 1040.6), "2.7B-4k": ("none", 2113.7)}}


MEASURED = Path(__file__).parents[1] / "results" / "gpu.md"


class Part(NamedTuple):
    """A part of a step: a forward or a backward of a unit, or the `tail`, which is what comes after the last
    backward, and what the host takes between two steps."""

    model: str
    part: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


class Row(NamedTuple):
    group: str
    name: str
    plan: Plan
    hardware: str
    measured_s: float

    def predicted_s(self, hardware: Hardware | None = None) -> float:
        hardware = hardware or Hardware.parse(self.hardware)
        return step(Analysis(self.plan), cost(self.plan, hardware), hardware).total_s


def plan_of(config: Config, loss: str = "off") -> Plan:
    """`loss`: model.fused of the loss alone."""
    moved = Head._moved

    def otherwise(self: Head, logits: int, own: int) -> Moved:
        return moved(Head(replace(self.model, fused=loss), self.tile), logits, own)

    with mock.patch.object(Head, "_moved", otherwise):
        return make_plan(config, make_pipeline(config))


def vtrain() -> list[Row]:
    rows = []
    for model in VTRAIN:
        for text in model.rows.split(", "):
            layout, ms = text.split(":")
            tp, dp, pp = map(int, layout.split())
            config = threed.load(Path("configs/gpt3-175b.yaml"), [
                f"model.layers={model.layers}", f"model.hidden={model.hidden}", f"model.heads={model.heads}",
                "model.seq_len=2048", "model.vocab=51200", "model.dropout=0.1", "model.fused=on",
                f"parallel.tp={tp}", f"parallel.dp={dp}", f"parallel.pp={pp}",
                "parallel.sequence_parallel=false", "parallel.split_messages=on", "zero.stage=0",
                "activation.policy=full",
                f"train.global_batch_size={model.batch}", f"train.micro_batch_size={model.micro_batch}",
                "precision.dtype=fp16", "precision.grad_dtype=fp16", "precision.reduce_dtype=fp16"])
            rows.append(Row(model.name, f"tp {tp} dp {dp} pp {pp}", plan_of(config), f"a100-sxm,{MEGATRON}",
                            float(ms) / 1e3))
    return rows


def torchtitan() -> list[Row]:
    rows = []
    for ranks, compiled, tokens_per_s in TORCHTITAN:
        config = threed.load(Path("configs/llama3-8b.yaml"), [
            f"parallel.dp={ranks}", "parallel.tp=1", "parallel.pp=1", "parallel.schedule=1f1b",
            # torchtitan recomputes each second product and whatever is not one: nearly each second
            # block.
            "parallel.sequence_parallel=false", "zero.stage=3", "activation.policy=full",
            "activation.every=2",
            f"model.fused={'on' if compiled else 'off'}", "train.micro_batch_size=2",
            f"train.global_batch_size={2 * ranks}", "precision.dtype=bf16"])
        name = f"FSDP {ranks}{', compiled' if compiled else ''}"
        rows.append(Row("Llama 8B", name, plan_of(config), H100_96GB,
                        2 * config.model.seq_len / tokens_per_s))
    return rows


def own(hardware: str) -> list[Row]:
    return [Row("GPT", name, plan_of(make_config(LARGE[name], 1, f"activation.policy={policy}",
                                                 "model.fused=off"), "on"), hardware, ms / 1e3)
            for name, (policy, ms) in THREED[hardware].items()]


def measured_parts() -> dict[str, dict[str, float]]:
    """Model -> part -> ms, from the table "Units" of results/gpu.md."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    units = MEASURED.read_text().partition("## Units")[2].partition("\n## ")[0]
    for model, unit, op, ms in re.findall(r"^\| (\S+) \| (\w+)[^|]*\| (\w+) \| ([\d.]+) \|", units, re.M):
        found[model][f"{unit} {op}"] = float(ms)
    return found


def by_part(rows: Sequence[Row], hardware: Hardware | None = None) -> list[Part]:
    """Of our own models on the H100, each part as measured and as predicted."""
    measured, parts = measured_parts(), []
    for row in rows:
        price = cost(row.plan, hardware or Hardware.parse(row.hardware))
        table, units, tail = row.plan.table, dict[str, float](), 0.0
        rest = row.measured_s * 1e3
        for item in row.plan.programs["train"][0]:
            ms = price(0, item) * 1e3
            if item.op not in COMPUTE:
                tail += ms
                continue
            # what is recomputed was not measured apart: it is a forward
            op = Op.FORWARD if item.op == Op.RECOMPUTE else item.op
            part = f"{table.units[item.unit].name.partition('.')[0]} {op}"
            units[part] = ms
            rest -= measured[row.name][part]
        parts += [Part(row.name, part, measured[row.name][part], ms) for part, ms in units.items()]
        parts.append(Part(row.name, "tail", rest, tail))
    return parts


def table_of_parts(parts: Sequence[Part]) -> str:
    return "\n".join(["| model | part | measured ms | predicted ms | error |", "|---|---|--:|--:|--:|",
                      *(f"| {part.model} | {part.part} | {part.measured_ms:.2f} | {part.predicted_ms:.2f} | "
                        f"{part.error:+.1%} |" for part in parts)])


def of_pieces() -> str:
    """What model.fused saves on an H100 by prices, by part: the loss alone, as GPT was measured, and all."""
    lines = ["| model | part | the loss alone, ms | all pieces, ms |", "|---|---|--:|--:|"]
    for row in own("h100-sxm"):
        policy, _ = THREED["h100-sxm"][row.name]
        config = make_config(LARGE[row.name], 1, f"activation.policy={policy}", "model.fused=on")
        other = row._replace(plan=plan_of(config, "on"))
        pairs = zip(by_part([row]), by_part([other]), strict=True)
        lines += [f"| {row.name} | {before.part} | {before.predicted_ms:.2f} | {after.predicted_ms:.2f} |"
                  for before, after in pairs]
        lines.append(f"| {row.name} | **step** | {row.predicted_s() * 1e3:.0f} | "
                     f"{other.predicted_s() * 1e3:.0f} |")
    return "\n".join(lines)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Of two rankings without ties."""
    order = [sorted(values).index for values in (left, right)]
    apart = sum((order[0](a) - order[1](b)) ** 2 for a, b in zip(left, right, strict=True))
    return 1 - 6 * apart / (len(left) * (len(left) ** 2 - 1))


def ranks(rows: Sequence[Row], predicted: Mapping[str, float]) -> dict[str, float]:
    """Spearman's rank correlation of the layouts of each model."""
    models = {name: [*group] for name, group in groupby(rows, lambda row: row.group)}
    return {name: spearman([row.measured_s for row in group], [predicted[row.name] for row in group])
            for name, group in models.items()}


def fit(rows: Sequence[Row], names: Sequence[str]) -> Hardware:
    """Least squares of relative errors, and the right order of the layouts of each model: a random walk, of
    which the steps become shorter. (Along one constant after the other a search gets stuck.)"""
    draw, best = random.Random(0), Hardware.parse(rows[0].hardware)

    def loss(hardware: Hardware) -> float:
        predicted = {row.name: row.predicted_s(hardware) for row in rows}
        squares = mean((predicted[row.name] / row.measured_s - 1) ** 2 for row in rows)
        return squares + 0.01 * sum(1 - rank for rank in ranks(rows, predicted).values())

    least, trials = loss(best), 200 * len(names)
    for trial in range(trials):
        far = 0.05 * 0.05 ** (trial / trials)
        other = replace(best, **{name: min(1.0, getattr(best, name) * draw.lognormvariate(0.0, far))
                                 for name in names})
        if (new := loss(other)) < least:
            best, least = other, new
    return best


def table(rows: Sequence[Row], hardware: Hardware | None = None) -> str:
    lines = ["| model | layout | measured s | predicted s | error |", "|---|---|--:|--:|--:|"]
    predicted = {row.name: row.predicted_s(hardware) for row in rows}
    errors = {row.name: predicted[row.name] / row.measured_s - 1 for row in rows}
    for row in rows:
        lines.append(f"| {row.group} | {row.name} | {row.measured_s:.3f} | {predicted[row.name]:.3f} | "
                     f"{errors[row.name]:+.1%} |")
    sizes = [abs(error) for error in errors.values()]
    lines.append(f"\nmean error {mean(sizes):.1%}, worst {max(sizes):.1%}; Spearman's rank correlation: "
                 + ", ".join(f"{name} {rank:.3f}" for name, rank in ranks(rows, predicted).items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0])
    parser.add_argument("--fit", action="store_true",
                        help="fit efficiencies first: four of a100-sxm, one of the H100")
    args = parser.parse_args()
    for title, rows, names in (("A100, Megatron-LM", vtrain(), FITTED),
                               ("H100, torchtitan", torchtitan(), ("efficiency",)),
                               ("H100, threed", own("h100-sxm"), ("efficiency",)),
                               ("H200, threed", own("h200-sxm"), ("efficiency",))):
        fitted = fit(rows, names) if args.fit else None
        constants = [f"{name}: {getattr(fitted, name):.3f}" for name in names if fitted]
        print(f"{title}{', fitted ' if fitted else ''}{', '.join(constants)}:\n\n{table(rows, fitted)}\n")
        if title == "H100, threed":
            print(f"By part:\n\n{table_of_parts(by_part(rows, fitted))}\n")
            print(f"What pieces of GPT save, predicted:\n\n{of_pieces()}\n")


if __name__ == "__main__":
    main()
