"""Whether ranks can share each sequence as the config has it (parallel.cp). No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from threed.base.axes import axes_of
from threed.base.errors import Idle, InputError, Problem
from threed.base.quantity import many
from threed.models.tiling import cut_layers
from threed.schema import Config
from threed.spec.deal import CHUNKS


def check_tokens(config: Config) -> Iterator[Problem]:
    """Ranks that share a sequence have equal chunks of it, and those of tp equal parts of these."""
    ranks, seq = config.token_ranks, config.model.seq_len
    order, chunks = "", 2
    if config.parallel.cp_order == "documents":
        order, chunks = " in parallel.cp_order=documents", CHUNKS[0]
    axes = " x ".join(f"parallel.{axis}={config.axis_sizes[axis]}" for axis in axes_of("tokens")
                      if config.axis_sizes[axis] > 1)
    tp = config.parallel.tp if config.parallel.sequence_parallel else 1
    parts = math.lcm(chunks * ranks, ranks * tp)
    if seq % parts:
        cut = f" and parallel.tp={tp}" if tp > 1 else ""
        each = f"{'two' if chunks == 2 else chunks} equal chunks of a sequence{order}"
        yield Problem.of("model.seq_len", f"={seq} with {axes}{cut}: each rank has {each}"
                         f"{', and equal parts of them' * (tp > 1)}; take a multiple of {parts}")


def check_order(config: Config) -> Iterator[Problem]:
    """Documents decide which tokens a rank has only where there are some, and several ranks."""
    order, cp = config.parallel.cp_order, config.parallel.cp
    if order == "zigzag":
        return
    if cp == 1:
        yield Idle.of("parallel.cp_order", f"={order} with parallel.cp=1: each rank has all tokens of its "
                      "sequences; leave it out, or give parallel.cp, ranks that share them")
    if not config.data.document_mask:
        yield Idle.of("parallel.cp_order", f"={order} with data.document_mask=false: each sequence is one "
                      "document, in which all ranks have equal work in zig-zag order; leave it out, or set "
                      "data.document_mask=true, which keeps attention inside documents")
    if config.parallel.cp_form == "heads" and cp > 1:
        yield Idle.of("parallel.cp_order", f"={order} with parallel.cp_form=heads: each rank attends to "
                      "whole sequences, so that all have equal work; leave it out, or take "
                      "parallel.cp_form=keys")


def check_heads(config: Config) -> Iterator[Problem]:
    """With parallel.cp_form=heads each rank of cp has some key heads, with their queries."""
    cp, tp, heads = config.parallel.cp, config.parallel.tp, config.model.num_kv_heads
    if cp == 1:
        yield Idle.of("parallel.cp_form", "=heads needs parallel.cp > 1: it says how ranks of cp share the "
                      "work of attention")
    elif heads % tp == 0 and heads // tp % cp:
        of_tp = f" ({heads} over parallel.tp={tp})" if tp > 1 else ""
        yield Problem.of("parallel.cp_form", f"=heads: parallel.cp={cp} does not divide the "
                         f"{many(heads // tp, 'key head')} of a tp rank{of_tp}; use parallel.cp_form=keys")


def check_overlap(config: Config) -> Iterator[Problem]:
    """Keys and values can travel between two units."""
    parallel, dropout = config.parallel, config.model.attention_dropout
    if not parallel.cp_overlap:
        return
    if parallel.cp == 1:
        yield Idle.of("parallel.cp_overlap", "=true needs parallel.cp above 1: without it no keys travel; "
                      "leave it out")
    elif parallel.cp_form == "heads":
        yield Problem.of("parallel.cp_overlap", "=true with parallel.cp_form=heads: what is exchanged for "
                         "heads does not travel between two units, only gathered keys do; leave it out, or "
                         "take parallel.cp_form=keys")
        return
    if parallel.layers_per_unit > 1:
        yield Problem.of("parallel.cp_overlap", f"=true with parallel.layers_per_unit="
                         f"{parallel.layers_per_unit}: attention becomes two units, between which keys "
                         "travel, and the other makes several blocks one; leave one of the two out")
    elif dropout:
        yield Problem.of("parallel.cp_overlap", f"=true with model.attention_dropout={dropout}: attention "
                         "with dropout keeps the keys of all tokens until backward, so that nothing would be "
                         "gathered again; leave one of the two out")
    elif config.model.tile_linears is None:  # where there are tiles, `_check_tiling` cuts the layers
        try:
            cut_layers(config)
        except InputError as error:
            yield Problem("parallel.cp_overlap", str(error))


def no_keys(config: Config) -> str:
    """Why no gathered keys would be kept from forward to backward; empty where they would be."""
    parallel = config.parallel
    if parallel.cp == 1:
        return "parallel.cp=1: no keys are gathered"
    if parallel.cp_form == "heads":
        return "with parallel.cp_form=heads no keys are gathered"
    if parallel.cp_overlap:
        return "with parallel.cp_overlap=true what backward needs is gathered again, ahead"
    return "with model.attention_dropout they are kept anyway" if config.model.attention_dropout else ""
