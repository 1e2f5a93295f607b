"""How busy each kind of device is, where a job has several, and which of them bounds the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from piper.sim.prediction import Prediction
from piper.view.reports.footprint import devices_text

BOUND = 0.5  # of the critical path: a kind that has more bounds the step
IDLE = 0.8  # of the time of the busiest kind: one that computes less has room for more


def kind_lines(
    found: Prediction, kinds: Sequence[str], seconds: Mapping[str, float]
) -> Iterator[str]:
    """`kinds` are the names of the kinds of all devices, by number.

    `seconds` is how long a microbatch takes for the whole model on each kind.
    """
    if len(set(kinds)) < 2:
        return
    busy, critical = busy_shares(found, kinds), critical_shares(found, kinds)
    for kind, share in busy.items():
        devices = [device for device, name in enumerate(kinds) if name == kind]
        yield (
            f"  {kind} ({devices_text(devices)}): computes {100 * share:.0f} % of the step, "
            f"{100 * critical.get(kind, 0.0):.0f} % of the critical path"
        )
    bound = max(busy, key=lambda kind: critical.get(kind, 0.0))
    others = [kind for kind in busy if busy[kind] < IDLE * busy[bound]]
    if critical.get(bound, 0.0) > BOUND and others:
        most = max(seconds.values())
        speeds = ", ".join(f"{kind} {most / time:.2g}" for kind, time in seconds.items())
        yield (
            f"{bound} bounds the step, and {' and '.join(others)} could do more: builders divide "
            f"layers by the kinds of devices unless `stages=` or `speeds=` say how ({speeds})"
        )


def busy_shares(found: Prediction, kinds: Sequence[str]) -> dict[str, float]:
    """The part of the step that devices of each kind compute."""
    seconds = dict.fromkeys(kinds, 0.0)
    for one in found.report.devices:
        for device in found.alike[one.device]:
            seconds[kinds[device]] += one.compute
    whole = found.seconds or 1.0
    return {name: total / (whole * kinds.count(name)) for name, total in seconds.items()}


def critical_shares(found: Prediction, kinds: Sequence[str]) -> dict[str, float]:
    """The part of the critical path in which each kind computes."""
    shares: dict[str, float] = {}
    for (device, _, _), seconds in found.report.bounds.items():
        if device is not None:
            name = kinds[device]
            shares[name] = shares.get(name, 0.0) + seconds / (found.seconds or 1.0)
    return shares
