"""What every instruction of a step did, and when: seen by a runtime, or found by the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piper.names import Device

SIMULATED, MEASURED = "simulated", "measured"


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction of one device, in seconds since the step began.

    The host came to it when it was `issued`, and what it waits for had ended at `start`. What goes
    on by itself (messages, collectives) moves from `start` to `end`: where it was measured, `start`
    is when it was posted, and `end` when it was known to have ended, which may be late.
    """

    at: int  # its position in the plan
    issued: float
    start: float
    end: float
    late: bool = False  # it ended at some time before `end`, when somebody looked


@dataclass(frozen=True, slots=True)
class Trace:
    """One step of all devices."""

    name: str  # what a person calls it: "1f1b on h200"
    kind: str  # simulated or measured
    spans: Mapping[Device, tuple[Span, ...]] = field(default_factory=dict)
    step: int = 0  # measured: which step of the run

    @property
    def seconds(self) -> float:
        """From the first thing that any device does to the last."""
        ends = (span.end for spans in self.spans.values() for span in spans)
        starts = (span.issued for spans in self.spans.values() for span in spans)
        return max(ends, default=0.0) - min(starts, default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a column for each field, since there are many spans."""
        rows = {str(device): columns(spans) for device, spans in self.spans.items()}
        return {"name": self.name, "kind": self.kind, "step": self.step, "devices": rows}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Trace:
        """
        >>> one = Trace("1f1b", SIMULATED, {0: (Span(3, 0.0, 0.5, 1.0),)})
        >>> Trace.from_dict(one.to_dict()) == one
        True
        """
        spans = {int(device): from_columns(rows) for device, rows in found["devices"].items()}
        return Trace(found["name"], found["kind"], spans, found["step"])


def columns(spans: tuple[Span, ...]) -> dict[str, list[float]]:
    return {
        "at": [span.at for span in spans],
        "issued": [round(span.issued, 9) for span in spans],
        "start": [round(span.start, 9) for span in spans],
        "end": [round(span.end, 9) for span in spans],
        "late": [int(span.late) for span in spans],
    }


def from_columns(rows: Mapping[str, list[Any]]) -> tuple[Span, ...]:
    late = map(bool, rows.get("late", [0] * len(rows["at"])))
    return tuple(map(Span, rows["at"], rows["issued"], rows["start"], rows["end"], late))
