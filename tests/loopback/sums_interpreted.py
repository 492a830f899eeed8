"""What tests/loopback/test_pieces.py has computed in a process whose kernels Triton's interpreter runs on a
CPU: pieces with sums over tokens, against the same operations in fp64 and in fp32."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.harness import Ranks, batches, loopback, tiny
from threed.comm.group import Comm
from threed.schema import Config
from threed.tensor import pieces
from threed.tensor.context import Batch
from threed.tensor.fused import Fused
from threed.tensor.pieces import DropOf, Kernels, Normed, Separate, Statistics

ULP = {torch.float32: 1e-6, torch.bfloat16: 2.0 ** -7, torch.float16: 2.0 ** -10}  # of the last bit, at most
LOCK = threading.Lock()  # the interpreter is no matter of threads, and ranks are threads here
CALLS: Counter[str] = Counter()


def start(name: str, *given: Any, **shape: Any) -> None:
    from threed.tensor import pieces_kernel

    with LOCK:
        CALLS[name] += 1
        pieces_kernel.start(name, *given, **shape)


KERNELS = Kernels(start)
Made = Sequence[torch.Tensor | None]


def near(name: str, made: Made, exact: Made, dtype: torch.dtype) -> None:
    """fp32: within 1e-6 of the largest; 16 bits: a neighbour of the exact result, rounded. (Sums over
    tokens are in fp32.)"""
    for value, want in zip(made, exact, strict=True):
        assert (value is None) == (want is None), name
        if value is None or want is None:
            continue
        limit = ULP[value.dtype]
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(value.double(), want.double(), rtol=limit,
                                   atol=1e-6 * max(1.0, largest), msg=lambda text: f"{name}: {text}")
        assert value.dtype in (dtype, torch.float32)


def drawn(seed: int, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)


def wide(values: Sequence[Any]) -> list[Any]:
    return [value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in values]


def gelus(dtype: torch.dtype) -> None:
    for seq, batch, width in ((7, 3, 16), (1, 1, 1), (33, 2, 300), (2, 1, 4100), (70, 16, 8)):
        x, grad = (3 * drawn(seed, seq, batch, width, dtype=dtype) for seed in (1, 2))
        near("gelu", [KERNELS.gelu(x)], [Separate.gelu(x.double())], dtype)
        for sums in (True, False):
            near(f"gelu {seq} {batch} {width}", KERNELS.gelu_backward(x, grad, sums),
                 Separate.gelu_backward(x.double(), grad.double(), sums), dtype)
    far = torch.tensor([[[-3e4, -50.0, -9.0, 0.0, 9.0, 50.0, 3e4, 1e-4]]], dtype=dtype)
    near("ends", KERNELS.gelu_backward(far, torch.ones_like(far), True),
         Separate.gelu_backward(far.double(), torch.ones_like(far).double(), True), dtype)


def joins(dtype: torch.dtype) -> None:
    """Gradients as attention leaves them: of heads first, or of tokens first."""
    for (seq, batch, kv, group, size), order in itertools.product(
            ((5, 2, 3, 1, 16), (33, 2, 2, 4, 24), (70, 1, 1, 1, 64), (2, 3, 2, 2, 1)), range(3)):
        grads = []
        for seed, heads in enumerate((group, 1, 1)):
            if order == 0:
                each = drawn(seed, batch, kv * heads, seq, size, dtype=dtype).permute(2, 0, 1, 3)
            elif order == 1:
                each = drawn(seed, seq, batch, kv * heads, size, dtype=dtype)
            else:  # not even its numbers lie in a row
                each = drawn(seed, size, batch, kv * heads, seq, dtype=dtype).permute(3, 1, 2, 0)
            grads.append(each.unflatten(2, (kv, heads)))
        for sums in (True, False):
            made, added = KERNELS.joined(grads, sums)
            assert torch.equal(made, torch.cat(grads, -2))
            near("joined", [added], [Separate.joined(wide(grads), sums)[1]], dtype)


DROPPED = [None, DropOf(0.25, (3, "here"), torch.tensor([5, 2**40]), ((range(3, 6), range(9, 13)),)),
           DropOf(0.5, (4, "there"), torch.tensor([1, 2]), ((range(7),), (range(1, 8),)))]


def ends(dtype: torch.dtype) -> None:
    """A token's numbers fill a block, or one more does not fit, or it is one number."""
    CALLS.clear()
    compare_ends(dtype, 16, 33, 1)
    assert CALLS["ended_backward"] and not CALLS["columns"]


def wide_ends(dtype: torch.dtype) -> None:
    """Tokens so wide that no program of backward has all of their numbers."""
    CALLS.clear()
    with mock.patch.object(pieces, "WHOLE", 8), mock.patch.object(pieces, "strips", lambda *_: 3):
        compare_ends(dtype, 300)
    assert CALLS["columns"] > CALLS["means"] > 0 and not CALLS["ended_backward"]


def compare_ends(dtype: torch.dtype, *widths: int) -> None:
    """Each combination of part, bias, dropout and norm, in both directions."""
    seq, batch, number = 7, 2, 0
    for width, drop, has_part, has_bias, has_norm in itertools.product(
            widths, DROPPED, (True, False), (True, False), (True, False)):
        if (not has_part and (drop or has_bias)) or not (has_part or has_norm):
            continue
        number += 1
        x, part, grad, of_normed = (drawn(seed, seq, batch, width, dtype=dtype) for seed in range(4))
        bias, weight, shift = (drawn(seed, width, dtype=dtype) for seed in range(4, 7))
        given = (x, part if has_part else None, bias if has_bias else None)
        norm = Normed(weight, shift, 1e-5) if has_norm else None
        far = Normed(weight.double(), shift.double(), 1e-5) if has_norm else None
        stream, *rest = KERNELS.ended(*given, drop, norm)
        far_x, far_part, far_bias = wide(given)
        exact, *_ = Separate.ended(far_x, far_part, far_bias, drop, None)
        near("stream", [stream], [exact], dtype)
        # the norm is of the stream as it was stored
        _, *others = Separate.ended(stream.double(), None, None, None, far)
        near("norm", rest, others, dtype)
        kept = exactly = None
        if norm is not None:
            kept, exactly = Statistics(stream, *rest[1:]), Statistics(stream.double(), *others[1:])
        for wanted in itertools.product((True, False), (True, False)):
            wanted = wanted[0] and has_bias, wanted[1] and has_norm
            one = grad if number % 3 or not has_norm else None  # of a stream that nobody else reads
            made = KERNELS.ended_backward(one, of_normed if has_norm else None, kept, norm, drop, wanted)
            want = Separate.ended_backward(None if one is None else one.double(),
                                           of_normed.double() if has_norm else None, exactly, far, drop,
                                           wanted)
            if not wanted[1]:
                want = (*want[:3], None, None)
            near(f"{width} {drop} {has_part} {has_bias} {has_norm} {wanted}", made, want, dtype)


def rows(dtype: torch.dtype) -> None:
    """Ids that repeat, all of one, each another, and of other ranks; the sum's bits do not change."""
    draw = torch.Generator().manual_seed(3)
    for (seq, batch, width, vocab), into_dtype in itertools.product(
            ((9, 2, 24, 5), (40, 3, 16, 1), (6, 1, 1030, 600), (1, 1, 8, 4)), {dtype, torch.float32}):
        ids = torch.randint(0, vocab + 2, (seq, batch), generator=draw)
        grads, start_ = drawn(1, seq, batch, width, dtype=dtype), drawn(2, vocab, width, dtype=into_dtype)
        made, again, exact = start_.clone(), start_.clone(), start_.double()
        KERNELS.add_rows(made, ids, grads)
        KERNELS.add_rows(again, ids, grads)
        Separate.add_rows(exact, ids, grads.double())
        near("rows", [made], [exact], into_dtype)
        assert torch.equal(made, again)


@contextmanager
def sums_on_cpu() -> Iterator[Counter[str]]:
    """model.fused has the kernels on this CPU."""
    CALLS.clear()
    with mock.patch.object(Fused, "sums", lambda self, device: KERNELS):
        yield CALLS


def a_run(overrides: Sequence[str]) -> tuple[Ranks, Counter[str]]:
    """A step by the interpreted kernels; which were called."""
    with sums_on_cpu() as calls:
        return loopback(tiny(*overrides, "model.fused=auto"), 1), Counter(calls)


def again(config: Config, comm: Comm, step: int) -> Callable[[int], Batch]:
    """The same batch in each step: a model learns it."""
    return batches(config, comm, 0)


def a_curve(overrides: Sequence[str], steps: int) -> Ranks:
    """Steps by the interpreted kernels, whose sums have two strips: a program takes the interpreter long."""
    with sums_on_cpu(), mock.patch.object(pieces, "strips", lambda width, tokens, whole: min(2, tokens)):
        return loopback(tiny(*overrides, "model.fused=auto"), steps, data=again)
