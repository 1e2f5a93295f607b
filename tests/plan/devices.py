"""Plans, run in whole numbers, as a runtime may: transfers and collectives happen as early or as
late as the plans allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from plan.bundles import (
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
)  # fmt: skip
from plan.numbers import Outcome, initial, kernel, loaded, squared, updated, weight_of

from piper.ir.model import Model
from piper.ir.values import ITEM_BYTES
from piper.plan.instructions import (
    Add,
    Free,
    Gather,
    Instruction,
    Keep,
    Layout,
    Load,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    State,
    Total,
    Update,
)  # fmt: skip

EARLY, LATE = "early", "late"  # data moves once all sides are there, or when it is waited for


@dataclass
class Link:
    """One transfer under way: who sends which buffer, who gets it where."""

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
class Member:
    """One device in a collective."""

    host: Host
    position: int
    one: Reduce | Gather
    taken: Number = ()  # Reduce: the bundle, which has ended for everyone else

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be the same for all members; nobody sees what a message is made of."""
        form = [(dtype, padded) for dtype, _, padded in self.one.messages]
        return type(self.one), getattr(self.one, "scatter", None), form

    def gives(self) -> Bundle:
        if isinstance(self.one, Reduce):
            return packed(self.taken, self.one.messages)
        mine = self.host.get(self.one.value)
        if isinstance(mine, int) or sizes(mine) != shard_sizes(self.one):
            raise Wrong(f"{self.one.value} is no shard of {self.one.into}")
        return mine

    def gets(self, given: Sequence[Bundle]) -> None:
        one, host = self.one, self.host
        if isinstance(one, Gather):
            numels = [prod(size or 0 for size in shape) for shape, _ in one.shapes]
            host.buffers[one.buffer] = joined(given)
            host.slots[one.into] = Window(one.buffer, one.messages, numels)
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
class Exchange:
    """One collective under way. It cannot end for anyone before all have given their part."""

    members: list[Member]  # in the order of the group
    given: list[Bundle] = field(default_factory=list)
    served: set[int] = field(default_factory=set)

    def move(self, host: Host) -> None:
        if not self.given:
            self.given = [member.gives() for member in self.members]
        device = host.plan.device
        if device not in self.served:
            self.served.add(device)
            next(m for m in self.members if m.host is host).gets(self.given)


@dataclass
class Meeting:
    """One total under way."""

    hosts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def move(self, host: Host) -> None:
        host.meeting = self

    @property
    def sums(self) -> tuple[int, int]:
        losses, squares = zip(*self.hosts.values(), strict=True)
        return sum(losses) % PRIME, sum(squares) % PRIME


@dataclass(frozen=True)
class Window:
    """What a gather gave: whatever is in its buffer by now."""

    buffer: int
    messages: tuple[Layout, ...]
    numels: list[int]


@dataclass
class Host:
    """One device."""

    plan: Plan
    at: int = 0
    feed: int = 0
    slots: dict[str, Number | Window] = field(default_factory=dict)
    buffers: dict[int, Bundle] = field(default_factory=dict)  # what gathers put there last
    under_way: dict[int, Link | Exchange | Meeting | None] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)  # stream -> how far compute is, for sure
    local: tuple[int, int] = (0, 0)
    meeting: Meeting | None = None

    def get(self, buffer: str) -> Number:
        if buffer not in self.slots:
            raise Wrong(f"device {self.plan.device}: nothing in {buffer}")
        found = self.slots[buffer]
        if isinstance(found, Window):
            return unpacked(self.buffers[found.buffer], found.messages, found.numels)
        return found

    def take(self, buffer: str) -> Number:
        number = self.get(buffer)
        del self.slots[buffer]
        return number

    def end(self, buffer: str) -> None:
        if buffer not in self.slots:
            raise Wrong(f"device {self.plan.device}: nothing in {buffer}")
        del self.slots[buffer]

    def put(self, buffer: str, number: Number, position: int) -> None:
        self.slots[buffer], self.made[buffer] = number, position


@dataclass
class World:
    """All devices and what is between them."""

    model: Model
    plans: Sequence[Plan]
    when: str
    feed_of: Mapping[int, int] = field(default_factory=dict)  # by device
    step: int = 0
    channels: dict[tuple[str, int, int], tuple[deque, deque]] = field(default_factory=dict)
    groups: dict[tuple[str, tuple[int, ...]], dict[int, deque]] = field(default_factory=dict)
    meetings: dict[str, Meeting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hosts = {
            plan.device: Host(plan, feed=self.feed_of.get(plan.device, 0)) for plan in self.plans
        }
        for host in self.hosts.values():
            for state in host.plan.states:
                host.slots[state.value] = at_first(self.model, state)

    def run(self) -> None:
        """One step."""
        self.channels, self.groups, self.meetings = {}, {}, {}
        for host in self.hosts.values():
            host.at, host.under_way, host.meeting, host.known = 0, {}, None, {}
        while sum(self.advance(host) for host in self.hosts.values()):
            pass
        for host in self.hosts.values():
            if host.at < len(host.plan.instructions):
                raise Wrong(f"device {host.plan.device} hangs")
            for position in list(host.under_way):
                self.wait(host, position)
        self.step += 1

    def advance(self, host: Host) -> bool:
        before = host.at
        while host.at < len(host.plan.instructions):
            instruction = host.plan.instructions[host.at]
            if any(host.under_way.get(w, host) is None or w >= host.at for w in instruction.waits):
                break
            for position in instruction.waits:
                self.wait(host, position)
            self.do(host, instruction)
            host.at += 1
        return host.at > before

    def wait(self, host: Host, position: int) -> None:
        if position in host.under_way:
            found = host.under_way.pop(position)
            if found is None:
                raise Wrong(f"device {host.plan.device}: instruction {position} meets nothing")
            found.move(host)

    def do(self, host: Host, one: Instruction) -> None:
        match one:
            case Load():
                number = loaded(
                    one.origin, one.index, one.part, one.parts, self.step, host.feed
                )  # fmt: skip
                host.put(one.value, number, host.at)
            case Run():
                region = self.model.by_id[one.region]  # type: ignore[index]
                given = kernel(self.model, region, one.phase, [*map(host.get, one.reads)])
                for buffer, number in zip(one.writes, given, strict=True):
                    host.put(buffer, number, host.at)
            case Keep():
                host.put(one.into, host.take(one.value), host.at)
            case Add():
                host.put(one.into, added(host.get(one.into), host.take(one.value)), host.at)
            case Send():
                self.send(host, one)
            case Recv():
                ends = one.stream, one.peer, host.plan.device
                self.meet(ends, host, one, 1)
            case Reduce():
                self.must_be_made(host, one)
                self.join(Member(host, host.at, one, host.take(one.value)))
            case Gather():
                self.must_have_room(host, one)
                self.join(Member(host, host.at, one))
            case Total():
                self.total(host, one)
            case Update():
                self.update(host, one)
            case Free():
                for buffer in one.values:
                    host.end(buffer)

    def must_be_made(self, host: Host, one: Send | Reduce) -> None:
        """What runs beside compute knows only what its stream has waited for."""
        made, known = host.made.get(one.value, -1), host.known.get(one.stream, -1)
        host.known[one.stream] = max(known, *one.waits, -1)
        if made > host.known[one.stream]:
            raise Wrong(f"{one.value} may be sent before it is made")

    def must_have_room(self, host: Host, gather: Gather) -> None:
        needed = sum(padded * ITEM_BYTES[dtype] for dtype, _, padded in gather.messages)
        rooms = dict(enumerate(host.plan.buffers))
        if rooms.get(gather.buffer, -1) < needed:
            raise Wrong(f"buffer {gather.buffer} has no room for {gather.into}")

    def join(self, member: Member) -> None:
        """Collectives of one group meet in order, on each stream by itself."""
        group, here = member.one.group, member.host.plan.device
        if here not in group or not self.hosts.keys() >= {*group}:
            raise Wrong(f"device {here} is not in the group {group}, or others do not exist")
        empty: dict[int, deque] = {device: deque() for device in group}
        queues = self.groups.setdefault((member.one.stream, group), empty)
        queues[here].append(member)
        member.host.under_way[member.position] = None
        while all(queues.values()):
            self.exchange([queue.popleft() for queue in queues.values()])

    def exchange(self, members: list[Member]) -> None:
        if any(member.kind != members[0].kind for member in members):
            raise Wrong(f"{members[0].one.node} meets something else")
        together = Exchange(members)
        for member in members:
            member.host.under_way[member.position] = together
            if self.when == EARLY:
                together.move(member.host)

    def send(self, host: Host, send: Send) -> None:
        self.must_be_made(host, send)
        self.meet((send.stream, host.plan.device, send.peer), host, send, 0)

    def meet(self, ends: tuple[str, int, int], host: Host, one: Send | Recv, side: int) -> None:
        """Rendezvous, in order on each channel."""
        queues = self.channels.setdefault(ends, (deque(), deque()))
        queues[side].append((host, host.at, one))
        host.under_way[host.at] = None
        while queues[0] and queues[1]:
            (source, sent, send), (target, got, recv) = (queue.popleft() for queue in queues)
            if send.shapes != recv.shapes:
                raise Wrong(f"{send.value} does not fit in {recv.value}")
            link = Link(source, send.value, target, recv.value)
            source.under_way[sent] = target.under_way[got] = link
            if self.when == EARLY:
                link.move(source)

    def total(self, host: Host, total: Total) -> None:
        weighed = [(weight_of(part, host.feed), host.get(name)) for name, part in total.losses]
        loss = sum(weight * loss for weight, loss in weighed)  # type: ignore[operator]
        square = sum(squared(host.get(buffer)) for buffer in total.grads)
        host.local = loss % PRIME, square % PRIME
        meeting = self.meetings.setdefault(total.node, Meeting())
        meeting.hosts[host.plan.device] = host.local
        host.under_way[host.at] = None
        if len(meeting.hosts) == len(self.hosts):
            for other in self.hosts.values():
                position = positions(other.plan, Total)[0]
                other.under_way[position] = meeting

    def update(self, host: Host, update: Update) -> None:
        norm = None
        if update.clip:
            norm = host.meeting.sums[1] if host.meeting else host.local[1]
        state = f"w:{update.bucket}"
        new = updated(update.bucket, host.get(state), host.get(update.grad), norm)
        host.put(state, new, host.at)


def positions(plan: Plan, kind: type) -> list[int]:
    return [k for k, one in enumerate(plan.instructions) if isinstance(one, kind)]


def at_first(model: Model, state: State) -> Bundle:
    whole = initial(model, state.bucket)
    return (
        shard(packed(whole, state.messages), state.shard, state.ways) if state.ways > 1 else whole
    )


def executed(
    model: Model,
    plans: Sequence[Plan],
    when: str,
    steps: int,
    feed_of: Mapping[int, int] | None = None,
) -> Outcome:
    """What plans give; raises Wrong when they hang or use what is not there.

    `feed_of`: which batch each device is fed; without it, all get the same.
    """
    world = World(model, plans, when, feed_of or {})
    totals: list[tuple[int, int]] = []
    for _ in range(steps):
        world.run()
        seen = {host.meeting.sums if host.meeting else None for host in world.hosts.values()}
        if len(seen) != 1 or None in seen:
            raise Wrong(f"totals differ: {seen}")
        totals += seen  # type: ignore[arg-type]
    return Outcome(tuple(sorted(final_weights(world).items())), tuple(totals))


def final_weights(world: World) -> dict[str, Number]:
    """All buckets, whole; every copy and every replica of a shard must be the same."""
    weights: dict[str, Number] = {}
    shards: dict[tuple[str, int, tuple[Layout, ...]], dict[int, Number]] = {}

    def agree(known: dict, key: object, number: Number, bucket: str) -> None:
        if known.setdefault(key, number) != number:
            raise Wrong(f"copies of {bucket} differ")

    for host in world.hosts.values():
        for state in host.plan.states:
            number = host.get(state.value)
            if state.ways == 1:
                agree(weights, state.bucket, number, state.bucket)
            else:
                found = shards.setdefault((state.bucket, state.ways, state.messages), {})
                agree(found, state.shard, number, state.bucket)
    for (bucket, ways, messages), found in shards.items():
        if sorted(found) != list(range(ways)):
            raise Wrong(f"shards of {bucket} are missing")
        numels = [spec.numel for spec in world.model.buckets[bucket].specs]  # type: ignore[index]
        whole = joined([found[k] for k in range(ways)])  # type: ignore[misc]
        agree(weights, bucket, unpacked(whole, messages, numels), bucket)
    return weights
