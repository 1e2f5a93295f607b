"""What lies between devices: nodes, links and switches, with their latencies and bandwidths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from piper.errors import Problem, StrategyError
from piper.names import Device

FIX = "give bandwidths in bytes per second, latencies in seconds"


@dataclass(frozen=True, slots=True)
class Link:
    """One way between a device and the rest: both directions have this much."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        fine = isinstance(self.bandwidth, int | float) and isinstance(self.latency, int | float)
        if not fine or not self.bandwidth > 0 or not self.latency >= 0:
            raise StrategyError.of("network", f"a link of {self}", FIX)


@dataclass(frozen=True, slots=True)
class Network:
    """Devices in nodes of `per_node`, in the order of their numbers.

    Each device reaches its own node by `inside`, the others by `between`. Where devices of a node
    share one way out, it is the `uplink`; `spine` is what all nodes share. `pairs` are links that
    two devices have for themselves. Streams slowed by something else (a limit on channels) have a
    `streams` bandwidth per device.
    """

    per_node: int = 8
    inside: Link = Link(1e9, 1e-4)
    between: Link = Link(1e9, 1e-4)
    uplink: Link | None = None
    spine: Link | None = None
    pairs: Mapping[tuple[Device, Device], Link] = field(default_factory=dict)
    streams: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.per_node, int) or self.per_node < 1:
            problem = Problem(f"nodes of {self.per_node!r} devices", "write a number from 1 on")
            raise StrategyError("network", problem)

    def node(self, device: Device) -> int:
        return device // self.per_node

    def latency(self, source: Device, target: Device) -> float:
        if (source, target) in self.pairs:
            return self.pairs[source, target].latency
        if self.node(source) == self.node(target):
            return self.inside.latency
        extra = (link.latency for link in (self.uplink, self.spine) if link)
        return self.between.latency + sum(extra)

    def to_json(self) -> str:
        """
        >>> one = Network(4, uplink=Link(5e9), pairs={(0, 1): Link(1e9)})
        >>> Network.from_json(one.to_json()) == one
        True
        """
        found = asdict(replace(self, pairs={}))
        found["pairs"] = [
            [*ends, link.bandwidth, link.latency] for ends, link in self.pairs.items()
        ]
        return json.dumps(found, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Network:
        """Refuses what is no network."""
        try:
            found: dict[str, Any] = json.loads(text)
            links = {k: Link(**found[k]) for k in LINKS if found.get(k)}
            pairs = {(a, b): Link(*link) for a, b, *link in found.get("pairs", ())}
            rest = {k: v for k, v in found.items() if k not in (*LINKS, "pairs")}
            named: dict[str, Any] = {**rest, **links, "pairs": pairs}
            return Network(**named)
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            problem = Problem(f"this is no network: {error}", "see docs/simulate.md for its form")
            raise StrategyError("network", problem) from None


LINKS = ("inside", "between", "uplink", "spine")
NETWORKS: Mapping[str, Network] = {
    # eight GPUs behind a switch of NVLinks, and a network card of 400 Gbit/s for each
    "h100": Network(8, Link(450e9, 4e-6), Link(50e9, 1e-5)),
    "h200": Network(8, Link(450e9, 4e-6), Link(50e9, 1e-5)),
    "h800": Network(8, Link(200e9, 4e-6), Link(50e9, 1e-5)),
    # four cards of 200 Gbit/s for eight GPUs
    "a100": Network(8, Link(300e9, 4e-6), Link(25e9, 1e-5), uplink=Link(100e9)),
    "none": Network(1, Link(inf), Link(inf)),
}
