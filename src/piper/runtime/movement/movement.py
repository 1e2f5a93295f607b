"""State that moves from the devices of one strategy to those of another, in memory.

Every device says what it holds. Each then takes what it needs: what it already has, and the rest
from one of those that have it. Nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from piper.runtime.checkpoint.index import NUMBER, PARAMETER, Piece
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.pieces import Turns, bucket_pieces
from piper.runtime.checkpoint.reader import States, put
from piper.runtime.hardware import settle
from piper.runtime.processes.wire_format import travels
from piper.runtime.state.device_state import BucketState, DeviceState, HeldPart
from piper.runtime.state.element_runs import ElementRun, Overlap, element_runs, overlaps, without

Key = tuple[str, str]  # the kind and the state of a piece


@travels
class Offer(NamedTuple):
    """A piece that a device holds."""

    rank: int
    number: int  # among those of the device
    piece: Piece
    shape: tuple[int, ...]  # of the tensor that it is a piece of
    length: int
    dtype: torch.dtype

    @property
    def runs(self) -> list[ElementRun]:
        if self.piece.kind != PARAMETER:
            return [ElementRun(0, self.length, 0)] if self.length else []
        return element_runs(self.piece.order, self.shape, self.piece.first, self.length)


class Wanted(NamedTuple):
    """Elements of an offer, and where a device puts them."""

    offer: Offer
    overlap: Overlap
    into: torch.Tensor

    @property
    def request(self) -> tuple[int, int, int]:
        """The number of the offer, where elements start in it, and how many there are."""
        return self.offer.number, self.overlap.source, self.overlap.length

    @property
    def nbytes(self) -> int:
        return self.overlap.length * self.offer.dtype.itemsize

    def fill(self, values: torch.Tensor) -> None:
        start = self.overlap.target
        self.into[start : start + self.overlap.length] = values


@dataclass
class Offers:
    """What all devices hold, by the name of the parameter. Those of this device come first."""

    rank: int
    tensors: list[torch.Tensor]  # of this device's own offers, flat
    known: dict[str, dict[Key, list[Offer]]] = field(default_factory=dict)

    def add(self, offer: Offer) -> None:
        key = offer.piece.kind, offer.piece.state
        self.known.setdefault(offer.piece.name, {}).setdefault(key, []).append(offer)

    def nearest(self, offers: Iterable[Offer], count: int) -> list[Offer]:
        """Its own first. The rest from the next device on, so that not all ask the same one."""
        return sorted(offers, key=lambda one: (one.rank - self.rank) % count)


def offered(peers: Peers, state: DeviceState, turns: Turns) -> Offers:
    """What all devices hold at home. Copies without an optimizer are not offered."""
    mine, tensors = list[Offer](), list[torch.Tensor]()
    for value, bucket in state.buckets.items():
        if value not in turns:
            continue
        shapes = dict(zip(bucket.names, bucket.shapes, strict=True))
        for piece, tensor in bucket_pieces(bucket):
            shape = shapes[piece.name] if piece.kind == PARAMETER else tensor.shape
            row = piece, tuple(shape), tensor.numel(), tensor.dtype
            mine.append(Offer(peers.rank, len(mine), *row))
            tensors.append(tensor.reshape(-1))
    found = Offers(peers.rank, tensors)
    for offers in peers.everyone(mine):
        for one in offers:
            found.add(one)
    return found


def move(peers: Peers, before: DeviceState, turns: Turns, after: DeviceState) -> int:
    """Fill all buckets of the new state from the old one. Returns the bytes that devices sent."""
    settle(before.device)
    offers = offered(peers, before, turns)
    buckets = list(after.buckets.values())
    fillings = [[filling(offers, bucket, part, peers.count) for part in bucket.parts()]
                for bucket in buckets]  # fmt: skip
    items = [item for parts in fillings for part in parts for item in part.items]
    sent = exchange(peers, offers, items, before.device)
    for bucket, parts in zip(buckets, fillings, strict=True):
        put(bucket, [part.states for part in parts])
    return sent


@dataclass
class Filling:
    """Tensors for the states of a part, and the elements that belong into them."""

    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    items: list[Wanted] = field(default_factory=list)

    @property
    def states(self) -> States:
        return {
            state: tensor.item() if kind == NUMBER else tensor
            for (kind, state), tensor in self.tensors.items()
        }


def filling(offers: Offers, bucket: BucketState, part: HeldPart, count: int) -> Filling:
    found = Filling()
    for key, known in offers.known.get(part.name, {}).items():
        if part.parameter.numel() and (bucket.optimizer is not None or not key[1]):
            tensor, items = assembled(part, key[0], offers.nearest(known, count))
            found.tensors[key] = tensor
            found.items += items
    return found


def assembled(
    part: HeldPart, kind: str, offers: Sequence[Offer]
) -> tuple[torch.Tensor, list[Wanted]]:
    """A tensor for a state of a part, and the elements that belong into it."""
    cut = kind == PARAMETER
    shape = part.parameter.shape if cut else torch.Size(offers[0].shape)
    made = torch.empty(shape, dtype=offers[0].dtype, device=part.parameter.device)
    missing = [ElementRun(0, shape.numel(), 0)]
    if cut:
        missing = element_runs(part.order, part.shape, part.first, shape.numel())
    found = []
    for offer in offers:
        runs = offer.runs if missing else []
        found += [Wanted(offer, each, made.view(-1)) for each in overlaps(runs, missing)]
        missing = without(missing, runs)
    assert not missing, f"nobody holds all of {part.name}"
    return made, found


def exchange(peers: Peers, offers: Offers, items: Sequence[Wanted], device: torch.device) -> int:
    """Fill everything, with as many bytes between devices as are not there already."""
    asked: dict[int, list[Wanted]] = {}
    for item in items:
        asked.setdefault(item.offer.rank, []).append(item)
    for item in asked.pop(peers.rank, ()):
        number, start, length = item.request
        item.fill(offers.tensors[number][start : start + length])
    requests = {rank: [one.request for one in found] for rank, found in asked.items()}
    everyone = peers.everyone(requests)
    given = {
        rank: packed(offers.tensors, theirs[peers.rank], device)
        for rank, theirs in enumerate(everyone)
        if peers.rank in theirs
    }
    arrived = {
        rank: torch.empty(sum(one.nbytes for one in found), dtype=torch.uint8, device=device)
        for rank, found in asked.items()
    }
    send_and_receive(given, arrived)
    for rank, found in asked.items():
        unpack(arrived[rank], found)
    sent = peers.everyone(sum(one.numel() for one in arrived.values()))
    return sum(sent)


def packed(
    tensors: Sequence[torch.Tensor], asked: Iterable[tuple[int, int, int]], device: torch.device
) -> torch.Tensor:
    """Elements of many types in one message of bytes. Some are in host memory: step counts."""
    parts = (tensors[number][start : start + length] for number, start, length in asked)
    return torch.cat([part.to(device).contiguous().view(torch.uint8) for part in parts])


def unpack(message: torch.Tensor, items: Iterable[Wanted]) -> None:
    at = 0
    for item in items:
        content = message[at : at + item.nbytes].clone()  # aligned for its type
        item.fill(content.view(item.offer.dtype))
        at += item.nbytes


def send_and_receive(given: dict[int, torch.Tensor], arrived: dict[int, torch.Tensor]) -> None:
    """One message at most from each device to each other."""
    sends = [dist.P2POp(dist.isend, given[rank], rank) for rank in sorted(given)]
    receipts = [dist.P2POp(dist.irecv, arrived[rank], rank) for rank in sorted(arrived)]
    if sends or receipts:
        for work in dist.batch_isend_irecv([*receipts, *sends]):
            work.wait()
