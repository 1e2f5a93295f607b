"""Bytes that a device sends in a step on each stream, computed from its plan."""

from __future__ import annotations

from collections import Counter

from piper.plan.instructions import Plan, is_message


def traffic(plan: Plan) -> dict[str, int]:
    """Bytes that leave the device, by stream."""
    found: Counter[str] = Counter()
    for one in plan.instructions:
        if is_message(one) and one.sent:
            found[one.stream] += one.sent
    return dict(found)
