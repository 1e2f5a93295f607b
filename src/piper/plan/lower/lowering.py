"""From a scheduled DAG to one plan per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import assert_never

from piper.ir.dag import Dag
from piper.ir.naming import TOTALS, gather_buffer, optimizer_state, weights
from piper.ir.nodes import Collective, Compute, Kind, Sum, Totals, Transfer
from piper.ir.nodes import Exchange as ExchangeNode
from piper.ir.nodes import Fetch as FetchNode
from piper.ir.nodes import Redistribute as RedistributeNode
from piper.ir.nodes import Store as StoreNode
from piper.ir.nodes import Update as UpdateNode
from piper.ir.values import LOADED, Role, Value
from piper.names import COMPUTE, Device, NodeId, ValueId
from piper.plan.buffer_layout import offsets, wire_shapes
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
    Redistribute,
    Reduce,
    Run,
    Send,
    Slice,
    State,
    Store,
    Total,
    Update,
    Waits,
)
from piper.plan.lower.arrivals import Arrivals
from piper.plan.lower.counted_once import counts, losses_of
from piper.plan.lower.device_work import DeviceWork, Work, device_work, proven_received
from piper.plan.lower.held_state import held, layouts
from piper.plan.lower.lifetimes import endings, local_sums
from piper.plan.lower.message_starts import Receive, needs_memory, receiver, sender
from piper.plan.lower.order_waits import OrderWaits, orders_into
from piper.plan.lower.settling import last_forwards


def lower(
    dag: Dag, devices: Sequence[Device] | None = None, careful: bool = False, late: bool = False
) -> tuple[Plan, ...]:
    """The plans of all devices, or of one device per role, in the order of the devices."""
    assert dag.sequence, "schedule the DAG before lowering it"
    found = device_work(dag, devices, careful, late)
    dags = {id(work.dag): work.dag for work in found.values()}
    orders = {key: orders_into(one) for key, one in dags.items()}
    return tuple(
        Lowering(one.dag, one, proven_received(found, one), OrderWaits(orders[id(one.dag)])).plan()
        for one in found.values()
    )


@dataclass
class Lowering(Arrivals):
    """The plan of one device, being written."""

    dag: Dag
    work: DeviceWork
    proofs: dict[NodeId, int]
    orders: OrderWaits
    code: list[Instruction] = field(default_factory=list)
    added: set[str] = field(default_factory=set)  # received values that are part of a sum now
    readers: dict[str, list[int]] = field(default_factory=dict)  # of states and gather buffers
    slots: dict[str, str] = field(default_factory=dict)  # gathered value -> its buffer
    started: set[str] = field(default_factory=set)  # sums that have their first part
    sent: dict[str, list[int]] = field(default_factory=dict)  # buffer -> sends that read it
    scattering: list[str] = field(default_factory=list)  # gradient shards in flight
    buffers: dict[int, int] = field(default_factory=dict)  # gather buffer -> bytes
    states: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = local_sums(self.work)
        coming: list[Transfer | Collective] = [*self.work.gets.values(), *self.work.collectives]
        self.received = {node.writes[0] for node in coming}
        self.received.update(value for node in self.work.exchanges for value in node.writes)
        self.ends = endings(self.work, self.sums, self.proofs)
        self.last_forwards = last_forwards(self.work.nodes)

    def plan(self) -> Plan:
        self.start(0)
        for position, node in enumerate(self.work.nodes):
            self.post(position)
            self.do(node)
            self.start_and_free(position)
        self.post(len(self.work.nodes))
        self.free(len(self.work.nodes))
        buffers = tuple(self.buffers.get(k, 0) for k in range(max(self.buffers, default=-1) + 1))
        states, code = tuple(self.states.values()), tuple(self.code)
        return Plan(self.work.device, states, code, buffers, self.dag.streams)

    def start_and_free(self, position: int) -> None:
        """Start messages first, because peers wait for them. Some may need the freed memory."""
        starts = self.work.starts.get(position + 1, ())
        for node in starts:
            if isinstance(node, StoreNode):  # of what may be freed
                self.copy(node)
        if any(map(needs_memory, starts)):
            self.free(position)
            self.start(position + 1)
        else:
            self.start(position + 1)
            self.free(position)

    def emit(self, instruction: Instruction) -> int:
        if instruction.node in self.orders.orders:
            waits = self.orders.waits(instruction)
            instruction = replace(instruction, waits=tuple(sorted({*instruction.waits, *waits})))
            self.orders.started(instruction, len(self.code))
        self.code.append(instruction)
        return len(self.code) - 1

    def post(self, position: float) -> None:
        for transfer in self.work.posts.get(position, ()):
            self.receive(transfer)

    def receive(self, transfer: Transfer) -> None:
        value, known = self.storage(transfer.writes[0]), self.dag.values[transfer.writes[0]]
        peer, stream = sender(transfer, self.work.device), transfer.stream
        waits = self.free_of_readers(value, stream)
        self.arriving[value] = self.emit(
            Recv(transfer.id, value, wire_shapes(known), peer, stream, known.bundle, waits)
        )

    def start(self, position: int) -> None:
        late = self.work.posts.get(position - 0.5)
        for node in self.work.starts.get(position, ()):
            if late and isinstance(node, Collective | RedistributeNode):
                self.post(position - 0.5)
                late = None
            match node:
                case Transfer():
                    self.send(node)
                case Collective(kind=Kind.ALL_GATHER):
                    self.gather(node)
                case Collective():
                    self.reduce(node)
                case ExchangeNode():
                    self.exchange(node)
                case RedistributeNode():
                    self.redistribute(node)
                case FetchNode():
                    self.copy(node)
                case StoreNode():
                    pass  # has started
                case Receive():
                    self.receive(node.transfer)
                case _:
                    assert_never(node)

    def send(self, transfer: Transfer) -> None:
        value = self.operand(transfer.reads[0], transfer.source)
        peer = receiver(transfer, self.work.device)
        ready = self.wait_for((value,), transfer.stream)
        made = self.made_by.get(value, self.loaded.get(value))
        waits = ready or (() if made is None else (made,))
        shapes = wire_shapes(self.dag.values[transfer.writes[0]])
        k = self.emit(Send(transfer.id, value, shapes, peer, transfer.stream, waits))
        self.sent.setdefault(value, []).append(k)
        self.note_reader(value, k)

    def reduce(self, node: Collective) -> None:
        """Wait for each gradient shard before the next scatter: few whole gradients are alive."""
        scatter = node.kind is Kind.REDUCE_SCATTER
        value = self.operand(node.reads[0], node.devices)
        waits = self.wait_for((value,), node.stream)
        waits += self.settle(node.stream) if scatter else ()
        ready = (self.made_by[value],) if value in self.made_by else ()
        k = self.emit(
            Reduce(
                node.id, value, node.writes[0], layouts(node.messages), self.group(node),
                scatter, node.stream, tuple(sorted({*ready, *waits})),
            )
        )  # fmt: skip
        self.arriving[node.writes[0]] = k
        if scatter:
            self.scattering.append(node.writes[0])

    def settle(self, stream: str) -> Waits:
        """Add up the shards in flight. Those that are not part of a sum are only waited for."""
        coming, self.scattering = self.scattering, []
        alone = [value for value in coming if value not in self.sums.of]
        for value in coming:
            if value in self.sums.of and value not in self.added:
                self.add(self.sums.of[value], ValueId(value))
        return self.wait_for(tuple(alone), stream)

    def gather(self, node: Collective) -> None:
        value, known = self.single(node.reads[0][0], node.devices), self.dag.values[node.writes[0]]
        messages = layouts(node.messages)
        assert node.slot is not None
        size = max(offsets(messages)[-1], self.buffers.get(node.slot, 0))
        self.buffers[node.slot] = size
        self.slots[node.writes[0]] = gather_buffer(node.slot)
        waits = self.free_of_readers(gather_buffer(node.slot), node.stream)
        waits = tuple(sorted({*waits, *self.wait_for((value,), node.stream)}))
        k = self.emit(
            Gather(
                node.id, value, node.writes[0], messages, wire_shapes(known), self.group(node),
                node.slot, node.stream, waits,
            )
        )  # fmt: skip
        self.arriving[node.writes[0]] = k
        self.sent.setdefault(value, []).append(k)  # if it was fetched, it is freed afterwards
        self.note_reader(value, k)

    def exchange(self, node: ExchangeNode) -> None:
        """Its operands come from the compute stream, or compute has waited for them."""
        reads = tuple(self.operand(total, node.devices) for total in node.reads)
        shapes = tuple(chain.from_iterable(wire_shapes(self.dag.values[v]) for v in node.rows))
        k = self.emit(
            Exchange(
                node.id, node.way, reads, node.writes, shapes, self.group(node), node.stream,
                self.ready(reads, node.stream),
            )
        )  # fmt: skip
        for value in reads:
            self.sent.setdefault(value, []).append(k)
        self.arriving.update((value, k) for value in node.writes)

    def redistribute(self, node: RedistributeNode) -> None:
        value = self.operand(node.reads[0], node.devices)
        (shape,) = wire_shapes(self.dag.values[node.reads[0][0]])
        k = self.emit(
            Redistribute(
                node.id, node.step, value, node.writes[0], shape, self.group(node), node.stream,
                self.ready((value,), node.stream),
            )
        )  # fmt: skip
        self.sent.setdefault(value, []).append(k)
        self.arriving[node.writes[0]] = k

    def copy(self, node: StoreNode | FetchNode) -> None:
        value, known = self.single(node.reads[0][0], node.devices), self.dag.values[node.writes[0]]
        kind = Store if isinstance(node, StoreNode) else Fetch
        into, shapes = self.storage(node.writes[0]), wire_shapes(known)
        overwritten = self.free_of_readers(into, node.stream)
        waits = tuple(sorted({*self.ready((value,), node.stream), *overwritten}))
        k = self.emit(kind(node.id, value, into, shapes, node.stream, known.optimizer, waits))
        self.sent.setdefault(value, []).append(k)
        self.note_reader(value, k)
        self.arriving[into] = k

    def slice(self, node: RedistributeNode) -> None:
        value, group = self.operand(node.reads[0], node.devices), self.group(node)
        part, into = group.index(self.work.device), node.writes[0]
        k = self.emit(Slice(node.id, value, into, part, len(group), self.wait_for((value,))))
        self.made(into, k)

    def group(self, node: Collective | ExchangeNode | RedistributeNode) -> tuple[Device, ...]:
        return next(group for group in node.groups if self.work.device in group)

    def do(self, node: Work) -> None:
        match node:
            case Compute():
                self.run(node)
            case RedistributeNode():
                self.slice(node)
            case UpdateNode():
                self.update(node)
            case Totals():
                self.total(node)
            case _:
                assert_never(node)

    def run(self, node: Compute) -> None:
        assert node.devices is not None
        settled = self.settle(COMPUTE) if node.id in self.last_forwards else ()
        reads = tuple([self.operand(total, node.devices) for total in node.reads])
        waits = tuple(sorted({*self.wait_for(reads), *settled}))
        k = self.emit(Run(node.id, node.region, node.phase, reads, node.writes, waits))
        for value in reads:
            if value in self.states or value in self.slots:
                self.note_reader(value, k)
        for value in node.writes:
            self.made(value, k)

    def made(self, value: ValueId, position: int) -> None:
        self.made_by[value] = position
        if value in self.sums.of:
            self.add(self.sums.of[value], value)

    def update(self, node: UpdateNode) -> None:
        grad = self.operand(node.reads[0], node.devices or ())
        clip, state = (TOTALS,) in node.reads, self.storage(node.writes[0])
        self.state(weights(node.bucket))
        moved = "".join(map(self.storage, node.writes[1:]))  # optimizer state, if it is copied
        fetched = "" if state in self.states else state
        needed = (grad, *((TOTALS,) if clip else ()), *filter(None, (moved, fetched)))
        waits = (*self.wait_for(needed), *self.free_of_readers(state, COMPUTE))
        k = self.emit(Update(node.id, node.bucket, grad, clip, waits, moved, fetched))
        self.made_by.update(dict.fromkeys((state, moved) if moved else (state,), k))
        self.arriving.pop(fetched, None)  # what reads it from now on waits for the update

    def total(self, node: Totals) -> None:
        """The losses and gradients that this device contributes to the loss and norm all-reduce.

        It also waits for gradients that another device of its group contributes, so that all
        devices of a role have the same plan.
        """
        assert node.devices is not None
        here = {k: self.operand(t, ()) for k, t in enumerate(node.reads[1:]) if self.is_here(t)}
        counted = tuple(
            grad
            for k, grad in here.items()
            if counts(self.dag, self.work.device, node.reads[1 + k][0], k)
        )
        made = {loss for loss in node.reads[0] if loss in self.made_by or loss in self.arriving}
        losses = tuple(losses_of(self.work, node, made))
        waits = self.wait_for((*(loss for loss, _ in losses), *here.values()))
        self.arriving[TOTALS] = self.emit(Total(node.id, losses, counted, node.devices, waits))

    def is_here(self, total: Sum) -> bool:
        return total in self.sums.names or total[0] in self.made_by or total[0] in self.received

    def operand(self, total: Sum, devices: tuple[Device, ...]) -> str:
        """The buffer of a sum. Parts that have arrived are added first."""
        if total not in self.sums.names:
            return self.single(total[0], devices)
        name = self.sums.names[total]
        for value in total:
            if value in self.arriving and value not in self.added:
                self.add(name, value)
        return name

    def single(self, value: ValueId, devices: tuple[Device, ...]) -> str:
        if value in self.made_by or value in self.arriving:
            return value
        known = self.dag.values[value]
        if known.role in LOADED:
            return self.load(value, known, devices)
        if known.role is Role.WEIGHTS:
            self.state(value)
        return self.storage(value)

    def load(self, value: ValueId, known: Value, devices: tuple[Device, ...]) -> str:
        name = self.work.name(value, devices)
        if name not in self.loaded:
            first, of = self.work.replicas.place(devices, self.work.device)
            part, parts, index = first * known.parts + known.part, of * known.parts, known.index
            if known.role is Role.RANK:
                index = self.dag.member(self.work.device)
            self.loaded[name] = self.emit(Load(name, known.role, index, part, parts, known.sizes))
        return name

    def storage(self, value: ValueId) -> ValueId:
        """Updated parameters are stored in place of the old ones."""
        return self.dag.values[value].state or value

    def state(self, value: ValueId) -> None:
        if value in self.states:
            return
        known = self.dag.values[value]
        assert known.bucket is not None
        shard = held(self.dag, known.bucket, self.work.device)
        moved = not known.copy and optimizer_state(known.bucket) in self.dag.values
        state = State(value, known.bucket, not known.copy, *shard)
        self.states[value] = replace(state, host=moved, on_host=known.host)

    def add(self, name: str, value: ValueId) -> None:
        waits = self.wait_for((value,))
        self.added.add(value)
        first = name not in self.started
        self.started.add(name)
        self.made_by[name] = self.emit((Keep if first else Add)(name, value, waits))

    def note_reader(self, value: str, position: int) -> None:
        """Of memory that is overwritten later: states, what is fetched of them, gather buffers."""
        known = self.dag.values.get(ValueId(value))
        if value in self.slots or (known and known.role is Role.WEIGHTS):
            self.readers.setdefault(self.slots.get(value, value), []).append(position)

    def free_of_readers(self, memory: str, stream: str) -> Waits:
        """The readers to wait for before this memory is overwritten; of compute, only the last."""
        found = self.readers.pop(memory, None)
        if found is None:  # most memory is new
            return ()
        compute = [k for k in found if self.code[k].stream == COMPUTE][-1:]
        others = [k for k in found if self.code[k].stream != COMPUTE]
        return self.not_yet_waited([*others, *(compute if stream != COMPUTE else ())], stream)

    def free(self, position: int) -> None:
        values = self.ends.get(position, ())
        if values:
            waits = {k for value in values for k in self.sent.get(value, ())}
            waits.update(self.unread(values))
            self.emit(Free(tuple(values), tuple(sorted(waits))))
