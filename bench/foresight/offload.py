"""What `threed predict` says of offload where it must reach something, beside what it must reach.

    python -m bench.foresight.offload --markdown bench/results/offload.md     # half a minute

2.83B parameters on an H200 with the link and the host that were measured on one; a model of 30B, and Llama 3
8B, on one H100. A target is a number of tokens a second, or a share of a limit: of the speed without offload,
were there enough memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import Sizes, columns, make_config, put_section
from threed.base.quantity import show_bytes
from threed.config.load import load
from threed.models.model import model_flops
from threed.prediction.predict import predict
from threed.schema import Config

GIB = 1 << 30
MEASURED = "link_gbps=440,host_gbps=1056"  # of an H200's host: 55 GB/s one way, and 133 for the host's step
H200, H100 = f"h200-sxm,{MEASURED}", f"h100-sxm,{MEASURED}"
OPTIMIZER = ("zero.stage=2", "offload.optimizer=cpu")
PARAMETERS = ("zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu")
VERTICAL = ("parallel.schedule=vertical",)
NARROW = ("precision.grad_dtype=bf16", "precision.reduce_dtype=bf16")


class Row(NamedTuple):
    name: str
    config: Config
    hardware: str
    host_gib: int = 0  # memory of the host; 0: nobody asks
    limit: str = ""  # the row whose tokens a second are 1.0
    share: float = 0.0  # of them that must be reached; 0: none
    least: float = 0.0  # tokens a second that must be reached; 0: none
    fits: bool = True  # False: a limit, which need not fit the device


def medium(num_microbatches: int, *more: str) -> Config:
    """2.83B parameters."""
    return make_config(Sizes(12, 4096, 32, 50304, 2048, 1, num_microbatches, "bf16"), 1,
                       "model.position=rotary", "optimizer.clip_grad=1", "run.device=cuda", *more)


def large(*more: str) -> Config:
    """30B parameters, 65,536 tokens a step."""
    return make_config(Sizes(48, 7168, 56, 50304, 4096, 1, 16, "bf16"), 1, "model.position=rotary",
                       "optimizer.clip_grad=1", "run.device=cuda", "activation.policy=full", *more)


def llama(num_microbatches: int, *more: str) -> Config:
    """Sequences of 8,192 tokens."""
    return load(None, ["model.name=llama3-8b", "parallel.dp=1", "train.micro_batch_size=1",
                       f"train.global_batch_size={num_microbatches}", "precision.dtype=bf16",
                       "optimizer.clip_grad=1", "run.device=cuda", *more])


def rows() -> Iterator[Row]:
    by_16 = (*VERTICAL, "parallel.group=16")
    nothing = "2.83B, nothing"
    yield Row(nothing, medium(8), H200)
    yield Row("2.83B, optimizer", medium(8, *OPTIMIZER), H200, limit=nothing, least=12_500)
    yield Row("2.83B, optimizer, vertical", medium(8, *OPTIMIZER, *VERTICAL), H200, limit=nothing,
              least=16_000)
    yield Row("2.83B, optimizer, 32 in groups of 16", medium(32, *OPTIMIZER, *by_16), H200, limit=nothing,
              share=0.85)
    for name, settings, m in (("vertical", VERTICAL, 8), ("32 in groups of 16", by_16, 32)):
        yield Row(f"2.83B, parameters, {name}", medium(m, *PARAMETERS, *settings), H200,
                  limit=f"2.83B, optimizer, {name}", share=0.97)
    yield Row("2.83B, parameters", medium(8, *PARAMETERS), H200, limit=nothing)
    yield Row("2.83B, optimizer, added on the host after each micro-batch",
              medium(8, *OPTIMIZER, "offload.gradients=host", "zero.reduce_every=1"), H200, limit=nothing)
    yield Row("30B, nothing", large(), H100, fits=False)
    yield Row("30B, everything", large(*PARAMETERS, *VERTICAL), H100, 768, "30B, nothing", share=0.95,
              least=2_250)
    for m, share in ((8, 0.75), (64, 0.95)):
        limit, name = f"8B, nothing, {m * 8}K", f"8B, optimizer, {m * 8}K"
        yield Row(limit, llama(m, "activation.policy=selective"), H100, fits=False)
        yield Row(name, llama(m, *OPTIMIZER, *NARROW, "activation.policy=selective"), H100, 128, limit, share)


# ---------------------------------------------------------------- the bench


class Predicted(NamedTuple):
    row: Row
    tokens_per_s: float
    tflops: float
    step_s: float
    device: int
    host: int
    too_much: str | None


def predicted(row: Row) -> Predicted:
    config = row.config
    memory = f",host_memory_gb={row.host_gib * GIB / 1e9:.1f}" if row.host_gib else ""
    said: dict[str, Any] = predict(config, row.hardware + memory)
    step_s, held = said["step_time"], said["stages"][0]["peak_bytes"]
    flops = model_flops(config.model, config.train.global_batch_size, config.train.micro_batch_size)
    return Predicted(row, said["tokens_per_s"], flops / step_s / 1e12, step_s, held["device"], held["host"],
                     said["too_much"])


def target(this: Predicted, limit: float) -> tuple[str, bool]:
    """What must be reached, in words, and whether it is. `limit`: tokens a second that are 1.0."""
    row, wanted, met = this.row, list[str](), True
    if row.least:
        wanted.append(f"{row.least:,.0f} tokens/s")
        met &= this.tokens_per_s >= row.least
    if row.share:
        wanted.append(f"{row.share:.2f} of {row.limit}")
        met &= this.tokens_per_s >= row.share * limit
    if row.host_gib:
        wanted.append(f"in {row.host_gib} GiB of host")
        met &= this.host <= row.host_gib * GIB
    if row.fits and wanted:
        met &= this.too_much is None
    return ", ".join(wanted), met


HEAD = ("case", "tokens/s", "of its limit", "TFLOPS", "step s", "device", "host", "to be reached", "")


def lines(all_rows: Sequence[Predicted]) -> Iterator[list[str]]:
    speeds = {each.row.name: each.tokens_per_s for each in all_rows}
    for this in all_rows:
        row, limit = this.row, speeds.get(this.row.limit, 0.0)
        wanted, met = target(this, limit)
        yield [row.name, f"{this.tokens_per_s:,.0f}", f"{this.tokens_per_s / limit:.3f}" if limit else "-",
               f"{this.tflops:.0f}", f"{this.step_s:.3f}",
               show_bytes(this.device) + ("" if this.too_much is None else ", too much"),
               show_bytes(this.host) if this.host else "-", wanted or "-",
               ("met" if met else "missed") if wanted else ""]


TITLE = "Predicted"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").replace("\n\n    python", "\n\npython"),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the section to this file, too, in place of an older one")
    args = parser.parse_args(argv)
    table = columns([HEAD, *lines([*map(predicted, rows())])])
    text = "\n".join([
        f"`python -m bench.foresight.offload`, {time.strftime('%Y-%m-%d')}: what `threed predict` says.",
        f"2.83B parameters, 8 or 32 micro-batches of 2,048 tokens, on `{H200}`; 30B (48 x 7168), 65,536",
        "tokens a step in sequences of 4,096, all recomputed, and Llama 3 8B in sequences of 8,192, on",
        f"`{H100}`.",
        "Of its limit: the same without offload, were there enough memory; of parameters, the same with the "
        "optimizer alone. What the columns are is in [../README.md](../README.md).", "", table])
    print(f"## {TITLE}\n\n{text}")
    if args.markdown:
        put_section(args.markdown, TITLE, text)


if __name__ == "__main__":
    main()
