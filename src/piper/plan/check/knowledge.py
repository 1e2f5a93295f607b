"""What each stream of a device knows to have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from piper.names import COMPUTE, TOTALS_STREAM
from piper.plan.instructions import Instruction, Plan


def stream_of(instruction: Instruction) -> str:
    """Totals add up what is here on the compute stream, before they ask the others."""
    return COMPUTE if instruction.stream == TOTALS_STREAM else instruction.stream


@dataclass
class Knowledge:
    """A stream knows what it waited for. Compute is in order; who waits for some of it knows all
    before it, and what compute had waited for by then."""

    plan: Plan
    waited: dict[str, set[int]] = field(default_factory=dict)  # by stream
    compute: dict[str, int] = field(default_factory=dict)  # how far a stream waited for compute
    learned: dict[int, int] = field(default_factory=dict)  # by compute: what, and where

    def wait(self, at: int, instruction: Instruction) -> None:
        stream = stream_of(instruction)
        for position in instruction.waits:
            self.learn(stream, position, at)

    def learn(self, stream: str, position: int, at: int) -> None:
        """What has ended had waited for other things, which have ended then, too."""
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
                    self.learned.setdefault(position, at)
                waiting += one.waits

    def has(self, stream: str, position: int) -> bool:
        """Whether an earlier instruction has ended for sure, for what is next on a stream."""
        far = self.compute.get(stream, -1)
        if self.plan.instructions[position].stream == COMPUTE:
            return stream == COMPUTE or position <= far
        if position in self.waited.get(stream, ()):
            return True
        return position in self.learned and self.learned[position] <= far
