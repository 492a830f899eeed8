"""The modules of models/gpt.py hold exactly the parameters of models/spec.py: all planning rests on it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from threed.config import load
from threed.engine.loopback import ThreadGroup, World, initialized
from threed.mesh import Mesh
from threed.models.gpt import Context, build_layer, parameter_names
from threed.models.spec import tied_parameter
from threed.models.tiling import layers_of
from threed.tensor.layers import WeightGrads

pytestmark = pytest.mark.core

MODELS = {
    "gpt": ["model.position=learned"],
    "gpt-untied": ["model.position=learned", "model.tie_embeddings=false", "model.bias=false"],
    "llama": ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.tie_embeddings=false",
              "model.kv_heads=4"],
    "mixed": ["model.norm=rmsnorm", "model.activation=swiglu", "model.kv_heads=2", "model.ffn_hidden=96"],
}


@pytest.mark.parametrize("tiled", [[], ["model.tile_linears=32KiB"]])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_modules_match_their_spec(name, tp, tiled):
    """A parameter that the plan does not know is never reduced nor stepped; a shape that differs breaks its buffer."""
    size = ["model.vocab=128"] if tiled else []  # so small that a tied embedding need not be cut
    config = load(None, ["model.layers=2", "model.hidden=64", f"parallel.tp={tp}", *MODELS[name], *size, *tiled])
    model, all_layers = config.model, layers_of(config)
    assert bool(tiled) == any(layer.tiles > 1 or layer.kind == "mlp" for layer in all_layers)
    group = ThreadGroup("tp", range(tp), tp - 1, Counter(), World(Mesh(tp=tp)))
    tied = tied_parameter(model)
    for layer in all_layers:
        with initialized():
            module = build_layer(layer, Context(model, group, False, torch.float32, WeightGrads()))
        names = parameter_names(layer, module, model)
        found = {names[inside]: tuple(p.shape) for inside, p in module.named_parameters()}
        specified = {p.key: p.module_shape(tp) for p in layer.parameters}
        if layer.uses_tied:
            assert tied is not None
            specified[tied.name] = tied.module_shape(tp)
        assert found == specified
