"""GPT with a part that has a forward of its own: twice what it is of the part that it extends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from threed.extend import Block, Branch, Column, Dropout, Family, Layer, ModelConfig, Norm, Row, gpt


class TwiceNorm(Norm):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


class TwiceDropout(Dropout):
    def forward(self, x_sBD: Any, batch: Any) -> Any:
        return 2 * super().forward(x_sBD, batch)


class TwiceColumn(Column):
    def forward(self, x: Any, bias: bool = True) -> Any:
        return 2 * super().forward(x, bias)


class TwiceRow(Row):
    def forward(self, x: Any, bias: bool = True) -> Any:
        return 2 * super().forward(x, bias)


def norm(branch: Branch) -> None:
    branch.norm = TwiceNorm(branch.norm.model, branch.norm.name)


def dropout(branch: Branch) -> None:
    branch.dropout = TwiceDropout(branch.norm.model, branch.name)


def first(branch: Branch) -> None:
    """The first linear of its body."""
    (body,), model = branch.bodies, branch.norm.model
    if branch.name.endswith("mlp"):
        body.up = TwiceColumn(model, f"{body.name}.up", body.cells)
    else:
        body.qkv = TwiceColumn(model, f"{body.name}.qkv", 3 * model.hidden)


def last(branch: Branch) -> None:
    (body,), model = branch.bodies, branch.norm.model
    if branch.name.endswith("mlp"):
        body.down = TwiceRow(model, f"{body.name}.down", body.cells, model.residual_std)
    else:
        body.out = TwiceRow(model, f"{body.name}.out", model.hidden, model.residual_std)


def layers(model: ModelConfig, change: Callable[[Branch], None]) -> list[Layer]:
    made = gpt.layers(model)
    for block in made:
        for branch in block.branches if isinstance(block, Block) else ():
            change(branch)
    return made


NORM, DROPOUT, FIRST, LAST = (Family(partial(layers, change=each)) for each in (norm, dropout, first, last))
