"""When a device waits for gradients that nothing needs yet, to free what was sent.

A whole gradient is alive until its reduce-scatter has ended. The next one waits for it, but between
the last of a microbatch and the first of the next lie all forwards. At the end of these a device
holds most, so the last of many waits. That long, a message of one region is done, or messages are
what the step waits for anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

from piper.ir.nodes import Compute
from piper.names import F, NodeId

MANY = 4  # forwards in a row


def last_forwards(nodes: Iterable[object]) -> set[NodeId]:
    """The last of many forwards in a row, each time a backward follows."""
    found, row = set(), list[NodeId]()
    for node in (node for node in nodes if isinstance(node, Compute)):
        if node.phase is F:
            row.append(node.id)
            continue
        if len(row) >= MANY:
            found.add(row[-1])
        row = []
    return found
