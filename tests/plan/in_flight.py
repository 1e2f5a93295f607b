"""Communication in flight: transfers, collectives, token all-to-alls, the norm all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from plan.integer_tensors import (
    PRIME,
    Bundle,
    Number,
    Wrong,
    added,
    joined,
    packed,
    shard,
    sizes,
    unpacked,
)
from plan.tokens import (
    Matrix,
    Row,
    at_experts,
    at_sources,
    equal_parts,
    of,
    to_experts,
    to_sources,
)  # fmt: skip

from piper.plan.instructions import Exchange, Gather, Layout, Reduce

if TYPE_CHECKING:
    from plan.devices import Host


@dataclass
class TransferInFlight:
    """One transfer: a buffer of the sender, and a buffer of the receiver."""

    source: Host
    buffer: str
    target: Host
    into: str
    moved: bool = False

    def move(self, _: Host) -> None:
        if not self.moved:
            self.moved = True
            self.target.slots[self.into] = self.source.get(self.buffer)


@dataclass
class CopyInFlight:
    """A copy between the memory of a device and of its host."""

    buffer: str
    into: str
    moved: bool = False

    def move(self, host: Host) -> None:
        if not self.moved:
            self.moved = True
            host.slots[self.into] = host.get(self.buffer)


@dataclass
class Member:
    """One device in a collective."""

    host: Host
    position: int
    one: Reduce | Gather
    taken: Number = ()  # Reduce: the bundle, which nothing else may read

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal for all members. How messages are packed is not visible to others."""
        form = [(dtype, padded) for dtype, _, padded in self.one.messages]
        return type(self.one), getattr(self.one, "scatter", None), form

    def gives(self) -> Bundle:
        if isinstance(self.one, Reduce):
            return packed(self.taken, self.one.messages)
        mine = self.host.get(self.one.value)
        if isinstance(mine, int) or sizes(mine) != shard_sizes(self.one):
            raise Wrong(f"{self.one.value} is not a shard of {self.one.into}")
        return mine

    def gets(self, given: Sequence[Bundle]) -> None:
        one, host = self.one, self.host
        if isinstance(one, Gather):
            numels = [prod(size or 0 for size in shape) for shape, _ in one.shapes]
            host.buffers[one.buffer] = joined(given)
            host.slots[one.into] = GatheredView(one.buffer, one.messages, numels)
            return
        total: Bundle = added(*given)  # type: ignore[assignment]
        if one.scatter:
            rank = one.group.index(host.plan.device)
            host.slots[one.into] = shard(total, rank, len(one.group))
        else:
            host.slots[one.into] = unpacked(total, one.messages, sizes(self.taken))


def shard_sizes(gather: Gather) -> list[int]:
    return [padded // len(gather.group) for _, _, padded in gather.messages]


@dataclass
class AllToAllMember:
    """One device in a token all-to-all. It sees only how many rows come from each device."""

    host: Host
    position: int
    one: Exchange
    route: tuple[Matrix, Matrix] = ((), ())  # numbers of rows that are sent, and received

    @property
    def kind(self) -> tuple[object, ...]:
        return Exchange, self.one.way, [(shape[1:], dtype) for shape, dtype in self.one.shapes]

    @property
    def rank(self) -> int:
        return self.one.group.index(self.host.plan.device)

    def gives(self) -> list[tuple[Row, list[Row]]]:
        """For each device of the group, the number of rows of each expert, and the rows."""
        *rows, last = map(self.host.get, self.one.reads)
        ways = len(self.one.group)
        if self.one.way == "counted":
            self.route = equal_parts(of(last), ways), ()
        else:
            if isinstance(last, int) or len(last) != 2:
                raise Wrong(f"{self.one.reads[-1]} is not a route")
            self.route = equal_parts(last[0], ways), equal_parts(last[1], ways)
        sent, got = self.route
        if self.one.way == "back":
            parts = [to_sources(of(each), got) for each in rows]
        else:
            parts = [to_experts(of(each), sent) for each in rows]
        return [(sent[k], [part[k] for part in parts]) for k in range(ways)]

    def gets(self, given: Sequence[list[tuple[Row, list[Row]]]]) -> None:
        mine = [each[self.rank] for each in given]
        sent, got = self.route
        counted = self.one.way == "counted"
        got = tuple(counts for counts, _ in mine) if counted else got
        columns = zip(*(rows for _, rows in mine), strict=True)
        back = self.one.way == "back"
        found: list[Number] = [
            (at_sources(came, sent) if back else at_experts(came, got),) for came in columns
        ]
        if counted:
            here = tuple(map(sum, zip(*got, strict=True)))
            flat = tuple(tuple(n for row in matrix for n in row) for matrix in (sent, got))
            found += [(here,), flat]
        self.host.slots.update(zip(self.one.writes, found, strict=True))


@dataclass
class CollectiveInFlight:
    """One collective. It completes for no member before all have contributed."""

    members: list[Member] | list[AllToAllMember]  # in the order of the group
    given: list[Any] = field(default_factory=list)
    served: set[int] = field(default_factory=set)

    def move(self, host: Host) -> None:
        if not self.given:
            self.given = [member.gives() for member in self.members]
        device = host.plan.device
        if device not in self.served:
            self.served.add(device)
            next(m for m in self.members if m.host is host).gets(self.given)


@dataclass
class NormInFlight:
    """One loss and norm all-reduce."""

    hosts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def move(self, host: Host) -> None:
        host.meeting = self

    @property
    def sums(self) -> tuple[int, int]:
        losses, squares = zip(*self.hosts.values(), strict=True)
        return sum(losses) % PRIME, sum(squares) % PRIME


@dataclass(frozen=True)
class GatheredView:
    """The result of a gather: whatever its buffer holds when it is read."""

    buffer: int
    messages: tuple[Layout, ...]
    numels: list[int]
