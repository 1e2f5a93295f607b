"""The nodes of the training DAG: frozen values in a closed union.

A node stands for all its replicas: `devices=(0, 2)` is one node on two devices. Data edges are the
values that nodes read and write; each read is a sum, because a gradient adds up what every use of a
value contributes.
"""

from dataclasses import dataclass
from enum import StrEnum

from piper.ir.flat_layout import Message
from piper.ir.maker import PASS_MADE, Maker
from piper.ir.placements import Step
from piper.names import BucketId, Device, NodeId, Phase, RegionId, ValueId

Sum = tuple[ValueId, ...]  # values to be added up; nearly always one
Tags = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One annotated region of the model, in one phase, on one microbatch."""

    id: NodeId
    region: RegionId
    phase: Phase
    microbatch: int | None = None  # None until `Split`
    tags: Tags = ()
    reads: tuple[Sum, ...] = ()
    writes: tuple[ValueId, ...] = ()
    devices: tuple[Device, ...] | None = None  # None until `Place`
    stream: str | None = None  # of the transfers of what it writes; None until `Place`


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value goes point to point: replica i of `source` sends to replica i of `devices`."""

    id: NodeId
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]
    source: tuple[Device, ...]
    devices: tuple[Device, ...]
    stream: str


class Kind(StrEnum):
    """What a collective does with the bundles of its group."""

    ALL_REDUCE = "all-reduce"  # everyone gets the sum
    REDUCE_SCATTER = "reduce-scatter"  # everyone gets its shard of the sum
    ALL_GATHER = "all-gather"  # everyone gets the whole of all shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The devices of each group put their bundles together."""

    id: NodeId
    kind: Kind
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]
    devices: tuple[Device, ...]
    groups: tuple[tuple[Device, ...], ...]
    stream: str
    messages: tuple[Message, ...]
    slot: int | None = None  # ALL_GATHER: which buffer it fills; None until the gathers pass


class Way(StrEnum):
    """Where the rows of an exchange go."""

    COUNTED = "counted"  # to their experts; the counts are exchanged first, and make the route
    OUT = "out"  # to their experts again, by a known route
    BACK = "back"  # home, by the same route


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Rows go to the devices of their experts, or come back (an all-to-all in each group).

    Reads rows (one value or several, all in the same order), then counts or the route. Writes rows;
    COUNTED writes the counts of the experts here and the route, too.
    """

    id: NodeId
    way: Way
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]
    devices: tuple[Device, ...]
    groups: tuple[tuple[Device, ...], ...]
    stream: str

    @property
    def rows(self) -> tuple[ValueId, ...]:
        """What arrives, but for counts and route."""
        return self.writes[: len(self.reads) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute:
    """A value changes its placement: one pass of a conversion between parts of a divided region.

    The devices of each group do it together, unless each takes its slice of what it has.
    """

    id: NodeId
    region: RegionId  # of the conversion
    phase: Phase
    step: Step
    microbatch: int | None = None
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]
    devices: tuple[Device, ...]
    groups: tuple[tuple[Device, ...], ...]
    stream: str
    onward: str  # the stream of the transfers of what it writes

    @property
    def is_message(self) -> bool:
        return self.step is not Step.SLICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Loss and gradient norm, added up over all devices.

    The first read is the losses of all microbatches, the others are the gradients that updates
    read; each device adds up what it holds.
    """

    id: NodeId
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]
    devices: tuple[Device, ...] | None = None  # None until all regions are placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The optimizer's step on one bucket of parameters."""

    id: NodeId
    bucket: BucketId
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]
    devices: tuple[Device, ...] | None = None  # None until its first region is placed


Node = Compute | Transfer | Collective | Exchange | Redistribute | Totals | Update


@dataclass(frozen=True, slots=True)
class Precedence:
    """A temporal edge: every node of `before` runs before any of `after`.

    One edge between groups instead of an edge per pair keeps orders linear in their length.
    """

    before: tuple[NodeId, ...]
    after: tuple[NodeId, ...]
    maker: Maker = PASS_MADE  # who asked for it
    loose: bool = False  # weight gradients of `before` may be later, if they are nodes of their own
