"""From a scheduled DAG to one plan per device."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from piper.ir.dag import Dag
from piper.ir.nodes import Compute, Sum, Totals
from piper.ir.nodes import Update as UpdateNode
from piper.ir.values import Origin, Value
from piper.names import NodeId, ValueId
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
    Shape,
    State,
    Total,
    Update,
    Waits,
)
from piper.plan.rows import Row, Work, proven_received, receiver, rows, sender


def lower(dag: Dag) -> tuple[Plan, ...]:
    """The plans of all devices, in the order of the devices."""
    assert dag.sequence, "schedule the DAG before lowering it"
    found = rows(dag)
    return tuple(
        Lowering(dag, row, proven_received(dag, found, row)).plan() for row in found.values()
    )


@dataclass
class Lowering:
    """The plan of one device, being written."""

    dag: Dag
    row: Row
    proofs: dict[NodeId, int]
    code: list[Instruction] = field(default_factory=list)
    made_by: dict[str, int] = field(default_factory=dict)  # buffer -> instruction to wait for
    arriving: dict[str, int] = field(default_factory=dict)  # received, not waited for yet
    started: set[str] = field(default_factory=set)  # sums that have their first part
    loaded: set[str] = field(default_factory=set)
    sent: dict[str, list[int]] = field(default_factory=dict)  # buffer -> sends that read it
    states: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = local_sums(self.row)
        self.received = {transfer.writes[0] for transfer in self.row.gets.values()}
        self.ends = endings(self.row, self.sums, self.proofs)

    def plan(self) -> Plan:
        for position, node in enumerate(self.row.work):
            self.post(position)
            self.do(node)
            self.send(position + 1)
            self.free(position)
        self.post(len(self.row.work))
        self.free(len(self.row.work))
        return Plan(self.row.device, tuple(self.states.values()), tuple(self.code))

    def emit(self, instruction: Instruction) -> int:
        self.code.append(instruction)
        return len(self.code) - 1

    def post(self, position: int) -> None:
        for transfer in self.row.posts.get(position, ()):
            value, known = self.storage(transfer.writes[0]), self.dag.values[transfer.writes[0]]
            peer = sender(transfer, self.row.device)
            self.arriving[value] = self.emit(
                Recv(
                    transfer.id, value, wire_shapes(known), peer, transfer.stream, known.bundle
                )  # fmt: skip
            )

    def send(self, position: int) -> None:
        for transfer in self.row.sends.get(position, ()):
            value = self.operand(transfer.reads[0])
            peer = receiver(transfer, self.row.device)
            waits = (self.made_by[value],) if value in self.made_by else ()
            shapes = wire_shapes(self.dag.values[transfer.writes[0]])
            k = self.emit(Send(transfer.id, value, shapes, peer, transfer.stream, waits))
            self.sent.setdefault(value, []).append(k)

    def do(self, node: Work) -> None:
        match node:
            case Compute():
                self.run(node)
            case UpdateNode():
                self.update(node)
            case Totals():
                self.total(node)

    def run(self, node: Compute) -> None:
        reads = tuple(self.operand(total) for total in node.reads)
        waits = self.wait_for(reads)
        k = self.emit(Run(node.id, node.region, node.phase, reads, node.writes, waits))
        for value in node.writes:
            self.made_by[value] = k
            if value in self.sums.of:
                self.add(self.sums.of[value], value)

    def update(self, node: UpdateNode) -> None:
        grad = self.operand(node.reads[0])
        clip = len(node.reads) > 1
        waits = (*self.wait_for((grad,)), *(self.wait_for(("totals",)) if clip else ()))
        self.state(weights_of(node))
        k = self.emit(Update(node.id, node.bucket, grad, clip, waits))
        self.made_by[weights_of(node)] = k

    def total(self, node: Totals) -> None:
        """Of all that is added up, what this device made."""
        made = enumerate(node.reads[0])
        losses = tuple((loss, part) for part, loss in made if loss in self.made_by)
        grads = tuple(self.operand(total) for total in node.reads[1:] if self.is_here(total))
        assert node.devices is not None
        self.arriving["totals"] = self.emit(
            Total(node.id, losses, grads, node.devices, self.wait_for(grads))
        )

    def is_here(self, total: Sum) -> bool:
        return total in self.sums.names or total[0] in self.made_by or total[0] in self.received

    def operand(self, total: Sum) -> str:
        """The buffer that holds a sum once all its parts are in."""
        if total not in self.sums.names:
            return self.single(total[0])
        name = self.sums.names[total]
        for value in total:
            if value in self.arriving:
                self.add(name, value)
        return name

    def single(self, value: ValueId) -> str:
        if value in self.made_by or value in self.arriving:
            return value
        known = self.dag.values[value]
        if known.origin is Origin.WEIGHTS:
            self.state(value)
        elif known.origin is not Origin.FLOW and value not in self.loaded:
            self.loaded.add(value)
            self.emit(Load(value, known.origin, known.index, known.part, known.parts))
        return self.storage(value)

    def storage(self, value: str) -> str:
        """New parameters are where the old ones were."""
        return value.removesuffix("'")

    def state(self, value: str) -> None:
        bucket = value.removeprefix("w:").partition(">")[0]
        self.states.setdefault(value, State(value, bucket, home=">" not in value))

    def add(self, name: str, value: ValueId) -> None:
        waits = self.wait_for((value,))
        first = name not in self.started
        self.started.add(name)
        self.made_by[name] = self.emit((Keep if first else Add)(name, value, waits))

    def wait_for(self, buffers: tuple[str, ...]) -> Waits:
        """Positions of the receives that these buffers come from, once per receive."""
        found = [self.arriving.pop(buffer) for buffer in buffers if buffer in self.arriving]
        return tuple(sorted(found))

    def free(self, position: int) -> None:
        values = self.ends.get(position, ())
        if values:
            sends = sorted(chain.from_iterable(self.sent.get(value, ()) for value in values))
            self.emit(Free(tuple(values), tuple(sends)))


@dataclass(frozen=True)
class Sums:
    """The sums a device adds up: their buffers, and which sum a value is a part of."""

    names: dict[Sum, str]
    of: dict[str, str]


def local_sums(row: Row) -> Sums:
    nodes = chain(row.work, chain.from_iterable(row.sends.values()))
    owners = [node for node in nodes if not isinstance(node, Totals)]
    names: dict[Sum, str] = {}
    for node in owners:
        for total in node.reads:
            if len(total) > 1:
                names[total] = f"sum {total[0]}"
    return Sums(names, {value: name for total, name in names.items() for value in total})


def endings(row: Row, sums: Sums, proofs: dict[NodeId, int]) -> dict[int, list[str]]:
    """After which work each buffer ends: its last use, or the proof that it was received."""
    last: dict[str, int] = {transfer.writes[0]: len(row.work) for transfer in row.gets.values()}
    for position, node in enumerate(row.work):
        last.update((value, position) for value in node.writes)
        if isinstance(node, Totals):
            named = [sums.names.get(total, total[0]) for total in node.reads[1:]]
            last.update((name, position) for name in (*node.reads[0], *named) if name in last)
        else:
            last.update((sums.names.get(total, total[0]), position) for total in node.reads)
    for transfer in chain.from_iterable(row.sends.values()):
        buffer = sums.names.get(transfer.reads[0], transfer.reads[0][0])
        proof = proofs.get(transfer.id, len(row.work))
        last[buffer] = max(last.get(buffer, 0), proof)
    ends: dict[int, list[str]] = {}
    for buffer, position in last.items():
        if not buffer.startswith("w:") and buffer not in sums.of and buffer != "totals":
            ends.setdefault(position, []).append(buffer)
    return ends


def weights_of(node: UpdateNode) -> str:
    return node.writes[0].removesuffix("'")


def wire_shapes(value: Value) -> tuple[Shape, ...]:
    return tuple((spec.shape, spec.dtype) for spec in value.specs)
