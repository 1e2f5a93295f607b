"""When every instruction of a step ran, as measured by the runtime or computed by the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piper.names import Device

SIMULATED, MEASURED = "simulated", "measured"


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction of one device, in seconds since the step began.

    The host reached it at `issued`, and its waits had completed at `start`. A message is in flight
    from `start` to `end`. In a measured trace, `start` is when it was posted, and `end` is when it
    was known to have completed, which may be late.
    """

    at: int  # its position in the plan
    issued: float
    start: float
    end: float
    late: bool = False  # it completed at an unknown time before `end`


@dataclass(frozen=True, slots=True)
class Trace:
    """One step of all devices."""

    name: str  # for people: "1f1b on h200"
    kind: str  # simulated or measured
    spans: Mapping[Device, tuple[Span, ...]] = field(default_factory=dict)
    step: int = 0  # measured: which step of the run

    @property
    def seconds(self) -> float:
        """From the first instruction of any device to the end of the last."""
        ends = (span.end for spans in self.spans.values() for span in spans)
        starts = (span.issued for spans in self.spans.values() for span in spans)
        return max(ends, default=0.0) - min(starts, default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a column for each field, since there are many spans."""
        devices = {str(device): columns(spans) for device, spans in self.spans.items()}
        return {"name": self.name, "kind": self.kind, "step": self.step, "devices": devices}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Trace:
        """
        >>> one = Trace("1f1b", SIMULATED, {0: (Span(3, 0.0, 0.5, 1.0),)})
        >>> Trace.from_dict(one.to_dict()) == one
        True
        """
        spans = {int(device): from_columns(lists) for device, lists in found["devices"].items()}
        return Trace(found["name"], found["kind"], spans, found["step"])


def columns(spans: tuple[Span, ...]) -> dict[str, list[float]]:
    return {
        "at": [span.at for span in spans],
        "issued": [round(span.issued, 9) for span in spans],
        "start": [round(span.start, 9) for span in spans],
        "end": [round(span.end, 9) for span in spans],
        "late": [int(span.late) for span in spans],
    }


def from_columns(lists: Mapping[str, list[Any]]) -> tuple[Span, ...]:
    late = map(bool, lists.get("late", [0] * len(lists["at"])))
    return tuple(map(Span, lists["at"], lists["issued"], lists["start"], lists["end"], late))
