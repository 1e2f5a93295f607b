"""One graph for both ways of each random decision, made of traces that decide differently.

    x1 = layer1(x0)                  # the base: it drops no layer
    x2 = layer2(x1)
    -->
    x1 = layer1(x0)
    y1 = where(dropped1, x0, x1)     # in the trace that drops layer 1, layer 2 reads x0
    x2 = layer2(y1)
    y2 = where(dropped2, y1, x2)     # in the trace that drops layer 2, the end reads x1, now y1

Both ways are computed, and the random number selects. The base is compared with one trace for each
decision. After the decision, either has nodes of its own. Then come nodes that they share. Where a
shared node reads different values, it reads a selection.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from piper.capture import refusals
from piper.capture.fx_nodes import closure, in_order, insert, line, value
from piper.capture.torch_private import MODE_SWITCHES
from piper.capture.trace.decisions.shared_draws import ONCE
from piper.capture.trace.decisions.ways import Way, rewrite, same_end, same_start, shape_of

LOG = logging.getLogger("piper")
aten = torch.ops.aten
Trace = Callable[[tuple[bool, ...]], Way]


def with_both_ways(base: Way, trace: Trace) -> fx.GraphModule:
    """The base with the other ways of its decisions. `trace` gives the trace for some answers."""
    count = len(base.answers)
    for mark in base.marks:
        if any(node.op == "placeholder" for node in closure([mark], stop=())):
            raise refusals.decision_by_data(line(mark))
    merge = Merge(base)
    for k in range(count):
        merge.add(k, _traced(trace, flipped(base.answers, [k]), base))
    for some in _checked(count):
        answers = flipped(base.answers, some)
        merge.require(answers, _traced(trace, answers, base))
    LOG.info(
        "%d decisions by random numbers, such as layer drop: both ways are computed, and a step "
        "selects one; it takes the time of all layers", count,
    )  # fmt: skip
    return merge.finish()


def flipped(answers: tuple[bool, ...], which: Sequence[int]) -> tuple[bool, ...]:
    return tuple(answer != (k in which) for k, answer in enumerate(answers))


def _checked(count: int) -> list[list[int]]:
    """Decisions that are flipped together, to see that they do not depend on each other."""
    several = [list(range(count)), list(range(0, count, 2)), list(range(1, count, 2))]
    return [some for some in several if len(some) > 1]


def _traced(trace: Trace, answers: tuple[bool, ...], base: Way) -> Way:
    way = trace(answers)
    if len(way.answers) != len(answers) or len(way.results) != len(base.results):
        raise refusals.entangled_decision(line(base.marks[0]))
    return way


@dataclass
class Selection:
    """What a decision does: from the node with index `start` on, nodes read other values."""

    start: int
    reads: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)  # value -> what is read now


class Merge:
    """Adds the other way of each decision to the base, in the order of decisions."""

    def __init__(self, base: Way) -> None:
        self.base, self.graph = base, base.root.graph
        assert base.numbers and base.marks  # as they are before any change
        self.place = {node: index for index, node in enumerate(base.nodes)}
        self.reads = {node: list(reads) for node, reads in base.reads.items()}  # now
        self.done: list[Selection] = []
        self.tests: dict[int, fx.Node] = {}  # of each decision
        self.chosen: dict[fx.Node, tuple[int, fx.Node, fx.Node]] = {}  # decision, base, other

    def add(self, decision: int, other: Way) -> None:
        """The way that differs from the base in one decision."""
        mark = self.place[self.base.marks[decision]]
        where = line(self.base.marks[decision])
        if other.nodes.index(other.marks[decision]) != mark or not same_start(
            self.base, other, mark
        ):
            raise refusals.entangled_decision(where)
        shared = same_end(self.base, other, mark + 1)
        selection = Selection(len(self.base.nodes) - shared)
        ours = self.base.nodes[selection.start :]
        theirs = other.nodes[len(other.nodes) - shared :]
        same = dict(zip(other.nodes[: mark + 1], self.base.nodes, strict=False))
        same |= dict(zip(theirs, ours, strict=True))
        for k, pair in enumerate(zip(self.base.marks, other.marks, strict=True)):
            if same.get(pair[1]) is not pair[0]:
                raise refusals.entangled_decision(line(self.base.marks[k]))
        own = other.nodes[mark + 1 : len(other.nodes) - shared]
        wanted = {read for node in theirs for read in other.reads[node]} & set(own)
        same |= self.copied(other, closure(wanted, stop=same), same, ours[0], where)
        made: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        for node, their in zip(ours, theirs, strict=True):
            self.select(
                decision, node, [same[read] for read in other.reads[their]], made, selection
            )
        self.done.append(selection)

    def copied(
        self, other: Way, wanted: set[fx.Node], same: dict[fx.Node, fx.Node], before: fx.Node,
        where: str,
    ) -> dict[fx.Node, fx.Node]:  # fmt: skip
        """Copies of nodes that only the other way has, in the region of what they replace."""
        made: dict[fx.Node, fx.Node] = {}
        replaced = self.base.nodes[self.place[before] - 1]
        for node in in_order(other.root.graph, wanted):
            if node.target in MODE_SWITCHES or node.op not in ("call_function", "get_attr"):
                raise refusals.entangled_decision(where)
            with self.graph.inserting_before(before):
                new = self.graph.node_copy(
                    node, lambda read: made[read] if read in made else self.resolved(same[read])
                )
            if node.op == "get_attr":
                new.target = f"other_way_{len(self.done)}_{node.target}"
                setattr(self.base.root, new.target, getattr(other.root, str(node.target)))
            new.meta["custom"] = replaced.meta.get("custom", {})
            made[node] = new
        return made

    def select(
        self, decision: int, node: fx.Node, others: list[fx.Node],
        made: dict[tuple[fx.Node, fx.Node], fx.Node], selection: Selection,
    ) -> None:  # fmt: skip
        """Let a shared node read what it reads on either way."""
        for k, (first, other) in enumerate(zip(self.base.reads[node], others, strict=True)):
            now = self.reads[node][k]
            if other is not first:
                pair = now, self.resolved(other)
                if pair not in made:
                    before = self.base.nodes[selection.start]
                    made[pair] = self.where(decision, *pair, before)
                now = self.reads[node][k] = made[pair]
            selection.reads.setdefault(first, set()).add(now)
        rewrite(node, self.reads[node])

    def where(self, decision: int, now: fx.Node, other: fx.Node, before: fx.Node) -> fx.Node:
        if not isinstance(value(now), Tensor) or shape_of(now) != shape_of(other):
            raise refusals.ways_of_different_shape(line(self.base.marks[decision]))
        like = other if now.op == "placeholder" else now
        with self.graph.inserting_before(before):
            if decision not in self.tests:
                self.tests[decision] = self.test(decision, like)
            ways = (now, other) if self.base.answers[decision] else (other, now)
            found = insert(self.graph, like, aten.where.self, self.tests[decision], *ways)
        self.chosen[found] = decision, now, other
        return found

    def test(self, decision: int, like: fx.Node) -> fx.Node:
        (number,) = self.base.reads[self.base.marks[decision]]
        found = insert(self.graph, like, aten.reshape.default, number, [])
        return (
            found
            if value(found).dtype == torch.bool
            else insert(self.graph, like, aten.ne.Scalar, found, 0)
        )

    def resolved(self, node: fx.Node) -> fx.Node:
        """What a node of the base stands for after the decisions before this one."""
        found = node
        for one in self.done:
            fixed = node.op in ("placeholder", "get_attr")
            if node in self.place and self.place[node] < one.start and not fixed:
                reads = one.reads.get(node, set())
                if len(reads) != 1:  # no shared node shows which value it is
                    raise refusals.entangled_decision(line(node))
                (found,) = reads
        return found

    def require(self, answers: tuple[bool, ...], way: Way) -> None:
        """For these answers, the graph must compute what the trace does."""
        stands: dict[fx.Node, fx.Node] = {}
        for node, (decision, now, other) in self.chosen.items():
            same = answers[decision] == self.base.answers[decision]
            picked = now if same else other
            stands[node] = stands.get(picked, picked)
        ours, theirs = way.numbering.of(self.base.root, stands=stands), way.numbers
        count = len(way.results) - len(way.answers)
        if [ours[node] for node in self.base.results[:count]] != [
            theirs[node] for node in way.results[:count]
        ]:
            raise refusals.entangled_decision(line(way.marks[0]))

    def finish(self) -> fx.GraphModule:
        """The graph without marks. Numbers are drawn next to what they select."""
        output = self.graph.output_node()
        output.args = (tuple(self.base.results[: -len(self.base.answers)]),)
        for mark in self.base.marks:
            self.graph.erase_node(mark)
        for test in self.tests.values():
            drawn = closure([test], stop=())
            for node in drawn:
                node.meta[ONCE] = True
            if all(user in drawn for node in drawn - {test} for user in node.users):
                for node in in_order(self.graph, drawn - {test}):
                    test.prepend(node)
                    node.meta["custom"] = test.meta.get("custom", {})
        self.graph.lint()
        return self.base.root
