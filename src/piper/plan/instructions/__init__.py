"""The instruction set. A plan is data: it prints, and the same input gives the same plan.

The host issues the instructions of a plan in order. Messages are asynchronous: `Send` and `Recv`
run in order on their channel (stream, sender, receiver); `Reduce`, `Gather`, `Exchange` (the token
all-to-all), `Redistribute` (of a divided region) and `Total` (the loss and norm all-reduce) run in
order in their group. `Store` and `Fetch` copy between host and device, and need no other device;
those of one stream and direction run in order. Everything else runs in order on the compute stream.
`waits` are the positions of earlier instructions of the same plan, on other streams, that must have
completed.

An instruction knows what it uses, defines and ends, its communicator, how it prints and what
differs on another device of its role. Code that walks a plan asks the instruction. A new
instruction needs a class here, its lowering, its execution (in the check and in the runtime) and
its price.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper.names import COMPUTE, Device, Share
from piper.plan.instructions.base import Buffers, Waits
from piper.plan.instructions.compute import Add, Free, Keep, Load, Run, Slice, Update
from piper.plan.instructions.copies import Fetch, Store
from piper.plan.instructions.messages import (
    Exchange,
    Gather,
    Recv,
    Redistribute,
    Reduce,
    Send,
    Total,
)
from piper.plan.instructions.sizes import Layout, Shape, is_dynamic

__all__ = [
    "Add", "Buffers", "Exchange", "Fetch", "Free", "Gather", "Instruction", "Keep", "Layout",
    "Load", "Plan", "Recv", "Redistribute", "Reduce", "Run", "Send", "Shape", "Slice", "State",
    "Store", "Total", "Update", "Waits",
    "is_dynamic", "is_message", "line",
]  # fmt: skip

Instruction = (
    Load
    | Run
    | Slice
    | Keep
    | Add
    | Send
    | Recv
    | Reduce
    | Gather
    | Exchange
    | Redistribute
    | Store
    | Fetch
    | Total
    | Update
    | Free
)


def is_message(instruction: Instruction) -> bool:
    """Whether it is asynchronous and has to be waited for."""
    return instruction.stream != COMPUTE


@dataclass(frozen=True, slots=True)
class State:
    """Memory that outlives the step: a bucket's parameters, at home or as a copy.

    If `ways` is above 1, it is shard number `shard` of that many, laid out as `messages`. If
    `shares` is above 1, it holds part number `share` of each parameter only (or a shard of that
    part): of its experts, or else `cuts` says of which dimension, in how many blocks.
    """

    value: str
    bucket: str
    home: bool
    shard: int = 0
    ways: int = 1
    messages: tuple[Layout, ...] = ()
    share: int = 0
    shares: int = 1
    cuts: tuple[tuple[int, int], ...] = ()
    host: bool = False  # the state of its optimizer is in host memory
    on_host: bool = False  # it is in host memory itself: what reads it fetches it first

    @property
    def rounded_late(self) -> bool:
        """Whether masters are all that is held of it.

        Only gathers read a shard, and they can round it: in their buffer, where it goes anyway.
        """
        return self.home and self.ways > 1 and not (self.host or self.on_host)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one device does in a step."""

    device: Device
    states: tuple[State, ...]
    instructions: tuple[Instruction, ...]
    buffers: tuple[int, ...] = ()  # bytes of each gather buffer
    streams: tuple[Share, ...] = ()  # their SMs and priorities; the same in all plans of a job

    def __str__(self) -> str:
        head = ", ".join([f"device {self.device}", *map(str, self.streams)])
        lines = (f"{k:4}  {line(one)}" for k, one in enumerate(self.instructions))
        return "\n".join([head, *lines])


def line(instruction: Instruction) -> str:
    """One instruction on one line.

    >>> line(Send("send h0>1", "h0", (((2, 4), "float32"),), 1, "pp"))
    'send    h0 to 1 on pp'
    """
    after = f"  after {', '.join(map(str, instruction.waits))}" if instruction.waits else ""
    return instruction.text + after
