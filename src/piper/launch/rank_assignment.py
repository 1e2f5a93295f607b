"""Who is which rank, when a cluster has said where its processes will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster put a process: the node, its address, the GPUs that are the process's own."""

    node: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process is in the run. `index` is its position in the cluster's list."""

    index: int
    rank: int
    local_rank: int
    local_world: int
    gpus: tuple[str, ...]  # of all processes on its node

    def environment(self, world: int, address: str, port: int) -> dict[str, str]:
        """What torch.distributed and Piper read.

        All GPUs of the run are visible to every process of a node, so that NCCL finds the links
        between them; LOCAL_RANK says which one is its own.
        """
        found = {
            "RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": address, "MASTER_PORT": str(port),
        }  # fmt: skip
        return {**found, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else found


def seats(places: Sequence[Place], here: str = "") -> list[Seat]:
    """Ranks in the order of the nodes, the node that is `here` first: neighbours are close.

    >>> [seat.index for seat in seats([Place("b", "10.0.0.2"), Place("a", "10.0.0.1")], here="a")]
    [1, 0]
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    nodes.sort(key=lambda node: node != here)

    def key(index: int) -> tuple[int, tuple[str, ...], int]:
        place = places[index]
        return nodes.index(place.node), tuple(gpu.zfill(4) for gpu in place.gpus), index

    found: list[Seat] = []
    ordered = sorted(range(len(places)), key=key)
    for _, group in groupby(ordered, key=lambda index: places[index].node):
        members = list(group)
        gpus = tuple(gpu for index in members for gpu in places[index].gpus)
        found += [
            Seat(index, len(found) + local, local, len(members), gpus)
            for local, index in enumerate(members)
        ]
    return found
