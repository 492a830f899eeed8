"""Megatron-core's partitioned layers with our own forward and backward over `comm`.

Megatron-core's classes decide how a layer is cut and hold the parameters; the forward here is ours, so that
it runs on CPU and GPU alike, every byte over tp is counted, and the weight gradient is a separate product.

Shapes: S sequence (cut by tp under sequence parallelism: s), B micro-batch, H hidden, I and O input and
output sizes, small letters where a dim is cut over tp. Activations are [S, B, H].
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F

from threed.comm.group import Group
from threed.tensor import adapters
from threed.tensor.adapters import Added, Half
from threed.tensor.fused import Fused
from threed.tensor.pieces import Separate
from threed.tensor.table_rows import rows_of

# What megatron-core imports where it is installed, and threed does not use. wandb and tensorboard take a
# second each, and wandb makes folders in TMPDIR, which a killed process leaves. The others are for GPUs:
# some ask at their import what GPU there is, which starts CUDA (Transformer Engine beside flash-attn
# does), and a launcher forks its ranks.
EXTRAS = ("wandb", "torch.utils.tensorboard", "transformer_engine", "transformer_engine_torch", "apex",
          "amp_C", "flash_attn", "flash_attn_interface", "flashinfer", "deep_ep",
          "fused_weight_gradient_mlp_cuda", "torch_memory_saver")


@contextlib.contextmanager
def _without_extras() -> Iterator[None]:
    """Import megatron-core without its warnings about missing packages, and without EXTRAS, except those
    that a script has imported itself. torch's compiler takes two seconds to import. It is imported when one
    of megatron-core's compiled fusions is called: threed calls none."""
    hidden = [name for name in EXTRAS if name not in sys.modules]
    compiler = torch.compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore  (None: Python says that it is missing)
            torch.compile = _compiled_when_called
            yield
        finally:
            torch.compile = compiler
            for name in hidden:
                del sys.modules[name]


def _compiled_when_called(function: Any = None, **settings: Any) -> Any:
    """`torch.compile`, at the first call of what it returns."""
    if function is None:
        return partial(_compiled_when_called, **settings)
    compiled = cache(lambda: torch.compile(function, **settings))
    return wraps(function)(lambda *inputs, **named: compiled()(*inputs, **named))


with _without_extras():
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers as megatron
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy


class WeightGrads:
    """Adds weight gradients to the parameters' gradients, or, during BACKWARD_INPUT, delays them.

    While `put_off` is a list, layers append to it a function that computes their weight gradient later. There
    is one object a rank, which its layers and parameters share.
    """

    def __init__(self) -> None:
        self.put_off: list[Callable[[], Any]] | None = None
        # (a unit's gradient, number of the parameter) of each addition, while a graph is recorded
        self.taken: list[Any] | None = None

    def take(self, weight: torch.Tensor, grad: torch.Tensor,
             x: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """The gradient of `weight` from its product's output gradient and its input, which `x` returns.
        Returns None where autograd must not add the gradient: `weight.add_product` gets the factors instead,
        now or later."""
        return self.take_all([(weight, grad)], x)[0]

    def take_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
                 x: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
        """As `take`, of several weights with one input."""
        # the graph of a delayed product would keep the unit's input alive
        pairs = [(weight, grad.detach()) for weight, grad in pairs]

        def products() -> list[torch.Tensor | None]:
            """Of [S, B, O], [S, B, I] as [O, SB] x [SB, I]."""
            whole = x()
            right, made = whole.reshape(-1, whole.shape[-1]), []
            for weight, grad in pairs:
                left, add = grad.reshape(-1, grad.shape[-1]).t(), getattr(weight, "add_product", None)
                # None: a parameter whose gradient autograd accumulates
                made.append(left @ right if add is None else add(left, right))
            return made

        if self.put_off is None:
            return products()
        assert all(hasattr(weight, "add_product") for weight, _ in pairs)
        self.put_off.append(products)
        return [None] * len(pairs)

    def take_grouped(self, weight: torch.Tensor, grad: torch.Tensor, x: Callable[[], torch.Tensor],
                     slices: Callable[[], Sequence[slice]]) -> torch.Tensor | None:
        """As `take`, of a weight [e, ..., I] of which each matrix has some of the rows of [N, O] and
        [N, I]. `slices` returns those of each."""
        grad = grad.detach()

        def products() -> torch.Tensor | None:
            right, add = x(), getattr(weight, "add_products", None)
            pairs = [(grad[rows].t(), right[rows]) for rows in slices()]
            made = torch.stack([left @ right for left, right in pairs]) if add is None else add(pairs)
            return made if made is None else made.view_as(weight)

        if self.put_off is None:
            return products()
        assert hasattr(weight, "add_products")
        self.put_off.append(products)
        return None

    def take_count(self, weight: torch.Tensor, count: torch.Tensor) -> torch.Tensor | None:
        """As `take`, of a parameter whose gradient is a count: it is added in fp32, exactly."""
        add = getattr(weight, "add_count", None)
        if add is None:
            return count.to(weight.dtype)
        if self.put_off is None:
            add(count)
        else:
            self.put_off.append(lambda: add(count))
        return None

    def of_adapters(self, matrices: Sequence[torch.Tensor], halves: Sequence[Half],
                    hidden: Sequence[torch.Tensor],
                    x: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of adapters' matrices, as `take` returns them. `hidden`: what adapters.add has
        returned; `x`: returns the linear's input."""
        if not matrices:
            return []
        firsts = zip(matrices[::2], halves, strict=True)
        of_a = self.take_all([(a, half.hidden_grad) for a, half in firsts], x)
        of_b = [self.take(b, half.grad, adapters.again(each.detach()))
                for b, half, each in zip(matrices[1::2], halves, hidden, strict=True)]
        return [grad for pair in zip(of_a, of_b, strict=True) for grad in pair]


def parallel_config(group: Group, sequence_parallel: bool, dtype: torch.dtype) -> ModelParallelConfig:
    """Megatron-core's config for layers that draw no initial values: we draw them ourselves (see
    tensor/random)."""
    return ModelParallelConfig(tensor_model_parallel_size=group.size(), sequence_parallel=sequence_parallel,
                               params_dtype=dtype, use_cpu_initialization=True, perform_initialization=False)


def _gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[s, B, ...] -> [S, B, ...]."""
    return _begin_gather(x, group)()


def _begin_gather(x: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Begin to gather, and return the function that waits for the result."""
    output = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    handle = group.all_gather(output, x.contiguous())

    def end() -> torch.Tensor:
        handle.wait()
        return output

    return end


def _scatter_sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[S, B, ...], a part of a sum on each rank -> [s, B, ...], the sum."""
    output = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    group.reduce_scatter(output, x.contiguous()).wait()
    return output


class _Column(torch.autograd.Function):
    """[S or s, B, I] -> [S, B, o]: the weight is cut by rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Any,
                added: Added, *matrices: torch.Tensor):
        ctx.layer, ctx.weight, ctx.added, ctx.matrices = layer, weight, added, matrices
        whole = _gather(x, layer.group) if layer.sp else x
        output = F.linear(whole, weight, bias)
        hidden = adapters.add(output, whole, added.of(matrices))
        ctx.keeps = ctx.needs_input_grad[1] or bool(matrices)  # what weights' gradients need
        ctx.save_for_backward(x if ctx.keeps else None, weight, *matrices, *hidden)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        grad, (x, weight, *rest) = grads[0], ctx.saved_tensors
        matrices, hidden = rest[:len(ctx.matrices)], rest[len(ctx.matrices):]
        group, sp, weight_grads = ctx.layer.group, ctx.layer.sp, ctx.layer.weight_grads
        x = x.detach() if ctx.keeps else x

        def whole() -> torch.Tensor:
            return _gather(x, group) if sp else x

        # Of x, only this rank's tokens were saved. They are gathered beside the product for x's gradient, and
        # that gradient is summed beside the product for the weight's: neither waits behind the other.
        operand = _begin_gather(x, group) if sp and ctx.keeps and weight_grads.put_off is None else whole
        grad_x = grad @ weight
        halves = adapters.input_half(grad, grad_x, ctx.added.of(matrices))
        if sp:
            output = grad_x.new_empty((grad_x.shape[0] // group.size(), *grad_x.shape[1:]))
            handle, grad_x = group.reduce_scatter(output, grad_x), output
        else:
            handle = group.all_reduce(grad_x)
        grad_weight = weight_grads.take(ctx.weight, grad, operand) if ctx.needs_input_grad[1] else None
        of_matrices = weight_grads.of_adapters(ctx.matrices, halves, hidden, operand)
        grad_bias = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        handle.wait()
        return grad_x, grad_weight, grad_bias, None, None, *of_matrices


class _Row(torch.autograd.Function):
    """[S, B, i] -> [S or s, B, O]: the weight is cut by columns; the product is summed over tp."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Any, added: Added,
                *matrices: torch.Tensor):
        ctx.layer, ctx.weight, ctx.added, ctx.matrices = layer, weight, added, matrices
        output = x @ weight.t()
        hidden = adapters.add(output, x, added.of(matrices))
        ctx.keeps = ctx.needs_input_grad[1] or bool(matrices)
        ctx.save_for_backward(x if ctx.keeps else None, weight, *matrices, *hidden)
        if layer.sp:
            return _scatter_sum(output, layer.group)
        layer.group.all_reduce(output).wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        x, weight, *rest = ctx.saved_tensors
        matrices, hidden = rest[:len(ctx.matrices)], rest[len(ctx.matrices):]
        grad = _gather(grads[0], ctx.layer.group) if ctx.layer.sp else grads[0]
        grad_x, weight_grads = grad @ weight, ctx.layer.weight_grads
        halves = adapters.input_half(grad, grad_x, ctx.added.of(matrices))
        operand = adapters.again(x.detach() if ctx.keeps else x)
        grad_weight = weight_grads.take(ctx.weight, grad, operand) if ctx.needs_input_grad[1] else None
        return (grad_x, grad_weight, None, None,
                *weight_grads.of_adapters(ctx.matrices, halves, hidden, operand))


class _SumOverTp(torch.autograd.Function):
    """Sums the parts of all ranks: [S, B, H] -> [S or s, B, H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, sp: bool):
        ctx.group, ctx.sp = group, sp
        if sp:
            return _scatter_sum(x, group)
        x = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return (_gather(grads[0], ctx.group) if ctx.sp else grads[0]), None, None


class _Total(torch.autograd.Function):
    """Sums the parts of all ranks; each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group):
        total = part.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return grads[0], None


def total(part: torch.Tensor, group: Group) -> torch.Tensor:
    return _Total.apply(part, group)  # pyright: ignore[reportReturnType]


class ColumnParallelLinear(megatron.ColumnParallelLinear):
    """y = x W^T + b with W cut by rows over tp. [S or s, B, I] -> [S, B, O/tp]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, config: ModelParallelConfig, group: Group,
                 weight_grads: WeightGrads):
        super().__init__(inputs, outputs, config=config, init_method=torch.nn.init.zeros_, bias=bias,
                         tp_group=group)  # pyright: ignore[reportArgumentType]
        self.group, self.sp, self.weight_grads = group, config.sequence_parallel, weight_grads

    def forward(self, x: torch.Tensor,  # pyright: ignore[reportIncompatibleMethodOverride]
                added: Sequence[tuple[Any, ...]] = (), bias: bool = True) -> torch.Tensor:
        """`added`: adapters, as Factors. `bias`: whether backward has the gradient of the bias; else a piece
        behind it has."""
        rest, matrices = adapters.separated(added)
        own = self.bias if bias or self.bias is None else self.bias.detach()
        return _Column.apply(x, self.weight, own, self, rest, *matrices)  # pyright: ignore


class RowParallelLinear(megatron.RowParallelLinear):
    """y = x W^T + b with W cut by columns over tp. [S, B, I/tp] -> [S or s, B, O]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, config: ModelParallelConfig, group: Group,
                 weight_grads: WeightGrads):
        super().__init__(inputs, outputs, config=config, init_method=torch.nn.init.zeros_, bias=bias,
                         input_is_parallel=True, skip_bias_add=False,
                         tp_group=group)  # pyright: ignore[reportArgumentType]
        self.group, self.sp, self.weight_grads = group, config.sequence_parallel, weight_grads

    def forward(self, x: torch.Tensor,  # pyright: ignore[reportIncompatibleMethodOverride]
                added: Sequence[tuple[Any, ...]] = (), bias: bool = True) -> torch.Tensor:
        """`added`: adapters, as Factors. `bias`: whether it is added; else a piece behind it does that."""
        rest, matrices = adapters.separated(added)
        output = _Row.apply(x, self.weight, self, rest, *matrices)
        return output + self.bias if bias and self.bias is not None else output  # pyright: ignore


class VocabParallelEmbedding(megatron.VocabParallelEmbedding):
    """Token ids [B, S] -> [S or s, B, H], with rows of the table cut over tp. A tile gives zeros for ids that
    it does not have."""

    def __init__(self, vocab: int, hidden: int, config: ModelParallelConfig, group: Group,
                 weight_grads: WeightGrads, fused: Fused | None = None, part: tuple[int, int] = (0, 1)):
        """`fused`: where the gradients of rows may be a piece of it. `part`: a tile, of how many."""
        tile, tiles = part
        super().__init__(vocab // tiles, hidden, init_method=torch.nn.init.zeros_, config=config,
                         tp_group=group)  # pyright: ignore[reportArgumentType]
        self.group, self.sp, self.whole = group, config.sequence_parallel, group.size() == tiles == 1
        self.weight_grads, self.fused = weight_grads, fused
        self.vocab_start_index += tile * (vocab // tiles)
        self.vocab_end_index += tile * (vocab // tiles)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        part = self._part(tokens.t())
        if self.group.size() == 1:
            return part
        return _SumOverTp.apply(part, self.group, self.sp)  # pyright: ignore[reportReturnType]

    def _part(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows that this rank (and tile) has, zeros for others. [S, B] -> [S, B, H]."""
        sums = self.fused.sums(tokens.device) if self.fused is not None else Separate
        if self.whole and sums is Separate:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < self.vocab_start_index) | (tokens >= self.vocab_end_index)
        if sums is not Separate:
            return rows_of(self.weight, tokens if self.whole else
                           (tokens - self.vocab_start_index).masked_fill_(elsewhere, len(self.weight)),
                           self.whole, (self.weight_grads, sums))
        part = F.embedding((tokens - self.vocab_start_index).masked_fill(elsewhere, 0), self.weight)
        return part.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    """Megatron-core's vocab-parallel cross entropy, its three sums over our group. [S, B, v], [S, B] -> [S,
    B]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Group):
        steps: Any = VocabParallelCrossEntropy
        first = group.rank() * logits.shape[-1]
        logits, largest = steps.calculate_logits_max(logits)
        group.all_reduce(largest, "max").wait()
        mask, local_target, predicted, total, exponents = steps.calculate_predicted_logits(
            logits, target, largest, first, first + logits.shape[-1])
        group.all_reduce(predicted).wait()
        group.all_reduce(total).wait()
        softmax, loss = steps.calculate_cross_entropy_loss(exponents, predicted, total)
        ctx.save_for_backward(softmax, mask, local_target)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        steps: Any = VocabParallelCrossEntropy
        softmax, mask, local_target = ctx.saved_tensors
        flat, rows, update, grad = steps.prepare_gradient_calculation_operands(softmax, mask)
        return steps.calculate_gradients(flat, rows, local_target, update, grad, grads[0]), None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, target: torch.Tensor, vocab: int,
                                 group: Group) -> torch.Tensor:
    """Loss of each token in fp32, [S, B]. It overwrites `logits` [S, B, V/tp]. Ids from `vocab` on are
    padding and are masked."""
    width = logits.shape[-1]
    real = min(max(vocab - group.rank() * width, 0), width)
    if real < width:
        logits = torch.cat([logits[..., :real],
                            logits.new_full((*logits.shape[:-1], width - real), -torch.inf)], -1)
    return _CrossEntropy.apply(logits.float(), target.contiguous(), group)  # pyright: ignore[reportReturnType]
