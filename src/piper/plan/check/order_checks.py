"""Whether devices keep the orders that name messages and updates.

What comes before has ended when the next starts, on every device that runs both. A send counts as
done once it has started.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from piper.ir.naming import sent
from piper.ir.nodes import Precedence, Transfer
from piper.names import Device, NodeId
from piper.plan.check.buffer_contents import BufferChecks, DeviceBuffers
from piper.plan.check.stream_order import stream_of
from piper.plan.instructions import Instruction


@dataclass(kw_only=True)
class OrderChecks(BufferChecks):
    """Compares what each instruction has waited for with the orders of the DAG."""

    kept: set[tuple[Device, int, str]] = field(default_factory=set)  # by order and stream

    def keep_orders(self, device: DeviceBuffers, one: Instruction) -> None:
        """Once a stream is ordered after something, all that follows on it is."""
        stream = stream_of(one)
        for number, order in device.wanted.orders[one.node]:
            known = device.plan.device, number, stream
            if known not in self.kept:
                for name in order.before:
                    self.require_before(device, one, name, order)
                self.kept.add(known)

    def require_before(
        self, device: DeviceBuffers, one: Instruction, name: NodeId, order: Precedence
    ) -> None:
        node, here = device.wanted.dag.nodes[name], device.plan.device
        ran: set[str] = {name} if here in (node.devices or ()) else set()
        if isinstance(node, Transfer) and here in node.source:
            ran.add(sent(name))
        for part in sorted(ran):
            if part not in device.ran:
                self.refuse(device, f"{one.node} runs before {part}, against {order.maker}")
            position = device.ran[part]
            if part == name and not device.order.is_after(stream_of(one), position):
                what = f"{one.node} does not wait for {part}, against {order.maker}"
                self.refuse(device, what, position)
