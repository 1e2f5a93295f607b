"""What bounds a simulated step, and what usually helps, as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from piper.names import BI, BW, TOTALS_STREAM, Device
from piper.sim.prediction import Prediction, StageTags
from piper.sim.report import HOST, Report
from piper.view.reports.units import percent, time_text

SHOWN = 4  # parts of the critical path
NAMES = {
    HOST: "hosts starting messages",
    "update": "optimizer updates",
    "add": "gradient accumulation",
}
WORTH = 0.1  # of the step: idle time that is worth advice
MOSTLY = 0.5  # of the critical path
SEND_LESS = (
    "send less or overlap more: larger microbatches, a schedule that overlaps, or a faster network"
)


def bound(found: Report, stages: Mapping[Device, StageTags]) -> str:
    """The parts of the critical path: the stages of a device, or messages of a stream.

    >>> from piper.sim.report import Step
    >>> steps = (Step(1, 0, 2.0, 3.0, "pp"), Step(0, 0, 0.0, 2.0, "F", "PP0"))
    >>> bound(Report(3.0, (), steps, {}), {0: (("PP", 0),)})
    'critical path: stage PP=0 on device 0 (67 %), messages on pp (33 %)'
    """
    parts: dict[str, float] = {}
    for (device, _, what), seconds in found.bounds.items():
        name = what_of(what) if device is None else compute_of(device, stages)
        parts[name] = parts.get(name, 0.0) + seconds
    whole = found.seconds or 1.0
    counting = [part for part in parts.items() if part[1] >= whole / 1000]
    rows = sorted(counting, key=lambda part: -part[1])
    shown = [f"{name} ({percent(seconds / whole)})" for name, seconds in rows[:SHOWN]]
    rest = sum(seconds for _, seconds in rows[SHOWN:])
    shown += [f"others ({percent(rest / whole)})"] if rest else []
    return "critical path: " + ", ".join(shown)


def what_of(name: str) -> str:
    """Part of the critical path that is not a region of the model."""
    return NAMES.get(name, f"messages on {name}")


def compute_of(device: Device, stages: Mapping[Device, StageTags]) -> str:
    return f"{stage_text(stages.get(device, ()))} on device {device}"


def stage_text(tags: StageTags) -> str:
    """
    >>> stage_text((("PP", 0), ("PP", 3))), stage_text((("L", 4), ("L", 5), ("L", 6)))
    ('stages PP=0 and PP=3', 'stages L=4 to 6')
    >>> stage_text(()), stage_text((("PP", 1),))
    ('compute', 'stage PP=1')
    """
    if not tags:
        return "compute"
    names = list(ranges(sorted(set(tags))))
    several = "s" if len(set(tags)) > 1 else ""
    return f"stage{several} {' and '.join(names)}"


def ranges(tags: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Neighbouring numbers as one range, if there are more than two."""
    runs: list[list[tuple[str, int]]] = []
    for key, index in tags:
        if runs and runs[-1][-1] == (key, index - 1):
            runs[-1].append((key, index))
        else:
            runs.append([(key, index)])
    for run in runs:
        (key, first), (_, last) = run[0], run[-1]
        if len(run) > 2:
            yield f"{key}={first} to {last}"
        else:
            yield from (f"{key}={index}" for _, index in run)


def advice(found: Prediction) -> str:
    """One line: what bounds the step most, and what usually helps."""
    report = found.report
    exposed = {
        stream: seconds / report.seconds
        for stream, seconds in report.exposed.items()
        if stream != TOTALS_STREAM  # two numbers, which nothing makes fewer
    }
    worst = max(exposed, key=lambda stream: exposed[stream], default="")
    if not found.fits:
        return "advice: it does not fit; recompute (`remat=`), use a higher `zero`, or more devices"
    if worst and exposed[worst] > max(WORTH, report.bubble):
        return f"advice: messages on {worst} bound the step; {SEND_LESS}"
    if (share := in_messages(report)) > MOSTLY:
        return (
            f"advice: messages bound the step ({percent(share)} of its critical path): devices "
            f"also wait for those of others; {SEND_LESS}"
        )
    if report.bubble <= WORTH:
        return (
            "advice: compute bounds the step; compiled=True, larger microbatches or lower precision"
        )
    if uneven(found) > report.bubble / 2:
        return uneven_text(found)
    waits = f"advice: devices wait {percent(report.bubble)} of the step for the compute of others"
    *ways, last = smaller_bubbles(found)
    return f"{waits} (the bubble); use " + " or ".join([", ".join(ways), last][not ways :])


def in_messages(report: Report) -> float:
    """The share of the critical path that is no compute.

    >>> from piper.sim.report import Step
    >>> steps = (Step(1, 0, 1.0, 4.0, "pp"), Step(0, 0, 0.0, 1.0, "F", "PP0"))
    >>> in_messages(Report(4.0, (), steps, {}))
    0.75
    """
    parts = report.bounds.items()
    messages = sum(
        seconds for (device, _, what), seconds in parts if device is None and is_sent(what)
    )
    return messages / (report.seconds or 1.0)


def is_sent(what: str) -> bool:
    """Messages, and what hosts do to start them."""
    return what == HOST or what not in NAMES


def smaller_bubbles(found: Prediction) -> Iterator[str]:
    """What makes a bubble smaller, and the strategy does not have yet."""
    yield "more microbatches"
    alone = all(len(set(tags)) < 2 for tags in found.stages.values())
    whole = not {BI, BW} & {step.what for step in found.report.critical}
    if alone:
        yield "an interleaved schedule"
    if whole:
        yield "a zero-bubble schedule"
    if not alone and not whole:
        yield "another order (`piper view` shows what each wait is for)"


def uneven(found: Prediction) -> float:
    """The share of the step for which devices wait because one has more to compute."""
    most = max(one.compute for one in found.report.devices)
    return (most - mean_compute(found)) / (found.seconds or 1.0)


def mean_compute(found: Prediction) -> float:
    """Of all devices, those of the same role included."""
    counts = [len(found.alike[one.device]) for one in found.report.devices]
    times = [one.compute for one in found.report.devices]
    return sum(map(float.__mul__, times, map(float, counts))) / sum(counts)


def uneven_text(found: Prediction) -> str:
    """Which stage is longer than the others, by how much, and what to change."""
    longest = max(found.report.devices, key=lambda one: one.compute)
    many = sum(map(len, found.alike.values()))
    mine = len(found.alike[longest.device])
    others = (mean_compute(found) * many - longest.compute * mine) / max(1, many - mine)
    name = compute_of(longest.device, found.stages)
    several = has_several(found, longest.device)
    bounds = "bound the step: they compute" if several else "bounds the step: it computes"
    rest = "the others" if many - mine > 1 else "the other one"
    average = " on average" if many - mine > 1 else ""
    return (
        f"advice: {name} {bounds} {time_text(longest.compute)}, {rest} "
        f"{time_text(others)}{average}; {shorter(found, longest.device)}. More microbatches "
        "hardly help"
    )


def has_several(found: Prediction, device: Device) -> bool:
    """Whether a device has several stages."""
    return len(set(found.stages.get(device, ()))) > 1


def shorter(found: Prediction, device: Device) -> str:
    """How to give it less to compute. A stage of one region cannot be cut elsewhere."""
    several = has_several(found, device)
    if found.layers.get(device, 0) > len(found.stages.get(device, ())):
        if found.is_cut:
            return (
                "by these costs, no other cut is faster; smaller layers could be cut more evenly "
                "(`with piper.annotate(...)`)"
            )
        return (
            f"give {'them' if several else 'it'} fewer layers (`stages=[...]` of a builder), or "
            "let a builder cut by measured times (`costs=`)"
        )
    each = "each of these stages is one region" if several else "it is one region"
    return (
        f"{each}: move {'their' if several else 'its'} borders, or tag smaller ones (`with "
        "piper.annotate(...)`, `piper.tag(model, ...)`), which a builder cuts into stages"
    )
