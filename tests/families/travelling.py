"""A GPT whose MLPs work on rows that other ranks sent, and send them back; or on their own part of what all
ranks gathered. It computes what GPT computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from threed.extend import (
    SEQUENCE,
    Embedding,
    Exchanged,
    Family,
    Gathered,
    Head,
    Layer,
    ModelConfig,
    Out,
    Share,
    added,
    gpt,
    torch,
)

GATHERS = "gather", "again"


@dataclass
class TravellingConfig(ModelConfig):
    family: str = "travelling"
    over: str = "dp"  # group
    by: str = "counts"  # how rows travel: uneven counts, equal ones, or gathered, once or twice (again)


class Attends(Layer):
    """GPT's attention, and the norm of its MLP, whose output travels."""

    def __init__(self, model: TravellingConfig, index: int):
        self.model, self.name = model, f"blocks.{index}"
        self.attention, mlp = gpt.block(model, index).branches
        self.norm = mlp.norm
        way = {"counts": Exchanged("came", model.over, "gives", "takes"),
               "equal": Exchanged("came", model.over), "gather": Gathered("came", model.over),
               "again": Gathered("came", model.over, again=True)}[model.by]
        self.travels = {"sent": way}
        if model.by == "counts":
            self.travels["gives"], self.without_grad = Exchanged("takes", model.over), {"gives": "int64"}

    def makes(self, share: Share) -> dict[str, int]:
        rows = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        return {"sent": rows, **({"gives": 8, "came": 2 * rows} if self.model.by == "counts" else {})}

    def forward(self, x: Any, batch: Any, gives: Any = None) -> Out:
        """`gives`: as it was, where it is computed again."""
        x = self.attention(x, batch)
        rows = self.norm(x).flatten(0, 1)
        if self.model.by != "counts":
            return Out(x, {"sent": rows})
        return Out(x, {"sent": rows, "gives": self.counts(len(rows)) if gives is None else gives})

    def counts(self, rows: int) -> Any:
        """Rows for each rank: none for some of them."""
        group = self.context.groups[self.model.over]
        parts = [(group.rank() + 2 * at) % (group.size() + 1) for at in range(group.size())]
        ends = [rows * sum(parts[:at]) // max(1, sum(parts)) for at in range(group.size())] + [rows]
        counts = [stop - start for start, stop in zip(ends, ends[1:], strict=False)]
        return torch.tensor(counts, device=self.context.device)


class Computes(Layer):
    """The MLP of the rows that came, which go back; or of this rank's part of them."""

    adds = True
    reads = ("came",)

    def __init__(self, model: TravellingConfig, index: int):
        self.model, self.name = model, f"blocks.{index}.mlp"
        self.mlp, = gpt.block(model, index).branches[1].bodies
        self.shapes = {"came": (model.seq_len, model.hidden)}
        if model.by not in GATHERS:
            gives, takes = ("takes", "gives") if model.by == "counts" else ("", "")
            self.travels = {"answer": Exchanged("returned", model.over, gives, takes)}

    def makes(self, share: Share) -> dict[str, int]:
        rows = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        return {} if self.model.by in GATHERS else {"answer": rows}

    def forward(self, x: Any, batch: Any, came: Any) -> Any:
        if self.model.by not in GATHERS:
            return Out(x, {"answer": self.mlp(came.unsqueeze(1), batch).squeeze(1)})
        group, sequences = self.context.groups[self.model.over], len(batch.samples_B)
        mine = came.chunk(group.size())[group.rank()]
        return added(x, self.mlp(mine.unflatten(0, (-1, sequences)), batch))


class Collects(Layer):
    """The residual stream, with the rows that came back."""

    adds = True
    reads = ("returned",)

    def __init__(self, index: int):
        self.name = f"blocks.{index}.collect"

    def forward(self, x: Any, batch: Any, returned: Any) -> Any:
        return added(x, returned.unflatten(0, (-1, len(batch.samples_B))))


def layers(model: TravellingConfig) -> list[Layer]:
    def block(index: int) -> list[Layer]:
        collects = [] if model.by in GATHERS else [Collects(index)]
        return [Attends(model, index), Computes(model, index), *collects]

    blocks = [layer for index in range(model.layers) for layer in block(index)]
    return [Embedding(model), *blocks, Head(model)]


TRAVELLING = Family(layers, TravellingConfig)
