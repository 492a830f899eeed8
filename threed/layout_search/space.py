"""The space of a search: all layouts of a config on so many devices. A **shape** is a layout's mesh, schedule
and micro-batches; its **variants** differ in what they do to save memory.

A variant that saves memory is needless where a cheaper one, which recomputes and moves less, already fits.
Tiles make the buffers of ZeRO-3 smaller: they are among the variants where these buffers take much memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from threed.base.mesh import FOLDS, fold_problem
from threed.base.quantity import divisors
from threed.config.validate import validate
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of, schedules
from threed.models.families.registry import family_of
from threed.models.tiling import counts_rows, folds_of
from threed.schedules.orders import SCHEDULES

# Reasons for which layouts are dropped
NO_SHAPE = "tp does not divide the model"
NO_FOLD = "a fold does not divide its ranks"
NO_PAIRS = "no exchanges, or no schedule, for parallel.pair"
NO_TILES = "the model has no such tiles"
NO_BATCH = "dp x micro-batch does not divide the global batch"
NO_STAGES = "more stages than units of the model"
NO_FILL = "fewer micro-batches than the schedule needs"
NO_MEMORY = "does not fit into the device's memory"
NO_HOST = "does not fit into the host's memory"
NEEDLESS = "a cheaper variant already fits"
REFUSED = "keeps more than the config allows"
SLOWER = "slower than those found, at best"

_VIRTUAL = (2, 3, 4, 6, 8)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Bytes that buffers of ZeRO-3 take for each element of the largest unit: it and the next one are gathered,
# two gradients are alive, one of which is sent. Above this share of the memory, tiles are tried.
_BUFFERED, _MUCH = 16, 0.1
# Tokens of a sequence that a rank should have: with fewer, context parallelism sends more than it saves.
_LONG = 8192
# What recomputation saves, least first
_RECOMPUTES = (("none", False), ("selective", False), ("full", False), ("full", True))
# (stage, residency, reduce_every), and what each does to save memory: it gathers, it reduces more often
_ZEROS: tuple[tuple[int, str | int | None, str | int | None, int, int], ...] = (
    (0, None, None, 0, 0), (1, None, None, 0, 0), (2, None, "step", 0, 0), (2, None, 1, 0, 1),
    (3, "step", "step", 0, 0), (3, "stage", "step", 1, 0), (3, "stage", 1, 1, 1), (3, 1, "step", 2, 0),
    (3, 1, 1, 2, 1))


class Variant(NamedTuple):
    layout: Layout
    # Variants of one family save memory by the same means: whether state is sharded, over how many, and in
    # what gradients are sent.
    family: tuple[bool, int, str | None]
    efforts: tuple[int, ...]  # by means: how much it does

    def exceeds(self, other: Variant) -> bool:
        """Whether it does as much as another to save memory, or more: then it is not faster."""
        return other.family == self.family and all(
            less <= more for less, more in zip(other.efforts, self.efforts, strict=True))


class _Change(NamedTuple):
    """What makes a variant of a shape."""

    values: tuple[Any, ...]  # of _CHANGED
    family: tuple[bool, int, str | None]
    efforts: tuple[int, ...]


_CHANGED = ("policy", "every", "stage", "offload_activations", "residency", "reduce_every", "shard_size",
            "offload_optimizer", "tile_linears", "reduce_dtype")


class Space:
    """`fixed`: field of a layout -> its only value. `memory`: bytes of a device. `rounding`: whether
    gradients that are sent in 16 bits are among the layouts."""

    def __init__(self, bounds: Bounds, devices: int, fixed: Mapping[str, Any], memory: int,
                 rounding: bool = False):
        self.base, self.bounds, self.devices = bounds.config, bounds, devices
        self.fixed, self.memory = fixed, memory
        self.folded = folds_of(self.base)
        self.node = round(min(bounds.hardware.node_ranks, devices))
        rounds = rounding and not counts_rows(self.base)
        self.reduce_dtypes = ("fp32", self.base.precision.dtype) if rounds else (None,)
        self.recomputes = self._recomputes()
        self._known: dict[object, list[_Change]] = {}
        self.dropped: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}  # reason -> an example in words

    def shapes(self) -> Iterator[Layout]:
        """All that can run."""
        for tp in self._choices("tp", divisors(self.devices)):
            for cut in self._choices("sequence_parallel", (False, True) if tp > 1 else (False,)):
                most = max(1, self.base.model.seq_len // _LONG)
                for cp in self._choices("cp", [cp for cp in divisors(self.devices // tp) if cp <= most]):
                    alone = Layout(tp, sequence_parallel=cut, cp=cp,
                                   tile_linears=self.fixed.get("tile_linears"))
                    for form, overlap in _forms(alone, self.base.model.num_kv_heads, self._choices):
                        yield from self._meshes(alone._replace(cp_form=form, cp_overlap=overlap))

    def _meshes(self, alone: Layout) -> Iterator[Layout]:
        """All meshes with its tp and cp."""
        config, each = config_of(alone, self.base), alone.tp * alone.cp
        config.parallel.stage_units = None  # of another number of stages
        for axis in FOLDS:  # of another mesh
            setattr(config.parallel, axis, 1)
        if problems := validate(config):
            tiles = problems[0].key == "model.tile_linears"
            self._drop(NO_TILES if tiles else NO_SHAPE, str(problems[0]))
            return
        for pp in self._choices("pp", divisors(self.devices // each)):
            dp = self.devices // each // pp
            if each * pp * dp == self.devices and self.fixed.get("dp", dp) == dp:
                mesh = alone._replace(pp=pp, dp=dp)
                for ep in self._choices("ep", self._experts(mesh)):
                    if problem := self._fold_problem(mesh._replace(ep=ep), mesh.data_ranks):
                        self._drop(NO_FOLD, f"{mesh._replace(ep=ep).text()}: {problem}")
                    else:
                        yield from self._batches(mesh._replace(ep=ep))

    def _experts(self, mesh: Layout) -> tuple[int, ...]:
        """Ranks that may hold all experts together."""
        if "ep" not in self.folded:
            return (1,)
        model, ranks = self.base.model, {"tp": mesh.tp}
        return tuple(ep for ep in divisors(mesh.tp * mesh.data_ranks)
                     if not family_of(model.family).check(model, {**ranks, "ep": ep}))

    def _batches(self, mesh: Layout) -> Iterator[Layout]:
        batch = self.base.train.global_batch_size
        for size in self._choices("micro_batch_size", _MICRO_BATCHES):
            if batch % (mesh.dp * size):
                self._drop(NO_BATCH, f"{batch} sequences, dp {mesh.dp} x micro-batch {size}")
                continue
            for order in self._choices("axis_order", self._orders(mesh)):
                for name, virtual in self._schedules(mesh, batch // (mesh.dp * size)):
                    shape = mesh._replace(micro_batch_size=size, axis_order=order, schedule=name,
                                          virtual_stages=virtual)
                    if self.fixed.get("pair") and not shape.can_pair:
                        self._drop(NO_PAIRS, shape.text())
                    else:
                        yield shape

    def _orders(self, mesh: Layout) -> tuple[str, ...]:
        """Where a node has room for two axes, either pp or dp may lie inside it."""
        both = mesh.pp > 1 and mesh.data_ranks > 1 and mesh.tp < self.node
        return ("pp-dp-tp", "dp-pp-tp") if both else ("pp-dp-tp",)

    def _schedules(self, mesh: Layout, microbatches: int) -> Iterator[tuple[str, int]]:
        for name in self._choices("schedule", schedules() if mesh.pp > 1 else ("1f1b",)):
            row = SCHEDULES[name]
            if not row.fills(mesh.pp, microbatches):
                self._drop(NO_FILL, f"{name} with pp {mesh.pp}: {microbatches} of {row.least(mesh.pp)}")
                continue
            stages = _VIRTUAL if row.virtual is None else (row.virtual,)
            for virtual in self._choices("virtual_stages", stages):
                if row.virtual not in (None, virtual):
                    continue
                if self.bounds.stages(mesh._replace(schedule=name, virtual_stages=virtual)) is not None:
                    yield name, virtual
                else:
                    self._drop(NO_STAGES,
                               f"pp {mesh.pp} x {virtual} stages, {self.bounds.units(mesh)} units")

    def _recomputes(self) -> list[tuple[str, bool]]:
        """What recomputation saves, least first: policy, and whether kept inputs go to the host."""
        rows = _RECOMPUTES if self.fixed.get("policy") != "budget" else (("budget", False), ("budget", True))
        return [(policy, away) for policy, away in rows
                if self._allowed("policy", policy) and self._allowed("offload_activations", away)
                and (policy == "full" or self.fixed.get("every", 1) == 1)]

    def recomputing(self, shape: Layout, rank: int) -> Layout:
        """What the variants of a shape compute that recompute as the row `rank` of `recomputes` says."""
        policy, away = self.recomputes[rank]
        return shape._replace(policy=policy, offload_activations=away,
                              every=self.fixed.get("every", 1)).of_activations()

    def count(self, shape: Layout, rank: int) -> int:
        """How many variants recompute as the row `rank` of `recomputes` says."""
        return len(self._changes(shape, rank))

    def variants(self, shape: Layout, rank: int) -> list[Variant]:
        """Those of a row of `recomputes`; the ones that do least for memory first."""
        return [Variant(shape._replace(**dict(zip(_CHANGED, row.values, strict=True))), row.family,
                        row.efforts)
                for row in self._changes(shape, rank)]

    def _changes(self, shape: Layout, rank: int) -> list[_Change]:
        key = (rank, shape.tp, shape.dp, shape.cp, shape.cp_form, shape.cp_overlap, shape.ep,
               shape.pp if shape.axis_order == "dp-pp-tp" else 1)
        if key not in self._known:
            policy, away = self.recomputes[rank]
            result = []
            for stage, residency, every, gathers, reduces in self._zeros(shape):
                layout = shape._replace(policy=policy, every=self.fixed.get("every", 1), stage=stage,
                                        offload_activations=away, residency=residency, reduce_every=every)
                result += [_Change(tuple(getattr(each, name) for name in _CHANGED),
                                   (stage > 0, each.shard_size, each.reduce_dtype),
                                   (rank, stage, gathers, reduces, *more))
                           for each, *more in self._details(layout)]
            self._known[key] = sorted(result, key=lambda row: sum(row.efforts))
        return self._known[key]

    def _details(self, layout: Layout) -> Iterator[tuple[Layout, int, int]]:
        """The rest of a variant, and how much it does to save memory: moves the optimizer, makes tiles."""
        # With whole states on each rank (of several), each rank's host would step all of them.
        hosts = (False, True) if layout.stage or layout.data_ranks == 1 or "stage" in self.fixed else (False,)
        for shard in self._shards(layout, layout.stage):
            for host in self._choices("offload_optimizer", hosts):
                for pieces, tiles in enumerate(self._tiles(layout)):
                    for dtype in self.reduce_dtypes if layout.data_ranks > 1 else (None,):
                        yield layout._replace(shard_size=shard, offload_optimizer=host, tile_linears=tiles,
                                              reduce_dtype=dtype), int(host), pieces

    def _tiles(self, layout: Layout) -> Sequence[str | None]:
        """Limits of tiles, the fewest tiles first."""
        few = layout.stage < 3 or not isinstance(layout.residency, int) or (
            _BUFFERED * self.bounds.largest(layout) < _MUCH * self.memory)
        return self._choices("tile_linears", (None, *(() if few else self.bounds.tiles(layout))))

    def _zeros(self, shape: Layout) -> Iterator[tuple[int, Any, Any, int, int]]:
        seen = set()
        for stage, residency, every, gathers, reduces in _ZEROS if shape.data_ranks > 1 else (_ZEROS[1],):
            residency = self.fixed.get("residency", residency) if stage == 3 else residency
            every = self.fixed.get("reduce_every", every) if stage >= 2 else every
            row = stage, residency, every, gathers, reduces
            if row[:3] not in seen and all(self._allowed(name, value) for name, value in
                                           zip(("stage", "residency", "reduce_every"), row[:3], strict=True)):
                seen.add(row[:3])
                yield row

    def _shards(self, shape: Layout, stage: int) -> Iterator[int]:
        """All of dp, or those of a node."""
        near = self.node // shape.tp // (shape.pp if shape.axis_order == "dp-pp-tp" else 1)
        ranks = shape.data_ranks
        fewer = stage >= 1 and 1 < near < ranks and ranks % near == 0
        for size in self._choices("shard_size", (ranks, near) if fewer else (ranks,)):
            size = ranks if size is None else size
            if ranks % size == 0 and (stage >= 1 or size == ranks) and not (
                    self._fold_problem(shape, size)):
                yield size

    def _fold_problem(self, layout: Layout, shard_size: int) -> str:
        """Why the config's folds do not divide the ranks of a layout; empty where they do."""
        if not self.folded:
            return ""
        config = config_of(layout, self.base)
        problems = ((axis, size, fold_problem(axis, size, config.axis_sizes, shard_size))
                    for axis, size in config.fold_sizes.items() if axis in self.folded)
        return next((f"parallel.{axis}={size} {problem}" for axis, size, problem in problems if problem), "")

    def _choices(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        return (self.fixed[name],) if name in self.fixed else values

    def _allowed(self, name: str, value: Any) -> bool:
        return name not in self.fixed or self.fixed[name] == value

    def _drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        self.wrong.setdefault(reason, example)


def in_full(layout: Layout, fixed: Mapping[str, Any]) -> tuple[Layout, Layout | None]:
    """What the full plan of a layout is of, and what it may be of where that hides exchanges: the same with
    pairs, which short plans do not have."""
    given = fixed.get("pair")
    paired = layout._replace(pair=True) if given is None and layout.can_pair else None
    return layout._replace(pair=bool(given)), paired


def _forms(alone: Layout, key_heads: int,
           choices: Callable[[str, Sequence[Any]], Sequence[Any]]) -> Iterator[tuple[str, bool]]:
    """How ranks of cp share attention, and whether keys travel beside the computation."""
    if alone.cp == 1:
        yield "keys", False
        return
    forms = ("keys", "heads") if key_heads % (alone.tp * alone.cp) == 0 else ("keys",)
    for form in choices("cp_form", forms):
        for overlap in choices("cp_overlap", (False, True) if form == "keys" else (False,)):
            yield form, overlap
