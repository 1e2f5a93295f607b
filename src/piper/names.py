"""Names that all layers share."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
ValueId = NewType("ValueId", str)
RegionId = NewType("RegionId", str)
BucketId = NewType("BucketId", str)
Device = int

PASS = "PASS"  # the filter key for phases
RUN = "RUN"  # the filter key that numbers regions with equal tags, in program order
OF = "OF"  # the filter key for the pass that a message belongs to: F or B
STEP = "STEP"  # the filter key for passes of the next step, in the last slot of an order
COMPUTE = "compute"  # the stream on which regions run
TOTALS_STREAM = "loss_norm"  # the stream of the loss and norm all-reduce
WEIGHTS_STREAM = "weights"  # the stream that refreshes copies of parameters
CONTROL_STREAM = "control"  # the stream of messages that only say when something may start
NORMAL, HIGH = "normal", "high"  # priorities of a stream


@dataclass(frozen=True, slots=True)
class Share:
    """The SMs of a GPU that a stream may use (None: any), and its priority.

    >>> print(Share("ep", 20, HIGH))
    ep (20 SMs, high)
    """

    stream: str
    sms: int | None = None
    priority: str = NORMAL

    def __str__(self) -> str:
        many = "" if self.sms is None else f"{self.sms} SM{'s' if self.sms > 1 else ''}"
        words = [word for word in (many, self.priority) if word and word != NORMAL]
        return f"{self.stream} ({', '.join(words)})" if words else self.stream


class Phase(StrEnum):
    """The part of a region's work that a node does."""

    FORWARD = "F"
    BACKWARD = "B"  # whole backward: BI and BW together
    BACKWARD_INPUT = "BI"  # gradients of the region's inputs
    BACKWARD_WEIGHT = "BW"  # gradients of the region's parameters


class Operation(StrEnum):
    """What an order can name besides the passes of regions, as values of PASS."""

    UPDATE = "UPDATE"  # the optimizer's step on parameters
    REDUCE = "REDUCE"  # gradients are reduced over replicas: all-reduce or reduce-scatter
    GATHER = "GATHER"  # sharded parameters are gathered
    SEND = "SEND"  # a value leaves for another device
    RECV = "RECV"  # a value arrives from another device
    DISPATCH = "DISPATCH"  # tokens go to their experts
    COMBINE = "COMBINE"  # tokens come back from their experts


F, B, BI, BW = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT


def amount(count: int, word: str, plural: str = "") -> str:
    """
    >>> amount(1, "device"), amount(1200, "device"), amount(2, "pass", "passes")
    ('1 device', '1,200 devices', '2 passes')
    """
    return f"{count:,} {word if count == 1 else plural or word + 's'}"


def with_article(noun: str) -> str:
    """
    >>> with_article("int"), with_article("str")
    ('an int', 'a str')
    """
    return f"{'an' if noun[0].lower() in 'aeio' else 'a'} {noun}"
