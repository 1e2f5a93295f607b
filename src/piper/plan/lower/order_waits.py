"""What an instruction waits for because an order names it, and not because of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from piper.ir.dag import Dag
from piper.ir.nodes import Precedence
from piper.names import COMPUTE, NodeId
from piper.plan.instructions import Instruction, Send

OrdersInto = dict[str, list[Precedence]]


def orders_into(dag: Dag) -> OrdersInto:
    """By node: the orders that put something before it. A node with none has an empty list."""
    found: OrdersInto = {}
    for order in dag.precedences:
        if order.partial:
            for name in order.before:
                found.setdefault(name, [])
            for name in order.after:
                found.setdefault(name, []).append(order)
    return found


@dataclass
class OrderWaits:
    """The instructions of one device that orders name, as they are written."""

    orders: OrdersInto
    written: dict[NodeId, list[tuple[int, str]]] = field(default_factory=dict)  # and their streams
    done: set[tuple[int, str]] = field(default_factory=set)  # orders that a stream has waited for

    def started(self, instruction: Instruction, position: int) -> None:
        """A send counts as done once it has started: its peer says when it arrives."""
        if not isinstance(instruction, Send):
            here = self.written.setdefault(NodeId(instruction.node), [])
            here.append((position, instruction.stream))

    def waits(self, instruction: Instruction) -> Iterator[int]:
        """Messages, and the last compute. Compute itself runs in order."""
        stream = instruction.stream
        for order in self.orders[instruction.node]:
            if (id(order), stream) in self.done:
                continue
            self.done.add((id(order), stream))
            found = [one for name in order.before for one in self.written.get(name, ())]
            yield from (position for position, where in found if where != COMPUTE)
            compute = [position for position, where in found if where == COMPUTE]
            if compute and stream != COMPUTE:
                yield max(compute)
