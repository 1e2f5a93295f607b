"""Options that name things with their devices: `h200:0-3,a100:4-7`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from piper.errors import InputError, StrategyError
from piper.names import Device

MOST = 1_000_000  # devices


def devices_by_name(text: str) -> dict[str, tuple[Device, ...]]:
    """Which devices are of which kind. No devices are listed if all are of one kind.

    >>> devices_by_name("h200:0-2,a100:3+5"), devices_by_name("h200")
    ({'h200': (0, 1, 2), 'a100': (3, 5)}, {'h200': ()})
    """
    found: dict[str, tuple[Device, ...]] = {}
    for part in text.split(","):
        name, _, numbers = part.strip().partition(":")
        found[name] = found.get(name, ()) + tuple(devices_in(numbers, text))
    if len(found) > 1 and not all(found.values()):
        raise not_listed(text)
    every = [device for devices in found.values() for device in devices]
    twice = [device for device, count in Counter(every).items() if count > 1]
    if twice:
        what = f"{text!r} lists device {twice[0]} twice"
        raise StrategyError.of("device", what, "list every device once")
    return found


def devices_in(numbers: str, text: str) -> Iterator[Device]:
    """Ranges and single numbers, joined by plus signs."""
    for part in filter(None, numbers.split("+")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise not_listed(text)
        if int(last or first) >= MOST:
            what = f"{text!r} names device {last or first}"
            raise StrategyError.of("device", what, f"number devices from 0 to {MOST - 1}")
        yield from range(int(first), int(last or first) + 1)


def device_numbers(text: str, option: str) -> list[Device]:
    """
    >>> device_numbers("0-2,5", "--devices")
    [0, 1, 2, 5]
    """
    try:
        found = list(devices_in(text.replace(",", "+"), text))
    except StrategyError as error:
        fix = "write ranges and numbers, for example 0-3,8"
        raise InputError.of(option, error.problems[0].what, fix) from None
    if not found:
        raise InputError.of(option, f"{text!r} names no device", "write for example 0-3,8")
    return found


def not_listed(text: str) -> StrategyError:
    fix = "list the devices of each kind: h200:0-3,a100:4-7"
    return StrategyError.of("device", f"{text!r} does not say which devices it means", fix)
