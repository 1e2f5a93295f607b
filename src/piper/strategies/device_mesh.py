"""The devices of a strategy as a mesh: which axis lies inside a node, and which across nodes.

As in PyTorch's `DeviceMesh`, device numbers run through the mesh row by row: the last axis varies
fastest, so its devices are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from piper.errors import StrategyError
from piper.names import Device

DEFAULT = ("dp", "pp")
Mesh = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """`pp` ranks of each of `dp` pipelines. `ep` of these, one after the other, divide experts."""

    pp: int
    dp: int
    ep: int = 1
    axes: tuple[str, ...] = DEFAULT
    devices: tuple[Device, ...] | None = None  # in the order of the mesh; None: 0, 1, 2, ...

    def device(self, rank: int, pipeline: int) -> Device:
        """The device of a rank of a pipeline.

        >>> [DeviceMesh(2, 3).device(rank, 1) for rank in range(2)]
        [2, 3]
        >>> [DeviceMesh(2, 3, axes=("pp", "dp")).device(rank, 1) for rank in range(2)]
        [1, 4]
        """
        group, member = divmod(pipeline, self.ep) if "ep" in self.axes else (pipeline, 0)
        at, index = {"pp": rank, "dp": group, "ep": member}, 0
        for axis in self.axes:
            index = index * self.sizes[axis] + at[axis]
        return index if self.devices is None else self.devices[index]

    @property
    def sizes(self) -> dict[str, int]:
        """With an axis for experts, `dp` counts the groups that divide them."""
        groups = self.dp // self.ep if "ep" in self.axes else self.dp
        return {"dp": groups, "pp": self.pp, "ep": self.ep}


def device_mesh(
    pp: int, dp: int, ep: int, mesh: Mesh | None, devices: Sequence[Device] | None
) -> DeviceMesh:
    """The mesh that the options of a builder describe. `ep` counts pipelines."""
    axes = axes_of(mesh)
    if "ep" in axes and dp % ep:
        fix = "leave ep out of the mesh, or choose dp as a multiple of ep"
        raise wrong(f"mesh={','.join(axes)!r}: ep={ep} does not divide dp={dp}", fix)
    found = DeviceMesh(pp, dp, ep, axes)
    if devices is None:
        return found
    return DeviceMesh(pp, dp, ep, axes, devices_of(devices, prod((pp, dp))))


def axes_of(mesh: Mesh | None) -> tuple[str, ...]:
    """Commas separate axes, or dashes, where a command line splits at commas.

    >>> axes_of("pp, dp"), axes_of("pp-dp"), axes_of(None)
    (('pp', 'dp'), ('pp', 'dp'), ('dp', 'pp'))
    """
    if mesh is None:
        return DEFAULT
    words = mesh.replace("-", ",").split(",") if isinstance(mesh, str) else list(mesh)
    axes = tuple(str(word).strip() for word in words)
    if sorted(axes) not in (["dp", "pp"], ["dp", "ep", "pp"]):
        fix = (
            'name each axis once, the one of neighbouring devices last: mesh="pp,dp" or "dp,pp,ep"'
        )
        raise wrong(f"mesh={mesh!r} is not an order of pp and dp (and ep)", fix)
    return axes


def devices_of(devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    found = tuple(devices)
    valid = all(type(device) is int and device >= 0 for device in found)
    if not valid or len(set(found)) != count or len(found) != count:
        what = f"devices={list(found)} are not {count} different devices, as pp * dp says"
        raise wrong(what, "list every device once, in the order of the mesh")
    return found


def wrong(what: str, fix: str) -> StrategyError:
    return StrategyError.of("strategy", what, fix)
