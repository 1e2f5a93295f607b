"""Why there is a message: which operator made a value, and which one reads it otherwise."""

from __future__ import annotations

from operator import getitem

from torch import fx

from piper.capture.fx_nodes import line
from piper.capture.graphs.division.calls import operands, packet
from piper.capture.graphs.division.levels import Form
from piper.capture.graphs.division.rules import has_rule
from piper.capture.graphs.division.search.plan import Plan
from piper.capture.graphs.division.search.space import Space


def notes_of(space: Space, plan: Plan) -> dict[Form, str]:
    """For each conversion: the operators on both sides, with their lines.

    An operator without a rule is the reason for messages that the user can avoid.
    """
    readers: dict[Form, fx.Node] = {}
    for node in space.order:
        for form in zip(operands(node), plan.options[node].inputs, strict=True):
            readers.setdefault(form, node)
    for read in reversed(plan.reads):  # one conversion may serve another
        reader = readers.get((read.value, read.target))
        if reader is not None:
            readers.setdefault((read.value, read.source), reader)
    return {
        (read.value, read.target): _note(space, read.value, readers.get((read.value, read.target)))
        for read in plan.reads
    }


def _note(space: Space, made: fx.Node, reader: fx.Node | None) -> str:
    end = "the loss" if reader is None else shown(reader)
    dense = reader in space.requests and not space.is_expert(reader) if reader else False
    unknown = dense and reader and not has_rule(space.call(reader))
    return f"{shown(made)} -> {end}{', which has no rule' if unknown else ''}"


def shown(node: fx.Node) -> str:
    """An operator and its line. One of several results has the name of what computed them all."""
    source = node
    while source.target is getitem and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    name = str(packet(source)).removeprefix("aten.")
    where = line(node)
    return f"{name} ({where})" if where else name
