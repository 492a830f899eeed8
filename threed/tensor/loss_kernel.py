# pyright: reportMissingImports=false, reportIndexIssue=false
"""The loss's kernels, in Triton: what needs all logits of a token reads them once, and the gradient is
written over them.

With 16 bits that is 2 bytes a logit in forward and 4 in backward; separate operations move 52. Between the
two kernels, the statistics of a token (the largest logit, the sum of exponentials, the label's logit) are
combined over tp (`fused_loss`).

The sum of exponentials is a running one (Milakov and Gimelshein 2018): where a larger logit turns up, what
has been summed so far is multiplied by exp(old - new). Everything is computed in fp32.

Only `Fused.kernels` imports this module: the package triton comes with torch for GPUs, and with no other.

Shapes: S sequence, B micro-batch, T tokens, S x B, V the rank's part of the vocabulary (of a tile).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits that a program holds at a time, and its warps: 16 logits a thread, two loads of 16 bytes.
BLOCK, WARPS = 4096, 8


@triton.jit
def statistics_kernel(logits, places, numbers, label, width, real, BLOCK: tl.constexpr):
    """A program for each token. The first `real` of its `width` logits are no padding."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    most = -float("inf")
    sums = tl.zeros([BLOCK], tl.float32)  # one for each column of the block: they are added up at the end
    for start in range(0, real, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < real, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(values, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # the difference of two of them is no number
        sums = sums * tl.exp(most - base) + tl.exp(values - base)
        most = higher
    place = tl.load(places + row)
    here = (place >= 0) & (place < real)
    tl.store(numbers + row, most)
    tl.store(numbers + tl.num_programs(0) + row, tl.sum(sums, 0))
    tl.store(label + row, tl.load(logits + place, mask=here, other=0.0).to(tl.float32))


@triton.jit
def gradient_kernel(logits, places, numbers, grads, width, real, BLOCK: tl.constexpr):
    """A program for each block of a token's logits."""
    blocks = tl.cdiv(width, BLOCK)
    tokens = tl.num_programs(0) // blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    logits += row * width + columns
    of_sum = tl.load(grads + row) / tl.load(numbers + tokens + row)
    values = tl.load(logits, mask=columns < real, other=0.0).to(tl.float32)
    written = tl.exp(values - tl.load(numbers + row)) * of_sum
    at_label = columns == tl.load(places + row).to(tl.int32)
    written += tl.where(at_label, tl.load(grads + tokens + row), 0.0)
    tl.store(logits, tl.where(columns < real, written, 0.0), mask=columns < width)


class TritonKernels:
    """As fused_loss.LossKernels."""

    @staticmethod
    def largest(logits: torch.Tensor, real: int) -> None:
        """`statistics` finds it."""

    @staticmethod
    def statistics(logits: torch.Tensor, places: torch.Tensor, real: int,
                   largest: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        label = places.new_empty(places.shape, dtype=torch.float32)
        numbers, width = label.new_empty(2, *label.shape), logits.shape[-1]
        statistics_kernel[(label.numel(),)](logits, places, numbers, label, width, real, BLOCK=_block(width),
                                            num_warps=WARPS)  # pyright: ignore[reportCallIssue]
        return numbers, label

    @staticmethod
    def gradient(logits: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor, of_sum: torch.Tensor,
                 of_label: torch.Tensor | None, real: int) -> torch.Tensor:
        """Written over the logits. Autograd is told, so that whoever has saved them for a backward that is
        still to come gets an error, not the gradient."""
        grads = torch.stack([of_sum, -of_sum if of_label is None else of_label])
        width, block = logits.shape[-1], _block(logits.shape[-1])
        programs = places.numel() * -(-width // block)
        gradient_kernel[(programs,)](logits, places, numbers, grads, width, real, BLOCK=block,
                                     num_warps=WARPS)  # pyright: ignore[reportCallIssue]
        torch.autograd.graph.increment_version(logits)
        return logits.detach()


def _block(width: int) -> int:
    """A power of two: what triton's ranges must be."""
    return min(BLOCK, 1 << (width - 1).bit_length())
