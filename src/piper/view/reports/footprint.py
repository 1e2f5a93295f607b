"""Peak memory and traffic of every device, as text. Devices of the same role share a line."""

from __future__ import annotations

from collections.abc import Container, Sequence

from piper.ir.by_device.roles import Roles
from piper.ir.dag import Dag
from piper.names import WEIGHTS_STREAM, Device
from piper.plan.analyse.memory import Peak, peak
from piper.plan.analyse.traffic import traffic
from piper.plan.instructions import Plan

MEANING = {WEIGHTS_STREAM: " (tied parameters)"}


def footprint(
    dag: Dag,
    plans: Sequence[Plan],
    roles: Roles,
    chosen: Container[Device] | None = None,
    optimizer: float = 2.0,
) -> str:
    """Peak memory and bytes sent in a step. `optimizer` is the size of its state, 2 for Adam.

    There is a plan for one device of each role. `chosen`: only of these devices.
    """
    alike: dict[str, list[Device]] = {}
    for plan in plans:
        mine = [d for d in roles.devices(plan.device) if chosen is None or d in chosen]
        if mine:
            alike.setdefault(line(peak(dag, plan, optimizer), traffic(plan)), []).extend(mine)
    return "\n".join(f"{devices_text(sorted(some))}  {text}" for text, some in alike.items())


def line(found: Peak, sent: dict[str, int]) -> str:
    held = ", ".join(f"{what} {size_text(size)}" for what, size in found.held.items() if size)
    moved = ", ".join(
        f"{size_text(size)} on {stream}{MEANING.get(stream, '')}"
        for stream, size in sorted(sent.items())
    )
    host = f" and {size_text(found.host)} of the host" if found.host else ""
    return f"peak {size_text(found.total)} ({held}){host}; sends {moved or 'nothing'}"


def devices_text(devices: Sequence[int]) -> str:
    """
    >>> devices_text([0, 2, 4, 6, 8])
    'devices 0, 2, 4 and 2 more'
    """
    names = ", ".join(map(str, devices[:3]))
    more = f" and {len(devices) - 3} more" if len(devices) > 3 else ""
    return f"device{'s' if len(devices) > 1 else ''} {names}{more}"


def size_text(size: float) -> str:
    """
    >>> size_text(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{rounded(size)} {unit}"
        size /= 1024
    return f"{rounded(size)} GiB"


def rounded(size: float) -> str:
    """A half is rounded up, as in the page.

    >>> rounded(48.25)
    '48.3'
    """
    return f"{size + 1e-9:.1f}"
