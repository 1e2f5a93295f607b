"""Assign ranks to processes, given the nodes that a cluster placed them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster placed a process: the node, its address, the GPUs of the process."""

    node: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The ranks of a process in the run. `index` is its position in the cluster's list."""

    index: int
    rank: int
    local_rank: int
    local_world: int
    gpus: tuple[str, ...]  # of all processes on its node

    def environment(self, world: int, address: str, port: int) -> dict[str, str]:
        """The environment variables that torch.distributed and Piper read.

        All GPUs of the run are visible to every process of a node, so that NCCL finds the links
        between them. LOCAL_RANK is the index of its own GPU.
        """
        found = {
            "RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": address, "MASTER_PORT": str(port),
        }  # fmt: skip
        return {**found, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else found


def assign_ranks(places: Sequence[Place], here: str = "") -> list[Assignment]:
    """Ranks in the order of nodes, with the node `here` first. Neighbours share a node.

    >>> found = assign_ranks([Place("b", "10.0.0.2"), Place("a", "10.0.0.1")], here="a")
    >>> [one.index for one in found]
    [1, 0]
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    nodes.sort(key=lambda node: node != here)

    def key(index: int) -> tuple[int, tuple[str, ...], int]:
        place = places[index]
        return nodes.index(place.node), tuple(gpu.zfill(4) for gpu in place.gpus), index

    found: list[Assignment] = []
    ordered = sorted(range(len(places)), key=key)
    for _, group in groupby(ordered, key=lambda index: places[index].node):
        members = list(group)
        gpus = tuple(gpu for index in members for gpu in places[index].gpus)
        found += [
            Assignment(index, len(found) + local, local, len(members), gpus)
            for local, index in enumerate(members)
        ]
    return found
