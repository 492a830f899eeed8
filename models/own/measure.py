"""What a user layer is: its parameters, and what it costs and hands on, measured on tensors that
have shapes and no memory. After that these are plain values, as our own layers declare them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from threed.base.errors import InputError, ThreedError, line_of
from threed.models.measure import KernelCounter
from threed.models.own.spec import Spec
from threed.spec.kernels import Kernel, Moved
from threed.spec.parameter import Cost, Saved
from threed.tensor.alive import Alive
from threed.tensor.halves import Halves
from threed.tensor.layers import WeightGrads
from threed.tensor.packing import Packed, Schema
from threed.tensor.saving import SavingPolicy
from threed.tensor.shapes import Shapes


class Facts(NamedTuple):
    """What was measured of a layer."""

    out: Schema | None  # what it hands on; None: it is the last
    cost: Cost  # of a micro-batch
    draws: bool  # whether it draws random numbers, as dropout does
    together: tuple[str, ...]  # its matrices, if none of their gradients can wait for the weights' half
    counts: bool  # whether it is the last, and the loss of its output says by what it is to be divided


class LayerInputs(NamedTuple):
    """What a layer is called with when it is measured."""

    schema: Schema | None  # of what the layer before hands on; None: it is the first
    inputs: Callable[[], Any]  # makes inputs of a micro-batch
    loss: Callable[[Any], Any] | None  # output -> what the loss returns, of the last layer


@contextmanager
def measuring() -> Iterator[Shapes]:
    """Within the context, new tensors have no memory, and no generator advances."""
    with torch.random.fork_rng(devices=[]), Shapes(allow_non_fake_inputs=True) as mode:
        yield mode


def made_for_measuring(spec: Spec, name: str, mode: Shapes) -> torch.nn.Module:
    """A module without memory; one that cannot be made so is made with memory first."""
    try:
        return spec.module(name)
    except InputError:
        with unset_fake_temporarily():
            module = spec.module(name)
        for each in module.modules():
            for key, buffer in each.named_buffers(recurse=False):
                each._buffers[key] = mode.from_tensor(buffer)
            for key, weight in each.named_parameters(recurse=False):
                each._parameters[key] = torch.nn.Parameter(mode.from_tensor(weight.detach()),
                                                            weight.requires_grad)
        return module


def places_of(module: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Path of a parameter -> (module, name) of all places where it is; one that is in several has the first
    one's path."""
    first: dict[int, str] = {}
    found: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, weight in each._parameters.items():
            if weight is not None:
                path = first.setdefault(id(weight), f"{prefix}.{name}" if prefix else name)
                place = (each, name)
                if place not in found.setdefault(path, []):
                    found[path].append(place)
    return found


class Weight(NamedTuple):
    """A parameter of a layer."""

    shape: tuple[int, ...]
    linear: bool  # whether it is a matrix of torch.nn.Linear, wherever it is


def held_by(spec: Spec, name: str) -> dict[str, Weight]:
    """Path -> each parameter of a layer. InputError where one cannot be trained here."""
    with measuring() as mode:
        module = made_for_measuring(spec, name, mode)
        held = {}
        for path, places in places_of(module).items():
            weight = getattr(*places[0])
            if not weight.is_floating_point():
                raise InputError(f"layer {name}: parameter {path} is of {weight.dtype}: make it a buffer, or "
                                 "a parameter of floating-point numbers")
            if not weight.requires_grad:
                raise InputError(f"layer {name}: parameter {path} does not require a gradient: every "
                                 "parameter is trained here; make it a buffer, which stays as it is made")
            if not weight.dim():
                raise InputError(f"layer {name}: parameter {path} has no dims: give it the shape [1]")
            linear = all(isinstance(each, torch.nn.Linear) and key == "weight" for each, key in places)
            held[path] = Weight(tuple(weight.shape), linear)
        return held


def measure(spec: Spec, name: str, given: LayerInputs, dtype: torch.dtype) -> Facts:
    """Run a layer forward and backward. InputError where it cannot be a layer of a plan."""
    with measuring() as mode:
        try:
            return _Measuring(spec, name, given, dtype, mode).facts()
        except ThreedError:
            raise
        except Exception as error:
            what = str(error).strip().splitlines()
            raise InputError(f"layer {name} cannot be measured: {type(error).__name__}: "
                             f"{what[0] if what else ''}{line_of(error)}. It is run on tensors that have "
                             f"shapes and no values, with {_of(given)} in {str(dtype).removeprefix('torch.')}"
                             ) from error


def _of(given: LayerInputs) -> str:
    return f"the input {given.schema.text()}" if given.schema is not None else "inputs of the data set"


class _Measuring:
    def __init__(self, spec: Spec, name: str, given: LayerInputs, dtype: torch.dtype, mode: Shapes):
        self.spec, self.name, self.given, self.dtype = spec, name, given, dtype
        self.module = made_for_measuring(spec, name, mode).train()
        self.weights: dict[str, torch.nn.Parameter] = {}
        for path, places in places_of(self.module).items():
            weight = torch.nn.Parameter(torch.empty(getattr(*places[0]).shape, dtype=dtype))
            self.weights[path] = weight
            for module, key in places:
                module._parameters[key] = weight

    def facts(self) -> Facts:
        with _Draws() as draws, _constant(self.name, self.module), _kept_by_threed(self.name):
            out = self._forward(self._open()[0])
            schema = self._schema(out)
            again = self._schema(self._forward(self._open()[0]))
        if schema is not None and again is not None and schema.key() != again.key():
            raise InputError(f"layer {self.name} hands on {schema.text()}, and when it is called again "
                             f"{again.text()}: this must be the same in every call")
        counts = schema is None and isinstance(out, tuple)
        del out
        kernels, saved = self._whole()
        operands, together = self._in_halves()
        return Facts(schema, Cost(kernels, (Saved(f"activations of {self.name}", saved),), operands),
                     draws.found, together, counts)

    def _schema(self, out: Any) -> Schema | None:
        if self.given.loss is not None:
            _check_loss(self.name, out)
            return None
        try:
            schema = Schema.of(out)
        except ValueError as error:
            raise InputError(f"layer {self.name}: of what it returned, {error}") from None
        if not schema.grad_bytes:
            raise InputError(f"layer {self.name} hands on {schema.text() or 'nothing'}, and none of it needs "
                             "a gradient: the layers before could not learn")
        return schema

    def _open(self) -> tuple[Any, list[torch.Tensor]]:
        """A new input, and its leaves."""
        if self.given.schema is None:
            return self.given.inputs(), []
        stream = Packed(self.given.schema, self.dtype)
        return stream.open(stream.empty("act", torch.device("cpu")), True)

    def _forward(self, x: Any) -> Any:
        out = self.spec.call(self.module, x)
        return out if self.given.loss is None else self.given.loss(out)

    def _roots(self, out: Any) -> list[torch.Tensor]:
        if self.given.loss is not None:
            return [out[0] if isinstance(out, tuple) else out]
        return [each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and each.requires_grad]

    def _graph(self) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
        """The roots of a new graph, the gradients with which backward begins, and the leaves. Only the graph
        holds anything else."""
        x, leaves = self._open()
        roots = self._roots(self._forward(x))
        edges = list(map(torch.autograd.graph.get_gradient_edge, roots))
        grads = [torch.empty_like(root, memory_format=torch.contiguous_format) for root in roots]
        return edges, grads, leaves

    def _whole(self) -> tuple[tuple[Kernel, ...], int]:
        """Kernels of forward and backward, and the bytes that are kept in between."""
        own = {weight.untyped_storage()._cdata for weight in self.weights.values()}
        with Alive() as alive:
            with KernelCounter(own) as forward:
                edges, grads, leaves = self._graph()
            gc.collect()
            saved = alive.bytes() - sum(grad.untyped_storage().nbytes() for grad in grads)
            with KernelCounter(own) as backward:
                torch.autograd.backward(edges, grads)
        for path, weight in self.weights.items():
            if weight.grad is None and self.spec.tied_as(path) is None:
                raise InputError(f"layer {self.name}: parameter {path} gets no gradient: nothing that the "
                                 "layer returns depends on it; leave it out, or make it a buffer")
            weight.grad = None
        del leaves
        moved = Moved("measured", forward.bytes, backward.bytes, (forward.count, backward.count))
        return (*forward.products, *forward.attention, moved), saved

    def _in_halves(self) -> tuple[int, tuple[str, ...]]:
        """Bytes kept between the halves of backward, and the matrices, if the second half has none."""
        sums, saving = WeightGrads(), SavingPolicy()
        with Alive() as alive:
            edges, grads, leaves = self._graph()
            halves = Halves.of(edges, leaves, list(self.weights.values()))
            sums.put_off = []
            halves.run(grads, sums, saving)
            empty = not halves.later
            for leaf in leaves:
                leaf.grad = None
            del edges, grads, leaves, halves
            gc.collect()
            operands = alive.bytes()
        put_off, sums.put_off = sums.put_off, None
        for product in put_off:
            product()
        for weight in self.weights.values():
            weight.grad = None
        return operands, tuple(path for path, weight in self.weights.items() if empty and weight.dim() > 1)


def _check_loss(name: str, loss: Any) -> None:
    what, count = None, 1
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, count = loss
    if not isinstance(count, torch.Tensor | int | float) or torch.as_tensor(count).numel() != 1:
        what = "a pair whose second is no number"
    elif not isinstance(loss, torch.Tensor):
        what = f"a {type(loss).__name__}"
    elif loss.dim() or not loss.is_floating_point():
        what = f"{str(loss.dtype).removeprefix('torch.')} {list(loss.shape)}"
    elif not loss.requires_grad:
        what = "a number that does not depend on any parameter"
    if what is not None:
        raise InputError(f"the loss of layer {name}'s output is {what}: it must be a tensor with one "
                         "floating-point number, the mean over the samples of a micro-batch; or a pair, the "
                         "sum over all that counts in them, and how much that is")


class _Draws(TorchDispatchMode):
    """Whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found |= not _keeps_all(func, args)
        return func(*args, **(kwargs or {}))


def _keeps_all(func: Any, args: Any) -> bool:
    """Whether it is attention or dropout that drops nothing."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    return "scaled_dot_product" in func._schema.name and not named.get("dropout_p")


@contextmanager
def _kept_by_threed(name: str) -> Iterator[None]:
    """InputError where the layer itself says what autograd keeps: it would keep parameters that are gone by
    the time of backward (ZeRO-3), and nothing would notice."""
    hooks, checkpointed = torch.autograd.graph.saved_tensors_hooks, torch.utils.checkpoint.CheckpointFunction
    enter, apply, here = hooks.__enter__, checkpointed.apply, threading.get_ident()

    def refused(usual: Callable[..., Any], *args: Any) -> Any:
        if threading.get_ident() != here:
            return usual(*args)
        raise InputError(f"layer {name} keeps by itself what backward needs, as torch.utils.checkpoint does: "
                         "leave that out, and set activation.policy to full or budget, which compute layers "
                         "again")

    hooks.__enter__ = lambda self: refused(enter, self)  # pyright: ignore[reportAttributeAccessIssue]
    checkpointed.apply = staticmethod(lambda *args: refused(apply, *args))
    try:
        yield
    finally:
        hooks.__enter__ = enter
        del checkpointed.apply  # which is inherited


@contextmanager
def _constant(name: str, module: torch.nn.Module) -> Iterator[None]:
    """InputError where the layer changes a buffer meanwhile."""
    def state() -> Mapping[str, tuple[int, int]]:
        return {path: (id(buffer), buffer._version) for path, buffer in module.named_buffers()}

    before = state()
    yield
    changed = [path for path, now in state().items() if before.get(path) != now]
    if changed:
        kind = next((type(each).__name__ for each in module.modules() for buffer in each._buffers
                     if any(path.endswith(buffer) for path in changed)), "")
        raise InputError(f"layer {name}: forward changes its buffer {changed[0]} (in a {kind}): buffers stay "
                         "as they are made, since ranks would have different ones; use a layer without such "
                         "state, such as a GroupNorm in place of a BatchNorm")
