"""Peak memory of a device and what holds it, computed from its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from piper.ir.dag import Dag
from piper.ir.model import Bucket, Specs
from piper.ir.naming import weights
from piper.ir.values import Role, TensorSpec
from piper.names import BucketId, Phase, RegionId, ValueId
from piper.plan.buffer_layout import offsets
from piper.plan.instructions import (
    Fetch,
    Gather,
    Instruction,
    Keep,
    Layout,
    Plan,
    Reduce,
    Run,
    Slice,
    State,
    Store,
    Update,
    is_message,
)
from piper.plan.instructions.sizes import message_bytes

PARAMETERS, MASTERS, OPTIMIZER, BUFFERS = "parameters", "masters", "optimizer", "gather buffers"
HOST = "host memory"
GRADIENTS, ACTIVATIONS, MOVING, WORKSPACE = "gradients", "activations", "moving", "workspace"


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of a step on one device."""

    total: int
    at: int  # the instruction
    held: Mapping[str, int]  # bytes, by what they are for
    host: int = 0  # the most bytes in host memory at any time

    def __str__(self) -> str:
        lines = [
            f"  {what:15} {size / 2**20:10.2f} MiB" for what, size in self.held.items() if size
        ]
        apart = [f"  and {self.host / 2**20:.2f} MiB in host memory"] if self.host else []
        return "\n".join([f"{self.total / 2**20:.2f} MiB at instruction {self.at}", *lines, *apart])


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory held while an instruction runs, without what outlives the step."""

    at: int  # the instruction
    held: Mapping[str, int]  # bytes, by what they are for


def peak(
    dag: Dag, plan: Plan, optimizer: float = 2.0, staging: int = 1, compiled: bool = False
) -> Peak:
    """Walk the plan. Inputs belong to the caller and are not counted.

    `optimizer` is the size of its state, in multiples of the parameters it updates (Adam: 2).
    `staging` is the number of extra whole gradients that a reduce-scatter holds (gloo: 1, NCCL: 0).
    If regions are `compiled`, results that a kernel keeps to itself need no memory.
    """
    dag = dag.seen_by(plan.device)
    walk = Walk(dag, plan, staging, follow=False, compiled=compiled)
    for _ in walk.along():
        pass
    fixed = dict(lasting(dag, plan, optimizer))
    total = walk.worst + sum(fixed.values())
    host = walk.most_on_host + sum(kept_on_host(dag, plan, optimizer))
    both = {what: fixed.get(what, 0) + walk.held.get(what, 0) for what in {**fixed, **walk.held}}
    return Peak(total, walk.at, both, host)


def timeline(dag: Dag, plan: Plan, staging: int = 1) -> tuple[Moment, ...]:
    """Memory over the plan: one moment for each instruction that changes it."""
    walk, found = Walk(dag.seen_by(plan.device), plan, staging), list[Moment]()
    for position in walk.along():
        if not found or walk.seen != found[-1].held:
            found.append(Moment(position, walk.seen))
    return tuple(found)


def holders(dag: Dag, plan: Plan, at: int, staging: int = 1) -> list[tuple[str, str, int]]:
    """The buffers held after an instruction: name, kind, bytes; the largest first."""
    walk = Walk(dag.seen_by(plan.device), plan, staging)
    for position in walk.along():
        if position == at:
            break
    buffers = [(name, kind, size) for name, (kind, size) in walk.sizes.items() if size]
    return sorted(buffers, key=lambda buffer: -buffer[2])


def lasting(dag: Dag, plan: Plan, optimizer: float) -> Iterator[tuple[str, int]]:
    """Memory that outlives the step."""
    trained = [bucket_of(dag, state) for state in updated_states(plan) if not state.host]
    masters = sum(total_bytes(bucket.masters(specs)) for bucket, specs in trained)
    stepped = sum(total_bytes(bucket.updated(specs)) for bucket, specs in trained)
    yield PARAMETERS, sum(parameter_bytes(dag, one) for one in plan.states if not one.on_host)
    if masters:
        yield MASTERS, masters
    yield OPTIMIZER, int(optimizer * stepped)


def bucket_of(dag: Dag, state: State) -> tuple[Bucket, Specs]:
    """The bucket of a state, and what the state holds of it."""
    return dag.model.buckets[BucketId(state.bucket)], dag.values[ValueId(state.value)].specs


def parameter_bytes(dag: Dag, state: State) -> int:
    """Without masters. If these are all that is held, it is what has the type of a master."""
    bucket, specs = bucket_of(dag, state)
    if not (state.rounded_late and bucket.trainable):
        return total_bytes(specs)
    return total_bytes(bucket.updated(specs)) - total_bytes(bucket.masters(specs))


def updated_states(plan: Plan) -> list[State]:
    updated = {one.bucket for one in plan.instructions if isinstance(one, Update)}
    return [state for state in plan.states if state.home and state.bucket in updated]


def kept_on_host(dag: Dag, plan: Plan, optimizer: float) -> Iterator[int]:
    """Parameters, optimizer state and masters that outlive the step in host memory."""
    for one in (one for one in plan.states if one.on_host):
        yield total_bytes(dag.values[ValueId(one.value)].specs)
    for state in (state for state in updated_states(plan) if state.host):
        bucket, held = bucket_of(dag, state)
        yield int(optimizer * total_bytes(bucket.updated(held)))
        yield total_bytes(bucket.masters(held))


def total_bytes(specs: Specs) -> int:
    return sum(spec.nbytes for spec in specs)


@dataclass
class Walk:
    """The memory held at the current position of a plan."""

    dag: Dag
    plan: Plan
    staging: int
    follow: bool = True  # whether to keep the peak of each instruction
    compiled: bool = False  # whether a compiler fuses the operators of regions
    sizes: dict[str, tuple[str, int]] = field(default_factory=dict)  # buffer -> kind, bytes
    now: Counter[str] = field(default_factory=Counter)  # bytes, by kind
    coming: dict[int, tuple[str, int]] = field(default_factory=dict)  # reduce-scatters in flight
    worst: int = 0
    at: int = 0
    held: dict[str, int] = field(default_factory=dict)
    on_host: int = 0  # bytes in host memory
    most_on_host: int = 0
    most: int = -1  # total bytes at the peak of this instruction
    seen: dict[str, int] = field(default_factory=dict)  # bytes by kind at that peak

    def __post_init__(self) -> None:
        self.states = {state.value for state in self.plan.states}
        self.known: dict[int, int] = {}

    def along(self) -> Iterator[int]:
        """Walk through the plan. Yields after each instruction."""
        for position, instruction in enumerate(self.plan.instructions):
            self.most = -1
            for wait in instruction.waits:
                self.settle(wait)
            self.do(position, instruction)
            yield position

    def do(self, position: int, one: Instruction) -> None:
        match one:
            case Run():
                self.run(position, one)
            case Keep():
                self.sizes[one.into] = self.sizes.pop(one.value)
            case Reduce():
                self.reduce(position, one)
            case Slice():
                self.put(one.into, ACTIVATIONS, self.size(one.into))
            case Store():
                if not one.bucket and one.into not in self.states:  # these stay where they were
                    self.put(one.into, HOST, self.size(one.into))
            case Fetch():
                self.put(one.into, self.fetched(one), self.size(one.into))
            case Update():
                self.look(position, self.largest(one))
            case _:
                self.move(one)
        self.look(position)

    def fetched(self, one: Fetch) -> str:
        """What it is for."""
        if one.bucket:
            return OPTIMIZER
        return PARAMETERS if one.value in self.states else ACTIVATIONS

    def move(self, one: Instruction) -> None:
        """Messages allocate what they receive, unless it goes to a state."""
        if isinstance(one, Gather):
            self.put(one.into, BUFFERS, offsets(one.messages)[-1])
        elif is_message(one):
            for value in one.defines:
                if value not in self.states:
                    self.put(value, ACTIVATIONS, self.size(value))
        for value in one.ends:
            self.drop(value)

    def run(self, position: int, run: Run) -> None:
        """While it runs, its results count as workspace. Then saved activations are freed."""
        region = self.dag.model.by_id[RegionId(run.region)]
        cut = self.dag.shardings.get(region.id)
        shares = cut.ways if cut else 1
        self.look(position, region.allocates(Phase(run.phase), shares, self.compiled))
        for value in run.reads:
            if self.role(value) in (Role.SAVED, Role.CARRY):
                self.drop(value)
        for value in run.writes:
            kind = GRADIENTS if self.role(value) is Role.WEIGHT_GRADIENT else ACTIVATIONS
            self.put(value, kind, self.size(value))

    def reduce(self, position: int, one: Reduce) -> None:
        """Gradients are packed message by message. A message that is one tensor is not copied."""
        flat = sum(map(message_bytes, one.messages))
        copied = [m for m in one.messages if len(m[1]) > 1 or self.is_padded(one, m)]
        self.look(position, max(map(message_bytes, copied), default=0))
        self.drop(one.value)
        if one.scatter:
            self.now[MOVING] += flat * (1 + self.staging)
            self.coming[position] = (one.into, flat * (1 + self.staging))
        else:
            self.put(one.into, GRADIENTS, flat)

    def is_padded(self, one: Reduce, message: Layout) -> bool:
        known = self.dag.values[self.dag.nodes[one.node].reads[0][0]]  # type: ignore[index]
        return sum(known.specs[k].numel for k in message[1]) != message[2]

    def settle(self, position: int) -> None:
        """A reduce-scatter has completed: its shard is allocated, the whole gradient is freed."""
        if position in self.coming:
            into, moving = self.coming.pop(position)
            self.look(position, self.size(into))
            self.now[MOVING] -= moving
            self.put(into, GRADIENTS, self.size(into))

    def role(self, value: str) -> Role | None:
        """None for buffers that are not values of the DAG: sums, inputs of a second replica."""
        known = self.dag.local_values.get(ValueId(value))
        return known.role if known else None

    def size(self, value: str) -> int:
        known = self.dag.local_values.get(ValueId(value))
        return self.bytes_of(known.specs) if known else 0

    def bytes_of(self, specs: tuple[TensorSpec, ...]) -> int:
        """Cached by identity: the values of all microbatches share their specs."""
        found = self.known.get(id(specs))
        if found is None:
            found = self.known[id(specs)] = sum(spec.nbytes for spec in specs)
        return found

    def largest(self, update: Update) -> int:
        """An optimizer works on one tensor at a time, with up to two temporary copies of it.

        Gradients that are not in the type of the masters are converted before.
        """
        bucket = self.dag.model.buckets[BucketId(update.bucket)]
        held = self.dag.values[weights(bucket.id)].specs
        specs, grads = bucket.updated(held), bucket.gradients(held)
        converted = (new.nbytes for new, old in zip(specs, grads, strict=True) if new != old)
        return 2 * max((spec.nbytes for spec in specs), default=0) + sum(converted)

    def put(self, value: str, kind: str, size: int) -> None:
        self.sizes[value] = (kind, size)
        self.count(kind, size)

    def drop(self, value: str) -> None:
        kind, size = self.sizes.pop(value, (ACTIVATIONS, 0))
        self.count(kind, -size)

    def count(self, kind: str, more: int) -> None:
        """What is in host memory is counted apart."""
        if kind == HOST:
            self.on_host += more
            self.most_on_host = max(self.most_on_host, self.on_host)
        else:
            self.now[kind] += more

    def look(self, position: int, more: int = 0) -> None:
        total = self.now.total() + more
        if self.follow and total > self.most:
            self.most, self.seen = total, {**self.now, WORKSPACE: more}
        if total > self.worst:
            self.worst, self.at = total, position
            self.held = {**self.now, WORKSPACE: more}
