"""extend: what a schedule, a layer, a family, an optimizer, a pass, an axis or a logger of your own imports.

    from threed.extend import SCHEDULES, Order, Schedule, Task
    from threed.extend import Attention, Block, Branch, Family, Mlp, Norm
    from threed.extend import Column, Cost, Held, Parameter, Part, Row, Saved
    from threed.extend import OPTIMIZERS, Buffer, MatrixOptimizer, Optimizer, Update, View
    from threed.extend import LOGGERS, Logger, LoggerRow

A script adds a row to the table `SCHEDULES`, `OPTIMIZERS` or `LOGGERS` before it reads a config. (A family
needs no row: `model.family` names its file. Rows of `AXES` and `GROUPS` need a key, too:
docs/extending/axis.md.) `gpt` and `llama` are modules, each with its `layers(model)`. An `Order` has a list
of tasks for each pipeline position, `Programs` a list of instructions. `WHOLE` is the tile of a layer that is
not cut, and `SEQUENCE` stands for the axes that cut the sequence.

The names in `__all__` stay as they are from version to version, wherever threed has what they stand for.
`torch` and `F` (torch.nn.functional) import torch when they are first used, since plans are made without it.
Callbacks, and torch modules of your own, need `threed` alone (`threed.Callback`, `threed.Layers`).
"""

from __future__ import annotations

from threed.base.axes import AXES, QUIET
from threed.base.later import F, torch
from threed.base.mesh import FOLDS, GROUPS, Fold, GroupRow, fold_groups
from threed.models.families import gpt, llama
from threed.models.families.base import Family
from threed.models.families.registry import family_of
from threed.models.layers.attention import Attention
from threed.models.layers.base import Layer, Out, Part
from threed.models.layers.block import Block, Branch
from threed.models.layers.embedding import Embedding
from threed.models.layers.head import Head, Logits
from threed.models.layers.mlp import Mlp
from threed.models.layers.parts import Column, Held, Row, cut_over
from threed.models.layers.residual import Dropout, Norm, added
from threed.models.tiling import layers_of, share_of
from threed.monitor.loggers.logger import Logger
from threed.optim.base import Buffer, MatrixOptimizer, Optimizer, Update, View
from threed.optim.registry import OPTIMIZERS
from threed.planner import make_mesh
from threed.planner.passes import Pass
from threed.program.instruction import Instruction, Op, Programs
from threed.program.table import Table
from threed.schedules.orders import SCHEDULES, Order, Schedule, Task
from threed.schema import Config, ModelConfig, ParallelConfig
from threed.schema.loggers import LOGGERS, LoggerRow
from threed.spec.parameter import (
    SEQUENCE,
    WHOLE,
    Cost,
    Cut,
    Parameter,
    Rows,
    Saved,
    Share,
    Tile,
    Traffic,
    each_of,
)
from threed.spec.travel import Exchanged, Gathered

__all__ = [
    "AXES", "FOLDS", "GROUPS", "LOGGERS", "OPTIMIZERS", "QUIET", "SCHEDULES", "SEQUENCE", "WHOLE",
    "Attention", "Block", "Branch", "Buffer", "Column", "Cost", "Cut", "Dropout", "Embedding", "Exchanged",
    "F", "Family", "Fold", "Gathered", "GroupRow", "Head", "Held", "Instruction", "Layer", "Logger",
    "LoggerRow", "Logits", "MatrixOptimizer", "Mlp", "ModelConfig", "Norm", "Op", "Optimizer", "Order", "Out",
    "ParallelConfig", "Parameter", "Part", "Pass", "Programs", "Row", "Rows", "Saved", "Schedule", "Share",
    "Table", "Task", "Tile", "Traffic", "Update", "View", "added", "cut_over", "each_of", "family_of",
    "fold_groups", "gpt", "layers_of", "llama", "make_mesh", "measured_cost", "share_of", "torch"]


def measured_cost(layer: Layer, config: Config) -> Cost:
    """What one forward and backward of a layer costs a rank of a config's mesh, counted while the layer runs
    alone. Its `flops`, `operands`, `sent` and `saved_bytes()` must be those of
    `layer.cost(share_of(config))`, which plans and predictions read.

    >>> [measured_cost(layer, config).flops for layer in layers_of(config)]
    """
    from threed.comm.process import initialized
    from threed.models.measure import Measured

    with initialized():
        return Measured(layer, config.model, share_of(config)).cost(first=layer.tokens)
