"""Compare plans with the DAG they came from, whoever made them.

The plans are run together on paper; a plan that lost, doubled, swapped or misdirected something is
refused, and so are plans that would wait for each other for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from piper.errors import PlanError, Problem
from piper.ir.dag import Dag
from piper.ir.nodes import Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.ir.spec import BUG
from piper.plan.instructions import Plan, line
from piper.plan.paper import Machine, Together


def check(dag: Dag, plans: Sequence[Plan]) -> None:
    """Refuse plans that, run together, would hang or compute something else than the DAG."""
    together = Together(dag, {plan.device: Machine(plan) for plan in plans})
    together.run()
    for rule in RULES:
        problems = list(rule(together))
        if problems:
            raise PlanError("plans", *problems[:8])


def nothing_is_left(together: Together) -> Iterator[Problem]:
    for (stream, source, target), (sends, recvs) in together.queues.items():
        for device, at in chain(sends, recvs):
            text = line(together.machines[device].plan.instructions[at])
            yield Problem(f"«{text}» on {stream} from {source} to {target} meets nothing", BUG)
    for machine in together.machines.values():
        for buffer in machine.holds:
            if buffer not in machine.states:
                yield Problem(f"device {machine.plan.device} never frees {buffer}", BUG)


def everything_ran_once(together: Together) -> Iterator[Problem]:
    for node in together.dag.nodes.values():
        ends = (*node.source, *node.devices) if isinstance(node, Transfer) else node.devices or ()
        for device in dict.fromkeys(ends):
            if device not in together.machines or node.id not in together.machines[device].ran:
                yield Problem(f"{node.id} never runs on device {device}", BUG)


def orders_are_kept(together: Together) -> Iterator[Problem]:
    for precedence in together.dag.precedences:
        for device in together.dag.nodes[precedence.before[0]].devices or ():  # a lane has all
            ran = together.machines[device].ran
            before = [(ran[node], node) for node in precedence.before if node in ran]
            after = [(ran[node], node) for node in precedence.after if node in ran]
            if before and after and max(before) > min(after):
                what = f"device {device} runs {min(after)[1]} before {max(before)[1]}"
                yield Problem(f"{what}, against {precedence.maker}", BUG)


def totals_are_whole(together: Together) -> Iterator[Problem]:
    """Each replica counts its losses and the gradients that its updates read, once."""
    homes = {
        frozenset(node.reads[0]): node.devices
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
                if found[frozenset(total)] != len(homes[frozenset(total)] or ()):
                    yield Problem(f"{node.id} lacks {total[0]}", BUG)


def states_are_right(together: Together) -> Iterator[Problem]:
    """A state is the bucket its name says, at home where it is updated."""
    for machine in together.machines.values():
        for state in machine.plan.states:
            name, copy, _ = state.value.partition(">")
            if name != f"w:{state.bucket}" or state.home != (not copy):
                yield Problem(f"{state.value} is not {state.bucket}", BUG)


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
