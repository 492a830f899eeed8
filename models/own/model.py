"""A model of user layers: a family whose layers are torch modules.

    Spec, Spec, Spec, ..., loss, data  ->  Layers (a Family)  ->  OwnLayer, OwnLayer, OwnLayer, ...

Every pass, check and handler serves an OwnLayer as it serves our own layers. What those declare is here
measured, once for layers that are alike (measure.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from threed.base.errors import InputError, RunError
from threed.devices import device_of
from threed.models.families.base import Family
from threed.models.layers.base import Layer, Out
from threed.models.own.measure import Facts, LayerInputs, Weight, held_by, measure, places_of
from threed.models.own.samples import Samples, checked_items, item_of
from threed.models.own.spec import Spec
from threed.schema import Config, LayersConfig
from threed.spec.parameter import Cost, Outflow, Parameter, Share, each_of
from threed.tensor.context import Batch, Context
from threed.tensor.packing import Schema
from threed.tensor.precision import DTYPES
from threed.tensor.random import seed_of

_DRAWING = threading.RLock()  # torch's generator belongs to the process, and ranks may be threads of one
Loss = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]]


class Layers(Family):
    """A model of your own layers. `model.family` may name one, as file.py:name.

    `layers`: a `Spec` each, first to last. `loss(outputs, targets)`: a tensor with one number, the mean over
    the samples that it is given, a micro-batch; or (sum, count), a tensor with the sum over all tokens that
    count, and their number: then the loss of a step is the sum over the global batch divided by its count.
    `data`: a map-style data set with items (inputs, targets),
    each a tensor or a tuple, list or dictionary of tensors; or a tuple (data set, data set to validate with).
    """

    def __init__(self, layers: Sequence[Spec], loss: Loss, data: Any):
        chain = _Chain(_checked(layers), loss, data)
        super().__init__(chain.layers, LayersConfig, check=chain.check, samples=chain.samples,
                         validates=chain.validation is not None)


def _checked(layers: Any) -> list[Spec]:
    if not isinstance(layers, Sequence):
        raise InputError(f"layers is a {type(layers).__name__}: give a list of threed.Spec, first to last")
    for index, spec in enumerate(layers):
        if not isinstance(spec, Spec):
            raise InputError(f"layers[{index}] is a {type(spec).__name__}: give threed.Spec(cls, *args), so "
                             "that each rank makes only the layers that it holds")
    if len(layers) < 2:
        raise InputError(f"layers has {len(layers)} layers: give two at least")
    for index, spec in enumerate(layers[1:-1], 1):
        if spec.ties:
            raise InputError(f"layers[{index}] ({spec.name}) is tied as '{next(iter(spec.ties))}': only the "
                             "first and the last layer can share parameters; give it parameters of its own")
    first, last = layers[0], layers[-1]
    if alone := set(first.ties) ^ set(last.ties):
        raise InputError(f"tied='{sorted(alone)[0]}' is the name of one layer alone: give it to the first "
                         "and to the last layer, which then share parameters")
    return list(layers)


class _Chain:
    """The layers, and what was measured of them."""

    def __init__(self, specs: list[Spec], loss: Loss, data: Any):
        if not callable(loss):
            raise InputError(f"loss is a {type(loss).__name__}: give a function of (outputs, targets)")
        if isinstance(loss, torch.nn.Module) and list(loss.parameters()):
            raise InputError("loss has parameters, which nobody would train: make it a layer")
        pair = isinstance(data, tuple) and len(data) == 2
        self.train, self.validation = data if pair else (data, None)
        checked_items(self.train, "data")
        if self.validation is not None:
            checked_items(self.validation, "the data set to validate with")
        self.specs, self.loss, self._item = specs, loss, item_of(self.train, 0)
        self.names = [f"{spec.name}.{index}" for index, spec in enumerate(specs)]
        self._held: dict[int, dict[str, Weight]] = {}
        self._parameters: dict[int, tuple[tuple[str, Parameter], ...]] = {}
        self._facts: dict[tuple[int, int], list[Facts]] = {}
        self._lock = threading.RLock()
        self._made = threading.local()  # the layer that this thread made last, for its initial values

    # ---- as a Family

    def layers(self, model: LayersConfig) -> list[Layer]:
        return [OwnLayer(self, index) for index in range(len(self.specs))]

    def check(self, model: LayersConfig, ranks: Mapping[str, int]) -> list[str]:
        return [f"parallel.{axis}={size}: the layers of a model of your own are whole on each rank (the "
                f"first is {self.names[0]}): set it to 1, and use parallel.dp, parallel.pp and zero.stage"
                for axis, size in ranks.items() if size > 1]

    def samples(self, config: Config) -> tuple[Samples, Samples]:
        """To train on, and to validate with."""
        dtype = DTYPES[config.precision.dtype]
        held_out = self.validation if self.validation is not None else self.train
        return Samples(self.train, config.train.seed, dtype), Samples(held_out, None, dtype)

    # ---- what layers declare

    def parameters(self, index: int) -> tuple[tuple[str, Parameter], ...]:
        """(path in the module, parameter) of a layer."""
        with self._lock:
            if index not in self._parameters:
                spec = self.specs[index]
                twin = next((at for at in self._parameters if self.specs[at].like(spec)), None)
                held = self._held[index] = (held_by(spec, self.names[index]) if twin is None
                                            else self._held[twin])
                for name, path in spec.ties.items():
                    if path not in ("", *held):
                        raise InputError(f"layer {self.names[index]} is tied as '{name}' by its parameter "
                                         f"{path}, and has {', '.join(held)}")
                for path in spec.adamw:
                    if path not in held:
                        raise InputError(f"layer {self.names[index]} names {path} for AdamW, and has "
                                         f"{', '.join(held) or 'no parameters'}: name one of these")
                self._parameters[index] = tuple((path, self._parameter(index, path, each))
                                                for path, each in held.items())
                self._check_ties()
            return self._parameters[index]

    def _parameter(self, index: int, path: str, held: Weight) -> Parameter:
        spec = self.specs[index]
        tied = spec.tied_as(path)
        turned = held.linear and tied is None and path not in spec.adamw
        name = f"{self.names[index]}.{path}" if tied is None else f"tied.{tied}"
        source = index
        if tied is not None and index:  # the first layer makes it
            source, path = 0, self.specs[0].ties.get(tied) or path
        return Parameter(name, held.shape, tied=tied is not None, init=partial(self.initial, source, path),
                         matrices=each_of(1) if turned else ())

    def _check_ties(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        for index, held in self._parameters.items():
            for path, parameter in held:
                if parameter.tied and shapes.setdefault(parameter.name, parameter.shape) != parameter.shape:
                    raise InputError(f"layer {self.names[index]}: {path} has the shape "
                                     f"{list(parameter.shape)}, and shares {parameter.name} of shape "
                                     f"{list(shapes[parameter.name])}")

    def facts(self, share: Share) -> list[Facts]:
        """What was measured of each layer, for micro-batches of `share.sequences` samples."""
        key = share.sequences, share.element
        with self._lock:
            if key not in self._facts:
                self._facts[key] = self._measure(*key)
            return self._facts[key]

    def _measure(self, size: int, element: int) -> list[Facts]:
        dtype, facts = _dtype(element), list[Facts]()
        known: list[tuple[Spec, object, Facts]] = []
        schema: Schema | None = None
        for index, spec in enumerate(self.specs):
            last = index == len(self.specs) - 1
            key = schema and schema.key()
            found = next((each for other, before, each in known if before == key and other.like(spec)), None)
            if found is None or last:
                loss = partial(self._example_loss, size, dtype) if last else None
                given = LayerInputs(schema, lambda: self.example(size, dtype)[0], loss)
                found = measure(spec, self.names[index], given, dtype)
                known.append((spec, key, found))
            facts.append(found)
            schema = found.out
        return facts

    def _example_loss(self, size: int, dtype: torch.dtype, outputs: Any) -> Any:
        return self.loss(outputs, self.example(size, dtype)[1])

    def example(self, size: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """Zeros with the shapes of a micro-batch: inputs, targets."""
        inputs, targets = self._item

        def zeros(tensor: torch.Tensor, cast: bool) -> torch.Tensor:
            wanted = dtype if cast and tensor.is_floating_point() else tensor.dtype
            return torch.zeros((size, *tensor.shape), dtype=wanted)

        return (tree_map(lambda each: zeros(each, True), inputs),
                tree_map(lambda each: zeros(each, False), targets))

    # ---- modules

    def module(self, index: int, seed: int) -> torch.nn.Module:
        """A layer's module as its own code makes it. What it draws depends on the seed and its name alone."""
        with drawing(seed, "initial values", self.names[index]):
            return self.specs[index].module(self.names[index])

    def initial(self, index: int, path: str, seed: int) -> torch.Tensor:
        """The initial values of a parameter, in fp32."""
        made = getattr(self._made, "values", None)
        if made is None or made[0] != (index, seed):
            places = places_of(self.module(index, seed))
            values = {path: getattr(*where[0]).detach().float() for path, where in places.items()}
            self._made.values = made = (index, seed), values
        return made[1][path]

    def forget(self) -> None:
        """Free the layer that this thread made last."""
        self._made.values = None


class OwnLayer(Layer):
    """One user layer."""

    shapes_from = "what its module does, which threed does not know"

    def __init__(self, chain: _Chain, index: int):
        self.chain, self.index, self.name = chain, index, chain.names[index]
        self.spec = chain.specs[index]
        self.tokens, self.loss = index == 0, index == len(chain.specs) - 1

    def parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self.chain.parameters(self.index)]

    def _facts(self, share: Share) -> Facts:
        return self.chain.facts(share)[self.index]

    def cost(self, share: Share) -> Cost:
        return self._facts(share).cost

    def schema(self, share: Share) -> Schema | None:
        return self._facts(share).out

    def passes(self, share: Share) -> Outflow | None:
        schema = self.schema(share)
        return schema.output if schema is not None else None

    def weighs_alike(self, share: Share) -> bool:
        targets = tree_leaves(self.chain.example(1, torch.float32)[1])
        some = len(targets) > 1 or any(each.numel() > 1 and not each.is_floating_point() for each in targets)
        return self.loss and some and not self._facts(share).counts

    def undivided(self, share: Share) -> tuple[str, ...]:
        return self._facts(share).together if self.index else ()  # nobody waits for the first layer

    def likeness(self, share: Share) -> object:
        return type(self), id(self._facts(share))

    def example(self, share: Share) -> tuple[Any, Any]:
        return self.chain.example(share.sequences, _dtype(share.element))

    def build(self, context: Context, weights: Mapping[str, torch.nn.Parameter]) -> OwnLayer:
        """Make the module, with the rank's weights in place of its own."""
        self.context = context
        self.chain.forget()
        self.module = self.chain.module(self.index, context.seed)
        places = places_of(self.module)
        self.by_graph = []
        for path, parameter in self.chain.parameters(self.index):
            weight = weights[parameter.key]
            self.by_graph.append(weight)
            for module, name in places[path]:
                module._parameters[name] = weight
        device = context.device
        loss = [self.chain.loss] if self.loss and isinstance(self.chain.loss, torch.nn.Module) else []
        for module in (each for top in (self.module, *loss) for each in top.modules()):
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        return self

    def modules(self) -> list[torch.nn.Module]:
        return [self.module]

    def forward(self, x: Any, batch: Batch) -> Out:
        self.module.train(batch.train)
        given = batch.inputs if self.index == 0 else x
        if batch.train and self.draws(batch):
            with drawing(batch.seed, "forward", self.name, batch.first, device=batch.samples_B.device):
                out = self.spec.call(self.module, given)
        else:
            out = self.spec.call(self.module, given)
        if not self.loss:
            return Out(out)
        loss = self.chain.loss(out, batch.targets)
        if isinstance(loss, tuple) != self._facts(self._share(batch)).counts:
            raise RunError("the loss returned a pair in some calls and a number in others: it must be the "
                           "same in every call")
        if isinstance(loss, tuple):  # a sum, which CLIP will divide by the count of the global batch
            total, count = loss
            count = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach().reshape(())
            return Out(loss=total.float() / batch.num_tokens, count=count)
        # The mean over the global batch: each micro-batch counts by its samples.
        return Out(loss=loss.float() * (len(batch.samples_B) / batch.num_tokens))

    def _share(self, batch: Batch) -> Share:
        return Share(sequences=len(batch.samples_B), element=self.context.dtype.itemsize)

    def draws(self, batch: Batch) -> bool:
        """Whether its module draws random numbers."""
        return self._facts(self._share(batch)).draws


@contextmanager
def drawing(*words: object, device: torch.device | None = None) -> Iterator[None]:
    """Within the context, torch's generators begin with a seed that these words decide; after it they are as
    before."""
    generator = device_of(device if device is not None else torch.device("cpu"))
    with _DRAWING:
        with unset_fake_temporarily():
            before = torch.get_rng_state(), generator.random_state()
            torch.manual_seed(seed_of(*words))
        try:
            yield
        finally:
            with unset_fake_temporarily():
                torch.set_rng_state(before[0])
                generator.set_random_state(before[1])


def _dtype(element: int) -> torch.dtype:
    """Of compute. (What is measured in bf16 is also right for fp16.)"""
    return torch.float32 if element == 4 else torch.bfloat16
