"""Where a value comes from: its microbatch, and the values that messages added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Node,
    Redistribute,
    Store,
    Sum,
    Transfer,
)
from piper.ir.values import LOADED, Value
from piper.names import NodeId, ValueId

PASSES = (Compute, Redistribute)
CARRIERS = (Transfer, Collective, Store, Fetch)
SUM = -1  # instead of a microbatch: a sum of several values


class Origins:
    """Follows values back through messages, which deliver the sum of what they read."""

    def __init__(self, nodes: Mapping[NodeId, Node], values: Mapping[ValueId, Value]) -> None:
        self.values = values
        self.microbatch: dict[ValueId, int] = {}  # of values that are computed or delivered
        self.brought: dict[ValueId, Sum] = {}
        self.found: dict[ValueId, Sum] = {}
        for node in nodes.values():
            if isinstance(node, PASSES):
                part = node.microbatch or 0
                for value in node.writes:
                    self.microbatch[value] = part
            elif isinstance(node, CARRIERS):
                for value, total in zip(node.writes, node.reads, strict=False):
                    self.brought[value] = total
            elif isinstance(node, Exchange):  # the last write may be a route, made of the counts
                reads = (*node.reads, *node.reads[-1:])
                self.brought.update(zip(node.writes, reads, strict=False))
        known = self.microbatch
        for value, total in self.brought.items():
            if len(total) == 1 and total[0] in known:
                known[value] = known[total[0]]
            else:
                self.add(value, self.source(value))

    def add(self, value: ValueId, sources: Sum) -> None:
        """A sum has no microbatch here, even if its parts do: readers look at the parts."""
        part = self.part(sources[0]) if len(sources) == 1 else SUM
        if part is not None:
            self.microbatch[value] = part

    def part(self, value: ValueId) -> int | None:
        """The microbatch of a value that no message delivered; None if it has none."""
        known = self.values[value]
        return known.part if known.role in LOADED else self.microbatch.get(value)

    def sources(self, total: Iterable[ValueId]) -> Sum:
        """The values that add up to a sum, as they were before any message."""
        return tuple(chain.from_iterable(map(self.source, total)))

    def source(self, value: ValueId) -> Sum:
        if value not in self.brought:
            return (value,)
        if value not in self.found:
            self.found[value] = ()  # a cycle of messages has no source
            self.found[value] = self.sources(self.brought[value])
        return self.found[value]
