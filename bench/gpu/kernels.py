"""What an H100's compiler makes of the pieces of model.fused, without an H100: registers, spills, memory.

    python -m bench.gpu.kernels --markdown bench/results/kernels.md    # a minute; needs the package triton

torch compiles a piece for several tiles, of which it takes the fastest on the GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import triton

from tests.loopback import h100
from threed.base.quantity import show_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    lines = ["| dtype | piece | way | kernel | tiles | registers | spilled | shared | code |",
             "|---|---|---|--:|---|--:|--:|--:|--:|"]
    for name, dtype in DTYPES.items():
        for row in h100.kernels(dtype):
            sizes = " | ".join(map(show_bytes, (row.spilled, row.shared, row.code)))
            lines.append(f"| {name} | {row.piece} | {row.way} | {row.number + 1} | {row.tile} | "
                         f"{row.registers} | {sizes} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(
            "# Fused pieces, compiled for an H100\n\n`python -m bench.gpu.kernels --markdown "
            f"bench/results/kernels.md`: sm_90a, torch {torch.__version__}, triton {triton.__version__}, "
            "on a machine without a GPU; see\n[bench/README.md](../README.md).\n\nThe sizes of Llama 3 8B, a "
            "sequence of 8,192 tokens. Registers and spilled bytes are those of a thread, as ptxas says;\nan "
            f"SM has 65,536 registers.\n\n{text}")


if __name__ == "__main__":
    main()
