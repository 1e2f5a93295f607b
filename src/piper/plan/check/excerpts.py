"""Excerpts of plans around the instructions of an error, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from piper.names import Device
from piper.plan.instructions import Plan, line
from piper.plan.rendezvous import Event

Marks = Mapping[Device, Mapping[int, str]]  # device -> instruction -> the mark before it
WIDTH, COLUMN = 118, 56


def excerpts(plans: Mapping[Device, Plan], here: Event, *others: Event) -> str:
    """The instruction at which a check stopped (`>`), and others that explain it (`*`).

    One device takes the full width. Several are side by side, each under its name.
    """
    places = [here, *(other for other in others if other != here)]
    marks: dict[Device, dict[int, str]] = {}
    for event in places:
        marks.setdefault(event[0], {})[event[1]] = ">" if event == here else "*"
    around = 2 if len(places) == 1 else 1
    if len(marks) == 1:
        return "\n".join(f"  {text}" for text in excerpt(plans[here[0]], marks[here[0]], around))
    return side_by_side(plans, marks, around)


def last_end(plan: Plan, buffer: str, before: int) -> int | None:
    """The last instruction before position `before` that freed or consumed a buffer."""
    return next((k for k in reversed(range(before)) if buffer in plan.instructions[k].ends), None)


def side_by_side(plans: Mapping[Device, Plan], marks: Marks, around: int = 1) -> str:
    """As many plans side by side as fit, in as many bands as needed."""
    columns = [
        [f"device {device}", *map(cut, excerpt(plans[device], signs, around))]
        for device, signs in marks.items()
    ]
    width = max(len(text) for column in columns for text in column)
    fit = max(1, WIDTH // (width + 3))
    bands = (columns[k : k + fit] for k in range(0, len(columns), fit))
    return "\n".join("\n".join(band(columns, width)) for columns in bands)


def band(columns: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    for cells in zip_longest(*columns, fillvalue=""):
        yield "  " + " | ".join(f"{cell:{width}}" for cell in cells).rstrip()


def excerpt(plan: Plan, marks: Mapping[int, str], around: int) -> Iterator[str]:
    """The marked instructions with their neighbours. Gaps are shown as `...`."""
    last = -1
    for k in wanted(marks, around, len(plan.instructions)):
        if last >= 0 and k > last + 1:
            yield "     ..."
        yield f"{marks.get(k, ' ')} {k:4} {line(plan.instructions[k])}"
        last = k


def wanted(marks: Mapping[int, str], around: int, count: int) -> list[int]:
    near = {k for at in marks for k in range(at - around, at + around + 1)}
    return sorted(k for k in near if 0 <= k < count)


def cut(text: str) -> str:
    return text if len(text) <= COLUMN else text[: COLUMN - 1] + "…"
