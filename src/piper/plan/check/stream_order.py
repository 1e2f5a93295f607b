"""Which earlier instructions have completed for sure when a stream of a device goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from piper.names import COMPUTE, TOTALS_STREAM
from piper.plan.instructions import Instruction, Plan, Waits


def stream_of(instruction: Instruction) -> str:
    """The stream that reads the operands.

    The loss and norm all-reduce sums its local operands on the compute stream first.
    """
    return COMPUTE if instruction.stream == TOTALS_STREAM else instruction.stream


@dataclass
class StreamOrder:
    """The happens-before relation of one device.

    Compute runs in order. A stream that waits for a compute instruction is therefore ordered after
    all compute before it, and after everything that compute had waited for by then.
    """

    plan: Plan
    waited: dict[str, set[int]] = field(default_factory=dict)  # messages, by the waiting stream
    compute: dict[str, int] = field(default_factory=dict)  # by stream: last compute it waited for
    joined: dict[int, int] = field(default_factory=dict)  # message -> where compute waited for it

    def wait(self, stream: str, at: int, waits: Waits) -> None:
        for position in waits:
            self.order_after(stream, position, at)

    def order_after(self, stream: str, position: int, at: int) -> None:
        """Order a stream after an instruction, and after all that this one had waited for."""
        known = self.waited.setdefault(stream, set())
        waiting = [position]
        while waiting:
            position = waiting.pop()
            one = self.plan.instructions[position]
            if one.stream == COMPUTE:
                self.compute[stream] = max(position, self.compute.get(stream, -1))
            elif position not in known:
                known.add(position)
                if stream == COMPUTE:
                    self.joined.setdefault(position, at)
                waiting += one.waits

    def is_after(self, stream: str, position: int) -> bool:
        """Whether the next instruction on a stream is ordered after an earlier instruction."""
        if self.plan.instructions[position].stream == COMPUTE:
            return stream == COMPUTE or position <= self.compute.get(stream, -1)
        if position in self.waited.get(stream, ()):
            return True
        return self.joined.get(position, inf) <= self.compute.get(stream, -1)
