"""The types of what users write in directives, and the checks that several directives share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from piper.errors import Problem, Refused
from piper.ir.filters import Filter
from piper.ir.placement.devices import Devices
from piper.names import COMPUTE, CONTROL_STREAM, TOTALS_STREAM, WEIGHTS_STREAM, Device

DeviceList = Sequence[Device]
DeviceGroups = Sequence[Device] | Sequence[Sequence[Device]]
StageSizes = int | Sequence[int]  # how many stages, or how many layers each of them has
ParameterPlan = Mapping[str, str] | Sequence[tuple[str, str]] | None  # pattern -> how it is cut
Speeds = Sequence[float] | None  # of each stage, relative to each other
Live = Sequence[int] | None  # for each stage, the microbatches that it holds at once
Kept = str | float | Sequence[str]  # what a recomputed region keeps besides its inputs
Slot = tuple[Filter, ...]
Slots = Sequence[Filter | Sequence[Filter]]  # a slot of one filter needs no list

MOST_PARTS = 1_000_000  # stages or microbatches: a slip of the pen, not a strategy, has more
CUTS = ("colwise", "rowwise")  # of a matrix of [outputs, inputs]
# streams that Piper uses itself
RESERVED = (COMPUTE, TOTALS_STREAM, WEIGHTS_STREAM, CONTROL_STREAM)


def device_list(devices: object) -> Devices:
    """A checked list of devices: not empty, no device twice."""
    found = replica_list(devices)
    if found.distinct is not found:
        raise Refused(no_list(devices))
    return found


def replica_list(devices: object) -> Devices:
    """A checked list with the device of each replica: a device may have several."""
    if isinstance(devices, Devices):
        return devices  # checked before
    found = Devices(devices if isinstance(devices, list | tuple | range) else ())
    if not found or not all(type(device) is int and device >= 0 for device in found):
        raise Refused(no_list(devices))
    return found


def no_list(devices: object) -> Problem:
    shown = list(devices) if isinstance(devices, tuple) else devices
    if isinstance(shown, list) and len(set(map(repr, shown))) < len(shown):
        return Problem(
            f"devices {shown!r} has a device twice", "list each device once, such as [0, 2]"
        )
    wrong = isinstance(shown, list) and not all(type(one) is int and one >= 0 for one in shown)
    each = "list devices by their numbers, 0 or more" if wrong else "list each device once"
    fix = f"write devices=[{shown}]" if type(shown) is int else f"{each}, such as [0, 2]"
    return Problem(f"devices {shown!r} is not a list of devices", fix)


def is_grouped(devices: object) -> bool:
    """Whether this is a list of lists."""
    if not isinstance(devices, list | tuple) or not devices:
        return False
    return all(isinstance(group, list | tuple | range) for group in devices)


def checked_groups(devices: DeviceGroups) -> DeviceGroups:
    """A checked list of devices, or list of lists, as the user wrote it."""
    groups = device_groups(devices)
    return groups if is_grouped(devices) else groups[0]


def device_groups(devices: DeviceGroups) -> tuple[Devices, ...]:
    """A list of devices is one group; a list of lists is one group each, all equally long."""
    if not is_grouped(devices):
        return (device_list(devices),)
    groups = tuple(map(device_list, devices))
    flat = [device for group in groups for device in group]
    if len(set(map(len, groups))) > 1 or len(set(flat)) < len(flat):
        shown = [list(group) for group in groups]
        what = f"the groups {shown} have different lengths or a device in common"
        raise Refused(Problem(what, "write groups such as [[0, 1], [2, 3]]"))
    return groups


def sorted_groups(devices: DeviceGroups) -> tuple[tuple[Device, ...], ...]:
    """Groups whose devices ascend, as the ranks of a communicator do; shards follow that order."""
    return tuple(tuple(sorted(group)) for group in device_groups(devices))


def checked_plan(plan: ParameterPlan) -> tuple[tuple[str, str], ...] | None:
    """
    >>> checked_plan({"layers.*.up": "colwise"})
    (('layers.*.up', 'colwise'),)
    """
    if plan is None:
        return None
    pairs = plan.items() if isinstance(plan, Mapping) else plan
    found = tuple(pairs) if isinstance(pairs, Iterable) and not isinstance(pairs, str) else (None,)
    if not all(isinstance(one, tuple) and len(one) == 2 for one in found):
        fix = 'write {"layers.*.up_proj": "colwise"}'
        raise Refused(Problem(f"plan={plan!r} is not a table of names", fix))
    for key, value in found:
        if not isinstance(key, str) or value not in CUTS:
            what = f"plan says {value!r} of {key!r}"
            raise Refused(Problem(what, f"write one of {', '.join(CUTS)} of each name or pattern"))
    return found


FROM_TEXT = (
    'write where(PP=0, MB=0, PASS="F") for each; strategies.from_csv("0F0,0B0") reads text, with a '
    "line for each device"
)


def as_slots(slots: Slots) -> tuple[Slot, ...]:
    if isinstance(slots, Filter) or not isinstance(slots, list | tuple):
        fix = 'write one list: Order([where(PP=0, MB=0, PASS="F"), ...])'
        fix = FROM_TEXT if isinstance(slots, str) else fix
        raise Refused(Problem(f"{slots!r} is not a list of slots", fix))
    return tuple(map(as_slot, slots))


def as_slot(slot: Filter | Iterable[Filter]) -> Slot:
    filters = (slot,) if isinstance(slot, Filter) else slot
    if not isinstance(filters, list | tuple) or not all(isinstance(f, Filter) for f in filters):
        fix = "write a filter or a list of filters: [where(PP=0)]"
        raise Refused(Problem(f"{slot!r} is not a slot", FROM_TEXT if has_text(slot) else fix))
    return tuple(filters)


def has_text(slot: object) -> bool:
    return isinstance(slot, str) or (isinstance(slot, list | tuple) and any(map(has_text, slot)))


def require_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        fix = f"write a whole number, {least} or more"
        raise Refused(Problem(f"{name}={value!r} is not a valid count", fix))


def require_stream_name(stream: object, example: str) -> None:
    if not isinstance(stream, str) or not stream:
        raise Refused(Problem(f"stream {stream!r} is not a name", f"write {example}"))


def require_free_stream(stream: object, example: str) -> None:
    require_stream_name(stream, example)
    if stream in RESERVED:
        what = f"the stream {stream!r} is reserved: Piper uses it itself"
        raise Refused(Problem(what, 'choose another name, such as "dp"'))
