"""Check that plans compute what their DAG says, and that they finish.

All plans are executed together symbolically. An error is raised for a plan that loses, duplicates,
swaps or misdirects a value, and for plans that deadlock. The check does not trust the lowering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from piper.errors import BUG, PlanError, Problem
from piper.ir.by_device.roles import Present
from piper.ir.dag import Dag
from piper.ir.flat_layout import messages
from piper.ir.naming import optimizer_state, sent
from piper.ir.naming import updated as new
from piper.ir.nodes import Collective, Kind, Node, Precedence, Sum, Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.ir.values import Role
from piper.names import BucketId, Device, ValueId
from piper.plan.check.buffer_contents import DeviceBuffers
from piper.plan.check.symbolic_execution import SymbolicExecution
from piper.plan.instructions import Layout, Plan, State, Total, line
from piper.plan.instructions.communicator import Channel, Communicator, Group
from piper.plan.rendezvous import Rendezvous


def check(dag: Dag, plans: Sequence[Plan], devices: Sequence[Device] | None = None) -> None:
    """Raise a PlanError if the plans deadlock together or do not compute the DAG.

    `devices` must all have a plan. By default these are all devices of the DAG. One device per role
    (`ir/by_device/roles.py`) is enough.
    """
    checked(dag, plans, devices)


def checked(
    dag: Dag, plans: Sequence[Plan], devices: Sequence[Device] | None = None
) -> SymbolicExecution:
    """Like `check`, but returns the execution for further analysis."""
    here = Present(dag.devices if devices is None else devices)
    devices_of = {plan.device: DeviceBuffers(plan) for plan in plans}
    execution = SymbolicExecution(devices_of, Rendezvous(here.of), dag=dag, here=here)
    execution.finish()
    for rule in RULES:
        problems = list(islice(rule(execution), 8))
        if problems:
            raise PlanError("plans", *problems)
    return execution


def nothing_is_left_over(execution: SymbolicExecution) -> Iterator[Problem]:
    for communicator, event in execution.rendezvous.unmatched():
        text = f"«{line(execution.instruction(event))}» {unmatched_text(communicator)}"
        yield Problem(f"{text}\n{execution.picture(event)}", BUG)
    for device in execution.devices.values():
        number = device.plan.device
        for buffer in device.holds:
            if buffer not in device.states:
                picture = execution.picture((number, device.made[buffer]))
                yield Problem(f"device {number} never frees {buffer}\n{picture}", BUG)


def unmatched_text(communicator: Communicator) -> str:
    match communicator:
        case Channel(stream, source, target):
            return f"on {stream} from {source} to {target} has no match"
        case Group(stream):
            return f"on {stream} is not joined by its whole group"


def everything_ran_once(execution: SymbolicExecution) -> Iterator[Problem]:
    ran = {device: one.ran.keys() for device, one in execution.devices.items()}
    for dag, here in execution.required():
        wanted = wanted_on(dag, here)
        if all(names <= ran.get(device, set()) for device, names in wanted.items()):
            continue
        for node in dag.nodes.values():
            names = {node.id, sent(node.id)}
            for device in (d for d in wanted if names & wanted[d] - ran.get(d, set())):
                place = needed_at(execution, dag, node, device)
                yield Problem(f"{node.id} never runs on device {device}{place}", BUG)


def wanted_on(dag: Dag, here: Present) -> dict[Device, set[str]]:
    """What each device must do: its nodes, and its sends."""
    found: dict[Device, set[str]] = {}
    for node in dag.nodes.values():
        for device in here.of(node.devices):
            found.setdefault(device, set()).add(node.id)
        if isinstance(node, Transfer):
            for device in here.of(node.source):
                found.setdefault(device, set()).add(sent(node.id))
    return found


def needed_at(execution: SymbolicExecution, dag: Dag, node: Node, device: Device) -> str:
    """The plan at the last predecessor of a node that never ran."""
    buffers = execution.devices.get(device)
    ran = buffers.ran if buffers else {}
    before = [ran[name] for name in dag.predecessors(node) if name in ran]
    return f", after\n{execution.picture((device, max(before)))}" if before else ""


def orders_are_kept(execution: SymbolicExecution) -> Iterator[Problem]:
    """Orders of passes. Those that name messages were checked as these started."""
    for dag, here in execution.required():
        for precedence in dag.precedences:
            if precedence.before and not precedence.partial:
                # all nodes of a precedence have the same devices
                for device in here.of(dag.nodes[precedence.before[0]].devices):
                    yield from order_problems(execution, precedence, device)


def order_problems(
    execution: SymbolicExecution, precedence: Precedence, device: Device
) -> Iterator[Problem]:
    ran = execution.devices[device].ran
    before = [(ran[node], node) for node in precedence.before if node in ran]
    after = [(ran[node], node) for node in precedence.after if node in ran]
    if before and after and max(before) > min(after):
        what = f"device {device} runs {min(after)[1]} before {max(before)[1]}"
        picture = execution.picture((device, min(after)[0]), (device, max(before)[0]))
        yield Problem(f"{what}, against {precedence.maker}\n{picture}", BUG)


def loss_and_norm_are_complete(execution: SymbolicExecution) -> Iterator[Problem]:
    """The loss and norm all-reduce counts every loss once per replica, and every gradient (or every
    shard of it) once."""
    for dag, here in execution.required():
        homes = {
            frozenset(node.reads[0]): node
            for node in dag.nodes.values()
            if isinstance(node, UpdateNode)
        }
        for node in dag.nodes.values():
            if isinstance(node, Totals):
                found = Counter(execution.counted_by(node.id, here))
                wanted: dict[Sum, int] = {
                    (loss,): len(first_members(dag, here, made_on(dag, loss)))
                    for loss in node.reads[0]
                }
                for number, total in enumerate(node.reads[1:]):
                    update = homes.get(frozenset(total))
                    if update is not None:
                        wanted[total] = counting_devices(dag, here, update, number)
                for parts, count in wanted.items():
                    if found[frozenset(parts)] != count:
                        picture = pictured(execution, here.of(made_on(dag, parts[0])))
                        yield Problem(f"{node.id} is missing {parts[0]}{picture}", BUG)


def made_on(dag: Dag, value: ValueId) -> tuple[Device, ...] | None:
    """The devices that make a value."""
    maker = dag.producers.get(value)
    return dag.nodes[maker].devices if maker else None


def first_members(
    dag: Dag, here: Present, devices: tuple[Device, ...] | None
) -> tuple[Device, ...]:
    """Of devices that divide regions, the one that counts their loss."""
    found = here.of(devices)
    if not dag.divisions:
        return found
    return tuple(device for device in found if dag.member(device) == 0)


def pictured(execution: SymbolicExecution, devices: Sequence[Device]) -> str:
    """The plans at the loss and norm all-reduce of the first few devices."""
    events = [
        (device, k)
        for device in devices[:3]
        for k, one in enumerate(execution.devices[device].plan.instructions)
        if isinstance(one, Total)
    ]
    return f"\n{execution.picture(*events)}" if events else ""


def counting_devices(dag: Dag, here: Present, update: UpdateNode, number: int) -> int:
    """How many devices count a gradient: one in each group that holds the same sum, in turn."""
    maker = dag.nodes[dag.producers[update.reads[0][0]]]
    counting = here.of(update.devices)
    if isinstance(maker, Collective) and maker.kind is Kind.ALL_REDUCE:
        turns = {group[number % len(group)] for group in maker.groups}
        counting = tuple(device for device in counting if device in turns)
    return sum(in_turn(dag, update, number, device) for device in counting)


def in_turn(dag: Dag, update: UpdateNode, number: int, device: Device) -> bool:
    """Devices that divide regions have the same gradient of what is whole: one of them counts."""
    same = dag.repeating(update.bucket)
    return same is None or same.share(device) == number % same.ways


def states_are_right(execution: SymbolicExecution) -> Iterator[Problem]:
    """Every state holds its bucket, is at home where it is updated, and is the right shard."""
    for plan in (device.plan for device in execution.devices.values()):
        for state in plan.states:
            known = execution.dag.values.get(ValueId(state.value))
            is_right = known and (known.role, known.bucket, known.copy)
            if is_right != (Role.WEIGHTS, state.bucket, not state.home):
                yield Problem(f"{state.value} is not {state.bucket}", BUG)
            elif shard_of(execution.dag, state, plan.device) != (
                state.shard, state.ways, state.messages, state.share, state.shares, state.cuts,
            ):  # fmt: skip
                yield Problem(f"{state.value} on device {plan.device} is the wrong shard", BUG)
            elif state.host != (state.home and optimizer_of(state) in execution.dag.values):
                yield Problem(f"the optimizer of {state.value} is in other memory", BUG)
            elif known and state.on_host != known.host:
                yield Problem(f"{state.value} is in other memory", BUG)


def optimizer_of(state: State) -> ValueId:
    return optimizer_state(BucketId(state.bucket))


def shard_of(
    dag: Dag, state: State, device: Device
) -> tuple[int, int, tuple[Layout, ...], int, int, tuple[tuple[int, int], ...]]:
    how = dag.residencies.get(BucketId(state.bucket))
    cut = dag.pieces(BucketId(state.bucket))
    cuts = dag.model.buckets[BucketId(state.bucket)].cuts
    share = (cut.share(device), cut.ways, cuts) if cut else (0, 1, ())
    if how is None or not how.sharded:
        return 0, 1, (), *share
    group = next(group for group in how.groups if device in group)
    layout = messages(dag.held(BucketId(state.bucket)), how.message_bytes, how.ways)
    flat = tuple((m.dtype, m.tensors, m.padded) for m in layout)
    return group.index(device), how.ways, flat, *share


def states_are_updated(execution: SymbolicExecution) -> Iterator[Problem]:
    """Every copy of every updated parameter ends the step with its new value."""
    updated = {node.bucket for node in execution.dag.nodes.values() if isinstance(node, UpdateNode)}
    for device in execution.devices.values():
        for state in device.plan.states:
            moved = (optimizer_of(state),) if state.host else ()
            for value in (ValueId(state.value), *moved) if state.bucket in updated else ():
                if device.holds.get(value) != {new(value)}:
                    number, made = device.plan.device, device.made.get(value)
                    picture = "" if made is None else f"\n{execution.picture((number, made))}"
                    yield Problem(f"{value} on device {number} is not updated{picture}", BUG)


RULES = (
    nothing_is_left_over,
    everything_ran_once,
    orders_are_kept,
    loss_and_norm_are_complete,
    states_are_right,
    states_are_updated,
)
