"""Compare plans with the DAG they came from, whoever made them.

The plans are run together on paper; a plan that lost, doubled, swapped or misdirected something is
refused, and so are plans that would wait for each other for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from piper.errors import BUG, PlanError, Problem
from piper.ir.dag import Dag
from piper.ir.flat_layout import messages
from piper.ir.naming import sent
from piper.ir.naming import updated as new
from piper.ir.nodes import Collective, Kind, Node, Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.ir.roles import Present
from piper.ir.sharding import sharding_of
from piper.ir.values import Role
from piper.names import BucketId, Device, ValueId
from piper.plan.check.contents import Contents
from piper.plan.check.paper import Together
from piper.plan.instructions import Layout, Plan, State, Total, line
from piper.plan.meeting import Channel, Group, Meeting
from piper.plan.rendezvous import Rendezvous


def check(dag: Dag, plans: Sequence[Plan], devices: Sequence[Device] | None = None) -> None:
    """Refuse plans that, run together, would hang or compute something else than the DAG.

    `devices` are those that must have a plan: all, or one for each role (`ir/roles.py`).
    """
    checked(dag, plans, devices)


def checked(dag: Dag, plans: Sequence[Plan], devices: Sequence[Device] | None = None) -> Together:
    """The same, for those who want to know what was seen."""
    here = Present(dag.devices if devices is None else devices)
    devices_of = {plan.device: Contents(plan) for plan in plans}
    together = Together(devices_of, Rendezvous(here.of), dag=dag, here=here)
    together.finish()
    for rule in RULES:
        problems = list(islice(rule(together), 8))
        if problems:
            raise PlanError("plans", *problems)
    return together


def nothing_is_left(together: Together) -> Iterator[Problem]:
    for meeting, event in together.rendezvous.alone():
        text = f"«{line(together.instruction(event))}» {is_alone(meeting)}"
        yield Problem(f"{text}\n{together.picture(event)}", BUG)
    for machine in together.devices.values():
        device = machine.plan.device
        for buffer in machine.holds:
            if buffer not in machine.states:
                picture = together.picture((device, machine.made[buffer]))
                yield Problem(f"device {device} never frees {buffer}\n{picture}", BUG)


def is_alone(meeting: Meeting) -> str:
    match meeting:
        case Channel(stream, source, target):
            return f"on {stream} from {source} to {target} meets nothing"
        case Group(stream):
            return f"on {stream} is not met by all of its group"


def everything_ran_once(together: Together) -> Iterator[Problem]:
    for node in together.dag.nodes.values():
        runs = [(device, str(node.id)) for device in together.here.of(node.devices)]
        if isinstance(node, Transfer):
            runs += [(device, sent(node.id)) for device in together.here.of(node.source)]
        for device, name in runs:
            if device not in together.devices or name not in together.devices[device].ran:
                place = needed_at(together, node, device)
                yield Problem(f"{node.id} never runs on device {device}{place}", BUG)


def needed_at(together: Together, node: Node, device: Device) -> str:
    """The last of what such a node needs, drawn: it would come after that."""
    machine = together.devices.get(device)
    ran = machine.ran if machine else {}
    before = [ran[name] for name in together.dag.predecessors(node) if name in ran]
    return f", after\n{together.picture((device, max(before)))}" if before else ""


def orders_are_kept(together: Together) -> Iterator[Problem]:
    for precedence in together.dag.precedences:
        if not precedence.before:
            continue
        lane = together.dag.nodes[precedence.before[0]].devices  # it has all of them
        for device in together.here.of(lane):
            ran = together.devices[device].ran
            before = [(ran[node], node) for node in precedence.before if node in ran]
            after = [(ran[node], node) for node in precedence.after if node in ran]
            if before and after and max(before) > min(after):
                what = f"device {device} runs {min(after)[1]} before {max(before)[1]}"
                picture = together.picture((device, min(after)[0]), (device, max(before)[0]))
                yield Problem(f"{what}, against {precedence.maker}\n{picture}", BUG)


def totals_are_whole(together: Together) -> Iterator[Problem]:
    """Each replica counts its losses; the gradients that updates read are counted once, or every
    shard of them is."""
    homes = {
        frozenset(node.reads[0]): node
        for node in together.dag.nodes.values()
        if isinstance(node, UpdateNode)
    }
    for node in together.dag.nodes.values():
        if isinstance(node, Totals):
            found = Counter(together.counted.get(node.id, ()))
            for loss in node.reads[0]:
                maker = together.dag.nodes[together.dag.producers[loss]]
                devices = together.here.of(maker.devices)
                if found[frozenset([loss])] != len(devices):
                    yield Problem(f"{node.id} lacks {loss}{totals(together, devices)}", BUG)
            for number, total in enumerate(node.reads[1:]):
                wanted = counters(together, homes[frozenset(total)], number)
                if found[frozenset(total)] != wanted:
                    maker = together.dag.nodes[together.dag.producers[total[0]]]
                    devices = together.here.of(maker.devices)
                    yield Problem(f"{node.id} lacks {total[0]}{totals(together, devices)}", BUG)


def totals(together: Together, devices: Sequence[Device]) -> str:
    """Where the first of these devices count, drawn."""
    events = [
        (device, k)
        for device in devices[:3]
        for k, one in enumerate(together.devices[device].plan.instructions)
        if isinstance(one, Total)
    ]
    return f"\n{together.picture(*events)}" if events else ""


def counters(together: Together, update: UpdateNode, number: int) -> int:
    """How many devices count a gradient: one of each group that has the same, in turn."""
    maker = together.dag.nodes[together.dag.producers[update.reads[0][0]]]
    if isinstance(maker, Collective) and maker.kind is Kind.ALL_REDUCE:
        turns = (group[number % len(group)] for group in maker.groups)
        return sum(device in together.here.devices for device in turns)
    return len(together.here.of(update.devices))


def states_are_right(together: Together) -> Iterator[Problem]:
    """A state is the bucket its name says, at home where it is updated."""
    for machine in together.devices.values():
        device = machine.plan.device
        for state in machine.plan.states:
            known = together.dag.values.get(ValueId(state.value))
            is_right = known and (known.role, known.bucket, known.copy)
            if is_right != (Role.WEIGHTS, state.bucket, not state.home):
                yield Problem(f"{state.value} is not {state.bucket}", BUG)
            elif shard_of(together.dag, state, device) != (
                state.shard, state.ways, state.messages, state.share, state.shares,
            ):  # fmt: skip
                yield Problem(f"{state.value} on device {device} is another shard", BUG)


def shard_of(
    dag: Dag, state: State, device: Device
) -> tuple[int, int, tuple[Layout, ...], int, int]:
    how = dag.residencies.get(BucketId(state.bucket))
    cut = sharding_of(dag.model, dag.shardings, BucketId(state.bucket))
    share = (cut.share(device), cut.ways) if cut else (0, 1)
    if how is None or not how.sharded:
        return 0, 1, (), *share
    group = next(group for group in how.groups if device in group)
    layout = messages(dag.held(BucketId(state.bucket)), how.message_bytes, how.ways)
    flat = tuple((m.dtype, m.tensors, m.padded) for m in layout)
    return group.index(device), how.ways, flat, *share


def states_are_new(together: Together) -> Iterator[Problem]:
    """Every copy of every updated parameter ends the step with its new value."""
    updated = {node.bucket for node in together.dag.nodes.values() if isinstance(node, UpdateNode)}
    for machine in together.devices.values():
        for state in machine.plan.states:
            if state.bucket in updated and machine.holds[state.value] != {
                new(ValueId(state.value))
            }:
                device, made = machine.plan.device, machine.made.get(state.value)
                picture = "" if made is None else f"\n{together.picture((device, made))}"
                yield Problem(f"{state.value} on device {device} stays old{picture}", BUG)


RULES = (
    nothing_is_left,
    everything_ran_once,
    orders_are_kept,
    totals_are_whole,
    states_are_right,
    states_are_new,
)
