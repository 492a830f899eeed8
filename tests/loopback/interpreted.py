"""What tests/loopback/test_loss_kernel.py has computed in a process of its own, whose kernels Triton's
interpreter runs on a CPU. (Triton reads TRITON_INTERPRET when it is imported: no process can do both.)"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy as exact

from tests.harness import Ranks, loopback, tiny
from tests.loopback import test_transient
from threed.base.mesh import Mesh
from threed.engine.loopback import ThreadGroup, World
from threed.tensor import fused_loss
from threed.tensor.alive import Alive
from threed.tensor.fused import Fused
from threed.tensor.fused_loss import Chunks, LossKernels
from threed.tensor.layers import vocab_parallel_cross_entropy
from threed.tensor.softmax import add_to_softmax, cross_entropy_of

ULP = {torch.float32: 0.0, torch.bfloat16: 2.0 ** -7, torch.float16: 2.0 ** -10}  # of the last bit, at most
LOCK = threading.Lock()  # the interpreter is no matter of threads, and ranks are threads here


class Interpreted:
    """The kernels, one call at a time."""

    calls: ClassVar[Counter[str]] = Counter()
    tidy = False  # what the interpreter holds of a call's tensors, in a ring, goes at once

    @staticmethod
    def largest(logits: torch.Tensor, real: int) -> None:
        """`statistics` finds it."""

    @classmethod
    def statistics(cls, *arguments: Any) -> Any:
        return cls._call("statistics", arguments)

    @classmethod
    def gradient(cls, *arguments: Any) -> Any:
        return cls._call("gradient", arguments)

    @classmethod
    def _call(cls, name: str, arguments: Sequence[Any]) -> Any:
        from threed.tensor.loss_kernel import TritonKernels

        with LOCK:
            cls.calls[name] += 1
            try:
                return getattr(TritonKernels, name)(*arguments)
            finally:
                if cls.tidy:
                    gc.collect()


@contextmanager
def kernels_on_cpu() -> Iterator[Counter[str]]:
    """model.fused has the loss's kernels on this CPU."""
    Interpreted.calls.clear()
    with mock.patch.object(Fused, "kernels", lambda self, device: Interpreted):
        yield Interpreted.calls


def by_ranks(tp: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """work(group) on each rank of tp."""
    world, results = World(Mesh(tp=tp)), [None] * tp

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup("tp", range(tp), rank, Counter(), world))
        except BaseException as error:
            world.fail(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure
    return results


Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(sizes: Sequence[int], vocab: int, dtype: torch.dtype, scale: float = 3.0) -> Drawn:
    """Logits [S, B, V], labels, and the gradient of each token's loss: some are 0, as of labels that do not
    count."""
    generator = torch.Generator().manual_seed(sum(sizes) + vocab)
    logits = scale * torch.randn(*sizes, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, tuple(sizes[:2]), generator=generator)
    weights = torch.rand(*sizes[:2], generator=generator)
    return logits.to(dtype), labels, weights.masked_fill(weights < 0.2, 0.0)


def way(name: str, tiles: int) -> Callable[..., torch.Tensor]:
    """(logits of a rank, labels, vocab, group) -> losses: by kernels, in chunks in place, or plain."""
    kernels: LossKernels = Interpreted if name == "kernels" else Chunks(2)  # pyright: ignore

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab: int, group: ThreadGroup) -> torch.Tensor:
        if tiles > 1:
            running, width = None, logits.shape[-1] // tiles
            for tile, part in enumerate(logits.split(width, -1)):
                first = (tile * group.size() + group.rank()) * width
                given = running, part.clone(), labels, first, vocab
                running = (add_to_softmax(*given) if name == "plain" else
                           fused_loss.add_to_softmax(*given, kernels))
            assert running is not None
            return cross_entropy_of(running, group)
        if name != "plain":
            return fused_loss.cross_entropy(logits, labels, vocab, group, kernels)
        return vocab_parallel_cross_entropy(logits, labels, vocab, group)

    return loss


def results(name: str, given: Drawn, vocab: int, tp: int = 1, tiles: int = 1) -> tuple[torch.Tensor, ...]:
    """Losses [S, B] and the gradient of all logits, of a vocabulary cut over tp and into tiles."""
    logits, labels, of_loss = given
    # a tile has a run of the vocabulary, and a rank a run of the tile
    parts = logits.unflatten(-1, (tiles, tp, -1)).movedim(-2, 0).flatten(-2)

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = parts[group.rank()].clone().requires_grad_()
        losses = way(name, tiles)(leaf * 1, labels, vocab, group)
        losses.backward(of_loss)
        assert leaf.grad is not None
        return losses.detach(), leaf.grad

    ranks = by_ranks(tp, work)
    for losses, _ in ranks:
        torch.testing.assert_close(losses, ranks[0][0], rtol=0.0, atol=0.0, equal_nan=True)
    grads = torch.stack([grad.unflatten(-1, (tiles, -1)) for _, grad in ranks], -2)
    return ranks[0][0], grads.flatten(-3)


def compare(sizes: Sequence[int], vocab: int, dtype: torch.dtype, tp: int = 1, tiles: int = 1) -> None:
    """Kernels against the plain loss and against torch's in fp64: losses and gradients within 1e-5, and where
    these are rounded to 16 bits, to a neighbour of the plain one."""
    given = drawn(sizes, vocab, dtype)
    loss, grad = results("kernels", given, vocab, tp, tiles)
    plain_loss, plain = results("plain", given, vocab, tp, tiles)
    assert loss.dtype == torch.float32 and grad.dtype == dtype and not grad[..., vocab:].any()
    leaf = given[0].double().requires_grad_()
    want = exact(leaf[..., :vocab].permute(0, 2, 1), given[1], reduction="none")
    want.backward(given[2].double())
    assert leaf.grad is not None
    largest = float(leaf.grad.abs().max())
    for other_loss, other in ((plain_loss, plain), (want.detach(), leaf.grad)):
        torch.testing.assert_close(loss.double(), other_loss.double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), other.double(), rtol=ULP[dtype], atol=1e-5 * largest)


def compare_extremes(dtype: torch.dtype) -> None:
    """Logits near the dtype's end, a block that is all -inf, and what is no number."""
    large = 6e4 if dtype == torch.float16 else 1e6
    logits, labels, of_loss = drawn((6, 1, 5000), 5000, dtype)
    of_loss.fill_(1.0)
    logits[0] *= large / 30
    logits[1] -= large
    logits[2, :, :4096], labels[2] = -torch.inf, 4999
    logits[3, :, 4096:], labels[3] = -torch.inf, 7
    logits[4, :, 100], logits[5, :, 100] = torch.inf, torch.nan
    given = logits, labels, of_loss
    (loss, grad), (want, wanted) = (results(name, given, 5000) for name in ("kernels", "plain"))
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(grad[:4], wanted[:4], rtol=ULP[dtype], atol=1e-5)
    assert loss[:4].isfinite().all() and loss[4:].isnan().all() and grad[4:].isnan().any(-1).all()


def compare_runs(overrides: Sequence[str], steps: int = 2) -> tuple[Ranks, Counter[str]]:
    """A whole run by the interpreted kernels; which were called."""
    with kernels_on_cpu() as calls:
        return loopback(tiny(*overrides, "model.fused=auto"), steps), Counter(calls)


def held(overrides: Sequence[str]) -> None:
    """What instructions hold beside their slots, by kernels, is what the plan says."""
    with pytest.MonkeyPatch.context() as patched, kernels_on_cpu() as calls:
        test_transient.alike(patched)
        patched.setattr(Interpreted, "tidy", True)
        gc.collect()
        gc.freeze()  # what is there by now need not be looked at again
        test_transient.compare(tiny(*test_transient.SIZES, *overrides, "model.fused=auto"))
        assert calls["statistics"] and calls["gradient"]


def written_in_place(name: str) -> None:
    """The gradient is in the logits' memory, after backward and not before; beside it a step makes some
    numbers a token. Whoever has saved the logits gets an error, not the gradient."""
    size = S, B, V = 4, 3, 500
    logits, labels, of_loss = drawn(size, V, torch.bfloat16)
    compute, group, seen = way(name, 1), ThreadGroup("tp", (0,), 0, Counter(), World(Mesh())), []
    given = logits.clone().requires_grad_()
    made = given.view(S, B, V)  # no leaf, and no copy
    made.register_hook(lambda grad: seen.append(grad.data_ptr()))
    with Alive() as alive:
        losses = compute(made, labels, V, group)
        assert torch.equal(given, logits) and losses.requires_grad
        before = alive.peak = alive.bytes()
        losses.backward(of_loss)
    assert seen == [given.data_ptr()] and not torch.equal(given, logits)
    if name == "kernels":
        assert alive.peak - before <= 3 * losses.nbytes
    with torch.no_grad():  # evaluation
        kept = logits.clone()
        compute(kept, labels, V, group)
        assert torch.equal(kept, logits)
    other = logits.float().requires_grad_()
    made = other.view(S, B, V)
    squares = made.square().sum(-1)  # what was computed first has its backward last
    both = compute(made, labels, V, group) + squares
    try:
        both.backward(of_loss)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("the square's backward has read the loss's gradient")
