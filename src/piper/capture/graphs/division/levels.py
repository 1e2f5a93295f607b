"""How many messages come before each node, and in which region each message is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from piper.capture.graphs.division.calls import operands
from piper.capture.graphs.division.search.conversions import Read
from piper.capture.graphs.division.search.plan import Plan
from piper.capture.graphs.division.search.space import Space
from piper.capture.kernels.ring import BLOCK, PASSING
from piper.ir.placement.placements import Conversion, Cut, Partial, Placement

Form = tuple[fx.Node, Placement]  # a value in one of its placements


@dataclass
class Levels:
    """`nodes`: messages before a node. `forms`: messages before a value is placed so."""

    nodes: dict[fx.Node, int] = field(default_factory=dict)
    forms: dict[Form, int] = field(default_factory=dict)


def is_message(read: Read) -> bool:
    return Conversion(read.source, read.target).is_message


def levels_of(space: Space, plan: Plan) -> Levels:
    made: dict[fx.Node, list[Read]] = {}
    for read in plan.reads:
        made.setdefault(read.value, []).append(read)
    levels = Levels()
    for node in space.order:
        option = plan.options[node]
        arguments = zip(operands(node), option.inputs, strict=True)
        level = max((levels.forms.get(form, 0) for form in arguments), default=0)
        level += starts_a_piece(node)
        levels.nodes[node] = levels.forms[node, option.output] = level
        for read in made.get(node, ()):  # each is made from one before it
            before = levels.forms[node, read.source]
            levels.forms[node, read.target] = before + is_message(read)
    return levels


def starts_a_piece(node: fx.Node) -> bool:
    """A block of a ring runs while the next keys and values travel: they were made before it."""
    return node.target in (BLOCK, PASSING)


def hosts_of(space: Space, plan: Plan, run_of: dict[fx.Node, int]) -> dict[Read, int]:
    """The run that each message belongs to.

    What is sent to the next stage should be small: sums are made, and tensors cut, where they come
    from; pieces are joined where they are read.
    """
    readers: dict[Form, list[int]] = {}
    for node in space.order:
        for form in zip(operands(node), plan.options[node].inputs, strict=True):
            readers.setdefault(form, []).append(run_of[node])
    hosts: dict[Read, int] = {}
    for read in reversed(plan.reads):
        source = run_of[read.value]
        first = min(readers.get((read.value, read.target), [source]))
        early = isinstance(read.source, Partial) or isinstance(read.target, Cut)
        dense = read.value in space.requests and not space.is_expert(read.value)
        hosts[read] = source if early and dense else first  # experts send rows, and nothing else
        readers.setdefault((read.value, read.source), []).append(hosts[read])
    made = {(read.value, read.target): read for read in plan.reads}
    for read in plan.reads:  # not before what it is made from
        before = made.get((read.value, read.source))
        hosts[read] = max(hosts[read], hosts[before] if before else 0)
    return hosts
