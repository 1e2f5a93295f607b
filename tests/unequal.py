"""Built strategies with the device of each rank replaced by a list of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runtime.test_replicate import legal

from piper.directives import Directive, Place, Replicate, Strategy

Lists = Mapping[int, Sequence[int]]  # by rank of the schedule


def scheduled(schedule: str, lists: Lists, **options: Any) -> Strategy:
    """A schedule of two ranks whose devices are those of `lists`, with what `Replicate` is told."""
    found: list[Directive] = []
    for directive in legal(schedule, 2):
        if isinstance(directive, Place):
            devices = [device for rank in directive.devices for device in lists[rank]]
            once = tuple(dict.fromkeys(devices))
            found += [
                replace(directive, devices=tuple(devices)),
                Replicate(directive.filter, once, **options),
            ]
        elif not isinstance(directive, Replicate):
            found.append(directive)
    return Strategy(found)
