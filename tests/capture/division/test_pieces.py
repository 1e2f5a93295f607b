"""Flat messages: what is packed, sent along dimension 0 and unpacked is what was wanted."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from capture.division.trials import piece
from torch import Tensor, fx

from piper.capture.graphs.division.calls import Emitter
from piper.capture.graphs.division.pieces import own_piece, pack, unpack
from piper.ir.placement.placements import Cut

CUTS = [Cut(dim, blocks) for dim, blocks in product((0, 1, 2), (1, 2))]


def emitter(rank: int, *tensors: Tensor) -> tuple[Emitter, list[fx.Node]]:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{k}") for k in range(len(tensors) + 1)]
    for node, tensor in zip(nodes, (*tensors, torch.tensor(rank)), strict=True):
        node.meta["val"] = tensor
    return Emitter(graph, {}, nodes[-1]), nodes


def made(function, tensor: Tensor, cut: Cut, ways: int, rank: int = 0) -> Tensor:
    emit, nodes = emitter(rank, tensor)
    return function(emit, nodes[0], cut, ways).meta["val"]


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_device_takes_its_own_piece(cut: Cut, ways: int) -> None:
    whole = torch.arange(12 * 24 * 12).view(12, 24, 12)

    for rank in range(ways):
        assert torch.equal(made(own_piece, whole, cut, ways, rank), piece(whole, cut, ways, rank))


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_is_packed_is_the_pieces_of_all_devices_in_a_row(cut: Cut, ways: int) -> None:
    whole = torch.arange(12 * 24 * 12).view(12, 24, 12)
    pieces = [piece(whole, cut, ways, rank) for rank in range(ways)]

    packed = made(pack, whole, cut, ways)

    assert torch.equal(packed, torch.cat(pieces))
    assert torch.equal(made(unpack, packed, cut, ways), whole)


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in CUTS for b in CUTS if a.dim != b.dim])
def test_an_all_to_all_cuts_along_another_dimension(old: Cut, new: Cut) -> None:
    whole, ways = torch.arange(12 * 24 * 12).view(12, 24, 12), 3

    packed = [made(pack, piece(whole, old, ways, rank), new, ways) for rank in range(ways)]
    sent = [one.chunk(ways) for one in packed]
    came = [torch.cat([one[rank] for one in sent]) for rank in range(ways)]

    for rank in range(ways):
        found = made(unpack, came[rank], old, ways)
        assert torch.equal(found, piece(whole, new, ways, rank))
