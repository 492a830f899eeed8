"""Metrics: the name, unit and meaning of each number of a step in metrics.jsonl and the loggers. The table of
docs/metrics.md is made from these rows (docs/reference/generate.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from threed.base.axes import AXES
from threed.base.mesh import FOLDS
from threed.monitor.attribute import BESIDE, CAUSES, WAITED
from threed.monitor.goodput import PARTS


@dataclass(frozen=True)
class Metric:
    """Metrics of one unit and meaning."""

    names: tuple[str, ...]
    unit: str  # "": a share, a ratio or a count
    meaning: str
    by_position: bool = False  # whether NAME/0, NAME/1 ... have it for each pipeline position, too
    summary: str = ""  # how wandb sums up a run: min, mean or max; "": by the last step


def _row(names: str, unit: str, meaning: str, by_position: bool = False, summary: str = "") -> Metric:
    return Metric(tuple(names.split()), unit, meaning, by_position, summary)


def _each(head: str, parts: Iterable[str], tail: str = "") -> str:
    return " ".join(f"{head}{part}{tail}" for part in parts)


METRICS = (
    _row("train/loss", "nats", "of the step, mean over the tokens that count", summary="min"),
    _row("train/lr", "", "learning rate of the step"),
    _row("train/grad_norm", "", "of the step, before clipping"),
    _row("train/skipped_steps", "steps", "so far, whose update was left out"),
    _row("train/loss_scale", "", "that the step was made with, where it is dynamic"),
    _row("train/penalty", "", "where a layer has one (`Out.penalty`): trained on, and not in `train/loss`"),
    _row("run/tokens run/samples", "", "of the training split that the run has consumed so far: samples with "
         "layers of your own, else tokens"),
    _row("run/time", "s", "when the step ended, since 1970"),
    _row("run/goodput", "", "share of the time since the run began that went into steps that count"),
    _row(_each("spent/", PARTS), "s", "of that time so far, by what it went into"),
    _row("val/loss", "nats", "mean over `train.eval_batches` global batches of held-out data, at steps that "
         "evaluate", summary="min"),
    _row("perf/step_s", "s", "time of the slowest rank from step to step, without evaluation. On a GPU this "
         "and all other times are those of the step before, because the host does not wait for a step's end",
         summary="mean"),
    _row("perf/tokens_per_s perf/samples_per_s", "1/s", "tokens, or samples with layers of your own, by "
         "`perf/step_s`", summary="mean"),
    _row("perf/tokens_per_s_per_device perf/samples_per_s_per_device", "1/s", "the same of one device"),
    _row("perf/apart_s", "s", "since the last step, that `perf/step_s` leaves out: evaluation, texts, a "
         "verified step's first computation"),
    _row("perf/model_tflops_per_device", "TFLOPS", "FLOPs of the model, recomputation not counted"),
    _row("perf/mfu", "", "the same by the device's peak: known for A100, H100, H200 and B200, else "
         "`monitor.peak_tflops`, else null", summary="mean"),
    _row("pipeline/bubble_measured", "", "1 - time in compute instructions / time of the step, mean over "
         "ranks; at pp=1 the console calls it exposed traffic", by_position=True),
    _row("pipeline/bubble_predicted", "", "the same, from a simulation of the plan with the costs that this "
         "step measured", by_position=True),
    _row(_each("time/", CAUSES), "s", "where the time of the step went, mean over ranks; `time/keys_wait` "
         "with parallel.cp_overlap alone, `time/owners_wait` with muon or polar, "
         "`time/ep_wait` with experts", by_position=True),
    _row(_each("offload/", (*BESIDE, WAITED), "_s"), "s", "where something is offloaded: in which each lane "
         "that the plan has worked in the step, beside the computation, and in which the computation waited "
         "for any of them; means of all ranks"),
    _row("optimizer/update_rms", "", "with muon or polar: root of the mean square of the step of all "
         "matrices, by the learning rate and without decay: about 0.2 with `match_rms_adamw`; null where "
         "there is no step. On a GPU that of the step before"),
    _row("optimizer/turn_s", "s", "with muon or polar: in which the rank that did so longest turned its "
         "matrices"),
    _row("moe/imbalance moe/load_max", "", "with experts: the most rows of a rank, and of one expert, in an "
         "exchange of the step, over those of balanced experts"),
    _row("moe/room", "", "how often in the step, over all ranks, more rows came than `model.moe_room` plans "
         "memory for"),
    _row("moe/dropped", "", "share of the step's choices that `model.moe_capacity` drops"),
    _row(_each("comm/bytes_", (*AXES, *FOLDS)), "bytes", "that all ranks sent in the step over each axis "
         "(`ep` with experts alone); equal to the plan's, except over ep: there the router decides how many "
         "rows leave a rank"),
    _row("checkpoint/blocked_s checkpoint/written_s", "s", "that the run stood still for a checkpoint, and "
         "until it was complete"),
    _row("checkpoint/copied_s", "s", "that the copy to `checkpoint.copy_to` took"),
    _row("straggler/rank straggler/slower", "", "the rank whose own work took longest, and how many times as "
         "long as at other ranks of its position"),
    _row("memory/peak_bytes", "bytes", "of the largest rank: the allocator's peak on a GPU, the peak "
         "resident set on a CPU", summary="max"),
    _row("integrity/verified_steps", "steps", "so far in this process, computed twice and equal"),
    _row("integrity/rehearsal_s", "s", "of a verified step's first computation"),
)
