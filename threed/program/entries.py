"""Entries of the table: compute units and parameter units, and what they say of tensors and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from threed.program.instruction import Slot, Tier
from threed.spec.kernels import Kernel
from threed.spec.parameter import Outflow


class MadeTensor(NamedTuple):
    """A tensor, besides its output, that a unit makes for later units of its stage. It may travel to other
    ranks of its position before they read it (spec.travel)."""

    name: str  # the kind of its slot; that of its gradient's has a g before the name
    bytes: int
    grad: bool = True  # False: no gradient belongs to it, and its maker's RECOMPUTE reads it
    # Where it travels:
    becomes: str = ""  # kind of the slot of what arrives, which later units read
    over: str = ""  # the group; empty: it stays on its rank
    by: str = ""  # op: GATHER (back: REDUCE) or EXCHANGE (back: the same)
    ranks: int = 1  # of the group
    arriving_bytes: int = 0  # as the plan counts them
    # EXCHANGE: (tensor, how many units before this one its maker is) of the rows that a rank gives to each,
    # and takes of each; none: equally many.
    counts: tuple[tuple[str, int], ...] = ()
    # GATHER: whether it may travel twice. It stays until its maker's BACKWARD, RELEASE may free what arrives,
    # which then comes again, and the gradient of both is in fp32.
    again: bool = False

    @property
    def leaves(self) -> bool:
        """Whether it is freed once it has left. (Without a gradient it stays until its maker's BACKWARD.)"""
        return self.over != "" and self.grad and not self.again


class ReadTensor(NamedTuple):
    """A tensor of an earlier unit, or what it became, that a unit reads. All readers add to its gradient."""

    name: str
    unit: int  # the unit that makes it
    last: bool  # whether no later unit reads it
    grad: bool = True  # as its maker's
    came: bool = False  # whether it has travelled, with a gradient: this unit's BACKWARD frees it
    spent: bool = False  # came, and forward uses it up: this unit's FORWARD frees it, or its RECOMPUTE
    # Came, and may come again: RELEASE frees it behind this unit's FORWARD; and the half of its backward that
    # gives the gradient of its input. The tensor that it comes of; empty: it comes once.
    again: str = ""


class Reduction(NamedTuple):
    """One sum of a unit's gradient over a group of ranks."""

    group: str
    ranks: int  # in the group
    takes: str  # kind of slot
    makes: str
    numel: int  # elements that are summed
    bytes: int  # of an element in the message
    staged: bool = False  # whether a gradient that travels in another dtype is cast in the staging buffer


@dataclass(frozen=True)
class ComputeUnit:
    name: str
    layers: tuple[int, int]  # first, one past the last
    stage: int
    parameters: tuple[int, ...]  # parameter units that it uses
    kernels: tuple[Kernel, ...]  # of a micro-batch, this rank's share
    saved_bytes: int  # kept from FORWARD to BACKWARD, a micro-batch
    operand_bytes: int  # kept from BACKWARD_INPUT to BACKWARD_WEIGHT
    traffic: dict[str, dict[str, int]]  # phase of PHASES -> axis -> bytes sent in it
    # Likewise -> how many rings they are: 1 for an all-gather or a reduce-scatter, 2 for an all-reduce
    rings: dict[str, dict[str, int]] = field(default_factory=dict)
    # Likewise -> (of these bytes those in all-to-alls, how many all-to-alls they are)
    exchanged: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    recompute: bool = False  # whether FORWARD keeps only its input, and RECOMPUTE computes the rest again
    makes: tuple[MadeTensor, ...] = ()
    reads: tuple[ReadTensor, ...] = ()
    loss: bool = False  # whether it adds to the loss; the last unit does, and has no other output
    adds: bool = False  # whether it only adds to its input: it keeps nothing, and passes its gradient on
    output: Outflow | None = None  # None: the residual stream
    again: tuple[Kernel, ...] = ()  # kernels of forward that BACKWARD computes again

    @property
    def forward_flops(self) -> int:
        """Of products of a micro-batch, this rank's share."""
        return sum(kernel.flops for kernel in self.kernels)


class Matrix(NamedTuple):
    """A matrix of a parameter unit: all of it, whatever a rank has of it."""

    parameter: str  # its name
    index: int  # of the matrix, among those of its parameter
    shape: tuple[int, int]
    owner: int  # the rank that turns it, by its number in the group
    flops: int  # of its turn


@dataclass(frozen=True)
class Turning:
    """How the matrices of a parameter unit are turned: each by one rank, its owner."""

    group: str  # the ranks that together have the unit, among which its matrices go to their owners and back
    ranks: int  # in that group
    matrices: tuple[Matrix, ...]  # of one group (of experts: those of the ranks with index 0)
    element: int  # bytes of an element on its way
    # Elements that all ranks of the group together send: to the owners, and back
    sent: int
    returned: int
    # Elements that a rank owns, as the plan counts them: all units of a position together, as many as the
    # rank that owns most.
    owned: int
    busiest: float  # FLOPs of the owner that has most to do, of all units of a position, over the mean


@dataclass(frozen=True)
class ParameterUnit:
    name: str
    positions: tuple[int, ...]  # pipeline positions that hold it (two for a tied embedding)
    numel: int  # this rank's elements, padded to a multiple of its shards
    padding: int  # elements of numel that are padding
    shard_group: str  # the group over which it is sharded
    shards: int  # ranks in that group
    reductions: tuple[Reduction, ...]  # of its gradient, in order
    state_home: Tier = Tier.DEVICE  # tier of its optimizer state and its STEP (disk: STEP runs on the host)
    weight_home: Tier = Tier.DEVICE  # tier of this rank's part of the parameters
    # Whether it stays whole from its first use in a step to its last (under ZeRO-3: small), in its buffer.
    whole: bool = True
    # False: it is frozen. It has no gradient, no state and no STEP; and where it stays whole, every rank
    # holds all of it all the time, and nothing is gathered.
    trains: bool = True
    kind: str = "own"  # own, tied, or one of planner.unit_kinds.KINDS; its name says it, too
    optimizer: str = ""  # what steps it, of threed/optim/registry.py; empty: the config's
    fold: str = ""  # the axis of mesh.FOLDS over which its parameters are cut
    dtype: str = ""  # of its weights, as compute reads them; empty: the config's
    turning: Turning | None = None  # None: it is stepped element by element


def gradient_kind(name: str) -> str:
    """The kind of that slot, by the tensor's name."""
    return f"g{name}"


def gradient_of(slot: Slot) -> Slot:
    """The slot in which the gradient of a handed tensor is added up."""
    return slot._replace(kind=gradient_kind(slot.kind))
