"""The nodes of the training DAG: frozen values in a closed union.

A node stands for all its replicas: `devices=(0, 2)` is one node on two devices. Data edges are the
values that nodes read and write; each read is a sum, because a gradient adds up what every use of a
value contributes.
"""

from dataclasses import dataclass
from enum import StrEnum

from piper.ir.flat_layout import Message
from piper.ir.maker import PASS_MADE, Maker
from piper.ir.placement.placements import Step
from piper.names import BucketId, Device, NodeId, Phase, RegionId, ValueId

Sum = tuple[ValueId, ...]  # values to be added up; nearly always one
Tags = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What all nodes have."""

    id: NodeId
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous(Base):
    """What is asynchronous, and runs in order on its stream."""

    devices: tuple[Device, ...]
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped(Asynchronous):
    """What the devices of each group do together."""

    groups: tuple[tuple[Device, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Base):
    """One annotated region of the model, in one phase, on one microbatch."""

    region: RegionId
    phase: Phase
    microbatch: int | None = None  # None until `Split`
    reads: tuple[Sum, ...] = ()
    writes: tuple[ValueId, ...] = ()
    devices: tuple[Device, ...] | None = None  # None until `Place`
    stream: str | None = None  # of the transfers of what it writes; None until `Place`


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Asynchronous):
    """Send a value point to point: replica i of `source` sends to replica i of `devices`."""

    source: tuple[Device, ...]


class Kind(StrEnum):
    """The kind of a collective."""

    ALL_REDUCE = "all-reduce"  # every device gets the sum
    REDUCE_SCATTER = "reduce-scatter"  # every device gets its shard of the sum
    ALL_GATHER = "all-gather"  # every device gets all shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Grouped):
    """A collective on a bundle of tensors, within each group of devices."""

    kind: Kind
    messages: tuple[Message, ...]
    slot: int | None = None  # ALL_GATHER: which buffer it fills; None until the gathers pass


class Way(StrEnum):
    """The direction of a token all-to-all."""

    COUNTED = "counted"  # dispatch; exchanges the counts first, which make the route
    OUT = "out"  # dispatch again, by a known route
    BACK = "back"  # combine, by the same route


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Grouped):
    """A token all-to-all in each group: tokens go to the devices of their experts, or come back.

    Reads tokens (one value or several, with rows in the same order), then counts or the route.
    Writes tokens. COUNTED also writes the counts of the local experts, and the route.
    """

    way: Way

    @property
    def rows(self) -> tuple[ValueId, ...]:
        """The tokens that arrive, without counts and route."""
        return self.writes[: len(self.reads) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute(Grouped):
    """A value changes its placement: one pass of a conversion between parts of a divided region.

    The devices of each group do it together, unless each takes its slice of what it has.
    """

    region: RegionId  # of the conversion
    phase: Phase
    step: Step
    microbatch: int | None = None
    onward: str  # the stream of the transfers of what it writes

    @property
    def is_message(self) -> bool:
        return self.step is not Step.SLICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Store(Asynchronous):
    """Copy a value to the memory of the host. The device's copy is freed `lag` passes later."""

    lag: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Asynchronous):
    """Copy a value from the memory of the host back to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals(Base):
    """The all-reduce of the loss and the gradient norm over all devices.

    The first read is the losses of all microbatches. The others are the gradients that updates
    read. Each device first adds up what it holds.
    """

    devices: tuple[Device, ...] | None = None  # None until all regions are placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Base):
    """The optimizer's step on one bucket of parameters."""

    bucket: BucketId
    devices: tuple[Device, ...] | None = None  # None until its first region is placed


Node = Compute | Transfer | Collective | Exchange | Redistribute | Store | Fetch | Totals | Update


@dataclass(frozen=True, slots=True)
class Precedence:
    """A temporal edge: every node of `before` runs before any of `after`.

    One edge between groups instead of an edge per pair keeps orders linear in their length.
    """

    before: tuple[NodeId, ...]
    after: tuple[NodeId, ...]
    maker: Maker = PASS_MADE  # who asked for it
    loose: bool = False  # BW of `before` may be later, if it is a node of its own
    partial: bool = False  # of an order that names messages or updates, and maybe few passes
