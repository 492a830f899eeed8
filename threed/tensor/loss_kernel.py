"""The loss's kernels, in Triton: what needs all logits of a token reads them once, and the gradient is
written over them.

With 16 bits that is 2 bytes a logit in forward and 4 in backward; separate operations move 54. Between the
two kernels, the statistics of a token (the largest logit, the sum of exponentials, the label's logit) are
combined over tp (`fused_loss`).

The sum of exponentials is a running one (Milakov and Gimelshein 2018): where a larger logit turns up, what
has been summed so far is multiplied by exp(old - new). Everything is computed in fp32.

Only `Fused.kernels` imports this module: the package triton comes with torch for GPUs, and with no other.

Shapes: T tokens, V the rank's part of the vocabulary (of a tile).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits that a program holds at a time, and its warps: 16 logits a thread, two loads of 16 bytes.
BLOCK, WARPS = 4096, 8


@triton.jit
def statistics_kernel(logits, labels, largest, total, label, width, first, real, BLOCK: tl.constexpr):
    """A program for each token. `first`: the id of the first logit; `real`: how many of the `width` are no
    padding."""
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
    place = tl.load(labels + row) - first
    here = (place >= 0) & (place < real)
    tl.store(largest + row, most)
    tl.store(total + row, tl.sum(sums, 0))
    tl.store(label + row, tl.load(logits + place, mask=here, other=0.0).to(tl.float32))


@triton.jit
def gradient_kernel(logits, labels, largest, total, of_sum, of_label, width, first, real, blocks,
                    BLOCK: tl.constexpr):
    """A program for each block of a token's logits: over each logit, exp(logit - largest) / total * of_sum,
    and of_label more at the label; 0 over padding."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    places = logits + row * width + columns
    scale = tl.load(of_sum + row) / tl.load(total + row)
    place = (tl.load(labels + row) - first).to(tl.int32)
    values = tl.load(places, mask=columns < real, other=0.0).to(tl.float32)
    grads = tl.exp(values - tl.load(largest + row)) * scale
    grads += tl.where(columns == place, tl.load(of_label + row), 0.0)
    tl.store(places, tl.where(columns < real, grads, 0.0), mask=columns < width)


class Kernels:
    """As fused_loss.LossKernels."""

    @staticmethod
    def statistics(logits: torch.Tensor, labels: torch.Tensor, first: int,
                   real: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width, tokens = logits.shape[-1], labels.numel()
        largest, total, label = (labels.new_empty(labels.shape, dtype=torch.float32) for _ in range(3))
        statistics_kernel[(tokens,)](logits, labels, largest, total, label, width, first, real,
                                     BLOCK=_block(width), num_warps=WARPS)
        return largest, total, label

    @staticmethod
    def gradient(logits: torch.Tensor, labels: torch.Tensor, largest: torch.Tensor, total: torch.Tensor,
                 of_sum: torch.Tensor, of_label: torch.Tensor, ids: tuple[int, int]) -> None:
        (first, real), width, block = ids, logits.shape[-1], _block(logits.shape[-1])
        blocks = triton.cdiv(width, block)
        gradient_kernel[(labels.numel() * blocks,)](logits, labels, largest, total, of_sum, of_label, width,
                                                    first, real, blocks, BLOCK=block, num_warps=WARPS)


def _block(width: int) -> int:
    return min(BLOCK, triton.next_power_of_2(width))
