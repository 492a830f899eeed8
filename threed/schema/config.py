"""All sections together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from threed.base.axes import AXES, axes_of, data_axes
from threed.base.mesh import FOLDS
from threed.schedules.orders import SCHEDULES
from threed.schema.keys import KeySpec, specs
from threed.schema.layout import (
    ActivationConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    ZeroConfig,
)
from threed.schema.model import ModelConfig
from threed.schema.running import MonitorConfig, RunConfig
from threed.schema.training import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig


@dataclass
class Config:
    """All that a run is asked for: a field for each section of the YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def dp(self) -> int:
        assert isinstance(self.parallel.dp, int), "parallel.dp is not a number yet: call config.checked first"
        return self.parallel.dp

    @property
    def world_size(self) -> int:
        return math.prod(self.axis_sizes.values())

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        assert isinstance(self.parallel.dp, int), "parallel.dp is not a number yet: call config.checked first"
        return {axis: getattr(self.parallel, axis) for axis in AXES}

    @property
    def fold_sizes(self) -> dict[str, int]:
        """Ranks along each axis of FOLDS."""
        return {axis: getattr(self.parallel, axis) for axis in FOLDS}

    @property
    def num_microbatches(self) -> int:
        return self.train.global_batch_size // (self.train.micro_batch_size * self.dp)

    @property
    def num_stages(self) -> int:
        """Pipeline stages, as far as the config says: `auto` and `file:` have at least this many."""
        schedule = SCHEDULES.get(self.parallel.schedule)
        return self.parallel.pp * (self.parallel.virtual_stages or (schedule and schedule.virtual) or 1)

    @property
    def grouped(self) -> int | None:
        """Micro-batches that pass a stage together; None: the schedule has no groups."""
        schedule = SCHEDULES.get(self.parallel.schedule)
        if schedule is None or not schedule.by_unit:
            return None
        group = self.parallel.group
        assert isinstance(group, int), "parallel.group is not a number yet: call planner.auto.decided first"
        return group

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of what is sharded."""
        return self.zero.shard_size if self.zero.shard_size is not None else self.data_ranks

    @property
    def data_ranks(self) -> int:
        """Ranks with data of their own: samples, or tokens of them."""
        return math.prod(self.axis_sizes[axis] for axis in data_axes())

    @property
    def token_ranks(self) -> int:
        """Ranks that share a sample, each with some of its tokens."""
        return math.prod(self.axis_sizes[axis] for axis in axes_of("tokens"))

    @property
    def by_heads(self) -> bool:
        """Whether ranks that share sequences exchange tokens for heads in attention."""
        return self.token_ranks > 1 and self.parallel.cp_form == "heads"

    @property
    def pieces(self) -> tuple[str, ...]:
        """Pieces of blocks that are computed again in backward, and KEYS where they are kept."""
        if self.activation.policy not in ("selective", "budget"):
            return ()
        usual = ("norm", "mlp_act") if self.activation.policy == "selective" else ()
        return usual if self.activation.pieces is None else tuple(self.activation.pieces)

    @property
    def reduce_every(self) -> int:
        """Micro-batches between two reductions of a gradient; of `auto`, where whole gradients fit."""
        every = self.zero.reduce_every
        if every in ("auto", None):
            every = "step" if self.offload.optimizer != "none" and self.offload.gradients != "host" else 1
        return self.num_microbatches if self.zero.stage < 2 or every == "step" else int(every)

    @property
    def loss_scale(self) -> float | None:
        """The fixed loss scale; None: dynamic."""
        given = self.precision.loss_scale
        if given is None:
            return None if self.precision.dtype == "fp16" else 1.0
        return None if given == "dynamic" else float(given)

    @property
    def masked(self) -> bool:
        """Whether some tokens do not count in the loss: then its divisor is another in each step."""
        return self.data.document_mask or self.data.loss_mask != "none" or self.data.packing != "stream"

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.model.seq_len

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@lru_cache(8)
def keys_of(model: type[ModelConfig] = ModelConfig) -> dict[str, KeySpec]:
    """Every dotted key -> what is told of it; with those of `model`, the configuration of a family."""
    kinds: dict[str, Any] = {section.name: section.default_factory for section in dataclasses.fields(Config)}
    return {f"{section}.{name}": spec for section, kind in {**kinds, "model": model}.items()
            for name, spec in specs(kind).items()}
