"""An oracle without torch: what a step must give, and what plans give, both in whole numbers.

Kernels are hashes, so that no two different computations give the same number, and sums are sums.
`expected` is a plain loop over the model's regions; it knows no DAG, no strategy and no plan.
`executed` runs plans as a runtime may: transfers happen as early or as late as the plans allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from piper.ir.model import Model, Region
from piper.plan.instructions import (
    Add,
    Free,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Run,
    Send,
    Total,
    Update,
)  # fmt: skip

PRIME = 2**61 - 1
EARLY, LATE = "early", "late"  # data moves once both sides are there, or when it is waited for


class Wrong(Exception):
    """The plans hang, or use something that is not there."""


@dataclass(frozen=True)
class Outcome:
    """What a user can see after some steps."""

    weights: tuple[tuple[str, int], ...]  # of every bucket, the same on every device that has it
    totals: tuple[tuple[int, int], ...]  # loss and squared norm of each step


def mix(*parts: object) -> int:
    return hash(parts) % PRIME


def initial(bucket: str) -> int:
    return mix("initial", bucket)


def loaded(origin: str, index: int, part: int, parts: int, step: int) -> int:
    return mix(origin, index if origin == "batch" else 0, part, parts, step)


def weight_of(part: int) -> int:
    """Microbatches weigh differently in the loss."""
    return part + 3


def updated(bucket: str, old: int, grad: int, norm: int | None) -> int:
    return mix("update", bucket, old, grad, norm)


def kernel(model: Model, region: Region, phase: str, reads: Sequence[int]) -> Iterator[int]:
    """All that a phase writes, in order; BI and BW together give what B gives."""
    name = region.code, region.id
    if phase == "F":
        yield from (mix(name, "out", k, *reads) for k in range(len(region.outputs)))
        if region.has_backward:
            yield mix(name, "saved", *reads)
    if phase in ("B", "BI"):
        yield from (mix(name, "grad", k, *reads) for k in region.input_grads)
    if phase == "BI":
        yield mix(name, "carry", *reads)
    if phase == "B":
        reads = list(reads_of_weight_grads(region, reads))
    if phase in ("B", "BW"):
        yield from (mix(name, "weight", bucket, *reads) for bucket in model.trained(region))


def reads_of_weight_grads(region: Region, reads: Sequence[int]) -> Iterator[int]:
    """What BW would read, out of what B reads."""
    buckets, inputs = len(region.backward_buckets), len(region.backward_inputs)
    of_bucket = dict(zip(region.backward_buckets, reads, strict=False))
    of_input = dict(zip(region.backward_inputs, reads[buckets:], strict=False))
    of_grad = dict(zip(region.output_grads, reads[buckets + inputs + 1 :], strict=True))
    yield from (of_bucket[k] for k in region.weight_buckets)
    yield from (of_input[k] for k in region.weight_inputs)
    yield mix((region.code, region.id), "carry", *reads)
    yield from (of_grad[k] for k in region.weight_output_grads)


def expected(model: Model, parts: int, clip: bool, steps: int) -> Outcome:
    """Microbatch after microbatch, region after region, as plain training does."""
    weights = {bucket: initial(bucket) for region in model.regions for bucket in region.buckets}
    totals = []
    for step in range(steps):
        loss, grads = 0, dict.fromkeys(weights, 0)
        for part in range(parts):
            loss += weight_of(part) * one_microbatch(model, weights, grads, part, parts, step)
        trained = {bucket for region in model.regions for bucket in model.trained(region)}
        norm = sum(grads[bucket] ** 2 for bucket in trained) % PRIME
        for bucket in trained:
            grad = grads[bucket] % PRIME
            weights[bucket] = updated(bucket, weights[bucket], grad, norm if clip else None)
        totals.append((loss % PRIME, norm))
    return Outcome(tuple(sorted(weights.items())), tuple(totals))


def one_microbatch(
    model: Model,
    weights: Mapping[str, int],
    grads: dict[str, int],
    part: int,
    parts: int,
    step: int,
) -> int:
    """Forward and backward; adds to the buckets' gradients and returns the loss."""
    known = {
        name: loaded(value.origin, value.index, part, parts, step)
        for name, value in model.values.items()
        if value.origin != "flow"
    }
    saved = {}
    for region in model.regions:
        reads = [weights[b] for b in region.buckets] + [known[v] for v in region.inputs]
        *outputs, saved[region.id] = kernel(model, region, "F", reads)
        if not region.has_backward:
            outputs.append(saved.pop(region.id))
        known.update(zip(region.outputs, outputs, strict=True))
    flowing = {model.loss: loaded("seed", 0, part, parts, step)}
    for region in reversed(model.regions):
        if region.has_backward:
            reads = [
                *(weights[region.buckets[k]] for k in region.backward_buckets),
                *(known[region.inputs[k]] for k in region.backward_inputs),
                saved[region.id],
                *(flowing[region.outputs[k]] % PRIME for k in region.output_grads),
            ]
            given = list(kernel(model, region, "B", reads))
            for k, grad in zip(region.input_grads, given, strict=False):
                flowing[region.inputs[k]] = flowing.get(region.inputs[k], 0) + grad
            of_buckets = given[len(region.input_grads) :]
            for bucket, grad in zip(model.trained(region), of_buckets, strict=True):
                grads[bucket] += grad
    return known[model.loss]


@dataclass
class Link:
    """One transfer under way: who sends which buffer, who gets it where."""

    source: Host
    buffer: str
    target: Host
    into: str
    moved: bool = False

    def move(self) -> None:
        if not self.moved:
            self.moved = True
            self.target.slots[self.into] = self.source.get(self.buffer)


@dataclass
class Meeting:
    """One total under way."""

    hosts: dict[int, tuple[int, int]] = field(default_factory=dict)
    size: int = 0

    def move(self) -> None: ...

    @property
    def sums(self) -> tuple[int, int]:
        losses, squares = zip(*self.hosts.values(), strict=True)
        return sum(losses) % PRIME, sum(squares) % PRIME


@dataclass
class Host:
    """One device."""

    plan: Plan
    at: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    under_way: dict[int, Link | Meeting | None] = field(default_factory=dict)  # None: not met yet
    made: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)  # stream -> how far compute is, for sure
    local: tuple[int, int] = (0, 0)
    meeting: Meeting | None = None

    def get(self, buffer: str) -> int:
        if buffer not in self.slots:
            raise Wrong(f"device {self.plan.device}: nothing in {buffer}")
        return self.slots[buffer]

    def put(self, buffer: str, number: int, position: int) -> None:
        self.slots[buffer], self.made[buffer] = number, position


@dataclass
class World:
    """All devices and what is between them."""

    model: Model
    plans: Sequence[Plan]
    when: str
    step: int = 0
    channels: dict[tuple[str, int, int], tuple[deque, deque]] = field(default_factory=dict)
    meetings: dict[str, Meeting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hosts = {plan.device: Host(plan) for plan in self.plans}
        for host in self.hosts.values():
            for state in host.plan.states:
                host.slots[state.value] = initial(state.bucket)

    def run(self) -> None:
        """One step."""
        self.channels, self.meetings = {}, {}
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
            found.move()
            if isinstance(found, Meeting):
                host.meeting = found

    def do(self, host: Host, one: Instruction) -> None:
        match one:
            case Load():
                number = loaded(one.origin, one.index, one.part, one.parts, self.step)
                host.put(one.value, number, host.at)
            case Run():
                region = self.model.by_id[one.region]  # type: ignore[index]
                given = kernel(self.model, region, one.phase, [*map(host.get, one.reads)])
                for buffer, number in zip(one.writes, given, strict=True):
                    host.put(buffer, number, host.at)
            case Keep():
                host.put(one.into, host.get(one.value), host.at)
                del host.slots[one.value]
            case Add():
                total = host.get(one.into) + host.get(one.value)
                host.put(one.into, total % PRIME, host.at)
                del host.slots[one.value]
            case Send():
                self.send(host, one)
            case Recv():
                ends = one.stream, one.peer, host.plan.device
                self.meet(ends, host, one, 1)
            case Total():
                self.total(host, one)
            case Update():
                self.update(host, one)
            case Free():
                for buffer in one.values:
                    host.get(buffer)
                    del host.slots[buffer]

    def send(self, host: Host, send: Send) -> None:
        made, known = host.made.get(send.value, -1), host.known.get(send.stream, -1)
        host.known[send.stream] = max(known, *send.waits, -1)
        if made > host.known[send.stream]:
            raise Wrong(f"{send.value} may be sent before it is made")
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
                link.move()

    def total(self, host: Host, total: Total) -> None:
        loss = sum(weight_of(part) * host.get(buffer) for buffer, part in total.losses)
        square = sum(host.get(buffer) ** 2 for buffer in total.grads)
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


def executed(model: Model, plans: Sequence[Plan], when: str, steps: int) -> Outcome:
    """What plans give; raises Wrong when they hang or use what is not there."""
    world = World(model, plans, when)
    totals: list[tuple[int, int]] = []
    for _ in range(steps):
        world.run()
        seen = {host.meeting.sums if host.meeting else None for host in world.hosts.values()}
        if len(seen) != 1 or None in seen:
            raise Wrong(f"totals differ: {seen}")
        totals += seen  # type: ignore[arg-type]
    weights: dict[str, int] = {}
    for host in world.hosts.values():
        for state in host.plan.states:
            if weights.setdefault(state.bucket, host.get(state.value)) != host.get(state.value):
                raise Wrong(f"copies of {state.bucket} differ")
    return Outcome(tuple(sorted(weights.items())), tuple(totals))
