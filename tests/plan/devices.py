"""Execute plans on integers. Communication happens as early or as late as the plans allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plan.in_flight import (
    AllToAllMember,
    CollectiveInFlight,
    CopyInFlight,
    GatheredView,
    Member,
    NormInFlight,
    TransferInFlight,
)
from plan.integer_tensors import (
    PRIME,
    Bundle,
    Number,
    Wrong,
    added,
    joined,
    packed,
    shard,
    unpacked,
)
from plan.numbers import Outcome, initial, kernel, loaded, squared, updated, weight_of
from plan.tokens import equal_parts, joined_rows

from piper.ir.model import Model
from piper.ir.values import ITEM_BYTES
from piper.plan.instructions import (
    Add,
    Exchange,
    Fetch,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    State,
    Store,
    Total,
    Update,
)  # fmt: skip

EARLY, LATE = "early", "late"  # data moves when all sides have started it, or when it is waited for


InFlight = TransferInFlight | CollectiveInFlight | NormInFlight | CopyInFlight
Communicating = Send | Reduce | Exchange | Store | Fetch


@dataclass
class Host:
    """One device."""

    plan: Plan
    at: int = 0
    feed: int = 0
    slots: dict[str, Number | GatheredView] = field(default_factory=dict)
    buffers: dict[int, Bundle] = field(default_factory=dict)  # what the last gather wrote
    under_way: dict[int, InFlight | None] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(
        default_factory=dict
    )  # stream -> the last compute that it has waited for
    local: tuple[int, int] = (0, 0)
    meeting: NormInFlight | None = None

    def get(self, buffer: str) -> Number:
        if buffer not in self.slots:
            raise Wrong(f"device {self.plan.device}: nothing in {buffer}")
        found = self.slots[buffer]
        if isinstance(found, GatheredView):
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
    """All devices and the communication between them."""

    model: Model
    plans: Sequence[Plan]
    when: str
    feed_of: Mapping[int, int] = field(default_factory=dict)  # by device
    step: int = 0
    channels: dict[tuple[str, int, int], tuple[deque, deque]] = field(default_factory=dict)
    groups: dict[tuple[str, tuple[int, ...]], dict[int, deque]] = field(default_factory=dict)
    meetings: dict[str, NormInFlight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hosts = {
            plan.device: Host(plan, feed=self.feed_of.get(plan.device, 0)) for plan in self.plans
        }
        for host in self.hosts.values():
            for state in host.plan.states:
                host.slots[state.value] = at_first(self.model, state)
                if state.host:
                    host.slots[f"o:{state.bucket}"] = token(state.bucket, 0)

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
                    one.role, one.index, one.part, one.parts, self.step, host.feed
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
                self.must_be_made(host, one, one.value)
                self.join(Member(host, host.at, one, host.take(one.value)))
            case Exchange():
                self.must_be_made(host, one, *one.reads)
                self.join(AllToAllMember(host, host.at, one))
            case Gather():
                self.must_have_room(host, one)
                self.join(Member(host, host.at, one))
            case Store() | Fetch():
                self.must_be_made(host, one, one.value)
                self.copy(host, one)
            case Total():
                self.total(host, one)
            case Update():
                self.update(host, one)
            case Free():
                for buffer in one.values:
                    host.end(buffer)

    def must_be_made(self, host: Host, one: Communicating, *buffers: str) -> None:
        """A communication stream sees only results that it has waited for."""
        known = max(host.known.get(one.stream, -1), *one.waits, -1)
        host.known[one.stream] = known
        for buffer in buffers:
            if host.made.get(buffer, -1) > known:
                raise Wrong(f"{buffer} may be sent before it is made")

    def copy(self, host: Host, one: Store | Fetch) -> None:
        copy = host.under_way[host.at] = CopyInFlight(one.value, one.into)
        if self.when == EARLY:
            copy.move(host)

    def must_have_room(self, host: Host, gather: Gather) -> None:
        needed = sum(padded * ITEM_BYTES[dtype] for dtype, _, padded in gather.messages)
        rooms = dict(enumerate(host.plan.buffers))
        if rooms.get(gather.buffer, -1) < needed:
            raise Wrong(f"buffer {gather.buffer} has no room for {gather.into}")

    def join(self, member: Member | AllToAllMember) -> None:
        """Collectives of one group match in order, separately on each stream."""
        group, here = member.one.group, member.host.plan.device
        if here not in group or not self.hosts.keys() >= {*group}:
            raise Wrong(f"device {here} is not in the group {group}, or others do not exist")
        empty: dict[int, deque] = {device: deque() for device in group}
        queues = self.groups.setdefault((member.one.stream, group), empty)
        queues[here].append(member)
        member.host.under_way[member.position] = None
        while all(queues.values()):
            self.come_together([queue.popleft() for queue in queues.values()])

    def come_together(self, members: list[Member] | list[AllToAllMember]) -> None:
        if any(member.kind != members[0].kind for member in members):
            raise Wrong(f"{members[0].one.node} meets something else")
        together = CollectiveInFlight(members)
        for member in members:
            member.host.under_way[member.position] = together
            if self.when == EARLY:
                together.move(member.host)

    def send(self, host: Host, send: Send) -> None:
        self.must_be_made(host, send, send.value)
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
            link = TransferInFlight(source, send.value, target, recv.value)
            source.under_way[sent] = target.under_way[got] = link
            if self.when == EARLY:
                link.move(source)

    def total(self, host: Host, total: Total) -> None:
        weighed = [(weight_of(part, host.feed), host.get(name)) for name, part in total.losses]
        loss = sum(weight * loss for weight, loss in weighed)  # type: ignore[operator]
        square = sum(squared(host.get(buffer)) for buffer in total.grads)
        host.local = loss % PRIME, square % PRIME
        meeting = self.meetings.setdefault(total.node, NormInFlight())
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
        if update.optimizer:
            if host.get(update.optimizer) != token(update.bucket, self.step):
                raise Wrong(f"{update.optimizer} is not the state of {update.bucket}")
            host.put(update.optimizer, token(update.bucket, self.step + 1), host.at)
        state = update.parameters or f"w:{update.bucket}"
        if any(one.on_host for one in host.plan.states if one.value == state):
            raise Wrong(f"{state} is updated in host memory")
        new = updated(update.bucket, host.get(state), host.get(update.grad), norm)
        host.put(state, new, host.at)


def token(bucket: str, step: int) -> int:
    """The state of an optimizer after so many steps."""
    return sum(map(ord, bucket)) * 1000 + step


def positions(plan: Plan, kind: type) -> list[int]:
    return [k for k, one in enumerate(plan.instructions) if isinstance(one, kind)]


def at_first(model: Model, state: State) -> Bundle:
    if not 0 <= state.share < state.shares:
        raise Wrong(f"there is no share {state.share} of {state.bucket}")
    held = tuple(
        equal_parts(tensor, state.shares)[state.share] for tensor in initial(model, state.bucket)
    )
    return shard(packed(held, state.messages), state.shard, state.ways) if state.ways > 1 else held


def executed(
    model: Model,
    plans: Sequence[Plan],
    when: str,
    steps: int,
    feed_of: Mapping[int, int] | None = None,
) -> Outcome:
    """The results of plans. Raises Wrong if they deadlock or read an empty buffer.

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
    """All buckets, whole; every copy and every replica of a share or a shard must be the same."""
    weights: dict[str, Number] = {}
    held: dict[tuple[str, int], dict[int, Number]] = {}  # bucket, shares -> by share
    shards: dict[tuple[object, ...], dict[int, Number]] = {}
    for host in world.hosts.values():
        for state in host.plan.states:
            number, whole = host.get(state.value), (state.bucket, state.shares)
            if state.ways == 1:
                agree(held.setdefault(whole, {}), state.share, number, state.bucket)
            else:
                key = (*whole, state.share, state.ways, state.messages)
                agree(shards.setdefault(key, {}), state.shard, number, state.bucket)
    for (bucket, shares, share, ways, messages), found in shards.items():
        numels = [
            spec.numel // shares
            for spec in world.model.buckets[bucket].specs  # type: ignore
        ]
        part = unpacked(joined(in_a_row(found, ways, bucket)), messages, numels)  # type: ignore
        agree(held.setdefault((bucket, shares), {}), share, part, bucket)  # type: ignore
    for (bucket, shares), found in held.items():
        tensors = zip(*in_a_row(found, shares, bucket), strict=True)
        agree(weights, bucket, tuple(map(joined_rows, tensors)), bucket)
    return weights


def agree(known: dict, key: object, number: Number, bucket: str) -> None:
    if known.setdefault(key, number) != number:
        raise Wrong(f"copies of {bucket} differ")


def in_a_row(found: dict[int, Number], count: int, bucket: str) -> list:
    if sorted(found) != list(range(count)):
        raise Wrong(f"parts of {bucket} are missing")
    return [found[k] for k in range(count)]
