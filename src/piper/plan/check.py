"""Compare plans with the DAG they came from, whoever made them.

The plans are run together on paper; a plan that lost, doubled, swapped or misdirected something is
refused, and so are plans that would wait for each other for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from piper.errors import PlanError, Problem
from piper.ir.dag import Dag
from piper.ir.layout import messages
from piper.ir.nodes import Collective, Kind, Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.ir.sharding import sharding_of
from piper.ir.spec import BUG
from piper.names import BucketId, Device
from piper.plan.instructions import Layout, Plan, State, line
from piper.plan.machine import Machine
from piper.plan.paper import Together
from piper.plan.wires import sent


def check(dag: Dag, plans: Sequence[Plan]) -> None:
    """Refuse plans that, run together, would hang or compute something else than the DAG."""
    together = Together(dag, {plan.device: Machine(plan) for plan in plans})
    together.run()
    for rule in RULES:
        problems = list(rule(together))
        if problems:
            raise PlanError("plans", *problems[:8])


def nothing_is_left(together: Together) -> Iterator[Problem]:
    for what, (device, at) in together.wires.waiting():
        text = line(together.machines[device].plan.instructions[at])
        yield Problem(f"«{text}» {what}", BUG)
    for machine in together.machines.values():
        for buffer in machine.holds:
            if buffer not in machine.states:
                yield Problem(f"device {machine.plan.device} never frees {buffer}", BUG)


def everything_ran_once(together: Together) -> Iterator[Problem]:
    for node in together.dag.nodes.values():
        runs = [(device, str(node.id)) for device in node.devices or ()]
        if isinstance(node, Transfer):
            runs += [(device, sent(node.id)) for device in node.source]
        for device, name in runs:
            if device not in together.machines or name not in together.machines[device].ran:
                yield Problem(f"{node.id} never runs on device {device}", BUG)


def orders_are_kept(together: Together) -> Iterator[Problem]:
    for precedence in together.dag.precedences:
        if not precedence.before:
            continue
        for device in together.dag.nodes[precedence.before[0]].devices or ():  # a lane has all
            ran = together.machines[device].ran
            before = [(ran[node], node) for node in precedence.before if node in ran]
            after = [(ran[node], node) for node in precedence.after if node in ran]
            if before and after and max(before) > min(after):
                what = f"device {device} runs {min(after)[1]} before {max(before)[1]}"
                yield Problem(f"{what}, against {precedence.maker}", BUG)


def totals_are_whole(together: Together) -> Iterator[Problem]:
    """Each replica counts its losses; the gradients that updates read are counted once, or every
    shard of them is."""
    homes = {
        frozenset(node.reads[0]): counters(together.dag, node)
        for node in together.dag.nodes.values()
        if isinstance(node, UpdateNode)
    }
    for node in together.dag.nodes.values():
        if isinstance(node, Totals):
            found = Counter(together.counted.get(node.id, ()))
            for loss in node.reads[0]:
                devices = together.dag.nodes[together.dag.producers[loss]].devices or ()
                if found[frozenset([loss])] != len(devices):
                    yield Problem(f"{node.id} lacks {loss}", BUG)
            for total in node.reads[1:]:
                if found[frozenset(total)] != homes[frozenset(total)]:
                    yield Problem(f"{node.id} lacks {total[0]}", BUG)


def counters(dag: Dag, update: UpdateNode) -> int:
    """How many devices count a gradient: one of each group that has the same."""
    maker = dag.nodes[dag.producers[update.reads[0][0]]]
    if isinstance(maker, Collective) and maker.kind is Kind.ALL_REDUCE:
        return len(maker.groups)
    return len(update.devices or ())


def states_are_right(together: Together) -> Iterator[Problem]:
    """A state is the bucket its name says, at home where it is updated."""
    for machine in together.machines.values():
        device = machine.plan.device
        for state in machine.plan.states:
            name, copy, _ = state.value.partition(">")
            if name != f"w:{state.bucket}" or state.home != (not copy):
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
    for machine in together.machines.values():
        for state in machine.plan.states:
            if state.bucket in updated and machine.holds[state.value] != {f"{state.value}'"}:
                yield Problem(f"{state.value} on device {machine.plan.device} stays old", BUG)


RULES = (
    nothing_is_left,
    everything_ran_once,
    orders_are_kept,
    totals_are_whole,
    states_are_right,
    states_are_new,
)
