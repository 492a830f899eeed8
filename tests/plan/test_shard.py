"""The flat layout: every element in one place, every place in one shard, one treatment a range."""

from __future__ import annotations

from dataclasses import astuple
from itertools import product

import pytest

from threed.config.load import load
from threed.features.zero.shard import ALIGNMENT, layout
from threed.models.model import layers, own_parameters, tied_parameters
from threed.planner import layouts

MODELS = [["model.name=gpt2-small"], ["model.name=llama3-8b"],
          ["model.position=learned", "model.tie_embeddings=false"], ["model.qk_norm=true"]]


def all_layouts():
    for overrides, tp, shards in product(MODELS, (1, 2, 4), (1, 2, 3, 8)):
        model = load(None, overrides).model
        for parameters in [*(own_parameters(layer) for layer in layers(model)),
                           tied_parameters(layers(model))]:
            if parameters:
                yield parameters, tp, layout(parameters, {"tp": tp}, shards)


def test_every_parameter_in_one_place():
    """Two parameters that overlap, a hole between them, or a parameter that is missing."""
    for parameters, tp, flat in all_layouts():
        assert {placed.parameter
                for placed in flat.placed} == set(parameters) and len(flat.placed) == len(parameters)
        stop = 0
        for placed in flat.placed:
            assert placed.start == stop
            stop, count = placed.stop, placed.parameter.numel // (tp if placed.parameter.axes else 1)
            assert placed.stop - placed.start == count and placed.shape == placed.parameter.local_shape(
                {"tp": tp}
            )
        assert 0 <= flat.padding == flat.numel - stop < flat.num_shards * ALIGNMENT


def test_segments_treat_each_parameter_right():
    """Weight decay on a bias, or a replicated parameter that counts tp times in the norm."""
    for _, _, flat in all_layouts():
        ends = [(segment.start, segment.stop) for segment in flat.segments]
        assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in zip(ends, ends[1:]))
        assert ends[-1][1] == flat.placed[-1].stop, "padding belongs to no segment"
        for placed in flat.placed:
            inside = [s for s in flat.segments if s.start <= placed.start and placed.stop <= s.stop]
            assert [(s.decay, s.axes) for s in inside] == [
                (placed.parameter.decay, placed.parameter.axes)]
        copied = sum(each.stop - each.start for each in flat.partial(["tp"], ["tp"]))
        assert copied == sum(p.stop - p.start for p in flat.placed if not p.parameter.axes)


def test_parts_of_a_gradient():
    """Ranks of tp that hold a copy: of a norm of heads each always has a part of the gradient, of other norms
    only where it has a part of the sequence."""
    def named(flat, sequence) -> set[str]:
        inside = flat.partial(["tp"], sequence)
        return {placed.parameter.name.removeprefix("blocks.0.") for placed in flat.placed
                if any(s.start <= placed.start and placed.stop <= s.stop for s in inside)}

    model = load(None, ["model.qk_norm=true", "model.bias=false"]).model
    flat = layout(own_parameters(layers(model)[1]), {"tp": 2}, 1)
    heads = {"attention.q_norm.weight", "attention.k_norm.weight"}
    assert named(flat, []) == heads
    assert named(flat, ["tp"]) == heads | {f"{norm}_norm.{each}" for norm in ("attention", "mlp")
                                           for each in ("weight", "bias")}


def test_shards_cover_the_buffer():
    """Shards that are unequal (a reduce-scatter needs equal ones), overlap, or begin off the alignment."""
    for _, _, flat in all_layouts():
        ends = [flat.shard(index) for index in range(flat.num_shards)]
        assert ends[0][0] == 0 and ends[-1][1] == flat.numel
        assert all(a[1] == b[0] for a, b in zip(ends, ends[1:]))
        assert len({stop - start for start, stop in ends}) == 1
        assert all(start % ALIGNMENT == 0 for start, _ in ends)


def test_segments_of_shards_are_the_segments():
    """An element that no rank steps, or two do, or that is treated otherwise on one mesh than on another."""
    for _, _, flat in all_layouts():
        parts = [astuple(part) for index in range(flat.num_shards) for part in flat.segments_of(index)]
        joined = []
        for part in parts:
            assert part[1] > part[0]
            if joined and joined[-1][1] == part[0] and joined[-1][2:] == part[2:]:
                joined[-1] = (joined[-1][0], part[1], *joined[-1][2:])
            else:
                joined.append(part)
        assert joined == [astuple(segment) for segment in flat.segments]
        for index in range(flat.num_shards):
            start, stop = flat.shard(index)
            assert all(start <= part.start and part.stop <= stop for part in flat.segments_of(index))


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_share_the_partition(stage):
    """The gradient norm is summed over the same shards whatever the ZeRO stage, so that it is equal to the
    bit."""
    given = ["parallel.dp=4", "train.global_batch_size=4"]
    assert layouts(load(None, [*given, f"zero.stage={stage}"])) == layouts(load(None, given))
