"""Words every layer shares."""

from enum import StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
ValueId = NewType("ValueId", str)
RegionId = NewType("RegionId", str)
BucketId = NewType("BucketId", str)
Device = int

PASS = "PASS"  # the filter key that means a phase
RUN = "RUN"  # the filter key that counts the regions of equal tags, in program order
COMPUTE = "compute"  # the stream on which regions run


class Phase(StrEnum):
    """What part of the work on a region a node does."""

    FORWARD = "F"
    BACKWARD = "B"  # whole backward: BI and BW together
    BACKWARD_INPUT = "BI"  # gradients of the region's inputs
    BACKWARD_WEIGHT = "BW"  # gradients of the region's parameters


F, B, BI, BW = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT
